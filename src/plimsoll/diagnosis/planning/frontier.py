"""`frontier`: the least cost at each predicted increase of the loss."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from plimsoll.diagnosis.planning.budgeted_choice import cheapest, cost_of, options
from plimsoll.diagnosis.planning.format_choice import Judge
from plimsoll.diagnosis.planning.loss_forecast import Forecast
from plimsoll.diagnosis.planning.make_plan import check_target, pairs_of
from plimsoll.diagnosis.planning.modules import computes, modules_of
from plimsoll.diagnosis.view import View
from plimsoll.formats import BF16
from plimsoll.formats.cost_table import cost_table
from plimsoll.intervals import Interval

_BUDGETS = 16
_LEAST = 1e-6  # of the largest increase: smaller budgets need FP32 everywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A plan of least cost: cost over BF16's, and predicted increase over the loss."""

    cost: float
    increase: Interval


def frontier(
    view: View,
    target: str,
    *,
    costs: "str | os.PathLike[str] | Mapping[str, Any]" = "bytes",
) -> list[Point]:
    """Return plans of least cost at rising budgets; none if nothing can be predicted. Arguments as for `plan`."""
    check_target(target)
    table, judge = cost_table(costs), Judge(view, tolerance=0.01, margin=None)
    modules = [module for module in modules_of(view) if computes(view, module)]
    forecast = Forecast(view, judge, modules)
    whole = sum(cost_of(judge, table, module, BF16.name, BF16.name) for module in modules)
    if not forecast.possible or not whole:
        return []
    offers = [options(judge, forecast, table, module, pairs_of(target.lower()), "bf16") for module in modules]
    most = sum(max(option.increase for option in each) for each in offers)
    if not most > 0:
        return []
    plans = [cheapest(offers, budget) for budget in np.geomspace(most * _LEAST, most * 1.001, _BUDGETS).tolist()]
    sums = {(sum(o.cost for o in each), sum(o.increase for o in each)) for each in plans if each is not None}
    return [Point(cost=cost / whole, increase=forecast.interval(increase)) for cost, increase in sorted(sums)]
