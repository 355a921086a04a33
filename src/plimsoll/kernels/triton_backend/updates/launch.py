"""Launching the kernel of weight updates: one launch for all tensors of a dtype whose pushes are of one dtype."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plimsoll.errors import UnsupportedTensorError
from plimsoll.kernels.dtypes import FORMATS
from plimsoll.kernels.operators.tensor_checks import alike
from plimsoll.kernels.triton_backend import input_bits
from plimsoll.kernels.triton_backend.measuring.launch import REGISTERS, empty, launching, share, table_words, tables
from plimsoll.kernels.triton_backend.measuring.tile import WARPS
from plimsoll.kernels.triton_backend.updates.kernel import update_table, update_tensor

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
    """Counts each change into its row of the bank, and how many values it moved into its row of `moves`.

    Tensors that do not lie alike in memory are copied.
    """
    empty(bank, rows)
    empty(moves, rows)
    grouped: dict[_Dtypes, list[_Job]] = {}
    alive: list[Tensor] = []  # copies, until the launches that read them are enqueued
    for before, after, push, row in zip(old, new, pushes, rows, strict=True):
        if after.numel() == 0:
            continue
        given = [before, after, push] if push.numel() else [before, after]
        if not alike(*given):
            given = [x.contiguous() for x in given]
            alive += given
        dtypes = (_checked(after.dtype), _checked(push.dtype) if push.numel() else None)
        addresses = [x.data_ptr() for x in given]
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
    """The bits of a push of which one at least is set where it is not zero; 0 where pushes are not known."""
    if push is None:
        return 0
    return 0xFF if push in _FNUZ else (1 << (8 * push.itemsize - 1)) - 1
