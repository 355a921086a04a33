"""Weight updates: the kernel, and its one launch for each pair of dtypes."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plimsoll import row_layout
from plimsoll.errors import UnsupportedTensorError
from plimsoll.kernels.dtypes import FORMATS
from plimsoll.kernels.operators.checks import alike
from plimsoll.kernels.triton_backend import input_bits
from plimsoll.kernels.triton_backend.counting import THREADS, WARPS, begin, by_thread, finish, magnitude_of, tally
from plimsoll.kernels.triton_backend.measuring import (
    PROGRAM_MASK,
    PROGRAM_SHIFT,
    REGISTERS,
    empty,
    launching,
    share,
    table_words,
    tables,
)

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
    """Count updates of five words each in `table`, by the programs in `programs`."""
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
    state = begin(WIDE)
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
        state = tally(counters, bits, state, WIDE, ITEM, TILE)
    valid = tl.minimum(last * TILE, length) - first * TILE
    finish(counters, valid, state, WIDE)
    if MASK:
        tl.atomic_add(moved + _PUSHED, tl.sum(pushed.to(tl.int64)), sem="relaxed")
        tl.atomic_add(moved + _UNMOVED, tl.sum(unmoved.to(tl.int64)), sem="relaxed")
    slot = (moved + _OLD_SUMSQ).to(tl.pointer_type(tl.float64), bitcast=True)
    tl.atomic_add(slot, tl.sum(norm), sem="relaxed")


# Old values, new values and pushes are read once, and their difference is counted by tiles. The host sees to it that
# they lie alike in memory, but not at equal distances from a 16-byte border: where one of them starts off such a
# border, all loads are masked ones, and slower.
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
    """Return true if two values are equal in bits, or both zero, or both NaN."""
    least = tl.minimum(magnitude_of(before, WIDE), magnitude_of(after, WIDE))
    if WIDE:
        infinity = tl.full((), 0x7FF0000000000000, tl.int64)
    else:
        infinity = tl.full((), 0x7F800000, tl.int32)
    return (before == after) | (magnitude_of(before | after, WIDE) == 0) | (least > infinity)


# Values of a tile, by the bytes of one: half of what measuring takes, since three tensors are read.
_TILES = {1: 2048, 2: 2048, 4: 2048, 8: 1024}
_FNUZ = tuple(dtype for dtype, fmt in FORMATS.items() if fmt.specials == "fnuz")

_Job = tuple[int, int, int, int, int]  # addresses of old, new and push, length, row
_Dtypes = tuple[torch.dtype, torch.dtype | None]  # of the values and of the pushes, None where they are not known


def update(
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    pushes: Sequence[Tensor],
    bank: Tensor,
    rows: Sequence[int],
    moves: Tensor,
) -> None:
    """Count each change into its row of the bank, and the moves into that of `moves`."""
    empty(bank, rows)
    empty(moves, rows)
    grouped: dict[_Dtypes, list[_Job]] = {}
    alive: list[Tensor] = []  # copies, until the launches that read them are enqueued
    for before, after, push, row in zip(old, new, pushes, rows, strict=True):
        if after.numel() == 0:
            continue
        tensors = [before, after, push] if push.numel() else [before, after]
        if not alike(*tensors):
            tensors = [x.contiguous() for x in tensors]
            alive += tensors
        dtypes = (_checked(after.dtype), _checked(push.dtype) if push.numel() else None)
        addresses = [x.data_ptr() for x in tensors]
        address = addresses[2] if push.numel() else 0
        grouped.setdefault(dtypes, []).append((addresses[0], addresses[1], address, after.numel(), row))
    with launching(bank):
        for dtypes, jobs in grouped.items():
            _launch(jobs, *dtypes, bank, moves)


def _checked(dtype: torch.dtype) -> torch.dtype:
    if dtype not in input_bits.DTYPES:
        raise UnsupportedTensorError(f"update: expected a floating dtype; got {dtype}. Leave the tensor out.")
    return dtype


def _launch(jobs: list[_Job], dtype: torch.dtype, push: torch.dtype | None, bank: Tensor, moves: Tensor) -> None:
    tile = _TILES[dtype.itemsize]
    per_program, programs = share([job[3] for job in jobs], tile, bank.device)
    fixed: dict[str, Any] = {
        "WIDTH": bank.stride(0), "KIND": input_bits.kind(dtype), "POINTEE": input_bits.pointee(dtype), "TILE": tile,
        "PUSH": input_bits.pointee(push or dtype), "MASK": _mask(push), "num_warps": WARPS, "maxnreg": REGISTERS,
        "enable_fp_fusion": True,
    }  # fmt: skip
    if len(jobs) > 1:
        words = tables.find(
            ("update", tile * per_program, *jobs), bank.device, functools.partial(table_words, jobs, programs)
        )
        if words is not None:
            update_table[(sum(programs),)](words, words[5 * len(jobs) :], bank, moves, per_program, **fixed)
            return
    for job, count in zip(jobs, programs, strict=True):
        update_tensor[(count,)](*job, bank, moves, per_program, **fixed)


def _mask(push: torch.dtype | None) -> int:
    """Return the bits of which a nonzero push has at least one; 0 if unknown."""
    if push is None:
        return 0
    return 0xFF if push in _FNUZ else (1 << (8 * push.itemsize - 1)) - 1
