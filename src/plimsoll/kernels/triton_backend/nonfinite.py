"""Counting NaN and Inf: the kernel, and its one launch for all tensors of a dtype."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plimsoll.errors import UnsupportedTensorError
from plimsoll.kernels.operators.checks import is_dense
from plimsoll.kernels.triton_backend import input_bits
from plimsoll.kernels.triton_backend.counting import WARPS, infinity, magnitude_of
from plimsoll.kernels.triton_backend.measuring import (
    PROGRAM_MASK,
    PROGRAM_SHIFT,
    launching,
    load,
    share,
    table_words,
    tables,
)

_TILES = {1: 4096, 2: 4096, 4: 4096, 8: 2048}
_FP64 = input_bits.FP64


@triton.jit(do_not_specialize=["address", "length", "count", "per_program"])
def count_tensor(
    address: tl.int64, length: tl.int64, count, per_program: tl.int64,
    KIND: tl.constexpr, POINTEE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tensor, described by the arguments."""
    # The interpreter makes an int32 of an address below 2**31, whatever the annotation says.
    first = tl.program_id(0).to(tl.int64) * per_program
    _count(address.to(tl.int64), length, count, first, per_program, KIND, POINTEE, TILE)


@triton.jit(do_not_specialize=["table", "programs", "count", "per_program"])
def count_table(
    table, programs, count, per_program: tl.int64, KIND: tl.constexpr, POINTEE: tl.constexpr, TILE: tl.constexpr
):
    """Count in tensors of two words each in `table`, by the programs in `programs`."""
    word = tl.load(programs + tl.program_id(0))
    entry = table + 2 * (word >> PROGRAM_SHIFT)
    first = (word & PROGRAM_MASK) * per_program
    _count(tl.load(entry), tl.load(entry + 1), count, first, per_program, KIND, POINTEE, TILE)


@triton.jit
def _count(address, length, count, first, per_program, KIND: tl.constexpr, POINTEE: tl.constexpr, TILE: tl.constexpr):
    WIDE: tl.constexpr = KIND == _FP64
    ITEM: tl.constexpr = POINTEE.primitive_bitwidth // 8
    head = (address & 15) // ITEM
    last = tl.minimum(first + per_program, tl.cdiv(head + length, TILE))
    wrong = tl.zeros((TILE,), tl.int32)
    for tile in range(first, last):
        raw, _ = load(address, head, length, 0, 0, tile, POINTEE, ITEM, 0, TILE)
        wrong += (magnitude_of(input_bits.decode(raw, KIND), WIDE) >= infinity(WIDE)).to(tl.int32)
    total = tl.sum(wrong).to(tl.int64)
    tl.atomic_add(count, total, mask=total > 0, sem="relaxed")


def count_nonfinite(tensors: Sequence[Tensor], counts: Tensor, index: int) -> None:
    """Adds the number of NaN and Inf values of all tensors to ``counts[index]``."""
    grouped: dict[torch.dtype, list[tuple[int, int]]] = {}
    alive: list[Tensor] = []  # contiguous copies, until the launches that read them are enqueued
    for x in tensors:
        if x.numel() == 0:
            continue
        if x.dtype not in input_bits.DTYPES:
            raise UnsupportedTensorError(f"count_nonfinite: expected floating tensors; got {x.dtype}. Leave it out.")
        alive.append(x if is_dense(x) else x.contiguous())
        grouped.setdefault(x.dtype, []).append((alive[-1].data_ptr(), x.numel()))
    with launching(counts):
        for dtype, jobs in grouped.items():
            _launch(jobs, dtype, counts[index : index + 1])


def _launch(jobs: list[tuple[int, int]], dtype: torch.dtype, count: Tensor) -> None:
    tile = _TILES[dtype.itemsize]
    slots = [length + address % 16 // dtype.itemsize for address, length in jobs]
    per_program, programs = share(slots, tile, count.device)
    fixed: dict[str, Any] = {
        "KIND": input_bits.kind(dtype), "POINTEE": input_bits.pointee(dtype), "TILE": tile, "num_warps": WARPS,
        "enable_fp_fusion": True,
    }  # fmt: skip
    if len(jobs) > 1:
        key = ("nonfinite", tile * per_program, dtype.itemsize, *jobs)
        words = tables.find(key, count.device, functools.partial(table_words, jobs, programs))
        if words is not None:
            count_table[(sum(programs),)](words, words[2 * len(jobs) :], count, per_program, **fixed)
            return
    for (address, length), programs_of in zip(jobs, programs, strict=True):
        count_tensor[(programs_of,)](address, length, count, per_program, **fixed)
