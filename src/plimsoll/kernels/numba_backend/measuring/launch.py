"""Measuring on the CPU, from tensors to kernels: even shares for the threads.

There is one call for many tensors.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plimsoll import row_layout
from plimsoll.kernels.dtypes import FORMATS
from plimsoll.kernels.numba_backend import compiling, threads
from plimsoll.kernels.numba_backend.measuring import float32_kernels, kernels
from plimsoll.kernels.numba_backend.memory import (
    KINDS,
    Words,
    empty_rows,
    merge_into,
    pieces,
    row_addresses,
    without_repeats,
)
from plimsoll.kernels.operators.checks import is_dense
from plimsoll.kernels.torch_backend import from_codes

_CODES = 4
_NO_TABLE = np.zeros(256)
_values: dict[torch.dtype, Any] = {}
_SMALL = 1 << 19  # values: no tensor below is worth a second thread, which needs as much for each
_PIECE = 1 << 16  # values copied at a time from a matrix whose memory is not dense


def cache_folder() -> str | None:
    """Return the folder of compiled kernels, or None if none can be written."""
    return str(kernels.measure_float64.stats.cache_path) if compiling.is_cached() else None


def measure(tensors: Sequence[Tensor], bank: Tensor, rows: Sequence[int], accumulate: bool, block: int) -> None:
    """Count each tensor into its row; without `accumulate` the row starts empty."""
    places = row_addresses(bank, rows)
    if not accumulate:
        empty_rows(places, bank.shape[1])
    dense: dict[torch.dtype, list[int]] = {}
    for x, place in zip(tensors, places, strict=True):
        length = x.numel()
        if length and (x.is_contiguous() or is_dense(x)):
            parts = dense.get(x.dtype)
            if parts is None:
                parts = dense[x.dtype] = []
            parts += (x.data_ptr(), length, place)
        elif length:
            _measure_strided(x, place)
    for dtype, parts in dense.items():
        in_shares(dtype, parts, functools.partial(_launch, dtype))
    if block:
        for x, row in zip(tensors, rows, strict=True):
            if x.numel():
                _measure_blocks(x, bank.numpy()[row], block)


def measure_one(x: Tensor, bank: Tensor, row: int) -> None:
    """Measure as ``measure([x], bank, [row], False, 0)``, with next to no Python."""
    length = x.numel()
    count, words = bank.shape
    simple = 0 < length < _SMALL and 0 <= row < count and bank.is_contiguous() and (x.is_contiguous() or is_dense(x))
    if simple:
        kernel, variant = entry(x.dtype)
        kernel(0, 1, x.data_ptr(), length, bank.data_ptr() + 8 * words * row, words, variant)
    else:
        measure([x], bank, [row], False, 0)


@functools.cache
def entry(dtype: torch.dtype) -> tuple[Callable[..., None], int]:
    """The kernel of a dtype, and the variant it is called with."""
    if dtype == torch.float64:
        return kernels.measure_float64, 0
    if dtype in KINDS:
        return float32_kernels.measure_floats, KINDS[dtype]
    return kernels.measure_codes, _values_of_codes(dtype).ctypes.data


def in_shares(dtype: torch.dtype, words: list[int], launch: Callable[[list[int]], None]) -> None:
    """Launch parts of one dtype in even shares: address, length and row's address of each.

    An address of 0 stands for no row, of all parts then.
    """
    lengths, places = words[1::3], words[2::3]
    shares = threads.shares(sum(lengths))
    measured = bool(places[0])
    if shares == 1 or (measured and len(set(places)) < len(places)):  # two tensors of one row take turns
        launch(words)
        return
    shared, owners = threads.cut(lengths, shares)
    scratch = np.zeros((len(owners) if measured else 0, row_layout.NARROW), np.int64)
    first, step = scratch.ctypes.data, scratch.strides[0]

    def work(share: list[threads.Piece]) -> None:
        listed: list[int] = []
        for index, start, length, slot in share:
            place = places[index] if slot is None or not measured else first + step * slot
            listed += (words[3 * index] + start * dtype.itemsize, length, place)
        launch(listed)

    threads.run([functools.partial(work, share) for share in shared])
    if measured:
        merge_into([places[index] for index in owners], scratch)


def _launch(dtype: torch.dtype, words: list[int]) -> None:
    kernel, variant = entry(dtype)
    listed = Words(words)
    kernel(listed.address, len(words) // 3, 0, 0, 0, 0, variant)


# Kernels take addresses. Tensors whose memory is dense, in whatever order, are read in place; others are copied 64K
# values at a time, so that nothing of their size is allocated.
def _measure_strided(x: Tensor, place: int) -> None:
    """Measure each value of a tensor with gaps or repeats once, 64K at a time."""
    x, repeats = without_repeats(x)
    once = np.zeros((1, row_layout.NARROW), np.int64)
    for piece in pieces(x):
        dense = piece.contiguous()
        _launch(x.dtype, [dense.data_ptr(), dense.numel(), once.ctypes.data])
    counts, sums = once[0], once[0].view(np.float64)
    counts[: row_layout.POSITIVE] *= repeats
    sums[row_layout.SUMS] *= repeats
    counts[row_layout.HISTOGRAM :] *= repeats
    merge_into([place], once)


def _measure_blocks(x: Tensor, row: Any, block: int) -> None:
    matrix = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    kind = KINDS.get(x.dtype, _CODES)
    values = _values_of_codes(x.dtype) if kind == _CODES else _NO_TABLE
    height, columns = matrix.shape
    step = height if matrix.is_contiguous() else max(1, _PIECE // columns)
    for start in range(0, height, step):
        dense = matrix[start : start + step].contiguous()
        kernels.measure_blocks(dense.data_ptr(), kind, dense.shape[0], columns, min(block, columns), row, values)


def _values_of_codes(dtype: torch.dtype) -> Any:
    """Return the float64 values of an 8-bit dtype's codes, always in one array."""
    # Kernels keep its address. `functools.cache` would not do: threads that call it first at the same time each get an
    # array of their own.
    known = _values.get(dtype)
    if known is None:
        known = _values.setdefault(dtype, from_codes(torch.arange(256, device="cpu"), FORMATS[dtype]).numpy())
    return known
