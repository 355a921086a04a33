"""Load lines: the range of a format at its scale, drawn over the values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plimsoll.diagnosis.tables.cells import Floats, Ints
from plimsoll.formats import Format
from plimsoll.report.drawing.aggregation import Columns
from plimsoll.report.drawing.plotly_parts import Layout, Trace
from plimsoll.report.drawing.theme import GREY, ORANGE, PURPLE, RED
from plimsoll.report.labels import power, safe

_DASHES = ("solid", "dash", "dot", "dashdot")
_BESIDE = 14.0  # binades beyond the values within which a line is still drawn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadLine:
    """A limit of a format over the columns: true values' exponent, and the meaning."""

    format: str
    says: str  # a line of no format says all
    colour: str
    dash: str
    height: Floats

    @property
    def words(self) -> str:
        """Words beside the line."""
        return f"{self.format}: {self.says}" if self.format else self.says


# The picture shows true values. A format that holds them times S overflows at its limit divided by S, so its lines lie
# lower the higher the scale; where the recorded scale changes over time, the lines are step curves.
def load_lines(formats: Sequence[tuple[Format, Floats]]) -> list[LoadLine]:
    """Return the limits of formats, each moved by a power of two in each column."""
    lines: list[LoadLine] = []
    for i, (fmt, moved) in enumerate(formats):
        limits = [
            (float(np.log2(fmt.overflow_threshold)), "overflow above", RED),
            (float(fmt.min_exponent), "fewer digits below", ORANGE),
            (float(fmt.quantum_exponent - 1 if fmt.has_subnormals else fmt.min_exponent - 1), "zero below", PURPLE),
        ]
        for exponent, says, colour in limits:
            dash = _DASHES[i % len(_DASHES)]
            lines.append(LoadLine(format=fmt.name, says=says, colour=colour, dash=dash, height=exponent - moved))
    return lines


def level(mark: tuple[float, str], columns: Columns) -> LoadLine:
    """A line at one magnitude."""
    height = np.full(len(columns.at), math.log2(mark[0]))
    return LoadLine(format="", says=safe(mark[1]), colour=GREY, dash="dash", height=height)


def in_reach(lines: Sequence[LoadLine], low: float, high: float) -> tuple[list[LoadLine], list[str]]:
    """The lines near the values, and of the others what they are and where."""
    near = [line for line in lines if line.height.max() >= low - _BESIDE and line.height.min() <= high + _BESIDE]
    far = [
        f"{line.format}: {line.says} {power(round(float(np.median(line.height))))}"
        for line in lines
        if line not in near and line.says != "fewer digits below" and np.isfinite(np.median(line.height))
    ]
    return near, far


def drawn(lines: Sequence[LoadLine], at: Ints, spacing: float) -> tuple[list[Trace], list[Layout]]:
    """The lines as traces, and their words at the right end, at least `spacing` apart."""
    traces = [_trace(line, at) for line in lines]
    notes: list[Layout] = []
    below = -np.inf
    for line in sorted(lines, key=lambda each: float(each.height[-1])):
        place = max(float(line.height[-1]) - 0.5, below + spacing)
        below = place
        notes.append(
            {"text": line.words, "x": 1, "xref": "paper", "xanchor": "right", "y": place,
             "yanchor": "bottom", "font": {"size": 11, "color": line.colour}, "borderpad": 1}
        )  # fmt: skip
    return traces, notes


def _trace(one: LoadLine, at: Ints) -> Trace:
    """Return a line between columns; 2^e lies half a binade below binade e's middle."""
    edges = np.flatnonzero(np.diff(one.height, prepend=np.nan, append=np.nan) != 0)
    corners = np.unique(np.clip(np.concatenate([edges, edges - 1, [0, len(at) - 1]]), 0, len(at) - 1))
    return {
        "type": "scatter",
        "mode": "lines",
        "x": at[corners],
        "y": (one.height[corners] - 0.5).astype(np.float32),
        "line": {"color": one.colour, "width": 2, "dash": one.dash, "shape": "hvh"},
        "name": one.words,
        "showlegend": False,
        "hoverinfo": "skip",
    }
