"""What became of the trainings of the character model, read from their runs and from nothing else.

Losses are compared as ratios, seed by seed: trainings of one seed begin alike and see the same batches, so that most of
what differs from seed to seed cancels. A bound of such a ratio is Student's, one-sided at 95 %, of its logarithm.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats  # pyright: ignore[reportMissingTypeStubs]

from plimsoll.diagnosis import Finding, View, diagnose
from plimsoll.lab._result import Training
from plimsoll.lab._unit_quality_drift import drift, headroom
from plimsoll.lab._unit_quality_train import Job, Kind
from plimsoll.runs import Run

_CONFIDENCE = 0.95
_COLUMNS = 22  # of the picture in one line
REFERENCE = "fp32"  # the kind that all are held against
_FAILS = 1.05  # times FP32's bits, from which on a training has not come to what it should
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Bits per character of held-out text, by kind: of each learning rate (ascending) and seed; Inf for no number."""

    rates: Mapping[str, tuple[float, ...]]
    bits: Mapping[str, Floats]

    def best(self, kind: str) -> int:
        """The place of the learning rate that is best in the mean over seeds; of none at all, the lowest."""
        return int(np.argmin(self.bits[kind].mean(axis=1)))

    def _at(self, kind: str, rate: float) -> Floats:
        return self.bits[kind][self.rates[kind].index(rate)]

    def mean(self, kind: str, rate: int) -> float:
        """The mean over seeds."""
        return float(self.bits[kind][rate].mean())

    def at_same(self, kind: str, other: str) -> "Ratio":
        """The ratio to another kind of the same model: both at the other's best learning rate that both have."""
        shared = [(float(self.bits[other][place].mean()), rate) for place, rate in enumerate(self.rates[other])]
        _, rate = min(each for each in shared if each[1] in self.rates[kind])
        return ratio(self._at(kind, rate), self._at(other, rate))

    def at_best(self, kind: str, other: str) -> "Ratio":
        """The ratio to another kind, each at its own best learning rate."""
        return ratio(self.bits[kind][self.best(kind)], self.bits[other][self.best(other)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A mean ratio over seeds, and bounds that it is above and below with 95 % each; with one seed they are NaN."""

    mean: float
    low: float
    high: float


def ratio(these: Floats, those: Floats) -> Ratio:
    """The ratio of two rows of results, seed by seed; Inf where one of the first ended in no number.

    >>> found = ratio(np.array([2.0, 2.0, 2.0]), np.array([1.0, 1.0, 1.0]))
    >>> found.low == found.mean == found.high == 2.0
    True
    """
    if not np.isfinite(these).all():
        return Ratio(mean=math.inf, low=math.inf, high=math.inf)
    logs = np.log(these / those)
    mean = float(logs.mean())
    if len(logs) < 2:
        return Ratio(mean=math.exp(mean), low=math.nan, high=math.nan)
    error = float(logs.std(ddof=1)) / math.sqrt(len(logs))
    wide = float(stats.t.ppf(_CONFIDENCE, len(logs) - 1)) * error
    return Ratio(mean=math.exp(mean), low=math.exp(mean - wide), high=math.exp(mean + wide))


def scores(jobs: Sequence[Job]) -> Scores:
    """The results of all trainings."""
    rates: dict[str, tuple[float, ...]] = {}
    bits: dict[str, Floats] = {}
    for kind in dict.fromkeys(job.kind.name for job in jobs):
        found = {(job.rate, job.seed): _bits(job) for job in jobs if job.kind.name == kind}
        rates[kind] = tuple(sorted({rate for rate, _ in found}))
        seeds = sorted({seed for _, seed in found})
        bits[kind] = np.array([[found[rate, seed] for seed in seeds] for rate in rates[kind]])
    return Scores(rates=rates, bits=bits)


def judged(kind: Kind, job: Job, found: Scores) -> Training:
    """What became of one kind, with the run that was watched: numbers, findings, and the verdict."""
    run = Run(job.run)
    view = View(run)
    findings = tuple(diagnose(view))
    against = found.at_best(kind.name, REFERENCE)
    best = found.best(kind.name)
    numbers = {"loss_end": found.mean(kind.name, best), "best_rate": found.rates[kind.name][best]}
    numbers |= {f"bits_at_{rate:g}": found.mean(kind.name, place) for place, rate in enumerate(found.rates[kind.name])}
    numbers |= {"of_fp32": against.mean, "of_fp32_low": against.low, "of_fp32_high": against.high}
    numbers |= lost(view) | drift(run) | _counted(findings)
    if kind.family == "unit":
        numbers |= headroom(run)
    good = against.mean < _FAILS
    steps, loss = run.scalars("train_bits")
    return Training(
        name=job.run.name, title=kind.title, run=job.run, numbers=numbers, good=good, findings=findings,
        verdict="trains" if good else "fails", series=columns(steps, loss), series_of="loss",
    )  # fmt: skip


def lost(view: View) -> dict[str, float]:
    """Of the gradients of activations that FP16 held, the part that it lost: in all samples, and in the last."""
    narrow = view.narrow("activation_gradients")
    if narrow is None or not narrow.censors.any():
        return {}
    cells, held = narrow.cells, narrow.censors
    gone = np.bincount(cells.at[held], np.nan_to_num(narrow.lost[held]), len(cells.steps))
    there = np.bincount(cells.at[held], cells.nonzero[held], len(cells.steps))
    shares = gone / np.maximum(gone + there, 1.0)
    return {"lost_after": float(shares.mean()), "lost_first": float(shares[0]), "lost_last": float(shares[-1])}


def _counted(findings: Sequence[Finding]) -> dict[str, float]:
    alarms = [finding for finding in findings if finding.severity == "alarm"]
    of_underflow = [finding for finding in alarms if finding.rule.startswith("underflow")]
    return {"alarms": float(len(alarms)), "underflow_alarms": float(len(of_underflow))}


def _bits(job: Job) -> float:
    """Of held-out text, by the trained model; Inf where that gives no number."""
    value = float(Run(job.run).scalars("bits")[1][-1])
    return value if math.isfinite(value) else math.inf


def columns(steps: NDArray[np.int64], loss: Floats) -> tuple[float, ...]:
    """The loss as so many means of as many steps each."""
    place = (steps - steps[0]) * _COLUMNS // (steps[-1] + 1 - steps[0])
    return tuple(float(loss[place == column].mean()) for column in range(_COLUMNS) if (place == column).any())
