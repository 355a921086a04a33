"""Losses and noise of a spectrum in an element format.

A threshold of the format cuts through at most one binade, and all others are decided by their counts. In that one the
spectrum's extremes and the grid may decide. Otherwise the result is an interval with an estimate.
"""

import bisect
import math
from dataclasses import dataclass

from plimsoll import checks, row_layout
from plimsoll.errors import FormatError
from plimsoll.formats import BlockFormat, Format, get
from plimsoll.intervals import Interval
from plimsoll.results import NotebookRepr
from plimsoll.spectrum.fit.population import (
    BINADE,
    Population,
    Tally,
    lost_point,
    normal_point,
    ordinal,
    overflow_point,
    snr_db,
)
from plimsoll.spectrum.record import SpectrumRecord
from plimsoll.text import percent

SHIFT_LIMIT = 276  # distance of the end binades, which `window` returns if every shift fits
_LARGEST_SHIFT = 2200  # beyond float64's whole range, subnormals included
_BEST_SHIFT_TOLERANCE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit(NotebookRepr):
    """Losses and noise of values times ``2**shift`` in a format.

    Fractions are of the nonzero finite values.

    Attributes:
        format: Name of the format.
        shift: Power of two by which values are multiplied.
        lost: Fraction that rounds to zero. If the source may have lost values before (`Source.censors`), the upper
            bound includes zeros, as a fraction of the nonzero finite values and the zeros.
        subnormal: Fraction that has less than full precision, and is not lost.
        overflow: Fraction whose nearest-even result would exceed the largest value of the format. In a block format
            they saturate, or become NaN with a NaN or an Inf in their block.
        snr_db: Expected signal-to-noise ratio in dB, where overflow saturates. Inf without noise or without values.
    """

    format: str
    shift: int
    lost: Interval
    subnormal: Interval
    overflow: Interval
    snr_db: float

    def __str__(self) -> str:
        """Return one line with the fractions and the noise.

        >>> interval = Interval(low=0.0, high=0.16, estimate=0.028)
        >>> print(Fit(format="fp16", shift=3, lost=interval, subnormal=NOTHING, overflow=NOTHING, snr_db=31.4))
        fp16 at 2^3: 2.8 % lost (0 % to 16 %), 0 % subnormal, 0 % overflow, SNR 31 dB
        """
        scale = f" at 2^{self.shift}" if self.shift else ""
        parts = (f"{percent(float(value))} {name}{_ends(value)}" for name, value in self._fractions())
        return f"{self.format}{scale}: {', '.join(parts)}, SNR {self.snr_db:.0f} dB"

    def _fractions(self) -> tuple[tuple[str, Interval], ...]:
        return ("lost", self.lost), ("subnormal", self.subnormal), ("overflow", self.overflow)


NOTHING = Interval(low=0.0, high=0.0, estimate=0.0)


def _ends(fraction: Interval) -> str:
    return "" if fraction.exact else f" ({percent(fraction.low)} to {percent(fraction.high)})"


def resolve(fmt: object, operation: str) -> Format | BlockFormat:
    """Return the format of a name, which must be one for values."""
    resolved = get(fmt)
    if isinstance(resolved, Format) and not resolved.signed:
        raise FormatError(
            f"{operation}: expected a format for values; got {resolved.name}, which has no sign and no zero, for the "
            "scales of block formats. Name the block format."
        )
    return resolved


def checked_shift(
    operation: str, shift: object, remedy: str = "Shift k means that values are multiplied by 2**k."
) -> int:
    """Return a shift as an int. One of NumPy would wrap around in what follows."""
    return checks.integer(operation, "shift", shift, low=-_LARGEST_SHIFT, high=_LARGEST_SHIFT, remedy=remedy)


def fit_elements(s: SpectrumRecord, fmt: Format, shift: int) -> Fit:
    """Return the fit of an element format (`Spectrum.fit`)."""
    if not s.nonzero:
        return nothing_to_lose(s, fmt.name, shift)
    values = population(s)
    lost, subnormal, overflow = tallies(values, fmt, shift)
    return Fit(
        format=fmt.name,
        shift=shift,
        lost=lost_interval(s, lost),
        subnormal=interval(subnormal, s.nonzero),
        overflow=interval(overflow, s.nonzero),
        snr_db=snr_db(values, fmt, shift),
    )


def window(s: SpectrumRecord, fmt: object, tolerance: float) -> tuple[int, int] | None:
    """Return the lowest and highest shift that fit (`Spectrum.window`)."""
    element = _element(fmt, "Spectrum.window")
    remedy = "It is the fraction of the nonzero values that may be lost: 0.01, for example."
    checks.number("Spectrum.window", "tolerance", tolerance, above=0, at_most=1, remedy=remedy)
    if not s.nonzero:
        return (-SHIFT_LIMIT, SHIFT_LIMIT) if nothing_to_lose(s, element.name, 0).lost.high < tolerance else None
    values = population(s)

    def fits(shift: int) -> bool:
        return lost_interval(s, _lost(values, element, shift)).high < tolerance

    # The loss never grows with the shift, so bisection finds the lowest one. All is lost at the start of the range.
    highest = _highest_shift(values.last, element)
    candidates = range((lost_point(element) - values.last) // BINADE, highest + 1)
    index = bisect.bisect_left(candidates, True, key=fits)
    return (candidates[index], highest) if index < len(candidates) else None


def best_shift(s: SpectrumRecord, fmt: object, margin_binades: int) -> int | None:
    """Return the highest shift with a margin (`Spectrum.best_shift`)."""
    element = _element(fmt, "Spectrum.best_shift")
    remedy = "It is the number of binades to leave free between absmax and overflow: 1, for example."
    margin_binades = checks.integer("Spectrum.best_shift", "margin_binades", margin_binades, low=0, remedy=remedy)
    if not s.nonzero:
        return 0
    values = population(s)
    shift = _highest_shift(values.last, element) - margin_binades
    lost = lost_interval(s, _lost(values, element, shift)).estimate
    return shift if lost < _BEST_SHIFT_TOLERANCE else None


def population(s: SpectrumRecord) -> Population:
    """Return the nonzero finite values of a spectrum, which must have some."""
    return Population(
        counts=s.binades,
        lowest=row_layout.LOWEST_BINADE,
        first=ordinal(s.absmin),
        last=ordinal(s.absmax),
        attained=True,
        grid=s.grid,
        total=s.nonzero,
        sumsq=s.sumsq,
    )


def tallies(values: Population, fmt: Format, shift: int) -> tuple[Tally, Tally, Tally]:
    """Return the numbers of lost, subnormal and overflowing values."""
    lost = _lost(values, fmt, shift)
    below_normal = values.below(normal_point(fmt) - shift * BINADE, inclusive=False)
    point = overflow_point(fmt) - shift * BINADE
    below = values.below(point, inclusive=not fmt.overflow_at_threshold)
    subnormal = below_normal.minus(lost, values.total) if fmt.has_subnormals else Tally.exactly(0)
    return lost, subnormal, below.out_of(values.total)


def interval(tally: Tally, total: int) -> Interval:
    """Return a number of values as a fraction of all."""
    return Interval(low=tally.low / total, high=tally.high / total, estimate=tally.estimate / total)


def lost_interval(s: SpectrumRecord, lost: Tally) -> Interval:
    """Return the lost fraction, with the zeros of a censored spectrum in its bound."""
    known = interval(lost, s.nonzero)
    if s.source is None or not s.source.censors:
        return known
    high = (lost.high + s.zeros) / (s.nonzero + s.zeros)
    return Interval(low=known.low, high=high, estimate=known.estimate)


def nothing_to_lose(s: SpectrumRecord, name: str, shift: int) -> Fit:
    """Return the fit of a spectrum without nonzero finite values.

    Nothing is lost, unless its source may have lost all values.
    """
    lost = Interval(low=0.0, high=1.0, estimate=0.0) if s.zeros and s.source and s.source.censors else NOTHING
    return Fit(format=name, shift=shift, lost=lost, subnormal=NOTHING, overflow=NOTHING, snr_db=math.inf)


def _element(fmt: object, operation: str) -> Format:
    resolved = resolve(fmt, operation)
    if isinstance(resolved, BlockFormat):
        raise FormatError(
            f"{operation}: expected an element format; got the block format {resolved.name}, which scales each block, "
            "so that a shift has almost no effect. Use Spectrum.fit for its loss."
        )
    return resolved


def _lost(values: Population, fmt: Format, shift: int) -> Tally:
    return values.below(lost_point(fmt) - shift * BINADE, inclusive=True)


def _highest_shift(absmax: int, fmt: Format) -> int:
    """Return the highest shift at which the value of an ordinal does not overflow."""
    beyond = overflow_point(fmt) + (not fmt.overflow_at_threshold)
    return (beyond - 1 - absmax) // BINADE
