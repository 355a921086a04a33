"""`audit`: operations' values and gradients against formats, in program order."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plimsoll import row_layout
from plimsoll.errors import ArgumentError
from plimsoll.formats import Format, get_element
from plimsoll.report.drawing.plotly_parts import (
    BLUE,
    GREY,
    MINUS,
    ORANGE,
    RED,
    Figure,
    Layout,
    Trace,
    build_figure,
    empty_figure,
    joined,
    labels,
    power,
    powers,
    safe,
)
from plimsoll.text import counted, percent
from plimsoll.unit import Audit, Reading, Row
from plimsoll.unit.auditing.result import DIRECTIONS, FORMATS, Direction

# -- rows: their order, hover texts and axis labels --------------------------------------------------------------------

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
        return Place(reading=reading, words=_reading_words(row, reading, direction, when))


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
    """Return log2 of the magnitudes above 5 % and 95 % of nonzero finite values, even within a binade."""
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


def _reading_words(row: Row, reading: Reading | None, direction: Direction, when: str) -> str:
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


# -- the figure --------------------------------------------------------------------------------------------------------

_HEADS: dict[Direction, str] = {"forward": "Forward: values", "backward": "Backward: gradients"}
_OF_DIRECTION: dict[Direction, tuple[str, ...]] = {"forward": ("fp16", "e4m3"), "backward": ("fp16", "e5m2")}
_DASHES = {"fp16": "solid", "e4m3": "dash", "e5m2": "dash"}
_LEAST = (-32.0, 18.0)  # binades that are always shown: those of FP16, and room for the formats' names
_MOST = 60.0  # binades above and below which marks stand at the edge
_BAR, _GAP = 9, 17  # pixels of a format's bar, and from one to the next
_NAMED_WORST, _APART = 3, 4  # how many are named, and how many rows lie between them at least


def audit(before: Audit, after: Audit | None = None) -> Figure:
    """Return a figure of every operation's values and gradients, in program order.

    These are the standard deviation and the middle nine tenths, forward and backward.

    With two audits, of a model before and after its conversion, marks of the first are hollow. Operations that hold NaN
    or Inf, those that are all zero, and those without a gradient stand at the edges. Above 60 operations the axis names
    groups of modules, and hovering names the operation; the worst are named in any case.

    Raises `ArgumentError` for what is no `Audit`.
    """
    for name, value in (("before", before), ("after", after)):
        if not isinstance(value, Audit) and (value is not None or name == "before"):
            raise ArgumentError(
                f"audit figure: expected {name} to be an Audit; got {type(value).__name__}. Call plimsoll.unit.audit."
            )
    lines = lines_of(before, after)
    meta: Layout = {"figure": "audit", "operations": len(lines)}
    if not lines:
        return empty_figure("audit figure", "Scale of every operation", "The model ran no operation on numbers.", meta)
    ticks = ticks_of([line.row for line in lines])
    low, high = _reach(lines)
    traces = _each_once([t for d in DIRECTIONS for t in _traces(lines, d, low, high, two=after is not None)])
    traces += _legend_of_bars()
    shown = before if after is None else after
    return build_figure("audit figure", _title(before, after), _said(before, after), traces,
                _layout(lines, ticks, low, high, shown), meta)  # fmt: skip


def _each_once(traces: list[Trace]) -> list[Trace]:
    """The traces, of which the first of each name is in the legend."""
    names = [trace["name"] for trace in traces]
    return [{**trace, "showlegend": names.index(trace["name"]) == i} for i, trace in enumerate(traces)]


def _title(before: Audit, after: Audit | None) -> str:
    return f"{safe(before.model)}: scale of every operation" + ("" if after is None else ", before and after")


def _said(before: Audit, after: Audit | None) -> str:
    parts = [counted(len((after or before).operations), "operation")]
    for words, shown in (("", before),) if after is None else (("before", before), ("after", after)):
        far = shown.beyond(2.0)
        readings = sum(1 for _ in shown.readings())
        parts.append(f"{words} {len(far)} of {readings} beyond 2<sup>±2</sup>".strip())
    worst = (after or before).worst[:1]
    parts += [f"farthest: {_worst_words(reading)}" for reading in worst]
    return joined(parts)


def _worst_words(reading: Reading) -> str:
    if reading.spoiled:
        return f"{safe(reading.row.name)} {reading.direction}: NaN or Inf"
    if not np.isfinite(reading.scale):
        return f"{safe(reading.row.name)} {reading.direction}: all zero"
    return f"{safe(reading.row.name)} {reading.direction} {power(round(reading.scale, 1))}"


def _reach(lines: Sequence[Line]) -> tuple[float, float]:
    """The binades that are shown."""
    ends = [end for line in lines for reading in line.readings() for end in (*middle(reading), reading.scale)]
    known = [end for end in ends if np.isfinite(end)]
    low, high = min([_LEAST[0], *(end - 2 for end in known)]), max([_LEAST[1], *(end + 2 for end in known)])
    return max(low, -_MOST), min(high, _MOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """Style of an audit's marks."""

    when: str
    colour: str
    symbol: str
    width: int
    off: float  # rows by which the marks stand aside, so that two audits' do not hide each other


def _looks(two: bool) -> list[_Look]:
    if not two:
        return [_Look(when="", colour=BLUE, symbol="circle", width=3, off=0.0)]
    return [
        _Look(when="before", colour=ORANGE, symbol="circle-open", width=2, off=-0.16),
        _Look(when="after", colour=BLUE, symbol="circle", width=2, off=0.16),
    ]


def _traces(lines: Sequence[Line], direction: Direction, low: float, high: float, *, two: bool) -> list[Trace]:
    traces: list[Trace] = []
    axis = "x" if direction == "forward" else "x2"
    for look in _looks(two):
        places = [(i + look.off, place) for i, line in enumerate(lines) if (place := line.at(look.when, direction))]
        traces += [_spans(places, axis, look), _marks(places, axis, look, low, high)]
        traces += _edges(places, axis, low, high)
    return traces


def _spans(places: Sequence[tuple[float, Place]], axis: str, look: _Look) -> Trace:
    """The middle nine tenths as lines."""
    across: list[float | None] = []
    down: list[float | None] = []
    for at, place in places:
        if place.reading is not None and np.isfinite(middle(place.reading)[0]):
            across += [*middle(place.reading), None]
            down += [at, at, None]
    return {"type": "scatter", "mode": "lines", "x": across, "y": down, "xaxis": axis, "hoverinfo": "skip",
            "line": {"color": look.colour, "width": look.width}, "opacity": 0.45,
            "name": f"{look.when}: 5 to 95 % of the values".strip(": "),
            "legendgroup": f"span {look.when}"}  # fmt: skip


def _marks(places: Sequence[tuple[float, Place]], axis: str, look: _Look, low: float, high: float) -> Trace:
    shown = [(at, p, p.reading.scale) for at, p in places if p.reading is not None and np.isfinite(p.reading.scale)]
    size = 8 if len(places) <= 60 else 6
    mark = {"color": look.colour, "size": size, "symbol": look.symbol, "line": {"width": 1.5, "color": look.colour}}
    return {"type": "scatter", "mode": "markers", "x": [min(max(s, low), high) for _, _, s in shown],
            "y": [at for at, _, _ in shown], "text": [p.words for _, p, _ in shown], "xaxis": axis, "marker": mark,
            "hovertemplate": "%{text}<extra></extra>", "cliponaxis": False,
            "name": f"{look.when}: standard deviation".strip(": "), "legendgroup": f"mark {look.when}"}  # fmt: skip


def _edges(places: Sequence[tuple[float, Place]], axis: str, low: float, high: float) -> list[Trace]:
    """Return marks at the edges: NaN and Inf right; all zero and no gradient left."""
    inside = 0.015 * (high - low)
    kinds: list[tuple[str, str, str, float, Callable[[Place], bool]]] = [
        ("NaN or Inf", RED, "x", high - inside, lambda p: p.reading is not None and p.reading.spoiled > 0),
        (
            "all zero",
            RED,
            "triangle-left",
            low + inside,
            lambda p: p.reading is not None and p.reading.scale == -np.inf,
        ),
        ("no gradient", GREY, "line-ew-open", low + inside, lambda p: p.reading is None),
    ]
    traces: list[Trace] = []
    for name, colour, symbol, x, holds in kinds:
        chosen = [(at, place) for at, place in places if holds(place)]
        if chosen:
            mark: dict[str, Any] = {"color": colour, "size": 8, "symbol": symbol, "line": {"width": 2, "color": colour}}
            traces.append(
                {"type": "scatter", "mode": "markers", "x": [x] * len(chosen), "y": [at for at, _ in chosen],
                 "text": [place.words for _, place in chosen], "xaxis": axis, "marker": mark, "name": name,
                 "hovertemplate": "%{text}<extra></extra>", "legendgroup": name,
                 "cliponaxis": False}
            )  # fmt: skip
    return traces


def _layout(lines: Sequence[Line], ticks: Any, low: float, high: float, shown: Audit) -> Layout:
    places, texts = powers(low, high, 8)
    across: Layout = {"tickvals": places, "ticktext": texts, "range": [low, high], "zeroline": False, "showgrid": False}
    shapes, notes = list[Layout](), list[Layout]()
    for direction in DIRECTIONS:
        axis = "x" if direction == "forward" else "x2"
        shapes += [_unit(axis), *_bars(axis, direction)]
        notes += [_head(axis, _HEADS[direction]), *_names(axis)]
    notes += _named(lines, shown, ticks.grouped)
    rows = len(lines)
    inner = max(rows * (22 if not ticks.grouped else 7 if rows <= 400 else 4), 120)
    top, bottom = 92 + 22 + _GAP * len(FORMATS), 52
    return {
        "xaxis": {**across, "domain": [0, 0.485], "title": {"text": _ends_said("forward")}},
        "xaxis2": {**across, "domain": [0.515, 1.0], "title": {"text": _ends_said("backward")}, "anchor": "y"},
        "yaxis": {"tickvals": ticks.places, "ticktext": ticks.texts, "range": [rows - 0.4, -0.6], "zeroline": False,
                  "showgrid": not ticks.grouped, "ticks": ""},
        "shapes": [*shapes, *_separators(ticks)],
        "annotations": notes,
        "height": inner + top + bottom,
        "margin": {"l": 64, "r": 24, "t": top, "b": bottom},
    }  # fmt: skip


def _ends_said(direction: Direction) -> str:
    first, second = (get_element(name, "audit figure").name.upper() for name in _OF_DIRECTION[direction])
    return f"magnitude; red: ends of {first} and, dashed, {second}"


def _unit(axis: str) -> Layout:
    return {"type": "line", "xref": axis, "x0": 0, "x1": 0, "yref": "paper", "y0": 0, "y1": 1, "layer": "below",
            "line": {"color": GREY, "width": 2}}  # fmt: skip


def _bars(axis: str, direction: Direction) -> list[Layout]:
    """Return a bar for each format above the rows, and lines down from some ends."""
    bars: list[Layout] = []
    for number, name in enumerate(FORMATS):
        fmt = get_element(name, "audit figure")
        zero, normal, top = _limits(fmt)
        y0 = 6 + _GAP * (len(FORMATS) - 1 - number)
        bar: Layout = {"type": "rect", "xref": axis, "yref": "paper", "ysizemode": "pixel", "yanchor": 1, "y0": y0,
                       "y1": y0 + _BAR, "line": {"width": 0}, "fillcolor": GREY}  # fmt: skip
        bars += [{**bar, "x0": zero, "x1": normal, "opacity": 0.4}, {**bar, "x0": normal, "x1": top}]
        if name in _OF_DIRECTION[direction]:
            for at in (zero, top):
                bars.append(
                    {"type": "line", "xref": axis, "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1,
                     "layer": "below", "line": {"color": RED, "width": 1.2, "dash": _DASHES[name]}}
                )  # fmt: skip
    return bars


def _limits(fmt: Format) -> tuple[float, float, float]:
    """log2 of where the format gives zero, has fewer digits, and overflows."""
    return fmt.quantum_exponent - 1.0, float(fmt.min_exponent), float(np.log2(fmt.overflow_threshold))


def _names(axis: str) -> list[Layout]:
    return [
        {"text": get_element(name, "audit figure").name.upper(), "xref": axis, "yref": "paper",
         "x": _limits(get_element(name, "audit figure"))[0], "y": 1, "xanchor": "right", "yanchor": "middle",
         "xshift": -4, "yshift": 6 + _BAR / 2 + _GAP * (len(FORMATS) - 1 - number), "font": {"size": 10}}
        for number, name in enumerate(FORMATS)
    ]  # fmt: skip


def _head(axis: str, words: str) -> Layout:
    return {"text": f"<b>{words}</b>", "xref": f"{axis} domain", "x": 0, "xanchor": "left", "yref": "paper", "y": 1,
            "yanchor": "bottom", "yshift": _GAP * len(FORMATS) + 4}  # fmt: skip


def _legend_of_bars() -> list[Trace]:
    """Legend of the bars: traces without a place."""
    return [
        {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": name, "hoverinfo": "skip",
         "marker": {"color": GREY, "size": 10, "symbol": "square", "opacity": opacity}}
        for name, opacity in (("a format holds it", 1.0), ("with fewer digits", 0.4))
    ]  # fmt: skip


def _named(lines: Sequence[Line], shown: Audit, grouped: bool) -> list[Layout]:
    """The worst of each direction by name, where the axis does not name them."""
    labels: list[Layout] = []
    at = {line.row.key: i for i, line in enumerate(lines)}
    for direction in DIRECTIONS if grouped else ():
        axis = "x" if direction == "forward" else "x2"
        taken: list[int] = []
        for reading in shown.ranked("scale", direction=direction):
            row = at[reading.row.key]
            if np.isfinite(reading.scale) and all(abs(row - other) > _APART for other in taken):
                taken.append(row)
                labels.append(_name_of(reading, axis, row))
            if len(taken) == _NAMED_WORST:
                break
    return labels


def _name_of(reading: Reading, axis: str, row: int) -> Layout:
    """The name of an operation beside its line: at the end where there is room."""
    left = reading.scale > _LEAST[0] / 2
    return {"text": safe(reading.row.name, 36), "xref": axis, "yref": "y", "x": middle(reading)[0 if left else 1],
            "y": row, "xanchor": "right" if left else "left", "xshift": -6 if left else 6,
            "font": {"size": 10}}  # fmt: skip


def _separators(ticks: Any) -> list[Layout]:
    return [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": at - 0.5, "y1": at - 0.5,
         "layer": "below", "line": {"color": GREY, "width": 0.5}, "opacity": 0.5}
        for at in ticks.borders
    ]  # fmt: skip
