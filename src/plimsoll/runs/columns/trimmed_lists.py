"""Rows of counts with their empty ends cut off: flat arrays with lengths, and lists of a column."""

import numpy as np
from numpy.typing import NDArray

from plimsoll.runs.columns.arrow import Array, array, pa, values_of

Counts = NDArray[np.int64]


def trimmed(histogram: Counts) -> tuple[NDArray[np.intp], Counts, Counts]:
    """Of each row the first occupied index, the number of indices to the last one, and all those counts, flat."""
    occupied = histogram != 0
    first = occupied.argmax(axis=1)
    lengths = np.where(occupied.any(axis=1), histogram.shape[1] - occupied[:, ::-1].argmax(axis=1) - first, 0)
    width = int((first + lengths).max(initial=0))
    columns = np.arange(width)
    kept = (columns >= first[:, None]) & (columns < (first + lengths)[:, None])
    return first, lengths.astype(np.int64), histogram[:, :width][kept]


def lists(lengths: Counts, values: Counts, order: NDArray[np.intp], missing: NDArray[np.bool_] | None = None) -> Array:
    """The lists in another order of rows; null where `missing` (of the rows as they were)."""
    starts = np.cumsum(lengths) - lengths
    lengths = lengths[order]
    ends = np.cumsum(lengths)
    within = np.arange(len(values)) - np.repeat(ends - lengths, lengths)
    offsets = np.concatenate([np.zeros(1, dtype=np.int32), ends.astype(np.int32)])
    mask = None if missing is None else array(missing[order])
    return pa.ListArray.from_arrays(
        array(offsets), array(values[np.repeat(starts[order], lengths) + within]), mask=mask
    )


def flat(column: Array) -> tuple[Counts, Counts]:
    """Where each row's counts begin (one more than there are rows), and all counts; a null is a row without any."""
    found = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(found, pa.ChunkedArray):
        found = found.chunk(0) if found.num_chunks else pa.nulls(0, found.type)
    offsets = values_of(found.offsets).astype(np.int64)
    return offsets - offsets[0], values_of(found.flatten())
