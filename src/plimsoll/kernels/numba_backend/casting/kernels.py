"""Casting on the CPU: integer rounding of float bits, in spans of 1,024 values.

Spans stay in the first-level cache. A span is widened to float32 or float64 bits, rounded as integers, and written in
the dtype of the output. Two widths of the same arithmetic: 32 bits for float32, bfloat16 and float16 input where
float32 reaches as far as the format, else 64 bits (float64 input, a scale that is no power of two, formats with more
exponent bits). Every loop is branch-free, so that LLVM makes vectors of it; what differs from format to format is
loop-invariant and comes in an array of numbers (`_plan`), so that one compiled kernel does for them all.

Block formats are the same arithmetic again: a power-of-two scale only moves the format's exponents (`_plan` calls them
lowest and largest), so nothing is multiplied.
"""

import math

import numpy as np
from numba import carray

from plimsoll.kernels import philox
from plimsoll.kernels.numba_backend.compiling import (
    as_float32,
    as_float64,
    as_uint64,
    inlined,
    kernel,
    pointer,
    shift_left,
    shift_right,
    widen_half,
)
from plimsoll.kernels.operators.cast_spec import CEIL, EVEN, RCEIL

SPAN = philox.GROUP

# Entries of a plan. Bits are of the working float (32 or 64 bits wide).
(
    MANTISSA,  # the format's mantissa bits
    LOWEST,  # biased exponent of its smallest normal value
    LARGEST,  # bits of its largest value
    BEYOND_POSITIVE,  # bits that a finite value above the largest becomes
    BEYOND_NEGATIVE,  # the same for a negative one (magnitude bits)
    INFINITE,  # magnitude bits that an infinity becomes
    QUANTUM,  # bits of its smallest positive value
    NO_MANTISSA,  # 1 where it has no mantissa bits: ties then go by the parity of the exponent
    KEEPS_SIGN,  # 1 where -0 exists
    AWAY,  # directed modes: 1 if positive values round away from zero, 2 if negative ones, 4 for ties away
    MAX_CODE,
    INF_CODE,
    NAN_CODE,
    SIGN_SHIFT,
    BEYOND_CODE,  # the code that a value above the largest becomes
) = range(15)  # fmt: skip

# Working floats: one, mantissa bits, sign, magnitude, fraction, implicit bit, Inf, quiet bit, largest shift.
_WORK32 = tuple(
    np.uint32(v) for v in (1, 23, 1 << 31, (1 << 31) - 1, (1 << 23) - 1, 1 << 23, 0xFF << 23, 1 << 22, 26)
)  # fmt: skip
_WORK64 = tuple(
    np.uint64(v) for v in (1, 52, 1 << 63, (1 << 63) - 1, (1 << 52) - 1, 1 << 52, 0x7FF << 52, 1 << 51, 55)
)  # fmt: skip


# -- rounding a span --------------------------------------------------------------------------------------------------
# `U` is the integer type of the work, to which every result is cut: Numba would widen 32-bit results to 64.


# Rounding a magnitude with significand s to a spacing of 2**d of its units: add what the mode asks for, shift right by
# d. One more bit than needed is kept below, so that d >= 1 and half the spacing is an integer.
@inlined
def _round_nearest_even(bits, n, plan, work):
    U = bits.dtype.type  # noqa: N806
    one, width, sign_mask, mask, fraction_mask, implicit, infinity, quiet, most = work
    mantissa, lowest, largest = U(plan[MANTISSA]), U(plan[LOWEST]), U(plan[LARGEST])
    beyond, quantum = U(plan[INFINITE]), U(plan[QUANTUM])  # infinities go where finite values beyond go
    parity = U(plan[NO_MANTISSA])
    sign_of_zero = sign_mask if plan[KEEPS_SIGN] else U(0)
    for i in range(n):
        value = bits[i]
        magnitude = U(value & mask)
        exponent = max(shift_right(magnitude, width), one)
        significand = U(U(magnitude & fraction_mask) | (implicit if magnitude >= implicit else U(0)))
        drop = min(U(width + one - mantissa + (U(lowest - exponent) if lowest > exponent else U(0))), most)
        doubled = shift_left(significand, one)
        above = U(exponent - lowest) if exponent > lowest else U(0)
        odd = U(U(shift_right(doubled, drop) + U(above & parity)) & one)
        kept = shift_right(U(doubled + shift_left(one, U(drop - one)) - one + odd), drop)
        rounded = U(magnitude + shift_left(kept, U(drop - one)) - significand)
        rounded = (quantum if kept else U(0)) if drop > width + one else rounded
        rounded = beyond if rounded > largest else rounded
        signed = U(rounded | U(value & (sign_mask if rounded else sign_of_zero)))
        bits[i] = U(infinity | quiet) if magnitude > infinity else signed


@inlined
def _round_other(bits, n, plan, work):
    """Nearest with ties away, toward zero, up and down, as the plan's AWAY says."""
    U = bits.dtype.type  # noqa: N806
    one, width, sign_mask, mask, fraction_mask, implicit, infinity, quiet, most = work
    mantissa, lowest, largest = U(plan[MANTISSA]), U(plan[LOWEST]), U(plan[LARGEST])
    beyond_positive, beyond_negative = U(plan[BEYOND_POSITIVE]), U(plan[BEYOND_NEGATIVE])
    infinite, quantum = U(plan[INFINITE]), U(plan[QUANTUM])
    away_positive, away_negative, ties_away = plan[AWAY] & 1 != 0, plan[AWAY] & 2 != 0, plan[AWAY] & 4 != 0
    sign_of_zero = sign_mask if plan[KEEPS_SIGN] else U(0)
    for i in range(n):
        value = bits[i]
        negative = value >= sign_mask
        magnitude = U(value & mask)
        exponent = max(shift_right(magnitude, width), one)
        significand = U(U(magnitude & fraction_mask) | (implicit if magnitude >= implicit else U(0)))
        drop = min(U(width + one - mantissa + (U(lowest - exponent) if lowest > exponent else U(0))), most)
        half = shift_left(one, U(drop - one))
        away = away_negative if negative else away_positive
        added = half if ties_away else (U(shift_left(half, one) - one) if away else U(0))
        kept = shift_right(U(shift_left(significand, one) + added), drop)
        rounded = U(magnitude + shift_left(kept, U(drop - one)) - significand)
        rounded = (quantum if kept else U(0)) if drop > width + one else rounded
        beyond = beyond_negative if negative else beyond_positive
        rounded = (infinite if magnitude == infinity else beyond) if rounded > largest else rounded
        signed = U(rounded | U(value & (sign_mask if rounded else sign_of_zero)))
        bits[i] = U(infinity | quiet) if magnitude > infinity else signed


@inlined
def _round_stochastic(bits, words, n, plan, work):
    """Away from zero where the word is below floor(discarded fraction * 2**32)."""
    U = bits.dtype.type  # noqa: N806
    one, width, sign_mask, mask, fraction_mask, implicit, infinity, quiet, most = work
    mantissa, lowest, largest = U(plan[MANTISSA]), U(plan[LOWEST]), U(plan[LARGEST])
    beyond, quantum = U(plan[INFINITE]), U(plan[QUANTUM])  # infinities go where finite values beyond go
    sign_of_zero = sign_mask if plan[KEEPS_SIGN] else U(0)
    for i in range(n):
        value = bits[i]
        magnitude = U(value & mask)
        exponent = max(shift_right(magnitude, width), one)
        significand = U(U(magnitude & fraction_mask) | (implicit if magnitude >= implicit else U(0)))
        dropped = U(width - mantissa + (U(lowest - exponent) if lowest > exponent else U(0)))
        drop = min(dropped, U(most - one))
        kept = shift_right(significand, drop)
        remainder = U(significand - shift_left(kept, drop))
        left, right = U(U(32) - min(dropped, U(32))), min(U(max(dropped, U(32)) - U(32)), U(width + one))
        threshold = shift_right(shift_left(remainder, left & U(63) if width > U(31) else left & U(31)), right)
        kept = U(kept + (one if U(words[i]) < threshold else U(0)))
        rounded = U(magnitude + shift_left(kept, drop) - significand)
        rounded = (quantum if kept else U(0)) if drop > width else rounded
        rounded = beyond if rounded > largest else rounded
        signed = U(rounded | U(value & (sign_mask if rounded else sign_of_zero)))
        bits[i] = U(infinity | quiet) if magnitude > infinity else signed


@inlined
def _round(bits, n, directed, plan, work):
    if directed is None:
        _round_nearest_even(bits, n, plan, work)
    else:
        _round_other(bits, n, plan, work)


@inlined
def _encode(bits, n, plan, work):
    """Puts the codes of values that the format holds in their place."""
    U = bits.dtype.type  # noqa: N806
    one, width, sign_mask, mask, fraction_mask, implicit, infinity, _, most = work
    mantissa, lowest, largest = U(plan[MANTISSA]), U(plan[LOWEST]), U(plan[LARGEST])
    inf_code, nan, sign = U(plan[INF_CODE]), U(plan[NAN_CODE]), shift_left(one, U(plan[SIGN_SHIFT]))
    for i in range(n):
        value = bits[i]
        magnitude = U(value & mask)
        exponent = max(shift_right(magnitude, width), one)
        significand = U(U(magnitude & fraction_mask) | (implicit if magnitude >= implicit else U(0)))
        below = U(lowest - exponent) if lowest > exponent else U(0)
        above = U(exponent - lowest) if exponent > lowest else U(0)
        kept = shift_right(significand, min(U(width - mantissa + below), most))
        code = U(shift_left(above, mantissa) + kept)
        code = inf_code if magnitude > largest else code
        code = nan if magnitude > infinity else code
        bits[i] = U(code | (sign if value >= sign_mask else U(0)))


@inlined
def _round_to_codes(bits, n, plan, work):
    """Round and encode in one: `_round_nearest_even`, then `_encode`.

    The code is what is kept, counted from its binade's first code.
    """
    U = bits.dtype.type  # noqa: N806
    one, width, sign_mask, mask, fraction_mask, implicit, infinity, _, most = work
    mantissa, lowest, largest = U(plan[MANTISSA]), U(plan[LOWEST]), U(plan[MAX_CODE])
    beyond, nan, sign = U(plan[BEYOND_CODE]), U(plan[NAN_CODE]), shift_left(one, U(plan[SIGN_SHIFT]))
    parity = U(plan[NO_MANTISSA])
    sign_of_zero = sign if plan[KEEPS_SIGN] else U(0)
    for i in range(n):
        value = bits[i]
        magnitude = U(value & mask)
        exponent = max(shift_right(magnitude, width), one)
        significand = U(U(magnitude & fraction_mask) | (implicit if magnitude >= implicit else U(0)))
        drop = min(U(width + one - mantissa + (U(lowest - exponent) if lowest > exponent else U(0))), most)
        doubled = shift_left(significand, one)
        above = U(exponent - lowest) if exponent > lowest else U(0)
        odd = U(U(shift_right(doubled, drop) + U(above & parity)) & one)
        kept = shift_right(U(doubled + shift_left(one, U(drop - one)) - one + odd), drop)
        code = U(shift_left(above, mantissa) + kept)
        code = beyond if code > largest else code
        signed = U(code | (U(0) if value < sign_mask else (sign if code else sign_of_zero)))
        bits[i] = nan if magnitude > infinity else signed


@inlined
def _round_and_encode(bits, n, directed, plan, work):
    if directed is None:
        _round_to_codes(bits, n, plan, work)
    else:
        _round_other(bits, n, plan, work)
        _encode(bits, n, plan, work)


# -- noise ------------------------------------------------------------------------------------------------------------

_LOW = np.uint64(0xFFFF_FFFF)
_MULTIPLIER0, _MULTIPLIER1 = (np.uint64(v) for v in philox.MULTIPLIERS)
_WEYL0, _WEYL1 = (np.uint64(v) for v in philox.WEYL)
_LANES, _ROUNDS = philox.LANES, philox.ROUNDS


@inlined
def _fill_noise(words, group, key):
    """Fill in the 1,024 words of one group (see `kernels.philox`).

    They are kept in 64-bit lanes while they multiply.
    """
    first, second, third, fourth = words[:256], words[256:512], words[512:768], words[768:1024]
    for lane in range(_LANES):
        counter = np.uint64(group) * np.uint64(_LANES) + np.uint64(lane)
        low, high = key & _LOW, key >> np.uint64(32)
        a, b, c, d = counter & _LOW, counter >> np.uint64(32), np.uint64(0), np.uint64(0)
        for _ in range(_ROUNDS):
            product0, product1 = (a & _LOW) * _MULTIPLIER0, (c & _LOW) * _MULTIPLIER1
            a, b, c, d = (
                (product1 >> np.uint64(32)) ^ b ^ low,
                product1,
                (product0 >> np.uint64(32)) ^ d ^ high,
                product0,
            )
            low, high = low + _WEYL0, high + _WEYL1
        first[lane] = np.uint32(a)
        second[lane] = np.uint32(b)
        third[lane] = np.uint32(c)
        fourth[lane] = np.uint32(d)


@inlined
def _noise_at(words, group_words, group, index, n, key):
    """Return the words of values `index` to `index + n`; caches group ``group[0]``'s."""
    if index % SPAN == 0 and n == SPAN:
        _fill_noise(words, index // SPAN, key)
        return
    for i in range(n):
        wanted = (index + i) // SPAN
        if wanted != group[0]:
            _fill_noise(group_words, wanted, key)
            group[0] = wanted
        words[i] = group_words[(index + i) % SPAN]


# -- reading and writing a span ---------------------------------------------------------------------------------------
# Dtypes by number: 0 float32, 1 bfloat16, 2 float16, 3 float64, and for output 4 one-byte and 5 two-byte codes.


@inlined
def _narrow_half(bits):
    """The float16 bits of a float32 whose value float16 holds."""
    magnitude = np.uint32(bits & np.uint32(0x7FFF_FFFF))
    sign = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000))
    normal = np.uint32(np.uint32(magnitude - np.uint32(112 << 23)) >> np.uint32(13))
    small = np.uint32(as_float32(magnitude) * np.float32(2.0**24)) if magnitude < np.uint32(113 << 23) else np.uint32(0)
    special = np.uint32(0x7C00) if magnitude == np.uint32(0x7F80_0000) else np.uint32(0x7E00)
    narrow = small if magnitude < np.uint32(113 << 23) else normal
    return np.uint16((special if magnitude >= np.uint32(0x7F80_0000) else narrow) | sign)


@inlined
def _read32(source, kind, start, n, bits):
    if kind == 0:
        wide = carray(pointer(source + 4 * start), (n,), np.uint32)
        for i in range(n):
            bits[i] = wide[i]
    else:
        narrow = carray(pointer(source + 2 * start), (n,), np.uint16)
        if kind == 1:
            for i in range(n):
                bits[i] = np.uint32(np.uint32(narrow[i]) << np.uint32(16))
        else:
            for i in range(n):
                bits[i] = widen_half(np.uint32(narrow[i]))


@inlined
def _write32(bits, target, kind, start, n):
    if kind == 0:
        wide = carray(pointer(target + 4 * start), (n,), np.uint32)
        for i in range(n):
            wide[i] = bits[i]
    else:
        narrow = carray(pointer(target + 2 * start), (n,), np.uint16)
        if kind == 1:
            for i in range(n):
                narrow[i] = np.uint16(np.uint32(bits[i]) >> np.uint32(16))
        else:
            for i in range(n):
                narrow[i] = _narrow_half(bits[i])


@inlined
def _write_codes(codes, target, kind, start, n):
    if kind == 4:
        narrow = carray(pointer(target + start), (n,), np.uint8)
        for i in range(n):
            narrow[i] = np.uint8(codes[i])
    else:
        wide = carray(pointer(target + 2 * start), (n,), np.uint16)
        for i in range(n):
            wide[i] = np.uint16(codes[i])


@inlined
def _read64(source, kind, start, n, factor, half, bits):
    """Float64 bits of the values times `factor`; `half` is room for `n` float32 bits."""
    values = bits.view(np.float64)
    if kind == 3:
        wide = carray(pointer(source + 8 * start), (n,), np.float64)
        for i in range(n):
            values[i] = wide[i]
    else:
        _read32(source, kind, start, n, half)
        singles = half.view(np.float32)
        for i in range(n):
            values[i] = np.float64(singles[i])
    if factor != 1.0:
        for i in range(n):
            values[i] *= factor


@inlined
def _write64(bits, target, kind, start, n, factor, carrier, half):
    """Write float64 values over `factor`, rounded once to the carrier.

    Its plan is empty for float64.
    """
    values = bits.view(np.float64)
    if factor != 1.0:
        for i in range(n):
            values[i] /= factor
    if kind == 3:
        wide = carray(pointer(target + 8 * start), (n,), np.float64)
        for i in range(n):
            wide[i] = values[i]
    else:
        _round_nearest_even(bits, n, carrier, _WORK64)
        singles = half.view(np.float32)
        for i in range(n):
            singles[i] = np.float32(values[i])
        _write32(half, target, kind, start, n)


# -- kernels ----------------------------------------------------------------------------------------------------------
# Numba leaves out the branch that an argument None rules out before it compiles, which halves the time of a first use:
# `code_kind` is None where values are written and `carrier` where codes are, `rule` where there is a `tensor_scale` and
# the other way round, `directed` for rounding to nearest even, `key` for all but stochastic rounding.


@kernel
def cast32(
    source, source_kind, target, target_kind, code_kind, first, last, offset, directed, plan, carrier, key,
):  # fmt: skip
    """Rounds parts of float32, or narrower, values to an element format."""
    bits, words, group_words = np.empty(SPAN, np.uint32), np.empty(SPAN, np.uint32), np.empty(SPAN, np.uint32)
    group = np.full(1, -1, np.int64)
    for start in range(first, last, SPAN):
        n = min(SPAN, last - start)
        _read32(source, source_kind, start, n, bits)
        if key is None:
            if code_kind is None:
                _round(bits, n, directed, plan, _WORK32)
            else:
                _round_and_encode(bits, n, directed, plan, _WORK32)
        else:
            _noise_at(words, group_words, group, offset + start, n, key)
            _round_stochastic(bits, words, n, plan, _WORK32)
            if code_kind is not None:
                _encode(bits, n, plan, _WORK32)
        if code_kind is None:
            if carrier is not None:
                if carrier.size:
                    _round_nearest_even(bits, n, carrier, _WORK32)
                _write32(bits, target, target_kind, start, n)
        else:
            _write_codes(bits, target, code_kind, start, n)


@kernel
def cast64(
    source, source_kind, target, target_kind, code_kind, first, last, offset, directed, plan, carrier, key, factor,
):  # fmt: skip
    """Rounds parts of float64 values to an element format."""
    bits, half = np.empty(SPAN, np.uint64), np.empty(SPAN, np.uint32)
    words, group_words = np.empty(SPAN, np.uint32), np.empty(SPAN, np.uint32)
    group = np.full(1, -1, np.int64)
    for start in range(first, last, SPAN):
        n = min(SPAN, last - start)
        _read64(source, source_kind, start, n, factor, half, bits)
        if key is None:
            if code_kind is None:
                _round(bits, n, directed, plan, _WORK64)
            else:
                _round_and_encode(bits, n, directed, plan, _WORK64)
        else:
            _noise_at(words, group_words, group, offset + start, n, key)
            _round_stochastic(bits, words, n, plan, _WORK64)
            if code_kind is not None:
                _encode(bits, n, plan, _WORK64)
        if code_kind is None:
            if carrier is not None:
                _write64(bits, target, target_kind, start, n, factor, carrier, half)
        else:
            _write_codes(bits, target, code_kind, start, n)


@inlined
def _power_of_two(exponent):
    """A normal float64 power of two, from its bits."""
    return as_float64((exponent + 1023) << 52)


@inlined
def _largest_of(bits, size, mask):
    U = bits.dtype.type  # noqa: N806
    largest = U(0)
    for i in range(size):
        largest = max(largest, U(bits[i] & mask))
    return largest


@inlined
def _multiply(values, size, factor):
    for i in range(size):
        values[i] *= factor


@inlined
def _scale_down(bits, values, n, block, factors, codes, rule, element, work, scale_numbers):
    """Divide each block by its power-of-two scale; note scale and code.

    They are NaN where a value is not finite.
    """
    U = bits.dtype.type  # noqa: N806
    one, width, _, mask, fraction_mask, implicit, infinity, _, _ = work
    largest_element = U(element[LARGEST])
    bias, lowest, highest, nan = scale_numbers[0], scale_numbers[1], scale_numbers[2], scale_numbers[3]
    half_ulp = shift_left(one, U(width - one - U(element[MANTISSA])))
    for index in range((n + block - 1) // block):
        inside, inner = bits[index * block : (index + 1) * block], values[index * block : (index + 1) * block]
        size = min(block, n - index * block)
        largest = _largest_of(inside, size, mask)
        if largest >= infinity:
            factors[index], codes[index] = math.nan, nan
            inside[:size] = U(0)
            continue
        # In integers throughout: a float log2 takes a maximum one ulp below a power of two for that power.
        fraction = U(largest & fraction_mask)
        exponent = np.int64(shift_right(largest, width)) - np.int64(shift_right(largest_element, width))
        if rule == CEIL:
            exponent += fraction > U(0)
        elif rule == RCEIL:
            exponent += fraction > U(largest_element & fraction_mask)
        elif rule == EVEN:
            exponent += U(fraction + half_ulp) >= implicit
        exponent = min(max(exponent, lowest), highest)
        factors[index], codes[index] = _power_of_two(exponent), exponent + bias
        _multiply(inner, size, values.dtype.type(_power_of_two(-exponent)))


@inlined
def _divide_by_scale(bits, values, n, block, factors, codes, tensor_scale, element, scale_numbers, upward):
    """As `_scale_down` for scales with a mantissa under a tensor scale, in float64."""
    largest_element = as_float64(np.uint64(element[LARGEST]))
    for index in range((n + block - 1) // block):
        inside, inner = bits[index * block : (index + 1) * block], values[index * block : (index + 1) * block]
        size = min(block, n - index * block)
        largest = _largest_of(inside, size, _WORK64[3])
        if largest >= _WORK64[6]:
            factors[index], codes[index] = math.nan, scale_numbers[3]
            inside[:size] = np.uint64(0)
            continue
        # The quotients' own rounding is below every tie: float32 numbers and 4-bit scales differ by 2**-31 or are
        # equal.
        scale, codes[index] = _round_scale(
            as_float64(largest) / (largest_element * tensor_scale), scale_numbers, upward
        )
        factor = scale * tensor_scale
        factors[index] = factor
        for i in range(size):  # a block so small beside the tensor's maximum that its scale is zero holds only zeros
            inner[i] = inner[i] / factor if factor > 0.0 else inner[i] * 0.0


@inlined
def _round_scale(ideal, scale_numbers, upward):
    """Return a positive number in a scale format with a mantissa, and its code.

    It is rounded to nearest even or upward.
    """
    lowest, highest_code, mantissa = scale_numbers[1], scale_numbers[4], scale_numbers[5]
    exponent = max(np.int64(as_uint64(ideal) >> np.uint64(52)) - 1023, lowest)
    exact = ideal * _power_of_two(mantissa - exponent)
    kept = np.int64(exact)
    rest = exact - kept
    if (rest > 0.0) if upward else (rest > 0.5 or (rest == 0.5 and kept & 1)):
        kept += 1
    # Codes are ordered as values are: counted from the code of the smallest normal, or of zero.
    code = min(kept + ((exponent - lowest) << mantissa), highest_code)
    field = code >> mantissa
    if field == 0:
        return code * _power_of_two(lowest - mantissa), code
    fraction = code & ((1 << mantissa) - 1)
    return ((1 << mantissa) + fraction) * _power_of_two(field - 1 + lowest - mantissa), code


@inlined
def _scale_up(values, n, block, factors):
    for index in range((n + block - 1) // block):
        inner, factor = values[index * block : (index + 1) * block], values.dtype.type(factors[index])
        _multiply(inner, min(block, n - index * block), factor)


@kernel
def cast_blocks32(
    source, source_kind, target, target_kind, code_kind, scales, first, last, columns, block, rule, directed, element,
    scale_numbers, carrier,
):  # fmt: skip
    """Round parts of float32 or narrower values to a block format, with scales."""
    span = max(SPAN // block, 1) * block
    bits = np.empty(span, np.uint32)
    values = bits.view(np.float32)
    factors, codes = np.empty(span // block, np.float64), np.empty(span // block, np.uint8)
    for row in range(first, last):
        for start in range(0, columns, span):
            n = min(span, columns - start)
            at = row * columns + start
            _read32(source, source_kind, at, n, bits)
            _scale_down(bits, values, n, block, factors, codes, rule, element, _WORK32, scale_numbers)
            if code_kind is None:
                if carrier is not None:
                    _round(bits, n, directed, element, _WORK32)
                    _scale_up(values, n, block, factors)
                    if carrier.size:
                        _round_nearest_even(bits, n, carrier, _WORK32)
                    _write32(bits, target, target_kind, at, n)
            else:
                _write_scales(codes, scales, row, start, n, columns, block)
                _round_and_encode(bits, n, directed, element, _WORK32)
                _write_any_codes(bits, target, code_kind, row, start, n, columns)


@kernel
def cast_blocks64(
    source, source_kind, target, target_kind, code_kind, scales, first, last, columns, block, rule, directed, element,
    scale_numbers, carrier, factor, tensor_scale, upward, key,
):  # fmt: skip
    """Round parts of values to a block format in float64, beyond `cast_blocks32`."""
    span = max(SPAN // block, 1) * block
    bits, half, words = np.empty(span, np.uint64), np.empty(span, np.uint32), np.empty(span, np.uint32)
    values = bits.view(np.float64)
    group_words, group = np.empty(SPAN, np.uint32), np.full(1, -1, np.int64)
    factors, codes = np.empty(span // block, np.float64), np.empty(span // block, np.uint8)
    for row in range(first, last):
        for start in range(0, columns, span):
            n = min(span, columns - start)
            at = row * columns + start
            _read64(source, source_kind, at, n, factor, half, bits)
            if rule is None:
                if tensor_scale is not None:
                    _divide_by_scale(
                        bits, values, n, block, factors, codes, tensor_scale, element, scale_numbers, upward
                    )
            else:
                _scale_down(bits, values, n, block, factors, codes, rule, element, _WORK64, scale_numbers)
            if key is None:
                if code_kind is None:
                    _round(bits, n, directed, element, _WORK64)
                else:
                    _round_and_encode(bits, n, directed, element, _WORK64)
            else:
                _noise_at(words, group_words, group, at, n, key)
                _round_stochastic(bits, words, n, element, _WORK64)
                if code_kind is not None:
                    _encode(bits, n, element, _WORK64)
            if code_kind is None:
                if carrier is not None:
                    _scale_up(values, n, block, factors)
                    _write64(bits, target, target_kind, at, n, factor, carrier, half)
            else:
                _write_scales(codes, scales, row, start, n, columns, block)
                _write_any_codes(bits, target, code_kind, row, start, n, columns)


@inlined
def _write_scales(codes, scales, row, start, n, columns, block):
    count = (n + block - 1) // block
    place = scales + row * ((columns + block - 1) // block) + start // block
    written = carray(pointer(place), (count,), np.uint8)
    for i in range(count):
        written[i] = codes[i]


@inlined
def _write_any_codes(codes, target, kind, row, start, n, columns):
    if kind == 6:
        _write_pairs(codes, target, row * ((columns + 1) // 2), start, n)
    else:
        _write_codes(codes, target, kind, row * columns + start, n)


@inlined
def _write_pairs(codes, target, row_start, start, n):
    """Write two 4-bit codes a byte, the first in the low half.

    `start` is odd only where blocks are: that half is added.
    """
    if start % 2:
        before = carray(pointer(target + row_start + start // 2), (1,), np.uint8)
        before[0] |= np.uint8(np.uint8(codes[0]) << np.uint8(4))
    rest = codes[start % 2 : n]
    pairs = carray(pointer(target + row_start + (start + 1) // 2), ((rest.size + 1) // 2,), np.uint8)
    for i in range(rest.size // 2):
        pairs[i] = np.uint8(np.uint8(rest[2 * i]) | np.uint8(np.uint8(rest[2 * i + 1]) << np.uint8(4)))
    if rest.size % 2:
        pairs[rest.size // 2] = np.uint8(rest[rest.size - 1])
