"""Noise of a mean difference: of the steps of two runs, and between runs by chance."""

import functools
import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from plimsoll.diagnosis.equivalence.curves import Aligned
from plimsoll.diagnosis.tables.cells import Floats

# -- steps: a confidence sequence of the mean difference, valid at every step ------------------------------------------

LEAST_RECORDS = 32  # common records without which steps say nothing
_POWER = 2  # of a record's number, for its weight
_SPAN = 1e5  # longest run that the boundary is made for, in lengths of the first reading
_APART = 6.0  # correlation times that a block lasts
# Correlation times up to which autocorrelations are summed (Sokal 1997, "Monte Carlo methods", section 3).
_WINDOW = 5.0
_TRENDS = ((8, 15), (2, 5))  # degrees of polynomials, and the blocks' worth of freedom that they take
_TIMES = 3  # as many blocks as the trend takes, and more, that are left where noise is fast
_LEAST_BLOCKS, _MANY_BLOCKS = 3, 4096  # with more, the error is as good as known
_NO_NOISE = 1e-9  # of the size of the differences: what rounding leaves of none
# Whatever the noise, a true mean of m is rarely seen as differences far smaller than m: of one normal value x with any
# variance, x +- 0.484 / (1 - confidence) |x| holds the mean (Wall, Boen, Tweedie 2001, "An effective confidence
# interval for the mean with samples of size one and two"). Four times that, for many readings.
_SIZES = 2.0
_MOST_RECORDS = 8192  # neighbours are averaged above: bounds time and memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The weighted mean difference after so many records."""

    estimate: float  # the mean
    error: float  # its standard error, from the steps alone; infinite where there are too few records
    size: float  # root mean square of the differences, weighted
    blocks: int  # number of independent blocks, less what the trend took of them; 0 where there are too few records
    confidence: float  # probability that no reading of the sequence leaves the true mean out

    def radius(self, longer: float = 1.0) -> float:
        """Return the interval's reach on both sides, for a run `longer` times as long."""
        blocks = int(self.blocks * longer)
        if blocks < _LEAST_BLOCKS:
            return math.inf
        by_steps = _multiple(min(blocks, _MANY_BLOCKS), self.confidence) * self.error / math.sqrt(longer)
        return min(by_steps, _SIZES / (1 - self.confidence) * self.size)


# Later records count more: the i-th has the weight i**2, so that the last half of the records has seven eighths of the
# whole. The weights do not depend on the length of the runs. So the mean of all records so far is one sequence, and its
# interval needs no correction for a window that moves.
def weights(records: int) -> Floats:
    """Return the weights of records, which sum to 1."""
    raw = np.arange(1.0, records + 1) ** _POWER
    return raw / raw.sum()


def reading(differences: Floats, confidence: float) -> Reading:
    """Return the reading of all records' differences: finite ones, in step order."""
    share = weights(len(differences))
    mean, size = float(share @ differences), math.sqrt(float(share @ differences**2))
    if len(differences) < LEAST_RECORDS:
        return Reading(estimate=mean, error=math.inf, size=size, blocks=0, confidence=confidence)
    noise, blocks, taken = _noise(averaged(differences))
    if float(np.abs(noise).max()) <= _NO_NOISE * size / len(noise):
        return Reading(estimate=mean, error=0.0, size=size, blocks=len(noise), confidence=confidence)
    # Never less than what longer blocks say: the correlation time misses a slow part that is small beside the noise.
    counts = [max(blocks, taken + _LEAST_BLOCKS)]
    while counts[-1] >= 2 * _TIMES * taken:
        counts.append(counts[-1] // 2)
    error = max(_block_error(noise, count, taken) for count in counts)
    return Reading(estimate=mean, error=error, size=size, blocks=counts[0] - taken, confidence=confidence)


def averaged(values: Floats) -> Floats:
    """Return at most `_MOST_RECORDS` values: means of neighbours, if there are more."""
    if len(values) <= _MOST_RECORDS:
        return values
    starts = np.linspace(0, len(values), _MOST_RECORDS + 1).astype(np.int64)
    return np.add.reduceat(values, starts[:-1]) / np.diff(starts)


def _noise(values: Floats) -> tuple[Floats, int, int]:
    """Return the weighted values less their trend, the number of independent blocks, and how many the trend takes."""
    place, share = np.linspace(-1.0, 1.0, len(values)), weights(len(values))
    candidates: list[tuple[Floats, int, int]] = []
    # The trend of a recipe that is worse is smooth but of any form, and differs from noise only in its slowness. So
    # the first one of `_TRENDS` that leaves noise much faster than itself counts. Where noise itself is slow the last
    # one does, which takes little of it away.
    for degree, taken in _TRENDS:
        noise = values - np.polynomial.Polynomial.fit(place, values, degree, w=np.sqrt(share))(place)
        # Of the first quarter, whose weight is a sixty-fourth, a transient would be taken for slow noise.
        blocks = int(len(noise) / math.ceil(_APART * _correlation_time(noise[len(noise) // 4 :])))
        candidates.append((share * noise, blocks, taken))
        if blocks >= _TIMES * taken:
            break
    return candidates[-1]


def _correlation_time(noise: Floats) -> float:
    """Return the integrated autocorrelation time in records: 1 for independent ones."""
    length = 1 << (2 * len(noise) - 1).bit_length()
    spectrum = np.fft.rfft(noise, length)
    covariance = np.fft.irfft(spectrum * spectrum.conj(), length)[: len(noise)]
    if covariance[0] <= 0:
        return 1.0
    times = 2.0 * np.cumsum(covariance / covariance[0]) - 1.0
    inside = np.arange(len(noise)) < _WINDOW * times
    last = int(np.argmin(inside)) if not inside.all() else len(noise) - 1
    return max(1.0, float(times[last]))


# Standard error: neighbouring differences resemble one another. They are averaged over blocks several times as long as
# their correlation time, and the error is that of independent blocks; a smooth trend of the difference is no noise and
# is taken out first. Boundary: a constant multiple of the standard error, wide enough for all lengths from the first
# reading to `_SPAN` times as many records. docs/concepts/parity.md has the assumptions and how often they fail.
def _block_error(noise: Floats, blocks: int, taken: int) -> float:
    """Return the standard error of the noise's sum, by independent blocks."""
    starts = np.linspace(0, len(noise), blocks + 1).astype(np.int64)[:-1]
    sums = np.add.reduceat(noise, starts)
    return math.sqrt(float(sums @ sums) * blocks / (blocks - taken))


@functools.cache
def _multiple(blocks: int, confidence: float) -> float:
    """Return how many standard errors the interval reaches on both sides."""
    stats: Any = importlib.import_module("scipy.stats")
    # Few blocks leave the error uncertain. So it is Student's multiple with the same tail as the boundary has, for as
    # many degrees of freedom as blocks with these weights leave (Satterthwaite).
    squares = (np.arange(blocks) + 0.5) ** (2 * _POWER)
    freedom = float(squares.sum() ** 2 / (squares @ squares))
    return float(stats.t.isf(stats.norm.sf(_boundary(confidence)), freedom))


@functools.cache
def _boundary(confidence: float) -> float:
    """Return the multiple of a standard error that is known.

    Of a Wiener process, P(|W(t)| > u sqrt(t) for some t in [a, b]) is about (u - 1/u) phi(u) log(b / a) + 4 phi(u) / u
    (Siegmund 1985, "Sequential Analysis", section IV.3). The clock of a weighted mean is the sum of squared weights,
    which grows as records**(2 p + 1). That sums of dependent records follow the process closely enough is what makes
    such sequences valid (Waudby-Smith et al. 2024, "Time-uniform central limit theory", Annals of Statistics 52).
    """
    stats: Any = importlib.import_module("scipy.stats")
    optimize: Any = importlib.import_module("scipy.optimize")
    clock = (2 * _POWER + 1) * math.log(_SPAN)

    def excess(u: float) -> float:
        return float(stats.norm.pdf(u)) * ((u - 1 / u) * clock + 4 / u) - (1 - confidence)

    return float(optimize.brentq(excess, 1.5, 40.0))


# -- runs of one recipe, which differ by chance: measured from repeats, or estimated -----------------------------------

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
    """Noise of the sides' mean difference that comes from runs, not from steps."""

    error: float  # standard deviation of the mean difference
    freedom: float  # degrees of freedom of that estimate; infinite where it is given
    added: int  # degrees of freedom that a further run a side adds
    runs: tuple[int, int]  # number of runs on each side
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
    """Return the noise between runs. `given`: the standard deviation of two runs' difference, if known."""
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
    """Return the rule of thumb: share of the gain, times the runs' distance in the noise of single steps."""
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
    # Of shares, since squares of variances leave the range of float64.
    squares = sum((part / total) ** 2 / (side - 1) for part, side in zip(parts, many, strict=True)) if total else 0.0
    freedom = 1 / squares if squares else math.inf
    yield RunNoise(error=math.sqrt(total), freedom=freedom, added=2, runs=many, source="repeats")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The difference so far, with the noise of steps (`reading`) and that of runs."""

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
