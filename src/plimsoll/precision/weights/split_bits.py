"""A float32 number split into a bfloat16 number and the 16 bits that it lacks.

The bfloat16 number is the float32 one rounded to nearest, ties away from zero: add 0x8000 to the bits and keep the
upper half. A carry into the exponent is correct too. The lower half, read as a signed 16-bit number, is then the
distance from the rounded number in units of the float32's last place, in either direction:

    float32 bits = (bfloat16 bits << 16) + low        -0x8000 <= low <= 0x7FFF

Ties away make this exact: with ties to even a low half of 0x8000 would stand for two numbers.

There are two special cases. A NaN's bits could carry into another number's, so a NaN becomes the quiet one of its sign,
with low bits of zero. If the weight was changed from outside, the old low bits could turn a zero or an infinity into a
NaN. No float32 number has that pair, so `join` drops such low bits.
"""

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

_HALF = 0x8000
_QUIET_NAN = 0x7FC0_0000
_SIGN = -0x8000_0000
_BLOCK = 1 << 17


def split(value: Tensor, weight: Tensor, low: Tensor) -> None:
    """Write the float32 `value` as bfloat16 `weight` and int16 `low`. Overwrites the memory of `value`."""
    for part, high, rest in in_blocks(value, weight.view(torch.int16), low):
        bits = _without_nan(part).view(torch.int32)
        rest.copy_(bits)  # the lower half of an int32: the conversion drops the upper one
        high.copy_(bits.add_(_HALF).bitwise_right_shift_(16))


def join(weight: Tensor, low: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the float32 number that `split` took; for a weight changed since, one that still rounds to it."""
    out = torch.empty_like(low, dtype=torch.float32) if out is None else out
    for value, high, rest in in_blocks(out, weight, low):
        value.view(torch.int32).copy_(rest).add_(high.view(torch.int16), alpha=1 << 16)
        if not high.is_cpu or _may_have_nan(value):
            value.copy_(torch.where(value.isnan(), high.to(torch.float32), value))
    return out


def round_away(value: Tensor, weight: Tensor) -> None:
    """Write only the bfloat16 numbers: to nearest, ties away from zero."""
    for part, high in in_blocks(value, weight.view(torch.int16)):
        high.copy_(_without_nan(part).view(torch.int32).add(_HALF).bitwise_right_shift_(16))


def in_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield tensors of one shape piece by piece, so that intermediate results stay in the CPU's caches.

    On a GPU, or if a tensor is not contiguous, they come whole.
    """
    if tensors[0].numel() <= _BLOCK or not all(x.is_cpu and x.is_contiguous() for x in tensors):
        return iter([tensors])
    pieces: list[tuple[Tensor, ...]] = [cast("Any", x.view(-1)).split(_BLOCK) for x in tensors]
    return zip(*pieces, strict=True)


def _without_nan(value: Tensor) -> Tensor:
    """Return the value with quiet NaNs whose low bits are zero; a GPU is not asked whether there are any."""
    if value.is_cpu and not _may_have_nan(value):
        return value
    bits = value.view(torch.int32)
    return torch.where(value.isnan(), (bits & _SIGN) | _QUIET_NAN, bits).view(torch.float32)


def _may_have_nan(value: Tensor) -> bool:
    """Return whether there may be a NaN. The sum takes a tenth of the time of `isnan`; Inf - Inf counts too."""
    return math.isnan(float(value.sum()))
