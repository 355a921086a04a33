"""Unscaling on the CPU: gradients counted and multiplied in one pass over memory."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

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
from plimsoll.kernels.numba_backend.measuring.kernels import add_block, add_block64, fold, fold64, key_of, scan
from plimsoll.kernels.numba_backend.measuring.launch import in_shares
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
    single_to_half,
    sweep_and_multiply,
)
from plimsoll.kernels.numba_backend.memory import Words, empty_rows, pieces, row_addresses
from plimsoll.kernels.operators.checks import is_dense

# -- float32 values, mostly by sweeps (`measuring.sweep`) --------------------------------------------------------------

# A sweep takes values whose magnitudes lie in one window of 32 binades, and zeros. The window is where values were last
# found, so nearly all is swept; a block that leaves it, and what is no whole group, is measured by the parts of
# `measuring.kernels` instead, and the window moves to it if it fits.

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


# -- parts of the kernels ----------------------------------------------------------------------------------------------

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


# -- launch: a kernel call for each dtype, in even shares --------------------------------------------------------------

# Of each dtype: the kernel that measures and multiplies, the one that multiplies only, and the variant of both.
_KERNELS: dict[torch.dtype, tuple[Any, Any, int]] = {
    torch.float64: (unscale_float64, multiply_float64, -1),
    torch.float32: (unscale_float32, multiply_float32, -1),
    torch.bfloat16: (unscale_16bit, multiply_16bit, 0),
    torch.float16: (unscale_16bit, multiply_16bit, 1),
}
_Numbers = tuple[int, int]  # the addresses of inverse_scale and found_inf


def unscale(
    gradients: Sequence[Tensor], inverse_scale: Tensor, found_inf: Tensor, bank: Tensor | None, rows: Sequence[int]
) -> None:
    """Measure each gradient, multiply it, and set `found_inf` if any is not finite."""
    places = [0] * len(gradients) if bank is None else row_addresses(bank, rows)
    if bank is not None:
        empty_rows(places, bank.shape[1])
    numbers = inverse_scale.data_ptr(), found_inf.data_ptr()
    dense: dict[torch.dtype, list[int]] = {}
    for gradient, place in zip(gradients, places, strict=True):
        length = gradient.numel()
        if not length:
            continue
        if gradient.is_contiguous() or is_dense(gradient):
            dense.setdefault(gradient.dtype, []).extend((gradient.data_ptr(), length, place))
        else:
            _unscale_strided(gradient, place, numbers)
    for dtype, words in dense.items():
        in_shares(dtype, words, functools.partial(_launch, dtype, numbers))


def _launch(dtype: torch.dtype, numbers: _Numbers, words: list[int]) -> None:
    measuring, multiplying, variant = _KERNELS[dtype]
    kernel = measuring if words[2] else multiplying
    listed = Words(words)
    kernel(listed.address, len(words) // 3, *numbers, variant)


def _unscale_strided(gradient: Tensor, place: int, numbers: _Numbers) -> None:
    """Unscales a gradient with gaps in its memory, 64K values at a time."""
    for piece in pieces(gradient):
        dense = piece.contiguous()
        _launch(gradient.dtype, numbers, [dense.data_ptr(), dense.numel(), place])
        piece.copy_(dense)
