"""Counts of values below a threshold, and their rounding noise, from binades."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plimsoll.formats import Format
from plimsoll.spectrum.source_format import Grid

BINADE = 1 << 53
_SMALLEST_TRUSTED_SUMSQ = 1e-290  # below, squares of the values have underflown


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """A number of values: at least `low`, at most `high`, about `estimate`."""

    low: int
    high: int
    estimate: float

    @classmethod
    def exactly(cls, number: int) -> "Tally":
        """Return a number that is known exactly."""
        return cls(low=number, high=number, estimate=float(number))

    @classmethod
    def within(cls, low: int, high: int, estimate: float) -> "Tally":
        """Return a number between bounds, with the estimate clipped to them."""
        return cls(low=low, high=high, estimate=min(max(estimate, float(low)), float(high)))

    def out_of(self, total: int) -> "Tally":
        """Return the number of the other values of `total`."""
        return Tally(low=total - self.high, high=total - self.low, estimate=total - self.estimate)

    def widened(self, total: int, *, fewer: int = 0, more: int = 0) -> "Tally":
        """Return the number with bounds for so many fewer and so many more."""
        return Tally(low=max(self.low - fewer, 0), high=min(self.high + more, total), estimate=self.estimate)

    def minus(self, other: "Tally", total: int) -> "Tally":
        """Return the number in this tally and not in the other, which is a part of it."""
        low, high = max(self.low - other.high, 0), min(max(self.high - other.low, 0), total)
        return Tally.within(low, high, self.estimate - other.estimate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """Nonzero magnitudes by binade."""

    counts: NDArray[np.int64]  # Number of values by binade. The end binades include all values beyond them.
    lowest: int  # exponent of the first binade
    first: int  # ordinal of the smallest value, or a bound of it
    last: int  # ordinal of the largest value, or a bound of it
    attained: bool  # whether `first` and `last` are values
    grid: Grid | None  # grid of the values, None if unknown
    total: int  # number of values
    sumsq: float | None  # sum of their squares, None if unknown

    def below(self, point: int, *, inclusive: bool) -> Tally:
        """Return the number of magnitudes below an ordinal, or at it if `inclusive`.

        For the estimate, the values of the point's binade are spread evenly over the part of it from `first` to `last`,
        on a grid over its numbers. With a grid the result may be exact.
        """
        limit = point + inclusive
        if not self.total or self.last < limit:
            return Tally.exactly(self.total)
        if self.first >= limit:
            return Tally.exactly(0)
        index = min(max(limit // BINADE - self.lowest, 0), len(self.counts) - 1)
        under, inside = int(self.counts[:index].sum()), int(self.counts[index])
        start, stop = self._extent(index)
        if not inside or limit <= start:
            return Tally.exactly(under)
        if limit > stop:
            return Tally.exactly(under + inside)
        fraction = self._fraction(start, stop, point, limit)
        if fraction in (0, 1) and self._grid_in(start, stop):
            return Tally.exactly(under + int(fraction) * inside)
        low = under + int(self.attained and start == self.first)
        high = under + inside - int(self.attained and stop == self.last)
        return Tally.within(low, high, under + fraction * inside)

    def _extent(self, index: int) -> tuple[int, int]:
        """Return the first and last possible ordinal of values in one binade."""
        start = (self.lowest + index) * BINADE
        stop = start + BINADE - 1
        return (
            self.first if index == 0 else max(start, self.first),
            self.last if index == len(self.counts) - 1 else min(stop, self.last),
        )

    def _grid_in(self, start: int, stop: int) -> Grid | None:
        binade = start // BINADE
        usable = self.grid is not None and stop // BINADE == binade and self.grid.spacing_exponent(binade) <= binade
        return self.grid if usable else None

    def _fraction(self, start: int, stop: int, point: int, limit: int) -> float:
        """Return the expected part below `limit` of values spread from start to stop."""
        grid, binade = self._grid_in(start, stop), start // BINADE
        if grid is not None:
            step = BINADE >> (binade - grid.spacing_exponent(binade))
            before = -(-start // step)  # ordinals of a binade are multiples of the step, since its start is one
            return (-(-limit // step) - before) / (stop // step + 1 - before)
        if stop // BINADE == binade:
            return (point - start) / (stop - start)
        unit = stop // BINADE
        span = magnitude(stop, unit) - magnitude(start, unit)
        return min(max((magnitude(point, unit) - magnitude(start, unit)) / span, 0.0), 1.0)


# Magnitudes are compared as whole numbers, *ordinals*: the exponent of the binade times 2^53 plus the position in the
# binade in units of its 2^-53. So every float64, and every half-way point of a format with 52 mantissa bits, is an
# exact ordinal, a multiplication by a power of two is an addition, and nothing overflows.
def ordinal(x: float) -> int:
    """Return the ordinal of a positive float.

    >>> ordinal(1.0), ordinal(1.5) == BINADE // 2, ordinal(2.0) == BINADE
    (0, True, True)
    """
    fraction, exponent = math.frexp(x)
    return (exponent - 2) * BINADE + int(fraction * 2 * BINADE)


def magnitude(position: int, unit: int) -> float:
    """Return the value of an ordinal in units of ``2**unit``, 0 if float64 underflows."""
    exponent, rest = divmod(position, BINADE)
    return math.ldexp(1 + rest / BINADE, exponent - unit)


def lost_point(fmt: Format) -> int:
    """Return the ordinal of half the smallest value, the largest that rounds to zero."""
    # The tie goes to zero, whose code is even.
    return (fmt.quantum_exponent - 1) * BINADE


def normal_point(fmt: Format) -> int:
    """Return the ordinal of the tie between subnormal and normal values."""
    # The tie goes up to the smallest normal value: only values below it are subnormal.
    return fmt.min_exponent * BINADE - (BINADE >> fmt.mantissa_bits)


def overflow_point(fmt: Format) -> int:
    """Return the ordinal of the tie between the largest value and the next one."""
    # In integers: that of FP64 is no float64.
    return ordinal(fmt.max) + (BINADE >> (fmt.mantissa_bits + 1))


def snr_db(values: Population, fmt: Format, shift: int) -> float:
    """Return the expected signal over rounding noise in dB, Inf if nothing is rounded.

    A value that the format represents has an error spread evenly over its spacing, a lost one its own size, an
    overflowing one its distance to the largest value, since it saturates.
    """
    occupied = np.flatnonzero(values.counts)
    if not len(occupied):
        return math.inf
    binades, counts = occupied + values.lowest, values.counts[occupied].astype(np.float64)
    unit = int(binades[-1])
    energies = counts * mean_squares(binades, values.grid, unit)
    signal = _signal(values, energies, unit)

    overflow = overflow_point(fmt) - shift * BINADE
    over = values.below(overflow, inclusive=not fmt.overflow_at_threshold).out_of(values.total)
    top = overflow // BINADE
    spilled = np.where(binades > top, counts, 0.0)
    spilled[binades == top] = max(over.estimate - float(spilled.sum()), 0.0)
    lost = binades < fmt.quantum_exponent - 1 - shift

    noise = min(float(energies[lost].sum()), signal)
    noise += float(((counts - spilled) * rounding_error(binades, values.grid, fmt, shift, unit))[~lost].sum())
    # An even spread makes the top binades heavier than the sum of squares. The excess is in proportion to the energy.
    surplus = min(signal / float(energies.sum()), 1.0)
    for index in np.flatnonzero(spilled):
        error = _saturation(int(binades[index]), overflow, values, fmt, shift, unit)
        noise += surplus * float(spilled[index]) * error
    return 10 * math.log10(signal / noise) if noise > 0 else math.inf


def _signal(values: Population, energies: NDArray[np.float64], unit: int) -> float:
    if values.sumsq is not None and _SMALLEST_TRUSTED_SUMSQ < values.sumsq < math.inf:
        return math.ldexp(values.sumsq, -2 * unit)
    return float(energies.sum())


def mean_squares(binades: NDArray[np.int64], grid: Grid | None, unit: int) -> NDArray[np.float64]:
    """Return the mean square of each binade's values in units of ``4**unit``."""
    squares = np.ldexp(1.0, 2 * (binades - unit))
    if grid is None:
        # 7/3 of the square of the binade's start if values are spread evenly.
        return squares * (7 / 3)
    spacing = np.maximum(binades - grid.mantissa_bits, grid.quantum_exponent)
    places = np.ldexp(1.0, np.maximum(binades - spacing, 0))
    return squares * (1 + (places - 1) / places + (places - 1) * (2 * places - 1) / (6 * places * places))


def rounding_error(
    binades: NDArray[np.int64], grid: Grid | None, fmt: Format, shift: int, unit: int
) -> NDArray[np.float64]:
    """Return the mean square error of rounding to a spacing, in units of ``4**unit``."""
    # The error is q^2/12 for an even spread, (q^2 + 2 g^2)/12 for values on a grid of spacing g < q, and 0 if g >= q.
    # The values of the binade right below the smallest one, [q/2, q), all round up to it: on a grid, g^2 (M+1)(2M+1)/6
    # for M places.
    spacing = np.maximum(binades - fmt.mantissa_bits, fmt.quantum_exponent - shift)
    spacing = np.minimum(spacing, binades + 1)  # only lost values have a wider one
    even = np.ldexp(1.0, 2 * (spacing - unit)) / 12
    if grid is None:
        return even
    fine = np.maximum(binades - grid.mantissa_bits, grid.quantum_exponent)
    fine_square = np.ldexp(1.0, 2 * (np.minimum(fine, spacing) - unit))
    places = np.ldexp(1.0, np.maximum(spacing - 1 - fine, 0))
    upward = fine_square * (places + 1) * (2 * places + 1) / 6
    error = np.where(spacing > binades, upward, even + fine_square / 6)
    return np.where(fine >= spacing, 0.0, error)


def _saturation(binade: int, overflow: int, values: Population, fmt: Format, shift: int, unit: int) -> float:
    """Return the mean square distance of a binade's overflowing values to the largest.

    It is in units of ``4**unit``.
    """
    low = max(binade * BINADE, overflow)
    high = max(min((binade + 1) * BINADE, values.last), low)
    largest = math.ldexp(fmt.max, -shift - unit)
    near, far = magnitude(low, unit) - largest, magnitude(high, unit) - largest
    return (near * near + near * far + far * far) / 3
