"""`record`: the run's contents and losses: samples, drops, unreadable parts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from plimsoll.diagnosis import View
from plimsoll.report.drawing.aggregation import Columns
from plimsoll.report.drawing.plotly_parts import (
    GREEN,
    GREY,
    ORANGE,
    RED,
    STEP_AXIS,
    Lane,
    Layout,
    Source,
    build_figure,
    empty_figure,
    joined,
    lanes,
    safe,
    view_of,
    wrapped,
)
from plimsoll.report.figure_declaration import figure
from plimsoll.runs import Event
from plimsoll.text import counted

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

# Kinds of events by which the watch says that something is missing; the others are grey.
_LOST = ("failure", "not measured", "capped", "rank lost", "folder lost", "dropped")
_MOST_LANES, _MOST_MARKS, _MOST_LINES = 12, 300, 8


@figure()
def record(run: Source, *, until: int | None = None) -> "Figure":
    """The record itself: the steps at which samples were taken, each kind of event in a lane, and what is missing."""
    view = view_of(run, until, "record")
    title, meta = "What was recorded, and what was lost", {"figure": "record"}
    _ = view.last_step  # reads the scalars: a part that is damaged is known for it once it was read
    strips = [*_samples(view), *_events(view)]
    words = _missing(view)
    if not strips:
        return empty_figure("record", title, "<br>".join(["Nothing was recorded in this run.", *words]), meta)
    traces, axis = lanes(strips)
    below = 18 * len(words) + 12 if words else 0
    layout: Layout = {
        "xaxis": dict(STEP_AXIS),
        "yaxis": axis,
        "annotations": _under(words),
        "height": 160 + 24 * len(strips) + below,
        "margin": {"b": 52 + below},
    }
    return build_figure("record", title, _said(view), traces, layout, meta)


def _samples(view: View) -> list[Lane]:
    """Return the sampled steps: a stretch for each part without a gap."""
    steps = np.array([s for s in view.run.steps if view.until is None or s <= view.until], dtype=np.int64)
    if not len(steps):
        return []
    usual = float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0
    breaks = np.flatnonzero(np.diff(steps) > 3 * usual)
    firsts, lasts = np.append(0, breaks + 1), np.append(breaks, len(steps) - 1)
    spans = tuple((int(steps[a]), int(steps[b])) for a, b in zip(firsts, lasts, strict=True))[:_MOST_MARKS]
    words = tuple(f"{counted(int(b - a + 1), 'sample')}" for a, b in zip(firsts, lasts, strict=True))[:_MOST_MARKS]
    return [Lane(label="samples", colour=GREEN, spans=spans, words=words)]


def _events(view: View) -> list[Lane]:
    by_kind: dict[str, list[Event]] = {}
    for event in view.events:
        by_kind.setdefault(event.kind, []).append(event)
    kinds = sorted(by_kind, key=lambda kind: (kind not in _LOST, kind))
    return [_lane(kind, by_kind[kind]) for kind in kinds[:_MOST_LANES]]


def _lane(kind: str, events: Sequence[Event]) -> Lane:
    shown = [events[int(i)] for i in Columns.of(np.arange(len(events)), _MOST_MARKS).starts]
    return Lane(
        label=f"{kind} ({len(events):,})",
        colour=ORANGE if kind in _LOST else GREY,
        spans=tuple((e.step, e.step) for e in shown),
        words=tuple(e.message for e in shown),
    )


def _missing(view: View) -> list[str]:
    """Missing parts of the record, line by line, safe to show."""
    lines = [f"dropped: {counted(n, 'record')} ({safe(reason)})" for reason, n in sorted(view.run.dropped.items())]
    lines += [wrapped(problem, 110, 220) for problem in view.run.problems]
    more = len(lines) - _MOST_LINES
    return lines if more <= 0 else [*lines[:_MOST_LINES], f"and {more:,} more"]


def _under(words: Sequence[str]) -> list[Layout]:
    if not words:
        return []
    text = "<br>".join(words)
    return [{"text": text, "x": 0, "xref": "paper", "xanchor": "left", "y": 0, "yref": "paper", "yanchor": "top",
             "yshift": -48, "align": "left", "font": {"color": RED, "size": 11}}]  # fmt: skip


def _said(view: View) -> str:
    run = view.run
    ranks = f"{len(run.ranks)} of {counted(run.world_size, 'rank')}"
    series = counted(sum(len(names) for names in run.tensors.values()), "tensor")
    return joined([series, ranks, "closed in order" if run.closed else "still open, or its writer was killed"])
