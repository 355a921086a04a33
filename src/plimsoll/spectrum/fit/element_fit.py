"""What an element format would make of a spectrum: how much is lost, subnormal, overflowing, and how noisy the rest is.

A threshold of the format cuts through one binade at most; all others are decided by their counts. In that one the
spectrum's extremes and the source's grid may decide, and if not, the answer is an interval with an estimate.
"""

import bisect
import math
from dataclasses import dataclass

from plimsoll import row_layout
from plimsoll.errors import ArgumentError, FormatError
from plimsoll.formats import BlockFormat, Format, get
from plimsoll.notebook_repr import NotebookRepr
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
from plimsoll.spectrum.intervals import Interval
from plimsoll.spectrum.record import SpectrumRecord
from plimsoll.text import percent

SHIFT_LIMIT = 276  # what `window` answers where every shift serves: from one end of the binades to the other
_LARGEST_SHIFT = 2200  # beyond float64's whole range, subnormals included
_BEST_SHIFT_TOLERANCE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit(NotebookRepr):
    """How a format would hold the values times ``2**shift``, as fractions of the nonzero finite ones.

    - `lost`: they round to zero. Where the source may have lost values before (`Source.censors`), zeros are counted in
      the upper bound, as a fraction of the nonzero finite values and the zeros.
    - `subnormal`: they are held with less than full precision, and not lost.
    - `overflow`: their nearest-even result would exceed the format's largest value. In a block format: they saturate,
      or share a block with a NaN or an Inf and become NaN.
    - `snr_db`: expected signal-to-noise ratio, overflow taken to saturate; Inf without noise, and where there is
      nothing to lose.
    """

    format: str
    shift: int
    lost: Interval
    subnormal: Interval
    overflow: Interval
    snr_db: float

    def __str__(self) -> str:
        """One line: what is lost, subnormal and overflowing, and the noise.

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


def resolve(fmt: object, shift: int, operation: str) -> Format | BlockFormat:
    """The format and a shift that make sense, or an error in the name of `operation`."""
    resolved = get(fmt)
    if isinstance(resolved, Format) and not resolved.signed:
        raise FormatError(
            f"{operation}: expected a format for values; got {resolved.name}, which has no sign and no zero: it holds "
            "the scales of block formats. Ask about the block format."
        )
    if isinstance(shift, bool) or not isinstance(shift, int) or abs(shift) > _LARGEST_SHIFT:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"{operation}: expected shift to be an integer from -{_LARGEST_SHIFT} to {_LARGEST_SHIFT}; got "
            f"shift={shift!r}. Shift k means that values are multiplied by 2**k."
        )
    return resolved


def fit_elements(s: SpectrumRecord, fmt: Format, shift: int) -> Fit:
    """The fit of an element format (`Spectrum.fit`)."""
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
    """The shifts that serve (`Spectrum.window`)."""
    element = _element(fmt, "Spectrum.window")
    if not 0 < tolerance <= 1:
        raise ArgumentError(
            f"Spectrum.window: expected a tolerance above 0 and at most 1; got tolerance={tolerance!r}. "
            "It is the fraction of the nonzero values that may be lost."
        )
    if not s.nonzero:
        return (-SHIFT_LIMIT, SHIFT_LIMIT) if nothing_to_lose(s, element.name, 0).lost.high < tolerance else None
    values = population(s)

    def serves(shift: int) -> bool:
        return lost_interval(s, _lost(values, element, shift)).high < tolerance

    # What is lost never grows with the shift, so bisection finds the lowest one; all is lost at the range's start.
    highest = _highest_shift(values.last, element)
    candidates = range((lost_point(element) - values.last) // BINADE, highest + 1)
    found = bisect.bisect_left(candidates, True, key=serves)
    return (candidates[found], highest) if found < len(candidates) else None


def best_shift(s: SpectrumRecord, fmt: object, margin_binades: int) -> int | None:
    """The highest shift with a margin (`Spectrum.best_shift`)."""
    element = _element(fmt, "Spectrum.best_shift")
    if isinstance(margin_binades, bool) or not isinstance(margin_binades, int) or margin_binades < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"Spectrum.best_shift: expected margin_binades to be an integer of 0 or more; got {margin_binades!r}. "
            "It is how many binades stay free between absmax and overflow."
        )
    if not s.nonzero:
        return 0
    values = population(s)
    shift = _highest_shift(values.last, element) - margin_binades
    lost = lost_interval(s, _lost(values, element, shift)).estimate
    return shift if lost < _BEST_SHIFT_TOLERANCE else None


def population(s: SpectrumRecord) -> Population:
    """The nonzero finite values of a spectrum that has some."""
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
    """How many values are lost, subnormal, and overflowing."""
    lost = _lost(values, fmt, shift)
    below_normal = values.below(normal_point(fmt) - shift * BINADE, inclusive=False)
    point = overflow_point(fmt) - shift * BINADE
    held = values.below(point, inclusive=not fmt.overflow_at_threshold)
    subnormal = below_normal.minus(lost, values.total) if fmt.has_subnormals else Tally.exactly(0)
    return lost, subnormal, held.out_of(values.total)


def interval(tally: Tally, total: int) -> Interval:
    """A number of values as a fraction of them all."""
    return Interval(low=tally.low / total, high=tally.high / total, estimate=tally.estimate / total)


def lost_interval(s: SpectrumRecord, lost: Tally) -> Interval:
    """The lost fraction; the zeros of a censored spectrum may have been values once."""
    known = interval(lost, s.nonzero)
    if s.source is None or not s.source.censors:
        return known
    high = (lost.high + s.zeros) / (s.nonzero + s.zeros)
    return Interval(low=known.low, high=high, estimate=known.estimate)


def nothing_to_lose(s: SpectrumRecord, name: str, shift: int) -> Fit:
    """The fit of a spectrum without nonzero finite values: nothing is lost, unless its source lost all there was."""
    lost = Interval(low=0.0, high=1.0, estimate=0.0) if s.zeros and s.source and s.source.censors else NOTHING
    return Fit(format=name, shift=shift, lost=lost, subnormal=NOTHING, overflow=NOTHING, snr_db=math.inf)


def _element(fmt: object, operation: str) -> Format:
    resolved = resolve(fmt, 0, operation)
    if isinstance(resolved, BlockFormat):
        raise FormatError(
            f"{operation}: expected an element format; got the block format {resolved.name}, which scales each block "
            "by itself, so that a shift changes next to nothing. Ask Spectrum.fit what it loses."
        )
    return resolved


def _lost(values: Population, fmt: Format, shift: int) -> Tally:
    return values.below(lost_point(fmt) - shift * BINADE, inclusive=True)


def _highest_shift(absmax: int, fmt: Format) -> int:
    """The highest shift at which the value of that ordinal does not overflow."""
    beyond = overflow_point(fmt) + (not fmt.overflow_at_threshold)
    return (beyond - 1 - absmax) // BINADE
