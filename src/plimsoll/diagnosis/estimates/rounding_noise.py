"""Signal to rounding noise of every row in a format: `Fit.snr_db` on columns."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll import row_layout
from plimsoll.diagnosis.estimates.element_counts import Populations
from plimsoll.diagnosis.tables.cells import Floats, Ints
from plimsoll.formats import Format
from plimsoll.spectrum.fit.population import BINADE, mean_squares, overflow_point, rounding_error
from plimsoll.spectrum.source_format import Grid

_BINADES: Ints = np.arange(row_layout.BINADES, dtype=np.int64) + row_layout.LOWEST_BINADE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kin:
    """Rows of one scale that are on one grid, or on none; `counts`: rows by binades."""

    rows: Ints
    scale: float
    grid: Grid | None
    counts: Any

    @property
    def lift(self) -> int:
        """A stored binade is the true one plus this."""
        return round(float(np.log2(self.scale)))

    @property
    def mean_squares(self) -> Floats:
        """The mean square of each binade's values."""
        return mean_squares(_BINADES, self.grid, unit=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Noise:
    """The noise of a collection's rows, asked for at one shift after another."""

    values: Populations

    def of(self, fmt: Format, shift: int, over: Floats | None = None) -> tuple[Floats, Floats]:
        """Return the expected squared errors and the squared true values, summed by row.

        A value that the format represents has an evenly distributed error of its spacing, a lost one the error of its
        size, an overflowing one its distance to the format's largest value (it is taken to saturate). Values of one
        binade are spread evenly over it, or over the numbers of the row's grid. `over`: how many values of each row
        overflow, if that is known.
        """
        cells = self.values.cells
        noise = np.zeros(len(cells))
        over = self.values.overflow(fmt, shift).estimate if over is None else over
        for kin in self._kin:
            noise[kin.rows] = self._of_kin(kin, fmt, shift, over[kin.rows])
        undone = np.where(cells.nonzero > 0, 1 / cells.scale**2, 0.0)
        return noise * undone, self._signal * undone

    # The error of a binade's values depends on the binade, the format and the shift, and not on the row. So the noise
    # of all rows is their counts, as a sparse matrix of rows by binades, times a few vectors over binades. Only the
    # binade in which overflow begins, and a row's last one, need the row's own extremes. The matrix is made once for a
    # collection.
    def _of_kin(self, kin: _Kin, fmt: Format, shift: int, over: Floats) -> Floats:
        binades = _BINADES
        lost = binades < fmt.quantum_exponent - 1 - shift + kin.lift
        rounding = np.where(lost, 0.0, rounding_error(_BINADES, kin.grid, fmt, shift - kin.lift, unit=0))
        point = int(self.values.points(overflow_point(fmt), shift, kin.scale)[0])
        above = binades > point // BINADE
        columns = [np.where(above, 0.0, rounding), np.where(lost, kin.mean_squares, 0.0)]
        sums: Floats = kin.counts @ np.stack(columns, axis=1)
        noise = sums[:, 0] + np.minimum(sums[:, 1], self._signal[kin.rows])
        spilling = np.flatnonzero(over > 0)
        if len(spilling):
            noise[spilling] += self._spilt(kin, fmt, shift, point, spilling, over[spilling], rounding)
        return noise

    def _spilt(
        self, kin: _Kin, fmt: Format, shift: int, point: int, among: Ints, over: Floats, rounding: Floats
    ) -> Floats:
        """Return the noise that overflow adds."""
        # All values above the point's binade overflow, and of that binade those left of the estimate. An even spread
        # makes the top binades heavier than the sum of squares: `_surplus` is the correction.
        rows, top, binades = kin.rows[among], point // BINADE, _BINADES
        with np.errstate(all="ignore"):
            largest = float(np.ldexp(fmt.max * kin.scale, int(np.clip(-shift, -1074, 1023))))
        starts = np.maximum(binades * BINADE, point)
        full = _saturation(starts, (binades + 1) * BINADE, point, largest)
        above = binades > top
        columns = np.stack([above.astype(np.float64), np.where(above, full, 0.0)], axis=1)
        few = 2 * len(among) < len(kin.rows)  # rows of a sparse matrix cost more to pick than to multiply
        sums: Floats = kin.counts[among] @ columns if few else (kin.counts @ columns)[among]
        left = np.maximum(over - sums[:, 0], 0.0)

        cells, end = self.values.cells, self.values.last[rows]
        last = cells.lowest[rows] + cells.length[rows] - 1
        ends_above = np.where(last > top, cells.flat[cells.start[1:][rows] - 1], 0)
        first_of_last = last * BINADE
        short = _saturation(first_of_last, np.minimum(first_of_last + BINADE, end), point, largest)
        saturated = sums[:, 1] + _times(ends_above, short - full[np.clip(last - row_layout.LOWEST_BINADE, 0, None)])
        at_top = np.full(len(rows), point)
        saturated += _times(left, _saturation(at_top, np.minimum((top + 1) * BINADE, end), point, largest))
        inside = row_layout.LOWEST_BINADE <= top < row_layout.LOWEST_BINADE + row_layout.BINADES
        own_rounding = rounding[top - row_layout.LOWEST_BINADE] if inside else 0.0
        return self._surplus[rows] * saturated - _times(left, np.full(len(left), own_rounding))

    @cached_property
    def _evenly(self) -> Floats:
        """The energy of each row with its values spread evenly over their binades."""
        result = np.zeros(len(self.values.cells))
        for kin in self._kin:
            result[kin.rows] = kin.counts @ kin.mean_squares
        return result

    @cached_property
    def _signal(self) -> Floats:
        squares = self.values.cells.column("sumsq")
        return np.where(squares > 1e-290, squares, self._evenly)

    @cached_property
    def _surplus(self) -> Floats:
        with np.errstate(all="ignore"):
            return np.where(self._evenly > 0, np.minimum(self._signal / self._evenly, 1.0), 1.0)

    @cached_property
    def _kin(self) -> list[_Kin]:
        """The rows by scale and grid."""
        cells, (bits, quantum, on_grid) = self.values.cells, self.values.grids
        if not len(cells):
            return []
        # 0.12 s, a quarter of the time of `plimsoll check` on a small run, and only this function needs it.
        from scipy.sparse import csr_matrix  # pyright: ignore[reportMissingTypeStubs]

        places = np.repeat(cells.lowest - cells.start[:-1], cells.length) + np.arange(len(cells.flat))
        shape = (len(cells), row_layout.BINADES)
        matrix: Any = csr_matrix(
            (cells.flat.astype(np.float64), (places - row_layout.LOWEST_BINADE).astype(np.int32), cells.start),
            shape=shape,
        )
        scales, scale = np.unique(cells.scale, return_inverse=True)
        key = (scale * len(cells.formats) + cells.format) * 2 + on_grid
        families: list[_Kin] = []
        for value in np.unique(key):
            rows = np.flatnonzero(key == value)
            first = int(rows[0])
            counts = matrix if len(rows) == len(cells) else matrix[rows]
            families.append(
                _Kin(
                    rows=rows,
                    scale=float(scales[scale[first]]),
                    grid=Grid(int(bits[first]), int(quantum[first])) if on_grid[first] else None,
                    counts=counts,
                )
            )
        return families

    @property
    def size_bytes(self) -> int:
        """The memory of the matrix."""
        parts = [kin.counts for kin in self.__dict__.get("_kin", [])]
        return sum(array.nbytes for part in parts for array in (part.data, part.indices, part.indptr))


def _saturation(start: Ints, stop: Ints, point: int, largest: float) -> Floats:
    """Return the mean square distance to the format's largest value, of values even between two ordinals."""
    high = np.maximum(stop, start)
    with np.errstate(all="ignore"):
        near, far = _magnitude(start) - largest, _magnitude(high) - largest
        return np.where(high > point, (near * near + near * far + far * far) / 3, 0.0)


def _magnitude(position: Ints) -> Floats:
    exponent, rest = position // BINADE, position % BINADE
    return np.ldexp(1 + rest / BINADE, np.clip(exponent, -1074, 1023).astype(np.int32))


def _times(number: NDArray[Any], error: Floats) -> Floats:
    """Return the product, and 0 for no values, however large their error would be."""
    return np.where(number > 0, number * np.where(number > 0, error, 0.0), 0.0)
