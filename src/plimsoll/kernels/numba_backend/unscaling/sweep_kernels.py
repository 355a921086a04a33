"""Counting and multiplying float32 values, mostly by sweeps (`measuring.sweep`).

A sweep takes values whose magnitudes lie in one window of 32 binades, and zeros. The window is where values were last
found, so nearly all is swept; a block that leaves it, and what is no whole group, is measured by the parts of
`measuring.kernels` instead, and the window moves to it if it fits.
"""

import numpy as np

from plimsoll import row_layout
from plimsoll.kernels.numba_backend.compiling import inlined
from plimsoll.kernels.numba_backend.measuring.kernels import add_block, fold, key_of, scan
from plimsoll.kernels.numba_backend.measuring.sweep import (
    GROUP,
    LANES,
    MOMENTS,
    MOST_GROUPS,
    MOST_VALUES,
    PLANES,
    ones_of_bit,
    sweep_and_multiply,
)

BLOCK = GROUP * MOST_GROUPS
_PIECE = 4096  # values that are measured without a sweep at a time
_LEAST_SWEPT = 8192  # values of a tensor: below, moving what planes hold to the row takes longer than sweeping saves
_ROOM_ABOVE = 4  # binades: the largest of many blocks exceeds that of one by less than the smallest falls below

# What is known from block to block: the window's highest exponent; how many values planes hold, and the range of their
# exponents; the range of exponents that are in `counts`; then, by exponent modulo 32, what planes hold too much.
_TOP, _PENDING, _LOW, _HIGH, _COUNTED_LOW, _COUNTED_HIGH, _EXCESS = range(7)

_ZEROS, _HISTOGRAM = row_layout.ZEROS, row_layout.HISTOGRAM
_POSITIVE, _NEGATIVE, _NEAREST = row_layout.POSITIVE, row_layout.NEGATIVE, row_layout.NEAREST
_SUM = row_layout.SUM
_ABSMIN_TOP = row_layout.ABSMIN_TOP


@inlined
def new_room():
    """Memory for the functions below, from the first part of a call to the last."""
    state = np.zeros(_EXCESS + 32, np.int64)
    state[_TOP], state[_LOW], state[_COUNTED_LOW] = 131, 255, 255
    planes, counts = np.zeros((PLANES, LANES), np.uint32), np.zeros((4, 256), np.int64)
    extremes, moments = np.empty(4, np.uint32), np.empty(MOMENTS, np.float64)
    exponents, clean = np.empty(_PIECE, np.uint8), np.empty(_PIECE, np.uint32)
    return state, planes, counts, extremes, moments, exponents, clean


@inlined
def add_and_multiply(bits, n, whole, inverse, row, room):
    """Count at most `BLOCK` values and multiply them; return the largest before.

    It is a magnitude of float32. That is one of NaN or Inf where there are any. `whole` is the length of the tensor
    that they are of.
    """
    state, planes, extremes, moments = room[0], room[1], room[3], room[4]
    start, largest = 0, np.uint32(0)
    while start < n:
        groups = (n - start) // GROUP
        if groups and (state[_PENDING] or whole >= _LEAST_SWEPT):
            done = sweep_and_multiply(
                bits.ctypes.data + 4 * start, groups, state[_TOP], planes.ctypes.data, extremes.ctypes.data,
                moments.ctypes.data, inverse,
            )  # fmt: skip
            if done:
                largest = max(largest, _add_swept(GROUP * done, row, room))
                start += GROUP * done
            if done < groups:
                _take_back(bits[start : start + GROUP], state)
        if start < n:
            length = min(_PIECE, n - start)
            piece = bits[start : start + length]
            largest = max(largest, _add_piece(piece, length, row, room))
            if inverse != np.float32(1):
                multiply(piece, inverse, length)
            start += length
    return largest


@inlined
def _take_back(bits, state):
    """Notes that planes hold the exponents of a group that is not swept."""
    for i in range(GROUP):
        state[_EXCESS + np.int64((bits[i] >> np.uint32(23)) & np.uint32(31))] += 1
    state[_PENDING] += GROUP


@inlined
def multiply(bits, inverse, n):
    """Multiplies float32 values, given as bits, in place."""
    values = bits.view(np.float32)
    for i in range(n):
        values[i] = values[i] * inverse


@inlined
def _add_swept(done, row, room):
    """Counts what a sweep found into the row; returns the largest magnitude."""
    state, extremes, moments = room[0], room[3], room[4]
    sums = row.view(np.float64)
    for i in range(MOMENTS):
        sums[_SUM + i] += moments[i]
    row[_ZEROS] += extremes[3]
    state[_EXCESS] += extremes[3]
    positive, negative, smallest = extremes[0], np.uint32(0), extremes[2]
    if extremes[1] >> np.uint32(31):
        negative = np.uint32(extremes[1] & np.uint32(0x7FFF_FFFF))
    largest = max(positive, negative)
    if largest:
        row[_POSITIVE] = max(row[_POSITIVE], key_of(positive))
        row[_NEGATIVE] = max(row[_NEGATIVE], key_of(negative))
        row[_NEAREST] = max(row[_NEAREST], _ABSMIN_TOP - key_of(smallest))
        state[_LOW] = min(state[_LOW], np.int64(smallest >> np.uint32(23)))
        state[_HIGH] = max(state[_HIGH], np.int64(largest >> np.uint32(23)))
    state[_PENDING] += done
    if state[_PENDING] > MOST_VALUES - 2 * BLOCK:
        _flush(row, room)
    return largest


@inlined
def _add_piece(bits, n, row, room):
    """Count values that were not swept, and move the window if they are many and fit."""
    state, counts, exponents, clean = room[0], room[2], room[5], room[6]
    extremes = scan(bits, exponents, n)
    low, high = add_block(bits, n, extremes, exponents, clean, row, row.view(np.float64), counts)
    state[_COUNTED_LOW], state[_COUNTED_HIGH] = min(state[_COUNTED_LOW], low), max(state[_COUNTED_HIGH], high)
    if n >= GROUP and low <= high < low + 32 and not state[_TOP] - 32 < low <= high <= state[_TOP]:
        _flush(row, room)
        state[_TOP] = max(32, min(254, high + min(_ROOM_ABOVE, (31 - (high - low)) >> 1)))
    return max(extremes[0], extremes[1])


# Counts stay in planes until these are full, the window moves, or the tensor ends.
@inlined
def _flush(row, room):
    """Moves what planes hold to the row."""
    state, planes = room[0], room[1]
    used = 0
    while (state[_PENDING] // LANES) >> used:
        used += 1
    for exponent in range(state[_LOW], state[_HIGH] + 1):
        count = -state[_EXCESS + (exponent & 31)]
        for plane in range(used):
            count += ones_of_bit(planes.ctypes.data + 4 * LANES * plane, exponent & 31) << plane
        row[_HISTOGRAM + exponent + 22] += count  # index 0 is binade -149
    planes[:used] = 0
    state[_EXCESS:] = 0
    state[_PENDING], state[_LOW], state[_HIGH] = 0, 255, 0


@inlined
def end_part(row, room):
    """Moves all that is counted to the row."""
    state = room[0]
    if state[_PENDING]:
        _flush(row, room)
    fold(room[2], row, state[_COUNTED_LOW], state[_COUNTED_HIGH])
    state[_COUNTED_LOW], state[_COUNTED_HIGH] = 255, 0
