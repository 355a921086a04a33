"""Fields of a spectrum, sums of two, and the fields of values times a power of two."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from plimsoll import row_layout
from plimsoll.errors import ArgumentError
from plimsoll.spectrum.source_format import Grid, Source, narrowest

# -- blocks ------------------------------------------------------------------------------------------------------------

Counts = NDArray[np.int64]
BLOCK_COUNTS = ("blocks", "zero_blocks", "nonfinite_blocks", "poisoned")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockRecord:
    """Block statistics of a spectrum, for blocks along the last axis of a tensor.

    Exponents are clipped to the binades that a spectrum counts, so a float64 value beyond them may be deeper than its
    depth, and never less deep.

    Attributes:
        block: Number of values in a block.
        blocks: Number of blocks, including a ragged last one of each row.
        zero_blocks: Number of blocks with zeros only.
        nonfinite_blocks: Number of blocks with a NaN or an Inf.
        poisoned: Number of nonzero finite values in nonfinite blocks. They are in no depth.
        depths: int64[277], read-only: nonzero values of finite blocks by exponent(block's absmax) - exponent(value).
        maxima: int64[277], read-only: finite nonzero blocks by the binade of their absmax. Index 0 is 2^-149.
    """

    block: int
    blocks: int
    zero_blocks: int
    nonfinite_blocks: int
    poisoned: int
    depths: Counts
    maxima: Counts

    @classmethod
    def from_row(cls, row: Counts, block: int) -> "BlockRecord":
        """Return the record in a wide row of a bank."""
        return cls(
            block=block,
            blocks=int(row[row_layout.BLOCKS]),
            zero_blocks=int(row[row_layout.ZERO_BLOCKS]),
            nonfinite_blocks=int(row[row_layout.NONFINITE_BLOCKS]),
            poisoned=int(row[row_layout.POISONED]),
            depths=read_only(row[row_layout.DEPTHS : row_layout.DEPTHS + row_layout.BINADES]),
            maxima=read_only(row[row_layout.MAXIMA : row_layout.MAXIMA + row_layout.BINADES]),
        )

    def merged(self, other: "BlockRecord") -> "BlockRecord | None":
        """Return the record of both, or None if their block lengths differ."""
        if self.block != other.block:
            return None
        return replace(
            self,
            **{name: getattr(self, name) + getattr(other, name) for name in BLOCK_COUNTS},
            depths=read_only(self.depths + other.depths),
            maxima=read_only(self.maxima + other.maxima),
        )

    def scaled(self, shift: int) -> "BlockRecord":
        """Return the record of the values times ``2**shift``, with unchanged depths."""
        return replace(self, maxima=moved(self.maxima, shift))

    def why_impossible(self, nonzero: int) -> str | None:
        """Return the rule that the counts break, or None.

        Args:
            nonzero: Number of nonzero finite values of the spectrum.
        """
        if self.zero_blocks + self.nonfinite_blocks + int(self.maxima.sum()) != self.blocks:
            return "zero_blocks + nonfinite_blocks + sum(maxima) to equal blocks"
        if int(self.depths.sum()) + self.poisoned != nonzero:
            return "sum(depths) + poisoned to equal the nonzero finite values"
        return None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockRecord):
            return NotImplemented
        return (
            self._scalars() == other._scalars()
            and np.array_equal(self.depths, other.depths)
            and np.array_equal(self.maxima, other.maxima)
        )

    def __hash__(self) -> int:
        return hash((self._scalars(), self.depths.tobytes(), self.maxima.tobytes()))

    def __repr__(self) -> str:
        return (
            f"BlockRecord(block={self.block}, blocks={self.blocks}, zero_blocks={self.zero_blocks}, "
            f"nonfinite_blocks={self.nonfinite_blocks}, poisoned={self.poisoned})"
        )

    def _scalars(self) -> tuple[int, ...]:
        return (self.block, *(getattr(self, name) for name in BLOCK_COUNTS))


def read_only(counts: Counts) -> Counts:
    """Return a read-only copy, which several records can share."""
    copy = np.array(counts, dtype=np.int64)
    copy.setflags(write=False)
    return copy


def moved(counts: Counts, shift: int) -> Counts:
    """Return counts by binade of values times ``2**shift``, with clipped binades."""
    index = np.clip(np.arange(row_layout.BINADES) + shift, 0, row_layout.BINADES - 1)
    result = np.zeros(row_layout.BINADES, dtype=np.int64)
    np.add.at(result, index, counts)
    return read_only(result)


# -- fields ------------------------------------------------------------------------------------------------------------

COUNTS = ("count", "zeros", "nans", "pos_infs", "neg_infs")
EXTREMES = ("min", "max", "absmin", "absmax")
SUMS = {"sum": 1, "abssum": 1, "sumsq": 2, "sumfourth": 4}  # each with the power of a scale that multiplies it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SpectrumRecord:
    """Counts, extremes and sums of a tensor's values, documented in `Spectrum`."""

    count: int
    zeros: int
    nans: int
    pos_infs: int
    neg_infs: int
    binades: NDArray[np.int64]
    min: float
    max: float
    absmin: float
    absmax: float
    sum: float
    abssum: float
    sumsq: float
    sumfourth: float
    source: Source | None = None
    blocks: BlockRecord | None = None
    grid: Grid | None = None

    @property
    def finite(self) -> int:
        """Number of finite values, zeros included."""
        return self.count - self.nonfinite

    @property
    def nonzero(self) -> int:
        """Number of finite nonzero values."""
        return self.finite - self.zeros

    @property
    def nonfinite(self) -> int:
        """Number of NaN and infinite values."""
        return self.nans + self.pos_infs + self.neg_infs


# -- sums and shifts ---------------------------------------------------------------------------------------------------

Record = TypeVar("Record", bound=SpectrumRecord)
LOWEST = math.ldexp(1.0, row_layout.LOWEST_BINADE)
BEYOND = math.ldexp(1.0, row_layout.LOWEST_BINADE + row_layout.BINADES)


def merged(a: Record, b: SpectrumRecord) -> Record:
    """Return the spectrum of the values of both."""
    return replace(
        a,
        **{name: getattr(a, name) + getattr(b, name) for name in (*COUNTS, *SUMS)},
        binades=read_only(a.binades + b.binades),
        min=_extreme(min, a.min, b.min),
        max=_extreme(max, a.max, b.max),
        absmin=_extreme(min, a.absmin, b.absmin),
        absmax=_extreme(max, a.absmax, b.absmax),
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
        **{name: times_power(getattr(s, name), shift) for name in EXTREMES},
        **{name: times_power(getattr(s, name), power * shift) for name, power in SUMS.items()},
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
