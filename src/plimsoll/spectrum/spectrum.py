"""`Spectrum`: number of values in each binade, extremes, and sums of powers.

A spectrum is plain data (integers, floats and one read-only array), independent of its tensor. Merging two adds their
counts and sums and joins their extremes, in any order and from any rank or step. Counts and extremes merge exactly. The
four sums are float64 and merge up to its rounding.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll import display, row_layout
from plimsoll.errors import ArgumentError
from plimsoll.formats import Format
from plimsoll.spectrum import record, serialization
from plimsoll.spectrum.fit import block_fit, element_fit
from plimsoll.spectrum.record import BlockRecord, SpectrumRecord, read_only
from plimsoll.spectrum.source_format import Grid, Source

_NO_BINADES = read_only(np.zeros(row_layout.BINADES, dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Spectrum(SpectrumRecord):
    """Exact counts of the values of a tensor, or of several together.

    `plimsoll.measure`, `Spectrum.empty`, `from_row` and `from_dict` make one. ``+`` and ``sum`` merge several. `zeros`,
    `nans`, `pos_infs`, `neg_infs` and the sum of `binades` add up to `count`. Extremes are exact and never -0. Sums are
    float64, and 0 without finite values. For float64 tensors they can be Inf, and `sum` can be NaN.

    Attributes:
        count: Number of values.
        zeros: Number of zeros of either sign.
        nans: Number of NaN.
        pos_infs: Number of +Inf.
        neg_infs: Number of -Inf.
        binades: int64[277], read-only: finite nonzero values by floor(log2(|x|)), with index 0 for 2^-149. Float64
            values beyond that range are in the first and the last binade.
        min: Smallest finite value, NaN without finite values.
        max: Largest finite value, NaN without finite values.
        absmin: Smallest magnitude of the finite nonzero values, NaN if there is none.
        absmax: Largest magnitude of the finite values, NaN if there is none.
        sum: Sum of the finite values.
        abssum: Sum of their magnitudes.
        sumsq: Sum of their squares.
        sumfourth: Sum of their fourth powers. NaN in spectra of version 0.1, which did not record it.
        source: Narrowest format that the values passed through. None: unknown.
        blocks: Block record. None if none was measured, after a merge of two block lengths, and without values.
        grid: Grid of the nonzero finite values. None: unknown, or there are none.

    >>> one = Spectrum.from_dict({**Spectrum.empty().to_dict(), "count": 1, "zeros": 1, "min": 0.0, "max": 0.0,
    ...     "absmax": 0.0})
    >>> sum([one, one]).zeros
    2
    """

    @classmethod
    def empty(cls) -> "Spectrum":
        """Return the spectrum of no values, the identity of merging."""
        return _EMPTY

    @classmethod
    def from_row(
        cls, row: NDArray[np.int64], source: Source | None = None, block: int | None = None, grid: Grid | None = None
    ) -> "Spectrum":
        """Return the spectrum in one row of a bank (`plimsoll.row_layout`).

        Args:
            row: The row, on the CPU. It is copied.
            source: Narrowest format that the values passed through. Default: None, unknown.
            block: Block length of a wide row. Default: None, the row is narrow.
            grid: Grid of the values. It is dropped if the extremes are not on it. Default: that of the source.

        Raises:
            ArgumentError: The row has another shape, or its counts contradict each other.
        """
        width = row_layout.width(block or 0)
        if row.dtype != np.int64 or row.shape != (width,):
            raise ArgumentError(
                f"Spectrum.from_row: expected int64 words of shape ({width},) for block={block}; got {row.dtype} of "
                f"shape {row.shape}. Give the block length that the bank was made with."
            )
        words = np.ascontiguousarray(row)
        spectrum = _decode(words, source, block or 0)
        serialization.check(spectrum, "Spectrum.from_row")
        if grid is None and source is not None:
            grid = source.grid
        grid = _plausible(grid, spectrum)
        return spectrum if grid is None else replace(spectrum, grid=grid)

    @property
    def zero_fraction(self) -> float:
        """Fraction of zeros among all values. NaN for none."""
        return self.zeros / self.count if self.count else math.nan

    @property
    def mean(self) -> float:
        """Mean of the finite values. NaN for none."""
        return self.sum / self.finite if self.finite else math.nan

    @property
    def absmean(self) -> float:
        """Mean magnitude of the finite values. NaN for none."""
        return self.abssum / self.finite if self.finite else math.nan

    @property
    def rms(self) -> float:
        """Root of the mean square of the finite values. NaN for none."""
        return math.sqrt(self.sumsq / self.finite) if self.finite else math.nan

    @property
    def norm(self) -> float:
        """Euclidean norm of the finite values. 0 for none."""
        return math.sqrt(self.sumsq)

    @property
    def kurtosis(self) -> float:
        """Mean fourth power of the finite values over their squared mean square.

        It is about zero, not about the mean, and does not depend on a scale. 1 for values of one magnitude, 3 for
        normal ones, and about n if one value of n is far larger than the others. NaN without nonzero finite values,
        without recorded fourth powers, and if their sum leaves the range of float64 (values of about 1e77 and 1e-77).
        """
        if not sys.float_info.min <= self.sumfourth < math.inf:
            return math.nan
        # In two divisions, since the square of `sumsq` could leave the range of float64.
        return max(self.sumfourth / self.sumsq / (self.sumsq / self.finite), 1.0)

    @property
    def std(self) -> float:
        """Standard deviation of the finite values (divided by n). NaN for none.

        It comes from the sums, so its error is about 1e-8 of a mean that is far larger. 0 for equal values.
        """
        if not self.finite:
            return math.nan
        if self.min == self.max:  # of huge values the sums below leave the range of float64
            return 0.0
        variance = max(self.sumsq / self.finite - self.mean * self.mean, 0.0)
        # No deviation exceeds half the range (Popoviciu). This also removes the rounding error of equal values.
        return min(math.sqrt(variance), self.max / 2 - self.min / 2)

    def fit(self, fmt: object, shift: int = 0) -> element_fit.Fit:
        """Return losses and noise of the values times ``2**shift`` in a format.

        Rounding is to nearest even.

        Args:
            fmt: Any format for values.
            shift: Power of two by which values are multiplied before, -2200 to 2200. Default: 0.

        Raises:
            ArgumentError: The shift is out of range.
            FormatError: The format does not exist, or is one for scales only.
            NotRecordedError: There is no record of the block length of a block format.

        >>> Spectrum.empty().fit("fp16").lost
        Interval(low=0.0, high=0.0, estimate=0.0)
        """
        resolved, shift = element_fit.resolve(fmt, "Spectrum.fit"), element_fit.checked_shift("Spectrum.fit", shift)
        if isinstance(resolved, Format):
            return element_fit.fit_elements(self, resolved, shift)
        return block_fit.fit_blocks(self, resolved, shift)

    def window(self, fmt: object, tolerance: float = 0.01) -> tuple[int, int] | None:
        """Return the lowest and highest shift that fit a format.

        At these, and all shifts between, nothing overflows for certain and less than `tolerance` of the nonzero values
        is lost for certain (`overflow.high` is 0, `lost.high` < `tolerance`).

        Args:
            fmt: An element format.
            tolerance: Fraction of the nonzero values that may be lost, above 0 and at most 1. Default: 0.01.

        Returns:
            None if no shift fits. ``(-SHIFT_LIMIT, SHIFT_LIMIT)`` without nonzero finite values, unless the source may
            have flushed them all.

        Raises:
            ArgumentError: The tolerance is out of range.
            FormatError: The format is no element format for values.
        """
        return element_fit.window(self, fmt, tolerance)

    def best_shift(self, fmt: object, margin_binades: int = 1) -> int | None:
        """Return the highest shift with a margin between absmax and overflow.

        Args:
            fmt: An element format.
            margin_binades: Number of binades to leave free, at least 0. Default: 1.

        Returns:
            0 without nonzero finite values. None if 1 % or more is lost at that shift, by estimate: none fits then.

        Raises:
            ArgumentError: The margin is out of range.
            FormatError: The format is no element format for values.
        """
        return element_fit.best_shift(self, fmt, margin_binades)

    def scaled(self, shift: int) -> "Spectrum":
        """Return the spectrum of the values times ``2**shift``, without a measurement.

        It is exact, except for sums that leave the range of float64. Values that leave the range of binades are counted
        in its first or last one.

        Raises:
            ArgumentError: The shift is out of range, or values beyond the range of binades would return into it.
        """
        return record.scaled(self, element_fit.checked_shift("Spectrum.scaled", shift))

    def plot(self, formats: Sequence[object] | None = None, *, shift: int = 0) -> Any:
        """Return a Plotly figure of the values by power of two, with formats' limits.

        Args:
            formats: Formats whose limits are drawn as lines. Default: the one that the values passed through, or FP16.
            shift: Shift of the lines, as for values times ``2**shift``. Default: 0.

        Raises:
            MissingExtraError: Plotly is not installed.
        """
        return display.function("histogram")(self, formats, shift=shift)

    def to_dict(self) -> dict[str, object]:
        """Return data for JSON, from which `from_dict` makes an equal spectrum.

        Floats are equal bit for bit. Non-finite ones are the strings "nan", "inf" and "-inf". Counts by binade or depth
        are pairs of exponent or depth and count, without empty ones.
        """
        return serialization.to_dict(self)

    @classmethod
    def from_dict(cls, data: object) -> "Spectrum":
        """Return the spectrum of a result of `to_dict`.

        Raises:
            ArgumentError: The data are none, or contradict themselves.
        """
        return serialization.from_dict(data, _EMPTY)

    def __add__(self, other: object) -> "Spectrum":
        if not isinstance(other, Spectrum):
            return NotImplemented
        return record.merged(self, other)

    def __radd__(self, other: object) -> "Spectrum":
        """Return the spectrum itself for 0, with which ``sum`` starts."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __eq__(self, other: object) -> bool:
        """Return whether all fields are equal, sums, source and blocks too. NaN equals NaN."""
        if not isinstance(other, Spectrum):
            return NotImplemented
        return (
            self._counts() == other._counts()
            and self._provenance() == other._provenance()
            and all(
                a == b or (math.isnan(a) and math.isnan(b))
                for a, b in zip(self._floats(), other._floats(), strict=True)
            )
            and np.array_equal(self.binades, other.binades)
        )

    def __hash__(self) -> int:
        return hash((self._counts(), self.binades.tobytes()))

    def __reduce__(self) -> tuple[object, tuple[dict[str, object]]]:
        """Return the pickle by a dictionary, since pickled arrays become writable."""
        return Spectrum.from_dict, (self.to_dict(),)

    def __repr__(self) -> str:
        """Return a line with the numbers of values, their range, and the source."""
        parts = [f"{self.count:,} values"]
        if self.nonzero:
            parts.append(f"|x| {_power(self.absmin)} .. {_power(self.absmax)}")
        if self.count:
            parts.append(f"{100 * self.zero_fraction:.3g} % zero")
            parts.append(f"{self.nonfinite:,} nonfinite")
        if self.source is not None:
            scale = "" if self.source.scale == 1 else f" at scale {self.source.scale:g}"
            parts.append(f"from {self.source.format}{scale}")
        return f"<Spectrum: {', '.join(parts)}>"

    def _counts(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in record.COUNTS)

    def _floats(self) -> tuple[float, ...]:
        return tuple(getattr(self, name) for name in (*record.EXTREMES, *record.SUMS))

    def _provenance(self) -> tuple[object, ...]:
        return (self.source, self.blocks, self.grid)


_EMPTY = Spectrum(
    count=0,
    zeros=0,
    nans=0,
    pos_infs=0,
    neg_infs=0,
    binades=_NO_BINADES,
    min=math.nan,
    max=math.nan,
    absmin=math.nan,
    absmax=math.nan,
    sum=0.0,
    abssum=0.0,
    sumsq=0.0,
    sumfourth=0.0,
)


def _decode(row: NDArray[np.int64], source: Source | None, block: int) -> Spectrum:
    count, zeros, nans, pos_infs, neg_infs = (int(word) for word in row[: row_layout.NEG_INFS + 1])
    finite = count - nans - pos_infs - neg_infs
    nearest_bits = np.array([row_layout.ABSMIN_TOP], dtype=np.int64) - row[row_layout.NEAREST]
    positive, negative = (float(x) for x in row[row_layout.POSITIVE : row_layout.NEGATIVE + 1].view(np.float64))
    absmin = float(nearest_bits.view(np.float64)[0]) if row[row_layout.NEAREST] else math.nan
    total, abssum, sumsq, sumfourth = (float(x) for x in row[row_layout.SUMS].view(np.float64))
    return Spectrum(
        count=count,
        zeros=zeros,
        nans=nans,
        pos_infs=pos_infs,
        neg_infs=neg_infs,
        binades=read_only(row[row_layout.HISTOGRAM : row_layout.HISTOGRAM + row_layout.BINADES]),
        min=-negative if negative else 0.0 if zeros else absmin,
        max=positive or (0.0 if zeros else -absmin),
        absmin=absmin,
        absmax=max(positive, negative) if finite else math.nan,
        sum=total,
        abssum=abssum,
        sumsq=sumsq,
        sumfourth=sumfourth,
        source=source,
        blocks=BlockRecord.from_row(row, block) if block and count else None,
    )


def _plausible(grid: Grid | None, spectrum: Spectrum) -> Grid | None:
    """Return the grid, or None if there are no values, or extremes that are not on it."""
    if grid is None or not spectrum.nonzero:
        return None
    extremes = (spectrum.absmin, spectrum.absmax, spectrum.min, spectrum.max)
    return grid if all(grid.holds(value) for value in extremes) else None


def _power(x: float) -> str:
    return f"2^{math.log2(x):.4g} ({x:.4g})"
