"""`plan`: format and scales of each module for a target, with reasons. `frontier`: the least cost at each loss."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from plimsoll import checks
from plimsoll.diagnosis.finding import grouped
from plimsoll.diagnosis.planning.budgeted_choice import Option, cheapest, cost_of, options, share_of_bf16
from plimsoll.diagnosis.planning.format_choice import Judge, Verdict, outward
from plimsoll.diagnosis.planning.loss_forecast import SPREAD, Consequence, Forecast
from plimsoll.diagnosis.planning.modules import Module, computes, modules_of, named
from plimsoll.diagnosis.planning.series_windows import Collection, Scales, loss_scales
from plimsoll.diagnosis.view import View, view_of
from plimsoll.errors import ArgumentError, NotRecordedError
from plimsoll.formats import BF16, ROLES, Plan, Role, catalogue, get
from plimsoll.formats.cost_table import CostTable, cost_table
from plimsoll.intervals import Interval
from plimsoll.runs import Run
from plimsoll.text import percent

# -- reasons for a module's format, and remarks on a whole plan --------------------------------------------------------

_NAMED = 3  # groups of modules that never computed
_BUDGETS = 16  # of the frontier
_LEAST = 1e-6  # of the largest increase: smaller budgets need FP32 everywhere
_ENOUGH = 100  # binades: of tensors that were zero throughout
Losses = Mapping[str, tuple[float, float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatChoice:
    """Decision on one module."""

    module: Module
    forward: str
    backward: str
    verdict: Verdict
    why_not: str | None = None  # why the target was not possible, if its format is the fallback
    scales: Mapping[Role, int] = field(default_factory=dict["Role", int])  # its scales, as shifts


def note(judge: Judge, choice: FormatChoice, predicted: Losses) -> str:
    """Why the module has its format, and what it loses in it."""
    worst = max(predicted, key=lambda role: predicted[role][2], default=None)
    loses = "loses nothing"
    if worst is not None and predicted[worst][2] > 0:
        loses = f"loses at most {percent(predicted[worst][2])} of its {worst}"
    if choice.why_not is not None:
        return f"{choice.why_not}. {choice.forward.upper()} {loses}" if predicted else choice.why_not
    window = choice.verdict.gradients
    needs = f"; needs a loss scale of 2^{window.low} to 2^{window.high - judge.margin}" if window.bounded else ""
    return f"{loses}{needs}{_left(judge, choice)}"


def _left(judge: Judge, choice: FormatChoice) -> str:
    """Return the headroom for steps between samples, if it is larger than the margin."""
    if not judge.follows:
        return ""
    rooms = [f"{role} 2^{k}" for role, k in choice.verdict.spare.items() if judge.margin < k < _ENOUGH]
    return f"; room above for steps not recorded: {', '.join(rooms)}" if rooms else ""


def remarks(judge: Judge, chosen: Sequence[FormatChoice], scales: Scales | None, idle: Sequence[str]) -> list[str]:
    """Return the plan in one sentence, and remarks on missing data. `idle` modules never computed."""
    found = [_summary(judge, chosen)]
    if idle:
        these = "these modules" if len(idle) > 1 else "this module"
        found.append(
            f"Not counted, as {these} computed nothing that was recorded (a copy, such as an EMA, or unused): "
            f"{grouped(idle, _NAMED)}."
        )
    if scales is not None and scales.layers:
        found.append("No single loss scale works for all modules in FP16: each module has its own.")
    for name, collection in judge.collections.items():
        words = name.replace("_", " ")
        if collection is None:
            found.append(f"No {words} were recorded: what depends on them counts as unsafe.")
        else:
            found += _of_collection(words, collection)
    return found


def _summary(judge: Judge, chosen: Sequence[FormatChoice]) -> str:
    pairs: dict[str, int] = {}
    for choice in chosen:
        name = "/".join(dict.fromkeys((choice.forward, choice.backward))).upper()
        pairs[name] = pairs.get(name, 0) + 1
    listed = ", ".join(f"{count} in {name}" for name, count in sorted(pairs.items(), key=lambda pair: -pair[1]))
    return f"{len(chosen)} module{'s' * (len(chosen) > 1)}: {listed}{_cost(judge, chosen)}."


def _cost(judge: Judge, chosen: Sequence[FormatChoice]) -> str:
    values = [judge.values(choice.module) for choice in chosen]
    total = sum(forward + backward for forward, backward in values)
    if not total:
        return ""
    bits = [get(c.forward).bits * f + get(c.backward).bits * b for c, (f, b) in zip(chosen, values, strict=True)]
    if sum(bits) == BF16.bits * total:
        return f"; {BF16.bits} bits a value"
    return f"; {sum(bits) / total:.3g} bits a value on average, against {BF16.bits} in BF16"


def _of_collection(words: str, collection: Collection) -> list[str]:
    found: list[str] = []
    if collection.hidden.any():
        held: list[int] = np.unique(collection.cells.format[collection.hidden > 0]).tolist()
        names = ", ".join(collection.cells.formats[i].upper() for i in held)
        found.append(f"Zeros of {words} recorded in {names} may be values that it lost: they count as lost.")
    steps = collection.nonfinite_steps(collection.cells.names)
    if steps:
        found.append(f"NaN or Inf among {words} at {steps:,} step{'s' * (steps > 1)}: these values are not judged.")
    return found


# -- `plan` ------------------------------------------------------------------------------------------------------------

_PAIRS = {target: [(forward.name, b.name) for forward, b in pairs] for target, pairs in catalogue.TARGETS.items()}
TARGETS = (*_PAIRS, "cheapest")
FALLBACKS = tuple(fmt.name for fmt in catalogue.WIDE)


def plan(
    run: "Run | View | str | os.PathLike[str]",
    target: str = "fp16",
    *,
    budget: float | None = None,
    costs: "str | os.PathLike[str] | Mapping[str, Any]" = "bytes",
    tolerance: float = 0.01,
    margin_binades: int | None = None,
    fallback: str = "bf16",
    layer_scales: bool = True,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    until: int | None = None,
) -> Plan:
    """Choose a format and scales for each module, by the spectra of a whole run.

    Where the run has losses and all tensors of its modules, the plan predicts the increase of the loss
    (`Plan.predicted_loss`). With a `budget`, it has the formats of least cost whose predicted increase stays within
    that.

    A module gets the target's formats if at every recorded step nothing that it multiplies overflows, with a binade (or
    `margin_binades`) to spare, and less than `tolerance` is lost for certain. Otherwise it gets `fallback`, with the
    reason in `Plan.notes`. Missing data (a collection that was not recorded, values that an FP16 run has lost already)
    counts as unsafe and is a remark in `Plan.remarks`. Modules that multiply no matrices are not in the plan. Nor are
    those that never computed, such as an average of the weights (EMA). A remark names these.

    Args:
        run: The run, its folder, or a view of it.
        target: "fp16": operands and results in FP16, with one loss scale if one works for all modules, else a scale for
            each (`LayerScaler`). "bf16". "fp8": E4M3 for weights and activations, E5M2 for gradients, with a power of
            two for each of the three in each module. "mxfp8", "mxfp6", "mxfp4", "nvfp4", "nvfp4_single": blocks, by the
            run's block records (`plimsoll.watch` with `block`), or without by an upper bound of their loss. "cheapest":
            for each module the one of these (except FP16 and nvfp4_single) with the fewest bits.
        budget: Largest increase of the loss to accept, as a share of the loss: 0.01 is one per cent. It holds for the
            upper end of the prediction's interval. Default: None, as narrow as the range allows.
        costs: What formats cost: "bytes" (moved), a device's name ("a100", "h100", "h200", "b200", "mi300x"), or a TOML
            file or mapping with `bandwidth` and `rates`. Default: "bytes".
        tolerance: Share of a tensor's values that may be lost at any step. Default: 0.01.
        margin_binades: Headroom of scales below overflow, in powers of two. Default: 1, and more for scales of FP8
            casts if steps were not recorded, by their number and by the movement of largest values, as far as the
            tolerance allows.
        fallback: "bf16", "tf32" or "fp32". Default: "bf16".
        layer_scales: Whether layers may have their own FP16 scales. If not, modules for which the best loss scale does
            not work fall back. Default: True.
        include: Names or globs of modules to judge even if they do not seem to multiply, multiply inside something that
            was not recorded, or never computed.
        exclude: Names or globs of modules to leave as they are.
        until: The last step to use. Default: all.

    Returns:
        The plan.

    Raises:
        NotRecordedError: The run has no modules to plan, or lacks what a budget needs.
        ArgumentError: The target does not exist, or no formats stay within the budget.
    """
    _check(target, tolerance, margin_binades, fallback)
    if budget is not None:
        checks.number("plan", "budget", budget, above=0, remedy="0.01 is one per cent of the loss.")
    table = cost_table(costs)
    view = view_of(run, until, "plan")
    included = named(view, "include", include)
    found = modules_of(view, included, named(view, "exclude", exclude))
    modules = [module for module in found if module.name in included or computes(view, module)]
    idle = [module.name for module in found if module not in modules]
    if not modules:
        raise NotRecordedError(
            "plan: expected a run with modules that multiply matrices; got one that names none. Watch weights, "
            "activations and activation_gradients, or name modules with include."
        )
    judge = Judge(view, tolerance=float(tolerance), margin=margin_binades)
    forecast = Forecast(view, judge, modules)
    if budget is None:
        chosen = [_choice(judge, module, target.lower(), fallback.lower()) for module in modules]
    else:
        chosen = _within(budget, judge, forecast, table, modules, target.lower(), fallback.lower())
    scales = loss_scales(
        {c.module.name: c.verdict.gradients for c in chosen if c.forward == "fp16"},
        margin=judge.margin,
        layer_scales=layer_scales,
    )
    chosen = [_with_scales(judge, choice, scales, fallback.lower()) for choice in chosen]
    made = _made(view, judge, chosen, scales, target.lower(), idle)
    return _with_consequences(made, judge, forecast, chosen, scales, table, budget)


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


def pairs_of(target: str) -> list[tuple[str, str]]:
    """Return the pairs of formats that a target tries in turn."""
    return [pair for name in (catalogue.CHEAPEST if target == "cheapest" else (target,)) for pair in _PAIRS[name]]


def _choice(judge: Judge, module: Module, target: str, fallback: str) -> FormatChoice:
    verdict = Verdict()
    for forward, backward in pairs_of(target):
        verdict = judge.verdict(module, forward, backward)
        if verdict.why is None:
            return FormatChoice(
                module=module, forward=forward, backward=backward, verdict=verdict, scales=verdict.shifts
            )
    return _fallback(judge, module, verdict, fallback)


def _within(
    budget: float,
    judge: Judge,
    forecast: Forecast,
    table: CostTable,
    modules: Sequence[Module],
    target: str,
    fallback: str,
) -> list[FormatChoice]:
    if not forecast.possible:
        raise NotRecordedError(
            "plan: expected a run with its loss, weights, gradients, activations and activation_gradients for a "
            f"budget; got {', '.join(sorted(judge.view.run.tensors)) or 'no tensors'}, and "
            f"{'a loss' if forecast.loss > 0 else 'no loss'}. Record these, or plan without a budget."
        )
    offers = [options(judge, forecast, table, module, pairs_of(target), fallback) for module in modules]
    picked = cheapest(offers, budget * forecast.loss / SPREAD)
    if picked is None:
        increase = sum(min(option.increase for option in each) for each in offers)
        least = 1.01 * increase * SPREAD / forecast.loss  # a little more, since three digits may round down
        raise ArgumentError(
            f"plan: expected a budget of at least {least:.3g}, the predicted increase in the widest formats; got "
            f"budget={budget!r}. Allow more."
        )
    return [_picked(judge, module, option, target) for module, option in zip(modules, picked, strict=True)]


def _picked(judge: Judge, module: Module, option: Option, target: str) -> FormatChoice:
    """Return the choice of an option, with the reason if it is none of the target's."""
    formats = (option.forward, option.backward)
    verdicts = [judge.verdict(module, *pair) for pair in pairs_of(target)]
    why = None
    if formats not in pairs_of(target):
        fits = any(verdict.why is None for verdict in verdicts)
        why = "narrower formats would add more to the loss than the budget allows" if fits else verdicts[-1].why
    return FormatChoice(
        module=module, forward=option.forward, backward=option.backward, verdict=option.verdict, why_not=why,
        scales=option.verdict.shifts,
    )  # fmt: skip


def _fallback(judge: Judge, module: Module, verdict: Verdict, fallback: str) -> FormatChoice:
    why = verdict.why
    held = judge.verdict(module, fallback, fallback)
    if held.why is not None and not held.unknown and fallback != "fp32":
        why = why if why == held.why else f"{why}; {held.why}"
        fallback, held = "fp32", Verdict()
    return FormatChoice(module=module, forward=fallback, backward=fallback, verdict=held, why_not=why)


def _with_scales(judge: Judge, choice: FormatChoice, scales: Scales, fallback: str) -> FormatChoice:
    name = choice.module.name
    if choice.forward != "fp16":
        return choice
    if name in scales.unserved:
        window = choice.verdict.gradients
        why = (
            f"activation gradients: FP16 needs a loss scale of 2^{window.low} to 2^{window.high - judge.margin} here, "
            "and no single one works for all modules"
        )
        return _fallback(judge, choice.module, replace(choice.verdict, why=why), fallback)
    return replace(choice, scales={"gradients": scales.layers[name]} if name in scales.layers else {})


def _made(
    view: View, judge: Judge, chosen: Sequence[FormatChoice], scales: Scales, target: str, idle: Sequence[str]
) -> Plan:
    narrow = any(choice.forward == "fp16" for choice in chosen)
    predicted = {choice.module.name: _predicted(judge, choice, scales) for choice in chosen}
    own = {choice.module.name: {role: 2.0**k for role, k in choice.scales.items()} for choice in chosen}
    return Plan(
        target=target,
        formats={choice.module.name: choice.forward for choice in chosen},
        backward={choice.module.name: choice.backward for choice in chosen if choice.backward != choice.forward},
        scale=2.0**scales.loss if narrow else None,
        scales={name: table for name, table in own.items() if table},
        predicted={name: losses for name, losses in predicted.items() if losses},
        tolerance=judge.tolerance,
        source=str(view.run.path).encode("utf-8", "replace").decode("utf-8"),
        notes={choice.module.name: note(judge, choice, predicted[choice.module.name]) for choice in chosen},
        remarks=tuple(remarks(judge, chosen, scales if narrow else None, idle)),
    )


def _with_consequences(
    made: Plan,
    judge: Judge,
    forecast: Forecast,
    chosen: Sequence[FormatChoice],
    scales: Scales,
    table: CostTable,
    budget: float | None,
) -> Plan:
    """Return the plan with its cost, and its predicted loss increase if possible."""
    pairs = {choice.module.name: (choice.forward, choice.backward) for choice in chosen}
    cost = share_of_bf16(judge, table, pairs, [choice.module for choice in chosen])
    if not forecast.possible:
        return replace(made, cost=cost, costs=table.name)
    known: dict[str, Consequence] = {}
    for choice in chosen:
        found = forecast.of(choice.module.name, choice.forward, choice.backward, _shifts(choice, scales))
        known |= {} if found is None else {choice.module.name: found}
    predicted = forecast.total(known.values())
    if budget is not None and predicted.high > budget * (1 + 1e-9):
        raise ArgumentError(
            f"plan: expected a budget that holds with one loss scale; got budget={budget!r}, and {predicted.high:.2g} "
            "in BF16 where it does not work. Allow layer_scales, or more."
        )
    unknown = [choice.module.name for choice in chosen if choice.module.name not in known]
    # What stays in the wide format costs next to nothing. Where all that is known stays in it, nothing is predicted.
    if unknown and all(choice.why_not for choice in chosen if choice.module.name in known):
        known = {}
    more = (
        f"Not in the predicted loss, as their tensors or blocks were not recorded: {grouped(unknown)}."
        if known
        else "The loss is not predicted, as no module's tensors or blocks of the chosen formats were recorded.",
    )
    return replace(
        made,
        cost=cost,
        costs=table.name,
        budget=budget,
        predicted_loss=predicted if known else None,
        increases={name: (c.forward / forecast.loss, c.updates / forecast.loss) for name, c in known.items()},
        remarks=made.remarks + (more if unknown else ()),
    )


def _shifts(choice: FormatChoice, scales: Scales) -> dict[Role, int]:
    narrow = choice.forward == "fp16"
    return {r: choice.scales.get(r, scales.loss if narrow and r == "gradients" else 0) for r in ROLES}


def _predicted(judge: Judge, choice: FormatChoice, scales: Scales) -> dict[str, tuple[float, float, float]]:
    found: dict[str, tuple[float, float, float]] = {}
    for role, shift in _shifts(choice, scales).items():
        bad = judge.loss_counts(choice.module, role, (choice.forward, choice.backward), shift)
        if bad is not None:
            lost = bad.fraction
            found[role] = outward(lost.low, lost.estimate, lost.high)
    return found


def check_target(target: Any) -> None:
    """Raise `ArgumentError` unless it is a target, in upper or lower case."""
    if not isinstance(target, str) or target.lower() not in TARGETS:
        raise ArgumentError(f"plan: expected a target among {', '.join(TARGETS)}; got {target!r}. {_meant(target)}")


def _check(target: Any, tolerance: Any, margin: Any, fallback: Any) -> None:
    check_target(target)
    check_tolerance("plan", tolerance)
    if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int) or margin < 0):
        raise ArgumentError(
            f"plan: expected margin_binades to be an integer of 0 or more; got {margin!r}. It is how many binades stay "
            "free between the largest value and overflow."
        )
    if not isinstance(fallback, str) or fallback.lower() not in FALLBACKS:
        raise ArgumentError(
            f"plan: expected a fallback among {', '.join(FALLBACKS)}, whose range is FP32's; got {fallback!r}. "
            "Choose one."
        )


def _meant(target: Any) -> str:
    """Return the targets that use a format, if the user named a format."""
    name = str(target).lower()
    uses = [key for key, pairs in _PAIRS.items() if any(name in pair for pair in pairs)]
    return f"{name} is a format: the target that uses it is {' or '.join(uses)}." if uses else "Choose one."


def check_tolerance(operation: str, tolerance: Any) -> None:
    """Raise `ArgumentError` unless a tolerance is a fraction above 0."""
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 < tolerance <= 1:
        raise ArgumentError(
            f"{operation}: expected a tolerance above 0 and at most 1; got {tolerance!r}. It is the fraction of a "
            "module's values that may be lost."
        )
