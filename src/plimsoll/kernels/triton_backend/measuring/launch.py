"""Launch of the measuring kernel: one a dtype, or one without table for a tensor."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from plimsoll.errors import UnsupportedTensorError
from plimsoll.kernels.triton_backend import input_bits
from plimsoll.kernels.triton_backend.address_tables import Tables
from plimsoll.kernels.triton_backend.measuring.kernel import MAP_SHIFT, measure_table, measure_tensor
from plimsoll.kernels.triton_backend.measuring.tile import WARPS

# Values of a tile, by the bytes of one: 32 to a thread (16 of float64) are enough bytes in flight with four programs
# an SM, its number at 128 registers a thread. What these do not hold are mostly constants of the loop (the compile test
# looks), and four programs should beat three. The block record needs registers of its own.
_TILES = {1: 4096, 2: 4096, 4: 4096, 8: 2048}
_BLOCK_TILES = {1: 2048, 2: 1024, 4: 1024, 8: 512}
REGISTERS = 128
_PROGRAMS = 4  # for each SM, before any takes a second tile: as many as run at once, so that atomics are few
_MOST_TILES = 32  # of one program, so that programs of a large tensor end at about the same time

tables = Tables()


class _Job(NamedTuple):
    """A tensor as the kernel sees it; `row_length` 0: blocks ignore the rows."""

    address: int
    length: int
    row_length: int
    row: int
    slots: int


def measure(tensors: Sequence[Tensor], bank: Tensor, rows: Sequence[int], accumulate: bool, block: int) -> None:
    """Count each tensor into its row; without `accumulate` the row starts empty."""
    if not accumulate:
        empty(bank, rows)
    by_dtype: dict[torch.dtype, list[_Job]] = {}
    alive: list[Tensor] = []  # contiguous copies, until the launches that read them are enqueued
    for x, row in zip(tensors, rows, strict=True):
        if x.numel() == 0:
            continue
        if x.dtype not in input_bits.DTYPES:
            raise UnsupportedTensorError(f"measure: expected a floating dtype; got {x.dtype}.")
        alive.append(x.contiguous())
        by_dtype.setdefault(x.dtype, []).append(_job(alive[-1], row, block))
    with launching(bank):
        for dtype, jobs in by_dtype.items():
            _launch(jobs, dtype, bank, block)


def measure_one(x: Tensor, bank: Tensor, row: int) -> None:
    """As `measure`, of one tensor into a row that is emptied first."""
    measure([x], bank, [row], False, 0)


def _job(x: Tensor, row: int, block: int) -> _Job:
    address, length = x.data_ptr(), x.numel()
    if not block:
        return _Job(address, length, 0, row, length + address % 16 // x.element_size())
    n = x.shape[-1] if x.dim() else 1
    count = length // n
    row_length = n if count > 1 and n % block else 0
    blocks = count * -(-n // block) if row_length else -(-length // block)
    return _Job(address, length, row_length, row, blocks * block)


def _launch(jobs: list[_Job], dtype: torch.dtype, bank: Tensor, block: int) -> None:
    tile = (_BLOCK_TILES if block else _TILES)[dtype.itemsize]
    per_program, programs = share([job.slots for job in jobs], tile, bank.device)
    fixed: dict[str, Any] = {
        "WIDTH": bank.stride(0), "KIND": input_bits.kind(dtype), "POINTEE": input_bits.pointee(dtype), "BLOCK": block,
        "TILE": tile, "num_warps": WARPS, "maxnreg": REGISTERS, "enable_fp_fusion": True,
    }  # fmt: skip
    if len(jobs) > 1:
        key = (tile * per_program, *jobs)
        words = tables.find(key, bank.device, functools.partial(table_words, [job[:4] for job in jobs], programs))
        if words is not None:
            measure_table[(sum(programs),)](words, words[4 * len(jobs) :], bank, per_program, **fixed)
            return
    for job, count in zip(jobs, programs, strict=True):
        measure_tensor[(count,)](job.address, job.length, job.row_length, job.row, bank, per_program, **fixed)


def share(slots: Sequence[int], tile: int, device: torch.device) -> tuple[int, list[int]]:
    """Return the number of tiles of a program, and of each tensor's programs."""
    tiles = sum(-(-count // tile) for count in slots)
    per_program = min(-(-tiles // (_PROGRAMS * processors(device))), _MOST_TILES)
    return per_program, [-(-count // (tile * per_program)) for count in slots]


def table_words(jobs: Sequence[tuple[int, ...]], programs: list[int]) -> np.ndarray:
    """Return each tensor's words, then each program's tensor and place in it."""
    entries = np.array(jobs, dtype=np.int64).ravel()
    counts = np.array(programs, dtype=np.int64)
    tensor = np.repeat(np.arange(len(jobs), dtype=np.int64), counts)
    within = np.arange(len(tensor), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.concatenate((entries, (tensor << MAP_SHIFT) | within))


def empty(bank: Tensor, rows: Sequence[int]) -> None:
    """Fill rows with zeros: by row if they are few runs, else by a table of numbers."""
    runs = _runs(rows)
    if len(runs) > 2:
        key = ("rows", *runs)
        index = tables.find(key, bank.device, lambda: np.array(sorted(set(rows)), dtype=np.int64))
        if index is not None:
            bank.index_fill_(0, index, 0)
            return
    for first, last in runs:
        bank[first : last + 1].zero_()


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for row in sorted(set(rows)):
        if runs and runs[-1][1] == row - 1:
            runs[-1] = (runs[-1][0], row)
        else:
            runs.append((row, row))
    return runs


def launching(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make x's GPU current for Triton; silence numpy's overflow in the interpreter."""
    return torch.cuda.device(x.device) if x.is_cuda else np.errstate(all="ignore")


@functools.cache
def processors(device: torch.device) -> int:
    """The number of SMs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def interpreted() -> bool:
    """Return True if this process's kernels run in Triton's interpreter.

    Triton decides that when they are decorated.
    """
    return not isinstance(measure_tensor, triton.JITFunction)
