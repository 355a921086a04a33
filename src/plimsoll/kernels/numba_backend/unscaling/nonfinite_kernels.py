"""Counting NaN and Inf on the CPU, as fast as memory gives the values.

A block's largest magnitude, an integer maximum, says whether there is anything to count; only then is the block, which
is in the cache by now, looked at again. A maximum is one instruction for a vector of values and needs no wider lanes,
as a count would.
"""

import numpy as np
from numba import carray

from plimsoll.kernels.numba_backend.compiling import inlined, kernel, pointer

_BLOCK = 4096


@inlined
def _count8(codes, limit, fnuz):
    """How many codes have a magnitude of `limit` or more; with `fnuz`, how many are 0x80, the one NaN there."""
    largest = np.uint8(0)
    if fnuz:
        for i in range(codes.size):
            largest = max(largest, np.uint8(codes[i] ^ np.uint8(0x7F)))
        return np.sum(codes == np.uint8(0x80)) if largest == np.uint8(0xFF) else 0
    for i in range(codes.size):
        largest = max(largest, np.uint8(codes[i] & np.uint8(0x7F)))
    if largest < limit:
        return 0
    found = 0
    for i in range(codes.size):
        found += np.uint8(codes[i] & np.uint8(0x7F)) >= limit
    return found


@inlined
def _count16(bits, limit):
    largest = np.uint16(0)
    for i in range(bits.size):
        largest = max(largest, np.uint16(bits[i] & np.uint16(0x7FFF)))
    found = 0
    if largest >= limit:
        for i in range(bits.size):
            found += np.uint16(bits[i] & np.uint16(0x7FFF)) >= limit
    return found


@inlined
def _count32(bits):
    largest = np.uint32(0)
    for i in range(bits.size):
        largest = max(largest, np.uint32(bits[i] & np.uint32(0x7FFF_FFFF)))
    found = 0
    if largest >= np.uint32(0x7F80_0000):
        for i in range(bits.size):
            found += np.uint32(bits[i] & np.uint32(0x7FFF_FFFF)) >= np.uint32(0x7F80_0000)
    return found


@inlined
def _count64(bits):
    largest = np.uint64(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & np.uint64(0x7FFF_FFFF_FFFF_FFFF))
    found = 0
    if largest >= np.uint64(0x7FF0_0000_0000_0000):
        for i in range(bits.size):
            found += (bits[i] & np.uint64(0x7FFF_FFFF_FFFF_FFFF)) >= np.uint64(0x7FF0_0000_0000_0000)
    return found


@kernel
def count_nonfinite(table, parts):
    """The number of NaN and Inf in a list of parts, three words each: address, length, encoding.

    An encoding is the bytes of a value, and shifted by 8 the magnitude from which on there are no numbers, 0 for FNUZ;
    of four and eight bytes there is one only.
    """
    words = carray(pointer(table), (parts, 3), np.int64)
    found = 0
    for part in range(parts):
        address, length = words[part, 0], words[part, 1]
        size, limit = words[part, 2] & 0xFF, words[part, 2] >> 8
        for start in range(0, length, _BLOCK):
            n = min(_BLOCK, length - start)
            place = pointer(address + start * size)
            if size == 4:
                found += _count32(carray(place, (n,), np.uint32))
            elif size == 2:
                found += _count16(carray(place, (n,), np.uint16), np.uint16(limit))
            elif size == 1:
                found += _count8(carray(place, (n,), np.uint8), np.uint8(limit), limit == 0)
            else:
                found += _count64(carray(place, (n,), np.uint64))
    return found
