"""Tables of spectra back into rows of a bank, and what follows from many rows at once."""

import numpy as np
from numpy.typing import NDArray

from plimsoll.kernels import _layout as layout
from plimsoll.runs._arrow import Table, pa, values_of
from plimsoll.runs._tables import COUNTS, EXTREMES, SUMS


def rows_of(table: Table) -> NDArray[np.int64]:
    """The rows that spectra were made of, exactly, but for the sign of a zero sum."""
    rows = np.zeros((len(table), layout.NARROW), dtype=np.int64)
    for i, name in enumerate(COUNTS):
        rows[:, i] = values_of(table[name])
    low, high, absmin = (numbers(table, name) for name in EXTREMES[:3])
    rows[:, layout.POSITIVE] = _bits(np.where(high > 0, high, 0.0))
    rows[:, layout.NEGATIVE] = _bits(np.where(low < 0, -low, 0.0))
    rows[:, layout.NEAREST] = np.where(np.isnan(absmin), 0, layout.ABSMIN_TOP - _bits(absmin))
    for i, name in enumerate(SUMS):
        rows[:, layout.SUM + i] = _bits(numbers(table, name))
    places, counts = _occupied(table)
    rows[places // layout.BINADES, layout.HISTOGRAM + places % layout.BINADES] = counts
    return rows


def digests(table: Table) -> NDArray[np.uint64]:
    """A 64-bit digest of each spectrum's binades, equal for equal ones; random weights make others differ."""
    places, counts = _occupied(table)
    weights = np.random.default_rng(0x504C494D).integers(1, 1 << 63, layout.BINADES, dtype=np.uint64) | np.uint64(1)
    result = np.zeros(len(table), dtype=np.uint64)
    np.add.at(result, places // layout.BINADES, counts.view(np.uint64) * weights[places % layout.BINADES])
    return result


def numbers(table: Table, name: str) -> NDArray[np.float64]:
    """A column of floats, NaN where it is null."""
    return np.asarray(values_of(table[name]), dtype=np.float64)


def _occupied(table: Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All stored counts of all rows, and where each belongs: row * 277 + index of the binade."""
    lists = table["binades"].combine_chunks()
    if isinstance(lists, pa.ChunkedArray):
        lists = lists.chunk(0) if lists.num_chunks else pa.nulls(0, lists.type)
    lengths = np.diff(values_of(lists.offsets)).astype(np.int64)
    first = np.nan_to_num(numbers(table, "lowest")).astype(np.int64) - layout.LOWEST_BINADE
    begins = np.arange(len(table)) * layout.BINADES + first
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(begins, lengths) + within, values_of(lists.flatten())


def _bits(values: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.ascontiguousarray(values).view(np.int64)
