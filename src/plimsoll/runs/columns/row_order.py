"""Order of a part's rows; of two rows with the same key the later one is valid."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.runs.columns.arrow import Array, Table, array, pa, values_of
from plimsoll.runs.columns.schema import Kind
from plimsoll.runs.columns.spectrum_columns import list_items

# Parts are sorted by these columns before the step, so that the rows of one series are next to each other.
KEYS: Mapping[Kind, tuple[str, ...]] = {"spectra": ("collection", "name"), "scalars": ("name",), "events": ()}
# Two rows of one key and step are both valid if they differ in one of these columns.
_DISTINGUISHING: Mapping[Kind, tuple[str, ...]] = {"spectra": ("format", "scale"), "scalars": (), "events": ()}
Places = NDArray[np.int64]
_MOST_BYTES = 1 << 31  # of lists that are copied here


def ordered(table: Table, kind: Kind, last: Sequence[str] = (), *, moved: bool = True) -> Table:
    """Return the rows without replaced ones, by the kind's key, the step and `last`.

    These columns order what is equal in all others. Unless `moved`, rows stay where they are as long as those of each
    key are in order, which is the case in most runs and saves half the time of reading one.
    """
    # Events have no key: all stay, in the order of their steps.
    if kind == "events":
        return table.take(array(np.argsort(values_of(table["step"]), kind="stable")))
    table = table.unify_dictionaries()
    columns = [codes(table[name]) for name in (*KEYS[kind], "step", *_DISTINGUISHING[kind], *last)]
    order = np.lexsort(columns[::-1])
    is_last = np.ones(len(order), dtype=bool)
    if len(order):
        is_last[:-1] = changes([column[order] for column in columns])
    if not moved and is_last.all() and _is_in_order(columns[: len(KEYS[kind])], order):
        return table
    return _taken(table, order[is_last])


def _is_in_order(key: Sequence[NDArray[Any]], order: NDArray[np.intp]) -> bool:
    """Return whether rows of the same key follow each other as in `order`."""
    return bool(np.all((np.diff(order) > 0) | changes([column[order] for column in key])))


def _taken(table: Table, order: NDArray[np.intp]) -> Table:
    if not len(order):
        return table.slice(0, 0)
    # Rows of one series and part stay next to each other. So their lists are copied together, in a quarter of the time
    # in which pyarrow takes them one by one.
    lists = [
        field.name
        for field, column in zip(table.schema, table.columns, strict=True)
        if pa.types.is_list(field.type) and not column.null_count and column.nbytes < _MOST_BYTES
    ]
    taken = table.drop_columns(lists).take(array(order))
    for name in lists:
        chunks: list[tuple[Places, Places]] = [list_items(chunk) for chunk in table[name].chunks]
        chunk = np.repeat(np.arange(len(chunks)), [len(start) - 1 for start, _ in chunks])[order]
        begin = np.concatenate([start[:-1] for start, _ in chunks])[order]
        end = np.concatenate([start[1:] for start, _ in chunks])[order]
        offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(end - begin, dtype=np.int32)])
        first = np.concatenate([[0], np.flatnonzero((np.diff(order) != 1) | (np.diff(chunk) != 0)) + 1])
        last = np.append(first[1:], len(order)) - 1
        spans = zip(chunk[first].tolist(), begin[first].tolist(), end[last].tolist(), strict=True)
        pieces: list[Places] = [chunks[number][1][start:stop] for number, start, stop in spans]
        flat = array(np.concatenate(pieces))
        column = pa.ListArray.from_arrays(array(offsets), flat, type=table[name].type)
        taken = taken.append_column(table.schema.field(name), column)
    return taken.select(table.column_names)


def by(table: Table, names: Sequence[str]) -> Table:
    """Return the rows sorted by some columns."""
    return table.take(array(np.lexsort([codes(table[name]) for name in reversed(names)])))


def codes(column: Array) -> NDArray[Any]:
    """Return numbers that sort and compare as the values of a column do."""
    is_word = pa.types.is_string(column.type) or pa.types.is_dictionary(column.type)
    return places(column)[1] if is_word else values_of(column)


def places(column: Array) -> tuple[list[str], NDArray[np.int64]]:
    """Return the words in a column, sorted, and the place of each row's word."""
    # In a server one thread imported pandas so while another drew a figure, and Plotly met a half-imported pandas.
    if not len(column):  # pyarrow imports pandas to combine no chunks
        return [], np.empty(0, dtype=np.int64)
    chunks = column.dictionary_encode().unify_dictionaries().chunks
    known: list[str] = chunks[0].dictionary.to_pylist()
    indices = np.concatenate([values_of(chunk.indices) for chunk in chunks])
    # Words of rows that were left out stay in a dictionary, and that of a file may have a word twice.
    used = np.flatnonzero(np.bincount(indices, minlength=len(known))).tolist()
    words = sorted({known[i] for i in used})
    rank, place = {word: i for i, word in enumerate(words)}, np.zeros(len(known), dtype=np.int64)
    place[used] = [rank[known[i]] for i in used]
    return words, place[indices]


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
