"""Errors of a tensor against a reference: additive sums, and bias and noise of several draws."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plimsoll import row_layout
from plimsoll.errors import ArgumentError
from plimsoll.intervals import Interval

Floats = NDArray[np.float64]

# FP4 training stalls if a gradient is less than sqrt(3) times its quantization noise (arXiv 2505.19115).
STALL_DB = 10 * math.log10(3)
# Power of a common scale by which each sum is multiplied. The others are counts.
POWERS = {"error": 1, "errorsq": 2, "reference": 1, "referencesq": 2, "error_reference": 2, "largest_error": 1}


# e = value - reference, x = reference. All results follow from the sums of e, e^2, x, x^2 and e x over the pairs that
# are finite on both sides. The sums of the values y themselves are not stored, since a small error would be lost in
# their last digits. They follow too: x y = x^2 + e x, and y^2 = x^2 + 2 e x + e^2.
@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSums:
    """Sums over the errors of a tensor against a reference.

    `+` merges batches, shards and ranks.

    Attributes:
        compared: Number of pairs that are finite on both sides. All sums are over these.
        error: Sum of e.
        errorsq: Sum of e^2.
        reference: Sum of x.
        referencesq: Sum of x^2.
        error_reference: Sum of e x.
        largest_error: Largest magnitude of e. 0 without pairs.
        made_nonfinite: Number of values that are NaN or infinite where the reference is finite.
        reference_nonfinite: Number of values whose reference is NaN or infinite.

    >>> halved = ErrorSums(compared=2, error=-1.5, errorsq=1.25, reference=3.0, referencesq=5.0, error_reference=-2.5)
    >>> halved.relative_error, halved.along_reference, round(halved.cosine, 12)
    (0.5, -0.5, 1.0)
    """

    compared: float = 0.0
    error: float = 0.0
    errorsq: float = 0.0
    reference: float = 0.0
    referencesq: float = 0.0
    error_reference: float = 0.0
    largest_error: float = 0.0
    made_nonfinite: float = 0.0
    reference_nonfinite: float = 0.0

    @classmethod
    def from_row(cls, row: ArrayLike) -> "ErrorSums":
        """Return the sums in a row of errors (`plimsoll.row_layout`)."""
        numbers: list[float] = np.asarray(row, dtype=np.float64)[: row_layout.REFERENCE_NONFINITE + 1].tolist()
        return cls(**dict(zip(NAMES, numbers, strict=True)))

    def __add__(self, other: "ErrorSums") -> "ErrorSums":
        summed = {name: getattr(self, name) + getattr(other, name) for name in NAMES}
        return ErrorSums(**{**summed, "largest_error": max(self.largest_error, other.largest_error)})

    def scaled(self, factor: float) -> "ErrorSums":
        """Return the sums of values and reference times a positive factor."""
        return ErrorSums(**{name: getattr(self, name) * factor ** POWERS.get(name, 0) for name in NAMES})

    @property
    def relative_error(self) -> float:
        """Norm of the error over that of the reference.

        0 without an error, infinite for a reference of zero.
        """
        return float(relative_error(self.errorsq, self.referencesq))

    @property
    def snr_db(self) -> float:
        """Power of the reference over that of the error in dB. Infinite without an error."""
        return float(snr_db(self.errorsq, self.referencesq))

    @property
    def cosine(self) -> float:
        """Cosine of the angle between values and reference. NaN if one is zero."""
        return float(cosine(self.errorsq, self.referencesq, self.error_reference))

    @property
    def along_reference(self) -> float:
        """Relative error along the reference, -0.1 for values a tenth too small.

        NaN for a reference of zero.
        """
        return float(self._directions[0])

    @property
    def constant(self) -> float:
        """Relative error that is equal in all values, without `along_reference`.

        NaN for a reference of zero.
        """
        return float(self._directions[1])

    @property
    def _directions(self) -> Floats:
        return directions(self.compared, self.error, self.reference, self.referencesq, self.error_reference)

    def to_dict(self) -> dict[str, float]:
        """Return the sums by name, as JSON can hold them."""
        return {name: getattr(self, name) for name in NAMES}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ErrorSums":
        """Return the sums that `to_dict` returned.

        Raises:
            ArgumentError: A name is missing or unknown, or a value is no number.
        """
        if set(data) != set(NAMES) or not all(isinstance(value, int | float) for value in data.values()):
            raise ArgumentError(
                f"ErrorSums.from_dict: expected numbers named {', '.join(NAMES)}; got {dict(data)!r:.200}. Pass a "
                "result of to_dict."
            )
        return cls(**data)


NAMES = tuple(spec.name for spec in fields(ErrorSums))


def relative_error(errorsq: ArrayLike, referencesq: ArrayLike) -> Floats:
    """Return norms of errors over those of references, elementwise. 0 for 0 / 0."""
    error, reference = np.asarray(errorsq, np.float64), np.asarray(referencesq, np.float64)
    with np.errstate(all="ignore"):
        return np.where(error == 0, 0.0, np.sqrt(error / reference))


def snr_db(errorsq: ArrayLike, referencesq: ArrayLike) -> Floats:
    """Return the power of references over that of errors in dB, elementwise."""
    with np.errstate(all="ignore"):
        return -20 * np.log10(relative_error(errorsq, referencesq))


def cosine(errorsq: ArrayLike, referencesq: ArrayLike, error_reference: ArrayLike) -> Floats:
    """Return cosines between values and references elementwise, NaN if one is zero."""
    error, reference, product = (np.asarray(x, np.float64) for x in (errorsq, referencesq, error_reference))
    values = reference + 2 * product + error
    with np.errstate(all="ignore"):
        quotient = (reference + product) / np.sqrt(reference * values)
    return np.where((reference > 0) & (values > 0), np.clip(quotient, -1, 1), np.nan)


def directions(
    compared: ArrayLike, error: ArrayLike, reference: ArrayLike, referencesq: ArrayLike, error_reference: ArrayLike
) -> Floats:
    """Return the components of errors in two directions, relative to the reference.

    All draws of a tensor have these directions: x, and the part of (1, 1, ...) that is orthogonal to x. The sum of the
    components' squares is at most the square of the relative error. The result is float64[..., 2], along the reference
    and constant, NaN for references of zero.
    """
    count, e, x = (np.asarray(sums, np.float64) for sums in (compared, error, reference))
    xx, ex = np.asarray(referencesq, np.float64), np.asarray(error_reference, np.float64)
    with np.errstate(all="ignore"):
        along = ex / xx
        apart = count - x * x / xx  # squared norm of the second direction
        # If all values of a reference are equal, both directions are one, and the second is a rounding error.
        constant = np.where(apart > 1e-9 * count, (e - along * x) / np.sqrt(apart * xx), 0.0)
    known = (xx > 0) & np.isfinite(along)
    return np.stack([np.where(known, along, np.nan), np.where(known, constant, np.nan)], axis=-1)


# -- bias and noise of several draws -----------------------------------------------------------------------------------

# A draw is one measurement of the same tensor: another batch, another rounding seed, another step. The error of a draw
# is a vector e of coordinates, relative to the norm of its reference. Draws are independent, so for two of them the
# mean of <e, e'> is the squared norm of E[e], the **bias**, which is constant over draws. The mean over all pairs is an
# unbiased estimate of it (a U-statistic). The square of the mean error would count 1/n of the noise as bias. The rest
# of the squared error is **noise**: relative_error^2 = bias^2 + noise^2.

CONFIDENCE = 0.95
UNKNOWN = Interval(low=0.0, high=math.inf, estimate=math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasAndNoise:
    """An error split into bias and noise, relative to the norm of the reference."""

    draws: int
    relative_error: float  # root mean square over draws
    bias: Interval  # The part that is constant over draws. With one or two draws its interval is from 0 to the error.
    noise: float

    @property
    def is_bias(self) -> bool:
        """True if bias is certain, and a larger part of the squared error than noise."""
        return self.bias.low > 0 and self.bias.estimate > self.noise


# The interval is the jackknife's over draws, with Student's t. Near a bias of zero the jackknife overstates the spread
# of such an estimate by a factor of up to sqrt(2), so its interval is wider than necessary there.
def split(coordinates: NDArray[np.float64], energies: NDArray[np.float64], *, sketched: int = 0) -> BiasAndNoise:
    """Return the bias and the noise of several draws.

    `coordinates`, float64[draws, n], are each draw's relative error in coordinates that mean the same in all draws.
    `energies`, float64[draws], are the squared relative errors, at least the sums of their coordinates' squares. The
    excess counts as noise. `sketched` is the length of a random sketch among the coordinates, 0 for none: its own error
    widens the interval.
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
