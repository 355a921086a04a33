"""`plan_frontier`: the cheapest plans' cost against their predicted loss increase."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from plimsoll.diagnosis import View
from plimsoll.diagnosis.planning.frontier import frontier
from plimsoll.formats import Plan
from plimsoll.report.drawing.plotly_parts import (
    BLUE,
    ORANGE,
    PURPLE,
    Layout,
    Source,
    Trace,
    band,
    build_figure,
    empty_figure,
    line,
    view_of,
)
from plimsoll.report.figure_declaration import Case, figure
from plimsoll.tensor_collections import BACKWARD, FORWARD
from plimsoll.text import percent

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

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
) -> "Figure":
    """The cheapest plans for a target: their cost, and the predicted increase of the loss with its interval.

    - `costs`: as for `plimsoll.plan`.
    - `plan`: a plan to mark, by its own cost and prediction.
    - `measured`: pairs of a cost, as a share of that in BF16, and a measured increase, as a share of the loss.
    """
    view = view_of(run, until, "plan_frontier")
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
        "xaxis": {"title": {"text": _axis(costs)}, "ticksuffix": " %", "zeroline": False, "showgrid": False},
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


def _axis(costs: object) -> str:
    device = costs if isinstance(costs, str) else "the given device"
    return (
        "bytes moved, of those in BF16" if device == "bytes" else f"time of the products on {device}, of that in BF16"
    )
