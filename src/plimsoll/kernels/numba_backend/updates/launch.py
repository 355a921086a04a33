"""Counting weight updates on the CPU: a kernel call a dtype, in even shares."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plimsoll import row_layout
from plimsoll.kernels.dtypes import FORMATS
from plimsoll.kernels.numba_backend import threads
from plimsoll.kernels.numba_backend.measuring.rows import empty_rows, merge_into, merge_moves, row_addresses
from plimsoll.kernels.numba_backend.memory import Words, pieces
from plimsoll.kernels.numba_backend.updates import kernels
from plimsoll.kernels.operators.checks import alike

_KERNELS: dict[torch.dtype, tuple[Any, int]] = {
    torch.float64: (kernels.update_float64, 0),
    torch.float32: (kernels.update_float32, 0),
    torch.bfloat16: (kernels.update_float32, 1),
    torch.float16: (kernels.update_float32, 2),
}
_FNUZ = tuple(dtype for dtype, fmt in FORMATS.items() if fmt.specials == "fnuz")
_WORDS = kernels.WORDS


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
    lengths, places = words[4::_WORDS], words[5::_WORDS]
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
            before, after, push, reading, _, place, count = words[_WORDS * index : _WORDS * (index + 1)]
            if slot is not None:
                place, count = rows.ctypes.data + rows.strides[0] * slot, moves.ctypes.data + moves.strides[0] * slot
            shift = start * dtype.itemsize
            pushed = start * (1 if reading == 9 else reading)
            listed += (before + shift, after + shift, push + pushed, reading, length, place, count)
        _launch(dtype, listed)

    threads.run([lambda share=share: work(share) for share in shared])
    merge_into([places[index] for index in owners], rows)
    merge_moves([words[_WORDS * index + 6] for index in owners], moves)


def _launch(dtype: torch.dtype, words: list[int]) -> None:
    kernel, kind = _KERNELS[dtype]
    listed = Words(words)
    kernel(listed.address, len(words) // _WORDS, kind)


def _update_strided(before: Tensor, after: Tensor, push: Tensor, place: int, count: int) -> None:
    """Count tensors of unlike memory, 64K values at a time; 8-bit values as float32."""
    dtype = after.dtype if after.dtype in _KERNELS else torch.float32
    pushes = push if push.numel() else after
    for olds, news, pushed in zip(pieces(before), pieces(after), pieces(pushes), strict=True):
        dense = [olds.to(dtype).contiguous(), news.to(dtype).contiguous(), pushed.contiguous()]
        nothing = pushed.new_empty(0)
        _launch(dtype, list(_words(dense[0], dense[1], dense[2] if push.numel() else nothing, place, count)))
