"""`Finding`: what a rule says about a run."""

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
    """One layer of a finding: its name, since which step, and the number that the rule judged it by."""

    name: str
    since_step: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(NotebookRepr):
    """What a rule found in a run.

    - `rule`: its id; `severity`: "info", "warning" or "alarm".
    - `since_step`: the first step at which it held; `until_step`: the last.
    - `collection` and `where`: which series, the worst first; no names where the whole run is meant. `spots` says of
      each since when and how much.
    - `evidence`: the numbers behind it. `meaning`: one sentence. `advice`: what to do; `actions`: what of that a guard
      could do by itself. `figure`: the name of the figure that shows it.
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
        """The finding as JSON-able data; a number that JSON has no form for is its name ("nan", "inf")."""
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
        """One line: severity, rule, since when, where, and what it means."""
        place = f" in {grouped(self.where)}" if self.where else ""
        return f"{self.severity}: {self.rule} since step {self.since_step:,}{place}: {self.meaning}"


def plain(value: float | int | str) -> float | int | str:
    """The value, as JSON can hold it."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
