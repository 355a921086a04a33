"""Whether a series rises, how fast, and how sure that is: the Theil-Sen slope and the Mann-Kendall test.

Both look at the order of points and not at their distances, so that single wild samples count little. A series is
first brought to at most 64 points, the medians of stretches of equal length: which bounds the time, and makes
neighbours less alike than the test supposes them to be unlike.
"""

import importlib
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from plimsoll.diagnosis.tables.cells import Floats, Ints

_POINTS = 64
_LEAST = 8  # points without which nothing is said
_GROWTH = 1.35  # from one look at a growing series to the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """How a series moves: `slope` a step, within `low` to `high` (95 %); `confidence` that it moves at all that way.

    `start` and `end` are the trend line's values at the first and the last step.
    """

    slope: float
    low: float
    high: float
    confidence: float
    start: float
    end: float

    def steps_to(self, value: float) -> float:
        """How many steps after the last one the line comes to a value; Inf if it does not go there."""
        if self.end >= value:
            return 0.0
        return (value - self.end) / self.slope if self.slope > 0 else float("inf")


def trend(steps: Ints, values: Floats) -> Trend | None:
    """The trend of a series, NaN left out; None for fewer than eight points."""
    # Takes its time to import, and watching has no need of it. It comes without type stubs.
    stats: Any = importlib.import_module("scipy.stats")
    known = np.isfinite(values)
    if np.count_nonzero(known) < _LEAST:
        return None
    x, y = _thinned(steps[known].astype(np.float64), values[known])
    if np.ptp(y) == 0:
        return Trend(slope=0.0, low=0.0, high=0.0, confidence=0.0, start=float(y[0]), end=float(y[0]))
    slope, intercept, low, high = (float(v) for v in stats.theilslopes(y, x))
    p_value = float(stats.kendalltau(x, y).pvalue)
    return Trend(
        slope=slope,
        low=low,
        high=high,
        confidence=1.0 - p_value,
        start=intercept + slope * float(x[0]),
        end=intercept + slope * float(x[-1]),
    )


def looks(samples: int) -> list[int]:
    """After how many samples a growing series is looked at: always the same numbers, the last at or below `samples`.

    A rule that judges a trend does so at these, and a finding once made stays: so it says of a run's beginning the same
    while the run goes on as when it has ended.

    >>> looks(20)
    [8, 11, 15]
    """
    found: list[int] = []
    at = _LEAST
    while at <= samples:
        found.append(at)
        at = int(np.ceil(at * _GROWTH))
    return found


def goes_on(steps: Ints, values: Floats, *, least: float, confidence: float) -> bool:
    """Whether a series moves as fast as ever at its end: `least` or more in each of its last two quarters, one way.

    A size that grows because a model learns slows down in binades: one that grows with the steps makes less than half
    a binade in the last quarter.
    """
    if len(values) < 2 * _LEAST:
        return False
    ends = [float(np.median(piece)) for piece in np.array_split(values, 8)]
    third, fourth = ends[5] - ends[3], ends[7] - ends[5]
    if third * fourth <= 0 or min(abs(third), abs(fourth)) < least:
        return False
    found = trend(steps[len(values) // 2 :], values[len(values) // 2 :])
    return found is not None and found.confidence >= confidence and found.low * found.high > 0


def _thinned(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    if len(x) <= _POINTS:
        return x, y
    bounds = np.linspace(0, len(x), _POINTS + 1).astype(np.int64)
    pieces = [slice(a, b) for a, b in itertools.pairwise(bounds.tolist())]
    return np.array([np.median(x[p]) for p in pieces]), np.array([np.median(y[p]) for p in pieces])
