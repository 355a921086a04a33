"""Statistics that experiments share: ratios with bounds, lost gradients, curves."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats  # pyright: ignore[reportMissingTypeStubs]

from plimsoll.diagnosis import View
from plimsoll.diagnosis.estimates.underflow_rate import underflow_by_step, underflow_rate

Floats = NDArray[np.float64]
_CONFIDENCE = 0.95
_COLUMNS = 22  # of the picture in one line


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Mean ratio over seeds, and 95 % bounds above and below; NaN for one seed."""

    mean: float
    low: float
    high: float


def ratio(these: Floats, those: Floats) -> Ratio:
    """Return two rows' ratio, seed by seed; Inf if one of the first has no number.

    What one seed without a number is above says nothing of the others: `low` is Inf only where none has one. Beside
    results of which one is no number there is no ratio.

    >>> found = ratio(np.array([2.0, 2.0, 2.0]), np.array([1.0, 1.0, 1.0]))
    >>> found.low == found.mean == found.high == 2.0
    True
    """
    if not np.isfinite(those).all():
        return Ratio(mean=math.nan, low=math.nan, high=math.nan)
    broken = ~np.isfinite(these)
    if broken.any():
        return Ratio(mean=math.inf, low=math.inf if broken.all() else math.nan, high=math.inf)
    logs = np.log(these / those)
    mean = float(logs.mean())
    if len(logs) < 2:
        return Ratio(mean=math.exp(mean), low=math.nan, high=math.nan)
    error = float(logs.std(ddof=1)) / math.sqrt(len(logs))
    wide = float(stats.t.ppf(_CONFIDENCE, len(logs) - 1)) * error
    return Ratio(mean=math.exp(mean), low=math.exp(mean - wide), high=math.exp(mean + wide))


def mean(values: Floats) -> float:
    """The mean; NaN of none."""
    return float(values.mean()) if len(values) else math.nan


def median(values: Floats) -> float:
    """The median, in which a value that is no number counts as Inf; NaN of none.

    So a loss that is mostly no number is Inf, and not the median of the few that are.
    """
    return float(np.median(np.where(np.isfinite(values), values, np.inf))) if len(values) else math.nan


def largest(values: Iterable[float]) -> float:
    """The largest; NaN where one is, which Python's `max` may pass over.

    >>> max([0.0, float("nan")]), largest([0.0, float("nan")])
    (0.0, nan)
    """
    return float(np.max(list(values)))


def lost_at(view: View) -> tuple[NDArray[np.int64], Floats]:
    """Return activation gradients' underflow rate by sample; none in BF16."""
    narrow = view.narrow("activation_gradients")
    if narrow is not None and not narrow.censors.any():
        return narrow.cells.steps, np.zeros(len(narrow.cells.steps))
    return underflow_by_step(view, "activation_gradients")


def share_lost(view: View, since_step: int) -> float:
    """Return activation gradients' underflow rate from a step; 0 in BF16, or NaN."""
    rate = underflow_rate(view, "activation_gradients", since_step)
    if rate is not None:
        return rate.share
    return 0.0 if view.cells("activation_gradients") is not None else math.nan


def lost(view: View) -> dict[str, float]:
    """Return the part of activation gradients that FP16 lost: overall, first and last."""
    narrow = view.narrow("activation_gradients")
    if narrow is None or not narrow.censors.any():
        return {}
    _, shares = lost_at(view)
    return {"lost_after": float(shares.mean()), "lost_first": float(shares[0]), "lost_last": float(shares[-1])}


def columns(steps: NDArray[np.int64], loss: Floats, of: Callable[[Floats], float] = mean) -> tuple[float, ...]:
    """Return the loss as means of equal stretches, or other numbers `of` them."""
    if not len(steps):
        return ()
    place = (steps - steps[0]) * _COLUMNS // (steps[-1] + 1 - steps[0])
    return tuple(of(loss[place == column]) for column in range(_COLUMNS) if (place == column).any())
