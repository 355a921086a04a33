"""Trend of a series: Theil-Sen slope and Mann-Kendall test.

Both use the order of points and not their distances, so single outliers count little. A series is first reduced to at
most 64 points, the medians of ranges of equal length. That bounds the time, and neighbours become less dependent, as
the test assumes.
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
    """Trend of a series.

    Attributes:
        slope: Change in one step.
        low: Lower end of the slope (95 %).
        high: Upper end of the slope (95 %).
        confidence: Confidence that the series moves in this direction at all.
        start: Value of the trend line at the first step.
        end: Value of the trend line at the last step.
    """

    slope: float
    low: float
    high: float
    confidence: float
    start: float
    end: float

    def steps_to(self, value: float) -> float:
        """Return the steps after the last one until the line reaches a value. Inf: never."""
        if self.end >= value:
            return 0.0
        return (value - self.end) / self.slope if self.slope > 0 else float("inf")


def trend(steps: Ints, values: Floats) -> Trend | None:
    """Return the trend of a series without its NaN. None for fewer than eight points."""
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
    """Return the sample counts at which rules judge a growing series, up to `samples`.

    The numbers are always the same, and a finding once made stays. So a rule judges the beginning of a run alike during
    the run and after it.

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
    """Return whether a series still moves at its end as fast as before.

    It moves by `least` or more, one way, in each of its last two quarters. A size that grows because a model learns
    slows down in binades: one that grows with the steps makes less than half a binade in the last quarter.
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
