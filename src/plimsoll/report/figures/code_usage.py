"""`code_usage`: spread of 8-bit tensors' values over what their format holds."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis import Finding, View
from plimsoll.diagnosis.estimates.cast_cells import CastCells, cast_cells
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.diagnosis.view import Source, view_of
from plimsoll.formats import E4M3, Format, get_element
from plimsoll.report.drawing.aggregation import Columns, histogram
from plimsoll.report.drawing.plotly_parts import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    STEP_AXIS,
    Figure,
    Layout,
    Trace,
    build_figure,
    empty_figure,
    joined,
    level_line,
    level_words,
    line,
    of,
    power,
    safe,
    series_checked,
    share_ticks,
    since_mark,
)
from plimsoll.report.figure_declaration import figure
from plimsoll.report.figures.usable_scales import element
from plimsoll.text import capital, counted, percent

_LEVELS = (("warning", 0.25, ORANGE), ("alarm", 0.5, RED))  # of saturated-fp8
_MOST_BARS = 64  # binades of the format


def _of_finding(view: View, finding: Finding, **arguments: Any) -> Figure:
    collection = finding.collection or "activations"
    name = finding.where[0] if finding.where else None
    return code_usage(view, collection, name, since_step=finding.since_step, **arguments)


@figure(of_finding=_of_finding)
def code_usage(
    run: Source,
    collection: str = "activations",
    name: str | None = None,
    fmt: object = None,
    *,
    since_step: int | None = None,
    until: int | None = None,
) -> Figure:
    """Which of a format's powers of two the values use, all steps added up; and the share in the top one over time.

    - `name`: one tensor; None for all of the collection that were recorded in that format.
    - `fmt`: the format; None for the one of 8 bits or fewer that they were recorded in, or that their module casts them
      to, which is shown at the cast's scale. Values of which neither is recorded are shown as the format would hold
      them, each tensor scaled at each step so that its largest value just fits: for want of any 8-bit record E4M3.

    Raises `NotRecordedError` for a tensor that the run does not have, `FormatError` for formats of blocks or scales.
    """
    view = view_of(run, until, "code_usage")
    wanted = None if fmt is None else element(fmt, "code_usage")
    title, meta = f"How {of(collection)} use their format", {"figure": "code_usage", "collection": collection}
    if not view.run.tensors:
        return empty_figure("code_usage", title, "Nothing was recorded in this run.", meta)
    series_checked(view, "code_usage", collection, name)
    cells = (view if name is None else view.only(collection, name)).cells(collection)
    if cells is None or not cells.nonzero.any():
        return empty_figure("code_usage", title, f"No {of(collection)} but zeros were recorded up to this step.", meta)
    cast = (
        None if _recorded(cells) else _cast(view if name is None else view.only(collection, name), collection, wanted)
    )
    chosen = wanted or _recorded(cells) or (E4M3 if cast is None else cast.format)
    use = _Use.of(cells if cast is None else cast.cells, chosen, cast)
    title = f"{capital(of(collection))}{f' of {safe(name)}' if name else ''}: how they use {chosen.name}"
    traces, axis = _bars(use, chosen)
    columns = Columns.of(use.steps)
    over_time, layout = _over_time(use, columns, since_step)
    layout["xaxis"] = {**axis, "domain": [0.0, 0.52]}
    top = 1.05 * max(traces[0]["y"])
    layout["yaxis"] = {"title": {"text": "share of the values"}, "rangemode": "tozero", **share_ticks(0, top)}
    return build_figure("code_usage", title, _said(use, chosen, columns), [*traces, *over_time], layout, meta)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Use:
    """Shares of values by the format's binade, and of its top binade by step."""

    lowest: int
    shares: Floats
    below: float
    above: float
    zeros: float
    steps: Ints
    top: Floats
    recorded: bool
    tensors: int
    cast: CastCells | None = None

    @classmethod
    def of(cls, cells: Cells, fmt: Format, cast: CastCells | None) -> "_Use":
        own = np.array([name == fmt.name for name in cells.formats])[cells.format]
        recorded = bool(own.any())
        counted_rows = own if recorded else np.ones(len(cells), dtype=bool)
        moved = np.zeros(len(cells), dtype=np.int64) if recorded else _fitted(cells, fmt)
        if cast is not None:
            moved = -np.rint(np.log2(cells.scale)).astype(np.int64)
        low, high = fmt.quantum_exponent, fmt.max_exponent
        every = float(cells.column("count")[counted_rows].sum())
        begin, counts = histogram(cells, cells.lowest + moved, counted_rows)
        place = np.clip(np.arange(begin, begin + len(counts)) - low + 1, 0, high - low + 2)
        spread = np.bincount(place, weights=counts, minlength=high - low + 3)
        return cls(
            lowest=low,
            shares=spread[1:-1] / every,
            below=float(spread[0]) / every,
            above=float(spread[-1]) / every,
            zeros=float(cells.column("zeros")[counted_rows].sum()) / every,
            steps=cells.steps,
            top=_top_by_step(cells, counted_rows, cells.lowest + moved, high),
            recorded=recorded,
            cast=cast,
            tensors=len(np.unique(cells.layer[counted_rows])),
        )


def _cast(view: View, collection: str, wanted: Format | None) -> CastCells | None:
    """Casts of these tensors to the format, or to any."""
    return next((c for c in cast_cells(view, collection) if wanted in (None, c.format)), None)


def _top_by_step(cells: Cells, kept: NDArray[np.bool_], first: Ints, top: int) -> Floats:
    """Return each step's share in the top binade, of the tensor with most there."""
    under = cells.running[cells.start[:-1] + np.clip(top - first, 0, cells.length)] - cells.running[cells.start[:-1]]
    with np.errstate(all="ignore"):
        shares = np.where(kept & (cells.nonzero > 0), 1 - under / cells.nonzero, np.nan)
    result = np.full(len(cells.steps), np.nan)
    np.fmax.at(result, cells.at, shares)
    return result


def _fitted(cells: Cells, fmt: Format) -> Ints:
    """The power of two by which each row's largest value just fits the format."""
    fraction, exponent = np.frexp(np.where(cells.nonzero > 0, cells.column("absmax"), 1.0))
    largest, top = np.frexp(fmt.max)
    return int(top) - exponent.astype(np.int64) - (fraction > largest)


def _recorded(cells: Cells) -> Format | None:
    known = [get_element(name, "code_usage") for name in cells.formats]
    narrow = [fmt for fmt in known if fmt.bits <= 8]
    return min(narrow, key=lambda fmt: (fmt.bits, fmt.name)) if narrow else None


def _bars(use: _Use, fmt: Format) -> tuple[list[Trace], Layout]:
    """A bar for each binade of the format, and for what is zero or beyond it."""
    most = use.shares[-_MOST_BARS:]
    low = use.lowest + len(use.shares) - len(most)
    exponents = np.arange(low, low + len(most))
    colours = [ORANGE if e < fmt.min_exponent else RED if e == fmt.max_exponent else BLUE for e in exponents.tolist()]
    said = [
        "fewer digits" if e < fmt.min_exponent else "the top" if e == fmt.max_exponent else "full precision"
        for e in exponents.tolist()
    ]
    places = [float(low - 2), *exponents.tolist()]
    words = ["zero", *said]
    heights, colours = [use.zeros + use.below, *most.tolist()], [GREY, *colours]
    if use.above:
        places.append(float(exponents[-1] + 2))
        words, heights, colours = [*words, "cut off"], [*heights, use.above], [*colours, RED]
    trace: Trace = {
        "type": "bar", "x": places, "y": heights, "marker": {"color": colours}, "text": words, "textposition": "none",
        "showlegend": False, "hovertemplate": "%{text}<br>%{y:.3~%} of the values<extra></extra>",
    }  # fmt: skip
    every = max(len(most) // 8, 1)
    ticks = [float(low - 2), *exponents[::-every][::-1].tolist(), *([places[-1]] if use.above else [])]
    texts = ["zero", *(power(e) for e in exponents[::-every][::-1].tolist()), *(["cut off"] if use.above else [])]
    return [trace], {"title": {"text": "magnitude"}, "tickvals": ticks, "ticktext": texts, "showgrid": False}


def _cast_over_time(cast: CastCells, columns: Columns, since_step: int | None) -> tuple[list[Trace], Layout]:
    """Return the largest shares over the tensors: saturated, subnormal and zero."""
    marks, notes = since_mark(since_step, row="2")
    shares = {
        "beyond the largest value": (cast.saturated, RED),
        "fewer digits": (cast.coarse, ORANGE),
        "zero": (cast.flushed, GREY),
    }
    traces = [
        line(columns.at, columns.merged(np.fmax.reduce(share, axis=0, initial=np.nan), "max"), said, colour,
             f"{columns.when} %{{x}}<br>%{{y:.3~%}} {said}", xaxis="x2", yaxis="y2", connectgaps=True)
        for said, (share, colour) in shares.items()
    ]  # fmt: skip
    return traces, _time_panel("share as cast", marks, notes)


def _time_panel(title: str, shapes: list[Layout], notes: list[Layout]) -> Layout:
    axis = {"title": {"text": title}, "range": [-0.02, 1.02], "anchor": "x2", **share_ticks(0, 1)}
    return {
        "xaxis2": {**STEP_AXIS, "domain": [0.62, 1.0], "anchor": "y2"}, "yaxis2": axis, "shapes": shapes,
        "annotations": notes, "height": 400, "bargap": 0.12,
    }  # fmt: skip


def _over_time(use: _Use, columns: Columns, since_step: int | None) -> tuple[list[Trace], Layout]:
    if use.cast is not None:
        return _cast_over_time(use.cast, columns, since_step)
    top = columns.merged(use.top, "max")
    trace = line(columns.at, top, "in the top binade", RED, f"{columns.when} %{{x}}<br>%{{y:.3~%}} in the top binade",
                 xaxis="x2", yaxis="y2", showlegend=False, connectgaps=True)  # fmt: skip
    marks, notes = since_mark(since_step, row="2")
    levels = [level_line(at, colour, "y2", "x2 domain") for _, at, colour in _LEVELS]
    words = [level_words(at, f"{said} above {percent(at)}", colour, "y2", "x2 domain") for said, at, colour in _LEVELS]
    return [trace], _time_panel("in the top power of two", [*levels, *marks], [*notes, *words])


def _said(use: _Use, fmt: Format, columns: Columns) -> str:
    how = "" if use.recorded else f"as {fmt.name} would hold them, each scaled to fit its largest value"
    how = how if use.cast is None else "at the scale that they are cast with"
    top = float(use.shares[-1])
    parts = [
        how,
        counted(use.tensors, "tensor"),
        f"{percent(top)} in the top power of two",
        f"{percent(use.below + use.zeros)} zero",
    ]
    return joined([*parts, columns.said("max")])
