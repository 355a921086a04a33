"""Unscaling gradients: the kernel, and its one launch for each dtype."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from plimsoll.kernels.operators.checks import is_dense
from plimsoll.kernels.triton_backend import input_bits
from plimsoll.kernels.triton_backend.counting import (
    THREADS,
    WARPS,
    begin,
    by_thread,
    finish,
    infinity,
    magnitude_of,
    tally,
)
from plimsoll.kernels.triton_backend.measuring import (
    PROGRAM_MASK,
    PROGRAM_SHIFT,
    REGISTERS,
    empty,
    launching,
    load,
    share,
    table_words,
    tables,
)

_TILES = {2: 4096, 4: 4096, 8: 2048}
_THREADS = tl.constexpr(THREADS)
_BF16, _FP16, _FP64 = input_bits.BF16, input_bits.FP16, input_bits.FP64


@triton.jit(do_not_specialize=["address", "length", "row", "bank", "inverse", "flag", "per_program"])
def unscale_tensor(
    address: tl.int64, length: tl.int64, row: tl.int64, bank, inverse, flag, per_program: tl.int64,
    WIDTH: tl.constexpr, KIND: tl.constexpr, POINTEE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One gradient, described by the arguments; WIDTH 0 says that there is no bank."""
    first = tl.program_id(0).to(tl.int64) * per_program
    # The interpreter makes an int32 of an address below 2**31, whatever the annotation says.
    counters = bank + row.to(tl.int64) * WIDTH
    _unscale(address.to(tl.int64), length, counters, inverse, flag, first, per_program, WIDTH, KIND, POINTEE, TILE)


@triton.jit(do_not_specialize=["table", "programs", "bank", "inverse", "flag", "per_program"])
def unscale_table(
    table, programs, bank, inverse, flag, per_program: tl.int64,
    WIDTH: tl.constexpr, KIND: tl.constexpr, POINTEE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Unscale gradients of three words each in `table`, by the programs in `programs`."""
    word = tl.load(programs + tl.program_id(0))
    entry = table + 3 * (word >> PROGRAM_SHIFT)
    first = (word & PROGRAM_MASK) * per_program
    counters = bank + tl.load(entry + 2) * WIDTH
    _unscale(
        tl.load(entry), tl.load(entry + 1), counters, inverse, flag, first, per_program, WIDTH, KIND, POINTEE, TILE
    )


# A tile is loaded once, counted by `counting` where there is a bank, multiplied and stored where it was. The
# inverse scale is read, and the flag of non-finite values raised, by the kernel: the host knows neither.
@triton.jit
def _unscale(
    address, length, counters, inverse, flag, first, per_program,
    WIDTH: tl.constexpr, KIND: tl.constexpr, POINTEE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = KIND == _FP64
    ITEM: tl.constexpr = POINTEE.primitive_bitwidth // 8
    head = (address & 15) // ITEM
    last = tl.minimum(first + per_program, tl.cdiv(head + length, TILE))
    factor = tl.load(inverse)
    bad = tl.zeros((_THREADS,), tl.int32)
    valid = tl.zeros((), tl.int64)
    state = begin(WIDE)
    for tile in range(first, last):
        raw, loaded = load(address, head, length, 0, 0, tile, POINTEE, ITEM, 0, TILE)
        bits = input_bits.decode(raw, KIND)
        product, result = _multiply(raw, bits, factor, KIND)
        # A value that there is none of is 0: its product shows nothing but a factor that is not finite.
        limit = infinity(WIDE)
        wrong = (magnitude_of(bits, WIDE) >= limit) | (magnitude_of(product, WIDE) >= limit)
        bad += by_thread(wrong.to(tl.int32), ITEM, TILE)
        _store(address, head, length, tile, result, POINTEE, ITEM, TILE)
        if WIDTH:
            valid += loaded
            state = tally(counters, bits, state, WIDE, ITEM, TILE)
    if WIDTH:
        finish(counters, valid, state, WIDE)
    if tl.max(bad) > 0:
        tl.store(flag, 1.0)


@triton.jit
def _multiply(raw, bits, factor, KIND: tl.constexpr):
    """Return the product, decoded and as stored; a factor of 1 changes nothing."""
    if KIND == _FP64:
        product = bits.to(tl.float64, bitcast=True) * factor.to(tl.float64)
        stored = tl.where(factor == 1.0, bits, product.to(tl.int64, bitcast=True))
    else:
        product = (bits.to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True)
        if KIND == _BF16:
            stored = _round(product)
        elif KIND == _FP16:
            half = product.to(tl.float32, bitcast=True).to(tl.float16)
            stored = half.to(tl.int16, bitcast=True)
        else:
            stored = product
        stored = tl.where(factor == 1.0, raw, stored)
    return input_bits.decode(stored, KIND), stored


@triton.jit
def _round(bits):
    """The bfloat16 nearest to float32 bits, ties to even; NaN stays NaN."""
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).to(tl.int16)


@triton.jit
def _store(address, head, length, tile, result, POINTEE: tl.constexpr, ITEM: tl.constexpr, TILE: tl.constexpr):
    """Puts a tile back, as `load` took it."""
    lane = tl.arange(0, TILE)
    start = tile * TILE
    if (start >= head) & (start + TILE <= head + length):
        aligned = tl.multiple_of((address - head * ITEM).to(tl.pointer_type(POINTEE)), 16)
        tl.store(aligned + tl.multiple_of(start, TILE) + lane, result)
    else:
        offset = start - head + lane
        there = (offset >= 0) & (offset < length)
        tl.store(address.to(tl.pointer_type(POINTEE)) + offset, result, mask=there)


class _Job(NamedTuple):
    address: int
    length: int
    row: int


def unscale(
    gradients: Sequence[Tensor], inverse_scale: Tensor, found_inf: Tensor, bank: Tensor | None, rows: Sequence[int]
) -> None:
    """Measure each gradient, multiply it, and set `found_inf` if any is not finite."""
    if bank is not None:
        empty(bank, rows)
    by_dtype: dict[torch.dtype, list[_Job]] = {}
    copies: list[tuple[Tensor, Tensor]] = []
    for gradient, row in zip(gradients, rows if bank is not None else [0] * len(gradients), strict=True):
        if gradient.numel() == 0:
            continue
        dense = gradient
        if not is_dense(gradient):
            dense = gradient.contiguous()
            copies.append((gradient, dense))
        by_dtype.setdefault(gradient.dtype, []).append(_Job(dense.data_ptr(), dense.numel(), row))
    with launching(found_inf):
        for dtype, jobs in by_dtype.items():
            _launch(jobs, dtype, inverse_scale, found_inf, bank)
        for gradient, dense in copies:
            gradient.copy_(dense)


def _launch(
    jobs: list[_Job], dtype: torch.dtype, inverse_scale: Tensor, found_inf: Tensor, bank: Tensor | None
) -> None:
    tile = _TILES[dtype.itemsize]
    slots = [job.length + job.address % 16 // dtype.itemsize for job in jobs]
    per_program, programs = share(slots, tile, found_inf.device)
    fixed: dict[str, Any] = {
        "WIDTH": 0 if bank is None else bank.stride(0), "KIND": input_bits.kind(dtype),
        "POINTEE": input_bits.pointee(dtype),
        "TILE": tile, "num_warps": WARPS, "maxnreg": REGISTERS, "enable_fp_fusion": True,
    }  # fmt: skip
    counters = found_inf if bank is None else bank
    if len(jobs) > 1:
        key = ("unscale", tile * per_program, dtype.itemsize, *jobs)
        words = tables.find(key, found_inf.device, functools.partial(table_words, jobs, programs))
        if words is not None:
            unscale_table[(sum(programs),)](
                words, words[3 * len(jobs) :], counters, inverse_scale, found_inf, per_program, **fixed
            )
            return
    for job, count in zip(jobs, programs, strict=True):
        unscale_tensor[(count,)](*job, counters, inverse_scale, found_inf, per_program, **fixed)
