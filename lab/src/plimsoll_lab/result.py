"""Result of an experiment: its trainings, its claims, and both as JSON.

A claim is a sentence, its measured number, and that one's bounds.
"""

import ast
import math
import operator
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from plimsoll.diagnosis import Finding
from plimsoll.errors import ArgumentError
from plimsoll.results import as_data

# -- claims ------------------------------------------------------------------------------------------------------------

_BOUNDS = re.compile(r"(?:at least (\S+))?(?: and )?(?:at most (\S+))?(?: (.*))?")


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement of an experiment, with the number that was measured for it.

    It holds where `measured` is at least `at_least` and at most `at_most`. One of them may be None. A number that could
    not be measured is NaN, and keeps no bound. `rows` are the rows of the evidence base that it belongs to. None given
    means all rows of its experiment.

    >>> Claim("scale-falls", "the scale falls", 10.0, at_least=10.0, unit="binades").holds
    True
    >>> Claim("scale-falls", "the scale falls", float("nan"), at_most=1.0).holds
    False
    """

    id: str
    says: str
    measured: float
    _: KW_ONLY
    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""
    rows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.at_least is None and self.at_most is None:
            raise ArgumentError(
                f"Claim: expected a bound that can fail; got none for {self.id!r}. Give at_least, at_most or both."
            )

    @property
    def holds(self) -> bool:
        """True if the number keeps its bounds."""
        low = -math.inf if self.at_least is None else self.at_least
        high = math.inf if self.at_most is None else self.at_most
        # A comparison of NumPy numbers gives a NumPy bool, which JSON cannot write.
        return bool(low <= self.measured <= high)

    def __str__(self) -> str:
        """Return the sentence, the number and the bounds in one line."""
        bounds = [
            f"{word} {_number(bound)}"
            for word, bound in (("at least", self.at_least), ("at most", self.at_most))
            if bound is not None
        ]
        measured = " ".join(filter(None, (_number(self.measured), self.unit)))
        return f"{self.says}: {measured}, expected {' and '.join(bounds)}"

    def to_dict(self) -> dict[str, object]:
        """Return the claim as JSON-able data. NaN and Inf become "nan" and "inf"."""
        measured = float(self.measured) if math.isfinite(self.measured) else str(float(self.measured))
        return {
            "id": self.id,
            "says": self.says,
            "measured": measured,
            "at_least": self.at_least,
            "at_most": self.at_most,
            "unit": self.unit,
            "holds": self.holds,
            "rows": list(self.rows),
        }


def claims(table: str, **numbers: Any) -> tuple[Claim, ...]:
    """Return the claims of a table, with their numbers.

    A line of the table has the id, the measured number, the bounds with the unit, and the sentence, separated by "|". A
    line that begins with "|" continues the one before. A line in brackets names rows of the evidence base for the
    claims that follow. The measured number is an expression over `numbers`: ``fp16.loss / fp32.loss``.

    Args:
        table: The claims as text.
        numbers: Numbers, or mappings of numbers by name, which expressions use.

    Raises:
        ArgumentError: A line has another form, or an expression does more than arithmetic.
        KeyError: An expression names a number that there is not.

    >>> found = claims(
    ...     '''
    ...     [T3, T4]
    ...     scale-falls | fp16.before - fp16.after | at least 10 and at most 20 binades | the scale falls
    ...     ''',
    ...     fp16={"before": 16.0, "after": 4.0},
    ... )
    >>> print(found[0], found[0].rows)
    the scale falls: 12 binades, expected at least 10 and at most 20 ('T3', 'T4')
    """
    rows: tuple[str, ...] = ()
    result: list[Claim] = []
    for line in re.sub(r"\n\s*\|", " |", textwrap.dedent(table).strip()).splitlines():
        if line.startswith("["):
            rows = tuple(line.strip("[]").split(", "))
            continue
        name, expression, bounds, says = (line.split(" | ") + [""] * 3)[:4]
        match = _BOUNDS.fullmatch(bounds)
        if match is None or not says or line.count(" | ") != 3:
            raise ArgumentError(f"claims: expected id | number | bounds | sentence; got {line!r}. Correct the line.")
        low, high = (None if bound is None else float(bound) for bound in match.groups()[:2])
        measured = _evaluated(ast.parse(expression, mode="eval").body, numbers)
        result.append(Claim(name, says, measured, at_least=low, at_most=high, unit=match[3] or "", rows=rows))
    return tuple(result)


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _evaluated(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int() | float()):
            return node.value
        case ast.Name():
            return names[node.id]
        case ast.Attribute():
            return _evaluated(node.value, names)[node.attr]
        case ast.Subscript(slice=ast.Constant(value=key)):
            return _evaluated(node.value, names)[key]
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](_evaluated(node.left, names), _evaluated(node.right, names))
        case ast.Call(func=ast.Name(id="max" | "min" | "abs" as function)):
            return {"max": max, "min": min, "abs": abs}[function](
                *(_evaluated(argument, names) for argument in node.args)
            )
        case _:
            raise ArgumentError(f"claims: expected arithmetic; got {ast.unparse(node)}. Pass its value as a number.")


def of_rows(claims: Iterable[Claim], *rows: str) -> tuple[Claim, ...]:
    """Return the claims with these rows of the evidence base."""
    return tuple(replace(claim, rows=rows) for claim in claims)


def _number(value: float) -> str:
    whole = float(value).is_integer() and abs(value) < 1e6  # an int has no `is_integer` before Python 3.12
    return f"{value:.0f}" if whole else f"{value:.4g}"


# -- results -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training of an experiment.

    - `name`: of its run folder; `title`: for people; `run`: the folder.
    - `numbers`: what was measured, by name. `outcome`: what became of it, in a few words; `good`: whether that is well.
    - `series`: what its picture in one line shows, `series_of` in words: the loss since some step, say.
    - `findings`: of `diagnose`; `verdict`: of the run, as on every other surface; empty where none is made.
    """

    name: str
    title: str
    run: Path
    numbers: Mapping[str, float]
    outcome: str
    good: bool
    series: Sequence[float] = ()
    series_of: str = ""
    findings: tuple[Finding, ...] = ()
    verdict: str = ""

    def to_dict(self) -> dict[str, object]:
        """The training as JSON-able data."""
        return {
            "name": self.name,
            "title": self.title,
            "run": str(self.run),
            "numbers": as_data(self.numbers),
            "outcome": self.outcome,
            "good": self.good,
            "series": as_data(self.series),
            "series_of": self.series_of,
            "findings": [finding.to_dict() for finding in self.findings],
            "verdict": self.verdict,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Trainings, claims and sentences that an experiment's own code returns.

    `legend`: what the numbers in the table of trainings are of.
    """

    trainings: tuple[Training, ...]
    claims: tuple[Claim, ...]
    said: tuple[str, ...] = ()
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """An experiment that was carried out: measurements, versions, time, place.

    `date`: of its end, in UTC, as 2026-11-22. `device`: "cpu" or "cuda". `versions`: of what it was made with, and on.
    """

    experiment: str
    claim: str
    source: str
    seed: int
    settings: Mapping[str, object]
    measured: Measured
    folder: Path
    reports: Mapping[str, Path]
    seconds: float
    date: str
    device: str
    versions: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def holds(self) -> bool:
        """True if there are claims and all hold."""
        return bool(self.measured.claims) and all(claim.holds for claim in self.measured.claims)

    def to_dict(self) -> dict[str, object]:
        """The result as JSON-able data."""
        return {
            "experiment": self.experiment,
            "claim": self.claim,
            "source": self.source,
            "holds": self.holds,
            "seed": self.seed,
            "settings": dict(self.settings),
            "claims": [claim.to_dict() for claim in self.measured.claims],
            "said": list(self.measured.said),
            "trainings": [training.to_dict() for training in self.measured.trainings],
            "folder": str(self.folder),
            "reports": {name: str(path) for name, path in self.reports.items()},
            "seconds": self.seconds,
            "date": self.date,
            "device": self.device,
            "versions": dict(self.versions),
        }
