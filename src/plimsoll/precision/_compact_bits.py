"""A float32 number as a bfloat16 one and the 16 bits that it lacks.

The bfloat16 number is the float32 one rounded to nearest, ties away from zero: adding 0x8000 to the bits and keeping
the upper half does it, carries into the exponent included. The lower half, read as a signed 16-bit number, is then the
distance from the rounded number in units of the float32's last place, whichever way it was rounded:

    float32 bits = (bfloat16 bits << 16) + low        -0x8000 <= low <= 0x7FFF

Ties away is what makes this exact: with ties to even a low half of 0x8000 would stand for two numbers.

Two things need care. A NaN's bits can carry into another number's, so a NaN becomes the quiet one of its sign, with low
bits of zero. And low bits of another weight (the weight was changed from outside) can make a NaN of a zero or of an
infinity; no float32 number has that pair, so `join` drops such low bits.
"""

import torch
from torch import Tensor

_HALF = 0x8000
_QUIET_NAN = 0x7FC0_0000
_SIGN = -0x8000_0000


def split(value: Tensor, weight: Tensor, low: Tensor) -> None:
    """Writes the float32 `value` as bfloat16 `weight` and int16 `low`. The memory of `value` is used up."""
    bits = _without_nan(value).view(torch.int32)
    low.copy_(bits)  # an int32's lower half: the conversion drops the upper one
    weight.view(torch.int16).copy_(bits.add_(_HALF).bitwise_right_shift_(16))


def join(weight: Tensor, low: Tensor) -> Tensor:
    """The float32 number that `split` took apart; of a weight changed since, one that still rounds to the weight."""
    value = low.to(torch.int32).add_(weight.view(torch.int16), alpha=1 << 16).view(torch.float32)
    if weight.is_cpu and not bool(value.isnan().any()):
        return value
    return torch.where(value.isnan(), weight.to(torch.float32), value)


def _without_nan(value: Tensor) -> Tensor:
    """The value with quiet NaNs of low bits zero; on a GPU without asking whether there are any."""
    nans = value.isnan()
    if value.is_cpu and not bool(nans.any()):
        return value
    bits = value.view(torch.int32)
    return torch.where(nans, (bits & _SIGN) | _QUIET_NAN, bits).view(torch.float32)
