"""Unscaling gradients on the CPU: a kernel call for each dtype, in even shares."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plimsoll import row_layout
from plimsoll.kernels.numba_backend import threads
from plimsoll.kernels.numba_backend.measuring.rows import empty_rows, merge_into, row_addresses
from plimsoll.kernels.numba_backend.memory import Words, pieces
from plimsoll.kernels.numba_backend.unscaling import kernels
from plimsoll.kernels.operators.checks import is_dense

# Of each dtype: the kernel that measures and multiplies, the one that multiplies only, and the variant of both.
_KERNELS: dict[torch.dtype, tuple[Any, Any, int]] = {
    torch.float64: (kernels.unscale_float64, kernels.multiply_float64, -1),
    torch.float32: (kernels.unscale_float32, kernels.multiply_float32, -1),
    torch.bfloat16: (kernels.unscale_16bit, kernels.multiply_16bit, 0),
    torch.float16: (kernels.unscale_16bit, kernels.multiply_16bit, 1),
}
_Numbers = tuple[int, int]  # the addresses of inverse_scale and found_inf


def unscale(
    gradients: Sequence[Tensor], inverse_scale: Tensor, found_inf: Tensor, bank: Tensor | None, rows: Sequence[int]
) -> None:
    """Measure each gradient, multiply it, and set `found_inf` if any is not finite."""
    places = [0] * len(gradients) if bank is None else row_addresses(bank, rows)
    if bank is not None:
        empty_rows(places, bank.shape[1])
    numbers = inverse_scale.data_ptr(), found_inf.data_ptr()
    dense: dict[torch.dtype, list[int]] = {}
    for gradient, place in zip(gradients, places, strict=True):
        length = gradient.numel()
        if not length:
            continue
        if gradient.is_contiguous() or is_dense(gradient):
            dense.setdefault(gradient.dtype, []).extend((gradient.data_ptr(), length, place))
        else:
            _unscale_strided(gradient, place, numbers)
    for dtype, words in dense.items():
        _unscale_parts(dtype, words, numbers)


def _unscale_parts(dtype: torch.dtype, words: list[int], numbers: _Numbers) -> None:
    """Unscale parts of one dtype: address, length and row's address or 0 of each."""
    lengths, places = words[1::3], words[2::3]
    shares = threads.shares(sum(lengths))
    measured = bool(places[0])
    if shares == 1 or (measured and len(set(places)) < len(places)):  # two gradients of one row take turns
        _launch(dtype, words, numbers)
        return
    shared, owners = threads.cut(lengths, shares)
    scratch = np.zeros((len(owners) if measured else 0, row_layout.NARROW), np.int64)
    first, step = scratch.ctypes.data, scratch.strides[0]

    def work(share: list[threads.Piece]) -> None:
        listed: list[int] = []
        for index, start, length, slot in share:
            place = words[3 * index + 2] if slot is None or not measured else first + step * slot
            listed += (words[3 * index] + start * dtype.itemsize, length, place)
        _launch(dtype, listed, numbers)

    threads.run([lambda share=share: work(share) for share in shared])
    if measured:
        merge_into([places[index] for index in owners], scratch)


def _launch(dtype: torch.dtype, words: list[int], numbers: _Numbers) -> None:
    measuring, multiplying, variant = _KERNELS[dtype]
    kernel = measuring if words[2] else multiplying
    listed = Words(words)
    kernel(listed.address, len(words) // 3, *numbers, variant)


def _unscale_strided(gradient: Tensor, place: int, numbers: _Numbers) -> None:
    """Unscales a gradient with gaps in its memory, 64K values at a time."""
    for piece in pieces(gradient):
        dense = piece.contiguous()
        _launch(gradient.dtype, [dense.data_ptr(), dense.numel(), place], numbers)
        piece.copy_(dense)
