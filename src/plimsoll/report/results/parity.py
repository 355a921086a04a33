"""`parity`: two recipes' paired difference by step, its interval, the tolerance."""

from typing import TYPE_CHECKING

import numpy as np

from plimsoll.diagnosis import Parity
from plimsoll.errors import ArgumentError
from plimsoll.report.drawing.plotly_parts import STEP_AXIS, Layout, band, build_figure, empty_figure, line, since_mark
from plimsoll.report.drawing.theme import BLUE, GREEN, GREY, ORANGE, PURPLE, RED
from plimsoll.report.labels import capital, joined, safe, wrapped

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

_COLOURS = {"equivalent": GREEN, "better": GREEN, "worse": RED, "undecided": ORANGE}
_ROOM = 3.0  # tolerances above and below zero that are always shown; early intervals are far wider
_HEIGHT = 420


def parity(found: Parity) -> "Figure":
    """Return a figure of the paired difference over the steps, and the tolerance.

    Points are means of the candidate's values less the base's over stretches of steps. The line is the weighted mean of
    all steps so far, which the verdict is about, and the band its interval. The verdict is decided where the band lies
    within the tolerance or beyond it.

    Raises `ArgumentError` for what is no `Parity`.
    """
    if not isinstance(found, Parity):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"parity figure: expected the result of plimsoll.parity; got {type(found).__name__}. Pass that."
        )
    meta: Layout = {"figure": "parity", "verdict": found.verdict}
    title = f"{capital(found.verdict)}: paired difference of the {safe(found.scalar)}"
    said = capital(found.sentence.partition(": ")[2])
    if not found.history:
        return empty_figure("parity figure", title, wrapped(said), meta)
    per_cent = found.relative and found.level != 0
    unit = 100 / abs(found.level) if per_cent else 1.0
    steps = np.array([moment.step for moment in found.history], dtype=np.int64)
    middle, low, high = (
        unit * np.array([getattr(moment.difference, end) for moment in found.history])
        for end in ("estimate", "low", "high")
    )
    allowed = unit * found.tolerance
    at, paired = np.array([step for step, _ in found.paired], dtype=np.int64), np.array([d for _, d in found.paired])
    reach = _reach(allowed, unit * paired, low[-1], high[-1])
    sign = " %" if per_cent else ""
    hover = f"step %{{x:,d}}<br>difference %{{y:+.3~g}}{sign}"
    traces = [
        *band(steps, np.clip(low, -reach, reach), np.clip(high, -reach, reach), "interval at that step", BLUE),
        line(at, unit * paired, "paired difference", GREY, hover, mode="markers", marker={"color": GREY, "size": 4}),
        line(steps, middle, "weighted mean so far", _COLOURS[found.verdict], hover, line={"width": 2.5}),
    ]
    decided = found.verdict != "undecided"
    marks, notes = since_mark(found.since_step if decided else None, f"{found.verdict} since step")
    layout: Layout = {
        "xaxis": dict(STEP_AXIS),
        "yaxis": {"title": {"text": f"difference{sign and ', % of the base'}"}, "range": [-reach, reach],
                  "tickformat": "+~g", "zeroline": True, "ticksuffix": sign},
        "shapes": [*(_limit(side * allowed) for side in (-1, 1)), *marks],
        "annotations": [*(_word(side * allowed, word) for side, word in ((1, "tolerance"), (-1, "tolerance"))), *notes],
        "height": _HEIGHT,
    }  # fmt: skip
    return build_figure("parity figure", title, joined([wrapped(said), wrapped(found.remaining)]), traces, layout, meta)


def _reach(allowed: float, paired: "np.ndarray[tuple[int], np.dtype[np.float64]]", low: float, high: float) -> float:
    """Return the axis's reach: the tolerance, last interval, and nearly all points."""
    ends = [_ROOM * allowed, float(np.quantile(np.abs(paired), 0.95))]
    ends += [abs(end) for end in (low, high) if np.isfinite(end) and abs(end) < 20 * allowed]
    return 1.1 * max(ends)


def _limit(height: float) -> Layout:
    return {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": height, "y1": height,
            "line": {"color": PURPLE, "width": 1.5, "dash": "dash"}}  # fmt: skip


def _word(height: float, word: str) -> Layout:
    return {"text": word, "x": 1, "xref": "paper", "xanchor": "right", "y": height,
            "yanchor": "bottom" if height > 0 else "top", "font": {"color": PURPLE}}  # fmt: skip
