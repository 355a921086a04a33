"""Casting a matrix to 8-bit codes on the CPU: bands of rows, shared among the threads."""

import functools
import itertools

import numpy as np
import torch
from torch import Tensor

from plimsoll.kernels import row_layout
from plimsoll.kernels.numba_backend import threads
from plimsoll.kernels.numba_backend.casting import fp8_kernels
from plimsoll.kernels.numba_backend.measuring.rows import empty_rows, merge_into, row_addresses
from plimsoll.kernels.numba_backend.memory import KINDS
from plimsoll.kernels.operators.fp8_cast import Cast


def fp8_cast(x: Tensor, cast: Cast) -> None:
    """Writes the codes of `x` and of its transpose, and counts x into its row.

    A matrix that lies column by column is taken as its transpose; others with gaps or repeats are copied.
    """
    if not x.is_contiguous() and x.t().is_contiguous():
        x, cast = x.t(), cast._replace(codes=cast.columns, columns=cast.codes)
    x = x.contiguous()
    places = [] if cast.bank is None else row_addresses(cast.bank, [cast.row])
    if cast.bank is not None:
        empty_rows(places, cast.bank.shape[1])
    shares = _cut(x)
    scale = float(cast.scale if cast.scale_tensor is None else cast.scale_tensor)
    scratch = np.zeros((len(shares) if places else 0, row_layout.NARROW), np.int64)

    def work(index: int) -> None:
        row = scratch.ctypes.data + scratch.strides[0] * index if places else 0
        _launch(x, cast, *shares[index], scale, row)

    threads.run([functools.partial(work, index) for index in range(len(shares))])
    if places:
        merge_into(places * len(shares), scratch)


def _cut(x: Tensor) -> list[tuple[int, int]]:
    """Which rows each task takes: whole bands."""
    rows = x.shape[0]
    bands = -(-rows // fp8_kernels.BAND)
    count = max(1, min(threads.shares(x.numel()), bands))
    edges = [min(rows, fp8_kernels.BAND * (bands * i // count)) for i in range(count + 1)]
    return list(itertools.pairwise(edges)) if x.numel() else []


def _launch(x: Tensor, cast: Cast, first: int, last: int, scale: float, row: int) -> None:
    rows, columns = x.shape
    written = cast.codes if cast.codes is not None else cast.columns
    assert written is not None
    height = written.shape[0] if cast.codes is not None else written.shape[1]
    fp8_kernels.fp8_cast(
        x.data_ptr(), x.element_size(), KINDS[x.dtype], rows, columns, first, last, np.float32(scale),
        cast.dtype == torch.float8_e5m2, 0 if cast.codes is None else cast.codes.data_ptr(),
        0 if cast.columns is None else cast.columns.data_ptr(), height, row,
    )  # fmt: skip
