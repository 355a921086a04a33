"""The kernel of weight updates: old values, new values and pushes read once, their difference counted by tiles.

Old, new and push lie alike in memory (the host sees to it), but not at equal distances from a 16-byte border: where one
of them starts off such a border, all loads are masked ones, and slower.
"""

import triton
import triton.language as tl

from plimsoll.kernels import row_layout
from plimsoll.kernels.triton_backend import input_bits
from plimsoll.kernels.triton_backend.measuring.counting import magnitude_of
from plimsoll.kernels.triton_backend.measuring.kernel import PROGRAM_MASK, PROGRAM_SHIFT
from plimsoll.kernels.triton_backend.measuring.tile import THREADS, begin, by_thread, finish, tally

_FP64 = input_bits.FP64
_MOVES, _OLD_SUMSQ = tl.constexpr(row_layout.MOVES), tl.constexpr(row_layout.OLD_SUMSQ)
_PUSHED, _UNMOVED = tl.constexpr(row_layout.PUSHED), tl.constexpr(row_layout.UNMOVED)
_THREADS = tl.constexpr(THREADS)


@triton.jit(do_not_specialize=["old", "new", "push", "length", "row", "bank", "moves", "per_program"])
def update_tensor(
    old: tl.int64, new: tl.int64, push: tl.int64, length: tl.int64, row: tl.int64, bank, moves, per_program: tl.int64,
    WIDTH: tl.constexpr, KIND: tl.constexpr, POINTEE: tl.constexpr, PUSH: tl.constexpr, MASK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One tensor, described by the arguments."""
    first = tl.program_id(0).to(tl.int64) * per_program
    # The interpreter makes an int32 of an address below 2**31, whatever the annotation says.
    old, new, push, row = old.to(tl.int64), new.to(tl.int64), push.to(tl.int64), row.to(tl.int64)
    counters, moved = bank + row * WIDTH, moves + row * _MOVES
    _update(old, new, push, length, counters, moved, first, per_program, KIND, POINTEE, PUSH, MASK, TILE)


@triton.jit(do_not_specialize=["table", "programs", "bank", "moves", "per_program"])
def update_table(
    table, programs, bank, moves, per_program: tl.int64,
    WIDTH: tl.constexpr, KIND: tl.constexpr, POINTEE: tl.constexpr, PUSH: tl.constexpr, MASK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Many tensors: `programs` says which program works where, `table` holds five words a tensor."""
    word = tl.load(programs + tl.program_id(0))
    entry = table + 5 * (word >> PROGRAM_SHIFT)
    first = (word & PROGRAM_MASK) * per_program
    row = tl.load(entry + 4)
    counters, moved = bank + row * WIDTH, moves + row * _MOVES
    _update(
        tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3), counters, moved, first,
        per_program, KIND, POINTEE, PUSH, MASK, TILE,
    )  # fmt: skip


@triton.jit
def _update(
    old, new, push, length, counters, moved, first, per_program,
    KIND: tl.constexpr, POINTEE: tl.constexpr, PUSH: tl.constexpr, MASK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = KIND == _FP64
    ITEM: tl.constexpr = POINTEE.primitive_bitwidth // 8
    aligned = ((old | new | push) & 15) == 0
    last = tl.minimum(first + per_program, tl.cdiv(length, TILE))
    norm = tl.zeros((_THREADS,), tl.float64)
    pushed = tl.zeros((_THREADS,), tl.int32)
    unmoved = tl.zeros((_THREADS,), tl.int32)
    window, base, counted, positive, negative, nearest, total, absolute, squares = begin(WIDE)
    for tile in range(first, last):
        whole = aligned & ((tile + 1) * TILE <= length)
        before = input_bits.decode(_load(old, tile, length, whole, POINTEE, TILE), KIND)
        after = input_bits.decode(_load(new, tile, length, whole, POINTEE, TILE), KIND)
        if MASK:  # pushes are known
            there = (_load(push, tile, length, whole, PUSH, TILE) & MASK) != 0
            pushed += by_thread(there.to(tl.int32), ITEM, TILE)
            unmoved += by_thread((there & _same(before, after, WIDE)).to(tl.int32), ITEM, TILE)
        weights = input_bits.to_double(before, WIDE)
        norm += by_thread(weights * weights, ITEM, TILE)
        bits = _difference(before, after, WIDE)
        window, base, counted, positive, negative, nearest, total, absolute, squares = tally(
            counters, bits, window, base, counted, positive, negative, nearest, total, absolute, squares,
            WIDE, ITEM, TILE,
        )  # fmt: skip
    valid = tl.minimum(last * TILE, length) - first * TILE
    finish(counters, valid, window, base, counted, positive, negative, nearest, total, absolute, squares, WIDE)
    if MASK:
        tl.atomic_add(moved + _PUSHED, tl.sum(pushed.to(tl.int64)), sem="relaxed")
        tl.atomic_add(moved + _UNMOVED, tl.sum(unmoved.to(tl.int64)), sem="relaxed")
    slot = (moved + _OLD_SUMSQ).to(tl.pointer_type(tl.float64), bitcast=True)
    tl.atomic_add(slot, tl.sum(norm), sem="relaxed")


@triton.jit
def _load(address, tile, length, whole, POINTEE: tl.constexpr, TILE: tl.constexpr):
    """A tile's elements, 0 beyond the end."""
    lane = tl.arange(0, TILE)
    start = tile * TILE
    if whole:
        # Only an unmasked load of known alignment becomes 16-byte instructions.
        aligned = tl.multiple_of(address.to(tl.pointer_type(POINTEE)), 16)
        raw = tl.load(aligned + tl.multiple_of(start, TILE) + lane)
    else:
        raw = tl.load(address.to(tl.pointer_type(POINTEE)) + start + lane, mask=start + lane < length, other=0)
    return raw


@triton.jit
def _difference(before, after, WIDE: tl.constexpr):
    if WIDE:
        change = after.to(tl.float64, bitcast=True) - before.to(tl.float64, bitcast=True)
        bits = change.to(tl.int64, bitcast=True)
    else:
        change = after.to(tl.float32, bitcast=True) - before.to(tl.float32, bitcast=True)
        bits = change.to(tl.int32, bitcast=True)
    return bits


@triton.jit
def _same(before, after, WIDE: tl.constexpr):
    """Whether two values are the same: in their bits, or both zero, or both NaN."""
    least = tl.minimum(magnitude_of(before, WIDE), magnitude_of(after, WIDE))
    if WIDE:
        infinity = tl.full((), 0x7FF0000000000000, tl.int64)
    else:
        infinity = tl.full((), 0x7F800000, tl.int32)
    return (before == after) | (magnitude_of(before | after, WIDE) == 0) | (least > infinity)
