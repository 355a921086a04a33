"""The one measurement: how many values lie in each binade, and a few moments beside.

A spectrum is plain data (integers, floats and one read-only array), independent of the tensor it came from. Merging
two adds their counts and sums and joins their extremes, so it does not matter in which order, on which rank or at which
step the parts were measured. Counts and extremes merge exactly; the four sums are float64 and merge to its rounding.
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
from plimsoll.spectrum import merging, serialization
from plimsoll.spectrum.block_record import BlockRecord, read_only
from plimsoll.spectrum.fit import block_fit, element_fit
from plimsoll.spectrum.record import SpectrumRecord
from plimsoll.spectrum.source_format import Grid, Source

_NO_BINADES = read_only(np.zeros(row_layout.BINADES, dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Spectrum(SpectrumRecord):
    """What a tensor, or any number of them together, holds.

    - `count` values in all: `zeros` (either sign), `nans`, `pos_infs`, `neg_infs`, and `binades`, int64[277],
      read-only: finite nonzero values by floor(log2(|x|)), index 0 being 2^-149. They add up to `count`. Float64 values
      below or above that range are in the first and the last binade.
    - `min`, `max`, `absmin` (of the nonzero values) and `absmax`, of the finite values. Exact; never -0. NaN where
      there is none to speak of: all four without finite values, `absmin` also where all of them are zero.
    - `sum`, `abssum`, `sumsq`, `sumfourth`, over the finite values (of them, their magnitudes, squares and fourth
      powers), in float64; 0 for none. Float64 tensors can take them to Inf. `sumfourth` is NaN where it was not
      recorded, in spectra of older versions and in sums with these.
    - `source`: the narrowest format the values passed through, None if unknown. `grid`: the numbers they can be, None
      if unknown or if there are no nonzero finite ones.
    - `blocks`: the block record; None where none was measured, where two block lengths were merged, and for no values.

    Made by `plimsoll.measure`, `Spectrum.empty`, `from_row` and `from_dict`; merged with ``+`` and ``sum``.

    >>> one = Spectrum.from_dict({**Spectrum.empty().to_dict(), "count": 1, "zeros": 1, "min": 0.0, "max": 0.0,
    ...     "absmax": 0.0})
    >>> sum([one, one]).zeros
    2
    """

    @classmethod
    def empty(cls) -> "Spectrum":
        """The spectrum of no values: the identity of merging."""
        return _EMPTY

    @classmethod
    def from_row(
        cls, row: NDArray[np.int64], source: Source | None = None, block: int | None = None, grid: Grid | None = None
    ) -> "Spectrum":
        """The spectrum in one row of a bank (`plimsoll.row_layout`), which is on the CPU and is copied.

        `block` is the block length that a wide row was measured with; None or 0 for a narrow row. `grid` is the numbers
        that the values are known to be, the source's by default. It is dropped where the extremes are none of them.
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
        """Zeros among all values; NaN for none."""
        return self.zeros / self.count if self.count else math.nan

    @property
    def mean(self) -> float:
        """Mean of the finite values; NaN for none."""
        return self.sum / self.finite if self.finite else math.nan

    @property
    def absmean(self) -> float:
        """Mean magnitude of the finite values; NaN for none."""
        return self.abssum / self.finite if self.finite else math.nan

    @property
    def rms(self) -> float:
        """Root of the mean square of the finite values; NaN for none."""
        return math.sqrt(self.sumsq / self.finite) if self.finite else math.nan

    @property
    def norm(self) -> float:
        """Euclidean norm of the finite values; 0 for none."""
        return math.sqrt(self.sumsq)

    @property
    def kurtosis(self) -> float:
        """Mean fourth power of the finite values over their squared mean square; NaN where it is not known.

        About zero, not about the mean. 1 for values of one magnitude, 3 for normal ones, and about n where one value of
        n exceeds all others by far. It does not depend on a scale. NaN without nonzero finite values, where fourth
        powers were not recorded, and where their sum leaves float64's range (values of about 1e77 and 1e-77).
        """
        if not sys.float_info.min <= self.sumfourth < math.inf:
            return math.nan
        # The ratio of two means of squares, since the square of one could leave the range.
        return max(self.sumfourth / self.sumsq / (self.sumsq / self.finite), 1.0)

    @property
    def std(self) -> float:
        """Standard deviation of the finite values about their mean (divided by n); NaN for none.

        From the sums, so its error is about 1e-8 of the mean where the mean is far larger; 0 for equal values.
        """
        if not self.finite:
            return math.nan
        variance = max(self.sumsq / self.finite - self.mean * self.mean, 0.0)
        # No deviation exceeds half the range (Popoviciu); this also takes the rounding off equal values.
        return min(math.sqrt(variance), self.max / 2 - self.min / 2)

    def fit(self, fmt: object, shift: int = 0) -> element_fit.Fit:
        """What a format would make of the values times ``2**shift``, rounding to nearest even.

        Raises `NotRecordedError` for a block format without a record of that block length, `FormatError` for a format
        that holds scales only.

        >>> Spectrum.empty().fit("fp16").lost
        Interval(low=0.0, high=0.0, estimate=0.0)
        """
        resolved = element_fit.resolve(fmt, shift, "Spectrum.fit")
        if isinstance(resolved, Format):
            return element_fit.fit_elements(self, resolved, shift)
        return block_fit.fit_blocks(self, resolved, shift)

    def window(self, fmt: object, tolerance: float = 0.01) -> tuple[int, int] | None:
        """The lowest and the highest shift at which nothing overflows and less than `tolerance` is lost, for certain.

        All shifts between serve too. None where none serves. Without nonzero finite values (and with no source that may
        have flushed them all) every shift does, and the
        answer is ``(-SHIFT_LIMIT, SHIFT_LIMIT)``. Uses the upper ends: `overflow.high` is 0, `lost.high` < `tolerance`.
        """
        return element_fit.window(self, fmt, tolerance)

    def best_shift(self, fmt: object, margin_binades: int = 1) -> int | None:
        """The highest shift that leaves `margin_binades` above absmax before overflow; 0 without nonzero finite values.

        None where 1 % or more is lost even there, by estimate: then no shift serves with this margin.
        """
        return element_fit.best_shift(self, fmt, margin_binades)

    def scaled(self, shift: int) -> "Spectrum":
        """The spectrum of the values times ``2**shift``, without measuring them again.

        Exact, but for sums that leave float64's range; what leaves the range of binades is counted in the end it left
        by. Raises `ArgumentError` where values beyond that range would have to come back into it.
        """
        return merging.scaled(self, shift)

    def plot(self, formats: Sequence[object] | None = None, *, shift: int = 0) -> Any:
        """Return a Plotly figure of the values by power of two, with the limits of formats as lines.

        Args:
            formats: Formats whose limits are drawn. Default: the one that the values passed through, or FP16's.
            shift: The lines lie as for values times ``2**shift``. Default: 0.

        Raises:
            MissingExtraError: Plotly is not installed.
        """
        return display.function("histogram")(self, formats, shift=shift)

    def to_dict(self) -> dict[str, object]:
        """The spectrum as JSON-able data that `from_dict` turns into an equal one, floats bit for bit.

        Non-finite floats are the strings "nan", "inf" and "-inf"; counts by binade are pairs of exponent and count,
        without the empty ones; counts by depth, pairs of depth and count.
        """
        return serialization.to_dict(self)

    @classmethod
    def from_dict(cls, data: object) -> "Spectrum":
        """The spectrum that `to_dict` wrote; `ArgumentError` for anything that cannot be one."""
        return serialization.from_dict(data, _EMPTY)

    def __add__(self, other: object) -> "Spectrum":
        if not isinstance(other, Spectrum):
            return NotImplemented
        return merging.merged(self, other)

    def __radd__(self, other: object) -> "Spectrum":
        """Lets ``sum`` start from its 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __eq__(self, other: object) -> bool:
        """Equal in every field; two NaN extremes are equal."""
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
        """Pickles and copies as a dictionary: arrays alone would come back writable."""
        return Spectrum.from_dict, (self.to_dict(),)

    def __repr__(self) -> str:
        """One line: how many values, their range as powers of two and as decimals, zeros and non-finite values."""
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
        return (self.count, self.zeros, self.nans, self.pos_infs, self.neg_infs)

    def _floats(self) -> tuple[float, ...]:
        return (self.min, self.max, self.absmin, self.absmax, self.sum, self.abssum, self.sumsq, self.sumfourth)

    def _provenance(self) -> tuple[object, ...]:
        return (self.source, self.blocks, self.grid)


_EMPTY = Spectrum(
    count=0, zeros=0, nans=0, pos_infs=0, neg_infs=0, binades=_NO_BINADES,
    min=math.nan, max=math.nan, absmin=math.nan, absmax=math.nan, sum=0.0, abssum=0.0, sumsq=0.0,
    sumfourth=0.0,
)  # fmt: skip


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
    """The grid, unless the extremes show that the values are not on it (or there are none to be on it)."""
    if grid is None or not spectrum.nonzero:
        return None
    extremes = (spectrum.absmin, spectrum.absmax, spectrum.min, spectrum.max)
    return grid if all(grid.holds(value) for value in extremes) else None


def _power(x: float) -> str:
    return f"2^{math.log2(x):.4g} ({x:.4g})"
