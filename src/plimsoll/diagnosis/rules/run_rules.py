"""`diagnose`: a run, or its folder, through all rules; and the rules themselves, by id."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from plimsoll.diagnosis.finding import SEVERITIES, Finding
from plimsoll.diagnosis.remedies import with_remedy
from plimsoll.diagnosis.rules.base import Rule, Where
from plimsoll.diagnosis.rules.casts import CastFlushes, CastSaturates, CodesUnused, UnitDrift
from plimsoll.diagnosis.rules.dropped_records import RecordsLost
from plimsoll.diagnosis.rules.ending import RunEnded
from plimsoll.diagnosis.rules.layers import DeadLayer, Drift, StructuralZeros
from plimsoll.diagnosis.rules.loss import LossSpike, LossUnbounded, SpikeForerunner
from plimsoll.diagnosis.rules.loss_scale import NoSingleScale, ScaleCollapse, ScaleLow, ScaleOscillation
from plimsoll.diagnosis.rules.nonfinite import Nonfinite
from plimsoll.diagnosis.rules.optimizer import EpsilonDominates, SecondMomentLost, UpdatesSwallowed
from plimsoll.diagnosis.rules.overflow import ActivationGrowth, OverflowAhead, SaturatedFP8
from plimsoll.diagnosis.rules.ranks import RankDiffers
from plimsoll.diagnosis.rules.underflow import UnderflowHigh, UnderflowRising
from plimsoll.diagnosis.rules.wiring import (
    AverageStuck,
    DecayLost,
    GradientsMishandled,
    OptimizerIdle,
    UntrainedParameters,
)
from plimsoll.diagnosis.view import View
from plimsoll.errors import ArgumentError
from plimsoll.runs import Run
from plimsoll.runs.reading.row_selection import matching

RULES: tuple[Rule, ...] = (
    UnderflowHigh(), UnderflowRising(), NoSingleScale(), ScaleLow(), ScaleCollapse(), ScaleOscillation(),
    OverflowAhead(), ActivationGrowth(), SaturatedFP8(), CastSaturates(), CastFlushes(), CodesUnused(), UnitDrift(),
    Nonfinite(), UpdatesSwallowed(), SecondMomentLost(), EpsilonDominates(), LossSpike(), LossUnbounded(),
    SpikeForerunner(), DeadLayer(), StructuralZeros(), Drift(), UntrainedParameters(), OptimizerIdle(),
    GradientsMishandled(), DecayLost(), AverageStuck(), RankDiffers(), RunEnded(), RecordsLost(),
)  # fmt: skip


def diagnose(
    run: "Run | View | str | os.PathLike[str]",
    *,
    rules: Sequence[str | Rule] | None = None,
    thresholds: Mapping[str, float] | None = None,
    until: int | None = None,
) -> list[Finding]:
    """What the rules find in a run: the gravest first, then the earliest.

    The same run gives the same findings whenever it is asked: with `until`, those that there were at that step. A
    finding that another one explains (a layer without gradients, where these are NaN) is left out.

    - `run`: a `Run`, its folder, or a `View` that is asked several times.
    - `rules`: ids, globs over ids, or rules of one's own; None for all (``plimsoll check --rules`` lists them).
    - `thresholds`: other values for some, by "rule.threshold": ``{"underflow-high.values": 0.1}``.

    Raises `ArgumentError` for a rule or threshold that does not exist, and `RunError` for a folder that holds no run.
    """
    chosen = with_thresholds(rules_named(rules), thresholds or {})
    if isinstance(run, View):
        if until is not None:
            raise ArgumentError(
                f"diagnose: expected until=None with a View, which has its own; got {until!r}. Make another View."
            )
        view = run
    else:
        view = View(run if isinstance(run, Run) else Run(run), until)
    found = unexplained([f for rule in _with_causes(chosen) for f in rule.findings(view)], {r.id: r for r in chosen})
    found = [f for f in with_remedy(view, found) if f.rule in {rule.id for rule in chosen}]
    return sorted(found, key=lambda f: (-SEVERITIES.index(f.severity), f.since_step))


def _with_causes(chosen: Sequence[Rule]) -> list[Rule]:
    """The rules, and those that explain what they find."""
    here = {rule.id for rule in chosen}
    wanted = {cause for rule in chosen for cause in rule.explained_by} - here
    return [*chosen, *(rule for rule in RULES if rule.id in wanted)]


def with_thresholds(rules: Sequence[Rule], thresholds: Mapping[str, float]) -> list[Rule]:
    """The rules with other thresholds, by "rule.threshold"."""
    result = {rule.id: rule for rule in rules}
    for key, value in thresholds.items():
        rule_id, _, name = key.rpartition(".")
        known = {rule.id: rule for rule in (*RULES, *rules)}
        if rule_id not in known:
            raise _no_such("a threshold written as rule.threshold", key, sorted(known))
        names = [f.name for f in fields(known[rule_id])]
        if name not in names:
            raise _no_such(f"a threshold of {rule_id}", key, [f"{rule_id}.{n}" for n in names])
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(f"diagnose: expected {key} to be a number of 0 or more; got {value!r}. Give a number.")
        if rule_id in result:
            changes: dict[str, Any] = {name: float(value)}
            result[rule_id] = replace(result[rule_id], **changes)
    return list(result.values())


def rules_named(rules: Sequence[str | Rule] | None) -> list[Rule]:
    """The rules that ids, globs over ids, or rules themselves name; None for all."""
    if rules is None:
        return list(RULES)
    found: dict[str, Rule] = {}
    for each in [rules] if isinstance(rules, str | Rule) else rules:
        if isinstance(each, Rule):
            found[each.id] = each
            continue
        ids = matching([rule.id for rule in RULES], each)
        if not ids:
            raise _no_such("rules by their ids", each, [rule.id for rule in RULES])
        found |= {rule.id: rule for rule in RULES if rule.id in ids}
    return list(found.values())


def _no_such(what: str, got: str, known: Sequence[str]) -> ArgumentError:
    return ArgumentError(f"diagnose: expected {what}; got {got!r}. There are {', '.join(known)}.")


def unexplained(findings: Sequence[Finding], rules: Mapping[str, Rule]) -> list[Finding]:
    """The findings less those, and less those of their layers, that another one explains."""
    result: list[Finding] = []
    for finding in findings:
        rule = rules.get(finding.rule)
        causes: list[tuple[Finding, Where]] = [
            (cause, rule.explained_by[cause.rule])
            for cause in findings
            if rule is not None and cause.rule in rule.explained_by and _while(cause, finding)
        ]
        left = _left(finding, causes)
        if left is not None:
            result.append(left)
    return result


def _while(cause: Finding, effect: Finding) -> bool:
    """Whether a cause began no later and held when the effect began; notes are no causes."""
    return cause.severity != "info" and cause.since_step <= effect.since_step <= cause.until_step


def _left(finding: Finding, causes: Sequence[tuple[Finding, Where]]) -> Finding | None:
    """The finding without the layers that are explained; None where nothing is left of it."""
    if any(where == "anywhere" for _, where in causes):
        return None
    modules = {_module(name) for cause, _ in causes for name in cause.where}
    spots = tuple(spot for spot in finding.spots if _module(spot.name) not in modules)
    if len(spots) == len(finding.spots):
        return finding
    if not spots:
        return None
    evidence = {**finding.evidence, "layers": len(spots)} if "layers" in finding.evidence else finding.evidence
    return replace(
        finding, spots=spots, where=tuple(s.name for s in spots), evidence=evidence,
        since_step=min(s.since_step for s in spots),
    )  # fmt: skip


def _module(name: str) -> str:
    """The module of a parameter's or an activation's series."""
    return name.partition(":")[0] if ":" in name else name.rpartition(".")[0] or name
