"""Unscaling gradients with plain torch operations: the reference."""

from collections.abc import Sequence

import torch
from torch import Tensor

from plimsoll.kernels.torch_backend.measuring import measure


def unscale(
    gradients: Sequence[Tensor], inverse_scale: Tensor, found_inf: Tensor, bank: Tensor | None, rows: Sequence[int]
) -> None:
    """Measures each gradient into its row, multiplies it, and sets `found_inf` where anything is not finite."""
    if bank is not None:
        measure(gradients, bank, rows, False, 0)
    inverse = inverse_scale.reshape(())
    for gradient in gradients:
        values = gradient.to(torch.float64 if gradient.dtype == torch.float64 else torch.float32)
        product = torch.where(inverse == 1, values, values * inverse).to(gradient.dtype)
        finite = values.isfinite().all() & product.isfinite().all()
        found_inf.masked_fill_(~finite, 1.0)
        gradient.copy_(product)
