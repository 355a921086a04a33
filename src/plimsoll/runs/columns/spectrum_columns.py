"""Statistics rows as Arrow columns, columns as rows again, and rows as spectra.

A row has 289 numbers, or 848 with a block record (`plimsoll.row_layout`). As columns, its binades are trimmed
to the occupied ones, which takes about a sixth of the memory. Columns become the same rows again, except for the sign
of a sum that is zero.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from plimsoll import row_layout
from plimsoll.errors import ArgumentError
from plimsoll.runs.columns.arrow import WRITING_POOL, Array, Table, array, pa, pc, values_of
from plimsoll.runs.columns.schema import ADDED, Series, words
from plimsoll.runs.columns.step_table import StepTable, merged_extras
from plimsoll.runs.records import EXTRAS, OPTIONAL_EXTRAS
from plimsoll.spectrum import Source, Spectrum
from plimsoll.spectrum.record import BLOCK_COUNTS, COUNTS, EXTREMES, SUMS

Counts = NDArray[np.int64]


def columns_of(steps: int | Counts, table: StepTable) -> Table:
    """Return a step table as a part's columns, with series' numbers for their names.

    Its rows are merged. `steps` is the step, or that of each row. Block records and optional extras become columns if
    there are any.
    """
    rows, blocks = table.rows, table.blocks
    # One transposed copy of the few numbers in front of the binades, in place of a pass over all rows for each of them.
    head = np.ascontiguousarray(rows[:, : row_layout.HISTOGRAM].T)
    first, lengths, binades = _trimmed(rows, row_layout.HISTOGRAM)
    columns = {
        "step": array(np.full(len(table), steps, dtype=np.int64)),
        "series": array(table.series),
        **{name: array(head[i]) for i, name in enumerate(COUNTS)},
        **{name: _nullable(values) for name, values in zip(EXTREMES, _extremes(head), strict=True)},
        **{name: _sum(name, head[row_layout.SUM + i].view(np.float64)) for i, name in enumerate(SUMS)},
        "scale": array(table.scales),
        "lowest": array(first, missing=lengths == 0),
        "binades": binades,
    }
    extras = dict(zip(EXTRAS, table.extras.T, strict=True))
    for group in OPTIONAL_EXTRAS:
        if all(np.isnan(extras[name]).all() for name in group):
            extras = {name: values for name, values in extras.items() if name not in group}
    columns |= {name: _nullable(values) for name, values in extras.items()}
    if blocks is not None and blocks.any():
        columns |= _block_columns(rows, blocks)
    return pa.table(columns)


def _block_columns(rows: Counts, blocks: Counts) -> dict[str, Array]:
    """Return the columns of block records, null where a row has none."""
    none = blocks == 0
    # A block's largest value is at depth 0 by definition, so depths always begin there and need no first index.
    depths = _trimmed(rows, row_layout.DEPTHS, none)[2]
    first, lengths, maxima = _trimmed(rows, row_layout.MAXIMA, none)
    return {
        "block": array(blocks.astype(np.int32), missing=none),
        **{name: array(rows[:, row_layout.BLOCKS + i], missing=none) for i, name in enumerate(BLOCK_COUNTS)},
        "depths": depths,
        "lowest_maximum": array(first, missing=lengths == 0),
        "maxima": maxima,
    }


def spectra_table(tables: Sequence[Table], series: Sequence[Series]) -> Table:
    """Return a part's table from its steps' columns, by collection, name and step."""
    whole = pa.concat_tables(tables, promote_options="default")
    used, codes = np.unique(values_of(whole["series"]), return_inverse=True)
    named: list[Series] = [series[int(i)] for i in used]
    by_name = sorted(range(len(named)), key=lambda i: (named[i].collection, named[i].name))
    position = np.empty(len(named), dtype=np.int64)
    position[by_name] = np.arange(len(named))
    order = np.lexsort((values_of(whole["step"]), position[codes]))
    codes = codes[order]
    rows = array(order)
    # Column by column: a copy of the whole table, and then of its rows, would be the most memory that a watch takes.
    columns = {
        name: pc.take(whole[name].combine_chunks(WRITING_POOL), rows, memory_pool=WRITING_POOL)
        for name in whole.column_names
        if name != "series"
    }
    return pa.table(
        {
            "step": columns.pop("step"),
            "collection": words([s.collection for s in named], codes),
            "name": words([s.name for s in named], codes),
            "format": words([s.format for s in named], codes),
            "shared": array(np.array([s.shared for s in named], dtype=bool)[codes]),
            **columns,
        }
    )


def summed(table: Table, starts: NDArray[np.intp]) -> Table:
    """Return a part's columns for rows merged by group, without block records.

    A group, which begins at one of the rows `starts`, has one name, step, format and scale.
    """
    # Merged as `step_table.merged_rows` merges. Rows of a bank would take ten times the memory of the columns.
    if not len(starts):
        return table.slice(0, 0).drop_columns(["rank"])
    same = ("step", "collection", "name", "format", "shared", "scale")
    columns = {name: table[name].take(array(starts)) for name in same}
    columns |= {name: array(np.add.reduceat(values_of(table[name]), starts)) for name in COUNTS}
    for name in EXTREMES:
        end = np.fmin if name in ("min", "absmin") else np.fmax
        columns[name] = _nullable(end.reduceat(numbers(table, name), starts))
    with np.errstate(all="ignore"):  # sums of float64 tensors may be infinite, of either sign
        columns |= {name: _sum(name, np.add.reduceat(numbers(table, name), starts)) for name in SUMS}
    there = [name for name in EXTRAS if name in table.column_names and table[name].null_count < len(table)]
    if there:
        every = merged_extras(np.stack([numbers(table, name) for name in EXTRAS], axis=1), starts)
        columns |= {name: _nullable(every[:, EXTRAS.index(name)]) for name in there}
    return pa.table({**columns, **_summed_binades(table, starts)})


def _summed_binades(table: Table, starts: NDArray[np.intp]) -> dict[str, Array]:
    """Return the columns `lowest` and `binades` of rows merged group by group."""
    place, counts = list_items(table["binades"])
    first, lengths = integers(table, "lowest"), np.diff(place)
    some = lengths > 0
    beyond = row_layout.LOWEST_BINADE + row_layout.BINADES
    lowest = np.minimum.reduceat(np.where(some, first, beyond), starts)
    end = np.maximum.reduceat(np.where(some, first + lengths, row_layout.LOWEST_BINADE), starts)
    sizes = np.maximum(end - lowest, 0)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
    group = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(table)))
    totals = np.zeros(offsets[-1], dtype=np.int64)
    np.add.at(
        totals, np.repeat((offsets[:-1] - lowest)[group] + first - place[:-1], lengths) + np.arange(len(counts)), counts
    )
    return {
        "lowest": array(lowest.astype(np.int16), missing=sizes == 0),
        "binades": pa.ListArray.from_arrays(array(offsets.astype(np.int32)), array(totals)),
    }


def rows_of(table: Table) -> Counts:
    """Return the statistics rows of stored spectra, wide if one has a block record.

    A wide row without a record ends in zeros; `blocks_of` tells which ones these are.
    """
    wide = blocks_of(table) is not None
    rows = np.zeros((len(table), row_layout.WIDE if wide else row_layout.NARROW), dtype=np.int64)
    for i, name in enumerate(COUNTS):
        rows[:, i] = values_of(table[name])
    low, high, absmin = (numbers(table, name) for name in EXTREMES[:3])
    rows[:, row_layout.POSITIVE] = _bits(np.where(high > 0, high, 0.0))
    rows[:, row_layout.NEGATIVE] = _bits(np.where(low < 0, -low, 0.0))
    rows[:, row_layout.NEAREST] = np.where(np.isnan(absmin), 0, row_layout.ABSMIN_TOP - _bits(absmin))
    for i, name in enumerate(SUMS):
        rows[:, row_layout.SUM + i] = _bits(numbers(table, name))
    positions, counts = _occupied(table, "binades", integers(table, "lowest") - row_layout.LOWEST_BINADE)
    rows[positions[0], row_layout.HISTOGRAM + positions[1]] = counts
    if wide:
        _fill_block_records(table, rows)
    return rows


def _fill_block_records(table: Table, rows: Counts) -> None:
    for i, name in enumerate(BLOCK_COUNTS):
        rows[:, row_layout.BLOCKS + i] = integers(table, name)
    maxima = integers(table, "lowest_maximum") - row_layout.LOWEST_BINADE
    for name, start, first in (
        ("depths", row_layout.DEPTHS, np.zeros_like(maxima)),
        ("maxima", row_layout.MAXIMA, maxima),
    ):
        (row, binade), counts = _occupied(table, name, first)
        rows[row, start + binade] = counts


def blocks_of(table: Table) -> Counts | None:
    """Return the block length of each row's record, 0 for none; None if none has one."""
    if "block" not in table.column_names or table["block"].null_count == len(table):
        return None
    return integers(table, "block")


def digests(table: Table) -> NDArray[np.uint64]:
    """Return a 64-bit digest of each spectrum's binades."""
    (row, binade), counts = _occupied(table, "binades", integers(table, "lowest") - row_layout.LOWEST_BINADE)
    # Equal binades have equal digests. Different ones differ with near certainty, since the weights are random.
    weights = np.random.default_rng(0x504C494D).integers(1, 1 << 63, row_layout.BINADES, dtype=np.uint64) | np.uint64(1)
    result = np.zeros(len(table), dtype=np.uint64)
    np.add.at(result, row, counts.view(np.uint64) * weights[binade])
    return result


def numbers(table: Table, name: str) -> NDArray[np.float64]:
    """Return a column as floats; NaN where it is null or does not exist."""
    if name not in table.column_names:
        return np.broadcast_to(np.nan, len(table))  # takes no memory: a part lacks most of the optional columns
    return np.asarray(values_of(table[name]), dtype=np.float64)


def integers(table: Table, name: str) -> Counts:
    """Return a column of integers; null is 0, or -149 for the exponents of binades."""
    null = row_layout.LOWEST_BINADE if name in ("lowest", "lowest_maximum") else 0
    return values_of(table[name], null).astype(np.int64)


def list_items(column: Array) -> tuple[Counts, Counts]:
    """Return each row's first item, the last one's end, and all items; null is empty."""
    whole = column
    if isinstance(whole, pa.ChunkedArray) and whole.num_chunks > 1:  # pyarrow would copy one chunk too
        whole = whole.combine_chunks()
    # Older versions of pyarrow return a chunked array of one chunk.
    if isinstance(whole, pa.ChunkedArray):
        whole = whole.chunk(0) if whole.num_chunks else pa.nulls(0, whole.type)
    offsets = values_of(whole.offsets).astype(np.int64)
    return offsets - offsets[0], values_of(whole.flatten())


def _occupied(table: Table, name: str, first: Counts) -> tuple[tuple[Counts, Counts], Counts]:
    """Return each stored count's row and binade, and the counts.

    `first` is each row's lowest binade.
    """
    start, counts = list_items(table[name])
    lengths = np.diff(start)
    binade = np.arange(len(counts)) + np.repeat(first - start[:-1], lengths)
    return (np.repeat(np.arange(len(table)), lengths), binade), counts


def _trimmed(
    rows: Counts, start: int, missing: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.int16], Counts, Array]:
    """Return each row's lowest binade, its number of binades, and their counts.

    The binades, stored from the column `start` on, reach from the lowest occupied one to the highest. Lists of
    `missing` rows are null.
    """
    # Positions rather than masks of whole rows: about 30 of 277 binades are occupied, and this takes half the time.
    occupied = np.flatnonzero(rows[:, start : start + row_layout.BINADES] != 0)
    row_starts = np.arange(len(rows) + 1) * row_layout.BINADES
    bounds = np.searchsorted(occupied, row_starts)
    some = bounds[1:] > bounds[:-1]
    if missing is not None:
        some &= ~missing
    first, lengths = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
    first[some] = occupied[bounds[:-1][some]] - row_starts[:-1][some]
    lengths[some] = occupied[bounds[1:][some] - 1] - row_starts[:-1][some] - first[some] + 1
    ends = np.cumsum(lengths)
    positions = np.arange(len(rows)) * rows.shape[1] + start + first - (ends - lengths)
    counts = rows.reshape(-1)[np.repeat(positions, lengths) + np.arange(lengths.sum())]
    offsets = np.concatenate([np.zeros(1, dtype=np.int32), ends.astype(np.int32)])
    lists = pa.ListArray.from_arrays(array(offsets), array(counts), mask=None if missing is None else array(missing))
    return (first + row_layout.LOWEST_BINADE).astype(np.int16), lengths, lists


def _extremes(head: Counts) -> Sequence[NDArray[np.float64]]:
    """Return the columns `EXTREMES` from transposed rows, NaN where there is no value."""
    positive, negative = head[row_layout.POSITIVE : row_layout.NEGATIVE + 1].view(np.float64)
    nearest = head[row_layout.NEAREST]
    absmin = np.where(nearest != 0, (row_layout.ABSMIN_TOP - nearest).view(np.float64), np.nan)
    zeros = head[row_layout.ZEROS] != 0
    finite = zeros | (nearest != 0)
    low = np.where(negative > 0, -negative, np.where(zeros, 0.0, absmin))
    high = np.where(positive > 0, positive, np.where(zeros, 0.0, -absmin))
    return low, high, absmin, np.where(finite, np.maximum(positive, negative), np.nan)


def _sum(name: str, values: NDArray[np.float64]) -> Array:
    return _nullable(values) if name in ADDED else array(values)


def _nullable(values: NDArray[np.float64]) -> Array:
    return array(values, missing=np.isnan(values))


def _bits(values: NDArray[np.float64]) -> Counts:
    return np.ascontiguousarray(values).view(np.int64)


def true_spectrum(row: NDArray[np.int64], fmt: str, scale: float, block: int = 0) -> Spectrum:
    """Return the true values' spectrum, with its scale if that is a power of two."""
    stored = stored_spectrum(row, fmt, block)
    # Another scale moves values between binades, which cannot be undone from counts. The stored spectrum is returned
    # then, without a source, as for values beyond the range of binades.
    fraction, exponent = math.frexp(scale)
    if fraction == 0.5:
        if exponent == 1:
            return stored
        with contextlib.suppress(ArgumentError):
            return stored.scaled(1 - exponent)
    return replace(stored, source=None, grid=None)


def stored_spectrum(row: NDArray[np.int64], fmt: str, block: int = 0) -> Spectrum:
    """Return the stored values' spectrum. `block`: its record's block length, or 0."""
    return Spectrum.from_row(np.ascontiguousarray(row[: row_layout.width(block)]), Source(fmt), block)
