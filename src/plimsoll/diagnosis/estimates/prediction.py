"""`Prediction`: the effect of a format on every cell of a collection, as counts."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from plimsoll.diagnosis.tables.cells import Floats

Tally = tuple[Floats, Floats, Floats]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prediction:
    """Numbers of values by cell (layers by steps): at least, at most, about.

    NaN where nothing was recorded.

    Attributes:
        hidden: Zeros that a narrow format may have made of values.
        noise: Sum of squared errors.
        signal: Sum of squares.
    """

    nonzero: Floats
    hidden: Floats
    lost: Tally
    subnormal: Tally
    overflow: Tally
    noise: Floats
    signal: Floats

    def each(self, change: Callable[[Floats], Floats]) -> "Prediction":
        """Return the prediction with each of its numbers changed in one way."""

        def all_of(tally: Tally) -> Tally:
            return change(tally[0]), change(tally[1]), change(tally[2])

        return Prediction(
            nonzero=change(self.nonzero),
            hidden=change(self.hidden),
            lost=all_of(self.lost),
            subnormal=all_of(self.subnormal),
            overflow=all_of(self.overflow),
            noise=change(self.noise),
            signal=change(self.signal),
        )

    def summed(self, axis: int) -> "Prediction":
        """Return the prediction with its layers (0) or its steps (1) added up."""
        return self.each(lambda values: summed(values, axis))


def summed(values: Floats, axis: int) -> Floats:
    """Return the sum over layers (0) or steps (1), without unrecorded cells."""
    return np.nansum(values, axis=axis)
