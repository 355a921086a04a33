"""The reference backend: plain torch operations, on any device, written to be read."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plimsoll import row_layout
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

QUEUES = False  # tensors are counted one by one


def describe() -> str:
    """One line for `plimsoll doctor`."""
    return f"torch {torch.__version__}, the reference, any device"


# -- measuring, counting, unscaling and merging ------------------------------------------------------------------------

_BIAS = 1023
_HIGHEST_BINADE = row_layout.LOWEST_BINADE + row_layout.BINADES - 1


def measure(tensors: Sequence[Tensor], bank: Tensor, rows: Sequence[int], accumulate: bool, block: int) -> None:
    """Count each tensor into its row; without `accumulate` the row starts empty."""
    if not accumulate:
        for row in rows:
            bank[row].zero_()
    for x, row in zip(tensors, rows, strict=True):
        _count(x, bank[row], block)


def measure_one(x: Tensor, bank: Tensor, row: int) -> None:
    """As `measure`, of one tensor into a row that is emptied first."""
    measure([x], bank, [row], False, 0)


def _count(x: Tensor, row: Tensor, block: int) -> None:
    values = x.to(torch.float64)
    bits = values.abs().contiguous().view(torch.int64)
    finite = bits < row_layout.ABSMIN_TOP
    nonzero = finite & (bits != 0)

    row[row_layout.COUNT] += x.numel()
    row[row_layout.ZEROS] += (bits == 0).sum()
    row[row_layout.NANS] += values.isnan().sum()
    row[row_layout.POS_INFS] += values.isposinf().sum()
    row[row_layout.NEG_INFS] += values.isneginf().sum()
    if x.numel():
        negative = values < 0
        extremes = (
            torch.where(nonzero & ~negative, bits, 0).max(),
            torch.where(nonzero & negative, bits, 0).max(),
            torch.where(nonzero, row_layout.ABSMIN_TOP - bits, 0).max(),
        )
        keys = row[row_layout.EXTREMES]
        keys.copy_(torch.maximum(keys, torch.stack(extremes)))
    finite_values = torch.where(finite, values, 0.0)
    squares = finite_values * finite_values
    sums = (finite_values.sum(), finite_values.abs().sum(), squares.sum(), (squares * squares).sum())
    row.view(torch.float64)[row_layout.SUMS] += torch.stack(sums)
    _tally(row, row_layout.HISTOGRAM, (_binades(bits) - row_layout.LOWEST_BINADE)[nonzero])
    if block:
        _measure_blocks(row, bits.reshape(x.shape), block)


def _measure_blocks(row: Tensor, bits: Tensor, block: int) -> None:
    bits = as_rows(bits)
    block = min(block, bits.shape[1])  # a longer one has a row of its own too
    ragged = -bits.shape[1] % block
    blocks = torch.nn.functional.pad(bits, (0, ragged)).reshape(-1, block)
    largest = blocks.amax(dim=1)
    finite = largest < row_layout.ABSMIN_TOP
    counted = (blocks != 0) & (blocks < row_layout.ABSMIN_TOP)
    top = _binades(largest)

    row[row_layout.BLOCKS] += blocks.shape[0]
    row[row_layout.ZERO_BLOCKS] += (largest == 0).sum()
    row[row_layout.NONFINITE_BLOCKS] += (~finite).sum()
    row[row_layout.POISONED] += (counted & ~finite[:, None]).sum()
    _tally(row, row_layout.DEPTHS, (top[:, None] - _binades(blocks))[counted & finite[:, None]])
    _tally(row, row_layout.MAXIMA, (top - row_layout.LOWEST_BINADE)[finite & (largest != 0)])


def _tally(row: Tensor, first: int, index: Tensor) -> None:
    row[first : first + row_layout.BINADES] += torch.bincount(index, minlength=row_layout.BINADES)


def _binades(bits: Tensor) -> Tensor:
    """floor(log2) of float64 magnitude bits, held to the range that a row counts."""
    return ((bits >> 52) - _BIAS).clamp(row_layout.LOWEST_BINADE, _HIGHEST_BINADE)


def as_rows(x: Tensor) -> Tensor:
    """Return `x` as a matrix of its last axis; a scalar is [1, 1], no values [0, 1]."""
    return x.reshape(-1, x.shape[-1]) if x.dim() and x.numel() else x.reshape(-1, 1)


def update(
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    pushes: Sequence[Tensor],
    bank: Tensor,
    rows: Sequence[int],
    moves: Tensor,
) -> None:
    """Count each change into its row of the bank, and the moves into that of `moves`."""
    for row in rows:
        bank[row].zero_()
        moves[row].zero_()
    for before, after, push, row in zip(old, new, pushes, rows, strict=True):
        dtype = torch.float64 if after.dtype == torch.float64 else torch.float32
        measure([after.to(dtype) - before.to(dtype)], bank, [row], True, 0)
        _count_moves(before.to(torch.float64), after.to(torch.float64), push, moves[row])


def _count_moves(before: Tensor, after: Tensor, push: Tensor, row: Tensor) -> None:
    row.view(torch.float64)[row_layout.OLD_SUMSQ] += before.square().sum()
    if push.numel():
        pushed = push.to(torch.float64) != 0  # a NaN is not zero
        same = (before == after) | (before.isnan() & after.isnan())
        row[row_layout.PUSHED] += pushed.sum()
        row[row_layout.UNMOVED] += (pushed & same).sum()


def count_nonfinite(tensors: Sequence[Tensor], counts: Tensor, index: int) -> None:
    """Adds the number of NaN and Inf values of all tensors to ``counts[index]``."""
    for x in tensors:
        counts[index] += (~x.to(torch.float64).isfinite()).sum()


def count_values(tensors: Sequence[Tensor]) -> int:
    """Return the number of NaN and Inf values of all tensors."""
    return sum(int((~x.to(torch.float64).isfinite()).sum()) for x in tensors)


def unscale(
    gradients: Sequence[Tensor], inverse_scale: Tensor, found_inf: Tensor, bank: Tensor | None, rows: Sequence[int]
) -> None:
    """Measure each gradient, multiply it, and set `found_inf` if any is not finite."""
    if bank is not None:
        measure(gradients, bank, rows, False, 0)
    inverse = inverse_scale.reshape(())
    for gradient in gradients:
        values = gradient.to(torch.float64 if gradient.dtype == torch.float64 else torch.float32)
        product = torch.where(inverse == 1, values, values * inverse).to(gradient.dtype)
        finite = values.isfinite().all() & product.isfinite().all()
        found_inf.masked_fill_(~finite, 1.0)
        gradient.copy_(product)


_COUNTS = (slice(0, row_layout.POSITIVE), slice(row_layout.HISTOGRAM, None))


def merge_rows(target: NDArray[np.int64], groups: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    """Adds each row j to row ``groups[j]`` of the target, by the layout's rules."""
    order = np.argsort(groups, kind="stable")
    groups_present, starts = np.unique(groups[order], return_index=True)
    if not groups_present.size:
        return
    rows = rows[order]
    for fields in _COUNTS:
        target[groups_present, fields] += np.add.reduceat(rows[:, fields], starts, axis=0)
    target[groups_present, row_layout.EXTREMES] = np.maximum(
        target[groups_present, row_layout.EXTREMES], np.maximum.reduceat(rows[:, row_layout.EXTREMES], starts, axis=0)
    )
    sums = np.add.reduceat(rows.view(np.float64)[:, row_layout.SUMS], starts, axis=0)
    target.view(np.float64)[groups_present, row_layout.SUMS] += sums


# -- casting -----------------------------------------------------------------------------------------------------------

_FRACTION = (1 << 52) - 1
_IMPLICIT = 1 << 52
_INF = 0x7FF0_0000_0000_0000
_MAGNITUDE = 0x7FFF_FFFF_FFFF_FFFF
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
    """Return codes [rows, blocks, block], scale codes [rows, blocks], elements' factors."""
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
    """Return the exponent of a block's scale from its largest magnitude's bits."""
    # OCP MX 1.0 section 6.3, and its variants.
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
    return int(torch.tensor(value, dtype=torch.float64, device="cpu").view(torch.int64)) & _FRACTION


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


# -- errors against a reference, on GPUs too ---------------------------------------------------------------------------

_COMPARED = 1 << 20  # values that are compared at a time: as float64 they take 8 MB a side


# A shadow step alone compares, whose second forward and backward take far longer than this.
def compare(values: Tensor, reference: Tensor, row: Tensor) -> None:
    """Add to a row of errors how values differ from a reference of the same shape."""
    pieces: list[tuple[Tensor, ...]] = [x.reshape(-1).split(_COMPARED) for x in (values, reference)]
    for low, wide in zip(*pieces, strict=True):
        y, x = low.to(torch.float64), wide.to(torch.float64)
        zero, here, there = y == 0, y.isfinite(), x.isfinite()
        both = here & there
        error = torch.where(both, y - x, 0.0)
        finite = torch.where(both, x, 0.0)
        parts = (
            both, error, error.square(), finite, finite.square(), error * finite, error.new_zeros(1), there & ~here,
            ~there,
            zero & (x.abs() > 0), zero & (x == 0),
        )  # fmt: skip
        row += torch.stack([part.sum(dtype=torch.float64) for part in parts])
        row[row_layout.LARGEST_ERROR] = torch.maximum(row[row_layout.LARGEST_ERROR], error.abs().amax())
