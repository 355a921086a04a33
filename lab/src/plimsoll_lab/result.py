"""Result of an experiment: its trainings, its claims, and both as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plimsoll.diagnosis import Finding
from plimsoll.diagnosis.finding import plain
from plimsoll_lab.claim import Claim


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
            "numbers": {name: plain(value) for name, value in self.numbers.items()},
            "outcome": self.outcome,
            "good": self.good,
            "series": [plain(value) for value in self.series],
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
