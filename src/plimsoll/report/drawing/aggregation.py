"""Large runs in few cells: steps into columns, layers into rows, none left out.

A column stands for as many samples as every other one (the last for what is left), a row for a layer or for several
that share a prefix. How their numbers become one depends on what they say: the worst of them where one bad step
matters (`max`, `min`), the sum of counts, the mean otherwise. The figure says which.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis import grouped
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.text import counted

How = Literal["max", "min", "sum", "mean"]
MOST_CELLS = 18_000  # two numbers of four bytes each, in base 64: under 300 KB of JSON
MOST_COLUMNS, MOST_ROWS = 400, 200
_COLUMNS_KEPT = 150
_SAID = {"max": "the highest", "min": "the lowest", "sum": "their sum", "mean": "the mean"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """Samples in columns: their beginnings, numbers of samples, and middle steps."""

    steps: Ints
    starts: Ints
    each: int

    @classmethod
    def of(cls, steps: Ints, most: int = MOST_COLUMNS) -> "Columns":
        """At most so many columns of equally many samples."""
        width = max(-(-len(steps) // max(most, 1)), 1)
        return cls(steps=steps, starts=np.arange(0, len(steps), width), each=width)

    @property
    def at(self) -> Ints:
        """A step for each column: its own, or the middle one of its samples."""
        ends = np.minimum(self.starts + self.each, len(self.steps)) - 1
        return self.steps[(self.starts + ends) // 2]

    @property
    def place(self) -> Ints:
        """The column of each sample."""
        return np.arange(len(self.steps)) // self.each

    def merged(self, values: Floats, how: How) -> Floats:
        """Values of samples (the last axis) as those of columns; NaN counts as not there."""
        if self.each == 1:
            return values
        return _merged(values, self.starts, how, axis=values.ndim - 1)

    @property
    def when(self) -> str:
        """The word before a column's step."""
        return "step" if self.each == 1 else "around step"

    def said(self, how: How) -> str:
        """Note on how the columns were merged, empty where each is one sample."""
        return "" if self.each == 1 else f"each column: {counted(self.each, 'sample')}, {_SAID[how]}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Layers in rows: the layers' order, each row's first layer, and its name."""

    order: Ints
    starts: Ints
    names: tuple[str, ...]

    @classmethod
    def of(cls, names: Sequence[str], most: int = MOST_ROWS) -> "Rows":
        """Return at most `most` rows: layers, modules of one prefix, or neighbours."""
        groups = _groups(names, max(most, 1))
        sizes = np.array([len(members) for members in groups.values()], dtype=np.int64)
        order = np.array([i for members in groups.values() for i in members], dtype=np.int64)
        return cls(order=order, starts=np.cumsum(sizes) - sizes, names=tuple(groups))

    @property
    def place(self) -> Ints:
        """The row of each layer."""
        result = np.empty(len(self.order), dtype=np.int64)
        sizes = np.diff(np.append(self.starts, len(self.order)))
        result[self.order] = np.repeat(np.arange(len(self.names)), sizes)
        return result

    def merged(self, values: Floats, how: How) -> Floats:
        """Values of layers (the first axis) as those of rows; NaN counts as not there."""
        ordered = values[self.order]
        return ordered if len(self.starts) == len(self.order) else _merged(ordered, self.starts, how, axis=0)

    def said(self, how: How) -> str:
        """Note on how the rows were merged, empty where each is one layer."""
        if len(self.starts) == len(self.order):
            return ""
        return f"{len(self.order):,} layers in {len(self.starts):,} rows, {_SAID[how]} of each"


def few(names: Sequence[str], steps: Ints, most_cells: int = MOST_CELLS) -> tuple[Rows, Columns]:
    """Return rows and columns of at most `most_cells`, with enough columns for time."""
    rows = Rows.of(names, min(MOST_ROWS, most_cells // min(max(len(steps), 1), _COLUMNS_KEPT)))
    return rows, Columns.of(steps, min(MOST_COLUMNS, most_cells // max(len(rows.names), 1)))


def histogram(cells: Cells, first: Ints, kept: NDArray[np.bool_] | None = None) -> tuple[int, Floats]:
    """Return all or kept rows' counts: the lowest binade, and counts from it on.

    `first` is the binade of each row's first count, moved as the caller likes.
    """
    there = (cells.length > 0) if kept is None else (cells.length > 0) & kept
    low = int(first[there].min()) if there.any() else 0
    start = np.where(there, first - low, 0) - cells.start[:-1]
    place: Ints = np.repeat(start, cells.length)
    place += np.arange(len(place))
    flat = cells.flat if kept is None or kept.all() else cells.flat * np.repeat(kept, cells.length)
    return low, np.asarray(np.bincount(place, weights=flat), dtype=np.float64)


def _merged(values: Floats, starts: Ints, how: How, axis: int) -> Floats:
    if how == "max":
        return np.fmax.reduceat(values, starts, axis=axis)
    if how == "min":
        return np.fmin.reduceat(values, starts, axis=axis)
    there = ~np.isnan(values)
    total = np.add.reduceat(np.where(there, values, 0.0), starts, axis=axis)
    known = np.add.reduceat(there, starts, axis=axis, dtype=np.int64)
    with np.errstate(all="ignore"):
        return np.where(known > 0, total if how == "sum" else total / known, np.nan)


def _groups(names: Sequence[str], most: int) -> dict[str, list[int]]:
    """Row names to their layers, in the order of the layers."""
    if len(names) <= most:
        return _unique([(name, [i]) for i, name in enumerate(names)])
    depth = max(name.count(".") for name in names) + 1
    finer = {name: [i] for i, name in enumerate(names)}
    while depth > 1:
        depth -= 1
        coarser = _by_prefix(names, depth)
        if len(coarser) <= most:
            # A prefix that says too little ("model.layers") would hide nearly everything: neighbours are merged then.
            return coarser if 4 * len(coarser) > most else _neighbours(finer, most)
        finer = coarser
    return _neighbours(finer, most)


def _by_prefix(names: Sequence[str], depth: int) -> dict[str, list[int]]:
    by_prefix: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        by_prefix.setdefault(".".join(name.split(".", depth)[:depth]), []).append(i)
    return by_prefix


def _neighbours(groups: dict[str, list[int]], most: int) -> dict[str, list[int]]:
    width = -(-len(groups) // most)
    names, members = list(groups), list(groups.values())
    return _unique(
        [
            (grouped(names[i : i + width], most=1), [layer for member in members[i : i + width] for layer in member])
            for i in range(0, len(names), width)
        ]
    )


def _unique(rows: list[tuple[str, list[int]]]) -> dict[str, list[int]]:
    unique: dict[str, list[int]] = {}
    for name, members in rows:
        unique[name if name not in unique else f"{name} (from layer {members[0]})"] = members
    return unique
