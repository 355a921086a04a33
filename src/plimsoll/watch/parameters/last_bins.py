"""Counts of the values of a tensor that end in the last bin of their block.

A block's scale is set by its largest magnitude. Where all values of a block lie close to each other, as the weights of
a norm do, they may all be rounded to the format's largest number, or clipped to it: the block then holds one number.
"""

import torch
from torch import Tensor
from torch.nn import functional

_MX = 32  # values of a block of MX formats
# E4M3 reaches 1.75 times its largest power of two. What is nearer to that than to 1.625 is rounded to it, and the rest
# above is clipped to it, since the block's scale is the power of two below its maximum.
_E4M3 = 1.6875
_E2M1 = 5 / 6  # of a block's maximum, which becomes 6; the number before is 4


@torch.no_grad()
def in_last_bin(x: Tensor, block: int) -> Tensor:
    """Return the number of values in their block's last bin, as a tensor of float64.

    Args:
        x: Values. Their blocks lie along the last axis, and the last one of a row may be short.
        block: Length of the blocks: 32 for MXFP8 (E4M3), 16 for NVFP4.
    """
    magnitudes = x.detach().abs().float()
    if not x.numel():
        return torch.zeros((), dtype=torch.float64, device=x.device)
    rows = magnitudes.reshape(-1, x.shape[-1]) if x.dim() else magnitudes.reshape(1, 1)
    padded = functional.pad(rows, (0, -rows.shape[-1] % block))
    blocks = padded.reshape(len(rows), -1, block)
    largest = blocks.amax(-1, keepdim=True)
    bin_ = _E4M3 * torch.exp2(torch.frexp(largest).exponent - 1) if block == _MX else _E2M1 * largest
    inside = (blocks >= bin_) & (largest > 0) & largest.isfinite()
    return inside.sum(dtype=torch.float64)
