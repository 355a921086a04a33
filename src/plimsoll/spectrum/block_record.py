"""Counts for block formats: distances of values from the maximum of their block."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plimsoll import row_layout

Counts = NDArray[np.int64]


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
        return BlockRecord(
            block=self.block,
            blocks=self.blocks + other.blocks,
            zero_blocks=self.zero_blocks + other.zero_blocks,
            nonfinite_blocks=self.nonfinite_blocks + other.nonfinite_blocks,
            poisoned=self.poisoned + other.poisoned,
            depths=read_only(self.depths + other.depths),
            maxima=read_only(self.maxima + other.maxima),
        )

    def scaled(self, shift: int) -> "BlockRecord":
        """Return the record of the values times ``2**shift``, with unchanged depths."""
        return BlockRecord(
            block=self.block,
            blocks=self.blocks,
            zero_blocks=self.zero_blocks,
            nonfinite_blocks=self.nonfinite_blocks,
            poisoned=self.poisoned,
            depths=self.depths,
            maxima=moved(self.maxima, shift),
        )

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
        return (self.block, self.blocks, self.zero_blocks, self.nonfinite_blocks, self.poisoned)


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
