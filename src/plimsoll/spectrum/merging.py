"""Sums of two spectra, and spectra of values times a power of two."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from plimsoll import row_layout
from plimsoll.errors import ArgumentError
from plimsoll.spectrum.block_record import BlockRecord, moved, read_only
from plimsoll.spectrum.record import SpectrumRecord
from plimsoll.spectrum.source_format import Grid, Source, narrowest

Record = TypeVar("Record", bound=SpectrumRecord)
LOWEST = math.ldexp(1.0, row_layout.LOWEST_BINADE)
BEYOND = math.ldexp(1.0, row_layout.LOWEST_BINADE + row_layout.BINADES)


def merged(a: Record, b: SpectrumRecord) -> Record:
    """Return the spectrum of the values of both."""
    return replace(
        a,
        count=a.count + b.count,
        zeros=a.zeros + b.zeros,
        nans=a.nans + b.nans,
        pos_infs=a.pos_infs + b.pos_infs,
        neg_infs=a.neg_infs + b.neg_infs,
        binades=read_only(a.binades + b.binades),
        min=_extreme(min, a.min, b.min),
        max=_extreme(max, a.max, b.max),
        absmin=_extreme(min, a.absmin, b.absmin),
        absmax=_extreme(max, a.absmax, b.absmax),
        sum=a.sum + b.sum,
        abssum=a.abssum + b.abssum,
        sumsq=a.sumsq + b.sumsq,
        sumfourth=a.sumfourth + b.sumfourth,
        source=narrowest(a.source, b.source),
        blocks=_merged_blocks(a, b),
        grid=_merged_grids(a, b),
    )


def scaled(s: Record, shift: int) -> Record:
    """Return the spectrum of the values times ``2**shift`` (`Spectrum.scaled`)."""
    _check_scalable(s, shift)
    return replace(
        s,
        binades=moved(s.binades, shift),
        min=times_power(s.min, shift),
        max=times_power(s.max, shift),
        absmin=times_power(s.absmin, shift),
        absmax=times_power(s.absmax, shift),
        sum=times_power(s.sum, shift),
        abssum=times_power(s.abssum, shift),
        sumsq=times_power(s.sumsq, 2 * shift),
        sumfourth=times_power(s.sumfourth, 4 * shift),
        source=s.source and Source(s.source.format, times_power(s.source.scale, -shift)),
        blocks=s.blocks and s.blocks.scaled(shift),
        grid=s.grid and s.grid.shifted(shift),
    )


def _extreme(choose: Callable[[float, float], float], a: float, b: float) -> float:
    """Return the smaller or larger of two extremes. NaN means no value."""
    if math.isnan(a):
        return b
    return a if math.isnan(b) else choose(a, b)


def _merged_blocks(a: SpectrumRecord, b: SpectrumRecord) -> BlockRecord | None:
    """Return the block record of both, or None if one has values and no record."""
    if not a.count or not b.count:
        return a.blocks if a.count else b.blocks
    return None if a.blocks is None or b.blocks is None else a.blocks.merged(b.blocks)


def _merged_grids(a: SpectrumRecord, b: SpectrumRecord) -> Grid | None:
    if not a.nonzero or not b.nonzero:
        return a.grid if a.nonzero else b.grid
    return None if a.grid is None or b.grid is None else a.grid.union(b.grid)


def _check_scalable(s: SpectrumRecord, shift: int) -> None:
    returning = (shift > 0 and s.absmin < LOWEST) or (shift < 0 and s.absmax >= BEYOND)
    if returning:
        raise ArgumentError(
            f"Spectrum.scaled: expected values between 2^-149 and 2^128, whose binades are known one by one; got "
            f"absmin={s.absmin!r}, absmax={s.absmax!r}, shift={shift}. Measure the scaled tensor itself."
        )
    extremes = (s.absmin, s.absmax) if s.nonzero else ()
    if any(times_power(times_power(x, shift), -shift) != x for x in extremes):
        raise ArgumentError(
            f"Spectrum.scaled: expected a shift that keeps absmin={s.absmin!r} and absmax={s.absmax!r} inside "
            f"float64's range; got shift={shift}. Measure the scaled tensor itself."
        )


def times_power(x: float, exponent: int) -> float:
    """Return ``x * 2**exponent``, or Inf beyond the range of float64."""
    try:
        return math.ldexp(x, exponent)
    except OverflowError:
        return math.copysign(math.inf, x)
