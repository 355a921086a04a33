"""Counting a weight update on the CPU: one pass over old, new and pushes.

Long float32 tensors with float32 pushes go by sweeps, chosen as `measuring.float32_kernels` chooses. The rest goes in
blocks of 1,024 values. (1) One vector loop subtracts, writes the difference into a buffer and scans it. (2) A byte a
value says whether its push is nonzero, and is doubled where the difference is zero; bytes are counted 32 at a time. (3)
The difference is measured as any tensor is, by the parts of `measuring.kernels`. All but the three inputs stays in the
first-level cache.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from plimsoll import row_layout
from plimsoll.kernels.dtypes import FORMATS
from plimsoll.kernels.numba_backend import threads
from plimsoll.kernels.numba_backend.compiling import (
    as_uint32,
    count_four,
    inlined,
    kernel,
    pasted,
    pointer,
    summing_kernel,
    widen_half,
)
from plimsoll.kernels.numba_backend.measuring.float32_kernels import (
    EXTREMES,
    HIGH,
    LEAST_SWEPT,
    LIKELY,
    LOW,
    TOP,
    end_part,
    move_window,
    new_room,
    note_swept,
)
from plimsoll.kernels.numba_backend.measuring.kernels import add_block, add_block64, fold64
from plimsoll.kernels.numba_backend.measuring.sweep import (
    DOUBLE,
    GROUP,
    LONG,
    MOST_GROUPS,
    SINGLES,
    WORD,
    WORDS,
    Exponents,
    ExtremesAndZeros,
    Moments,
    Vectors,
)
from plimsoll.kernels.numba_backend.memory import Words, empty_rows, merge_into, merge_moves, pieces, row_addresses
from plimsoll.kernels.operators.checks import alike

# -- sweep of `measuring.sweep` over float32 differences, which are never written --------------------------------------

# Each group of 256 values is subtracted into a kilobyte of scratch, tested against the window there, and counted from
# there; the three inputs are read once.

# ruff: noqa: ARG001  (an intrinsic names its arguments for its callers; what generates it takes them as a list)


class _Moves:
    """Count the values that were pushed, and those of them that have not moved."""

    def __init__(self, vectors: Vectors) -> None:
        self.vectors = vectors
        self.held = [vectors.variable(vectors.fill(0)) for _ in range(2)]
        self.group: list[Any] = []

    def begin_group(self) -> None:
        self.group = [self.vectors.builder.load(held) for held in self.held]

    def add(self, push: Any, difference: Any) -> None:
        vectors, builder, zero = self.vectors, self.vectors.builder, self.vectors.fill(0)
        pushed = builder.icmp_unsigned("!=", vectors.magnitude(push), zero)
        unmoved = builder.and_(pushed, builder.icmp_unsigned("==", vectors.magnitude(difference), zero))
        self.group = [
            builder.add(count, builder.zext(found, WORDS))
            for count, found in zip(self.group, (pushed, unmoved), strict=True)
        ]

    def end_group(self) -> None:
        for held, count in zip(self.held, self.group, strict=True):
            self.vectors.builder.store(count, held)

    def end(self, address: Any) -> None:
        """Adds them to what is in memory."""
        vectors, builder = self.vectors, self.vectors.builder
        for index, held in zip((row_layout.PUSHED, row_layout.UNMOVED), self.held, strict=True):
            place = vectors.at(address, LONG, index)
            found = builder.zext(vectors.reduce(builder.load(held), builder.add), LONG)
            builder.store(builder.add(builder.load(place), found), place)


class _Squares:
    """The sum of squares in float64, in two registers."""

    def __init__(self, vectors: Vectors) -> None:
        self.vectors = vectors
        self.held = [vectors.no_doubles() for _ in range(2)]

    def add(self, pointer: Any) -> None:
        """Adds sixteen values."""
        builder = self.vectors.builder
        for part, value in enumerate(self.vectors.doubles(pointer)):
            held = self.held[part % 2]
            builder.store(self.vectors.multiply_add(value, value, builder.load(held)), held)

    def end(self, place: Any) -> None:
        """Adds it to what is in memory."""
        vectors, builder = self.vectors, self.vectors.builder
        both = builder.fadd(*(builder.load(held) for held in self.held))
        builder.store(builder.fadd(builder.load(place), vectors.reduce(both, builder.fadd)), place)


@intrinsic
def sweep_updates(
    _: Any, old: Any, new: Any, push: Any, groups: Any, top: Any, planes: Any, extremes: Any, moments: Any, moves: Any
) -> Any:
    """Sweep as `sweep`, over ``new - old``, which is 0 if both are the same value.

    It adds to the row of `moves` how many pushes are not zero, how many of these left their value the same, and the
    squares of the old values.
    """

    def generate(context: Any, builder: Any, __: Any, arguments: Any) -> Any:
        old, new, push, groups, top, planes, extremes, moments, moves = arguments
        vectors = Vectors(builder)
        counting, ends, sums = Exponents(vectors), ExtremesAndZeros(vectors, top), Moments(vectors)
        moved, squares = _Moves(vectors), _Squares(vectors)
        scratch = cgutils.alloca_once(builder, ir.ArrayType(WORD, GROUP))
        scratch.align = 64
        scratch = builder.gep(scratch, [ir.Constant(LONG, 0), ir.Constant(LONG, 0)])
        firsts = [vectors.at(address, WORD) for address in (old, new, push)]
        done = vectors.variable(groups)
        with cgutils.for_range(builder, groups) as loop:
            shift = builder.mul(loop.index, ir.Constant(LONG, GROUP))
            starts = [builder.gep(first, [shift]) for first in firsts]
            ends.begin_group()
            moved.begin_group()
            streams = zip(*(vectors.group(start) for start in (scratch, *starts)), strict=True)
            for (place, _), (_, before), (_, after), (_, pushed) in streams:
                difference = builder.fsub(builder.bitcast(after, SINGLES), builder.bitcast(before, SINGLES))
                difference = builder.bitcast(difference, WORDS)
                builder.store(difference, builder.bitcast(place, WORDS.as_pointer()), align=64)
                ends.add(difference)
                moved.add(pushed, difference)

            def leave() -> None:
                builder.store(loop.index, done)
                loop.do_break()

            ends.test_group(leave)
            ends.end_group()
            moved.end_group()
            for (place, value), (before, _) in zip(vectors.group(scratch), vectors.group(starts[0]), strict=True):
                counting.add(value)
                sums.add(place)
                squares.add(before)
            counting.end_group()
        counting.end(planes)
        ends.end(extremes)
        sums.end(moments, onto=True)
        moved.end(moves)
        squares.end(vectors.at(moves, DOUBLE, row_layout.OLD_SUMSQ))
        return builder.load(done)

    return types.int64(*[types.int64] * 9), generate


# -- kernels -----------------------------------------------------------------------------------------------------------

_BLOCK = 1024  # three inputs and a difference of 4,096 values would not fit the first-level cache
_COUNT, _WORDS = row_layout.COUNT, row_layout.NARROW
_PUSHED, _UNMOVED, _OLD_SUMSQ, _MOVES = row_layout.PUSHED, row_layout.UNMOVED, row_layout.OLD_SUMSQ, row_layout.MOVES
_INF32, _INF64 = 0x7F80_0000, 0x7FF0_0000_0000_0000
_LAST_SUBNORMAL32 = 0x007F_FFFF

# Of a part: addresses of old, new and push; how to read the push; length; row address in bank and in moves.
PART_WORDS = 7
_FLOAT16 = 2


@inlined
def _find_pushes(flags, address, reading, n):
    """Writes 1 for each push that is not zero, else 0.

    `reading` is the bytes of a push, 9 for a byte whose sign bit alone is NaN; 0 where pushes are not known.
    """
    if reading == 4:
        words = carray(pointer(address), (n,), np.uint32)
        for i in range(n):
            flags[i] = np.uint8(1) if words[i] & np.uint32(0x7FFF_FFFF) else np.uint8(0)
    elif reading == 2:
        halves = carray(pointer(address), (n,), np.uint16)
        for i in range(n):
            flags[i] = np.uint8(1) if halves[i] & np.uint16(0x7FFF) else np.uint8(0)
    elif reading == 8:
        longs = carray(pointer(address), (n,), np.uint64)
        for i in range(n):
            flags[i] = np.uint8(1) if longs[i] & np.uint64(0x7FFF_FFFF_FFFF_FFFF) else np.uint8(0)
    else:
        mask = np.uint8(0x7F if reading == 1 else 0xFF)
        codes = carray(pointer(address), (n,), np.uint8)
        for i in range(n):
            flags[i] = np.uint8(1) if codes[i] & mask else np.uint8(0)


@inlined
def _widen(bits, address, kind, n):
    halves = carray(pointer(address), (n,), np.uint16)
    if kind == _FLOAT16:
        for i in range(n):
            bits[i] = widen_half(np.uint32(halves[i]))
    else:
        for i in range(n):
            bits[i] = np.uint32(np.uint32(halves[i]) << np.uint32(16))


# With `torch.set_flush_denormal(True)` a difference below the smallest normal number is zero, here as in torch.
@inlined
def _subtract(old, new, difference, exponents, n):
    """Writes ``new - old``, and scans it as `scan` does."""
    before, after = old.view(np.float32), new.view(np.float32)
    positive, negative, nearest = np.int32(0), np.uint32(0), np.uint32(0xFFFF_FFFF)
    for i in range(n):
        value = as_uint32(after[i] - before[i])
        difference[i] = value
        magnitude = value & np.uint32(0x7FFF_FFFF)
        exponents[i] = np.uint8(magnitude >> np.uint32(23))
        positive = max(positive, np.int32(value))
        negative = max(negative, value)
        nearest = min(nearest, np.uint32(magnitude - np.uint32(1)))
    return (
        np.uint32(positive),
        negative & np.uint32(0x7FFF_FFFF) if negative >> np.uint32(31) else np.uint32(0),
        nearest,
    )


@inlined
def _mark_unmoved(flags, exponents, old, new, extremes, n):
    """Doubles the flags of values that are the same before and after."""
    # Where the block's differences are all normal or zero, a zero exponent says so. A NaN is the same as any NaN.
    positive, negative, nearest = extremes
    if max(positive, negative) < np.uint32(_INF32) and nearest >= np.uint32(_LAST_SUBNORMAL32):
        for i in range(n):
            flags[i] = np.uint8(flags[i] << np.uint8(1)) if exponents[i] == np.uint8(0) else flags[i]
        return
    for i in range(n):
        either = np.uint32(old[i] | new[i]) & np.uint32(0x7FFF_FFFF)
        least = min(np.uint32(old[i] & np.uint32(0x7FFF_FFFF)), np.uint32(new[i] & np.uint32(0x7FFF_FFFF)))
        same = (old[i] == new[i]) or (either == np.uint32(0)) or (least > np.uint32(_INF32))
        flags[i] = np.uint8(flags[i] << np.uint8(1)) if same else flags[i]


@inlined
def _subtract64(old, new, difference, n):
    before, after, values = old.view(np.float64), new.view(np.float64), difference.view(np.float64)
    for i in range(n):
        values[i] = after[i] - before[i]


@inlined
def _mark_unmoved64(flags, old, new, n):
    for i in range(n):
        either = (old[i] | new[i]) & np.uint64(0x7FFF_FFFF_FFFF_FFFF)
        least = min(old[i] & np.uint64(0x7FFF_FFFF_FFFF_FFFF), new[i] & np.uint64(0x7FFF_FFFF_FFFF_FFFF))
        same = (old[i] == new[i]) | (either == np.uint64(0)) | (least > np.uint64(_INF64))
        flags[i] = np.uint8(flags[i] << np.uint8(1)) if same else flags[i]


@inlined
def _count_flags(flags, n, moves):
    """Add flags of 1 or 2 (pushed), and of 2 (pushed, unmoved), to the row of moves."""
    chunks = (n + 31) // 32
    flags[n : 32 * chunks] = 0
    packed = count_four(flags, chunks, 2)
    unmoved = packed & 0xFFFF
    moves[_PUSHED] += unmoved + ((packed >> 16) & 0xFFFF)
    moves[_UNMOVED] += unmoved


@summing_kernel
def _squares(values):
    total = 0.0
    for i in range(values.size):
        value = np.float64(values[i])
        total += value * value
    return total


@kernel
def update_float32(table, parts, kind):
    """Count updates of float32 (kind 0), bfloat16 (1) or float16 (2) parts."""
    room = new_room()
    flags, difference = np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.uint32)
    wide_old, wide_new = np.empty(_BLOCK, np.uint32), np.empty(_BLOCK, np.uint32)
    words = carray(pointer(table), (parts, PART_WORDS), np.int64)
    size = 2 if kind else 4
    for part in range(parts):
        old, new, push, reading = words[part, 0], words[part, 1], words[part, 2], words[part, 3]
        push_size, length = 1 if reading == 9 else reading, words[part, 4]
        row = carray(pointer(words[part, 5]), (_WORDS,), np.int64)
        moves = carray(pointer(words[part, 6]), (_MOVES,), np.int64)
        row[_COUNT] += length
        start = 0
        while start < length:
            groups = min((length - start) // GROUP, MOST_GROUPS)
            if groups and room[0][LIKELY]:
                shift = 4 * start
                start += _sweep_groups(old + shift, new + shift, push + shift, groups, row, words[part, 6], room)
                continue
            n = min(_BLOCK, length - start)
            if kind:
                _widen(wide_old, old + start * size, kind, n)
                _widen(wide_new, new + start * size, kind, n)
                before, after = wide_old[:n], wide_new[:n]
            else:
                before = carray(pointer(old + start * size), (n,), np.uint32)
                after = carray(pointer(new + start * size), (n,), np.uint32)
            address = push + start * push_size
            likely = _add_one_block(before, after, address, reading, n, flags, difference, row, moves, room)
            room[0][LIKELY] = likely and kind == 0 and reading == 4 and length >= LEAST_SWEPT
            start += n
        end_part(row, room)


@pasted
def _sweep_groups(old, new, push, groups, row, moves, room):
    """Sweep over groups up to one outside the window; return how many values."""
    state, planes = room[0], room[1].ctypes.data
    done = sweep_updates(
        old, new, push, groups, state[TOP], planes, planes + 4 * EXTREMES, room[2].ctypes.data, moves
    )  # fmt: skip
    note_swept(done, groups, row, room)
    return GROUP * done


@pasted
def _add_one_block(before, after, push, reading, n, flags, difference, row, moves, room):
    """Counts values that are not swept; returns whether those that follow should be."""
    state, exponents = room[0], room[4]
    extremes = _subtract(before, after, difference, exponents, n)
    moves.view(np.float64)[_OLD_SUMSQ] += _squares(before.view(np.float32))
    if reading:
        _find_pushes(flags, push, reading, n)
        _mark_unmoved(flags, exponents, before, after, extremes, n)
        _count_flags(flags, n, moves)
    low, high = add_block(difference, n, extremes, exponents, room[5], row, row.view(np.float64), room[3])
    state[LOW], state[HIGH] = min(state[LOW], low), max(state[HIGH], high)
    return move_window(extremes, low, high, row, room)


@kernel
def update_float64(table, parts, _):
    """Measures new minus old of float64 parts, and how far each value moved."""
    clean, exponents, wide = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.uint16)
    flags, difference = np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.uint64)
    counts = np.zeros((4, 2048), np.int64)
    words = carray(pointer(table), (parts, PART_WORDS), np.int64)
    for part in range(parts):
        old, new, push, reading = words[part, 0], words[part, 1], words[part, 2], words[part, 3]
        push_size, length = 1 if reading == 9 else reading, words[part, 4]
        row = carray(pointer(words[part, 5]), (_WORDS,), np.int64)
        moves = carray(pointer(words[part, 6]), (_MOVES,), np.int64)
        sums, norm = row.view(np.float64), moves.view(np.float64)
        row[_COUNT] += length
        low, high = 2047, 0
        for start in range(0, length, _BLOCK):
            n = min(_BLOCK, length - start)
            before = carray(pointer(old + start * 8), (n,), np.uint64)
            after = carray(pointer(new + start * 8), (n,), np.uint64)
            _subtract64(before, after, difference, n)
            norm[_OLD_SUMSQ] += _squares(before.view(np.float64))
            if reading:
                _find_pushes(flags, push + start * push_size, reading, n)
                _mark_unmoved64(flags, before, after, n)
                _count_flags(flags, n, moves)
            lowest, top = add_block64(difference, n, exponents, wide, clean, row, sums, counts)
            low, high = min(low, lowest), max(high, top)
        fold64(counts, row, low, high)


# -- launch: a kernel call for each dtype, in even shares --------------------------------------------------------------

_KERNELS: dict[torch.dtype, tuple[Any, int]] = {
    torch.float64: (update_float64, 0),
    torch.float32: (update_float32, 0),
    torch.bfloat16: (update_float32, 1),
    torch.float16: (update_float32, 2),
}
_FNUZ = tuple(dtype for dtype, fmt in FORMATS.items() if fmt.specials == "fnuz")


def update(
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    pushes: Sequence[Tensor],
    bank: Tensor,
    rows: Sequence[int],
    moves: Tensor,
) -> None:
    """Count each change into its row of the bank, and the moves into that of `moves`."""
    places, counts = row_addresses(bank, rows), row_addresses(moves, rows)
    empty_rows(places, bank.shape[1])
    empty_rows(counts, row_layout.MOVES)
    dense: dict[torch.dtype, list[int]] = {}
    for before, after, push, place, count in zip(old, new, pushes, places, counts, strict=True):
        length = after.numel()
        if not length:
            continue
        if after.dtype in _KERNELS and alike(before, after, push if push.numel() else after):
            dense.setdefault(after.dtype, []).extend(_words(before, after, push, place, count))
        else:
            _update_strided(before, after, push, place, count)
    for dtype, words in dense.items():
        _update_parts(dtype, words)


def _words(before: Tensor, after: Tensor, push: Tensor, place: int, count: int) -> tuple[int, ...]:
    """Return the kernel's words of one part."""
    reading = push.element_size() if push.numel() else 0
    if push.dtype in _FNUZ and reading:
        reading = 9
    return before.data_ptr(), after.data_ptr(), push.data_ptr(), reading, after.numel(), place, count


def _update_parts(dtype: torch.dtype, words: list[int]) -> None:
    lengths, places = words[4::PART_WORDS], words[5::PART_WORDS]
    shares = threads.shares(sum(lengths))
    if shares == 1 or len(set(places)) < len(places):  # two tensors of one row take turns
        _launch(dtype, words)
        return
    shared, owners = threads.cut(lengths, shares)
    rows = np.zeros((len(owners), row_layout.NARROW), np.int64)
    moves = np.zeros((len(owners), row_layout.MOVES), np.int64)

    def work(share: list[threads.Piece]) -> None:
        listed: list[int] = []
        for index, start, length, slot in share:
            before, after, push, reading, _, place, count = words[PART_WORDS * index : PART_WORDS * (index + 1)]
            if slot is not None:
                place, count = rows.ctypes.data + rows.strides[0] * slot, moves.ctypes.data + moves.strides[0] * slot
            shift = start * dtype.itemsize
            pushed = start * (1 if reading == 9 else reading)
            listed += (before + shift, after + shift, push + pushed, reading, length, place, count)
        _launch(dtype, listed)

    threads.run([lambda share=share: work(share) for share in shared])
    merge_into([places[index] for index in owners], rows)
    merge_moves([words[PART_WORDS * index + 6] for index in owners], moves)


def _launch(dtype: torch.dtype, words: list[int]) -> None:
    kernel, kind = _KERNELS[dtype]
    listed = Words(words)
    kernel(listed.address, len(words) // PART_WORDS, kind)


def _update_strided(before: Tensor, after: Tensor, push: Tensor, place: int, count: int) -> None:
    """Count tensors of unlike memory, 64K values at a time; 8-bit values as float32."""
    dtype = after.dtype if after.dtype in _KERNELS else torch.float32
    pushes = push if push.numel() else after
    for olds, news, pushed in zip(pieces(before), pieces(after), pieces(pushes), strict=True):
        dense = [olds.to(dtype).contiguous(), news.to(dtype).contiguous(), pushed.contiguous()]
        nothing = pushed.new_empty(0)
        _launch(dtype, list(_words(dense[0], dense[1], dense[2] if push.numel() else nothing, place, count)))
