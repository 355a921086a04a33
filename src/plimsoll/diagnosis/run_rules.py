"""Run the rules on a run: selection, thresholds, and explained findings."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from plimsoll.checks import items, nearest
from plimsoll.diagnosis.finding import SEVERITIES, Finding
from plimsoll.diagnosis.rules.base import Rule, Where
from plimsoll.diagnosis.rules.loss_scale import with_remedy
from plimsoll.diagnosis.rules.registry import OWN, guarded, known_rules, packaged_rules, remember
from plimsoll.diagnosis.view import View, view_of
from plimsoll.errors import ArgumentError
from plimsoll.runs import Run
from plimsoll.runs.reading.row_selection import matching

_LISTED = 10  # names that a message lists in full


def diagnose(
    run: "Run | View | str | os.PathLike[str]",
    *,
    rules: Sequence[str | Rule] | None = None,
    thresholds: Mapping[str, float] | None = None,
    until: int | None = None,
) -> list[Finding]:
    """Judge a run by the rules.

    The same run gives the same findings whenever it is judged. With `until` they are those of a run that ends there.
    A finding that another one explains (a layer without gradients, if these are NaN) is left out.

    Args:
        run: A `Run`, its folder, or a `View` if the run is judged several times.
        rules: Ids, globs over ids, or custom rules. Default: all, those of installed packages too. ``plimsoll check
            --rules`` lists them.
        thresholds: Other values, by "rule.threshold": ``{"underflow-high.values": 0.1}``.
        until: The last step to be read. Default: the end. Not with a `View`, which has its own.

    Returns:
        The findings: the most severe first, then the earliest.

    Raises:
        ArgumentError: A rule or threshold does not exist.
        RunError: The folder holds no run.
    """
    selected = with_thresholds(rules_named(rules), thresholds or {})
    view = view_of(run, until, "diagnose")
    view.reads_all |= rules is None
    by_id = {rule.id: rule for rule in selected}
    findings = [finding for rule in _with_causes(selected) for finding in _findings(rule, view)]
    findings = [f for f in with_remedy(view, unexplained(findings, by_id)) if f.rule in by_id]
    return sorted(findings, key=lambda finding: (-SEVERITIES.index(finding.severity), finding.since_step))


def _findings(rule: Rule, view: View) -> list[Finding]:
    return guarded(rule, lambda: list(rule.findings(view)), [])


def _with_causes(selected: Sequence[Rule]) -> list[Rule]:
    """Return the rules, and those that explain their findings."""
    causes = {cause for rule in selected for cause in rule.explained_by} - {rule.id for rule in selected}
    return [*selected, *(rule for name, rule in _rules_for(causes).items() if name in causes)]


def _rules_for(names: "set[str]") -> Mapping[str, Rule]:
    """Return the rules to look names up in; packages' entry points only for names not Plimsoll's own."""
    return OWN if names <= OWN.keys() else known_rules()


def with_thresholds(rules: Sequence[Rule], thresholds: Mapping[str, float]) -> list[Rule]:
    """Return the rules with other thresholds, by "rule.threshold".

    Raises:
        ArgumentError: A rule or threshold does not exist, or a value is negative.
    """
    result = {rule.id: rule for rule in rules}
    if not isinstance(thresholds, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"diagnose: expected thresholds by their names; got {thresholds!r}. Give a dictionary.")
    for key, value in {str(key): value for key, value in thresholds.items()}.items():
        rule_id, _, name = key.rpartition(".")
        known = {**_rules_for({rule_id} - result.keys()), **{rule.id: rule for rule in rules}}
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


def rules_named(rules: Sequence[str | Rule] | None, expected: str = "rules by their ids") -> list[Rule]:
    """Return the rules of ids, globs over ids, or rules (None: all). `expected`: words of an error for these."""
    if rules is None:
        return list(known_rules().values())
    selected: dict[str, Rule] = {}
    listed = [rules] if isinstance(rules, str | Rule) else items("diagnose", "rules", rules)
    for wanted in listed:
        if isinstance(wanted, Rule):
            remember(wanted)
            selected[wanted.id] = wanted
            continue
        if not isinstance(wanted, str):
            raise ArgumentError(f"diagnose: expected {expected}; got {wanted!r}. Give ids, globs over ids, or rules.")
        known = _rules_for({wanted})
        ids = matching(list(known), wanted)
        if not ids and wanted in packaged_rules().errors:
            raise ArgumentError(packaged_rules().errors[wanted])
        if not ids:
            raise _no_such(expected, wanted, list(known))
        selected |= {name: rule for name, rule in known.items() if name in ids}
    return list(selected.values())


def _no_such(expected: str, value: str, known: Sequence[str]) -> ArgumentError:
    if len(known) <= _LISTED:
        hint = f"There are {', '.join(known)}"
    else:
        near = ", ".join(nearest(value, known))
        hint = f"{f'Nearest: {near}. ' if near else ''}plimsoll check --rules lists all"
    return ArgumentError(f"diagnose: expected {expected}; got {value!r}. {hint}.")


def unexplained(findings: Sequence[Finding], rules: Mapping[str, Rule]) -> list[Finding]:
    """Return the findings without those, and the locations, that others explain."""
    result: list[Finding] = []
    for finding in findings:
        rule = rules.get(finding.rule)
        causes: list[tuple[Finding, Where]] = [
            (cause, rule.explained_by[cause.rule])
            for cause in findings
            if rule is not None and cause.rule in rule.explained_by and _precedes(cause, finding)
        ]
        remainder = _without_explained(finding, causes)
        if remainder is not None:
            result.append(remainder)
    return result


def _precedes(cause: Finding, effect: Finding) -> bool:
    """Return whether a cause was there when the effect began. Notes are no causes."""
    return cause.severity != "info" and cause.since_step <= effect.since_step <= cause.until_step


def _without_explained(finding: Finding, causes: Sequence[tuple[Finding, Where]]) -> Finding | None:
    """Return the finding without the locations that are explained. None if all are."""
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
        finding,
        spots=spots,
        where=tuple(spot.name for spot in spots),
        evidence=evidence,
        since_step=min(spot.since_step for spot in spots),
    )


def _module(name: str) -> str:
    """Return the module of a parameter's or an activation's series."""
    return name.partition(":")[0] if ":" in name else name.rpartition(".")[0] or name
