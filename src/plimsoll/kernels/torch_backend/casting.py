"""Casting with plain torch operations: the reference, written to be read."""

import math
from typing import Any

import torch
from torch import Tensor

from plimsoll.formats import Format
from plimsoll.formats.codec import nan_code
from plimsoll.kernels import philox
from plimsoll.kernels.dtypes import FORMATS
from plimsoll.kernels.operators.cast_spec import (
    CEIL,
    DOWN,
    EVEN,
    NEAREST_AWAY,
    NEAREST_EVEN,
    OVERFLOW_INF,
    OVERFLOW_MAX,
    RCEIL,
    STOCHASTIC,
    TOWARD_ZERO,
    UP,
    BlockSpec,
    CastArguments,
    CastSpec,
)
from plimsoll.kernels.operators.fp8_cast import NAN_CODE, Cast, spec
from plimsoll.kernels.torch_backend.measuring import measure

_FRACTION = (1 << 52) - 1
_IMPLICIT = 1 << 52
_INF = 0x7FF0_0000_0000_0000
_MAGNITUDE = 0x7FFF_FFFF_FFFF_FFFF
_BIAS = 1023
_LARGEST_SHIFT = 62


def cast(x: Tensor, out: Tensor, arguments: CastArguments[CastSpec]) -> None:
    """Write the values of `x` in the format into `out` of any floating dtype.

    `out` has x's shape. With a scale, values are multiplied by it before and divided by it after, both in float64.
    """
    spec, factor = arguments.spec, _factor(arguments)
    values = x.to(torch.float64) * factor
    codes = to_codes(values, spec, _noise_for(x, spec.rounding, arguments))
    rounded = torch.where(values.isnan(), math.nan, from_codes(codes, spec.format))
    out.copy_(to_carrier(rounded / factor, out.dtype))


def pack(x: Tensor, codes: Tensor, arguments: CastArguments[CastSpec]) -> None:
    """Write the codes of matrix `x` into `codes`; 4-bit codes two a byte.

    The first of two codes takes the low half of the byte. A NaN where the format has none takes the code of zero.
    """
    spec = arguments.spec
    values = x.to(torch.float64) * _factor(arguments)
    codes.copy_(_dense(to_codes(values, spec, _noise_for(x, spec.rounding, arguments)), spec).to(codes.dtype))


def block_cast(x: Tensor, out: Tensor, arguments: CastArguments[BlockSpec]) -> None:
    """Write matrix `x` in the block format into `out`; blocks run along the rows."""
    codes, _, divisor = _quantize_blocks(x, arguments)
    rounded = from_codes(codes, arguments.spec.element.format) * divisor / _factor(arguments)
    out.copy_(to_carrier(rounded.flatten(1)[:, : x.shape[1]], out.dtype))


def block_pack(x: Tensor, codes: Tensor, scales: Tensor, arguments: CastArguments[BlockSpec]) -> None:
    """Write element codes (as `pack`) and one scale code a block.

    A block with NaN or Inf has codes of zero.
    """
    elements, scale_codes, divisor = _quantize_blocks(x, arguments)
    elements = torch.where(divisor.isnan(), 0, elements).flatten(1)[:, : x.shape[1]]
    codes.copy_(_dense(elements, arguments.spec.element).to(codes.dtype))
    scales.copy_(scale_codes.to(scales.dtype))


def _quantize_blocks(x: Tensor, arguments: CastArguments[BlockSpec]) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [rows, blocks, block], scale codes [rows, blocks], and factors.

    Elements are multiplied by the factors.
    """
    spec, tensor_scale = arguments.spec, arguments.tensor_scale
    ragged = -x.shape[1] % spec.block

    def in_blocks(flat: Tensor) -> Tensor:
        return torch.nn.functional.pad(flat, (0, ragged)).reshape(flat.shape[0], -1, spec.block)

    values = in_blocks(x.to(torch.float64) * _factor(arguments))
    noise = _noise_for(x, spec.element.rounding, arguments)
    noise = None if noise is None else in_blocks(noise)
    largest = (values.view(torch.int64) & _MAGNITUDE).amax(dim=2)
    if tensor_scale is None:
        exponent = _power_of_two_scale(largest, spec)
        scale_codes = exponent + spec.scale.bias
        divisor = _power_of_two(exponent)
    else:
        ideal = largest.view(torch.float64) / (spec.element.format.max * tensor_scale.to(torch.float64))
        scale_codes = to_codes(ideal, spec.scale, None)
        divisor = from_codes(scale_codes, spec.scale.format) * tensor_scale.to(torch.float64)
    poisoned = largest >= _INF
    scale_codes = torch.where(poisoned, nan_code(spec.scale.format), scale_codes)
    divisor = torch.where(poisoned, math.nan, divisor)[:, :, None]
    # A block so small beside the tensor's maximum that its scale is zero holds only zeros.
    scaled = torch.where(divisor == 0, values * 0.0, values / divisor)
    return to_codes(scaled, spec.element, noise), scale_codes, divisor


def _power_of_two_scale(largest: Tensor, spec: BlockSpec) -> Tensor:
    """Return the exponent of a block's scale from its largest magnitude's bits.

    OCP MX 1.0 section 6.3, and its variants.
    """
    element, scale = spec.element.format, spec.scale.format
    fraction = largest & _FRACTION
    # In integers throughout: a float log2 rounds a maximum one ulp below a power of two up to it.
    exponent = (largest >> 52) - _BIAS - element.max_exponent
    if spec.rule == CEIL:
        exponent = exponent + (fraction > 0)
    elif spec.rule == RCEIL:
        exponent = exponent + (fraction > _fraction_of(element.max))
    elif spec.rule == EVEN:
        half_ulp = 1 << (51 - element.mantissa_bits)
        exponent = exponent + (fraction + half_ulp >= _IMPLICIT)
    return exponent.clamp(scale.min_exponent, scale.max_exponent)


def _fraction_of(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float64).view(torch.int64)) & _FRACTION


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + _BIAS) << 52).view(torch.float64)


def _dense(codes: Tensor, spec: CastSpec) -> Tensor:
    if spec.format.bits != 4:
        return codes
    padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return padded[:, 0::2] | (padded[:, 1::2] << 4)


def _factor(arguments: CastArguments[Any]) -> float | Tensor:
    return arguments.scale if arguments.scale_tensor is None else arguments.scale_tensor.to(torch.float64)


def _noise_for(x: Tensor, rounding: int, arguments: CastArguments[Any]) -> Tensor | None:
    if rounding != STOCHASTIC:
        return None
    seed, key = arguments.seed, arguments.key
    key = torch.tensor(seed, dtype=torch.int64, device=x.device) if key is None else key.reshape(()).to(x.device)
    return philox.words(key, x.numel()).reshape(x.shape)


def to_codes(values: Tensor, spec: CastSpec, noise: Tensor | None) -> Tensor:
    """The format's code of each float64 value, as int64."""
    return _codes_of(values, spec.format, spec.rounding, spec.overflow, noise)


# Every cast goes through float64, which holds each value of every input dtype exactly, and rounds its bits as integers:
# a value becomes the format's code, and the code becomes the value. The codes of one sign are ordered as their values
# are, so rounding up is adding one to the code, whether that crosses from subnormal to normal, or into the next binade.
def _codes_of(values: Tensor, fmt: Format, rounding: int, overflow: int, noise: Tensor | None) -> Tensor:
    bits = values.contiguous().view(torch.int64)
    negative, magnitude = bits < 0, bits & _MAGNITUDE
    exponent = (magnitude >> 52).clamp(min=1)
    significand = (magnitude & _FRACTION) | torch.where(magnitude >= _IMPLICIT, _IMPLICIT, 0)

    # Below the smallest normal value the spacing stays, so more of the significand's bits are dropped.
    lowest = fmt.min_exponent + _BIAS
    shift = 52 - fmt.mantissa_bits + (lowest - exponent).clamp(min=0)
    dropped = shift.clamp(max=_LARGEST_SHIFT)
    quotient = significand >> dropped
    remainder = significand - (quotient << dropped)
    field = (exponent - lowest).clamp(min=0) << fmt.mantissa_bits
    code = field + quotient
    if not fmt.signed:  # a pure exponent: the smallest value has code 0, and there is nothing below it
        code = code - 1
        remainder = torch.where(exponent < lowest, 0, remainder)
        code = torch.where(exponent < lowest, 0, code)
    code = code + _rounds_away(rounding, code, remainder, shift, negative, noise)

    infinite = magnitude == _INF
    toward_zero = ~infinite & _is_toward_zero(rounding, negative)
    beyond = torch.where(toward_zero, fmt.max_code, _overflow_code(fmt, overflow))
    code = torch.where((code > fmt.max_code) | infinite, beyond, code)
    signed = code if not fmt.signed else code | (negative.to(torch.int64) << (fmt.bits - 1))
    if fmt.specials == "fnuz":  # the code of -0 is NaN's
        signed = torch.where(code == 0, code, signed)
    if not fmt.signed:
        signed = torch.where(negative & (magnitude != 0), nan_code(fmt), signed)
    return torch.where(magnitude > _INF, nan_code(fmt), signed)


def _rounds_away(
    rounding: int,
    code: Tensor,
    remainder: Tensor,
    shift: Tensor,
    negative: Tensor,
    noise: Tensor | None,
) -> Tensor:
    inexact = remainder != 0
    half = (1 << shift.clamp(max=_LARGEST_SHIFT)) >> 1
    if rounding == NEAREST_EVEN:
        away = (remainder > half) | (inexact & (remainder == half) & (code & 1 == 1))
    elif rounding == NEAREST_AWAY:
        away = inexact & (remainder >= half)
    elif rounding == UP:
        away = inexact & ~negative
    elif rounding == DOWN:
        away = inexact & negative
    elif noise is not None:
        fraction = remainder << (32 - shift).clamp(min=0)
        away = noise < torch.where(shift > 32, remainder >> (shift - 32).clamp(0, _LARGEST_SHIFT), fraction)
    else:
        away = torch.zeros_like(inexact)
    return away.to(torch.int64)


def _is_toward_zero(rounding: int, negative: Tensor) -> Tensor:
    """Return a mask of values beyond the largest that round to it by any rule."""
    if rounding == UP:
        return negative
    if rounding == DOWN:
        return ~negative
    return torch.full_like(negative, rounding == TOWARD_ZERO)


def _overflow_code(fmt: Format, overflow: int) -> int:
    if overflow == OVERFLOW_MAX:
        return fmt.max_code
    return fmt.max_code + 1 if overflow == OVERFLOW_INF else nan_code(fmt)


def from_codes(codes: Tensor, fmt: Format) -> Tensor:
    """The float64 value of each int64 code."""
    magnitude_bits = fmt.exponent_bits + fmt.mantissa_bits
    magnitude = codes & ((1 << magnitude_bits) - 1)
    field = magnitude >> fmt.mantissa_bits
    fraction = magnitude & ((1 << fmt.mantissa_bits) - 1)
    normal = ((field - fmt.bias + _BIAS) << 52) | (fraction << (52 - fmt.mantissa_bits))
    values = normal.view(torch.float64)
    if fmt.signed:
        # Two factors, since the spacing of float64's own subnormals is no normal float64 value.
        subnormal = fraction.to(torch.float64) * math.ldexp(1.0, -fmt.mantissa_bits) * fmt.smallest_normal
        values = torch.where(field == 0, subnormal, values)
        values = torch.where((codes >> magnitude_bits) & 1 == 1, -values, values)
    if fmt.has_inf:
        infinite = torch.where((codes >> magnitude_bits) & 1 == 1, -math.inf, math.inf)
        values = torch.where(magnitude == fmt.max_code + 1, infinite, values)
    if fmt.specials == "fnuz":
        return torch.where(codes == nan_code(fmt), math.nan, values)
    return torch.where(magnitude > fmt.max_code + int(fmt.has_inf), math.nan, values)


def to_carrier(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float64 values rounded once to nearest even into `dtype`.

    `.to` would go through float32 to the 16-bit ones.
    """
    if dtype == torch.float64:
        return values
    fmt = FORMATS[dtype]
    overflow = OVERFLOW_INF if fmt.has_inf else OVERFLOW_MAX
    rounded = from_codes(_codes_of(values, fmt, NEAREST_EVEN, overflow, None), fmt)
    return torch.where(values.isnan(), math.nan, rounded).to(dtype)


def fp8_cast(x: Tensor, cast: Cast) -> None:
    """Writes the codes of `x` and of its transpose, and counts x into its row."""
    if cast.bank is not None:
        measure([x], cast.bank, [cast.row], False, 0)
    scale = cast.scale if cast.scale_tensor is None else cast.scale_tensor.reshape(())
    values = x.to(torch.float32) * scale  # a number is rounded to float32 by torch
    codes = to_codes(values.to(torch.float64), spec(cast.dtype), None)
    codes = torch.where(values.isnan(), NAN_CODE, codes).to(torch.uint8)
    rows, columns = codes.shape
    if cast.codes is not None:
        cast.codes.zero_()[:rows, :columns] = codes
    if cast.columns is not None:
        cast.columns.zero_()[:columns, :rows] = codes.t()
