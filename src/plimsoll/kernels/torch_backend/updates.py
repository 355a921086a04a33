"""Weight updates and non-finite values with plain torch operations: the reference."""

from collections.abc import Sequence

import torch
from torch import Tensor

from plimsoll.kernels import row_layout
from plimsoll.kernels.torch_backend.measuring import measure


def update(
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    pushes: Sequence[Tensor],
    bank: Tensor,
    rows: Sequence[int],
    moves: Tensor,
) -> None:
    """Counts each change into its row of the bank, and how many values it moved into its row of `moves`."""
    for row in rows:
        bank[row].zero_()
        moves[row].zero_()
    for before, after, push, row in zip(old, new, pushes, rows, strict=True):
        dtype = torch.float64 if after.dtype == torch.float64 else torch.float32
        measure([after.to(dtype) - before.to(dtype)], bank, [row], True, 0)
        _count_moves(before.to(torch.float64), after.to(torch.float64), push, moves[row])


def _count_moves(before: Tensor, after: Tensor, push: Tensor, row: Tensor) -> None:
    row.view(torch.float64)[row_layout.OLD_SUMSQ] += before.square().sum()
    if push.numel():
        pushed = push.to(torch.float64) != 0  # a NaN is not zero
        same = (before == after) | (before.isnan() & after.isnan())
        row[row_layout.PUSHED] += pushed.sum()
        row[row_layout.UNMOVED] += (pushed & same).sum()


def count_nonfinite(tensors: Sequence[Tensor], counts: Tensor, index: int) -> None:
    """Adds the number of NaN and Inf values of all tensors to ``counts[index]``."""
    for x in tensors:
        counts[index] += (~x.to(torch.float64).isfinite()).sum()
