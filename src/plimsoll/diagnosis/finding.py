"""`Finding`: what a rule says about a run; and names of many layers in few words."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from plimsoll.notebook_repr import NotebookRepr
from plimsoll.text import printable

Severity = Literal["info", "warning", "alarm"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "alarm")

# What may be done about a finding; the names under which a guard allows it.
Action = Literal["lower_scale", "raise_scale", "layer_scale", "to_bf16", "clamp", "skip", "rollback", "stop"]

_NUMBER = re.compile(r"\d+")
_LONGEST = 60  # characters of one name that a line shows


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


def grouped(names: Sequence[str], most: int = 3) -> str:
    """Layers in few words: those that differ in one number only are told together.

    >>> grouped([f"blocks.{i}.attn.qkv" for i in range(12)] + ["head"])
    'blocks.{0-11}.attn.qkv, head'
    >>> grouped(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        for pattern, number in _patterns(name):
            found.setdefault(pattern, []).append((name, number))
    told: list[tuple[str, int]] = []
    left = dict.fromkeys(names)
    while left:
        name = next(iter(left))
        alike = [found[pattern] for pattern, _ in _patterns(name)]
        best = max(alike, key=lambda members: sum(n in left for n, _ in members)) if alike else []
        members = [(n, number) for n, number in best if n in left]
        if len(members) > 1:
            pattern = next(p for p, _ in _patterns(name) if found[p] is best)
            told.append((shown(pattern.replace("\0", _ranges(int(number) for _, number in members))), len(members)))
        else:
            members = [(name, "")]
            told.append((shown(name), 1))
        for member, _ in members:
            del left[member]
    rest = sum(count for _, count in told[most:])
    return ", ".join(text for text, _ in told[:most]) + (f" and {rest} more" if rest else "")


def shown(name: str) -> str:
    """A name as a line can show it: control characters as their escapes, its middle left out if it is long."""
    clean = printable(name, lines=False)
    half = _LONGEST // 2 - 2
    return clean if len(clean) <= _LONGEST else f"{clean[:half]}...{clean[-half:]}"


def _patterns(name: str) -> list[tuple[str, str]]:
    """The name with each of its numbers left out in turn, and that number."""
    if len(name) > 10 * _LONGEST:
        return []
    return [
        (f"{name[: m.start()]}\0{name[m.end() :]}", m.group())
        for m in _NUMBER.finditer(name)
        if len(m.group()) < 10 and m.group().isascii()
    ]


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges in braces: {0-3,7}."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "}"
