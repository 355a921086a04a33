"""Losses of an element format in a collection's rows: `Spectrum.fit` on columns.

The arithmetic is that of `population` and `element_fit` in `spectrum.fit`, for all rows of a collection at once. Tests
compare the two. Magnitudes are ordinals: the binade's exponent times 2^53, plus the position in the binade.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll import row_layout
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.formats import Format
from plimsoll.spectrum.fit.population import BINADE, lost_point, normal_point, overflow_point

_END = 1000  # the binade beyond every value that a row can hold; 1,024 are no int64 any more
_FARTHEST = _END * BINADE
_SHIFTS = 2200  # how far apart a row and a format can be: FP64's ends are 2,098 binades apart


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tallies:
    """Numbers of values by row: at least `low`, at most `high`, about `estimate`."""

    low: NDArray[Any]
    high: NDArray[Any]
    estimate: Floats

    def out_of(self, total: Ints) -> "Tallies":
        """Return the numbers of the other values."""
        return Tallies(low=total - self.high, high=total - self.low, estimate=total - self.estimate)

    def minus(self, other: "Tallies", total: NDArray[Any]) -> "Tallies":
        """Return the numbers in this and not in the other, which is a part of it."""
        low = np.maximum(self.low - other.high, 0)
        high = np.clip(self.high - other.low, 0, total)
        return Tallies(low=low, high=high, estimate=np.clip(self.estimate - other.estimate, low, high))


@dataclass(frozen=True, kw_only=True, eq=False)
class Populations:
    """Nonzero finite values of each row, and their known places in the binades."""

    cells: Cells

    @cached_property
    def first(self) -> Ints:
        """The ordinal of the smallest stored magnitude."""
        return ordinals(self.cells.column("absmin"))

    @cached_property
    def last(self) -> Ints:
        """The ordinal of the largest stored magnitude."""
        return ordinals(self.cells.column("absmax"))

    @cached_property
    def grids(self) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        """Mantissa bits and quantum exponent of each row's grid, and if the row is on it."""
        bits = self.cells.by_format(lambda fmt: fmt.mantissa_bits).astype(np.int64)
        quantum = self.cells.by_format(lambda fmt: fmt.quantum_exponent).astype(np.int64)
        on_grid = self.cells.nonzero > 0
        for name in ("absmin", "absmax", "min", "max"):
            on_grid = on_grid & _on_grid(self.cells.column(name), bits, quantum)
        return bits, quantum, on_grid

    def points(self, point: int, shift: int | Ints, scale: float | None = None) -> Ints:
        """Return an ordinal of true values times ``2**shift`` as each row (or `scale`) stores it."""
        binade, inside = self._moved(point, shift, scale)
        return np.clip(binade, -_END, _END) * BINADE + inside

    def _moved(self, point: int, shift: int | Ints, scale: float | None = None) -> tuple[Ints, Ints]:
        """Return `points` as binade and position."""
        fraction, exponent = np.frexp(self.cells.scale if scale is None else np.array([scale]))
        whole, position = divmod(point, BINADE)
        binade = whole + (exponent - 1).astype(np.int64) - np.asarray(shift, dtype=np.int64)
        inside = np.full(binade.shape, position, dtype=np.int64)
        odd = fraction != 0.5  # a scale that is no power of two moves values within their binades
        if odd.any():
            mantissa = (1 + position / BINADE) * 2 * fraction[odd]
            carried = mantissa >= 2
            inside[odd] = ((np.where(carried, mantissa / 2, mantissa) - 1) * BINADE).astype(np.int64)
            binade[odd] += carried
        # For formats as wide as FP64 the two do not fit into one int64.
        return binade, inside

    def below(self, point: Ints, *, inclusive: bool) -> Tallies:
        """Return how many magnitudes of each row are below an ordinal, or at it if `inclusive` (`Population.below`)."""
        nonzero, limit = self.cells.nonzero, point + inclusive
        all_of_it = self.last < limit
        known = np.where(all_of_it, nonzero, 0).astype(np.float64)
        rows = np.flatnonzero(~all_of_it & (self.first < limit) & (nonzero > 0))  # those that the ordinal divides
        divided = self._divided(rows, point[rows], limit[rows])
        tallies = Tallies(low=known, high=known.copy(), estimate=known.copy())
        for whole, part in zip((tallies.low, tallies.high, tallies.estimate), divided, strict=True):
            whole[rows] = part
        return tallies

    def _divided(self, rows: Ints, point: Ints, limit: Ints) -> tuple[Floats, Floats, Floats]:
        """Return how many magnitudes of some rows are below a limit among them: at least, at most, about."""
        cells, first, last = self.cells, self.first[rows], self.last[rows]
        index = np.clip(limit // BINADE, row_layout.LOWEST_BINADE, row_layout.LOWEST_BINADE + row_layout.BINADES - 1)
        place, begin, length = index - cells.lowest[rows], cells.start[rows], cells.length[rows]
        clipped = np.clip(place, 0, length)
        under = (cells.running[begin + clipped] - cells.running[begin]).astype(np.float64)
        has = (place >= 0) & (place < length)
        inside = np.where(has, cells.flat[np.where(has, begin + clipped, 0)] if len(cells.flat) else 0, 0)
        start, stop = _extent(index, first, last)
        fraction, exact = self._fraction(rows, start, stop, point, limit)
        share = fraction * inside
        low = under + np.where(exact, share, (start == first) & (inside > 0))
        high = under + np.where(exact, share, inside - ((stop == last) & (inside > 0)))
        estimate = np.clip(under + share, low, high)
        none, whole = (inside == 0) | (limit <= start), (inside > 0) & (limit > stop)
        low, high, estimate = (
            np.where(whole, under + inside, np.where(none, under, number)) for number in (low, high, estimate)
        )
        return low, high, estimate

    def _fraction(
        self, rows: Ints, start: Ints, stop: Ints, point: Ints, limit: Ints
    ) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the share of values from `start` to `stop` below `limit`, and whether it is exactly none or all."""
        bits, quantum, on_grid = (column[rows] for column in self.grids)
        binade = start // BINADE
        one_binade = stop // BINADE == binade
        spacing = np.maximum(binade - bits, quantum)
        grid = on_grid & one_binade & (spacing <= binade)
        with np.errstate(all="ignore"):
            fraction = (point - start) / np.maximum(stop - start, 1)
            wide = np.flatnonzero(~one_binade)
            fraction[wide] = _over_binades(start[wide], stop[wide], point[wide])
            step = BINADE >> np.clip(binade - spacing, 0, 53)
            before = -(-start // step)  # ordinals of a binade are multiples of the step, since its start is one
            on_it = (-(-limit // step) - before) / np.maximum(stop // step + 1 - before, 1)
        fraction = np.clip(np.where(grid, on_it, fraction), 0.0, 1.0)
        return fraction, grid & ((fraction == 0) | (fraction == 1))

    # -- against a format

    def lost(self, fmt: Format, shift: int | Ints) -> Tallies:
        """Return how many values round to zero."""
        return self.below(self.points(lost_point(fmt), shift), inclusive=True)

    def subnormal(self, fmt: Format, shift: int | Ints, lost: Tallies) -> Tallies:
        """Return how many values lose precision without becoming zero."""
        if not fmt.has_subnormals:
            nothing = np.zeros(len(self.cells))
            return Tallies(low=nothing, high=nothing, estimate=nothing)
        small = self.below(self.points(normal_point(fmt), shift), inclusive=False)
        return small.minus(lost, self.cells.nonzero)

    def overflow(self, fmt: Format, shift: int | Ints) -> Tallies:
        """Return how many values would exceed the format's largest one."""
        point = self.points(overflow_point(fmt), shift)
        return self.below(point, inclusive=not fmt.overflow_at_threshold).out_of(self.cells.nonzero)

    def highest_shift(self, fmt: Format) -> Ints:
        """Return the highest shift at which nothing of a row overflows; `_SHIFTS` for a row of zeros."""
        binade, inside = self._moved(overflow_point(fmt) - fmt.overflow_at_threshold, 0)  # the largest that is held
        room = binade - self.last // BINADE - (inside < self.last % BINADE)
        return np.where(self.cells.nonzero > 0, room, _SHIFTS)

    def lowest_shift(self, fmt: Format, tolerance: float) -> Ints:
        """Return the lowest shift at which a row loses less than `tolerance` for certain."""
        return self.lowest_shift_of_groups(fmt, tolerance, np.arange(len(self.cells)), len(self.cells))

    def lowest_shift_of_groups(
        self, fmt: Format, tolerance: float, group: Ints, groups: int, hidden: Callable[[Ints], Floats] | None = None
    ) -> Ints:
        """Return `lowest_shift` for groups of rows together.

        `hidden` returns how many values in addition to those recorded would be lost at a shift of each row.
        """
        lowest = np.full(groups, -_SHIFTS, dtype=np.int64)
        all_of = self.cells.nonzero + (0 if hidden is None else hidden(lowest[group]))
        values = np.bincount(group, weights=all_of, minlength=groups)
        allowed = np.where(values > 0, tolerance * values, np.inf)
        floor, _ = self._moved(lost_point(fmt), 0)

        def of_whole_binades(shift: Ints) -> NDArray[np.bool_]:
            lost = self.cells.below_binade(floor - shift[group])
            return np.bincount(group, weights=lost, minlength=groups) < allowed

        def of_all(shift: Ints) -> NDArray[np.bool_]:
            lost = self.lost(fmt, shift[group]).high + (0 if hidden is None else hidden(shift[group]))
            return np.bincount(group, weights=lost, minlength=groups) < allowed

        # Counts of whole binades are quick, and less than a binade off for recorded values: they say where to begin.
        # They lose all below the shift of a group's largest value, and nothing above that of its smallest.
        low, high = -lowest, lowest.copy()
        there = np.flatnonzero(self.cells.nonzero > 0)
        np.minimum.at(low, group[there], (floor - self.last // BINADE)[there] - 1)
        np.maximum.at(high, group[there], (floor - self.first // BINADE)[there])
        low, high = np.clip(low, -_SHIFTS - 1, _SHIFTS - 1), np.clip(high, -_SHIFTS, _SHIFTS)
        low = np.where(of_whole_binades(low), lowest - 1, low)  # what is hidden can be far more than what is recorded
        low = _first(of_whole_binades, low, high) - 1
        high, step = low + 1, 1
        enough = of_all(high)
        while not enough.all():
            low = np.where(enough, low, high)
            high = np.where(enough, high, np.minimum(high + step, _SHIFTS))
            step *= 2
            # At the highest shift no rows are left to count; where something is lost at any shift, that is the answer.
            enough |= of_all(np.where(enough, _SHIFTS, high)) | (high == _SHIFTS)
        return np.where(values > 0, _first(of_all, low, high), -_SHIFTS)


def _first(holds: Callable[[Ints], NDArray[np.bool_]], low: Ints, high: Ints) -> Ints:
    """Return by bisection the first numbers at which it holds. At `low` it does not, at `high` and above it does."""
    while bool((high - low > 1).any()):
        middle = (low + high) // 2
        enough = holds(middle)
        high, low = np.where(enough, middle, high), np.where(enough, low, middle)
    return high


def ordinals(x: Floats) -> Ints:
    """Return the ordinals of positive floats. NaN, Inf and float64's subnormals get the end of all."""
    finite = np.isfinite(x) & (x > 0)
    fraction, exponent = np.frexp(np.where(finite, x, 1.0))
    result = np.clip(exponent.astype(np.int64) - 2, -1000, 1000) * BINADE + (fraction * 2 * BINADE).astype(np.int64)
    return np.where(finite, result, np.where(x > 0, _FARTHEST, -_FARTHEST))


def _on_grid(x: Floats, bits: Ints, quantum: Ints) -> NDArray[np.bool_]:
    with np.errstate(all="ignore"):
        spacing = np.maximum(np.frexp(x)[1].astype(np.int64) - 1 - bits, quantum)
        units = np.ldexp(x, -np.clip(spacing, -1074, 1023).astype(np.int32))
        return np.isfinite(units) & (units == np.floor(units))


def _over_binades(start: Ints, stop: Ints, point: Ints) -> Floats:
    """Return the share below a point by magnitude, where an end binade holds all beyond it too."""
    unit = stop // BINADE

    def magnitude(position: Ints) -> Floats:
        exponent, rest = position // BINADE, position % BINADE
        return np.ldexp(1 + rest / BINADE, np.clip(exponent - unit, -1074, 1023).astype(np.int32))

    bottom = magnitude(start)
    return (magnitude(point) - bottom) / (magnitude(stop) - bottom)


def _extent(index: Ints, first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Return the first and last ordinal of the values of one binade, by row."""
    start = index * BINADE
    stop = start + BINADE - 1
    bottom = index == row_layout.LOWEST_BINADE
    top = index == row_layout.LOWEST_BINADE + row_layout.BINADES - 1
    return np.where(bottom, first, np.maximum(start, first)), np.where(top, last, np.minimum(stop, last))
