"""Figures of the whole run: loss and loss scale, and what was recorded and lost."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plimsoll.diagnosis import Finding, View, diagnose, grouped
from plimsoll.diagnosis.tables.cells import Floats, Ints
from plimsoll.diagnosis.view import Source, view_of
from plimsoll.report.drawing.aggregation import Columns
from plimsoll.report.drawing.plotly_parts import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SEVERITY,
    STEP_AXIS,
    Figure,
    Lane,
    Layout,
    Trace,
    band,
    build_figure,
    empty_figure,
    joined,
    lanes,
    line,
    plotted,
    powers,
    safe,
    since_mark,
    wrapped,
)
from plimsoll.report.figure_declaration import Case, figure
from plimsoll.runs import Event
from plimsoll.text import counted

# -- `loss_and_scale` --------------------------------------------------------------------------------------------------

_MOST_POINTS = 1200
_MOST_FINDINGS = 14
_LOG_FROM = 20.0  # times the smallest loss: above it the loss has a logarithmic axis
_PANELS = {"loss": 210, "scale": 150}  # pixels
_LANE, _GAP, _AROUND = 22, 26, 140  # pixels: a lane; between panels; title and step axis


def _of_finding(view: View, finding: Finding, **arguments: Any) -> Figure:
    return loss_and_scale(view, [finding], **arguments)


def _height(view: View, arguments: Mapping[str, Any]) -> int:
    findings = min(len(arguments.get("findings", ())), _MOST_FINDINGS + 1)
    acts = any(event.kind == "guard" for event in view.events)
    heights = [_PANELS[name] for name in ("loss", "scale") if len(view.scalar(name)[0])]
    heights += [_LANE * (findings + acts)] if findings + acts else []
    legend = 30 if len(heights) > 1 else 0
    return sum(heights) + _GAP * max(len(heights) - 1, 0) + _AROUND + legend


def _title(view: View) -> str:
    return "Loss and loss scale" if len(view.scalar("scale")[0]) else "Loss"


def _cases(view: View) -> list[Case]:
    return [Case(label=_title(view), arguments={})]


@figure(runs=(1, 2), offered="scale", cases=_cases, of_finding=_of_finding, height=_height)
def loss_and_scale(
    run: Source,
    findings: Sequence[Finding] | None = None,
    *,
    beside: Source | None = None,
    until: int | None = None,
) -> Figure:
    """Loss and loss scale over the steps, with what was skipped, what a guard did and what was found.

    Each finding has a lane of its own under the curves, from its first step to its last.

    - `findings`: None for those of `diagnose`, which takes its time for a large run; an empty tuple for none.
    - `beside`: another run, whose curves are drawn dashed.
    """
    view = view_of(run, until, "loss_and_scale")
    other = None if beside is None else view_of(beside, None if isinstance(beside, View) else until, "loss_and_scale")
    shown = list(diagnose(view) if findings is None else findings)
    meta: Layout = {"figure": "loss_and_scale"}
    title = _title(view)
    strips = [*_found(shown), *_acts(view)]
    parts = _curves(view, "", safe(view.run.path.name) if other is not None else "")
    if other is not None:
        more = _curves(other, "dash", safe(other.run.path.name))
        parts = {
            panel: [*parts.get(panel, []), *more.get(panel, [])] for panel in _PANELS if panel in parts or panel in more
        }
    if not parts and not strips:
        return empty_figure("loss_and_scale", title, "Neither a loss nor a loss scale was recorded in this run.", meta)
    shapes, notes = since_mark(shown[0].since_step if len(shown) == 1 else None)
    return _arranged(title, _said(shown, parts), parts, strips, {"shapes": shapes, "annotations": notes}, meta)


def _curves(view: View, dash: str, run: str) -> dict[str, list[Trace]]:
    """The traces of each panel that has any."""
    curves: dict[str, list[Trace]] = {}
    if len(view.scalar("loss")[0]):
        curves["loss"] = _loss(view, dash, run)
    if len(view.scalar("scale")[0]):
        curves["scale"] = _scale(view, dash, run)
    elif len(_skipped(view)) and "loss" in curves:
        curves["loss"] += _marked(_skipped(view), *view.scalar("loss"), "gradients not finite", ORANGE, "x-thin-open")
    return curves


def _loss(view: View, dash: str, run: str) -> list[Trace]:
    steps, values = view.scalar("loss")
    finite = np.where(np.isfinite(values), values, np.nan)
    columns = Columns.of(steps, _MOST_POINTS)
    mean = columns.merged(finite, "mean")
    hover = "step %{x}<br>loss %{y:.4~g}" if columns.each == 1 else "around step %{x}<br>mean loss %{y:.4~g}"
    drawn: list[Trace] = []
    if columns.each > 1:
        low, high = columns.merged(finite, "min"), columns.merged(finite, "max")
        drawn += band(columns.at, low, high, f"{run} loss, lowest to highest".strip(), BLUE)
    drawn.append(
        line(columns.at, mean, f"{run} loss".strip(), BLUE, hover, line={"width": 1.6, "dash": dash or "solid"})
    )
    bad = steps[~np.isfinite(values)]
    if len(bad):
        edge = float(np.nanmax(mean)) if np.isfinite(mean).any() else 1.0
        drawn += _marked(bad, steps, np.full(len(steps), edge), f"{run} loss is NaN or infinite".strip(), RED, "x")
    return drawn


def _scale(view: View, dash: str, run: str) -> list[Trace]:
    steps, values = view.scalar("scale")
    with np.errstate(all="ignore"):
        exponents = np.where(np.isfinite(values) & (values > 0), np.log2(values), np.nan)
    columns = Columns.of(steps, _MOST_POINTS)
    low = columns.merged(exponents, "min")
    hover = "step %{x}<br>scale 2<sup>%{y:.0f}</sup>"
    name = (
        f"{run} loss scale".strip()
        if columns.each == 1
        else f"{run} loss scale, the lowest of each {columns.each} steps".strip()
    )
    style = {"width": 2, "dash": dash or "solid", "shape": "hv"}
    drawn = [line(columns.at, low, name, GREEN, hover, line=style)]
    skips = _skipped(view)
    if len(skips) and not dash:
        drawn += _marked(skips, steps, exponents, "skipped step (gradients not finite)", ORANGE, "x-thin-open")
    return drawn


def _skipped(view: View) -> Ints:
    """The steps whose gradients were not finite: a scaler has skipped them."""
    steps, values = view.scalar("nonfinite")
    events = np.array([e.step for e in view.events if e.kind == "skip"], dtype=np.int64)
    return np.union1d(steps[np.nan_to_num(values) > 0], events)


def _marked(at: Ints, steps: Ints, values: Floats, name: str, colour: str, symbol: str) -> list[Trace]:
    """Return marks at steps, on the curve; of very many the first of each column."""
    shown = at[Columns.of(at, _MOST_POINTS).starts]
    high = values[np.clip(np.searchsorted(steps, shown, side="right") - 1, 0, None)]
    known = np.isfinite(high)
    trace: Trace = {
        "type": "scatter", "mode": "markers", "x": shown[known], "y": plotted(high[known]),
        "name": f"{name} ({len(at):,})",
        "marker": {"color": colour, "size": 8, "symbol": symbol, "line": {"width": 2, "color": colour}},
        "hovertemplate": "%{fullData.name}<br>step %{x}<extra></extra>",
    }  # fmt: skip
    return [trace] if known.any() else []


def _found(findings: Sequence[Finding]) -> list[Lane]:
    strips = [
        Lane(
            label=f"{f.severity}: {f.rule}",
            colour=SEVERITY[f.severity],
            spans=((f.since_step, max(f.until_step, f.since_step)),),
            words=(f"{f.meaning} {f'In {grouped(f.where)}.' if f.where else ''}",),
        )
        for f in findings[:_MOST_FINDINGS]
    ]
    rest = findings[_MOST_FINDINGS:]
    if rest:
        spans = ((min(f.since_step for f in rest), max(f.until_step for f in rest)),)
        strips.append(Lane(label=f"and {len(rest)} more", colour=SEVERITY["info"], spans=spans, words=("",)))
    return strips


def _acts(view: View) -> list[Lane]:
    """A lane for what a guard did."""
    acts = [e for e in view.events if e.kind == "guard"]
    shown = acts[:: -(-len(acts) // _MOST_POINTS) or 1]
    if not acts:
        return []
    spans, words = tuple((e.step, e.step) for e in shown), tuple(e.message for e in shown)
    return [Lane(label=f"guard: {len(acts):,} acts", colour=PURPLE, spans=spans, words=words)]


def _arranged(
    title: str, subtitle: str, parts: dict[str, list[Trace]], strips: list[Lane], marks: Layout, meta: Layout
) -> Figure:
    """The panels one above the other, over one time axis."""
    panels = {name: _PANELS[name] for name in _PANELS if name in parts}
    strip_height = _LANE * len(strips)
    heights = [*panels.values(), *([strip_height] if strips else [])]
    inside = sum(heights) + _GAP * (len(heights) - 1)
    layout: Layout = {"height": inside + _AROUND, **marks}
    traces: list[Trace] = []
    top = float(inside)
    for i, height in enumerate(heights):
        axis: dict[str, Any] = {"domain": [max((top - height) / inside, 0.0), top / inside]}
        row = "" if i == 0 else str(i + 1)
        if i < len(panels):
            mine = parts[list(panels)[i]]
            axis |= _loss_axis(mine) if list(panels)[i] == "loss" else _scale_axis(mine)
        else:
            mine, more = lanes(strips)
            axis |= more
        traces += [{**trace, "yaxis": f"y{row}"} for trace in mine]
        layout[f"yaxis{row}"] = axis
        top -= height + _GAP
    lowest = "" if len(heights) == 1 else str(len(heights))
    layout["xaxis"] = {**STEP_AXIS, "anchor": f"y{lowest}", "showgrid": True}
    return build_figure("loss_and_scale", title, subtitle, traces, layout, meta)


def _loss_axis(traces: list[Trace]) -> Layout:
    values = np.concatenate([np.empty(0), *(np.asarray(t["y"], dtype=np.float64) for t in traces if not _is_mark(t))])
    known = values[np.isfinite(values)]
    if not len(known):  # marks alone, at a height that means nothing
        return {"title": {"text": "loss"}, "showticklabels": False, "showgrid": False, "zeroline": False}
    logarithmic = len(known) > 0 and known.min() > 0 and known.max() > _LOG_FROM * known.min()
    return {"title": {"text": "loss"}, **({"type": "log", "exponentformat": "power"} if logarithmic else {})}


def _is_mark(trace: Trace) -> bool:
    return "symbol" in trace.get("marker", {})


def _scale_axis(traces: list[Trace]) -> Layout:
    values = np.concatenate([np.asarray(t["y"], dtype=np.float64) for t in traces])
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    places, texts = powers(low - 0.9, high + 0.9, 6)
    return {"title": {"text": "loss scale"}, "tickvals": places, "ticktext": texts, "range": [low - 1, high + 1]}


def _said(findings: Sequence[Finding], parts: dict[str, list[Trace]]) -> str:
    missing = [
        words
        for panel, words in (("loss", "no loss was recorded"), ("scale", "no loss scale was recorded"))
        if panel not in parts
    ]
    alarms = sorted(f.since_step for f in findings if f.severity == "alarm")
    count = f"{counted(len(alarms), 'alarm')}, the first since step {alarms[0]:,}" if alarms else ""
    return joined([count, *missing])


# -- `record`: the run's contents and losses: samples, drops, unreadable parts -----------------------------------------

# Kinds of events by which the watch says that something is missing; the others are grey.
_LOST = ("failure", "not measured", "capped", "rank lost", "folder lost", "dropped")
_MOST_LANES, _MOST_MARKS, _MOST_LINES = 12, 300, 8


@figure()
def record(run: Source, *, until: int | None = None) -> Figure:
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
    return build_figure("record", title, _facts(view), traces, layout, meta)


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


def _facts(view: View) -> str:
    run = view.run
    ranks = f"{len(run.ranks)} of {counted(run.world_size, 'rank')}"
    series = counted(sum(len(names) for names in run.tensors.values()), "tensor")
    return joined([series, ranks, "closed in order" if run.closed else "still open, or its writer was killed"])
