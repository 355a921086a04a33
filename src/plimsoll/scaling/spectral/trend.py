"""One-step forecast of a noisy series, with its typical error.

The forecast is a straight line through the last values: its slope is the median of the slopes between all pairs (Theil
1950, Sen 1968), its height the median of what is left. A quarter of the values may be anything at all without moving it
far. Where the line falls it is not followed below the median of the values: what shrinks may stop to, and an
expectation that is too high does less harm here than one that is too low. What the values do around the line is not
assumed to be of any kind: each forecast is compared with what came, and a quantile of these errors says what the next
forecast is to be trusted with.
"""

import functools
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

VALUES = 32  # that the line goes through: pairs grow with the square, and older steps say less
ERRORS = 256  # that are remembered: a jump is covered for as many steps
UNKNOWN = 1.0  # what a forecast may be off by when nothing is known; less and less of it is added
FEW = 32  # up to so many errors


class Trend:
    """A bounded history of values, the forecast of the next, and the errors of the forecasts before it.

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
        """Takes the next value, a finite one; without `learn`, what the forecast missed it by is not remembered."""
        if learn and self.forecast is not None:
            self._errors.append(value - self.forecast)
        self._values.append(value)
        self.forecast = _next(self._values)

    @property
    def latest(self) -> float | None:
        """The median of the last three values, which is where a sudden change shows first; None without values."""
        return _median(np.array(list(self._values)[-3:])) if self._values else None

    def usual_error(self, share: float) -> float:
        """Return the largest excess over the forecast in that share of the remembered steps.

        While few steps are remembered, part of `UNKNOWN` is added.
        """
        unknown = UNKNOWN * max(1 - len(self._errors) / FEW, 0.0)
        return unknown + (_quantile(np.sort(list(self._errors)), share) if self._errors else 0.0)

    def to_dict(self) -> dict[str, Any]:
        """The history as plain numbers, that `from_dict` makes an equal trend of."""
        return {"values": list(self._values), "errors": list(self._errors)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Trend":
        """The trend that `to_dict` wrote."""
        return cls(saved["values"], saved["errors"])


def _next(series: Iterable[float]) -> float:
    """The line's value one step after the last: scipy's theilslopes in a tenth of the time."""
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
    """As numpy's of ascending values, in a tenth of the time that numpy takes for so few."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (place - below) * (ordered[above] - ordered[below]))


@functools.lru_cache(maxsize=VALUES)
def _pairs(number: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    earlier, later = np.triu_indices(number, 1)
    return later, earlier, later - earlier
