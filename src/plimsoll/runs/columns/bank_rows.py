"""Tables of spectra back into rows of a bank, and what follows from many rows at once."""

import numpy as np
from numpy.typing import NDArray

from plimsoll.kernels import row_layout
from plimsoll.runs.columns import block_columns, trimmed_lists
from plimsoll.runs.columns.arrow import Table, values_of
from plimsoll.runs.columns.spectrum_table import COUNTS, EXTREMES, SUMS


def rows_of(table: Table) -> NDArray[np.int64]:
    """The rows that spectra were made of, exactly, but for the sign of a zero sum; wide where one has a block record.

    The end of a wide row without a record is zero; `blocks_of` says which these are.
    """
    wide = block_columns.blocks_of(table) is not None
    rows = np.zeros((len(table), row_layout.WIDE if wide else row_layout.NARROW), dtype=np.int64)
    for i, name in enumerate(COUNTS):
        rows[:, i] = values_of(table[name])
    low, high, absmin = (numbers(table, name) for name in EXTREMES[:3])
    rows[:, row_layout.POSITIVE] = _bits(np.where(high > 0, high, 0.0))
    rows[:, row_layout.NEGATIVE] = _bits(np.where(low < 0, -low, 0.0))
    rows[:, row_layout.NEAREST] = np.where(np.isnan(absmin), 0, row_layout.ABSMIN_TOP - _bits(absmin))
    for i, name in enumerate(SUMS):
        rows[:, row_layout.SUM + i] = _bits(numbers(table, name))
    places, counts = _occupied(table)
    rows[places // row_layout.BINADES, row_layout.HISTOGRAM + places % row_layout.BINADES] = counts
    if wide:
        block_columns.fill_ends(table, rows)
    return rows


def blocks_of(table: Table) -> NDArray[np.int64] | None:
    """The block length of each spectrum's record, 0 for none; None where no row has one, and rows are narrow."""
    return block_columns.blocks_of(table)


def digests(table: Table) -> NDArray[np.uint64]:
    """A 64-bit digest of each spectrum's binades, equal for equal ones; random weights make others differ."""
    places, counts = _occupied(table)
    weights = np.random.default_rng(0x504C494D).integers(1, 1 << 63, row_layout.BINADES, dtype=np.uint64) | np.uint64(1)
    result = np.zeros(len(table), dtype=np.uint64)
    np.add.at(result, places // row_layout.BINADES, counts.view(np.uint64) * weights[places % row_layout.BINADES])
    return result


def numbers(table: Table, name: str) -> NDArray[np.float64]:
    """A column of floats, NaN where it is null."""
    return np.asarray(values_of(table[name]), dtype=np.float64)


def _occupied(table: Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All stored counts of all rows, and where each belongs: row * 277 + index of the binade."""
    start, counts = trimmed_lists.flat(table["binades"])
    lengths = np.diff(start)
    first = np.nan_to_num(numbers(table, "lowest")).astype(np.int64) - row_layout.LOWEST_BINADE
    begins = np.arange(len(table)) * row_layout.BINADES + first
    within = np.arange(len(counts)) - np.repeat(start[:-1], lengths)
    return np.repeat(begins, lengths) + within, counts


def _bits(values: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.ascontiguousarray(values).view(np.int64)
