"""Rounding bits into a format, and stochastic noise, for all casting kernels.

The same code serves two widths: int32 bits of float32 where input and format fit there, else int64 bits of float64. It
follows the reference (`torch_backend.casting`) step by step, but for one thing: the value that a code stands for is not
decoded from it. Rounding acts on the magnitude's own bits in place, where a carry into the exponent is right as it is.
"""

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
    """Return the Philox4x32-10 blocks' four uint32 words of int64 counters.

    `kernels.philox` defines it.
    """
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
