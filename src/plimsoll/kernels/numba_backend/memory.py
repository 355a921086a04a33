"""Tensors, lists and rows of banks in memory, for kernels that take addresses."""

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numba import carray
from numpy.typing import NDArray
from torch import Tensor

from plimsoll import row_layout
from plimsoll.errors import ArgumentError
from plimsoll.kernels.numba_backend.compiling import inlined, kernel, pointer

# The number by which kernels know the dtype of an address.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_PIECE = 1 << 16  # values copied at a time from a tensor whose memory is not dense


def pieces(x: Tensor) -> Iterator[Tensor]:
    """The tensor in slices of at most 64K values, along its leading dimensions."""
    if x.numel() <= _PIECE:
        yield x
        return
    inner = x[0].numel()
    step = max(1, _PIECE // inner)
    for start in range(0, x.shape[0], step):
        piece = x[start : start + step]
        if inner > _PIECE:
            yield from pieces(piece[0])
        else:
            yield piece


def without_repeats(x: Tensor) -> tuple[Tensor, int]:
    """Return an expanded tensor as it was before, and how many times it has each value."""
    repeats = 1
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
            repeats *= size
    return x, repeats


class Words:
    """A list of integers in memory, at `address` for as long as this object lives."""

    __slots__ = ("_held", "address")

    def __init__(self, numbers: Sequence[int]) -> None:
        self._held = array("q", numbers)  # a third of what a numpy array costs for small lists
        self.address = self._held.buffer_info()[0]


# -- rows of a bank by address, which are checked here only ------------------------------------------------------------


def row_addresses(table: Tensor, rows: Sequence[int]) -> list[int]:
    """The addresses of rows of an int64 matrix whose rows are each in one piece."""
    if not table.is_cpu or table.dtype != torch.int64 or table.dim() != 2 or table.stride(1) != 1:
        raise ArgumentError(
            f"kernels: expected an int64 matrix in the CPU's memory to count into, rows in one piece; got "
            f"{table.dtype} of shape {tuple(table.shape)} on {table.device}. Make it with new_bank."
        )
    if rows and not 0 <= min(rows) <= max(rows) < table.shape[0]:
        raise ArgumentError(
            f"kernels: expected rows from 0 to {table.shape[0] - 1}; got rows={list(rows)}. Make more rows, or use "
            "these."
        )
    first, step = table.data_ptr(), 8 * table.stride(0)
    return [first + step * row for row in rows]


def word_address(counts: Tensor, index: int) -> int:
    """The address of one word of an int64 vector."""
    (length,) = counts.shape
    if not counts.is_cpu or counts.dtype != torch.int64 or not 0 <= index < length:
        raise ArgumentError(
            f"kernels: expected an index from 0 to {length - 1} into an int64 vector in the CPU's memory; got "
            f"index={index}, {counts.dtype} on {counts.device}. Make more counts, or use these."
        )
    return counts.data_ptr() + 8 * counts.stride(0) * index


def empty_rows(addresses: Sequence[int], words: int) -> None:
    """Fills the rows at these addresses with zero."""
    listed = Words(addresses)
    _empty_rows_kernel(listed.address, len(addresses), words)


def merge_into(addresses: Sequence[int], rows: NDArray[np.int64]) -> None:
    """Adds each narrow row j to the row at ``addresses[j]``."""
    listed = Words(addresses)
    _merge_into_kernel(listed.address, rows)


def merge_moves(addresses: Sequence[int], rows: NDArray[np.int64]) -> None:
    """Adds each row j of moves to the one at ``addresses[j]``."""
    listed = Words(addresses)
    _merge_moves_kernel(listed.address, rows)


# Row fields as globals of this module, which kernels take as constants.
_POSITIVE, _NEAREST = row_layout.POSITIVE, row_layout.NEAREST
_SUM, _HISTOGRAM = row_layout.SUM, row_layout.HISTOGRAM
_OLD_SUMSQ, _MOVES = row_layout.OLD_SUMSQ, row_layout.MOVES


@kernel
def _empty_rows_kernel(addresses, count, words):
    """Fill rows of so many words with zero, by the address of their addresses."""
    rows = carray(pointer(addresses), (count,), np.int64)
    for i in range(count):
        carray(pointer(rows[i]), (words,), np.int64)[:] = 0


@kernel
def merge_rows(target, groups, rows):
    """Adds each row j to row ``groups[j]`` of the target, by the layout's rules."""
    for j in range(groups.size):
        _add_row(target[groups[j]], rows[j])


@kernel
def _merge_into_kernel(addresses, rows):
    """Add each row j to the row at the j-th address of the list at `addresses`."""
    listed = carray(pointer(addresses), (rows.shape[0],), np.int64)
    for j in range(rows.shape[0]):
        _add_row(carray(pointer(listed[j]), (rows.shape[1],), np.int64), rows[j])


@kernel
def _merge_moves_kernel(addresses, rows):
    """As `_merge_into_kernel`, of rows of moves."""
    listed = carray(pointer(addresses), (rows.shape[0],), np.int64)
    for j in range(rows.shape[0]):
        row = carray(pointer(listed[j]), (_MOVES,), np.int64)
        for field in range(_OLD_SUMSQ):
            row[field] += rows[j, field]
        row.view(np.float64)[_OLD_SUMSQ] += rows[j].view(np.float64)[_OLD_SUMSQ]


@inlined
def _add_row(row, part):
    """Adds a row to another, as `row_layout` says."""
    sums, part_sums = row.view(np.float64), part.view(np.float64)
    for field in range(_POSITIVE):
        row[field] += part[field]
    for field in range(_POSITIVE, _NEAREST + 1):
        row[field] = max(row[field], part[field])
    for field in range(_SUM, _HISTOGRAM):
        sums[field] += part_sums[field]
    for field in range(_HISTOGRAM, row.size):
        row[field] += part[field]
