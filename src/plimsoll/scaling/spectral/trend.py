"""One-step forecast of a noisy series, with its typical error."""

import functools
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

VALUES = 32  # values of the line: the number of pairs grows with the square, and older steps matter less
ERRORS = 256  # errors that are remembered, so that a jump is covered for as many steps
UNKNOWN = 1.0  # error of a forecast without data, of which less is added with each error,
FEW = 32  # and none from this number of errors on


class Trend:
    """Bounded history of values, with a forecast and the errors of earlier ones.

    >>> trend = Trend()
    >>> for value in [1.0, 2.0, 3.0, 90.0, 5.0, 6.0]:
    ...     trend.add(value)
    >>> trend.forecast
    7.0
    """

    __slots__ = ("_errors", "_values", "forecast")

    forecast: float | None

    def __init__(self, values: Iterable[float] = (), errors: Iterable[float] = ()) -> None:
        self._values: deque[float] = deque((float(x) for x in values), maxlen=VALUES)
        self._errors: deque[float] = deque((float(x) for x in errors), maxlen=ERRORS)
        self.forecast = _next(self._values) if self._values else None

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float, *, learn: bool = True) -> None:
        """Add a finite value, and with `learn` the error of its forecast."""
        if learn and self.forecast is not None:
            self._errors.append(value - self.forecast)
        self._values.append(value)
        self.forecast = _next(self._values)

    @property
    def latest(self) -> float | None:
        """Median of the last three values, or None. A sudden change appears here first."""
        return _median(np.array(list(self._values)[-3:])) if self._values else None

    def usual_error(self, share: float) -> float:
        """Return the largest excess over the forecast in a share of past steps.

        While few steps are remembered, part of `UNKNOWN` is added.
        """
        unknown = UNKNOWN * max(1 - len(self._errors) / FEW, 0.0)
        return unknown + (_quantile(np.sort(list(self._errors)), share) if self._errors else 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, from which `from_dict` restores an equal trend."""
        return {"values": list(self._values), "errors": list(self._errors)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Trend":
        """Return the trend that `to_dict` wrote."""
        return cls(saved["values"], saved["errors"])


# The forecast is a straight line through the last values. Its slope is the median of the slopes between all pairs
# (Theil 1950, Sen 1968), its height the median of the residuals. A quarter of the values may be arbitrary without a
# large effect. A falling line is not followed below the median of the values: a decrease may stop, and a forecast that
# is too high does less harm here than one that is too low. No distribution around the line is assumed. Each forecast is
# compared with the value that follows, and a quantile of these errors is the usual error of the next one.
def _next(series: Iterable[float]) -> float:
    """Return the line's value one step after the last."""
    # As scipy's theilslopes, in a tenth of the time.
    values = np.array(list(series))
    if len(values) == 1:
        return float(values[0])
    later, earlier, apart = _pairs(len(values))
    slope = _median((values[later] - values[earlier]) / apart)
    steps = np.arange(len(values)) - len(values)
    return max(_median(values - slope * steps), _median(values))


def _median(values: NDArray[np.floating[Any]]) -> float:
    return _quantile(np.sort(values), 0.5)


def _quantile(ordered: NDArray[np.floating[Any]], share: float) -> float:
    """Return a quantile of ascending values."""
    # As numpy.quantile, in a tenth of the time for so few values.
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (place - below) * (ordered[above] - ordered[below]))


@functools.lru_cache(maxsize=VALUES)
def _pairs(number: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    earlier, later = np.triu_indices(number, 1)
    return later, earlier, later - earlier
