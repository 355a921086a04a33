"""Cells that grow: a live run's new rows are appended to those read before."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis.tables.cells import Cells, Ints


def size_bytes(cells: Cells) -> int:
    """Return the memory of the columns, and of what was computed from them and kept."""
    arrays = [*vars(cells).values(), *cells.columns.values()]
    return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray)) + sys.getsizeof(cells.names)


def before(cells: Cells, step: int) -> Cells:
    """Return the rows of steps below `step`."""
    earlier = cells.steps[cells.at] < step
    if earlier.all():
        return cells
    length = cells.length[earlier]
    return replace(
        cells,
        steps=cells.steps[cells.steps < step],
        layer=cells.layer[earlier],
        at=cells.at[earlier],
        format=cells.format[earlier],
        scale=cells.scale[earlier],
        columns={name: column[earlier] for name, column in cells.columns.items()},
        lowest=cells.lowest[earlier],
        start=_offsets(length),
        flat=cells.flat[np.repeat(earlier, cells.length)],
    )


def joined(first: Cells, later: Cells, order: Sequence[str]) -> Cells:
    """Return the rows of both. They must have no cell in common.

    The result equals that of one reading of all, except for the order of the rows.

    Args:
        first: The earlier cells.
        later: The later cells.
        order: Names of layers in the order to list them, as for `from_table`.
    """
    names, layer = _merged((first.names, later.names), (first.layer, later.layer), order)
    formats, fmt = _merged((first.formats, later.formats), (first.format, later.format), ())
    steps = np.union1d(first.steps, later.steps)
    at = [np.searchsorted(steps, cells.steps)[cells.at] for cells in (first, later)]
    return Cells(
        collection=first.collection,
        names=names,
        steps=steps,
        formats=formats,
        layer=layer,
        at=_end_to_end(*at),
        format=fmt,
        scale=_end_to_end(first.scale, later.scale),
        columns={name: _end_to_end(column, later.columns[name]) for name, column in first.columns.items()},
        lowest=_end_to_end(first.lowest, later.lowest),
        start=_offsets(_end_to_end(first.length, later.length)),
        flat=_end_to_end(first.flat, later.flat),
    )


def _merged(
    words: tuple[Sequence[str], Sequence[str]], places: tuple[Ints, Ints], order: Sequence[str]
) -> tuple[tuple[str, ...], Ints]:
    """Return the words in use on either side, in order, and each row's place."""
    used = {word for known, place in zip(words, places, strict=True) for word in _in_use(known, place)}
    rank = {word: i for i, word in enumerate(order)}
    merged = sorted(used, key=lambda word: (rank.get(word, len(rank)), word))
    new = {word: i for i, word in enumerate(merged)}
    moved = [
        np.array([new.get(word, -1) for word in known], dtype=np.int64)[place]
        for known, place in zip(words, places, strict=True)
    ]
    return tuple(merged), _end_to_end(*moved)


def _in_use(words: Sequence[str], places: Ints) -> list[str]:
    counted = np.bincount(places, minlength=len(words))
    return [word for word, times in zip(words, counted.tolist(), strict=True) if times]


def _offsets(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])


def _end_to_end(first: NDArray[Any], later: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([first, later])
