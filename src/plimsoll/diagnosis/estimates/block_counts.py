"""Block records of a collection, and the losses of a block format in each row.

The arithmetic is that of `spectrum.fit.block_fit`, for all rows of a collection at once. Tests compare the two. Except
in a few blocks, a value's fate follows from its depth. So nearly all of it is the rows' depths, as a sparse matrix,
times a few vectors that depend on the format only.
"""

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll import row_layout
from plimsoll.diagnosis.estimates.element_counts import Populations, Tallies, ordinals
from plimsoll.diagnosis.estimates.rounding_noise import Noise
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints, from_table, lists_of_rows
from plimsoll.formats import FP32, BlockFormat, Format
from plimsoll.runs import Run
from plimsoll.runs.columns.spectrum_columns import blocks_of, integers, list_items
from plimsoll.spectrum.fit import block_fit
from plimsoll.spectrum.fit.block_fit import overflowing
from plimsoll.spectrum.fit.population import (
    BINADE,
    Population,
    lost_point,
    mean_squares,
    normal_point,
    overflow_point,
    snr_db,
)
from plimsoll.spectrum.record import BEYOND, LOWEST
from plimsoll.spectrum.source_format import Grid

# -- block records as flat columns, next to their cells ----------------------------------------------------------------

# They are read together with the cells, in one table, so that rows match although a live run grows. Only questions
# about block formats read them.


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockCells:
    """The records of the rows of `cells`.

    Of each row: the block `length` (0 without a record), the `poisoned` values, how many values are at which depth
    (`depths[depth_start:...]`), and how many blocks have their maximum in which binade, from exponent `lowest` on.
    """

    cells: Cells
    length: Ints
    poisoned: Ints
    depth_start: Ints
    depths: Ints
    lowest: Ints
    maxima_start: Ints
    maxima: Ints

    def of_rows(self, rows: Ints) -> "BlockCells":
        """Return the records of these rows only."""
        depth_start, depths = lists_of_rows(self.depth_start, self.depths, rows)
        maxima_start, maxima = lists_of_rows(self.maxima_start, self.maxima, rows)
        return BlockCells(
            cells=self.cells.of_rows(rows),
            length=self.length[rows],
            poisoned=self.poisoned[rows],
            depth_start=depth_start,
            depths=depths,
            lowest=self.lowest[rows],
            maxima_start=maxima_start,
            maxima=maxima,
        )

    @property
    def size_bytes(self) -> int:
        """The memory of the records, and of what was computed of them and kept."""
        return sum(array.nbytes for array in vars(self).values() if isinstance(array, np.ndarray))

    @cached_property
    def by_depth(self) -> Any:
        """The values at each depth, as a sparse matrix of rows by depths."""
        # 0.12 s, a quarter of the time of `plimsoll check` on a small run, and only this function needs it.
        from scipy.sparse import csr_matrix  # pyright: ignore[reportMissingTypeStubs]

        places = np.arange(len(self.depths)) - np.repeat(self.depth_start[:-1], np.diff(self.depth_start))
        shape = (len(self.length), row_layout.BINADES)
        return csr_matrix((self.depths.astype(np.float64), places.astype(np.int32), self.depth_start), shape=shape)

    @cached_property
    def values(self) -> Floats:
        """Number of values with a depth, by row."""
        return self.by_depth @ np.ones(row_layout.BINADES)

    @cached_property
    def blocks(self) -> Floats:
        """Number of finite blocks with a nonzero value, by row."""
        return self._running[self.maxima_start[1:]] - self._running[self.maxima_start[:-1]]

    def maxima_below(self, binade: Ints) -> Floats:
        """Return how many of these blocks have their maximum below a binade of the stored values, by row."""
        place = np.clip(binade - self.lowest, 0, np.diff(self.maxima_start))
        return self._running[self.maxima_start[:-1] + place] - self._running[self.maxima_start[:-1]]

    @cached_property
    def _running(self) -> Floats:
        return np.concatenate([np.zeros(1), np.cumsum(self.maxima, dtype=np.float64)])


def read_blocks(run: Run, collection: str, until: int | None) -> BlockCells | None:
    """Return a collection with its block records up to a step. None if it has none."""
    if collection not in run.tensors or not run.block_lengths:
        return None
    table = run.table(collection, steps=None if until is None else slice(None, until + 1))
    length = blocks_of(table)
    if length is None:
        return None
    depth_start, depths = list_items(table["depths"])
    maxima_start, maxima = list_items(table["maxima"])
    return BlockCells(
        cells=from_table(collection, table, run.tensors[collection]),
        length=length,
        poisoned=integers(table, "poisoned"),
        depth_start=depth_start,
        depths=depths,
        lowest=integers(table, "lowest_maximum"),
        maxima_start=maxima_start,
        maxima=maxima,
    )


# -- losses: `Spectrum.fit` on columns ---------------------------------------------------------------------------------

_NO_GRID = -1
_HIGHEST = row_layout.LOWEST_BINADE + row_layout.BINADES - 1
_BEYOND_ALL = 2.0**1000
_SLACK = 2.0**-20  # as in `block_fit`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockFit:
    """Counts of each row's nonzero finite values by their fate in a block format."""

    lost: Tallies
    subnormal: Tallies
    overflow: Tallies
    noise: Floats  # sum of squared errors of the true values
    signal: Floats  # sum of squares of the true values


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockTallies:
    """Rows that all have a record of one block length, or nothing to lose."""

    blocks: BlockCells

    def fit(self, fmt: BlockFormat, shift: int) -> BlockFit:
        """Return the effect of a format on the true values times ``2**shift``, row by row."""
        parts = self._with_tensor_scale(fmt, shift) if fmt.scale.signed else self._with_powers_of_two(fmt, shift)
        lost, subnormal, overflow, noise = parts
        poisoned = self.blocks.poisoned
        beyond = Tallies(
            low=overflow.low + poisoned, high=overflow.high + poisoned, estimate=overflow.estimate + poisoned
        )
        signal = self._signal
        return BlockFit(lost=lost, subnormal=subnormal, overflow=beyond, noise=noise * signal, signal=signal)

    # -- what does not depend on the format

    @cached_property
    def _populations(self) -> Populations:
        return Populations(cells=self.blocks.cells)

    @cached_property
    def _noise(self) -> Noise:
        return Noise(values=self._populations)

    @cached_property
    def _signal(self) -> Floats:
        return self._noise.of(FP32, 0)[1]

    @cached_property
    def _scale(self) -> tuple[Ints, NDArray[np.bool_]]:
        """Power of two of each row's scale, rounded down, and whether the scale is more."""
        fraction, exponent = np.frexp(self.blocks.cells.scale)
        return (exponent - 1).astype(np.int64), fraction != 0.5

    @cached_property
    def _ends(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Rows with values below, and with values beyond the counted binades (float64)."""
        column = self.blocks.cells.column
        return column("absmin") < LOWEST, column("absmax") >= BEYOND

    @cached_property
    def _misplaced(self) -> Floats:
        """Number of each row's values in the end binades, which may lie deeper."""
        cells, (low, high) = self.blocks.cells, self._ends
        lowest = cells.below_binade(np.full(len(cells), row_layout.LOWEST_BINADE + 1))
        return np.where(low, lowest, 0) + np.where(high, self._maxima_from(_HIGHEST) * self.blocks.length, 0.0)

    @cached_property
    def _grid(self) -> Ints:
        """Mantissa bits of each row's values if all are normal: the scale differs from block to block."""
        bits, quantum, on_grid = self._populations.grids
        smallest = np.ldexp(1.0, np.maximum(quantum + bits, -1074).astype(np.int32))
        return np.where(on_grid & (self.blocks.cells.column("absmin") >= smallest), bits, _NO_GRID)

    def _maxima_from(self, binade: "int | Ints") -> Floats:
        """Return how many blocks of each row have their maximum in a binade or above."""
        start = np.broadcast_to(np.asarray(binade, dtype=np.int64), len(self.blocks.length))
        return self.blocks.blocks - self.blocks.maxima_below(start)

    # -- scales that are powers of two

    def _with_powers_of_two(self, fmt: BlockFormat, shift: int) -> tuple[Tallies, Tallies, Tallies, Floats]:
        total = self.blocks.values
        lost, below_normal, overflowed, noise = self._landed(fmt.element)
        subnormal = below_normal.minus(lost, total) if fmt.element.has_subnormals else _none(total)
        overflow = _within(total - overflowed.high, total - overflowed.low, self._overflowing(fmt.element))

        # Blocks whose scale takes an end of its format; see `block_fit` for why these counts bound from below too.
        small, large = self._beyond_scales(fmt, shift)
        if small.any():
            end = shift - fmt.scale.min_exponent
            lost = self._at_least(lost, self._populations.lost(fmt.element, end), small > 0)
            noise = np.where(small > 0, np.maximum(noise, _ratio(*self._noise.of(fmt.element, end))), noise)
        if large.any():
            end = shift - fmt.scale.max_exponent
            overflow = self._at_least(overflow, self._populations.overflow(fmt.element, end), large > 0)
            noise = np.where(large > 0, np.maximum(noise, _ratio(*self._noise.of(fmt.element, end))), noise)

        misplaced, moved = self._misplaced, small + large + self._misplaced
        lost = _widened(lost, total, fewer=large, more=misplaced)
        overflow = _widened(overflow, total, fewer=small + misplaced)
        subnormal = _widened(subnormal, total, fewer=moved, more=moved)
        estimate = np.minimum(subnormal.estimate, total - lost.estimate)
        return lost, _within(subnormal.low, subnormal.high, estimate), overflow, noise

    def _overflowing(self, element: Format) -> Floats:
        """Return the estimate of `plimsoll.spectrum.fit.block_fit`."""
        blocks = self.blocks
        return overflowing(
            element,
            maxima=blocks.maxima,
            start=blocks.maxima_start,
            lowest=blocks.lowest,
            values=blocks.values,
            top=np.asarray(blocks.by_depth[:, [0]].sum(axis=1), dtype=np.float64).ravel(),
            absmax=blocks.cells.column("absmax"),
            bits=np.where(self._scale[1], _NO_GRID, self._grid),
        )

    def _at_least(self, number: Tallies, at_end: Tallies, where: NDArray[np.bool_]) -> Tallies:
        """Return a number by depths, with the values at the end of the scale's format."""
        poisoned, total = self.blocks.poisoned, self.blocks.values
        # The number at the scale's end includes values of blocks with NaN or Inf.
        low = np.where(where, np.maximum(number.low, at_end.low - poisoned), number.low)
        high = np.where(where, np.minimum(number.high + at_end.high, total), number.high)
        estimate = np.where(where, np.maximum(number.estimate, at_end.estimate - poisoned), number.estimate)
        return _within(low, high, estimate)

    def _landed(self, element: Format) -> tuple[Tallies, Tallies, Tallies, Floats]:
        """Return sums by depth: lost, subnormal, not overflowing, noise over signal."""
        sums, odd = np.zeros((len(self.blocks.length), 11)), self._scale[1]
        grid = np.where(odd, _NO_GRID, self._grid)
        key = grid * 2 + odd
        for each in np.unique(key).tolist():
            rows = np.flatnonzero(key == each)
            matrix = self.blocks.by_depth if len(rows) == len(key) else self.blocks.by_depth[rows]
            sums[rows] = matrix @ _by_depth(element, each // 2, bool(each % 2))
        tallies = [Tallies(low=sums[:, i], high=sums[:, i + 1], estimate=sums[:, i + 2]) for i in (0, 3, 6)]
        return tallies[0], tallies[1], tallies[2], _ratio(sums[:, 10], sums[:, 9])

    def _beyond_scales(self, fmt: BlockFormat, shift: int) -> tuple[Floats, Floats]:
        """Return upper bounds of the values in blocks whose scale is below its range, and above it."""
        (power, odd), (low, high), total = self._scale, self._ends, self.blocks.values
        rise = fmt.element.max_exponent - shift + power
        first = fmt.scale.min_exponent + rise + odd
        small = self.blocks.maxima_below(np.where(low, np.maximum(first, row_layout.LOWEST_BINADE + 1), first))
        last = fmt.scale.max_exponent + rise + 1
        large = self._maxima_from(np.where(high, np.minimum(last, _HIGHEST), last))
        return np.minimum(small * fmt.block, total), np.minimum(large * fmt.block, total)

    # -- scales with a mantissa, under one of the tensor's

    def _with_tensor_scale(self, fmt: BlockFormat, shift: int) -> tuple[Tallies, Tallies, Tallies, Floats]:
        blocks, total, table = self.blocks, self.blocks.values, block_fit.outcomes_of(fmt)
        lost, subnormal, overflow = (
            _within(*(blocks.by_depth @ np.asarray(each, dtype=np.float64) for each in depths))
            for depths in (table.lost, table.subnormal, table.overflow)
        )
        unsure, dead, share = self._small_scales(fmt, shift)
        loose = np.minimum(unsure + self._misplaced, total)
        lost, subnormal, overflow = (_widened(x, total, fewer=loose, more=loose) for x in (lost, subnormal, overflow))
        lost = _within(lost.low + dead, lost.high, lost.estimate * (1 - share) + total * share)
        energy = blocks.by_depth @ table.energy + blocks.blocks * (table.maximum_energy - table.energy[0])
        noise = blocks.by_depth @ table.noise + blocks.blocks * (table.maximum_noise - table.noise[0])
        ratio = _ratio(noise, energy)
        if fmt.tensor_scale:
            return lost, subnormal, overflow, ratio
        values, point = self._populations, self._stored(block_fit.top_of_scales(fmt), shift)
        held = values.below(ordinals(point), inclusive=not fmt.element.overflow_at_threshold)
        count = self.blocks.cells.nonzero
        highest = Tallies(low=count - held.high, high=count - held.low, estimate=count - held.estimate)
        large = highest.high > 0
        overflow = self._at_least(overflow, highest, large)
        at_end = _ratio(*self._noise.of(fmt.element, shift - fmt.scale.max_exponent))
        return lost, subnormal, overflow, np.where(large, np.maximum(ratio, at_end), ratio)

    def _stored(self, value: float, shift: int) -> Floats:
        """Return a magnitude before the shift, as each row's values are stored."""
        with np.errstate(all="ignore"):
            stored = np.ldexp(value, -int(np.clip(shift, -2200, 2200))) * self.blocks.cells.scale
        return np.minimum(stored, _BEYOND_ALL)

    def _small_scales(self, fmt: BlockFormat, shift: int) -> tuple[Floats, Floats, Floats]:
        """Return values in blocks with a coarse or zero scale, blocks whose scale is surely zero, and their share."""
        blocks, cells, (low, high) = self.blocks, self.blocks.cells, self._ends
        absmax = np.nan_to_num(cells.column("absmax"))
        with np.errstate(all="ignore"):
            true = np.ldexp(absmax / cells.scale, int(np.clip(shift, -2200, 2200)))
        scale = true / (fmt.element.max * fmt.scale.max)
        in_range = (scale >= FP32.smallest_normal * (1 + _SLACK)) & (scale <= FP32.max * (1 - _SLACK))
        in_range |= not fmt.tensor_scale
        reach = absmax if fmt.tensor_scale else self._stored(fmt.element.max * fmt.scale.max, shift)
        coarse = _above(reach * (fmt.scale.smallest_normal / fmt.scale.max) * (1 + _SLACK))
        unsure = blocks.maxima_below(np.where(low, np.maximum(coarse, row_layout.LOWEST_BINADE + 1), coarse))
        large = np.full_like(coarse, _HIGHEST + 1) if fmt.tensor_scale else _above(reach * (1 - _SLACK) / 2)
        large = np.where(high & (coarse <= _HIGHEST), np.minimum(large, _HIGHEST), large)
        unsure = unsure + self._maxima_from(large)
        zero = reach * (fmt.scale.smallest_subnormal / 2 / fmt.scale.max)
        gone = _above(zero * (1 - _SLACK) / 2)
        dead = blocks.maxima_below(np.where(high, np.minimum(gone, _HIGHEST), gone))
        fraction, exponent = np.frexp(zero)  # a binade that begins at the half of zero or below is lost whole
        whole, some = (blocks.maxima_below(exponent.astype(np.int64) - 1 + i) for i in (0, 1))
        share = (whole + (some - whole) * (2 * fraction - 1)) / np.maximum(blocks.blocks, 1.0)
        unsure = np.minimum(unsure * fmt.block, blocks.values)
        return np.where(in_range, unsure, blocks.values), np.where(in_range, dead, 0.0), np.where(in_range, share, 0.0)


@functools.lru_cache(maxsize=64)
def _by_depth(element: Format, bits: int, odd: bool) -> Floats:
    """Return the fate of one value at each depth, by `Spectrum.fit` of a population of one value.

    Columns: lost, below the normal numbers, not overflowing (each low, high, estimate), energy, and noise. The values
    are on a grid of so many mantissa bits; `odd`: the depth may be off by one.
    """
    top = element.max_exponent
    lowest = top - (row_layout.BINADES - 1)
    table = np.zeros((row_layout.BINADES, 11))
    relative = None if bits == _NO_GRID else Grid(bits, -bits)  # of a binade that begins at 1
    for depth in range(row_layout.BINADES):
        counts = np.zeros(row_layout.BINADES, dtype=np.int64)
        counts[row_layout.BINADES - 1 - depth] = 1
        values = Population(
            counts=counts,
            lowest=lowest,
            first=(top - depth) * BINADE,
            last=(top - depth + 1) * BINADE - 1,
            attained=False,
            grid=None if bits == _NO_GRID else Grid(bits, lowest - bits),
            total=1,
            sumsq=None,
        )
        points = ((lost_point(element), True), (normal_point(element), False))
        tallies = [values.below(point, inclusive=inclusive) for point, inclusive in points]
        tallies.append(values.below(overflow_point(element), inclusive=not element.overflow_at_threshold))
        energy = 4.0**-depth * float(mean_squares(np.zeros(1, dtype=np.int64), relative, unit=0)[0])
        noise = energy * 10 ** (-snr_db(values, element, 0) / 10)
        table[depth] = [n for t in tallies for n in (t.low, t.high, t.estimate)] + [energy, noise]
    return _off_by_one(table) if odd else table


# Under a scale that is no power of two, a value's depth may be one more or one less than recorded. The bounds of such
# values include all three cases.
def _off_by_one(found: Floats) -> Floats:
    """Return bounds that hold if a depth is as recorded, one more or one less."""
    padded = np.pad(found, ((1, 1), (0, 0)), mode="edge")
    around = np.stack([padded[:-2], padded[1:-1], padded[2:]])
    result = found.copy()
    for i in (0, 3, 6):
        result[:, i] = around[:, :, i].min(axis=0)
        result[:, i + 1] = around[:, :, i + 1].max(axis=0)
    return result


def _within(low: Floats, high: Floats, estimate: Floats) -> Tallies:
    return Tallies(low=low, high=high, estimate=np.minimum(np.maximum(estimate, low), high))


def _widened(number: Tallies, total: Floats, *, fewer: "Floats | int" = 0, more: "Floats | int" = 0) -> Tallies:
    """Return the number with bounds for so many fewer and so many more."""
    low, high = np.maximum(number.low - fewer, 0), np.minimum(number.high + more, total)
    return Tallies(low=low, high=high, estimate=number.estimate)


def _none(total: Floats) -> Tallies:
    return Tallies(low=np.zeros_like(total), high=np.zeros_like(total), estimate=np.zeros_like(total))


def _ratio(noise: Floats, energy: Floats) -> Floats:
    """Return noise over signal, 0 without signal."""
    with np.errstate(all="ignore"):
        return np.where(energy > 0, noise / energy, 0.0)


def _above(limit: Floats) -> Ints:
    """Return the first binade that starts at or above a limit. For 0, one below all."""
    fraction, exponent = np.frexp(limit)
    binade = exponent.astype(np.int64) - (fraction == 0.5)
    return np.where(limit > 0, binade, row_layout.LOWEST_BINADE)
