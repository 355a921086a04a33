"""The scales that tensors are multiplied by before they are cast: powers of two, so that multiplying loses nothing.

A power of two also has an exact inverse, which the product is multiplied by. The price is up to one binade at the top
of the format, of the 18 (E4M3) or 32 (E5M2) that it has.
"""

from typing import Literal

import torch
from torch import Tensor

from plimsoll.formats import E4M3, E5M2, Format

Role = Literal["activations", "weights", "gradients"]
ROLES: tuple[Role, ...] = ("activations", "weights", "gradients")
FORMATS: dict[Role, Format] = {"activations": E4M3, "weights": E4M3, "gradients": E5M2}
DTYPES: dict[Role, torch.dtype] = {
    "activations": torch.float8_e4m3fn,
    "weights": torch.float8_e4m3fn,
    "gradients": torch.float8_e5m2,
}

_BIAS = 127
_FRACTION = (1 << 23) - 1
_TOP_FIELD = 255  # of NaN and Inf
_LEAST, _MOST = 1, 253  # exponent fields of a normal float32 whose inverse is normal too
_TOPS = {fmt: int(torch.tensor(fmt.max, dtype=torch.float32).view(torch.int32)) for fmt in (E4M3, E5M2)}


def absmax_of(x: Tensor) -> Tensor:
    """Return the largest magnitude as a 0-d float32; NaN where there is one, 0 where there are no values."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    lowest, highest = torch.aminmax(x)
    return torch.maximum(-lowest, highest).to(torch.float32)


def scale_for(absmax: Tensor, fmt: Format, margin: int) -> Tensor:
    """Return the largest power of two that leaves `margin` binades above a float32 absmax before `fmt` saturates.

    It is 1 where absmax is 0, or is not finite and so says nothing; and always between 2**-126 and 2**126. By integers:
    a logarithm would round values just below a power of two up to it.
    """
    bits = absmax.view(torch.int32)
    field, fraction = bits >> 23, bits & _FRACTION
    top = _TOPS[fmt]
    shift = (top >> 23) - field - (fraction > (top & _FRACTION)).to(torch.int32) - margin
    scale = ((shift + _BIAS).clamp(_LEAST, _MOST) << 23).view(torch.float32)
    return torch.where((bits == 0) | (field == _TOP_FIELD), 1.0, scale)
