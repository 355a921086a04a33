"""Values that modules cast to a narrow format, at the scale of the cast."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from plimsoll.diagnosis.estimates.element_counts import Populations
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.diagnosis.view import View, log2
from plimsoll.formats import Format, get_element
from plimsoll.runs import Cast
from plimsoll.runs.reading.module_casts import COLLECTIONS as _OF_ROLE

COLLECTIONS = tuple(_OF_ROLE.values())


@dataclass(frozen=True, kw_only=True, eq=False)
class CastCells:
    """Series of a collection that are cast to one format; `casts` has each layer's last cast, with its role."""

    format: Format
    cells: Cells
    casts: dict[int, Cast]

    @cached_property
    def values(self) -> Populations:
        """The values that the format gets."""
        return Populations(cells=self.cells)

    @cached_property
    def saturated(self) -> Floats:
        """Of each cell's nonzero values the part beyond the format's largest."""
        return self._share(self.values.overflow(self.format, 0).estimate)

    @cached_property
    def flushed(self) -> Floats:
        """Of each cell's nonzero values the part that rounds to zero."""
        return self._share(self.values.lost(self.format, 0).estimate)

    @cached_property
    def coarse(self) -> Floats:
        """Share of each cell's nonzero values that become zero or lose digits."""
        lost = self.values.lost(self.format, 0)
        return self._share(lost.estimate + self.values.subnormal(self.format, 0, lost).estimate)

    @cached_property
    def room(self) -> Floats:
        """Binades that each cell's values could rise before the largest saturates, or NaN."""
        there = self.cells.nonzero > 0
        return -self.cells.highest(np.where(there, -self.values.highest_shift(self.format).astype(np.float64), np.nan))

    @cached_property
    def sizes(self) -> Floats:
        """Binade of each cell's root mean square at the cast. NaN where all is zero."""
        return log2(self.cells.rms)

    def scale_at(self, layer: int, place: int) -> float:
        """Return the scale of a layer's cast at one of the steps."""
        rows = self._rows(layer, place, place)
        return float(1.0 / self.cells.scale[rows[-1]]) if len(rows) else float("nan")

    def serving(self, layer: int, first: int, last: int, tolerance: float) -> float | None:
        """Return the highest scale that works for a layer in a step range.

        It leaves one binade below saturation, and is a power of two times the last one used. None if `tolerance` of the
        values or more would underflow at it.
        """
        rows = self._rows(layer, first, last)
        rows = rows[self.cells.nonzero[rows] > 0]
        if not len(rows):
            return None
        only = Populations(cells=self.cells.of_rows(rows))
        # Of scales that moved, each row's own is undone: what is sought is one for all of them.
        used = np.log2(self.cells.scale[rows]) + np.log2(self.scale_at(layer, last))
        moved = np.rint(used).astype(np.int64)
        shift = int((only.highest_shift(self.format) - moved).min()) - 1
        lost = only.lost(self.format, shift + moved).estimate.sum() / only.cells.nonzero.sum()
        return None if lost >= tolerance else float(self.scale_at(layer, last) * 2.0**shift)

    def _rows(self, layer: int, first: int, last: int) -> Ints:
        cells = self.cells
        rows = np.flatnonzero((cells.layer == layer) & (cells.at >= first) & (cells.at <= last))
        return rows[np.argsort(cells.at[rows], kind="stable")]

    def _share(self, counts: Floats) -> Floats:
        nonzero = self.cells.total(self.cells.nonzero)
        with np.errstate(all="ignore"):
            return np.where(nonzero > 0, self.cells.total(counts) / nonzero, np.nan)


def cast_cells(view: View, collection: str, *, constant: bool = False) -> list[CastCells]:
    """Return the cast values of a collection by format; `constant`: only of casts whose scale stays."""
    cells = view.cells(collection)
    chosen = [c for c in view.casts if c.collection == collection and (c.constant or not constant)]
    if cells is None:
        return []
    formats = dict.fromkeys(c.format for c in chosen)
    by_format = [
        _of_format(cells, get_element(name, "diagnose"), [c for c in chosen if c.format == name]) for name in formats
    ]
    return [cast for cast in by_format if len(cast.cells)]


# A cast multiplies the values in memory, a loss scale included. So only the cast's own scale counts for a stored value.
# In these cells `scale` is the cast's scale to the power of -1. Then any question about these cells, at shift 0, is
# about the values that the format receives.
def _of_format(cells: Cells, fmt: Format, chosen: list[Cast]) -> CastCells:
    place = {name: i for i, name in enumerate(cells.names)}
    scales = np.full(cells.shape, np.nan)
    casts: dict[int, Cast] = {}
    for cast in chosen:
        layer = place.get(cast.name)
        if layer is not None:
            scales[layer] = np.where(np.isnan(scales[layer]), cast.scale_at(cells.steps), scales[layer])
            casts[layer] = cast
    of_row = scales[cells.layer, cells.at]
    rows = np.flatnonzero(~np.isnan(of_row))
    return CastCells(format=fmt, cells=replace(cells.of_rows(rows), scale=1.0 / of_row[rows]), casts=casts)
