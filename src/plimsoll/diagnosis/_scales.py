"""Which loss scales serve a run's gradients: the highest that overflows nowhere, the lowest that loses little.

Of each step and module, as shifts (powers of two) of the true gradients. What the run's own format has lost already is
not seen, but estimated by the tail of what is left (`_narrow`); of a module that has nothing left, nothing is said.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self
from weakref import WeakKeyDictionary

import numpy as np

from plimsoll.diagnosis._cells import Cells, Floats, Ints
from plimsoll.diagnosis._modules import Modules
from plimsoll.diagnosis._narrow import Narrow
from plimsoll.diagnosis._tallies import Populations
from plimsoll.diagnosis._view import View
from plimsoll.formats import FP16, Format

_TOLERANCE = 0.01  # of a module's values that may be lost

# What was computed of a record: by format and tolerance the names, `low` and `high`.
_KNOWN: WeakKeyDictionary[Narrow, dict[tuple[Format, float], tuple[tuple[str, ...], Floats, Floats]]] = (
    WeakKeyDictionary()
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Scales:
    """The shifts that serve, of modules x steps: `low` to `high`; NaN where there is nothing to hold."""

    cells: Cells
    names: tuple[str, ...]
    low: Floats
    high: Floats

    @classmethod
    def of(cls, view: View, fmt: Format = FP16, until: int | None = None, tolerance: float = _TOLERANCE) -> Self | None:
        """Those of the gradients up to a step; None where there are none. Computed once for each record."""
        narrow = view.narrow("gradients")
        if narrow is None:
            return None
        cells, known = narrow.cells, _KNOWN.setdefault(narrow, {})
        if (fmt, tolerance) not in known:
            found = cls.of_cells(cells, fmt, tolerance, narrow.hidden)
            known[fmt, tolerance] = found.names, found.low, found.high
        names, low, high = known[fmt, tolerance]
        kept = slice(None) if until is None else slice(0, int(np.searchsorted(cells.steps, until, side="right")))
        return cls(cells=cells, names=names, low=low[:, kept], high=high[:, kept])

    @classmethod
    def of_cells(
        cls, cells: Cells, fmt: Format, tolerance: float, hidden: Callable[[Ints], Floats] | None = None
    ) -> Self:
        """Those of a collection of parameters; `hidden` as for `Populations.lowest_shift_of_groups`."""
        modules, values = Modules.of(cells), Populations(cells=cells)
        steps = len(cells.steps)
        group = modules.of_layer[cells.layer] * steps + cells.at
        shape = (len(modules.names), steps)
        held = np.bincount(group, weights=cells.nonzero, minlength=shape[0] * steps) > 0
        low = values.lowest_shift_of_groups(fmt, tolerance, group, shape[0] * steps, hidden).astype(np.float64)
        high = np.full(shape[0] * steps, np.inf)
        np.minimum.at(high, group, np.where(cells.nonzero > 0, values.highest_shift(fmt), np.inf))
        low, high = (np.where(held, each, np.nan).reshape(shape) for each in (low, high))
        return cls(cells=cells, names=tuple(modules.main_layers(cells)), low=low, high=high)

    @property
    def need(self) -> Floats:
        """At each step the lowest shift that serves all modules."""
        return _over_layers(np.fmax, self.low)

    @property
    def room(self) -> Floats:
        """At each step the highest shift at which nothing overflows."""
        return _over_layers(np.fmin, self.high)

    @property
    def one_serves(self) -> bool:
        """Whether at the last steps (a quarter of all) one scale serves all modules, more often than not."""
        recent = slice(-(-3 * self.low.shape[1] // 4) - 1, None)
        return bool(np.median(_known(self.need[recent] - self.room[recent], 1.0)) <= 0)

    @property
    def each_serves(self) -> bool:
        """Whether at the last steps each module has a scale that serves it, more often than not."""
        recent = slice(-(-3 * self.low.shape[1] // 4) - 1, None)
        gaps = _over_layers(np.fmax, self.low[:, recent] - self.high[:, recent])
        return bool(np.median(_known(gaps, 1.0)) <= 0)

    @property
    def shown(self) -> str:
        """The scales that serve at the last step that has gradients."""
        there = np.flatnonzero(~np.isnan(self.need))
        if not len(there):
            return "any"
        last = int(there[-1])
        return f"2^{int(self.need[last])} to 2^{int(self.room[last])}"


def _over_layers(choose: "np.ufunc", values: Floats) -> Floats:
    return choose.reduce(values, axis=0, initial=np.nan)


def _known(values: Floats, nothing: float) -> Floats:
    found = values[~np.isnan(values)]
    return found if len(found) else np.array([nothing])
