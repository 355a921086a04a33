"""Unscaling on the CPU: a block is measured, then multiplied while it is in the first-level cache.

Whether a value or a product is not finite follows from the block's largest magnitude alone: rounding is monotonic, so
if any product overflows, that one's does.

Numba's cache does not notice a change of `_measure_kernels`: after one, remove the compiled code of this file.
"""

import numpy as np
from numba import carray

from plimsoll.kernels import _layout as layout
from plimsoll.kernels._numba._jit import as_float32, as_float64, as_uint32, inlined, kernel, pointer
from plimsoll.kernels._numba._measure_kernels import (
    add_block,
    add_block64,
    fold,
    fold64,
    scan,
    scan_bfloat,
    scan_half,
)

_BLOCK = 4096
_COUNT, _WORDS = layout.COUNT, layout.NARROW
_INF32, _INF64 = 0x7F80_0000, 0x7FF0_0000_0000_0000


@inlined
def _overflows(largest, inverse, variant):
    """Whether the product of float32 magnitude bits is not finite as a float32 (-1), bfloat16 (0) or float16 (1)."""
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
def _multiply(bits, inverse, n):
    values = bits.view(np.float32)
    for i in range(n):
        values[i] = values[i] * inverse


@inlined
def _largest32(bits, n):
    largest = np.uint32(0)
    for i in range(n):
        largest = max(largest, np.uint32(bits[i] & np.uint32(0x7FFF_FFFF)))
    return largest


@inlined
def _to_bfloat(bits):
    """Bits of the bfloat16 nearest to float32 bits, ties to even; NaN stays NaN."""
    magnitude = bits & np.uint32(0x7FFF_FFFF)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    quiet = np.uint32(bits >> np.uint32(16)) | np.uint32(0x40)
    return np.uint16(quiet if magnitude > np.uint32(_INF32) else rounded)


@inlined
def _to_half(bits):
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


@inlined
def _narrow(wide, bits, inverse, variant, n):
    values = wide.view(np.float32)
    if variant == 1:
        for i in range(n):
            bits[i] = _to_half(as_uint32(values[i] * inverse))
    else:
        for i in range(n):
            bits[i] = _to_bfloat(as_uint32(values[i] * inverse))


@kernel
def unscale_float32(table, parts, inverse_address, found_address, _):
    exponents, clean = np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.uint32)
    counts = np.zeros((4, 256), np.int64)
    words = carray(pointer(table), (parts, 3), np.int64)
    inverse = carray(pointer(inverse_address), (1,), np.float32)[0]
    bad = False
    for part in range(parts):
        length, row_address = words[part, 1], words[part, 2]
        bits = carray(pointer(words[part, 0]), (length,), np.uint32)
        low, high = 255, 0
        for start in range(0, length, _BLOCK):
            n = min(_BLOCK, length - start)
            block = bits[start : start + n]
            if row_address:
                row = carray(pointer(row_address), (_WORDS,), np.int64)
                found = scan(block, exponents, n)
                largest = max(found[0], found[1])
                lowest, top = add_block(block, n, found, exponents, clean, row, row.view(np.float64), counts)
                low, high = min(low, lowest), max(high, top)
            else:
                largest = _largest32(block, n)
            bad |= _overflows(largest, inverse, -1)
            if inverse != np.float32(1):
                _multiply(block, inverse, n)
        if row_address:
            row = carray(pointer(row_address), (_WORDS,), np.int64)
            row[_COUNT] += length
            fold(counts, row, low, high)
    if bad:
        carray(pointer(found_address), (1,), np.float32)[0] = np.float32(1)


@kernel
def unscale_16bit(table, parts, inverse_address, found_address, variant):
    """Float16 is variant 1, bfloat16 is 0."""
    exponents, clean = np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.uint32)
    wide = np.empty(_BLOCK, np.uint32)
    counts = np.zeros((4, 256), np.int64)
    words = carray(pointer(table), (parts, 3), np.int64)
    inverse = carray(pointer(inverse_address), (1,), np.float32)[0]
    bad = False
    for part in range(parts):
        length, row_address = words[part, 1], words[part, 2]
        bits = carray(pointer(words[part, 0]), (length,), np.uint16)
        low, high = 255, 0
        for start in range(0, length, _BLOCK):
            n = min(_BLOCK, length - start)
            block = bits[start : start + n]
            if variant == 1:
                found = scan_half(block, wide, exponents, n)
            else:
                found = scan_bfloat(block, wide, exponents, n)
            bad |= _overflows(max(found[0], found[1]), inverse, variant)
            if row_address:
                row = carray(pointer(row_address), (_WORDS,), np.int64)
                lowest, top = add_block(wide, n, found, exponents, clean, row, row.view(np.float64), counts)
                low, high = min(low, lowest), max(high, top)
            if inverse != np.float32(1):
                _narrow(wide, block, inverse, variant, n)
        if row_address:
            row = carray(pointer(row_address), (_WORDS,), np.int64)
            row[_COUNT] += length
            fold(counts, row, low, high)
    if bad:
        carray(pointer(found_address), (1,), np.float32)[0] = np.float32(1)


@kernel
def unscale_float64(table, parts, inverse_address, found_address, _):
    clean, exponents, wide = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.uint16)
    counts = np.zeros((4, 2048), np.int64)
    words = carray(pointer(table), (parts, 3), np.int64)
    inverse = np.float64(carray(pointer(inverse_address), (1,), np.float32)[0])
    bad = False
    for part in range(parts):
        length, row_address = words[part, 1], words[part, 2]
        bits = carray(pointer(words[part, 0]), (length,), np.uint64)
        low, high = 2047, 0
        for start in range(0, length, _BLOCK):
            n = min(_BLOCK, length - start)
            block = bits[start : start + n]
            if row_address:
                row = carray(pointer(row_address), (_WORDS,), np.int64)
                sums = row.view(np.float64)
                lowest, top = add_block64(block, n, exponents, wide, clean, row, sums, counts)
                low, high = min(low, lowest), max(high, top)
            bad |= _multiply64(block, inverse, n)
        if row_address:
            row = carray(pointer(row_address), (_WORDS,), np.int64)
            row[_COUNT] += length
            fold64(counts, row, low, high)
    if bad:
        carray(pointer(found_address), (1,), np.float32)[0] = np.float32(1)


@inlined
def _multiply64(bits, inverse, n):
    """Multiplies a block; returns whether a value or a product is not finite."""
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
