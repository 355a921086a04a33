"""Trends of a series (Theil-Sen slope, Mann-Kendall test), rises of a loss, and episodes of broken steps."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from plimsoll.diagnosis.tables.cells import Floats, Ints

_POINTS = 64
_LEAST = 8  # points without which nothing is said
_GROWTH = 1.35  # from one look at a growing series to the next
_NORMAL_95 = 1.959963984540054  # of the normal distribution 95 % lie between minus and plus this
_DENSER = 2.0  # times the share of broken steps in the episodes before
_EXACT_POINTS = 33  # up to so many points without ties the test counts all orders, as scipy does


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Trend of a series."""

    slope: float
    low: float  # lower end of the slope (95 %)
    high: float  # upper end of the slope (95 %)
    confidence: float  # confidence that the series moves in this direction at all
    start: float  # value of the trend line at the first step
    end: float  # value of the trend line at the last step

    def steps_to(self, value: float) -> float:
        """Return the steps after the last one until the line reaches a value. Inf: never."""
        if self.end >= value:
            return 0.0
        return (value - self.end) / self.slope if self.slope > 0 else float("inf")


def trend(steps: Ints, values: Floats) -> Trend | None:
    """Return the trend of a series without its NaN. None for fewer than eight points."""
    known = np.isfinite(values)
    if np.count_nonzero(known) < _LEAST:
        return None
    x, y = _thinned(steps[known].astype(np.float64), values[known])
    if np.ptp(y) == 0:
        return Trend(slope=0.0, low=0.0, high=0.0, confidence=0.0, start=float(y[0]), end=float(y[0]))
    slope, intercept, low, high = theil_sen(x, y)
    return Trend(
        slope=slope,
        low=low,
        high=high,
        confidence=1.0 - mann_kendall(y),
        start=intercept + slope * float(x[0]),
        end=intercept + slope * float(x[-1]),
    )


# scipy.stats has both functions. It takes 0.6 s to import, longer than all else that a verdict on a small run needs.


def theil_sen(x: Floats, y: Floats) -> tuple[float, float, float, float]:
    """Return the median slope of all pairs of points (`x` ascending), the intercept, and its 95 % interval."""
    later, earlier = np.tril_indices(len(x), -1)
    slopes = np.sort((y[later] - y[earlier]) / (x[later] - x[earlier]))
    slope = float(np.median(slopes))
    reach = _NORMAL_95 * math.sqrt(_variance(y))
    low = max(round((len(slopes) - reach) / 2) - 1, 0)
    high = min(round((len(slopes) + reach) / 2), len(slopes) - 1)
    return slope, float(np.median(y) - slope * np.median(x)), float(slopes[low]), float(slopes[high])


def mann_kendall(y: Floats) -> float:
    """Return the probability that trendless numbers are ordered as much as these, in either direction."""
    later, earlier = np.tril_indices(len(y), -1)
    signs = np.sign(y[later] - y[earlier])
    falling, is_tied = int(np.count_nonzero(signs < 0)), bool((signs == 0).any())
    if not is_tied and (len(y) <= _EXACT_POINTS or min(falling, len(signs) - falling) <= 1):
        return _exact(len(y), min(falling, len(signs) - falling))
    return math.erfc(abs(float(signs.sum())) / math.sqrt(2 * _variance(y)))


def _variance(y: Floats) -> float:
    """Return the variance of the number of rising less falling pairs (Kendall 1970, with ties)."""
    ties = np.unique(y, return_counts=True)[1].astype(np.float64)
    n = float(len(y))
    return (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18


def _exact(n: int, inversions: int) -> float:
    """Return the share of orders of n numbers with at most so many inversions, from either end."""
    orders = [1]  # by their number of inversions; one number has none
    for m in range(2, n + 1):  # the m-th number goes before 0 to m - 1 of the others
        sums = list(itertools.accumulate(orders))
        sums += [sums[-1]] * (min(len(orders) + m - 1, inversions + 1) - len(sums))
        orders = [total - (sums[i - m] if i >= m else 0) for i, total in enumerate(sums[: inversions + 1])]
    return min(1.0, 2 * sum(orders) / math.factorial(n))


def looks(samples: int) -> list[int]:
    """Return the sample counts at which rules judge a growing series, up to `samples`.

    >>> looks(20)
    [8, 11, 15]
    """
    # The numbers are always the same, and a finding once made stays. So a rule judges the beginning of a run alike
    # during the run and after it.
    numbers: list[int] = []
    at = _LEAST
    while at <= samples:
        numbers.append(at)
        at = int(np.ceil(at * _GROWTH))
    return numbers


def goes_on(steps: Ints, values: Floats, *, least: float, confidence: float) -> bool:
    """Return whether a series still moves at its end as fast as before."""
    if len(values) < 2 * _LEAST:
        return False
    # The series must move by `least` or more, one way, in each of its last two quarters. A size that grows because a
    # model learns slows down in binades: one that grows with the steps makes less than half a binade in the last
    # quarter.
    ends = [float(np.median(piece)) for piece in np.array_split(values, 8)]
    third, fourth = ends[5] - ends[3], ends[7] - ends[5]
    if third * fourth <= 0 or min(abs(third), abs(fourth)) < least:
        return False
    line = trend(steps[len(values) // 2 :], values[len(values) // 2 :])
    return line is not None and line.confidence >= confidence and line.low * line.high > 0


# The trend and its test use the order of points and not their distances, so single outliers count little. A series is
# first reduced to at most 64 points, the medians of ranges of equal length. That bounds the time, and neighbours become
# less dependent, as the test assumes.
def _thinned(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    if len(x) <= _POINTS:
        return x, y
    bounds = np.linspace(0, len(x), _POINTS + 1).astype(np.int64)
    pieces = [slice(a, b) for a, b in itertools.pairwise(bounds.tolist())]
    return np.array([np.median(x[p]) for p in pieces]), np.array([np.median(y[p]) for p in pieces])


# -- rises of a loss: where it leaves its usual level, for how long, and how high --------------------------------------

_PIECE = 1 << 14  # losses whose windows are sorted at a time
_FIRST = 5  # losses that say where a run began
_TAIL = 3.0  # noise reaches so many times as far above the median as its upper tenth begins
_SURE = 0.99  # Mann-Kendall test, two-sided


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """A range of losses above the level before it."""

    first: int  # place of its first loss
    last: int  # place of its last loss
    peak: int  # place of its highest loss
    usual: float  # the median before it
    level: float  # upper end of the noise before it
    height: float  # median of the rise; if it is `open`, median of its last losses
    lasts: bool  # whether it is longer than single batches explain
    open: bool  # whether the record ends in it

    @property
    def length(self) -> int:
        """Number of losses from its first to its last."""
        return self.last - self.first + 1


def beginning(loss: Floats) -> float:
    """Return a run's first loss, or the median of its first five if that is lower."""
    return float(min(loss[0], np.median(loss[:_FIRST])))


# A search for the learning rate ends where the loss has risen far, and so does a run that is begun again after it
# diverged. Weights that are overwritten by mistake cost at most what the first ones did.
def exceeds_start(steps: Ints, loss: Floats, after: int, until: int, *, times: float) -> bool:
    """Return whether a loss after one step and until another was far above that of the start."""
    known = np.isfinite(loss)
    between = loss[known & (steps > after) & (steps <= until)]
    if not len(between):
        return False
    first = beginning(loss[known])
    return bool(between.max() > first + (times - 1) * abs(first))


# The usual level is the median of the losses before. Its noise reaches as far as the largest of three estimates says:
# the median absolute deviation, the distance of the upper tenth, and the same as a ratio, since losses that fall by
# orders of magnitude wobble by factors. So one-sided tails count as noise where they were there before.
def levels(loss: Floats, *, window: int, least: int, deviations: float, rise: float) -> tuple[Floats, Floats]:
    """Return at each loss the median before it, and the upper end of the noise.

    Both are NaN for the first `least` losses.
    """
    usual, level = np.full(len(loss), np.nan), np.full(len(loss), np.nan)
    if len(loss) <= least:
        return usual, level
    padded = np.concatenate([np.full(window - least, np.nan), loss[:-1]])
    windows = sliding_window_view(padded, window)
    for start in range(0, len(windows), _PIECE):
        piece = windows[start : start + _PIECE]
        here = slice(least + start, least + start + len(piece))
        median = np.nanmedian(piece, axis=1)
        deviation = np.nanmedian(np.abs(piece - median[:, None]), axis=1)
        ordered = np.sort(piece, axis=1)  # NaN at the end
        known = np.count_nonzero(~np.isnan(piece), axis=1)
        upper = ordered[np.arange(len(piece)), (0.9 * (known - 1)).astype(np.int64)]
        reach = np.maximum.reduce([deviations * deviation, _TAIL * (upper - median), rise * np.abs(median)])
        with np.errstate(all="ignore"):
            factor = np.where(median > 0, median * (upper / median) ** _TAIL, -np.inf)
        usual[here], level[here] = median, np.maximum(median + reach, factor)
    return usual, level


def rises(loss: Floats, usual: Floats, level: Floats, *, lasting: int, share: float) -> list[Rise]:
    """Return the rises of a loss above `level`, each against the level where it began."""
    result: list[Rise] = []
    done = -1
    for first in np.flatnonzero(loss > level).tolist():
        if first > done:
            rise = _rise_at(loss, first, float(usual[first]), float(level[first]), lasting, share)
            result.append(rise)
            done = rise.last
    return result


def gradual_rise(loss: Floats, *, beyond: float, window: int, lasting: int, share: float) -> Rise | None:
    """Return a rise above `beyond` that noise hid as it went on; None if most last losses are below."""
    if len(loss) < window + lasting or np.count_nonzero(loss[-lasting:] > beyond) < share * lasting:
        return None
    smooth = np.median(sliding_window_view(loss, lasting), axis=1)
    below = np.flatnonzero(smooth <= beyond)
    if not len(below):
        return None
    first = int(below[-1]) + lasting
    first = min(first, len(loss) - lasting)
    return Rise(
        first=first, last=len(loss) - 1, peak=first + int(np.argmax(loss[first:])), usual=float(smooth.min()),
        level=beyond, height=float(np.median(loss[-lasting:])), lasts=True, open=True,
    )  # fmt: skip


def falls(loss: Floats) -> bool:
    """Return whether losses fall for certain."""
    line = trend(np.arange(len(loss)), loss)
    return line is not None and line.confidence >= _SURE and line.high < 0


def halves(loss: Floats) -> bool:
    """Return whether losses above zero have fallen by half or more in the second half of their steps."""
    loss = loss[np.isfinite(loss)]
    if len(loss) < 2 * _LEAST:
        return False
    pieces = np.array_split(loss, 8)
    return bool((pieces[7] > 0).all()) and float(np.median(pieces[7])) <= 0.5 * float(np.median(pieces[4]))


def comes_back(loss: Floats, rise: Rise) -> bool:
    """Return whether an open rise falls for certain and half of it is gone."""
    after = loss[rise.peak :] - rise.usual
    quarter = after[: max(len(after) // 4, 1)]
    return falls(after) and rise.height - rise.usual <= 0.5 * float(np.median(quarter))


def _rise_at(loss: Floats, first: int, usual: float, level: float, lasting: int, share: float) -> Rise:
    near = loss[first : first + lasting] > level
    lasts = bool(len(near) == lasting and np.count_nonzero(near) >= share * lasting)
    if lasts:
        above = loss[first:] > level
        running = np.concatenate([[0], np.cumsum(above)])
        fewer = np.flatnonzero(running[lasting:] - running[:-lasting] < share * lasting)
        ends = len(above) if not len(fewer) else int(fewer[0]) + lasting
        open_ = not len(fewer)
        last = first + int(np.flatnonzero(above[:ends])[-1])
    else:
        open_ = bool(len(near) < lasting and np.count_nonzero(near) >= share * len(near))
        last = first + (int(np.flatnonzero(near)[-1]) if open_ else int(np.argmin(np.append(near, False))) - 1)
    losses = loss[max(first, len(loss) - lasting) :] if open_ else loss[first : last + 1]
    return Rise(
        first=first, last=last, peak=first + int(np.argmax(loss[first : last + 1])), usual=usual, level=level,
        height=float(np.median(losses)), lasts=lasts, open=open_,
    )  # fmt: skip


# -- episodes of broken steps ------------------------------------------------------------------------------------------

Span = tuple[Ints, Ints]  # first steps, and for each the last step that it reaches to


def reaching(steps: Ints, broken: NDArray[np.bool_], last_step: int) -> Span:
    """Return the broken steps, each up to the next recorded one if that is broken too.

    The last recorded one reaches to `last_step`: nothing shows that it is over.
    """
    following = np.where(np.append(broken[1:], True), np.append(steps[1:], last_step), steps)
    return steps[broken], following[broken]


def first_of_deciding(spans: Sequence[Span], last_step: int, recovered: float) -> int | None:
    """Return the first step of the episode that decides. None without spans.

    An episode is over once `recovered` steps follow it that are in no span. One that is not over decides if it has more
    steps than all before it together, or `recovered` of them, and is denser than what came before. In all other cases
    the first episode decides: a fault that comes now and then began when it came first.

    >>> early, lasting = np.array([3]), np.arange(40, 60)
    >>> first_of_deciding([(early, early), (lasting, lasting)], last_step=59, recovered=10)
    40
    >>> first_of_deciding([(early, early), (lasting, lasting)], last_step=99, recovered=10)
    3

    Every third batch is broken, but for a few at the start:

    >>> thirds = np.setdiff1d(np.arange(0, 300, 3), np.arange(60, 75))
    >>> first_of_deciding([(thirds, thirds)], last_step=299, recovered=10)
    0
    """
    begins = np.concatenate([begin for begin, _ in spans]).astype(np.int64)
    if not len(begins):
        return None
    first, of = np.unique(begins, return_inverse=True)
    end = first.copy()
    np.maximum.at(end, of, np.concatenate([end for _, end in spans]).astype(np.int64))
    reached = np.maximum.accumulate(end)
    episodes = np.flatnonzero(np.append(True, first[1:] - reached[:-1] > recovered))
    sizes = np.add.reduceat(np.maximum(end - first, 1), episodes)
    lasts = last_step - reached[-1] < recovered and (sizes[-1] >= recovered or sizes[-1] > sizes[:-1].sum())
    last, many = first[episodes[-1]], max(sizes[:-1].sum(), 1)
    denser = sizes[-1] * (last - first[0]) > _DENSER * many * (last_step - last + 1)
    return int(first[episodes[-1 if lasts and denser else 0]])
