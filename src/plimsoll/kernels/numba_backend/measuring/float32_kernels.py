"""Measuring float32 on the CPU: long tensors by sweeps, the rest in blocks.

See `sweep` and `kernels`. A sweep takes values whose magnitudes lie in one window of 32 binades, and zeros. A short
block goes first: where its values fit a window, and span so many binades that a sweep is faster, the sweep takes over
from there, until a group of values does not fit. The block that has it decides again.
"""

import numpy as np
from numba import carray

from plimsoll import row_layout
from plimsoll.kernels.numba_backend.compiling import inlined, kernel, pasted, pointer, stack, widen_half
from plimsoll.kernels.numba_backend.measuring.kernels import add_block, fold, key_of, part_of, row_at, scan
from plimsoll.kernels.numba_backend.measuring.sweep import (
    GROUP,
    LANES,
    MOMENTS,
    MOST_GROUPS,
    MOST_VALUES,
    PLANES,
    half_to_single,
    has_feature,
    ones_of_bit,
    sweep,
)

_BLOCK = 4096
_FIRST = 1024  # values of the block that goes first where a sweep may follow: enough to tell the window
LEAST_SWEPT = 16_384  # values of a tensor: below, moving what planes hold to the row takes longer than sweeping saves
_LEAST_BINADES = 12  # below, comparing with one binade after another is as fast
_ROOM_ABOVE = 4  # binades: the largest of many blocks exceeds that of one by less than the smallest falls below
_INF32 = 0x7F80_0000
FLOAT16 = 2

# What is known from block to block: the window's highest exponent; how many values planes hold; the range of exponents
# that are in `counts`; whether values to come are worth a sweep.
TOP, PENDING, LOW, HIGH, LIKELY = range(5)
# Behind the planes lie the extremes: largest bits of either sign, the smallest magnitude less one, the number of zeros.
EXTREMES, _NEGATIVE_BITS, _BEFORE, _FOUND_ZEROS = range(PLANES * LANES, PLANES * LANES + 4)
_SWEPT_WORDS = PLANES * LANES + 4

_COUNT, _ZEROS, _HISTOGRAM = row_layout.COUNT, row_layout.ZEROS, row_layout.HISTOGRAM
_POSITIVE, _NEGATIVE, _NEAREST = row_layout.POSITIVE, row_layout.NEGATIVE, row_layout.NEAREST
_SUM = row_layout.SUM
_ABSMIN_TOP = row_layout.ABSMIN_TOP

_state_memory, _swept_memory, _moments_memory = stack(8 * 5), stack(4 * _SWEPT_WORDS), stack(8 * MOMENTS)
_exponents_memory, _clean_memory, _wide_memory = stack(_BLOCK), stack(4 * _BLOCK), stack(4 * _BLOCK)


# Compiled code is kept by processor, so this choice is too.
from_half = half_to_single if has_feature("f16c") else widen_half


@pasted
def new_room():
    """Memory for the functions below: on the stack, but for counts."""
    state = carray(pointer(_state_memory()), (5,), np.int64)
    swept = carray(pointer(_swept_memory()), (_SWEPT_WORDS,), np.uint32)
    moments = carray(pointer(_moments_memory()), (MOMENTS,), np.float64)
    state[:], swept[:], moments[:] = 0, 0, 0.0
    state[TOP], state[LOW], swept[_BEFORE] = 131, 255, 0xFFFF_FFFF
    exponents = carray(pointer(_exponents_memory()), (_BLOCK,), np.uint8)
    clean = carray(pointer(_clean_memory()), (_BLOCK,), np.uint32)
    return state, swept, moments, np.zeros((4, 256), np.int64), exponents, clean


@kernel
def measure_floats(table, parts, address, length, row_address, fresh, kind):
    """Measure floats: float32 (kind 0), bfloat16 (1) or float16 (2), as in `kernels`."""
    room, wide = new_room(), _wide_memory()
    for part in range(parts):
        address, length, row_address = part_of(table, part, address, length, row_address)
        row = row_at(row_address, fresh)
        row[_COUNT] += length
        start = 0
        while start < length:
            n, bits = length - start, address + 4 * start
            if kind:
                n, bits = min(n, _BLOCK), wide
                widen(carray(pointer(wide), (_BLOCK,), np.uint32), address + 2 * start, kind, n)
            groups = min(n // GROUP, MOST_GROUPS)
            if groups and room[0][LIKELY]:
                start += _sweep_groups(bits, groups, row, room)
            else:
                n = min(_FIRST if start == 0 and length >= LEAST_SWEPT else _BLOCK, n)
                likely = _add_one_block(carray(pointer(bits), (n,), np.uint32), n, row, room)
                room[0][LIKELY] = likely and length >= LEAST_SWEPT
                start += n
        end_part(row, room)


# Widened and swept as float32, a tensor takes 0.98 (bfloat16) and 0.6 (float16) of the time of a scan of its own dtype.
@inlined
def widen(bits, address, kind, n):
    """Write the float32 bits of 16-bit values."""
    halves = carray(pointer(address), (n,), np.uint16)
    if kind == FLOAT16:
        for i in range(n):
            bits[i] = from_half(np.uint32(halves[i]))
    else:
        for i in range(n):
            bits[i] = np.uint32(np.uint32(halves[i]) << np.uint32(16))


@pasted
def _sweep_groups(address, groups, row, room):
    """Sweep over groups up to one outside the window; return how many values."""
    state, swept, moments = room[0], room[1], room[2]
    planes = swept.ctypes.data
    done = sweep(address, groups, state[TOP], planes, planes + 4 * EXTREMES, moments.ctypes.data)
    note_swept(done, groups, row, room)
    return GROUP * done


@pasted
def note_swept(done, groups, row, room):
    """Keeps count of what planes hold, and moves it to the row before they are full."""
    state = room[0]
    state[LIKELY] = done == groups
    state[PENDING] += GROUP * done
    if state[PENDING] > MOST_VALUES - GROUP * MOST_GROUPS:
        flush(row, room)


@pasted
def _add_one_block(bits, n, row, room):
    """Count values that are not swept, and move the window; return whether to sweep."""
    state, exponents = room[0], room[4]
    extremes = scan(bits, exponents, n)
    low, high = add_block(bits, n, extremes, exponents, room[5], row, row.view(np.float64), room[3])
    state[LOW], state[HIGH] = min(state[LOW], low), max(state[HIGH], high)
    return move_window(extremes, low, high, row, room)


@pasted
def move_window(extremes, low, high, row, room):
    """Return True if a block like this is swept; moves the window to its values."""
    state = room[0]
    if max(extremes[0], extremes[1]) >= np.uint32(_INF32) or not low + _LEAST_BINADES <= high < low + 32:
        return False
    if not state[TOP] - 32 < low <= high <= state[TOP]:
        if state[PENDING]:
            flush(row, room)
        state[TOP] = max(32, min(254, high + min(_ROOM_ABOVE, (31 - (high - low)) >> 1)))
    return True


@inlined
def flush(row, room):
    """Moves what was swept to the row."""
    state, swept, moments = room[0], room[1], room[2]
    used = 0
    while (state[PENDING] // LANES) >> used:
        used += 1
    sums, zeros = row.view(np.float64), np.int64(swept[_FOUND_ZEROS])
    for i in range(MOMENTS):
        sums[_SUM + i] += moments[i]
    row[_ZEROS] += zeros
    positive, negative = swept[EXTREMES], np.uint32(0)
    if swept[_NEGATIVE_BITS] >> np.uint32(31):
        negative = np.uint32(swept[_NEGATIVE_BITS] & np.uint32(0x7FFF_FFFF))
    largest, smallest = max(positive, negative), np.uint32(swept[_BEFORE] + np.uint32(1))
    if largest:
        row[_POSITIVE] = max(row[_POSITIVE], key_of(positive))
        row[_NEGATIVE] = max(row[_NEGATIVE], key_of(negative))
        row[_NEAREST] = max(row[_NEAREST], _ABSMIN_TOP - key_of(smallest))
        for exponent in range(np.int64(smallest >> np.uint32(23)), np.int64(largest >> np.uint32(23)) + 1):
            count = 0 if exponent & 31 else -zeros  # zeros were counted as exponent 0
            for plane in range(used):
                count += ones_of_bit(swept.ctypes.data + 4 * LANES * plane, exponent & 31) << plane
            row[_HISTOGRAM + exponent + 22] += count  # index 0 is binade -149
    swept[:], moments[:] = 0, 0.0
    swept[_BEFORE] = 0xFFFF_FFFF
    state[PENDING] = 0


@pasted
def end_part(row, room):
    """Moves all that is counted to the row."""
    state = room[0]
    if state[PENDING]:
        flush(row, room)
    fold(room[3], row, state[LOW], state[HIGH])
    state[LOW], state[HIGH], state[LIKELY] = 255, 0, 0
