"""A guard's records and limits: `Act`, `Look`, `Limits`, and the ranks' `Order`."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self, cast, get_args

from plimsoll.diagnosis.finding import Action, Finding, grouped
from plimsoll.errors import ArgumentError
from plimsoll.results import NotebookRepr

ACTIONS: tuple[Action, ...] = get_args(Action)
Value = float | int | str | None
Outcome = Literal["done", "dry run", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on a guard's actions; it takes at most one at a look.

    - `steps`: an action is not repeated on the same target (the loss scale, a module, the run) within so many steps;
      raising and lowering the scale count as one, so that it cannot swing.
    - `total`: so many times in all for each action.
    - `tries`: an action that was taken so often for a finding, which is there still, has not helped: the next follows.

    A dry run keeps to them too, so that what it says is what it would do.
    """

    steps: int = 100
    total: int = 10
    tries: int = 2

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) is not int or value < 1:
                raise ArgumentError(f"Limits: expected {name} as a whole number of 1 or more; got {value!r}. Use 10.")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Look:
    """A guard's view of the run up to and with `step`.

    The same as ``diagnose(run, until=step)``.

    `newest`: of each collection that a finding speaks of the last step recorded by then; of "" that of the run.
    `room`: the highest power of two that no recent gradient, times it, overflows with; None where none was left to see.
    """

    step: int
    findings: tuple[Finding, ...]
    newest: Mapping[str, int] = field(default_factory=dict[str, int])
    room: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One thing to be done: plain values, so that rank 0 can tell the others."""

    action: Action
    rule: str
    where: tuple[str, ...]  # modules; none where the run is meant
    since_step: int
    before: Value
    after: Value
    reason: str
    targets: tuple[str, ...]  # what `Limits.steps` counts for
    finding: str = ""  # as a line

    def encoded(self) -> bytes:
        """As bytes of JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, text: bytes) -> Self:
        """Return the order that `encoded` gave."""
        fields: dict[str, Any] = json.loads(text)
        for name in ("where", "targets"):
            fields[name] = tuple(cast("list[str]", fields[name]))
        return cls(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Act(NotebookRepr):
    """An action that a guard took after a step, or would have in a dry run.

    - `step`: the last step before it. `action`, for which `rule`'s finding, since when that held, `where` it acted
      (names of modules; none where the whole run is meant).
    - `before` and `after`: of what it changed: the scale, the precision, the step of the checkpoint.
    - `reason`: why this action, in one sentence. `outcome`: "done", "dry run" or "failed", and then the `problem`.
    """

    step: int
    action: Action
    rule: str
    where: tuple[str, ...] = ()
    since_step: int
    before: Value = None
    after: Value = None
    reason: str
    outcome: Outcome
    problem: str | None = None

    @property
    def dry_run(self) -> bool:
        """True if the action was only reported."""
        return self.outcome == "dry run"

    def to_dict(self) -> dict[str, object]:
        """As JSON-able data: the details of the run's event of kind "guard"."""
        return {**asdict(self), "where": list(self.where), "dry_run": self.dry_run}

    def __str__(self) -> str:
        """One line: what it did, for what, and why."""
        verb = {"done": "", "dry run": "would do ", "failed": "could not do "}[self.outcome]
        place = f" in {grouped(self.where)}" if self.where else ""
        change = "" if self.after is None else f" ({shown_value(self.before)} to {shown_value(self.after)})"
        why = self.problem if self.problem is not None else self.reason
        return f"{verb}{self.action}{place}{change} for {self.rule} since step {self.since_step:,}: {why}"


def shown_value(value: Value) -> str:
    """A number in few characters.

    >>> shown_value(2.0**16), shown_value(0.5), shown_value("amp-fp16"), shown_value(None)
    ('2^16', '0.5', 'amp-fp16', 'nothing')
    """
    if value is None:
        return "nothing"
    if not isinstance(value, float):
        return str(value)
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 and abs(value) >= 1024 else f"{value:g}"
