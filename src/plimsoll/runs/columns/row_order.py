"""Order of a part's rows; of two rows with the same key the later one is valid."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.runs.columns.arrow import Array, Table, array, pa, values_of
from plimsoll.runs.columns.schema import Kind

# Parts are sorted by these columns before the step, so that the rows of one series are next to each other.
KEYS: Mapping[Kind, tuple[str, ...]] = {"spectra": ("collection", "name"), "scalars": ("name",), "events": ()}
# Two rows of one key and step are both valid if they differ in one of these columns.
_DISTINGUISHING: Mapping[Kind, tuple[str, ...]] = {"spectra": ("format", "scale"), "scalars": (), "events": ()}


def ordered(table: Table, kind: Kind, last: Sequence[str] = ()) -> Table:
    """Return the rows without replaced ones, by the kind's key, the step and `last`."""
    # Events have no key: all stay, in the order of their steps.
    if kind == "events":
        return table.take(array(np.argsort(values_of(table["step"]), kind="stable")))
    columns = [codes(table[name]) for name in (*KEYS[kind], "step", *_DISTINGUISHING[kind], *last)]
    order = np.lexsort(columns[::-1])
    is_last = np.ones(len(order), dtype=bool)
    if len(order):
        is_last[:-1] = changes([column[order] for column in columns])
    return table.take(array(order[is_last]))


def by(table: Table, names: Sequence[str]) -> Table:
    """Return the rows sorted by some columns."""
    return table.take(array(np.lexsort([codes(table[name]) for name in reversed(names)])))


def codes(column: Array) -> NDArray[Any]:
    """Return numbers that sort and compare as the values of a column do."""
    if not pa.types.is_string(column.type):
        return values_of(column)
    # In a server one thread imported pandas so while another drew a figure, and Plotly met a half-imported pandas.
    if not len(column):  # combine_chunks of no chunk imports pandas
        return np.empty(0, dtype=np.int64)
    encoded = column.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    distinct = encoded.dictionary.to_pylist()
    rank = np.empty(len(distinct), dtype=np.int64)
    rank[sorted(range(len(distinct)), key=distinct.__getitem__)] = np.arange(len(distinct))
    return rank[values_of(encoded.indices)]


def changes(columns: Sequence[NDArray[Any]]) -> NDArray[np.bool_]:
    """Return for each row but the first whether it differs from the row before."""
    return np.any([column[1:] != column[:-1] for column in columns], axis=0)


def starts(columns: Sequence[NDArray[Any]]) -> NDArray[np.intp]:
    """Return the first row of each group of adjacent rows with equal columns."""
    if not len(columns[0]):
        return np.empty(0, dtype=np.intp)
    return np.concatenate([[0], np.flatnonzero(changes(columns)) + 1])


def spans(table: Table, name: str) -> Iterator[tuple[Any, slice]]:
    """Yield each value of a column by which the rows are sorted, and its rows."""
    first = starts([codes(table[name])])
    ends = [*first[1:].tolist(), len(table)]
    for value, start, end in zip(table[name].take(array(first)).to_pylist(), first.tolist(), ends, strict=False):
        yield value, slice(start, end)
