"""Unscaling on the CPU: gradients counted and multiplied in one pass over memory."""

import numpy as np
from numba import carray

from plimsoll import row_layout
from plimsoll.kernels.numba_backend.compiling import (
    as_float32,
    as_float64,
    as_uint32,
    inlined,
    kernel,
    pointer,
    widen_half,
)
from plimsoll.kernels.numba_backend.measuring.kernels import add_block64, fold64
from plimsoll.kernels.numba_backend.measuring.sweep import half_to_single, has_feature, single_to_half
from plimsoll.kernels.numba_backend.unscaling.sweep_kernels import BLOCK, add_and_multiply, end_part, new_room

_HALF_BLOCK = 4096  # widened, it stays in the first-level cache
_COUNT, _WORDS = row_layout.COUNT, row_layout.NARROW
_INF32, _INF64 = 0x7F80_0000, 0x7FF0_0000_0000_0000


# Whether a value or a product is not finite follows from the largest magnitude alone: rounding is monotonic, so if any
# product overflows, that one's does. Sixteen-bit values are widened into a block of float32, which is treated like any,
# and rounded from there.
@inlined
def _overflows(largest, inverse, variant):
    """Return True if the product of float32 magnitude bits is not finite.

    `variant` names the dtype: float32 (-1), bfloat16 (0) or float16 (1).
    """
    if largest >= np.uint32(_INF32):
        return True
    product = as_uint32(as_float32(largest) * inverse) & np.uint32(0x7FFF_FFFF)
    limit = np.uint32(_INF32)
    if variant == 0:
        limit = np.uint32(0x7F7F_8000)
    elif variant == 1:
        limit = np.uint32(0x477F_F000)
    return product >= limit


@inlined
def _largest32(bits, n):
    largest = np.uint32(0)
    for i in range(n):
        largest = max(largest, np.uint32(bits[i] & np.uint32(0x7FFF_FFFF)))
    return largest


@inlined
def _finite_to_bfloat(bits):
    """As `_to_bfloat`, of what is no NaN."""
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd) >> np.uint32(16))


@inlined
def _to_bfloat(bits):
    """Bits of the bfloat16 nearest to float32 bits, ties to even; NaN stays NaN."""
    magnitude = bits & np.uint32(0x7FFF_FFFF)
    quiet = np.uint16(np.uint32(bits >> np.uint32(16)) | np.uint32(0x40))
    return quiet if magnitude > np.uint32(_INF32) else _finite_to_bfloat(bits)


@inlined
def half_by_integers(bits):
    """Bits of the float16 nearest to float32 bits, ties to even; NaN stays NaN."""
    magnitude = bits & np.uint32(0x7FFF_FFFF)
    sign = np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000)
    odd = (magnitude >> np.uint32(13)) & np.uint32(1)
    normal = np.uint32(magnitude - np.uint32(112 << 23) + np.uint32(0xFFF) + odd) >> np.uint32(13)
    # Adding 0.5 rounds to a multiple of 2**-24, the spacing of subnormals, and leaves their number in the low bits.
    small = np.uint32(as_uint32(as_float32(magnitude) + np.float32(0.5)) - np.uint32(126 << 23))
    half = small if magnitude < np.uint32(113 << 23) else normal
    half = np.uint32(0x7C00) if magnitude >= np.uint32(0x477F_F000) else half
    half = np.uint32(0x7E00) if magnitude > np.uint32(_INF32) else half
    return np.uint16(half | sign)


if has_feature("f16c"):  # compiled code is kept by processor, so this choice is too
    _from_half, _to_half = half_to_single, single_to_half
else:
    _from_half, _to_half = widen_half, half_by_integers


@inlined
def _widened(bits, variant):
    """Float32 bits of one value of sixteen bits."""
    return _from_half(np.uint32(bits)) if variant == 1 else np.uint32(np.uint32(bits) << np.uint32(16))


@inlined
def _largest16(bits, n):
    largest = np.uint16(0)
    for i in range(n):
        largest = max(largest, np.uint16(bits[i] & np.uint16(0x7FFF)))
    return largest


@inlined
def _multiply_halves(bits, inverse, variant, bad, n):
    if variant == 1:
        for i in range(n):
            bits[i] = _to_half(as_uint32(as_float32(_from_half(np.uint32(bits[i]))) * inverse))
    elif bad:
        for i in range(n):
            bits[i] = _to_bfloat(as_uint32(as_float32(np.uint32(np.uint32(bits[i]) << np.uint32(16))) * inverse))
    else:
        for i in range(n):
            value = as_float32(np.uint32(np.uint32(bits[i]) << np.uint32(16)))
            bits[i] = _finite_to_bfloat(as_uint32(value * inverse))


@inlined
def _widen(wide, bits, variant, n):
    if variant == 1:
        for i in range(n):
            wide[i] = _from_half(np.uint32(bits[i]))
    else:
        for i in range(n):
            wide[i] = np.uint32(np.uint32(bits[i]) << np.uint32(16))


@inlined
def _narrow(wide, bits, variant, bad, n):
    if variant == 1:
        for i in range(n):
            bits[i] = _to_half(wide[i])
    elif bad:
        for i in range(n):
            bits[i] = _to_bfloat(wide[i])
    else:
        for i in range(n):
            bits[i] = _finite_to_bfloat(wide[i])


@inlined
def _multiply_block(bits, inverse, n):
    """Multiplies float32 values; returns the largest magnitude before."""
    largest = np.uint32(0)
    values = bits.view(np.float32)
    for i in range(n):
        largest = max(largest, np.uint32(bits[i] & np.uint32(0x7FFF_FFFF)))
        values[i] = values[i] * inverse
    return largest


# -- kernels: each over a list of parts, three words each: address, length, and the address of the row -----------------
# Those without a row do the same, but for the measuring. `inverse_address` and `found_address` are those of one float32
# each. `variant` is 1 for float16, 0 for bfloat16, -1 for float32.


@inlined
def _raise_flag(address, bad):
    if bad:
        carray(pointer(address), (1,), np.float32)[0] = np.float32(1)


@kernel
def unscale_float32(table, parts, inverse_address, found_address, variant):
    """Multiply float32 parts in place and measure them; flag any that is not finite."""
    words = carray(pointer(table), (parts, 3), np.int64)
    inverse = carray(pointer(inverse_address), (1,), np.float32)[0]
    room = new_room()
    bad = False
    for part in range(parts):
        length = words[part, 1]
        bits = carray(pointer(words[part, 0]), (length,), np.uint32)
        row = carray(pointer(words[part, 2]), (_WORDS,), np.int64)
        row[_COUNT] += length
        for start in range(0, length, BLOCK):
            n = min(BLOCK, length - start)
            bad |= _overflows(
                add_and_multiply(bits[start : start + n], n, length, inverse, row, room), inverse, variant
            )
        end_part(row, room)
    _raise_flag(found_address, bad)


@kernel
def multiply_float32(table, parts, inverse_address, found_address, variant):
    """Multiplies float32 parts in place, and says whether one was not finite."""
    words = carray(pointer(table), (parts, 3), np.int64)
    inverse = carray(pointer(inverse_address), (1,), np.float32)[0]
    bad = False
    for part in range(parts):
        length = words[part, 1]
        bits = carray(pointer(words[part, 0]), (length,), np.uint32)
        for start in range(0, length, BLOCK):
            n = min(BLOCK, length - start)
            block = bits[start : start + n]
            largest = _largest32(block, n) if inverse == np.float32(1) else _multiply_block(block, inverse, n)
            bad |= _overflows(largest, inverse, variant)
    _raise_flag(found_address, bad)


@kernel
def unscale_16bit(table, parts, inverse_address, found_address, variant):
    """Multiply 16-bit parts in place and measure them; flag any that is not finite."""
    words = carray(pointer(table), (parts, 3), np.int64)
    inverse = carray(pointer(inverse_address), (1,), np.float32)[0]
    room, wide = new_room(), np.empty(_HALF_BLOCK, np.uint32)
    bad = False
    for part in range(parts):
        length = words[part, 1]
        bits = carray(pointer(words[part, 0]), (length,), np.uint16)
        row = carray(pointer(words[part, 2]), (_WORDS,), np.int64)
        row[_COUNT] += length
        for start in range(0, length, _HALF_BLOCK):
            n = min(_HALF_BLOCK, length - start)
            block = bits[start : start + n]
            _widen(wide, block, variant, n)
            overflows = _overflows(add_and_multiply(wide, n, length, inverse, row, room), inverse, variant)
            if inverse != np.float32(1):
                _narrow(wide, block, variant, overflows, n)
            bad |= overflows
        end_part(row, room)
    _raise_flag(found_address, bad)


@kernel
def multiply_16bit(table, parts, inverse_address, found_address, variant):
    """Multiplies 16-bit parts in place, and says whether one was not finite."""
    words = carray(pointer(table), (parts, 3), np.int64)
    inverse = carray(pointer(inverse_address), (1,), np.float32)[0]
    bad = False
    for part in range(parts):
        length = words[part, 1]
        bits = carray(pointer(words[part, 0]), (length,), np.uint16)
        for start in range(0, length, _HALF_BLOCK):
            n = min(_HALF_BLOCK, length - start)
            block = bits[start : start + n]
            largest = _widened(_largest16(block, n), variant)
            overflows = _overflows(largest, inverse, variant)
            if inverse != np.float32(1):
                _multiply_halves(block, inverse, variant, overflows, n)
            bad |= overflows
    _raise_flag(found_address, bad)


@kernel
def unscale_float64(table, parts, inverse_address, found_address, _):
    """Multiply float64 parts in place and measure them; flag any that is not finite."""
    words = carray(pointer(table), (parts, 3), np.int64)
    inverse = np.float64(carray(pointer(inverse_address), (1,), np.float32)[0])
    clean, exponents, wide = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint8), np.empty(BLOCK, np.uint16)
    counts = np.zeros((4, 2048), np.int64)
    bad = False
    for part in range(parts):
        length = words[part, 1]
        bits = carray(pointer(words[part, 0]), (length,), np.uint64)
        row = carray(pointer(words[part, 2]), (_WORDS,), np.int64)
        row[_COUNT] += length
        low, high = 2047, 0
        for start in range(0, length, BLOCK):
            n = min(BLOCK, length - start)
            block = bits[start : start + n]
            lowest, top = add_block64(block, n, exponents, wide, clean, row, row.view(np.float64), counts)
            low, high = min(low, lowest), max(high, top)
            bad |= _multiply64(block, inverse, n)
        fold64(counts, row, low, high)
    _raise_flag(found_address, bad)


@kernel
def multiply_float64(table, parts, inverse_address, found_address, _):
    """Multiplies float64 parts in place, and says whether one was not finite."""
    words = carray(pointer(table), (parts, 3), np.int64)
    inverse = np.float64(carray(pointer(inverse_address), (1,), np.float32)[0])
    bad = False
    for part in range(parts):
        length = words[part, 1]
        bits = carray(pointer(words[part, 0]), (length,), np.uint64)
        for start in range(0, length, BLOCK):
            n = min(BLOCK, length - start)
            bad |= _multiply64(bits[start : start + n], inverse, n)
    _raise_flag(found_address, bad)


@inlined
def _multiply64(bits, inverse, n):
    """Multiplies float64 values; returns whether one or a product is not finite."""
    largest = np.uint64(0)
    for i in range(n):
        largest = max(largest, np.uint64(bits[i] & np.uint64(0x7FFF_FFFF_FFFF_FFFF)))
    if inverse != 1.0:
        values = bits.view(np.float64)
        for i in range(n):
            values[i] = values[i] * inverse
    if largest >= np.uint64(_INF64):
        return True
    return not abs(as_float64(largest) * inverse) < np.inf
