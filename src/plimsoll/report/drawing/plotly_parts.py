"""Parts of all figures: view, Plotly figure from plain data, lines, marks, lanes.

A figure is put together as plain data. `build_figure` makes a Plotly object of it at the very end, so Plotly is loaded
only when a figure is asked for. A figure without anything to show says in words what is missing. It is never an error,
since a report must not fail for want of one recorded thing.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis import View
from plimsoll.diagnosis.tables.cells import Floats, Ints
from plimsoll.errors import ArgumentError, MissingExtraError
from plimsoll.extras import install_line
from plimsoll.report.drawing.theme import GREY, MODEBAR_REMOVE, TEMPLATES
from plimsoll.report.labels import labels, wrapped
from plimsoll.runs import Run
from plimsoll.runs.reading.row_selection import unknown

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

Source = Run | View | str | os.PathLike[str]
Trace = dict[str, Any]
Layout = dict[str, Any]

_LEGEND_LINE, _LEGEND_ENTRIES, _BELOW = 20, 4, 48  # pixels a line, entries in it; pixels for the axis
STEP_AXIS: Mapping[str, Any] = {"title": {"text": "step"}, "showgrid": False, "zeroline": False, "tickformat": ",d"}


def view_of(run: Source, until: int | None, operation: str) -> View:
    """The view of a run, its folder, or a view itself; up to and with a step."""
    if isinstance(run, View):
        if until is not None:
            raise ArgumentError(
                f"{operation}: expected until=None with a View, which has its own; got {until!r}. Make another View."
            )
        return run
    return View(run if isinstance(run, Run) else Run(run), until)


def build_figure(
    operation: str, title: str, subtitle: str, traces: Sequence[Trace], layout: Layout, meta: Mapping[str, Any]
) -> "Figure":
    """Return the Plotly figure in the light theme, with `meta` as its metadata."""
    try:
        from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise MissingExtraError(
            f"{operation}: expected the package plotly; got none. Install it: {install_line('report')}"
        ) from error
    head = {"text": title, "subtitle": {"text": subtitle}}
    bar = {"remove": [*MODEBAR_REMOVE]}  # in the layout too, as users change templates
    whole = {"template": TEMPLATES["light"], "title": head, "meta": dict(meta), "modebar": bar}
    whole |= _with_legend(traces, layout)
    return Figure({"data": list(traces), "layout": whole})


def _with_legend(traces: Sequence[Trace], layout: Layout) -> Layout:
    """The layout with room for the legend under the step axis."""
    entries = sum(bool(t.get("name")) and t.get("showlegend", t["type"] == "scatter") for t in traces)
    if entries < 2:
        return {**layout, "showlegend": False}
    room = 10 + _LEGEND_LINE * -(-entries // _LEGEND_ENTRIES)
    margin = layout.get("margin", {})
    below = {**margin, "b": margin.get("b", _BELOW) + room}
    return {**layout, "margin": below, "height": layout["height"] + room, "showlegend": True}


def empty_figure(operation: str, title: str, words: str, meta: Mapping[str, Any]) -> "Figure":
    """A figure without data that says what is missing."""
    note = {
        "text": words,
        "xref": "paper",
        "yref": "paper",
        "x": 0.5,
        "y": 0.5,
        "font": {"size": 14},
        "align": "center",
    }
    hidden = {"visible": False}
    layout = {"annotations": [note], "xaxis": hidden, "yaxis": hidden, "height": 240}
    return build_figure(operation, title, "", [], layout, {**meta, "empty": True})


def series_checked(view: View, operation: str, collection: str, name: str | None = None) -> None:
    """Raise `NotRecordedError` for a collection or name that the run does not have."""
    if collection not in view.run.tensors:
        raise unknown(operation, "a collection", collection, list(view.run.tensors))
    if name is not None and name not in view.run.tensors[collection]:
        raise unknown(operation, f"a name in {collection!r}", name, view.run.tensors[collection])


def since_mark(step: int | None, words: str = "since step", row: str = "") -> tuple[list[Layout], list[Layout]]:
    """A vertical line at a step with its words at the top: shapes and annotations."""
    if step is None:
        return [], []
    line = {"type": "line", "x0": step, "x1": step, "xref": f"x{row}", "y0": 0, "y1": 1, "yref": "paper",
            "line": {"color": GREY, "width": 1.5, "dash": "dot"}}  # fmt: skip
    note = {"text": f"{words} {step:,}", "x": step, "xref": f"x{row}", "y": 1, "yref": "paper", "yanchor": "bottom",
            "xanchor": "center", "font": {"size": 11}}  # fmt: skip
    return [line], [note]


def step_axis(at: Ints) -> Layout:
    """Return a picture's axis that ends with the first and the last of these steps.

    By itself Plotly makes room for the words at a step on the axis, which on a narrow screen is a third of it.
    """
    half = float(at[1] - at[0]) / 2 if len(at) > 1 else 0.5
    return {**STEP_AXIS, "range": [float(at[0]) - half, float(at[-1]) + half]}


def plotted(values: Floats) -> NDArray[np.float32]:
    """Return heights in single precision; larger ones become Inf, a gap in the line."""
    with np.errstate(over="ignore"):
        return np.asarray(values, dtype=np.float32)


def line(x: Ints | Floats, y: Floats, name: str, colour: str, hover: str, **more: Any) -> Trace:
    """Return a line over steps; `hover` is our own template, without a run's text."""
    return {
        "type": "scatter",
        "mode": "lines" if len(x) > 1 else "markers",
        "x": x,
        "y": plotted(y),
        "name": name,
        "line": {"color": colour, "width": 2, **more.pop("line", {})},
        "marker": {"color": colour, "size": 7},
        "hovertemplate": hover + "<extra></extra>",
        **more,
    }


def band(x: Ints | Floats, low: Floats, high: Floats, name: str, colour: str, **more: Any) -> list[Trace]:
    """An area between two lines, without hover."""
    common: Trace = {"type": "scatter", "mode": "lines", "x": x, "line": {"width": 0}, "hoverinfo": "skip", **more}
    shade = "rgba({},{},{},0.22)".format(*(int(colour[i : i + 2], 16) for i in (1, 3, 5)))
    return [
        {**common, "y": plotted(low), "showlegend": False},
        {**common, "y": plotted(high), "fill": "tonexty", "fillcolor": shade, "name": name},
    ]


# -- lanes under a time axis: each thing that lasts has one of its own, so that none overlaps


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One lane: its label, colour, the stretches of steps in it, and words for each."""

    label: str
    colour: str
    spans: tuple[tuple[int, int], ...]
    words: tuple[str, ...]


def lanes(strips: Sequence[Lane]) -> tuple[list[Trace], Layout]:
    """The traces of lanes, the first on top, and their axis."""
    texts = labels((lane.label for lane in strips), most=44)
    traces = [_lane(lane, -float(i)) for i, lane in enumerate(strips)]
    axis: Layout = {
        "tickvals": [-i for i in range(len(strips))],
        "ticktext": texts,
        "range": [0.6 - len(strips), 0.6],
        "showgrid": False,
        "zeroline": False,
        "ticks": "",
    }
    return traces, axis


def _lane(lane: Lane, height: float) -> Trace:
    """A bar from step to step, with a mark where it begins."""
    across: list[int | None] = []
    words: list[str] = []
    sizes: list[int] = []
    for (first, last), said in zip(lane.spans, lane.words, strict=True):
        when = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        across += [first, last, None]
        words += [f"{when}<br>{wrapped(said)}"] * 2 + [""]
        sizes += [11, 7, 7]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": across,
        "y": [height] * len(across),
        "text": words,
        "line": {"color": lane.colour, "width": 7},
        "marker": {"color": lane.colour, "size": sizes, "opacity": 1, "line": {"width": 0}},
        "showlegend": False,
        "hovertemplate": "%{text}<extra></extra>",
    }
