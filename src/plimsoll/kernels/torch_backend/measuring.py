"""Measuring, counting, unscaling and merging with torch and numpy: the reference."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plimsoll import row_layout

_BIAS = 1023
_HIGHEST_BINADE = row_layout.LOWEST_BINADE + row_layout.BINADES - 1


def measure(tensors: Sequence[Tensor], bank: Tensor, rows: Sequence[int], accumulate: bool, block: int) -> None:
    """Count each tensor into its row; without `accumulate` the row starts empty."""
    if not accumulate:
        for row in rows:
            bank[row].zero_()
    for x, row in zip(tensors, rows, strict=True):
        _count(x, bank[row], block)


def measure_one(x: Tensor, bank: Tensor, row: int) -> None:
    """As `measure`, of one tensor into a row that is emptied first."""
    measure([x], bank, [row], False, 0)


def _count(x: Tensor, row: Tensor, block: int) -> None:
    values = x.to(torch.float64)
    bits = values.abs().contiguous().view(torch.int64)
    finite = bits < row_layout.ABSMIN_TOP
    nonzero = finite & (bits != 0)

    row[row_layout.COUNT] += x.numel()
    row[row_layout.ZEROS] += (bits == 0).sum()
    row[row_layout.NANS] += values.isnan().sum()
    row[row_layout.POS_INFS] += values.isposinf().sum()
    row[row_layout.NEG_INFS] += values.isneginf().sum()
    if x.numel():
        negative = values < 0
        extremes = (
            torch.where(nonzero & ~negative, bits, 0).max(),
            torch.where(nonzero & negative, bits, 0).max(),
            torch.where(nonzero, row_layout.ABSMIN_TOP - bits, 0).max(),
        )
        keys = row[row_layout.EXTREMES]
        keys.copy_(torch.maximum(keys, torch.stack(extremes)))
    finite_values = torch.where(finite, values, 0.0)
    squares = finite_values * finite_values
    sums = (finite_values.sum(), finite_values.abs().sum(), squares.sum(), (squares * squares).sum())
    row.view(torch.float64)[row_layout.SUMS] += torch.stack(sums)
    _tally(row, row_layout.HISTOGRAM, (_binades(bits) - row_layout.LOWEST_BINADE)[nonzero])
    if block:
        _measure_blocks(row, bits.reshape(x.shape), block)


def _measure_blocks(row: Tensor, bits: Tensor, block: int) -> None:
    bits = as_rows(bits)
    ragged = -bits.shape[1] % block
    blocks = torch.nn.functional.pad(bits, (0, ragged)).reshape(-1, block)
    largest = blocks.amax(dim=1)
    finite = largest < row_layout.ABSMIN_TOP
    counted = (blocks != 0) & (blocks < row_layout.ABSMIN_TOP)
    top = _binades(largest)

    row[row_layout.BLOCKS] += blocks.shape[0]
    row[row_layout.ZERO_BLOCKS] += (largest == 0).sum()
    row[row_layout.NONFINITE_BLOCKS] += (~finite).sum()
    row[row_layout.POISONED] += (counted & ~finite[:, None]).sum()
    _tally(row, row_layout.DEPTHS, (top[:, None] - _binades(blocks))[counted & finite[:, None]])
    _tally(row, row_layout.MAXIMA, (top - row_layout.LOWEST_BINADE)[finite & (largest != 0)])


def _tally(row: Tensor, first: int, index: Tensor) -> None:
    row[first : first + row_layout.BINADES] += torch.bincount(index, minlength=row_layout.BINADES)


def _binades(bits: Tensor) -> Tensor:
    """floor(log2) of float64 magnitude bits, held to the range that a row counts."""
    return ((bits >> 52) - _BIAS).clamp(row_layout.LOWEST_BINADE, _HIGHEST_BINADE)


def as_rows(x: Tensor) -> Tensor:
    """Return `x` as a matrix of its last axis; a scalar is [1, 1], no values [0, 1]."""
    return x.reshape(-1, x.shape[-1]) if x.dim() and x.numel() else x.reshape(-1, 1)


def update(
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    pushes: Sequence[Tensor],
    bank: Tensor,
    rows: Sequence[int],
    moves: Tensor,
) -> None:
    """Count each change into its row of the bank, and the moves into that of `moves`."""
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


def count_values(tensors: Sequence[Tensor]) -> int:
    """Return the number of NaN and Inf values of all tensors."""
    return sum(int((~x.to(torch.float64).isfinite()).sum()) for x in tensors)


def unscale(
    gradients: Sequence[Tensor], inverse_scale: Tensor, found_inf: Tensor, bank: Tensor | None, rows: Sequence[int]
) -> None:
    """Measure each gradient, multiply it, and set `found_inf` if any is not finite."""
    if bank is not None:
        measure(gradients, bank, rows, False, 0)
    inverse = inverse_scale.reshape(())
    for gradient in gradients:
        values = gradient.to(torch.float64 if gradient.dtype == torch.float64 else torch.float32)
        product = torch.where(inverse == 1, values, values * inverse).to(gradient.dtype)
        finite = values.isfinite().all() & product.isfinite().all()
        found_inf.masked_fill_(~finite, 1.0)
        gradient.copy_(product)


_COUNTS = (slice(0, row_layout.POSITIVE), slice(row_layout.HISTOGRAM, None))


def merge_rows(target: NDArray[np.int64], groups: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    """Adds each row j to row ``groups[j]`` of the target, by the layout's rules."""
    order = np.argsort(groups, kind="stable")
    groups_present, starts = np.unique(groups[order], return_index=True)
    if not groups_present.size:
        return
    rows = rows[order]
    for fields in _COUNTS:
        target[groups_present, fields] += np.add.reduceat(rows[:, fields], starts, axis=0)
    target[groups_present, row_layout.EXTREMES] = np.maximum(
        target[groups_present, row_layout.EXTREMES], np.maximum.reduceat(rows[:, row_layout.EXTREMES], starts, axis=0)
    )
    sums = np.add.reduceat(rows.view(np.float64)[:, row_layout.SUMS], starts, axis=0)
    target.view(np.float64)[groups_present, row_layout.SUMS] += sums
