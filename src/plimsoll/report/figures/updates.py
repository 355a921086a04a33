"""`updates`: how far each step moves the weights, and how many it does not move."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plimsoll.diagnosis import Finding, View
from plimsoll.diagnosis.tables.cells import Floats
from plimsoll.diagnosis.tables.optimizer_states import squares_over_moments
from plimsoll.diagnosis.view import Source, view_of
from plimsoll.formats import get_element
from plimsoll.report.drawing.aggregation import Columns, How
from plimsoll.report.drawing.heatmap_statistics import STATISTICS
from plimsoll.report.drawing.plotly_parts import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    STEP_AXIS,
    Figure,
    Layout,
    Trace,
    band,
    build_figure,
    empty_figure,
    joined,
    level_line,
    level_words,
    line,
    power,
    powers,
    safe,
    share_ticks,
    since_mark,
)
from plimsoll.report.figure_declaration import Case, figure

_SHOWN = 4  # layers that have a line of their own
_COLOURS = (ORANGE, PURPLE, GREEN, RED)
_MANY_UNMOVED = 0.5  # the threshold of updates-swallowed
_LAG = 20.0  # the threshold of spike-forerunner
_NOTHING = "No updates were recorded in this run. Watch with collect= naming 'updates'."


def _cases(view: View) -> list[Case]:
    return [Case(label="Updates against weights", arguments={})] if "updates" in view.run.tensors else []


def _of_finding(view: View, finding: Finding, **arguments: Any) -> Figure:
    if finding.collection == "gradients":
        return lag(view, focus=finding.where, since_step=finding.since_step)
    return updates(view, focus=finding.where, since_step=finding.since_step, **arguments)


@figure(offered="layers", cases=_cases, of_finding=_of_finding, height=550)
def updates(
    run: Source, *, focus: Sequence[str] = (), since_step: int | None = None, until: int | None = None
) -> Figure:
    """The norm of each update over that of its weight, as a power of two; and the share of weights that did not move.

    Half of all layers lie in the band. Updates below the dashed lines, where weights are held in 16 bits, are mostly
    rounded away: FP16 swallows those below 2^-12 of the weight, BF16 those below 2^-9.

    - `focus`: layers with lines of their own; without, those of which most stays unmoved. `since_step` is marked.
    """
    view = view_of(run, until, "updates")
    title, meta = "How far updates move the weights", {"figure": "updates", "collection": "updates"}
    cells = view.cells("updates")
    if cells is None:
        return empty_figure("updates", title, _NOTHING, meta)
    columns = Columns.of(cells.steps)
    ratio, unmoved = _statistic(view, "ratio"), _statistic(view, "unmoved")
    chosen = _chosen(cells.names, unmoved, focus)
    over = _Panel("y", cells.names, ratio, "mean", "update / weight", "2<sup>%{y:.1f}</sup>")
    under = _Panel("y2", cells.names, unmoved, "max", "unmoved", "%{y:.2~%}")
    known = [panel for panel in (over, under) if not np.isnan(panel.values).all()]
    if not known:
        return empty_figure("updates", title, "Updates were recorded, but not against their weights.", meta)
    traces = [trace for panel in known for trace in _traces(panel, columns, chosen, panel is known[0])]
    marks, notes = since_mark(since_step)
    limits, words = _swallowed_below(cells.formats)
    split = under in known
    layout: Layout = {
        "xaxis": {**STEP_AXIS, "anchor": "y2" if split else "y"},
        "yaxis": {**_power_axis(traces, limits), "domain": [0.42 if split else 0.0, 1.0]},
        "shapes": [*marks, *(level_line(at, ORANGE) for at in limits)],
        "annotations": [*notes, *words],
        "height": 500 if split else 360,
    }  # fmt: skip
    if split:
        layout["shapes"].append(level_line(_MANY_UNMOVED, RED, "y2"))
        layout["yaxis2"] = {
            "title": {"text": "weights unmoved"},
            "domain": [0.0, 0.32],
            "range": [-0.03, 1.03],
            **share_ticks(0, 1, 5),
        }
    formats = f"weights in {', '.join(cells.formats)}"
    return build_figure("updates", title, joined([formats, columns.said("mean")]), traces, layout, meta)


def lag(run: Source, *, focus: Sequence[str] = (), since_step: int | None = None, until: int | None = None) -> Figure:
    """Figure of squared gradients over second moments, by layer: near 1 in the mean, high after a surprise."""
    view = view_of(run, until, "lag")
    title, meta = "Gradients against Adam's memory of them", {"figure": "updates", "collection": "gradients"}
    gradients, optimizer = view.cells("gradients"), view.cells("optimizer")
    both = None if gradients is None or optimizer is None else squares_over_moments(gradients, optimizer)
    if gradients is None or both is None or not both[2].size:
        return empty_figure(
            "lag", title, "Gradients and Adam's second moments were not recorded at the same steps.", meta
        )
    layers, places, values = both
    with_moments: list[int] = layers.tolist()
    names = tuple(gradients.names[i] for i in with_moments)
    columns = Columns.of(gradients.steps[places])
    with np.errstate(all="ignore"):
        panel = _Panel("y", names, np.log2(values), "max", "squared gradient / second moment", "2<sup>%{y:.1f}</sup>")
    traces = _traces(panel, columns, _chosen(names, values, focus), True)
    marks, notes = since_mark(since_step)
    limit = float(np.log2(_LAG))
    layout: Layout = {
        "xaxis": dict(STEP_AXIS),
        "yaxis": {**_power_axis(traces, [limit]), "title": {"text": "squared gradient / second moment"}},
        "shapes": [*marks, level_line(limit, RED)],
        "annotations": [*notes, level_words(limit, f"{_LAG:.0f} times: a spike may follow", RED)],
        "height": 400,
    }
    return build_figure("lag", title, columns.said("max"), traces, layout, meta)


@dataclass(frozen=True, slots=True)
class _Panel:
    """Numbers of layers x steps in one panel."""

    axis: str
    names: Sequence[str]
    values: Floats
    how: How
    words: str
    hover: str


def _statistic(view: View, name: str) -> Floats:
    statistic = STATISTICS[name].of(view, "updates")
    return np.empty((0, 0)) if statistic is None else np.where(np.isfinite(statistic.values), statistic.values, np.nan)


def _chosen(names: Sequence[str], values: Floats, focus: Sequence[str]) -> list[int]:
    """The layers in focus, or those with the highest values."""
    place = {name: i for i, name in enumerate(names)}
    wanted = [place[name] for name in focus if name in place]
    most = np.nan_to_num(np.fmax.reduce(values, axis=1, initial=np.nan))
    return (wanted or np.argsort(-most, kind="stable").tolist())[:_SHOWN]


def _traces(panel: _Panel, columns: Columns, chosen: Sequence[int], first: bool) -> list[Trace]:
    """Return the band of the middle half of the layers, the median, and some lines."""
    values = columns.merged(panel.values, panel.how)
    when = f"{columns.when} %{{x}}"
    common: dict[str, Any] = {"yaxis": panel.axis, "connectgaps": True}
    traces: list[Trace] = []
    if len(values) > _SHOWN:
        low, middle, high = _quartiles(values)
        hover = f"{when}<br>half of the layers are above<br>{panel.words} {panel.hover}"
        traces += band(
            columns.at, low, high, "half of the layers", BLUE, **common, legendgroup="band", showlegend=first
        )
        traces.append(
            line(columns.at, middle, "median layer", BLUE, hover, **common, legendgroup="median", showlegend=first)
        )
    for i, colour in zip(chosen, _COLOURS, strict=False):
        name = safe(panel.names[i], 36)
        hover = f"%{{fullData.name}}<br>{when}<br>{panel.words} {panel.hover}"
        style = {"width": 1.5}
        traces.append(
            line(columns.at, values[i], name, colour, hover, **common, line=style, legendgroup=str(i), showlegend=first)
        )
    return traces


def _quartiles(values: Floats) -> tuple[Floats, Floats, Floats]:
    """Return quarter, median and three quarters over the layers; NaN without numbers."""
    result = np.full((3, values.shape[1]), np.nan)
    known = ~np.isnan(values).all(axis=0)
    with np.errstate(invalid="ignore"):  # between two infinite numbers there is none
        result[:, known] = np.nanquantile(values[:, known], [0.25, 0.5, 0.75], axis=0)
    return result[0], result[1], result[2]


def _swallowed_below(formats: Sequence[str]) -> tuple[list[float], list[Layout]]:
    """Return the levels below which updates of 16-bit weights are mostly lost."""
    narrow = [fmt for fmt in (get_element(name, "updates") for name in formats) if fmt.bits <= 16]
    limits = [float(-fmt.mantissa_bits - 2) for fmt in narrow]
    words = [
        level_words(at, f"{fmt.name} swallows below {power(at)}", ORANGE)
        for at, fmt in zip(limits, narrow, strict=True)
    ]
    return limits, words


def _power_axis(traces: Sequence[Trace], more: Sequence[float]) -> Layout:
    values = np.concatenate(
        [np.asarray(t["y"], dtype=np.float64) for t in traces if t["yaxis"] == "y"] + [np.array(more)]
    )
    values = values[np.isfinite(values)]
    low, high = (float(values.min()) - 1, float(values.max()) + 1) if len(values) else (-1.0, 1.0)
    places, texts = powers(low, high, 8)
    return {"title": {"text": "update / weight"}, "tickvals": places, "ticktext": texts, "range": [low, high]}
