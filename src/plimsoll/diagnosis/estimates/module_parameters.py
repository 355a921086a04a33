"""Parameters by the module that they belong to."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis.estimates.format_losses import FormatLosses, share
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints

_MOST = 0.25  # of a module's values: a larger loss is never negligible
_BELOW = 2.0**24  # times the smallest value of a format: FP32 does not add that to the root mean square of the rest


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
        floor = np.array([fmt.smallest_subnormal for fmt in narrow.known])[cells.format]
        energy = self.total(cells.total(cells.column("sumsq") * (narrow.held / cells.scale / floor) ** 2))
        return np.where((rate < _MOST) & (energy > _BELOW**2 * kept), 0.0, rate)

    def main_layers(self, cells: Cells, among: NDArray[np.bool_] | None = None) -> Sequence[str]:
        """Return for each module the name of its largest parameter, which stands for it.

        Args:
            cells: The cells.
            among: Layers to choose from. Default: all.
        """
        sizes = np.nanmax(cells.total_of("count"), axis=1)
        sizes = sizes if among is None else np.where(among, sizes, -1)
        best: dict[int, int] = {}
        for layer, module in enumerate(self.of_layer.tolist()):
            if module not in best or sizes[layer] > sizes[best[module]]:
                best[module] = layer
        return [cells.names[best[i]] for i in range(len(self.names))]
