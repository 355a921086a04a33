"""Estimate of the underflow that happened in narrow formats, by cell and by module.

An FP16 gradient has zeros from underflow, and zeros that are zero in any precision (ReLU, unused rows, masks). Three
sources distinguish them, the best first:

1. The counts of a shadow step, which are exact.
2. The tail of the remaining values. Values that underflow have neighbours that just do not: near the floor q (the
   smallest value) magnitudes spread as x^(a-1). The counts of [q, 4q) and [4q, 16q) give a, and hence the number below
   q/2. Structural zeros have no such neighbours. a = 1 is an even spread, as of any smooth distribution near zero. The
   counts are weighted with a few values of such a spread, so that single values prove nothing.
3. If no value remains, the last spectrum of the layer, at the present scale.

The fraction is of the values that would be nonzero: lost / (lost + nonzero).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis.estimates.element_counts import Populations
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.formats import Format
from plimsoll.spectrum.fit.population import BINADE

_FLOOR_OF_FP32 = -126  # formats whose smallest value is above this power of two can be the ones to lose a value
_PRIOR = 4.0  # values of an even spread that are added to the two counts
_EXPONENTS = np.linspace(0.05, 3.0, 60)  # of the spread, x^a
# Rounded values 1, 2, 3 and 4 ... 15 (in units of q) come from [0.5, 3.5) and [3.5, 15.5).
_RATIOS = (15.5**_EXPONENTS - 3.5**_EXPONENTS) / (3.5**_EXPONENTS - 0.5**_EXPONENTS)
_BELOW = 0.5**_EXPONENTS / (3.5**_EXPONENTS - 0.5**_EXPONENTS)


@dataclass(frozen=True, kw_only=True, eq=False)
class FormatLosses:
    """Effect of formats narrower than FP32 on one collection."""

    cells: Cells
    # Of each row, the scale at which its format contained the values: a loss scale. Gradients that were unscaled since
    # are stored at scale 1 and were contained at the loss scale.
    held: Floats

    @cached_property
    def censors(self) -> NDArray[np.bool_]:
        """The rows whose format can have lost values that FP32 holds."""
        return self.cells.by_format(lambda fmt: np.log2(fmt.smallest_subnormal) > _FLOOR_OF_FP32).astype(bool)

    @cached_property
    def lost(self) -> Floats:
        """Estimate of the values that underflowed, by row.

        NaN where it cannot be estimated, 0 in formats that lose none.
        """
        cells = self.cells
        low, _ = self._tail
        below = np.interp(self._ratio, _RATIOS, _BELOW)
        zeros = cells.column("zeros").astype(np.float64)
        estimate = np.minimum(zeros, low * below)
        shadow = cells.column("underflowed")
        estimate = np.where(np.isnan(shadow), estimate, shadow)
        unknown = (cells.nonzero == 0) & np.isnan(shadow) & (zeros > 0)
        return np.where(self.censors, np.where(unknown, np.nan, estimate), 0.0)

    def hidden(self, fmt: Format, shift: NDArray[np.int64]) -> Floats:
        """Return how many of the values that underflowed a format would lose, too, at a shift of true values."""
        # All of them are hidden at the shift that puts the floor where that of the row's own format was, and below.
        # Above it they come back by the estimated spread, and at least by an even spread: the values left near the
        # floor of a tensor that has almost vanished are too few.
        lost = np.nan_to_num(self.lost)
        rows = np.flatnonzero(lost)
        if len(rows):
            higher = np.maximum((shift - self.floor_shift(fmt))[rows], 0.0)
            spread = np.maximum(np.interp(self._ratio[rows], _RATIOS, _EXPONENTS), 1.0)
            lost[rows] *= 2.0 ** (-spread * higher)
        return lost

    def floor_shift(self, fmt: Format) -> Floats:
        """Return the shift at which a format loses what each row's own format has lost."""
        return np.log2(self.held) + fmt.quantum_exponent - self._quantum

    @cached_property
    def lost_of_cell(self) -> Floats:
        """Estimate of the values that underflowed, by cell. NaN: nothing was recorded.

        For a cell of zeros only it is all, if more than half of the layer's last values would underflow at the present
        scale, and none otherwise.
        """
        cells = self.cells
        lost = np.where(self.vanished, self._of_what_was * cells.total_of("zeros"), cells.total(self.lost))
        return np.where(cells.recorded & (cells.finite > 0), lost, np.nan)

    @cached_property
    def fraction(self) -> Floats:
        """Underflow rate of each cell: the lost share of the values that would be nonzero. NaN: nothing recorded."""
        return share(self.lost_of_cell, self.cells.total(self.cells.nonzero))

    @cached_property
    def vanished(self) -> NDArray[np.bool_]:
        """Cells of narrow formats that are all zero, without the counts of a shadow step."""
        zeros, nonzero = self.cells.total_of("zeros"), self.cells.total(self.cells.nonzero)
        narrow = self.cells.total(self.censors.astype(np.int64)) > 0
        known = ~np.isnan(self.cells.total_of("underflowed"))
        return narrow & (zeros > 0) & (nonzero == 0) & ~known

    @cached_property
    def _of_what_was(self) -> Floats:
        """1 in cells of zeros whose layer's last values would underflow at this scale, else 0."""
        cells, result = self.cells, np.zeros(self.cells.shape)
        if not self.vanished.any():
            return result
        has = np.zeros(cells.shape, dtype=np.int64)
        row_of = np.zeros(cells.shape, dtype=np.int64)
        row_of.ravel()[cells.cell] = np.arange(len(cells))
        has.ravel()[cells.cell[cells.nonzero > 0]] = 1
        last = np.maximum.accumulate(np.where(has > 0, np.arange(cells.shape[1]), -1), axis=1)
        layers, ats = np.nonzero(self.vanished & (last >= 0))
        then, now = row_of[layers, last[layers, ats]], row_of[layers, ats]
        flushed = self._would_be_lost(then, now)
        result[layers, ats] = flushed > 0.5
        return result

    def _would_be_lost(self, then: NDArray[np.int64], now: NDArray[np.int64]) -> Floats:
        """Return the share of rows `then`, with what these had lost, that underflows at the scale of `now`."""
        population = Populations(cells=self.cells)
        change = np.zeros(len(self.cells), dtype=np.int64)
        result = np.empty(len(then))
        moves = np.floor(np.log2(self.held[now] / self.held[then])).astype(np.int64)
        for move in np.unique(moves):
            point = (self._quantum - 1 - self._lift - int(move) + change) * BINADE
            gone = population.below(point, inclusive=True).estimate
            mine = moves == move
            had = np.nan_to_num(self.lost[then[mine]])
            result[mine] = (gone[then[mine]] + had) / (self.cells.nonzero[then[mine]] + had)
        return result

    @cached_property
    def _quantum(self) -> NDArray[Any]:
        return self.cells.by_format(lambda fmt: fmt.quantum_exponent)

    @cached_property
    def _lift(self) -> NDArray[np.int64]:
        """Binades by which values lay higher in their format than they are stored."""
        return np.round(np.log2(self.held / self.cells.scale)).astype(np.int64)

    @cached_property
    def _ratio(self) -> Floats:
        low, high = self._tail
        return (high + _PRIOR) / (low + _PRIOR / 4)

    @cached_property
    def _tail(self) -> tuple[Floats, Floats]:
        """Of each row, the values from the format's floor q to 4q, and from there to 16q."""
        quantum = self._quantum - self._lift
        counts = [self.cells.below_binade(quantum + up) for up in (0, 2, 4)]
        return (counts[1] - counts[0]).astype(np.float64), (counts[2] - counts[1]).astype(np.float64)


def share(lost: Floats, nonzero: Floats) -> Floats:
    """Return the lost share of the values that should be nonzero, 0 without any."""
    with np.errstate(all="ignore"):
        return np.where(lost + nonzero == 0, 0.0, lost / (lost + nonzero))


# -- parameters by the module that they belong to ----------------------------------------------------------------------

MOST = 0.25  # of a module's or a tensor's values: a larger loss is never negligible
# Times the smallest value of a format: FP32 does not add that to the root mean square of the rest.
_NEGLIGIBLE = 2.0**24


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Modules:
    """Modules of a collection of parameters, and the place of each layer's module."""

    names: tuple[str, ...]
    of_layer: Ints

    @classmethod
    def of(cls, cells: Cells) -> "Modules":
        """Return the modules of the layers' names."""
        owners = [name.rpartition(".")[0] or name for name in cells.names]
        if "weight" in cells.names:  # a model that is one layer: its bias belongs to its weight
            owners = ["weight" if name == "bias" else name for name in owners]
        distinct = list(dict.fromkeys(owners))
        place = {name: i for i, name in enumerate(distinct)}
        return cls(names=tuple(distinct), of_layer=np.array([place[name] for name in owners], dtype=np.int64))

    @classmethod
    def apart(cls, cells: Cells) -> "Modules":
        """Return each layer by itself, for collections with one tensor of a module."""
        return cls(names=cells.names, of_layer=np.arange(len(cells.names)))

    def total(self, by_layer: Floats) -> Floats:
        """Return the sum over each module's layers. NaN where none of them has a number."""
        known = ~np.isnan(by_layer)
        result = np.zeros((len(self.names), by_layer.shape[1]))
        there = np.zeros(result.shape, dtype=bool)
        np.add.at(result, self.of_layer, np.where(known, by_layer, 0.0))
        np.logical_or.at(there, self.of_layer, known)
        return np.where(there, result, np.nan)

    # A layer's underflow is judged over all its parameters together: biases are few values, and some have gradients
    # that are zero in exact arithmetic (a key's bias before a softmax, any bias before batch norm), so that what is
    # recorded of them is rounding noise, which any format may lose.
    def underflow(self, narrow: FormatLosses) -> Floats:
        """Return the underflow rate of each module."""
        return share(self.total(narrow.lost_of_cell), self.total(narrow.cells.total(narrow.cells.nonzero)))

    def harmful_underflow(self, narrow: FormatLosses) -> Floats:
        """Return the underflow rate of each module, 0 where what was lost is negligible.

        It is if under a quarter was lost, and all of it below 2^-24 of the root mean square of the values left.
        """
        # A classifier that is sure of its answers has output gradients of all sizes: p of the classes that it rules out
        # is 2^-30 of what the few wrong rows give. Its scale is at the top already, and what is lost trains nothing.
        cells, rate = narrow.cells, self.underflow(narrow)
        kept = self.total(cells.total(cells.nonzero))
        floor = cells.by_format(lambda fmt: fmt.smallest_subnormal)
        energy = self.total(cells.total(cells.column("sumsq") * (narrow.held / cells.scale / floor) ** 2))
        return np.where((rate < MOST) & (energy > _NEGLIGIBLE**2 * kept), 0.0, rate)

    def main_layers(self, cells: Cells, among: NDArray[np.bool_] | None = None) -> Sequence[str]:
        """Return for each module the name of its largest parameter (`among` some), which stands for it."""
        sizes = np.nanmax(cells.total_of("count"), axis=1)
        sizes = sizes if among is None else np.where(among, sizes, -1)
        best: dict[int, int] = {}
        for layer, module in enumerate(self.of_layer.tolist()):
            if module not in best or sizes[layer] > sizes[best[module]]:
                best[module] = layer
        return [cells.names[best[i]] for i in range(len(self.names))]
