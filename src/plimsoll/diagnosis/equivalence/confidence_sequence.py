"""Confidence sequence of two runs' mean difference, valid at every step."""

import functools
import importlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from plimsoll.diagnosis.tables.cells import Floats

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
    """The weighted mean difference after so many records.

    Attributes:
        estimate: The mean.
        error: Its standard error, from the steps alone. Infinite where there are too few records.
        size: Root mean square of the differences, weighted.
        blocks: Number of independent blocks, less what the trend took of them. 0 where there are too few records.
        confidence: Probability that no reading of the sequence leaves the true mean out.
    """

    estimate: float
    error: float
    size: float
    blocks: int
    confidence: float

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
    """Return the weighted values less their trend, their blocks, and the trend's.

    These are the number of independent blocks, and how many of them the trend takes.
    """
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
