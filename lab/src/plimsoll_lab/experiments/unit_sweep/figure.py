"""The sweep as a figure and as a table: bits per character of each design at its best learning rate, by way."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from plimsoll.report.drawing.plotly_parts import Trace, made
from plimsoll.report.drawing.theme import BLUE, GREEN, GREY, ORANGE, RED
from plimsoll_lab.experiments.unit_sweep.analysis import Scores
from plimsoll_lab.experiments.unit_sweep.grid import (
    FP16,
    FP32,
    STATIC,
    UNIT_FP16,
    UNIT_FP32,
    WAYS,
    Design,
    Way,
    reference,
)

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

_Point = tuple[Design, float, float]  # and its bits in FP32, and in another way
_BEYOND = 0.3  # bits above chance at which the figure ends: a training that diverged says no more there
TITLES = {
    FP32: "FP32",
    FP16: "FP16, no loss scale",
    STATIC: "FP16, loss scale 2,048",
    UNIT_FP32: "unit-scaled FP32",
    UNIT_FP16: "unit-scaled FP16",
}
_MARKS = {
    FP16: (RED, "x"), STATIC: (ORANGE, "diamond-open"), UNIT_FP16: (BLUE, "circle"), UNIT_FP32: (GREEN, "circle-open"),
}  # fmt: skip


def figure(found: Scores) -> "Figure":
    """Each design by its bits in FP32 (across) and in another way (up): on the line both are alike.

    Raises `MissingExtraError` without Plotly.
    """
    drawn = {way: _points(found, way) for way in WAYS if way != FP32}
    edge = found.chance + _BEYOND
    shown = [min(value, edge) for points in drawn.values() for _, x, y in points for value in (x, y)] or [1.0]
    room = 0.03 * (max(shown) - min(shown)) + 0.01
    ends = [min(shown) - room, max(shown) + room]
    line: Trace = {
        "type": "scatter", "mode": "lines", "x": ends, "y": ends, "line": {"color": GREY, "dash": "dot"},
        "hoverinfo": "skip", "showlegend": False,
    }  # fmt: skip
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "bits per character, FP32"}, "range": ends},
        "yaxis": {"title": {"text": "bits per character, this way"}, "range": ends},
        "height": 560,
    }
    traces = [line, *(_trace(way, points, edge) for way, points in drawn.items() if points)]
    title = "Small character models in FP32 and FP16"
    return made("lab unit-sweep", title, _subtitle(found, drawn, edge), traces, layout, {"figure": "sweep"})


def _subtitle(found: Scores, drawn: Mapping[Way, Sequence[_Point]], edge: float) -> str:
    said = "each design at its best learning rate; below the line is better than FP32"
    beyond = sum(max(x, y) > edge for points in drawn.values() for _, x, y in points)
    if beyond:
        said += f"; {beyond} on the edge lie beyond what chance gives"
    alone = sum(way != FP32 for _, way in found.bits) - sum(map(len, drawn.values()))
    return said + (f"; {alone} without a pair in FP32 are not drawn" if alone else "")


def table(found: Scores) -> str:
    """A line for each design: its bits in every way, at the learning rate that is best there."""
    whole = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("sequence", "norm", "residual", "optimizer", "depth"):
        whole.add_column(head, no_wrap=True)
    for way in WAYS:
        whole.add_column(TITLES[way], justify="right")
    for design in dict.fromkeys(design for design, _ in found.bits):
        cells = (_cell(found, design, way) for way in WAYS)
        whole.add_row(
            design.sequence, design.norm, design.residual, design.optimizer, str(design.depth), *cells
        )  # fmt: skip
    text = io.StringIO()
    Console(file=text, width=120).print(whole)
    return text.getvalue()


def _cell(found: Scores, design: Design, way: Way) -> str:
    return f"{found.best(design, way):.3f}" if (design, way) in found.bits else ""


def _points(found: Scores, way: Way) -> list[_Point]:
    """Design, its bits in FP32 and in this way; a unit-scaled one beside its unscaled counterpart."""
    both = [
        (design, reference(design) if way.scaling == "unit" else design) for design, each in found.bits if each == way
    ]
    return [
        (design, found.best(other, FP32), found.best(design, way))
        for design, other in both
        if (other, FP32) in found.bits
    ]


def _trace(way: Way, points: Sequence[_Point], edge: float) -> Trace:
    colour, symbol = _MARKS[way]
    return {
        "type": "scatter", "mode": "markers", "name": TITLES[way], "x": [min(x, edge) for _, x, _ in points],
        "y": [min(y, edge) for _, _, y in points], "cliponaxis": False,
        "text": [f"{design}<br>FP32 {x:.3f}, here {y:.3f}" for design, x, y in points],
        "marker": {"color": colour, "symbol": symbol, "size": 9}, "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip
