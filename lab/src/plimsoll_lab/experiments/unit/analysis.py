"""What became of the trainings of the character model, read from their runs and from nothing else.

Losses are compared as ratios, seed by seed: trainings of one seed begin alike and see the same batches, so that most of
what differs from seed to seed cancels. A bound of such a ratio is Student's, one-sided at 95 %, of its logarithm.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plimsoll.diagnosis import Finding, View, diagnose
from plimsoll.runs import Run
from plimsoll_lab.experiments.unit.drift import drift, headroom
from plimsoll_lab.experiments.unit.training import Job, Kind
from plimsoll_lab.result import Training
from plimsoll_lab.statistics import Floats, Ratio, columns, lost, ratio

REFERENCE = "fp32"  # the kind that all are held against
_FAILS = 1.05  # times FP32's bits, from which on a training has not come to what it should


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
        outcome="trains" if good else "fails", series=columns(steps, loss), series_of="loss",
    )  # fmt: skip


def _counted(findings: Sequence[Finding]) -> dict[str, float]:
    alarms = [finding for finding in findings if finding.severity == "alarm"]
    of_underflow = [finding for finding in alarms if finding.rule.startswith("underflow")]
    return {"alarms": float(len(alarms)), "underflow_alarms": float(len(of_underflow))}


def _bits(job: Job) -> float:
    """Of held-out text, by the trained model; Inf where that gives no number."""
    value = float(Run(job.run).scalars("bits")[1][-1])
    return value if math.isfinite(value) else math.inf
