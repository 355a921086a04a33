"""Measuring with plain torch operations: the reference for counts, extremes and sums."""

from collections.abc import Sequence

import torch
from torch import Tensor

from plimsoll.kernels import _layout as layout

_BIAS = 1023
_HIGHEST_BINADE = layout.LOWEST_BINADE + layout.BINADES - 1


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
    finite = bits < layout.ABSMIN_TOP
    nonzero = finite & (bits != 0)

    row[layout.COUNT] += x.numel()
    row[layout.ZEROS] += (bits == 0).sum()
    row[layout.NANS] += values.isnan().sum()
    row[layout.POS_INFS] += values.isposinf().sum()
    row[layout.NEG_INFS] += values.isneginf().sum()
    if x.numel():
        negative = values < 0
        found = (
            torch.where(nonzero & ~negative, bits, 0).max(),
            torch.where(nonzero & negative, bits, 0).max(),
            torch.where(nonzero, layout.ABSMIN_TOP - bits, 0).max(),
        )
        keys = row[layout.POSITIVE : layout.NEAREST + 1]
        keys.copy_(torch.maximum(keys, torch.stack(found)))
    held = torch.where(finite, values, 0.0)
    sums = row.view(torch.float64)[layout.SUM : layout.SUMSQ + 1]
    sums += torch.stack((held.sum(), held.abs().sum(), (held * held).sum()))
    _tally(row, layout.HISTOGRAM, (_binades(bits) - layout.LOWEST_BINADE)[nonzero])
    if block:
        _measure_blocks(row, bits.reshape(x.shape), block)


def _measure_blocks(row: Tensor, bits: Tensor, block: int) -> None:
    bits = as_rows(bits)
    ragged = -bits.shape[1] % block
    blocks = torch.nn.functional.pad(bits, (0, ragged)).reshape(-1, block)
    largest = blocks.amax(dim=1)
    finite = largest < layout.ABSMIN_TOP
    counted = (blocks != 0) & (blocks < layout.ABSMIN_TOP)
    top = _binades(largest)

    row[layout.BLOCKS] += blocks.shape[0]
    row[layout.ZERO_BLOCKS] += (largest == 0).sum()
    row[layout.NONFINITE_BLOCKS] += (~finite).sum()
    row[layout.POISONED] += (counted & ~finite[:, None]).sum()
    _tally(row, layout.DEPTHS, (top[:, None] - _binades(blocks))[counted & finite[:, None]])
    _tally(row, layout.MAXIMA, (top - layout.LOWEST_BINADE)[finite & (largest != 0)])


def _tally(row: Tensor, first: int, index: Tensor) -> None:
    row[first : first + layout.BINADES] += torch.bincount(index, minlength=layout.BINADES)


def _binades(bits: Tensor) -> Tensor:
    """floor(log2) of float64 magnitude bits, held to the range that a row counts."""
    return ((bits >> 52) - _BIAS).clamp(layout.LOWEST_BINADE, _HIGHEST_BINADE)


def as_rows(x: Tensor) -> Tensor:
    """`x` as a matrix whose rows are its last axis; a scalar is one row of one, an empty tensor no rows of one."""
    return x.reshape(-1, x.shape[-1]) if x.dim() and x.numel() else x.reshape(-1, 1)
