"""Table of one step's statistics rows: at most one row for each series and scale.

Rows stay in the layout of a bank (`plimsoll.row_layout`), so that no Python object is made for any of them.
Merging adds counts and sums, and takes the larger of each extreme. Block records add up where all merged rows have one
of the same block length. As in `Spectrum.__add__`, values without a block record make the sum one without.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plimsoll import row_layout
from plimsoll.errors import ArgumentError
from plimsoll.runs.records import EXTRAS, Batch

_NORM, _LARGEST = EXTRAS.index("weight_norm"), EXTRAS.index("largest_error")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTable:
    """Columns of one step, a NumPy array each."""

    series: NDArray[np.int64]  # number of each row's series
    scales: NDArray[np.float64]  # factor of the stored values over the true ones
    rows: NDArray[np.int64]  # statistics rows, int64[n, 289], or int64[n, 848] with block records
    extras: NDArray[np.float64]  # float64[n, 15], a column for each of `EXTRAS`, NaN for none
    blocks: NDArray[np.int64] | None = None  # Block length of each record, 0 for none. None for narrow rows.

    def __len__(self) -> int:
        return len(self.series)


def from_batch(batch: Batch, registered: int) -> StepTable:
    """Return the table of a batch, merged, of whose series so many are registered.

    Raises an `ArgumentError` if arrays of the batch contradict each other.
    """
    entries = len(batch.index)
    scales = np.ones(entries) if batch.scales is None else np.asarray(batch.scales, dtype=np.float64)
    extras = np.full((entries, len(EXTRAS)), np.nan)
    for name, values in batch.extras.items():
        if name not in EXTRAS or np.shape(values) != (entries,):
            raise _refused(f"extras among {EXTRAS}, one number per entry", f"{name!r} of shape {np.shape(values)}")
        extras[:, EXTRAS.index(name)] = values
    _check(batch, scales, registered)
    series = np.asarray(batch.series, dtype=np.int64)
    order, starts = _groups(series, scales)
    # Rows are gathered once, and in order: they are two megabytes for seven hundred tensors, at every sample.
    blocks = None if batch.blocks is None else np.asarray(batch.blocks, dtype=np.int64)[order]
    rows = batch.rows[np.asarray(batch.index)[order]]
    return _grouped(series[order], scales[order], rows, blocks, extras[order], starts)


def concatenated(parts: Sequence[StepTable]) -> StepTable:
    """Return the rows of all tables, which may be narrow and wide."""
    wide = any(p.blocks is not None for p in parts)
    return StepTable(
        series=np.concatenate([p.series for p in parts]),
        scales=np.concatenate([p.scales for p in parts]),
        rows=np.concatenate([_widened(p.rows) if wide else p.rows for p in parts]),
        extras=np.concatenate([p.extras for p in parts]),
        blocks=np.concatenate([_blocks(p) for p in parts]) if wide else None,
    )


def _widened(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.pad(rows, ((0, 0), (0, row_layout.WIDE - rows.shape[1])))


def _blocks(part: StepTable) -> NDArray[np.int64]:
    return np.zeros(len(part), dtype=np.int64) if part.blocks is None else part.blocks


def merged(table: StepTable) -> StepTable:
    """Return the table with rows of one series and scale merged, sorted by both."""
    order, starts = _groups(table.series, table.scales)
    blocks = None if table.blocks is None else table.blocks[order]
    return _grouped(table.series[order], table.scales[order], table.rows[order], blocks, table.extras[order], starts)


def _groups(series: NDArray[np.int64], scales: NDArray[np.float64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the order by series and scale, and the start of each pair in it."""
    order = np.lexsort((scales, series))
    series, scales = series[order], scales[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = (series[1:] != series[:-1]) | (scales[1:] != scales[:-1])
    return order, np.flatnonzero(first)


def _grouped(
    series: NDArray[np.int64],
    scales: NDArray[np.float64],
    rows: NDArray[np.int64],
    blocks: NDArray[np.int64] | None,
    extras: NDArray[np.float64],
    starts: NDArray[np.intp],
) -> StepTable:
    """Return sorted rows with those of one group merged."""
    if len(starts) < len(rows):
        (rows, blocks), extras = merged_rows(rows, blocks, starts), merged_extras(extras, starts)
    return StepTable(series=series[starts], scales=scales[starts], rows=rows, extras=extras, blocks=blocks)


def merged_rows(
    rows: NDArray[np.int64], blocks: NDArray[np.int64] | None, starts: NDArray[np.intp]
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Return rows merged by group, and block lengths; `starts` has the first rows."""
    result = np.add.reduceat(rows, starts, axis=0)
    result[:, row_layout.EXTREMES] = np.maximum.reduceat(rows[:, row_layout.EXTREMES], starts, axis=0)
    sums = np.ascontiguousarray(rows[:, row_layout.SUMS]).view(np.float64)
    with np.errstate(all="ignore"):  # sums of float64 tensors may be infinite, of either sign
        result[:, row_layout.SUMS] = np.add.reduceat(sums, starts, axis=0).view(np.int64)
    if blocks is None:
        return result, None
    agreed = _agreed(rows, blocks, starts)
    result[agreed == 0, row_layout.NARROW :] = 0
    return result, agreed


def _agreed(rows: NDArray[np.int64], blocks: NDArray[np.int64], starts: NDArray[np.intp]) -> NDArray[np.int64]:
    """Return the groups' block lengths; 0 where nonempty rows differ or lack one."""
    counted = rows[:, row_layout.COUNT] > 0
    highest = np.maximum.reduceat(np.where(counted, blocks, 0), starts)
    lowest = np.minimum.reduceat(np.where(counted, blocks, np.iinfo(np.int64).max), starts)
    return np.where(highest == lowest, highest, 0)


def merged_extras(extras: NDArray[np.float64], starts: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the sums of extras group by group, NaN where all are NaN."""
    there = ~np.isnan(extras)
    contributions = np.add.reduceat(there, starts, axis=0, dtype=np.int64)
    result = np.add.reduceat(np.where(there, extras, 0.0), starts, axis=0)
    # Norms add as squares, and of the largest errors the larger counts.
    result[:, _LARGEST] = np.maximum.reduceat(np.where(there[:, _LARGEST], extras[:, _LARGEST], 0.0), starts)
    result[contributions == 0] = np.nan
    norms = np.where(there[:, _NORM], extras[:, _NORM], 0.0)
    several = contributions[:, _NORM] > 1  # one norm alone stays as it is: its square's root may be rounded
    result[several, _NORM] = np.sqrt(np.add.reduceat(norms * norms, starts))[several]
    return result


def _check(batch: Batch, scales: NDArray[np.float64], registered: int) -> None:
    entries = len(batch.index)
    width = row_layout.NARROW if batch.blocks is None else row_layout.WIDE
    if batch.rows.dtype != np.int64 or batch.rows.ndim != 2 or batch.rows.shape[1] != width:
        raise _refused(f"rows int64[n, {width}]", f"{batch.rows.dtype}{list(batch.rows.shape)}")
    if np.shape(batch.series) != (entries,) or scales.shape != (entries,):
        raise _refused("index, series and scales of one length", f"{entries}, {len(batch.series)}, {len(scales)}")
    if entries and not 0 <= int(np.min(batch.index)) <= int(np.max(batch.index)) < len(batch.rows):
        raise _refused(f"indices below {len(batch.rows)} rows", f"up to {int(np.max(batch.index))}")
    if entries and not 0 <= int(np.min(batch.series)) <= int(np.max(batch.series)) < registered:
        raise _refused(f"series below {registered}", f"up to {int(np.max(batch.series))}")
    if not bool(np.all(np.isfinite(scales) & (scales > 0))):
        raise _refused("positive finite scales", f"{scales[~(np.isfinite(scales) & (scales > 0))][0]}")
    if batch.blocks is not None:
        _check_blocks(batch, np.asarray(batch.blocks))


def _check_blocks(batch: Batch, blocks: NDArray[np.int64]) -> None:
    if blocks.shape != (len(batch.index),) or blocks.dtype.kind != "i" or bool((blocks < 0).any()):
        raise _refused("one block length per entry, 0 for none", f"{blocks.dtype}{list(blocks.shape)}")
    rows = batch.rows[np.asarray(batch.index)]
    unmeasured = (blocks > 0) & (rows[:, row_layout.COUNT] > 0) & (rows[:, row_layout.BLOCKS] == 0)
    if bool(unmeasured.any()):
        raise _refused("rows that were measured in blocks", f"one that was not, with {blocks[unmeasured][0]}")


def _refused(expected: str, got: str) -> ArgumentError:
    return ArgumentError(
        f"Batch: expected {expected}; got {got}. Build it from one bank and RunWriter.series' numbers."
    )
