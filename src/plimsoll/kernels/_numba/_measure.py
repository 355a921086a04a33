"""Measuring on the CPU, from tensors to kernels: one call for many tensors, cut into even shares for the threads.

Kernels take addresses. Tensors whose memory is dense, in whatever order, are read in place; others are copied 64K
values at a time, so that nothing of their size is allocated.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plimsoll.formats import get_element
from plimsoll.kernels import _layout as layout
from plimsoll.kernels._numba import _measure_kernels as kernels, _pool
from plimsoll.kernels._torch._cast import from_codes

_SPLIT = 1 << 12  # parts of one tensor begin at a multiple of this many values
_PIECE = 1 << 16  # values copied at a time from a tensor whose memory is not dense
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_CODES = 4
_NO_TABLE = np.zeros(256)


def measure(tensors: Sequence[Tensor], bank: Tensor, rows: Sequence[int], accumulate: bool, block: int) -> None:
    """Counts each tensor into its row of the bank; without `accumulate` the rows are emptied first."""
    table = bank.numpy()
    if not accumulate:
        for row in rows:
            table[row] = 0
    dense: dict[torch.dtype, list[tuple[int, int, int]]] = {}
    for x, row in zip(tensors, rows, strict=True):
        if x.numel() == 0:
            continue
        if is_dense(x):
            dense.setdefault(x.dtype, []).append((x.data_ptr(), x.numel(), row))
        else:
            _measure_strided(x, table[row])
        if block:
            _measure_blocks(x, table[row], block)
    for dtype, parts in dense.items():
        _measure_parts(dtype, parts, table)


def is_dense(x: Tensor) -> bool:
    """Whether the values fill one stretch of memory, in whatever order."""
    return x.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(x)


def _measure_parts(dtype: torch.dtype, parts: list[tuple[int, int, int]], table: Any) -> None:
    shares = _pool.shares(sum(length for _, length, _ in parts))
    if shares == 1 or len({row for _, _, row in parts}) < len(parts):  # two tensors of one row take turns
        _launch(dtype, parts, table, table[:0])
        return
    cut, rows = _cut(parts, shares, dtype.itemsize)
    scratch = np.zeros((len(rows), table.shape[1]), np.int64)
    _pool.run([lambda share=share: _launch(dtype, share, table, scratch) for share in cut])
    kernels.merge_rows(table, np.array(rows, np.int64), scratch)


def _cut(
    parts: list[tuple[int, int, int]], shares: int, itemsize: int
) -> tuple[list[list[tuple[int, int, int]]], list[int]]:
    """Cuts the parts into shares of about equal size; a tensor in two shares gets scratch rows, listed by their row."""
    size = -(-sum(length for _, length, _ in parts) // shares)
    size = -(-size // _SPLIT) * _SPLIT
    result: list[list[tuple[int, int, int]]] = [[]]
    rows: list[int] = []
    room = size
    for address, length, row in parts:
        start = 0
        while start < length:
            if room == 0:
                result.append([])
                room = size
            taken = min(room, length - start)
            target = row
            if taken < length:
                rows.append(row)
                target = -len(rows)
            result[-1].append((address + start * itemsize, taken, target))
            start += taken
            room -= taken
    return result, rows


def _launch(dtype: torch.dtype, parts: list[tuple[int, int, int]], table: Any, scratch: Any) -> None:
    addresses, lengths, rows = np.array(parts, np.int64).T.copy()
    if dtype == torch.float32:
        kernels.measure_float32(addresses, lengths, rows, table, scratch)
    elif dtype == torch.float64:
        kernels.measure_float64(addresses, lengths, rows, table, scratch)
    elif dtype in _KINDS:
        kernels.measure_16bit(addresses, lengths, rows, table, scratch, dtype == torch.float16)
    else:
        kernels.measure_codes(addresses, lengths, rows, table, scratch, _values_of_codes(dtype))


def _measure_strided(x: Tensor, row: Any) -> None:
    """Measures a tensor with gaps or repeats in its memory, 64K values at a time; what repeats is read once."""
    repeats = 1
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
            repeats *= size
    once = np.zeros((1, row.size), np.int64)
    for piece in pieces(x):
        held = piece.contiguous()
        _launch(x.dtype, [(held.data_ptr(), held.numel(), 0)], once, once[:0])
    counts, sums = once[0], once[0].view(np.float64)
    counts[: layout.POSITIVE] *= repeats
    sums[layout.SUM : layout.SUMSQ + 1] *= repeats
    counts[layout.HISTOGRAM :] *= repeats
    kernels.merge_rows(row.reshape(1, -1), np.zeros(1, np.int64), once)


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


def _measure_blocks(x: Tensor, row: Any, block: int) -> None:
    matrix = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    kind = _KINDS.get(x.dtype, _CODES)
    values = _values_of_codes(x.dtype) if kind == _CODES else _NO_TABLE
    height, columns = matrix.shape
    step = height if matrix.is_contiguous() else max(1, _PIECE // columns)
    for start in range(0, height, step):
        held = matrix[start : start + step].contiguous()
        kernels.measure_blocks(held.data_ptr(), kind, held.shape[0], columns, block, row, values)


@functools.cache
def _values_of_codes(dtype: torch.dtype) -> Any:
    """The float64 values of an 8-bit dtype's 256 codes."""
    return from_codes(torch.arange(256), get_element(dtype, "measure")).numpy()
