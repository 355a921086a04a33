"""Rows of an audit's figure: their order, hover texts and axis labels."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plimsoll import row_layout
from plimsoll.report.labels import MINUS, labels, power, safe
from plimsoll.text import percent
from plimsoll.unit import Audit, Reading, Row
from plimsoll.unit.auditing.result import DIRECTIONS, FORMATS, Direction

_EACH_NAMED = 60  # operations up to which each is named on the axis
_MOST_GROUPS = 36
_ABSENT = {"frozen": "no gradient: nothing here is trained", "no_grad": "no gradient: computed under no_grad",
           "never came": "no gradient came", None: "no gradient"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One direction of a row in an audit: its reading, or None, and the hover text."""

    reading: Reading | None
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """An operation in one audit or in two; with one audit, that is `after`."""

    before: Row | None
    after: Row | None

    @property
    def row(self) -> Row:
        """The operation."""
        reading = self.after or self.before
        assert reading is not None
        return reading

    def readings(self) -> Iterator[Reading]:
        """All that is drawn of it."""
        for row in (self.before, self.after):
            for direction in DIRECTIONS:
                reading = None if row is None else row.reading(direction)
                if reading is not None:
                    yield reading

    def at(self, when: str, direction: Direction) -> Place | None:
        """Drawn values of one audit, None where it has none."""
        row = self.before if when == "before" else self.after
        if row is None:
            return None
        reading = row.reading(direction)
        return Place(reading=reading, words=_words(row, reading, direction, when))


def lines_of(before: Audit, after: Audit | None) -> list[Line]:
    """Return the operations in program order, those of one audit beside neighbours."""
    if after is None:
        return [Line(before=None, after=row) for row in before.operations]
    earlier = {row.key: row for row in before.operations}
    waiting = list(before.operations)
    lines: list[Line] = []
    for row in after.operations:
        match = earlier.get(row.key)
        if match is not None and match in waiting:
            index = waiting.index(match)
            later = {other.key for other in after.operations}
            lines += [Line(before=old, after=None) for old in waiting[:index] if old.key not in later]
            waiting = [old for old in waiting[:index] if old.key in later] + waiting[index + 1 :]
        lines.append(Line(before=match, after=row))
    return [*lines, *(Line(before=old, after=None) for old in waiting)]


def middle(reading: Reading) -> tuple[float, float]:
    """Return log2 of the magnitudes above 5 % and 95 % of nonzero finite values.

    Within a binade values are even.
    """
    s = reading.spectrum
    if not s.nonzero:
        return math.nan, math.nan
    below = np.concatenate([[0], np.cumsum(s.binades)]) / s.nonzero
    edges = np.arange(len(below)) + float(row_layout.LOWEST_BINADE)
    first = int(np.flatnonzero(s.binades)[0])
    last = int(np.flatnonzero(s.binades)[-1]) + 1
    low, high = np.interp([0.05, 0.95], below[first : last + 1], edges[first : last + 1])
    return max(float(low), math.log2(s.absmin)), min(float(high), math.log2(s.absmax))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticks:
    """Labels of the axis: an operation each, or if `grouped` a module's run of them."""

    grouped: bool
    places: list[float]
    texts: list[str]
    borders: list[int]


def ticks_of(rows: Sequence[Row]) -> Ticks:
    """The names along the axis."""
    if len(rows) <= _EACH_NAMED:
        texts = labels((row.name for row in rows), 34)
        return Ticks(grouped=False, places=[float(i) for i in range(len(rows))], texts=texts, borders=[])
    starts = _groups(rows)
    ends = [*starts[1:], len(rows)]
    texts = [safe(_common(rows[a:b]), 34) for a, b in zip(starts, ends, strict=True)]
    return Ticks(
        grouped=True,
        places=[(a + b - 1) / 2 for a, b in zip(starts, ends, strict=True)],
        texts=texts,
        borders=starts[1:],
    )


def _groups(rows: Sequence[Row]) -> list[int]:
    """Return the groups' starts, by the deepest part of modules that gives few."""
    paths = [row.module.split(".") for row in rows]
    best = [0]
    for depth in range(1, max(len(path) for path in paths) + 1):
        starts = [i for i in range(len(rows)) if i == 0 or paths[i][:depth] != paths[i - 1][:depth]]
        if len(starts) > _MOST_GROUPS:
            break
        best = starts
    return best


def _common(rows: Sequence[Row]) -> str:
    """The part of the path that the rows have in common."""
    paths = [row.module.split(".") for row in rows]
    shared = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
    return ".".join(shared) or paths[0][0]


def _words(row: Row, reading: Reading | None, direction: Direction, when: str) -> str:
    head = f"<b>{safe(row.name)}</b>{f' ({when})' if when else ''}"
    source = [safe(_short(row.source))] if row.source else []
    if reading is None:
        return "<br>".join([head, _ABSENT[row.absence], *source])
    s = reading.spectrum
    lines = [f"{direction}: std {power(round(reading.scale, 1))}" if math.isfinite(reading.scale) else direction]
    if s.nonzero:
        low, high = middle(reading)
        lines.append(f"5 to 95 %: {power(round(low, 1))} to {power(round(high, 1))}, largest {s.absmax:.3g}")
        lines.append(", ".join(f"{name} {_lost(reading, name)}" for name in FORMATS))
    if s.zeros:
        lines.append(f"{percent(s.zero_fraction)} zero")
    if s.nonfinite:
        lines.append(f"{s.nans:,} NaN, {s.pos_infs:,} Inf, {s.neg_infs:,} {MINUS}Inf")
    shape = " \N{MULTIPLICATION SIGN} ".join(str(size) for size in row.shape)
    return "<br>".join([head, *lines, f"{shape or 'scalar'}, {row.dtype}", *source])


def _lost(reading: Reading, fmt: str) -> str:
    lost, over = reading.lost(fmt), reading.overflow(fmt)
    parts = [f"{percent(share)} {what}" for share, what in ((lost, "lost"), (over, "beyond")) if share]
    return " and ".join(parts) or "holds all"


def _short(source: str) -> str:
    file, _, line = source.rpartition(":")
    return f"{Path(file).name}:{line}"
