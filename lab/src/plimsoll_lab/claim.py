"""Claims of experiments: a sentence, the number measured for it, and the bounds of that number."""

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace

from plimsoll.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement of an experiment, with the number that was measured for it.

    It holds where `measured` is at least `at_least` and at most `at_most`. One of them may be None. A number that could
    not be measured is NaN, and keeps no bound. `rows` are the rows of the evidence base that it belongs to. None given
    means all rows of its experiment.

    >>> Claim("scale-falls", "the scale falls", 10.0, at_least=10.0, unit="binades").holds
    True
    >>> Claim("scale-falls", "the scale falls", float("nan"), at_most=1.0).holds
    False
    """

    id: str
    says: str
    measured: float
    _: KW_ONLY
    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""
    rows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.at_least is None and self.at_most is None:
            raise ArgumentError(
                f"Claim: expected a bound that can fail; got none for {self.id!r}. Give at_least, at_most or both."
            )

    @property
    def holds(self) -> bool:
        """True if the number keeps its bounds."""
        low = -math.inf if self.at_least is None else self.at_least
        high = math.inf if self.at_most is None else self.at_most
        # A comparison of NumPy numbers gives a NumPy bool, which JSON cannot write.
        return bool(low <= self.measured <= high)

    def __str__(self) -> str:
        """Return the sentence, the number and the bounds in one line."""
        bounds = [
            f"{word} {_number(bound)}"
            for word, bound in (("at least", self.at_least), ("at most", self.at_most))
            if bound is not None
        ]
        measured = " ".join(filter(None, (_number(self.measured), self.unit)))
        return f"{self.says}: {measured}, expected {' and '.join(bounds)}"

    def to_dict(self) -> dict[str, object]:
        """Return the claim as JSON-able data. NaN and Inf become the strings "nan" and "inf"."""
        measured = float(self.measured) if math.isfinite(self.measured) else str(float(self.measured))
        return {
            "id": self.id,
            "says": self.says,
            "measured": measured,
            "at_least": self.at_least,
            "at_most": self.at_most,
            "unit": self.unit,
            "holds": self.holds,
            "rows": list(self.rows),
        }


def of_rows(claims: Iterable[Claim], *rows: str) -> tuple[Claim, ...]:
    """Return the claims with these rows of the evidence base."""
    return tuple(replace(claim, rows=rows) for claim in claims)


def _number(value: float) -> str:
    whole = float(value).is_integer() and abs(value) < 1e6  # an int has no `is_integer` before Python 3.12
    return f"{value:.0f}" if whole else f"{value:.4g}"
