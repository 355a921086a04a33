"""Findings that another one explains: what follows from NaN, or from a flush, is no fault of its own.

A rule lists in `Rule.explained_by` the rules whose findings explain its own, and where: "anywhere", since NaN spreads
through the model, or in the "same module".
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from plimsoll.diagnosis.finding import Finding
from plimsoll.diagnosis.rules.base import Rule, Where


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
