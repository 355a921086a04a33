"""Figures of plans: their cost against loss, and each layer before and after one."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plimsoll.checks import one_of
from plimsoll.diagnosis import View
from plimsoll.diagnosis.planning.check import check_plan
from plimsoll.diagnosis.planning.make_plan import frontier
from plimsoll.diagnosis.view import Source, view_of
from plimsoll.errors import ArgumentError
from plimsoll.formats import ROLES, Plan
from plimsoll.formats.catalogue import TARGETS
from plimsoll.report.drawing.heatmap_statistics import STATISTICS, Statistic
from plimsoll.report.drawing.plotly_parts import (
    BLUE,
    GREY,
    ORANGE,
    PURPLE,
    Figure,
    Layout,
    Trace,
    band,
    build_figure,
    empty_figure,
    joined,
    labels,
    line,
    of,
    powers,
    safe,
    series_checked,
    share_ticks,
)
from plimsoll.report.figure_declaration import Case, figure
from plimsoll.tensor_collections import BACKWARD, FORWARD
from plimsoll.text import capital, counted, percent

# -- `before_after`: each layer's losses in two runs, or in a run and under a plan -------------------------------------

_MOST_LAYERS = 40


@figure(runs=(2,))
def before_after(
    before: Source,
    after: "Source | Plan",
    collection: str = "gradients",
    statistic: str = "underflow",
    *,
    until: int | None = None,
) -> Figure:
    """Each layer twice: in the first run, and in the second; or as a plan would have held it.

    Of shares (underflow, zeros) the highest over the steps is shown, of sizes the median. The layers that differ most
    come first.

    - `after`: another run of the same model, or a `Plan`, whose formats and scales are then asked what they would lose
      of the values of the first run ("weights", "activations" or "gradients"; what the plan leaves alone is left out).
    - `statistic`: as for `heatmap`; with a plan, underflow.

    Raises `ArgumentError` for another statistic, and `NotRecordedError` for a collection that a run does not have.
    """
    kind = _kind(statistic, collection, after)
    view = view_of(before, until, "before_after")
    of_what = "now and as planned" if isinstance(after, Plan) else "in both runs"
    title = f"{capital(of(collection))}: {kind.title}, {of_what}"
    meta: Layout = {"figure": "before_after", "collection": collection, "statistic": statistic}
    if not view.run.tensors:
        return empty_figure("before_after", title, "Nothing was recorded in the first run.", meta)
    if isinstance(after, Plan):
        first, second = _as_it_was(view, collection), _as_planned(view, after, collection)
        names = ("as it was", f"as planned ({safe(after.target)})")
    else:
        other = view_of(after, None if isinstance(after, View) else until, "before_after")
        first, second = _levels(view, collection, kind), _levels(other, collection, kind)
        names = (safe(view.run.path.name), safe(other.run.path.name))
        names = names if names[0] != names[1] else ("the first run", "the second run")
    common = [name for name in first if name in second]
    if not common:
        return empty_figure("before_after", title, "The two have no layer with such a number in common.", meta)
    common.sort(key=lambda name: -abs(first[name] - second[name]))
    shown = common[:_MOST_LAYERS]
    where = names if isinstance(after, Plan) else (f"in {names[0]}", f"in {names[1]}")
    said = _said(shown, len(common), (first, second), where, kind)
    return _painted(title, said, shown, (first, second), names, kind, meta)


def _kind(statistic: str, collection: str, after: object) -> Statistic:
    allowed = ["underflow"] if isinstance(after, Plan) else [n for n, s in STATISTICS.items() if s.scale != "count"]
    if statistic not in allowed:
        raise ArgumentError(
            f"before_after: expected a statistic among {', '.join(allowed)}; got {statistic!r}. Choose one."
        )
    if isinstance(after, Plan) and collection not in ROLES:
        raise ArgumentError(
            f"before_after: expected a collection among {', '.join(ROLES)} with a plan; got {collection!r}. "
            "Choose one of these."
        )
    return STATISTICS[statistic]


def _levels(view: View, collection: str, kind: Statistic) -> dict[str, float]:
    """A number for each layer: the highest share, or the median size."""
    series_checked(view, "before_after", collection)
    matrix = kind.of(view, collection)
    levels: dict[str, float] = {}
    for i, name in enumerate(matrix.names if matrix is not None else ()):
        values = matrix.values[i] if matrix is not None else np.empty(0)
        known = values[np.isfinite(values)]
        if len(known):
            levels[name] = float(known.max() if kind.scale == "share" else np.median(known))
    return levels


def _as_it_was(view: View, collection: str) -> dict[str, float]:
    """Highest share of each module that the run's own formats flushed."""
    recorded = "activation_gradients" if collection == "gradients" else collection
    recorded = recorded if recorded in view.run.tensors else collection
    levels: dict[str, float] = {}
    for name, share in _levels(view, recorded, STATISTICS["underflow"]).items():
        module = name.partition(":")[0] if recorded.startswith("activation") else name
        module = module.rpartition(".")[0] if recorded == "weights" else module
        levels[module] = max(levels.get(module, 0.0), share)
    return levels


def _as_planned(view: View, plan: Plan, role: str) -> dict[str, float]:
    """Return the share of a run's values that a plan's formats lose, by module."""
    rows = check_plan(plan, view).rows
    return {row.module: row.found.estimate for row in rows if row.role == role and row.found is not None}


def _painted(
    title: str,
    subtitle: str,
    shown: list[str],
    values: tuple[Mapping[str, float], Mapping[str, float]],
    names: tuple[str, str],
    kind: Statistic,
    meta: Layout,
) -> Figure:
    """A line a layer, from the one mark to the other."""
    ticks = labels(shown)
    hover = {"share": "%{x:.3~%}", "binades": "%{x:.1f} binades"}.get(kind.scale, "2<sup>%{x:.1f}</sup>")
    across: list[float | None] = []
    down: list[str | None] = []
    for name, tick in zip(shown, ticks, strict=True):
        across += [values[0][name], values[1][name], None]
        down += [tick, tick, None]
    traces: list[Trace] = [
        {"type": "scatter", "mode": "lines", "x": across, "y": down, "line": {"color": GREY, "width": 2},
         "hoverinfo": "skip", "showlegend": False}
    ]  # fmt: skip
    # The page draws two runs in these colours everywhere.
    for name, numbers, colour, symbol in zip(names, values, (BLUE, ORANGE), ("circle-open", "circle"), strict=True):
        mark = {"color": colour, "size": 10, "symbol": symbol, "line": {"width": 2, "color": colour}}
        traces.append(
            {"type": "scatter", "mode": "markers", "x": [numbers[n] for n in shown], "y": ticks, "marker": mark,
             "name": name, "hovertemplate": f"%{{y}}<br>%{{fullData.name}}<br>{kind.words}: {hover}<extra></extra>"}
        )  # fmt: skip
    layout: Layout = {
        "xaxis": _axis(kind, [float(numbers[n]) for numbers in values for n in shown]),
        "yaxis": {"type": "category", "autorange": "reversed", "categoryorder": "array", "categoryarray": ticks},
        "height": int(max(150 + 22 * len(shown), 280)),
    }
    return build_figure("before_after", title, subtitle, traces, layout, {**meta, "layers": len(shown)})


def _axis(kind: Statistic, values: list[float]) -> Layout:
    low, high = min(values), max(values)
    if kind.scale == "share":
        top = max(1.06 * high, 0.02)
        return {"title": {"text": kind.words}, "range": [-0.02 * top, top], "zeroline": False, **share_ticks(0, top)}
    places, texts = powers(low - 1, high + 1, 9)
    texts = [f"{place:.0f}" for place in places] if kind.scale == "binades" else texts
    return {
        "title": {"text": kind.words},
        "tickvals": places,
        "ticktext": texts,
        "range": [low - 1, high + 1],
        "zeroline": False,
    }


def _said(
    shown: list[str],
    common: int,
    levels: tuple[Mapping[str, float], Mapping[str, float]],
    where: tuple[str, str],
    kind: Statistic,
) -> str:
    parts = [f"the {len(shown)} that differ most of {common:,}"] if common > len(shown) else [counted(common, "layer")]
    if kind.scale == "share":
        worst = [max(level[name] for name in shown) for level in levels]
        parts.append(f"the worst: {percent(worst[0])} {where[0]}, {percent(worst[1])} {where[1]}")
    return joined(parts)


# -- `plan_frontier`: the cheapest plans' cost against their predicted loss increase -----------------------------------

_LEAST = 1e-5  # increase that is drawn at least; the axis is logarithmic
_NOTHING = "A prediction needs the loss, and weights, gradients, activations and activation_gradients of modules."


def _cases(view: View) -> list[Case]:
    complete = {*FORWARD, *BACKWARD} <= set(view.run.tensors) and "loss" in view.run.scalar_names
    narrow = view.narrow("gradients")
    wide = narrow is not None and not narrow.censors.any()  # what FP16 has lost already cannot be planned for
    return [Case(label="Cost of FP8 against loss", arguments={})] if complete and wide else []


@figure(offered="layers", cases=_cases, height=430)
def plan_frontier(
    run: Source,
    target: str = "fp8",
    *,
    costs: "str | Mapping[str, Any]" = "bytes",
    plan: Plan | None = None,
    measured: Sequence[tuple[float, float]] = (),
    until: int | None = None,
) -> Figure:
    """The cheapest plans for a target: their cost, and the predicted increase of the loss with its interval.

    - `costs`: as for `plimsoll.plan`.
    - `plan`: a plan to mark, by its own cost and prediction.
    - `measured`: pairs of a cost, as a share of that in BF16, and a measured increase, as a share of the loss.
    """
    view = view_of(run, until, "plan_frontier")
    one_of("plan_frontier", "target", target, (*TARGETS, "cheapest"))
    title, meta = f"What {target.upper()} saves, and costs in loss", {"figure": "plan_frontier", "target": target}
    complete = {*FORWARD, *BACKWARD} <= set(view.run.tensors)
    points = frontier(view, target, costs=costs) if complete else []
    if not points:
        return empty_figure("plan_frontier", title, _NOTHING, meta)
    visible = sum(point.increase.estimate > _LEAST for point in points)
    points = points[: visible + 1]
    x = 100 * np.array([point.cost for point in points])
    low, middle, high = (
        100 * np.maximum([getattr(point.increase, end) for point in points], _LEAST)
        for end in ("low", "estimate", "high")
    )
    traces = band(x, low, high, "interval of the prediction", BLUE)
    hover = "cost %{x:.3~g} % of BF16<br>loss rises by %{y:.2~g} %"
    traces.append(line(x, middle, "cheapest plans, predicted", BLUE, hover, mode="lines+markers"))
    if plan is not None and plan.cost is not None and plan.predicted_loss is not None:
        traces.append(_dots([(plan.cost, plan.predicted_loss.estimate)], "the plan", ORANGE, hover, "diamond"))
    if measured:
        traces.append(_dots(measured, "measured", PURPLE, hover, "x"))
    layout: Layout = {
        "xaxis": {"title": {"text": _cost_words(costs)}, "ticksuffix": " %", "zeroline": False, "showgrid": False},
        "yaxis": {
            "title": {"text": "rise of the loss"},
            "type": "log",
            "ticksuffix": " %",
            "tickformat": "~g",
            "dtick": 1,
        },
        "height": 400,
    }
    cheapest = points[0]
    said = f"The cheapest has {percent(cheapest.cost)} of BF16's cost, and raises the loss by "
    said += percent(cheapest.increase.estimate)
    return build_figure("plan_frontier", title, said, traces, layout, meta)


def _dots(places: Sequence[tuple[float, float]], name: str, colour: str, hover: str, symbol: str) -> Trace:
    x, y = (100 * np.array([place[i] for place in places], dtype=np.float64) for i in (0, 1))
    marker = {"color": colour, "size": 12, "symbol": symbol}
    return line(x, np.maximum(y, 100 * _LEAST), name, colour, hover, mode="markers", marker=marker)


def _cost_words(costs: object) -> str:
    device = costs if isinstance(costs, str) else "the given device"
    return (
        "bytes moved, of those in BF16" if device == "bytes" else f"time of the products on {device}, of that in BF16"
    )
