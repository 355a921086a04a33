"""`underflow_over_time`: share of gradients flushed by narrow formats over time."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from plimsoll.diagnosis import Finding, View, diagnose
from plimsoll.diagnosis.estimates.underflow_rate import underflow_by_step, underflow_rate
from plimsoll.diagnosis.finding import value_words
from plimsoll.diagnosis.rules.underflow import UnderflowHigh, UnderflowRising
from plimsoll.diagnosis.tables.cells import Floats
from plimsoll.diagnosis.view import Source, view_of
from plimsoll.report.drawing.aggregation import Columns
from plimsoll.report.drawing.heatmap_statistics import Matrix, underflow
from plimsoll.report.drawing.plotly_parts import (
    BLUE,
    GREY,
    ORANGE,
    PURPLE,
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
    safe,
    series_checked,
    share_ticks,
    since_mark,
)
from plimsoll.report.figure_declaration import figure, if_scaled
from plimsoll.report.figures.heatmap import view_formats
from plimsoll.text import capital

_MANY = 0.05  # of a layer's values: above it the layer underflows (T5, T6)
_LEVELS = ((0.01, "1 %: harmless below", ORANGE), (0.05, "5 %: change scale or format", RED))
_SHOWN = 4  # layers that have a line of their own


def _of_finding(view: View, finding: Finding, **arguments: Any) -> Figure:
    return underflow_over_time(
        view,
        finding.collection or "gradients",
        findings=[finding],
        focus=finding.where,
        since_step=finding.since_step,
        **arguments,
    )


@figure(offered="scale", cases=if_scaled("Underflow over time"), of_finding=_of_finding, height=470)
def underflow_over_time(
    run: Source,
    collection: str = "gradients",
    *,
    findings: Sequence[Finding] | None = None,
    focus: Sequence[str] = (),
    since_step: int | None = None,
    until: int | None = None,
) -> Figure:
    """The share of values that are flushed to zero over the steps, and of layers of which more than 5 % is.

    With lines at 1 % and 5 %, the levels of the early rule, and its outlook.

    - `findings`: where the outlook is taken from; None asks the rule (of gradients; it takes its time for a large run).
    - `focus`: layers with lines of their own; without, the worst. `since_step` is marked.

    Raises `NotRecordedError` for a collection that the run does not have.
    """
    view = view_of(run, until, "underflow_over_time")
    title = f"{capital(of(collection))}: what is flushed to zero, over time"
    meta: Layout = {"figure": "underflow_over_time", "collection": collection}
    if not view.run.tensors:
        return empty_figure("underflow_over_time", title, "Nothing was recorded in this run.", meta)
    series_checked(view, "underflow_over_time", collection)
    matrix = underflow(view, collection)
    if matrix is None or np.isnan(matrix.values).all():
        return empty_figure("underflow_over_time", title, f"No {of(collection)} were recorded up to this step.", meta)
    columns = Columns.of(matrix.steps)
    everything, layers = _overall(view, collection, matrix), _share_of_layers(matrix)
    traces = [
        _line(columns, everything, f"of all {value_words(collection)} in narrow formats", BLUE, 3.0),
        _line(columns, layers, "of layers, those that lose over 5 %", GREY, 1.5, "dot"),
        *_single(matrix, columns, focus),
    ]
    top = max(0.06, 1.08 * max(float(np.nanmax(t["y"])) for t in traces))
    marks, notes = since_mark(since_step)
    # The lower level's words have no room in a picture of large shares.
    said = [level_words(at, words, colour) for at, words, colour in _LEVELS if top < 0.5 or at > 0.01]
    layout: Layout = {
        "xaxis": dict(STEP_AXIS),
        "yaxis": {"title": {"text": "share flushed to zero"}, "range": [-0.01 * top, top], **share_ticks(0, top)},
        "shapes": [*(level_line(at, colour) for at, _, colour in _LEVELS), *marks],
        "annotations": [*said, *notes],
        "height": 420,
        "margin": {"r": 40},
    }
    formats = f"recorded in {', '.join(view_formats(view, collection))}"
    subtitle = joined([_outlook(view, collection, findings), formats, columns.said("max")])
    return build_figure("underflow_over_time", title, subtitle, traces, layout, meta)


def _overall(view: View, collection: str, matrix: Matrix) -> Floats:
    """The collection's underflow rate, step by step; 0 in formats that lose nothing."""
    at, share = underflow_by_step(view, collection)
    everything = np.zeros(len(matrix.steps))
    everything[np.searchsorted(matrix.steps, at)] = share
    return everything


def _share_of_layers(matrix: Matrix) -> Floats:
    known = np.maximum(np.count_nonzero(~np.isnan(matrix.values), axis=0), 1)
    return np.count_nonzero(np.nan_to_num(matrix.values) > _MANY, axis=0) / known


def _single(matrix: Matrix, columns: Columns, focus: Sequence[str]) -> list[Trace]:
    """Return lines of the layers in focus, or of those that lose most, if any."""
    worst = np.nan_to_num(np.fmax.reduce(matrix.values, axis=1, initial=np.nan))
    wanted = set(focus)
    chosen = [i for i, name in enumerate(matrix.series) if name in wanted or matrix.names[i] in wanted]
    ranked = sorted(chosen or range(len(worst)), key=lambda i: -worst[i])[:_SHOWN]
    colours = (PURPLE, ORANGE, "#3aa3a0", RED)
    return [
        _line(columns, matrix.values[i], safe(matrix.names[i], 36), colour, 1.5)
        for i, colour in zip(ranked, colours, strict=False)
        if worst[i] > 0
    ]


def _line(columns: Columns, values: Floats, name: str, colour: str, width: float, dash: str = "solid") -> Trace:
    hover = f"%{{fullData.name}}<br>{columns.when} %{{x}}<br>%{{y:.2~%}}"
    return line(
        columns.at, columns.merged(values, "max"), name, colour, hover,
        line={"width": width, "dash": dash}, connectgaps=True,
    )  # fmt: skip


def _outlook(view: View, collection: str, findings: Sequence[Finding] | None) -> str:
    """The early rule's outlook in words, with the rate since the finding or of the last quarter."""
    if collection != "gradients":
        return ""
    judged = diagnose(view, rules=[UnderflowRising.id, UnderflowHigh.id]) if findings is None else findings
    rising = next((f for f in judged if f.rule == UnderflowRising.id), None)
    if rising is not None:
        outlook = safe(str(rising.evidence.get("outlook", "watch")))
        return f"<b>outlook: {outlook}</b> (rising since step {rising.since_step:,})"
    high = next((f for f in judged if f.rule == UnderflowHigh.id and f.collection == collection), None)
    at, _ = underflow_by_step(view, collection)
    rate = underflow_rate(view, collection, int(at[-max(len(at) // 4, 1)]) if len(at) else None)
    if high is not None:
        rate = underflow_rate(view, collection, high.since_step, high.until_step)
    if rate is None or rate.share < _LEVELS[0][0]:
        outlook = "stay"
    else:
        outlook = "watch" if rate.share < _LEVELS[1][0] else "too much is lost"
    return f"<b>outlook: {outlook}</b> ({'nothing' if rate is None else rate.words_with_steps}, no steady rise)"
