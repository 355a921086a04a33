"""What a question about block formats needs beside the binades: how far values lie below their block's maximum."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plimsoll import row_layout

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockRecord:
    """The block statistics of a spectrum, for blocks of `block` values along a tensor's last axis.

    - `blocks`: all of them, a ragged last one of each row included; of these `zero_blocks` hold zeros only and
      `nonfinite_blocks` hold a NaN or an Inf.
    - `poisoned`: nonzero finite values in nonfinite blocks. They are in no depth.
    - `depths`: int64[277], read-only: nonzero values of finite blocks by exponent(block's absmax) - exponent(value).
    - `maxima`: int64[277], read-only: finite nonzero blocks by the binade of their absmax; index 0 is 2^-149.

    Exponents are held to the binades that a spectrum counts, so a float64 value beyond them may lie deeper than its
    depth says, and never less deep.
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
        """The record in a wide row of a bank."""
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
        """The record of both; None where their block lengths differ."""
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
        """The record of the values times ``2**shift``: depths stay, maxima move."""
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
        """What contradicts itself, or the number of nonzero finite values of the spectrum; None if nothing does."""
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
    """A copy that cannot be written to: a record's arrays are shared freely."""
    copy = np.array(counts, dtype=np.int64)
    copy.setflags(write=False)
    return copy


def moved(counts: Counts, shift: int) -> Counts:
    """Counts by binade after a multiplication by ``2**shift``; what leaves the range goes to the end it left by."""
    index = np.clip(np.arange(row_layout.BINADES) + shift, 0, row_layout.BINADES - 1)
    result = np.zeros(row_layout.BINADES, dtype=np.int64)
    np.add.at(result, index, counts)
    return read_only(result)
