"""Cheapest formats of all modules within a budget of predicted loss increase."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis.planning.format_choice import NATIVE, Judge, Verdict
from plimsoll.diagnosis.planning.loss_forecast import Consequence, Forecast
from plimsoll.diagnosis.planning.modules import Module
from plimsoll.diagnosis.planning.series_windows import HIGHEST
from plimsoll.formats import BF16, FP32, ROLES
from plimsoll.formats.cost_table import CostTable

_SLACK = 2e-6  # HiGHS lets an integer solution break a constraint by 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A pair of formats for a module, with its cost at a step and predicted consequence (None: unknown)."""

    forward: str
    backward: str
    verdict: Verdict
    consequence: Consequence | None
    cost: float

    @property
    def increase(self) -> float:
        """Predicted increase of the loss, 0 if it is unknown."""
        return 0.0 if self.consequence is None else self.consequence.increase


def options(
    judge: Judge,
    forecast: Forecast,
    table: CostTable,
    module: Module,
    pairs: Sequence[tuple[str, str]],
    fallback: str,
) -> list[Option]:
    """Return the formats that a module may have, the fallback and FP32 included.

    Formats that are cast to at operands may be combined with the fallback in the other direction. Without a prediction
    only the fallback is left.
    """
    tried = dict.fromkeys(pairs)
    for forward, backward in pairs:
        if forward not in NATIVE:
            tried |= dict.fromkeys([(forward, fallback), (fallback, backward)])
    found: list[Option] = []
    for forward, backward in tried:
        verdict = judge.verdict(module, forward, backward)
        if verdict.why is None:
            option = option_of(judge, forecast, table, module, forward, backward, verdict)
            found += [option] if option.consequence is not None else []
    for fmt in dict.fromkeys((fallback, FP32.name)):
        verdict = judge.verdict(module, fmt, fmt)
        if verdict.why is None or verdict.unknown or fmt == FP32.name:
            held = verdict if verdict.why is None else Verdict()
            found.append(option_of(judge, forecast, table, module, fmt, fmt, held))
    return found


def option_of(
    judge: Judge, forecast: Forecast, table: CostTable, module: Module, forward: str, backward: str, verdict: Verdict
) -> Option:
    """Return a module's option with these formats and the verdict's scales."""
    shifts = dict(verdict.shifts)
    if verdict.gradients.bounded:
        shifts["gradients"] = min(verdict.gradients.high - judge.margin, HIGHEST)
    return Option(
        forward=forward,
        backward=backward,
        verdict=verdict,
        consequence=forecast.of(module.name, forward, backward, shifts),
        cost=cost_of(judge, table, module, forward, backward),
    )


def cost_of(judge: Judge, table: CostTable, module: Module, forward: str, backward: str) -> float:
    """Return the cost of a module at a step. 0 if its tensors were not recorded."""
    weights, inputs, outputs = (judge.count(module, role) for role in ROLES)
    return table.cost(weights, inputs, outputs, forward, backward) if weights and inputs and outputs else 0.0


def share_of_bf16(
    judge: Judge, table: CostTable, pairs: Mapping[str, tuple[str, str]], modules: Sequence[Module]
) -> float | None:
    """Return the cost of modules in pairs of formats over BF16's, None if unknown."""
    whole = sum(cost_of(judge, table, module, BF16.name, BF16.name) for module in modules)
    return sum(cost_of(judge, table, module, *pairs[module.name]) for module in modules) / whole if whole else None


def cheapest(offers: Sequence[Sequence[Option]], most: float) -> list[Option] | None:
    """Return the modules' options of least cost with increases of at most `most`.

    Of costs that differ by less than a millionth it is the one with the smaller increase. None if there is none.
    """
    # 0.2 s, which only plans with a budget need.
    from scipy.optimize import (  # pyright: ignore[reportMissingTypeStubs]
        Bounds,
        LinearConstraint,
        milp,  # pyright: ignore[reportUnknownVariableType]
    )

    flat = [option for each in offers for option in each]
    owner = np.repeat(np.arange(len(offers)), [len(each) for each in offers])
    costs, increases = (np.array([getattr(o, name) for o in flat], dtype=np.float64) for name in ("cost", "increase"))
    least = sum(min(option.increase for option in each) for each in offers)
    if least > most:
        return None
    one_each = LinearConstraint((owner == np.arange(len(offers))[:, None]).astype(np.float64), 1, 1)
    # In units of the budget and of the whole cost, since the solver's tolerances are absolute.
    fits, paid = np.minimum(increases / max(most, 1e-300), 2.0), costs / max(costs.sum(), 1e-300)

    def solved(goal: NDArray[np.float64], *limits: tuple[NDArray[np.float64], float]) -> Any:
        bounds = [LinearConstraint(row[None], -np.inf, limit) for row, limit in limits]
        return milp(
            goal,
            integrality=np.ones(len(flat)),
            bounds=Bounds(0, 1),
            constraints=[one_each, *bounds],
            options={"mip_rel_gap": 0.0},
        )

    within = (fits, 1.0 - _SLACK)
    least_cost = solved(paid, within)
    if least_cost.x is None:
        return None
    found = solved(fits, within, (paid, least_cost.fun + _SLACK))
    return [flat[i] for i in np.flatnonzero((least_cost.x if found.x is None else found.x) > 0.5)]
