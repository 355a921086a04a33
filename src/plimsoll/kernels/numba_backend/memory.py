"""Tensors and lists in memory, for kernels that take addresses."""

from array import array
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

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


class Words:
    """A list of integers in memory, at `address` for as long as this object lives."""

    __slots__ = ("_held", "address")

    def __init__(self, numbers: Sequence[int]) -> None:
        self._held = array("q", numbers)  # a third of what a numpy array costs for small lists
        self.address = self._held.buffer_info()[0]
