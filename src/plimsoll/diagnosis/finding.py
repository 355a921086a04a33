"""`Finding`: the result of a rule."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from plimsoll.notebook_repr import NotebookRepr
from plimsoll.text import grouped as grouped, shown as shown

Severity = Literal["info", "warning", "alarm"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "alarm")

# What may be done about a finding; the names under which a guard allows it.
Action = Literal["lower_scale", "raise_scale", "layer_scale", "to_bf16", "clamp", "skip", "rollback", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """One location of a finding.

    Attributes:
        name: The tensor or layer.
        since_step: The first step at which the finding held there.
        value: The number by which the rule judged it. NaN: it judged by no number.
    """

    name: str
    since_step: int
    value: float = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(NotebookRepr):
    """Result of a rule: a problem of a run, with its place, numbers and advice.

    Attributes:
        rule: The rule's id.
        severity: "info", "warning" or "alarm".
        since_step: The first step at which it held.
        until_step: The last one.
        collection: The collection of the locations. None: none.
        where: The locations, the worst first. Empty if the whole run is meant.
        spots: The locations with the first step and the number of each.
        evidence: The numbers behind it, by name.
        meaning: One sentence on what it means.
        advice: What to do.
        actions: What of that a guard may do by itself.
        figure: Name of the figure that shows it.
    """

    rule: str
    severity: Severity
    since_step: int
    where: tuple[str, ...] = ()
    evidence: Mapping[str, float | int | str] = field(default_factory=dict[str, "float | int | str"])
    advice: str
    actions: tuple[Action, ...] = ()
    meaning: str
    until_step: int
    collection: str | None = None
    spots: tuple[Spot, ...] = ()
    figure: str

    def to_dict(self) -> dict[str, object]:
        """Return JSON-able data; NaN and infinities are names ("nan", "inf")."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "since_step": self.since_step,
            "until_step": self.until_step,
            "collection": self.collection,
            "where": list(self.where),
            "spots": [{"name": s.name, "since_step": s.since_step, "value": plain(s.value)} for s in self.spots],
            "evidence": {name: plain(value) for name, value in self.evidence.items()},
            "meaning": self.meaning,
            "advice": self.advice,
            "actions": list(self.actions),
            "figure": self.figure,
        }

    def __str__(self) -> str:
        """Return one line: severity, rule, first step, locations and meaning."""
        place = f" in {grouped(self.where)}" if self.where else ""
        return f"{self.severity}: {self.rule} since step {self.since_step:,}{place}: {self.meaning}"


def plain(value: float | int | str) -> float | int | str:
    """Return a value as JSON can hold it."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
