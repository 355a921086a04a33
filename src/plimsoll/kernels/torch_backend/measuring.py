"""Measuring with plain torch operations: the reference for counts, extremes and sums."""

from collections.abc import Sequence

import torch
from torch import Tensor

from plimsoll.kernels import row_layout

_BIAS = 1023
_HIGHEST_BINADE = row_layout.LOWEST_BINADE + row_layout.BINADES - 1


def measure(tensors: Sequence[Tensor], bank: Tensor, rows: Sequence[int], accumulate: bool, block: int) -> None:
    """Counts each tensor into its row of the bank; without `accumulate` the rows are emptied first."""
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
        found = (
            torch.where(nonzero & ~negative, bits, 0).max(),
            torch.where(nonzero & negative, bits, 0).max(),
            torch.where(nonzero, row_layout.ABSMIN_TOP - bits, 0).max(),
        )
        keys = row[row_layout.POSITIVE : row_layout.NEAREST + 1]
        keys.copy_(torch.maximum(keys, torch.stack(found)))
    held = torch.where(finite, values, 0.0)
    sums = row.view(torch.float64)[row_layout.SUM : row_layout.SUMSQ + 1]
    sums += torch.stack((held.sum(), held.abs().sum(), (held * held).sum()))
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
    """`x` as a matrix whose rows are its last axis; a scalar is one row of one, an empty tensor no rows of one."""
    return x.reshape(-1, x.shape[-1]) if x.dim() and x.numel() else x.reshape(-1, 1)
