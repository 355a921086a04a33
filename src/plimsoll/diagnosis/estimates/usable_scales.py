"""Usable scales of a collection: highest without overflow, lowest of little loss.

The rules, `whatif` and the figures all use this module, so that one run has one answer. Scales are shifts (powers of
two) of the true values, by step and layer. Gradients of parameters are judged by module, others tensor by tensor.
Values that the run's own format has lost already are estimated by the tail of the remaining ones (`format_losses`). A
layer without any remaining value has no usable scales here.
"""

from dataclasses import dataclass
from functools import partial
from typing import Self
from weakref import WeakKeyDictionary

import numpy as np

from plimsoll.diagnosis.estimates.element_counts import Populations
from plimsoll.diagnosis.estimates.format_losses import FormatLosses
from plimsoll.diagnosis.estimates.module_parameters import Modules
from plimsoll.diagnosis.tables.cells import Cells, Floats
from plimsoll.diagnosis.view import View
from plimsoll.formats import FP16, Format

TOLERANCE = 0.01  # of a layer's values that may be lost

# What was computed of a record, by format.
_KNOWN: WeakKeyDictionary[FormatLosses, dict[Format, tuple[Floats, Floats]]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True, eq=False)
class Scales:
    """Shifts that work, layers by steps.

    Attributes:
        low: The lowest shift. NaN where no value was recorded.
        high: The highest shift. NaN likewise.
    """

    cells: Cells
    names: tuple[str, ...]
    low: Floats
    high: Floats

    @classmethod
    def of(cls, view: View, fmt: Format = FP16, until: int | None = None) -> Self | None:
        """Return the usable scales of the gradients up to a step. None without gradients."""
        narrow = view.narrow("gradients")
        return None if narrow is None else cls.of_record(narrow, fmt, until)

    @classmethod
    def of_record(cls, narrow: FormatLosses, fmt: Format, until: int | None = None) -> Self:
        """Return the usable scales of a collection up to a step.

        They are computed once for each record and format.
        """
        cells, known = narrow.cells, _KNOWN.setdefault(narrow, {})
        layers = _layers(cells)
        if fmt not in known:
            known[fmt] = _bounds(narrow, layers, fmt)
        until_then = slice(None) if until is None else slice(0, int(np.searchsorted(cells.steps, until, side="right")))
        low, high = (bound[:, until_then] for bound in known[fmt])
        return cls(cells=cells, names=tuple(layers.main_layers(cells)), low=low, high=high)

    @property
    def of_tensors(self) -> tuple[Floats, Floats]:
        """`low` and `high` of each tensor's layer. NaN for a tensor of zeros."""
        of_layer = _layers(self.cells).of_layer
        there = self.cells.total(self.cells.nonzero) > 0
        low, high = (np.where(there, bound[of_layer], np.nan) for bound in (self.low, self.high))
        return low, high

    @property
    def window(self) -> tuple[int, int] | None:
        """The scales that work for all layers at all steps. None: there are none."""
        low, high = np.fmax.reduce(self.need, initial=np.nan), np.fmin.reduce(self.room, initial=np.nan)
        return (int(low), int(high)) if low <= high else None

    @property
    def bounding(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """The layers that bound the scale from below and above, with their bounds."""
        lowest, highest = np.nan_to_num(self.low, nan=-np.inf), np.nan_to_num(self.high, nan=np.inf)
        needs, bears = int(lowest.max(axis=1).argmax()), int(highest.min(axis=1).argmin())
        return (self.names[needs], int(lowest[needs].max())), (self.names[bears], int(highest[bears].min()))

    @property
    def need(self) -> Floats:
        """At each step the lowest shift that works for all layers."""
        return _over_layers(np.fmax, self.low)

    @property
    def room(self) -> Floats:
        """At each step the highest shift at which nothing overflows."""
        return _over_layers(np.fmin, self.high)

    @property
    def one_serves(self) -> bool:
        """True if one scale works for all layers at most of the last steps.

        The last steps are a quarter of all.
        """
        recent = slice(-(-3 * self.low.shape[1] // 4) - 1, None)
        return bool(np.median(_known(self.need[recent] - self.room[recent], 1.0)) <= 0)

    @property
    def each_serves(self) -> bool:
        """True if each layer has a scale that works for it at most of the last steps."""
        recent = slice(-(-3 * self.low.shape[1] // 4) - 1, None)
        gaps = _over_layers(np.fmax, self.low[:, recent] - self.high[:, recent])
        return bool(np.median(_known(gaps, 1.0)) <= 0)

    @property
    def shown(self) -> str:
        """The scales that work at the last step that has gradients."""
        there = np.flatnonzero(~np.isnan(self.need))
        if not len(there):
            return "any"
        last = int(there[-1])
        return f"2^{int(self.need[last])} to 2^{int(self.room[last])}"


def _layers(cells: Cells) -> Modules:
    return Modules.of(cells) if cells.collection == "gradients" else Modules.apart(cells)


def _bounds(narrow: FormatLosses, layers: Modules, fmt: Format) -> tuple[Floats, Floats]:
    cells, values = narrow.cells, Populations(cells=narrow.cells)
    shape = (len(layers.names), len(cells.steps))
    group, size = layers.of_layer[cells.layer] * shape[1] + cells.at, shape[0] * shape[1]
    has_values = np.bincount(group, weights=cells.nonzero, minlength=size) > 0
    low = values.lowest_shift_of_groups(fmt, TOLERANCE, group, size, partial(narrow.hidden, fmt)).astype(np.float64)
    high = np.full(size, np.inf)
    np.minimum.at(high, group, np.where(cells.nonzero > 0, values.highest_shift(fmt), np.inf))
    low, high = (np.where(has_values, bound, np.nan).reshape(shape) for bound in (low, high))
    return low, high


def _over_layers(choose: "np.ufunc", values: Floats) -> Floats:
    return choose.reduce(values, axis=0, initial=np.nan)


def _known(values: Floats, nothing: float) -> Floats:
    known = values[~np.isnan(values)]
    return known if len(known) else np.array([nothing])
