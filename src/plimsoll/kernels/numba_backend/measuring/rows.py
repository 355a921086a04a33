"""Rows of a bank as the CPU's kernels see them: by address, checked here, since nothing is checked there."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plimsoll.errors import ArgumentError
from plimsoll.kernels.numba_backend.measuring import row_kernels
from plimsoll.kernels.numba_backend.memory import Words


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
    row_kernels.empty_rows(listed.address, len(addresses), words)


def merge_rows(target: NDArray[np.int64], groups: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    """Adds each row j to row ``groups[j]`` of the target, by the layout's rules."""
    row_kernels.merge_rows(target, groups, rows)


def merge_into(addresses: Sequence[int], rows: NDArray[np.int64]) -> None:
    """Adds each narrow row j to the row at ``addresses[j]``."""
    listed = Words(addresses)
    row_kernels.merge_into(listed.address, rows)


def merge_moves(addresses: Sequence[int], rows: NDArray[np.int64]) -> None:
    """Adds each row j of moves to the one at ``addresses[j]``."""
    listed = Words(addresses)
    row_kernels.merge_moves(listed.address, rows)
