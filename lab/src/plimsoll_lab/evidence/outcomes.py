"""Outcomes of experiments, in a folder of results or in the packaged record."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from plimsoll.errors import RunError
from plimsoll.runs.storage.atomic_files import replacing
from plimsoll_lab.claim import Claim
from plimsoll_lab.result import Result
from plimsoll_lab.results_folder import RESULT

RECORD = "recorded.json"  # in the package: how the experiments ended when they were last recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of an experiment.

    - `claims`: how many it has; `failed`: those that do not hold, as one line each.
    - `error`: why it was not carried out, empty where it was. `seconds`: how long it took.
    - `rows`: by row of the evidence base how many claims are of it, and of these the lines of those that do not hold.
      Empty in records of before claims had rows: then all are of every row of the experiment.
    - `date`, `device`, `versions`: when, on what and with what.
    """

    experiment: str
    claims: int = 0
    failed: tuple[str, ...] = ()
    error: str = ""
    seconds: float = 0.0
    date: str = ""
    device: str = "cpu"
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    rows: Mapping[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict[str, "tuple[int, tuple[str, ...]]"])

    def of_row(self, row: str) -> "Outcome":
        """Return the part of the outcome that belongs to the row."""
        if not self.rows:
            return self
        claims, failed = self.rows.get(row, (0, ()))
        return replace(self, claims=claims, failed=failed, rows={row: (claims, failed)})

    @property
    def holds(self) -> bool:
        """True if it has run, and all of its claims hold."""
        return not self.error and self.claims > 0 and not self.failed

    @property
    def state(self) -> str:
        """The state in words: all claims hold, how many do not, or not carried out."""
        if self.error:
            return "not carried out"
        if self.failed:
            return f"{len(self.failed)} of {self.claims} claims do not hold"
        return f"{self.claims} claims hold" if self.claims != 1 else "1 claim holds"

    @classmethod
    def of(cls, result: Result) -> "Outcome":
        """Return the outcome of the result."""
        claims = result.measured.claims
        return cls(
            experiment=result.experiment, claims=len(claims), failed=tuple(str(c) for c in claims if not c.holds),
            seconds=round(result.seconds, 1), date=result.date, device=result.device, versions=dict(result.versions),
            rows=_by_row(result.source, claims),
        )  # fmt: skip

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> "Outcome":
        """Return the outcome that `asdict` gave, from JSON."""
        given = dict(told)
        rows = {row: (claims, tuple(failed)) for row, (claims, failed) in given.pop("rows", {}).items()}
        return cls(failed=tuple(given.pop("failed")), rows=rows, **given)


def recorded() -> dict[str, Outcome]:
    """Return the packaged outcomes of the maintainers' machine, by experiment."""
    text = (resources.files("plimsoll_lab") / RECORD).read_text(encoding="utf-8")
    return _by_name(Outcome.from_dict(told) for told in json.loads(text))


def found_in(folder: Path) -> dict[str, Outcome]:
    """Return the outcomes of the results in a folder, as `perform_all` leaves them.

    Raises `RunError` where there is no such folder, or a result in it cannot be read.
    """
    if not folder.is_dir():
        raise RunError(
            f"lab: expected a folder of results; got {folder}, which does not exist. Make it: plimsoll lab --all."
        )
    return _by_name(_read(path) for path in sorted(folder.glob(f"*/{RESULT}")))


def save(outcomes: Iterable[Outcome], path: Path) -> None:
    """Writes them as one file of JSON, whole or not at all."""
    with replacing(path) as file:
        file.write((json.dumps([asdict(each) for each in outcomes], indent=1, allow_nan=False) + "\n").encode())


def _read(path: Path) -> Outcome:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        claims = [_claim(each) for each in told["claims"]]
        return Outcome(
            experiment=told["experiment"], claims=len(claims), failed=tuple(str(c) for c in claims if not c.holds),
            seconds=round(told["seconds"], 1), date=told["date"], device=told["device"], versions=told["versions"],
            rows=_by_row(told["source"], claims),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"lab: expected the result of an experiment; got {path} ({type(error).__name__}: {error}). "
            "Carry it out again, or remove the file."
        ) from error


def _claim(told: Mapping[str, Any]) -> Claim:
    names = ("id", "says", "at_least", "at_most", "unit")
    rows = tuple(told.get("rows", ()))  # of a result of before claims had any: all of the experiment's
    return Claim(measured=float(told["measured"]), rows=rows, **{name: told[name] for name in names})


def _by_row(source: str, claims: Sequence[Claim]) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Return each row's number of claims, and those that do not hold."""
    own = {row: [claim for claim in claims if not claim.rows or row in claim.rows] for row in rows_of(source)}
    return {row: (len(these), tuple(str(c) for c in these if not c.holds)) for row, these in own.items()}


def rows_of(source: str) -> tuple[str, ...]:
    """The rows that an experiment names as its source: "T3, T4" are two."""
    return tuple(part.strip() for part in source.split(","))


def _by_name(outcomes: Iterable[Outcome]) -> dict[str, Outcome]:
    return {outcome.experiment: outcome for outcome in outcomes}
