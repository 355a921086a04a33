"""Sorting rows, and which of two counts: of those that agree in all that tells rows apart, the later one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.runs.columns.arrow import Array, Table, array, pa, values_of
from plimsoll.runs.columns.spectrum_table import BESIDE, KEYS, Kind


def ordered(table: Table, kind: Kind, first: Sequence[str] = ()) -> Table:
    """Rows sorted by the columns `first`, the kind's key and the step; later rows stay, earlier equals go.

    Events have no key and all stay, in the order of their steps.
    """
    if kind == "events":
        return table.take(array(np.argsort(values_of(table["step"]), kind="stable")))
    columns = [codes(table[name]) for name in (*first, *KEYS[kind], "step", *BESIDE[kind])]
    order = np.lexsort(columns[::-1])
    last = np.ones(len(order), dtype=bool)
    if len(order):
        last[:-1] = changes([column[order] for column in columns])
    return table.take(array(order[last]))


def by(table: Table, names: Sequence[str]) -> Table:
    """Rows sorted by some columns."""
    return table.take(array(np.lexsort([codes(table[name]) for name in reversed(names)])))


def codes(column: Array) -> NDArray[Any]:
    """Numbers that sort and compare as a column's values do."""
    if not pa.types.is_string(column.type):
        return values_of(column)
    encoded = column.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    words = encoded.dictionary.to_pylist()
    place = np.empty(len(words), dtype=np.int64)
    place[sorted(range(len(words)), key=words.__getitem__)] = np.arange(len(words))
    return place[values_of(encoded.indices)] if words else np.empty(0, dtype=np.int64)


def changes(columns: Sequence[NDArray[Any]]) -> NDArray[np.bool_]:
    """For each row but the first, whether it differs from the one before it in any of the columns."""
    return np.any([column[1:] != column[:-1] for column in columns], axis=0)


def starts(columns: Sequence[NDArray[Any]]) -> NDArray[np.intp]:
    """Where each stretch of rows begins that agree in all of the columns."""
    if not len(columns[0]):
        return np.empty(0, dtype=np.intp)
    return np.concatenate([[0], np.flatnonzero(changes(columns)) + 1])
