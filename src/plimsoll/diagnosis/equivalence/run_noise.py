"""Noise between runs of one recipe by chance, measured from repeats or estimated."""

import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from plimsoll.diagnosis.equivalence.confidence_sequence import LEAST_RECORDS, Reading, weights
from plimsoll.diagnosis.equivalence.curves import Aligned
from plimsoll.diagnosis.tables.cells import Floats

NoiseFrom = Literal["repeats", "estimate", "given"]

# Share of the gain, and how sure that is, as degrees of freedom. Of 180 pairs of small trainings on the same data 2.8 %
# pass the interval on one side at any reading, and 4.4 % on the other. With 0.3 it would be 8.3 % on each.
# benchmarks/parity.py judges the choice by trainings with other seeds.
_SHARE, _SURE = 0.5, 3.0
_METHODS = 2  # intervals of repeats, of which the narrower one counts: each has its part of the error
_LOOKS = 3  # parts of the error: runs may be added one at a time until it is decided (benchmarks/parity.py)
# Parts of the records at which the deviation of repeats is looked at, the largest of which counts. As runs go on their
# means cross, and for some steps the deviation of a few is next to nothing by chance.
_BEFORE = (1.0, 0.7, 0.5)
_MOST_MORE, _MOST_LONGER = 100, 1e4  # further runs, and times the length so far, that are thought about


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNoise:
    """Noise of the sides' mean difference that comes from runs, not from steps.

    Attributes:
        error: Standard deviation of the mean difference.
        freedom: Degrees of freedom of that estimate. Infinite where it is given.
        added: Degrees of freedom that a further run a side adds.
        runs: Number of runs on each side.
        source: Where it comes from.
    """

    error: float
    freedom: float
    added: int
    runs: tuple[int, int]
    source: NoiseFrom

    def radius(self, confidence: float) -> float:
        """Return how far the interval reaches for the sake of this noise."""
        stats: Any = importlib.import_module("scipy.stats")
        tail = (1 - confidence) / 2
        if self.source == "repeats":
            tail /= _METHODS * _LOOKS
        return float(stats.t.isf(tail, self.freedom)) * self.error

    def with_more(self, runs: int) -> "RunNoise":
        """Return the noise to expect with further runs a side, which are repeats then."""
        many = (self.runs[0] + runs, self.runs[1] + runs)
        error = self.error * shrinkage(self.runs, many)
        if self.source == "given":
            return replace(self, error=error, runs=many)
        freedom = self.freedom + self.added * runs if self.source == "repeats" else float(min(many) - 1)
        return replace(self, error=error, freedom=freedom, added=1, runs=many, source="repeats")


def shrinkage(runs: tuple[int, int], more: tuple[int, int]) -> float:
    """Return the factor by which more runs change a mean difference's error."""
    return math.sqrt((1 / more[0] + 1 / more[1]) / (1 / runs[0] + 1 / runs[1]))


def run_noise(runs: Aligned, given: float | None) -> RunNoise:
    """Return the noise between runs.

    Args:
        runs: The curves.
        given: Standard deviation of the difference between two runs of one recipe, if it is known.
    """
    many = (len(runs.base), len(runs.candidate))
    if given is not None:
        error = given * shrinkage((1, 1), many)
        return RunNoise(error=error, freedom=math.inf, added=0, runs=many, source="given")
    if max(many) == 1:
        error = _estimate(runs.base[0], runs.candidate[0])
        return RunNoise(error=error, freedom=_SURE, added=0, runs=many, source="estimate")
    records = len(runs.steps)
    places = [max(1, round(part * records)) for part in _BEFORE] if records >= LEAST_RECORDS else [records]
    estimates = [
        [*_measured(*(side[:, :place] @ weights(place) for side in (runs.base, runs.candidate)))] for place in places
    ]
    methods = [replace(each[0], error=max(noise.error for noise in each)) for each in zip(*estimates, strict=True)]
    # 0.95 stands for any confidence: which interval is narrower hardly depends on it.
    return min(methods, key=lambda noise: noise.radius(0.95))


# No statistic of a single pair of runs can tell this noise from an effect of the recipe: it is nearly constant over the
# steps that count. With repeats it is measured. With one run each it is estimated by a rule of thumb, which
# benchmarks/parity.py holds against real trainings: half of what the base gained over the second half of its records,
# times the share of the steps' own noise that the runs do not have in common. Runs on the same data whose losses move
# together batch by batch are close to one another; those on other data are not.
def _estimate(base: Floats, candidate: Floats) -> float:
    """Return the rule of thumb: share of the gain, times the runs' distance in noise.

    The noise is that of single steps.
    """
    records = len(base)
    if records < 4:
        return 0.0
    some = max(1, records // 20)
    middle, end = base[records // 2 - some : records // 2 + some].mean(), base[-2 * some :].mean()
    of_base, of_candidate = np.diff(base[records // 2 :]), np.diff(candidate[records // 2 :])
    both = float(of_base.var() + of_candidate.var())
    apart = min(1.0, math.sqrt(float((of_candidate - of_base).var()) / both)) if both > 0 else 0.0
    return _SHARE * abs(float(middle - end)) * apart


def _measured(base: Floats, candidate: Floats) -> Iterator[RunNoise]:
    """Yield the noise by pairs, if there are as many runs on both sides, and by sides."""
    many = (len(base), len(candidate))
    # Pairs help where runs of one seed resemble one another, and cost freedom where they do not. By sides: Welch's, or
    # with a single run on one side, the other's noise for both.
    if many[0] == many[1]:
        pairs = candidate - base
        error = float(pairs.std(ddof=1)) / math.sqrt(len(pairs))
        yield RunNoise(error=error, freedom=len(pairs) - 1, added=1, runs=many, source="repeats")
    if min(many) == 1:
        repeats = base if many[1] == 1 else candidate
        error = float(repeats.std(ddof=1)) * math.sqrt(1 / many[0] + 1 / many[1])
        yield RunNoise(error=error, freedom=len(repeats) - 1, added=1, runs=many, source="repeats")
        return
    parts = [float(side.var(ddof=1)) / len(side) for side in (base, candidate)]
    total = sum(parts)
    freedom = (
        total**2 / sum(part**2 / (side - 1) for part, side in zip(parts, many, strict=True)) if total else math.inf
    )
    yield RunNoise(error=math.sqrt(total), freedom=freedom, added=2, runs=many, source="repeats")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The difference so far, with both kinds of noise.

    Attributes:
        reading: The difference and the noise of steps.
        noise: The noise of runs.
    """

    reading: Reading
    noise: RunNoise

    @property
    def error(self) -> float:
        """One standard deviation of the difference by chance."""
        by_steps = 0.0 if math.isinf(self.reading.error) else self.reading.error
        return self._joined(by_steps, self.noise.error, self.noise)

    def radius(self, *, longer: float = 1.0, more_runs: int = 0) -> float:
        """Return how far the interval reaches, or is expected to with longer or more runs."""
        noise = self.noise.with_more(more_runs) if more_runs else self.noise
        by_steps = self.reading.radius(longer) * shrinkage(self.noise.runs, noise.runs)
        if math.isinf(by_steps) and noise.source == "repeats":
            by_steps = 0.0  # too few steps to say anything: the runs themselves are the sample, read once
        by_runs = noise.radius(self.reading.confidence)
        return self._joined(by_steps, by_runs, noise)

    def steps_until(self, radius: float) -> float | None:
        """Return how many times as long runs must be for this radius; None: no length."""
        longer = 1.0
        while longer < _MOST_LONGER:
            longer *= 1.05
            if self.radius(longer=longer) < radius:
                return longer
        return None

    def runs_until(self, radius: float) -> int | None:
        """Return how many further runs a side it takes for this radius; None: none do."""
        return next((more for more in range(1, _MOST_MORE + 1) if self.radius(more_runs=more) < radius), None)

    @staticmethod
    def _joined(by_steps: float, by_runs: float, noise: RunNoise) -> float:
        """Return both noises together: repeats have the noise of their steps already."""
        return max(by_steps, by_runs) if noise.source == "repeats" else math.hypot(by_steps, by_runs)
