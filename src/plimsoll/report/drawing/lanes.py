"""Lanes under a time axis: things that last from one step to another, each in a lane of its own, so none overlaps."""

from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.report.drawing.plotly_parts import Layout, Trace
from plimsoll.report.labels import labels, wrapped


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
    traces = [_of(lane, -float(i)) for i, lane in enumerate(strips)]
    axis: Layout = {
        "tickvals": [-i for i in range(len(strips))],
        "ticktext": texts,
        "range": [0.6 - len(strips), 0.6],
        "showgrid": False,
        "zeroline": False,
        "ticks": "",
    }
    return traces, axis


def _of(lane: Lane, height: float) -> Trace:
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
