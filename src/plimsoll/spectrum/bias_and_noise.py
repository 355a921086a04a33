"""Errors of several draws split into bias and noise.

A draw is one measurement of the same tensor: another batch, another rounding seed, another step. The error of a draw is
a vector e of coordinates, relative to the norm of its reference. Draws are independent, so for two of them the mean of
<e, e'> is the squared norm of E[e], the **bias**, which is constant over draws. The mean over all pairs is an unbiased
estimate of it (a U-statistic). The square of the mean error would count 1/n of the noise as bias. The rest of the
squared error is **noise**: relative_error^2 = bias^2 + noise^2.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plimsoll.intervals import Interval

CONFIDENCE = 0.95
UNKNOWN = Interval(low=0.0, high=math.inf, estimate=math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasAndNoise:
    """An error split into bias and noise, relative to the norm of the reference.

    Attributes:
        draws: Number of draws.
        relative_error: Root mean square over draws.
        bias: The part that is constant over draws. With one or two draws its interval is from 0 to the error.
        noise: The rest.
    """

    draws: int
    relative_error: float
    bias: Interval
    noise: float

    @property
    def is_bias(self) -> bool:
        """True if bias is certain, and a larger part of the squared error than noise."""
        return self.bias.low > 0 and self.bias.estimate > self.noise


# The interval is the jackknife's over draws, with Student's t. Near a bias of zero the jackknife overstates the spread
# of such an estimate by a factor of up to sqrt(2), so its interval is wider than necessary there.
def split(coordinates: NDArray[np.float64], energies: NDArray[np.float64], *, sketched: int = 0) -> BiasAndNoise:
    """Return the bias and the noise of several draws.

    Args:
        coordinates: float64[draws, n]: each draw's relative error in coordinates that mean the same in all draws.
        energies: float64[draws]: squared relative error of each, at least the sum of its coordinates' squares. The
            excess counts as noise.
        sketched: Length of a random sketch among the coordinates, 0 for none: its own error widens the interval.
    """
    from scipy.special import stdtrit  # pyright: ignore[reportMissingTypeStubs]  (not needed to read a run)

    known = np.isfinite(energies) & np.isfinite(coordinates).all(axis=1)
    coordinates, energies, draws = coordinates[known], energies[known], int(known.sum())
    if not draws:
        return BiasAndNoise(draws=0, relative_error=math.nan, bias=UNKNOWN, noise=math.nan)
    mean = float(energies.mean())
    products = coordinates @ coordinates.T
    own = np.diag(products)
    total = float(products.sum() - own.sum())
    if draws == 1:
        bias = Interval(low=0.0, high=math.sqrt(mean), estimate=math.nan)
        return BiasAndNoise(draws=1, relative_error=math.sqrt(mean), bias=bias, noise=math.nan)
    square = total / (draws * (draws - 1))
    if draws == 2:
        low, high = 0.0, mean
    else:
        without = (total - 2 * (products.sum(axis=1) - own)) / ((draws - 1) * (draws - 2))
        spread = (draws - 1) / draws * float(np.square(without - without.mean()).sum())
        if sketched and mean > 0:
            bounded = min(max(square, 0.0), mean)
            spread += (bounded * (1 - bounded / mean)) ** 2 * 2 / sketched
        reach = float(stdtrit(draws - 1, (1 + CONFIDENCE) / 2)) * math.sqrt(spread)
        low, high = square - reach, square + reach
    estimate = min(max(square, 0.0), mean)
    bias = Interval(
        low=math.sqrt(max(min(low, estimate), 0.0)),
        high=math.sqrt(max(high, estimate, 0.0)),
        estimate=math.sqrt(estimate),
    )
    return BiasAndNoise(
        draws=draws, relative_error=math.sqrt(mean), bias=bias, noise=math.sqrt(max(mean - estimate, 0.0))
    )
