"""The casting kernels: bits rounded into a format, as values or codes, with or without blocks."""

import functools
import math
import struct
from typing import NamedTuple

import triton
import triton.language as tl

from plimsoll.formats import Format
from plimsoll.formats.codec import nan_code
from plimsoll.kernels import philox as _noise
from plimsoll.kernels.operators import cast_spec
from plimsoll.kernels.triton_backend import input_bits

# -- rounding, and stochastic noise ------------------------------------------------------------------------------------

# The same code is for two widths: int32 bits of float32 where input and format fit there, else int64 bits of float64.
# It follows the reference (`torch_backend`) step by step, but for one thing: the value that a code stands for is not
# decoded from it. Rounding acts on the magnitude's own bits in place, where a carry into the exponent is right
# as it is.

NEAREST_EVEN, STOCHASTIC = tl.constexpr(cast_spec.NEAREST_EVEN), tl.constexpr(cast_spec.STOCHASTIC)
_NEAREST_AWAY, _TOWARD_ZERO = tl.constexpr(cast_spec.NEAREST_AWAY), tl.constexpr(cast_spec.TOWARD_ZERO)
_UP, _DOWN = tl.constexpr(cast_spec.UP), tl.constexpr(cast_spec.DOWN)
OVERFLOW_MAX, _OVERFLOW_INF = tl.constexpr(cast_spec.OVERFLOW_MAX), tl.constexpr(cast_spec.OVERFLOW_INF)
_ROUNDS = tl.constexpr(_noise.ROUNDS)
_FACTOR0, _FACTOR1 = tl.constexpr(_noise.MULTIPLIERS[0]), tl.constexpr(_noise.MULTIPLIERS[1])
_WEYL0, _WEYL1 = tl.constexpr(_noise.WEYL[0]), tl.constexpr(_noise.WEYL[1])


# A format reaches a kernel as a tuple of integers, `Fields` on the host, either arguments (elements: no format needs a
# kernel of its own) or constants (the output's dtype, scales of blocks).
class Fields(NamedTuple):
    """A format as `encode` reads it, in the bits of float64 (wide) or float32."""

    mantissa_bits: int
    lowest: int  # exponent field of the smallest normal value
    max_code: int
    max_bits: int
    quantum_bits: int  # of the spacing below the smallest normal value
    nan_code: int
    nan_bits: int  # of the value of nan_code: code 0's where the format has no NaN
    sign_shift: int


@functools.lru_cache(maxsize=512)
def fields(fmt: Format, wide: bool) -> Fields:
    """The fields of a format that fits into float64 (wide) or float32."""
    fraction_bits, bias = (52, 1023) if wide else (23, 127)
    top, fraction = fmt.max_code >> fmt.mantissa_bits, fmt.max_code & ((1 << fmt.mantissa_bits) - 1)
    lowest = fmt.min_exponent + bias
    nan = (2 * bias + 1) << fraction_bits | 1 << (fraction_bits - 1)
    return Fields(
        mantissa_bits=fmt.mantissa_bits,
        lowest=lowest,
        max_code=fmt.max_code,
        max_bits=(top + lowest - int(fmt.signed)) << fraction_bits | fraction << (fraction_bits - fmt.mantissa_bits),
        quantum_bits=_bits_of(math.ldexp(1.0, fmt.quantum_exponent), wide),
        nan_code=nan_code(fmt),
        nan_bits=nan if fmt.has_nan else 0 if fmt.signed else lowest << fraction_bits,
        sign_shift=fmt.bits - 1,
    )


def double_bits(value: float) -> int:
    """The bits of a float64, as int64."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _bits_of(value: float, wide: bool) -> int:
    return double_bits(value) if wide else int(struct.unpack("<i", struct.pack("<f", value))[0])


@triton.jit
def encode(
    bits, noise, fmt,
    ROUNDING: tl.constexpr, OVERFLOW: tl.constexpr, SIGNED: tl.constexpr, FNUZ: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The code of each value, and the bits of the value that the code stands for."""
    FRACTION_BITS: tl.constexpr = 52 if WIDE else 23
    IMPLICIT: tl.constexpr = 1 << (52 if WIDE else 23)
    INFINITY: tl.constexpr = 0x7FF0000000000000 if WIDE else 0x7F800000
    NAN: tl.constexpr = 0x7FF8000000000000 if WIDE else 0x7FC00000
    M, LOWEST, MAX_CODE, MAX_BITS = fmt[0], fmt[1], fmt[2], fmt[3]
    QUANTUM, NAN_CODE, NAN_BITS, SIGN_SHIFT = fmt[4], fmt[5], fmt[6], fmt[7]

    negative = bits < 0
    magnitude = bits & (0x7FFFFFFFFFFFFFFF if WIDE else 0x7FFFFFFF)
    exponent = tl.maximum(magnitude >> FRACTION_BITS, 1)
    significand = tl.where(magnitude >= IMPLICIT, (magnitude & (IMPLICIT - 1)) | IMPLICIT, magnitude)

    # Below the smallest normal value the spacing stays, so more of the significand's bits are dropped.
    shift = FRACTION_BITS - M + tl.maximum(LOWEST - exponent, 0)
    dropped = tl.minimum(shift, 62 if WIDE else 30)
    kept = significand >> dropped
    remainder = significand - (kept << dropped)
    code = (tl.maximum(exponent - LOWEST, 0) << M) + kept
    if not SIGNED:  # a pure exponent: the smallest value has code 0, and there is nothing below it
        below = exponent < LOWEST
        remainder = tl.where(below, 0, remainder)
        code = tl.where(below, 0, code - 1)
    away = _rounds_away(code, remainder, shift, dropped, negative, noise, ROUNDING, WIDE).to(bits.dtype)
    code += away
    if SIGNED:
        in_place = ((magnitude >> dropped) + away) << dropped
        rounded = tl.where(shift <= FRACTION_BITS, in_place, tl.where(away != 0, QUANTUM, 0))
    else:
        rounded = (code + LOWEST) << FRACTION_BITS

    infinite = magnitude == INFINITY
    over = (code > MAX_CODE) | infinite
    stays = _stays_finite(negative, ROUNDING) & ~infinite
    code = tl.where(over, MAX_CODE, code)
    rounded = tl.where(over, MAX_BITS, rounded)
    if OVERFLOW != OVERFLOW_MAX:
        beyond = over & ~stays
        code = tl.where(beyond, MAX_CODE + 1 if OVERFLOW == _OVERFLOW_INF else NAN_CODE, code)
        rounded = tl.where(beyond, INFINITY if OVERFLOW == _OVERFLOW_INF else NAN, rounded)

    broken = magnitude > INFINITY
    if SIGNED:
        signed = negative
        if FNUZ:  # the code of -0 is NaN's
            signed = negative & (code != 0)
        code = code | (signed.to(bits.dtype) << SIGN_SHIFT)
        rounded = tl.where(signed & (rounded <= INFINITY), rounded | (bits ^ magnitude), rounded)
    else:
        broken = broken | (negative & (magnitude != 0))
    return tl.where(broken, NAN_CODE, code), tl.where(broken, NAN_BITS, rounded)


@triton.jit
def _rounds_away(code, remainder, shift, dropped, negative, noise, ROUNDING: tl.constexpr, WIDE: tl.constexpr):
    inexact = remainder != 0
    half = (tl.full((), 1, remainder.dtype) << dropped) >> 1
    if ROUNDING == NEAREST_EVEN:
        return (remainder > half) | (inexact & (remainder == half) & ((code & 1) == 1))
    elif ROUNDING == _NEAREST_AWAY:
        return inexact & (remainder >= half)
    elif ROUNDING == _UP:
        return inexact & ~negative
    elif ROUNDING == _DOWN:
        return inexact & negative
    elif ROUNDING == STOCHASTIC:
        return noise.to(tl.int64) < _fraction(remainder, shift, WIDE)
    else:
        return inexact & False


@triton.jit
def _fraction(remainder, shift, WIDE: tl.constexpr):
    """Return floor(remainder / 2**shift * 2**32), with each shift inside the word."""
    MOST: tl.constexpr = 62 if WIDE else 30
    small = remainder >> tl.minimum(tl.maximum(shift - 32, 0), MOST)
    large = remainder.to(tl.int64) << tl.maximum(32 - shift, 0).to(tl.int64)
    return tl.where(shift > 32, small.to(tl.int64), large)


@triton.jit
def _stays_finite(negative, ROUNDING: tl.constexpr):
    """Return a mask of values beyond the largest that round to it by any rule."""
    if ROUNDING == _UP:
        return negative
    elif ROUNDING == _DOWN:
        return ~negative
    elif ROUNDING == _TOWARD_ZERO:
        return negative | True
    else:
        return negative & False


@triton.jit
def philox(key, counter):
    """Return four uint32 words of each int64 counter, as `kernels.philox` defines them."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    c0, c1 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    c2, c3 = c0 & 0, c0 & 0
    for _ in tl.static_range(_ROUNDS):
        high0, low0 = tl.umulhi(c0, _FACTOR0), c0 * _FACTOR0
        high1, low1 = tl.umulhi(c2, _FACTOR1), c2 * _FACTOR1
        c0, c1, c2, c3 = high1 ^ c1 ^ low, low1, high0 ^ c3 ^ high, low0
        low, high = low + _WEYL0, high + _WEYL1
    return c0, c1, c2, c3


@triton.jit
def noise_at(key, index):
    """Return each value's word by its index, for tiles that are no whole groups.

    A group has 1,024 values.
    """
    w0, w1, w2, w3 = philox(key, (index >> 10) * 256 + (index & 255))
    lane = (index >> 8) & 3
    return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))


# -- kernels -----------------------------------------------------------------------------------------------------------

# `cast_dense` gives each program some groups of 1,024 consecutive values, as `kernels.philox` numbers them: a Philox
# block is computed once, and its four words serve four runs of 256 values. Blocks of a power of two up to 256 lie
# inside such a run. `cast_ragged` is for blocks that do not: rows that end in a part of a block, or odd block lengths.
GROUPS = 4  # of 1,024 values to a program
WARPS = 4
RAGGED_VALUES = 1024  # to a program, at least one block

# How held values become the output's bits: they are them already, by an exact conversion, or by rounding into TARGET.
SAME, DOUBLE, ROUND = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

_FP64 = input_bits.FP64
_RUNTIME = [
    "x", "out", "scales", "count", "n", "factor", "factor_at", "tensor_scale", "seed", "key", "m", "lowest", "max_code",
    "max_bits", "quantum", "nan_code", "nan_bits", "sign_shift", "top", "bump",
]  # fmt: skip


# Whole programs load and store without masks, since only these become 16-byte instructions.
@triton.jit(do_not_specialize=[name for name in _RUNTIME if name not in ("x", "out", "scales")])
def cast_dense(
    x, out, scales, count: tl.int64, factor: tl.int64, factor_at, tensor_scale, seed: tl.int64, key,
    m: tl.int64, lowest: tl.int64, max_code: tl.int64, max_bits: tl.int64, quantum: tl.int64, nan_code: tl.int64,
    nan_bits: tl.int64, sign_shift: tl.int64, top: tl.int64, bump: tl.int64,
    KIND: tl.constexpr, WIDE: tl.constexpr, SCALED: tl.constexpr, ROUNDING: tl.constexpr, OVERFLOW: tl.constexpr,
    SIGNED: tl.constexpr, FNUZ: tl.constexpr, CARRIER: tl.constexpr, TARGET: tl.constexpr,
    CODES: tl.constexpr, NIBBLES: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Cast consecutive values, in blocks of BLOCK (0: none).

    BLOCK divides both 256 and the length of a row.
    """
    SPAN: tl.constexpr = GROUPS * 1024
    fmt = _format(m, lowest, max_code, max_bits, quantum, nan_code, nan_bits, sign_shift, WIDE)
    scale = _factor(factor, factor_at)
    start = tl.program_id(0).to(tl.int64) * SPAN
    group = tl.arange(0, GROUPS)[:, None]
    lane = tl.arange(0, 256)[None, :]
    whole = start + SPAN <= count
    if ROUNDING == STOCHASTIC:
        words = philox(_key(seed, key), ((start >> 10) + group) * 256 + lane)
    for word in tl.static_range(4):
        local = group * 1024 + (word * 256 + lane)
        there = start + local < count
        if whole:
            raw = tl.load(x + start + local)
        else:
            raw = tl.load(x + start + local, mask=there, other=0)
        noise = None
        if ROUNDING == STOCHASTIC:
            noise = words[word]
        if BLOCK:
            if ROUNDING == STOCHASTIC:
                noise = noise.reshape(GROUPS * 256 // BLOCK, BLOCK)
            result, codes = _cast_blocks(
                raw.reshape(GROUPS * 256 // BLOCK, BLOCK), noise, fmt, scale, tensor_scale, top, bump,
                KIND, SCALED, ROUNDING, FNUZ, CARRIER, TARGET, CODES, SCALE,
            )  # fmt: skip
            result = result.reshape(GROUPS, 256)
            if CODES:
                block = tl.arange(0, 256 // BLOCK)[None, :]
                at = group * (1024 // BLOCK) + (word * (256 // BLOCK) + block)
                codes = codes.reshape(GROUPS, 256 // BLOCK).to(scales.dtype.element_ty)
                tl.store(scales + start // BLOCK + at, codes, mask=start + at * BLOCK < count)
        else:
            result = _cast_values(
                raw, noise, fmt, scale, KIND, WIDE, SCALED, ROUNDING, OVERFLOW, SIGNED, FNUZ, CARRIER, TARGET, CODES
            )
        if NIBBLES:
            low, high = tl.split(tl.where(there, result, 0).reshape(GROUPS, 128, 2))
            at = group * 512 + (word * 128 + tl.arange(0, 128)[None, :])
            pairs = (low | (high << 4)).to(out.dtype.element_ty)
            tl.store(out + start // 2 + at, pairs, mask=start + at * 2 < count)
        else:
            result = result.to(out.dtype.element_ty)
            if whole:
                tl.store(out + start + local, result)
            else:
                tl.store(out + start + local, result, mask=there)


@triton.jit(do_not_specialize=[name for name in _RUNTIME if name not in ("x", "out", "scales")])
def cast_ragged(
    x, out, scales, count: tl.int64, n: tl.int64, factor: tl.int64, factor_at, tensor_scale, seed: tl.int64, key,
    m: tl.int64, lowest: tl.int64, max_code: tl.int64, max_bits: tl.int64, quantum: tl.int64, nan_code: tl.int64,
    nan_bits: tl.int64, sign_shift: tl.int64, top: tl.int64, bump: tl.int64,
    KIND: tl.constexpr, SCALED: tl.constexpr, ROUNDING: tl.constexpr, FNUZ: tl.constexpr, CARRIER: tl.constexpr,
    TARGET: tl.constexpr, CODES: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Cast `count` blocks along rows of n values, BLOCKS of them to a program.

    PADDED is the power of two from BLOCK on.
    """
    fmt = _format(m, lowest, max_code, max_bits, quantum, nan_code, nan_bits, sign_shift, True)
    across = tl.cdiv(n, BLOCK)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    row = block // across
    column = (block - row * across) * BLOCK
    width = tl.where(block < count, tl.minimum(n - column, BLOCK), 0)
    lane = tl.arange(0, PADDED)[None, :]
    index = (row * n + column)[:, None] + lane
    there = lane < width[:, None]
    raw = tl.load(x + index, mask=there, other=0)
    noise = None
    if ROUNDING == STOCHASTIC:
        noise = noise_at(_key(seed, key), index)
    result, codes = _cast_blocks(
        raw, noise, fmt, _factor(factor, factor_at), tensor_scale, top, bump,
        KIND, SCALED, ROUNDING, FNUZ, CARRIER, TARGET, CODES, SCALE,
    )  # fmt: skip
    tl.store(out + index, result.to(out.dtype.element_ty), mask=there)
    if CODES:
        tl.store(scales + block, codes.to(scales.dtype.element_ty), mask=block < count)


@triton.jit
def _format(m, lowest, max_code, max_bits, quantum, nan_code, nan_bits, sign_shift, WIDE: tl.constexpr):
    """The fields as a tuple, in the integer width that the kernel computes in."""
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    return (
        m.to(INT), lowest.to(INT), max_code.to(INT), max_bits.to(INT), quantum.to(INT), nan_code.to(INT),
        nan_bits.to(INT), sign_shift.to(INT),
    )  # fmt: skip


@triton.jit
def _factor(factor, factor_at):
    if factor_at is None:
        return factor.to(tl.int64).to(tl.float64, bitcast=True)
    else:
        return _load_double(factor_at)


@triton.jit
def _load_double(pointer):
    value = tl.load(pointer)
    if value.dtype != tl.float64:
        value = value.to(tl.float32).to(tl.float64)
    return value


@triton.jit
def _key(seed, key):
    if key is None:
        return seed.to(tl.int64)
    else:
        return tl.load(key)


@triton.jit
def _scaled_bits(raw, scale, KIND: tl.constexpr, SCALED: tl.constexpr):
    """The bits of the float64 to be cast."""
    values = input_bits.to_double(input_bits.decode(raw, KIND), KIND == _FP64)
    if SCALED:
        values = values * scale
    return values.to(tl.int64, bitcast=True)


@triton.jit
def _cast_values(
    raw, noise, fmt, scale,
    KIND: tl.constexpr, WIDE: tl.constexpr, SCALED: tl.constexpr, ROUNDING: tl.constexpr, OVERFLOW: tl.constexpr,
    SIGNED: tl.constexpr, FNUZ: tl.constexpr, CARRIER: tl.constexpr, TARGET: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    if WIDE:
        bits = _scaled_bits(raw, scale, KIND, SCALED)
    else:
        bits = input_bits.decode(raw, KIND)
    code, rounded = encode(bits, noise, fmt, ROUNDING, OVERFLOW, SIGNED, FNUZ, WIDE)
    if CODES:
        return code
    else:
        # NaN stays NaN also where the format has none.
        NAN: tl.constexpr = 0x7FF8000000000000 if WIDE else 0x7FC00000
        magnitude = bits & (0x7FFFFFFFFFFFFFFF if WIDE else 0x7FFFFFFF)
        rounded = tl.where(magnitude > (0x7FF0000000000000 if WIDE else 0x7F800000), NAN, rounded)
        if SCALED:
            rounded = (rounded.to(tl.float64, bitcast=True) / scale).to(tl.int64, bitcast=True)
        return _to_carrier(rounded, CARRIER, TARGET, WIDE)


@triton.jit
def _to_carrier(rounded, CARRIER: tl.constexpr, TARGET: tl.constexpr, WIDE: tl.constexpr):
    """Held values rounded once to nearest even into the output's dtype, as its bits."""
    if CARRIER == SAME:
        return rounded
    elif CARRIER == DOUBLE:
        return input_bits.to_double(rounded, WIDE).to(tl.int64, bitcast=True)
    else:
        code, _ = encode(rounded, None, TARGET, NEAREST_EVEN, TARGET[8], True, TARGET[9], WIDE)
        return code


@triton.jit
def _cast_blocks(
    raw, noise, fmt, scale, tensor_scale, top, bump,
    KIND: tl.constexpr, SCALED: tl.constexpr, ROUNDING: tl.constexpr, FNUZ: tl.constexpr, CARRIER: tl.constexpr,
    TARGET: tl.constexpr, CODES: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """A matrix of one block a row: values or element codes, and the scales' codes."""
    bits = _scaled_bits(raw, scale, KIND, SCALED)
    largest = tl.max(bits & 0x7FFFFFFFFFFFFFFF, axis=1)
    scale_codes, divisor = _block_scales(largest, fmt, tensor_scale, top, bump, SCALE)
    poisoned = largest >= 0x7FF0000000000000
    scale_codes = tl.where(poisoned, SCALE[5], scale_codes)
    values = bits.to(tl.float64, bitcast=True)
    if tensor_scale is None:  # a power of two: so is its inverse, and one division is enough for the block
        scaled = values * (1.0 / divisor)[:, None]
    else:
        # A block so small beside the tensor's maximum that its scale is zero holds only zeros.
        zero = (divisor == 0.0)[:, None]
        scaled = tl.where(zero, values * 0.0, values / tl.where(zero, 1.0, divisor[:, None]))
    code, rounded = encode(scaled.to(tl.int64, bitcast=True), noise, fmt, ROUNDING, OVERFLOW_MAX, True, FNUZ, True)
    if CODES:
        return tl.where(poisoned[:, None], 0, code), scale_codes
    else:
        products = rounded.to(tl.float64, bitcast=True) * divisor[:, None]
        if SCALED:
            products = products / scale
        product_bits = tl.where(poisoned[:, None], 0x7FF8000000000000, products.to(tl.int64, bitcast=True))
        return _to_carrier(product_bits, CARRIER, TARGET, True), scale_codes


@triton.jit
def _block_scales(largest, fmt, tensor_scale, top, bump, SCALE: tl.constexpr):
    """Return the code of each block's scale, and the factor of its elements.

    OCP MX 1.0 section 6.3, and NVFP4. `bump` is the smallest fraction of the largest magnitude that takes the next
    exponent: it makes the rule.
    """
    if tensor_scale is None:
        exponent = (largest >> 52) - 1023 - top + ((largest & 0xFFFFFFFFFFFFF) >= bump).to(tl.int64)
        exponent = tl.minimum(tl.maximum(exponent, SCALE[8]), SCALE[9])
        return exponent + SCALE[10], ((exponent + 1023) << 52).to(tl.float64, bitcast=True)
    else:
        whole = _load_double(tensor_scale)
        ideal = largest.to(tl.float64, bitcast=True) / (fmt[3].to(tl.float64, bitcast=True) * whole)
        ideal_bits = ideal.to(tl.int64, bitcast=True)
        codes, rounded = encode(ideal_bits, None, SCALE, SCALE[11], OVERFLOW_MAX, True, SCALE[12], True)
        return codes, rounded.to(tl.float64, bitcast=True) * whole
