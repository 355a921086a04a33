"""Measuring the block record on the CPU: values below their block's largest."""

import numpy as np
from numba import carray

from plimsoll import row_layout
from plimsoll.kernels.numba_backend.compiling import as_uint32, as_uint64, inlined, kernel, pointer, widen_half

_INF32, _INF64 = 0x7F80_0000, 0x7FF0_0000_0000_0000

# Row fields as globals of this module, which kernels take as constants.
_BINADES = row_layout.BINADES
_BLOCKS, _ZERO_BLOCKS = row_layout.BLOCKS, row_layout.ZERO_BLOCKS
_NONFINITE_BLOCKS, _POISONED = row_layout.NONFINITE_BLOCKS, row_layout.POISONED
_DEPTHS, _MAXIMA = row_layout.DEPTHS, row_layout.MAXIMA


@kernel
def measure_blocks(address, kind, height, columns, block, row, table):
    """The block record of a matrix, of any dtype (`kind`, an index of _KINDS)."""
    index = np.empty(block, np.int64)  # binade index of each value; -1 for zero, -2 for NaN and Inf
    bits32 = carray(pointer(address), (height * columns,), np.uint32)
    bits16 = carray(pointer(address), (height * columns,), np.uint16)
    bits64 = carray(pointer(address), (height * columns,), np.uint64)
    codes = carray(pointer(address), (height * columns,), np.uint8)
    for line in range(height):
        for first in range(0, columns, block):
            n = min(block, columns - first)
            at = line * columns + first
            if kind == 0:
                for i in range(n):
                    index[i] = _binade_index(bits32[at + i] & np.uint32(0x7FFF_FFFF))
            elif kind == 1:
                for i in range(n):
                    index[i] = _binade_index(np.uint32(bits16[at + i] & np.uint32(0x7FFF)) << np.uint32(16))
            elif kind == 2:
                for i in range(n):
                    index[i] = _binade_index(widen_half(np.uint32(bits16[at + i] & np.uint32(0x7FFF))))
            elif kind == 3:
                for i in range(n):
                    index[i] = _binade_index64(bits64[at + i])
            else:
                for i in range(n):
                    index[i] = _binade_index64(as_uint64(table[codes[at + i]]))
            _add_one_block(index, n, row)


@inlined
def _binade_index(magnitude):
    if magnitude >= np.uint32(_INF32):
        return -2
    if magnitude < np.uint32(0x0080_0000):
        return np.int64(as_uint32(np.float32(magnitude)) >> np.uint32(23)) - 127 if magnitude else -1
    return np.int64(magnitude >> np.uint32(23)) + 22


@inlined
def _binade_index64(bits):
    magnitude = np.int64(bits & np.uint64(0x7FFF_FFFF_FFFF_FFFF))
    if magnitude >= _INF64:
        return -2
    if magnitude == 0:
        return -1
    return min(max((magnitude >> 52) - 1023 + 149, 0), _BINADES - 1)


@inlined
def _add_one_block(index, n, row):
    top, bad, nonzero = -1, False, 0
    for i in range(n):
        top = max(top, index[i])
        bad |= index[i] == -2
        nonzero += index[i] >= 0
    row[_BLOCKS] += 1
    if bad:
        row[_NONFINITE_BLOCKS] += 1
        row[_POISONED] += nonzero
    elif top < 0:
        row[_ZERO_BLOCKS] += 1
    else:
        row[_MAXIMA + top] += 1
        for i in range(n):
            if index[i] >= 0:
                row[_DEPTHS + top - index[i]] += 1
