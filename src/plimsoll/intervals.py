"""`Interval`: a number with bounds and an estimate."""

import math
import numbers
import operator
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from plimsoll import exports
from plimsoll.errors import ArgumentError
from plimsoll.results import NotebookRepr
from plimsoll.text import number


@exports.exported_by("plimsoll.spectrum")
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Interval(NotebookRepr):
    """A number that is at least `low`, at most `high`, and about `estimate`.

    `float` and a format specification use the estimate, and `str` shows all three. A comparison with a number or with
    another interval has a result if it is the same throughout the interval. Otherwise it raises `ArgumentError`. The
    same holds for equality with a number and for truth (``!= 0``). Two intervals are equal if their fields are.

    >>> lost = Interval(low=0.25, high=0.5, estimate=0.3)
    >>> float(lost), f"{lost:.1%}", str(lost)
    (0.3, '30.0%', '0.3 (0.25 to 0.5)')
    >>> lost > 0.1, 0.5 < lost
    (True, False)
    >>> lost > 0.4
    Traceback (most recent call last):
        ...
    plimsoll.ArgumentError: Interval: expected a comparison that the interval decides; got 0.3 (0.25 to 0.5) >
    0.4. Compare .low or .high, or float(...) for the estimate.
    """

    low: float
    high: float
    estimate: float

    @property
    def exact(self) -> bool:
        """True if the number is known."""
        return self.low == self.high

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high

    def __float__(self) -> float:
        return float(self.estimate)

    def __bool__(self) -> bool:
        return not self._decided(operator.eq, "==", 0)

    def __str__(self) -> str:
        """Return the estimate, and the ends if they differ."""
        estimate, low, high = map(number, (self.estimate, self.low, self.high))
        return estimate if self.exact else f"{estimate} ({low} to {high})"

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else str(self)

    def __lt__(self, other: object) -> bool:
        return self._decided(operator.lt, "<", other)

    def __le__(self, other: object) -> bool:
        return self._decided(operator.le, "<=", other)

    def __gt__(self, other: object) -> bool:
        return self._decided(operator.gt, ">", other)

    def __ge__(self, other: object) -> bool:
        return self._decided(operator.ge, ">=", other)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Interval):
            return self._fields() == other._fields()
        return self._decided(operator.eq, "==", other)

    def __hash__(self) -> int:
        """Return the hash, which for an exact interval is its number's."""
        return hash(self.low) if self.exact else hash(self._fields())

    def _fields(self) -> tuple[float, float, float]:
        return self.low, self.high, self.estimate

    def _decided(self, compare: Callable[[Any, Any], bool], sign: str, other: object) -> bool:
        """Return the result that holds for all possible values, or raise.

        `NotImplemented` if `other` is no number.
        """
        if isinstance(other, Interval):
            low, high = other.low, other.high
        else:
            low = high = _number(other)
            if low is None:
                return NotImplemented
        answers = {bool(compare(mine, theirs)) for mine in (self.low, self.high) for theirs in (low, high)}
        between = compare is operator.eq and self.low < low < self.high  # differs from both ends, but may be equal
        if between or len(answers) > 1 or math.isnan(self.low) or math.isnan(self.high):
            raise ArgumentError(
                f"Interval: expected a comparison that the interval decides; got {self} {sign} {other}. "
                "Compare .low or .high, or float(...) for the estimate."
            )
        return answers.pop()


def _number(value: Any) -> Any:
    """Return the value if it is a real number, also of NumPy or torch, or None."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    return value if isinstance(value, numbers.Real | Decimal) else None
