"""Usable scales of a collection: highest without overflow, lowest of little loss.

The rules, `whatif` and the figures all use this module, so that one run has one answer. Scales are shifts (powers of
two) of the true values, by step and layer. Gradients of parameters are judged by module, others tensor by tensor.
Values that the run's own format has lost already are estimated by the tail of the remaining ones (`format_losses`). A
layer without any remaining value has no usable scales, unless the gradients of its output were flushed: it needs what
it needed before, or more than the scale that the run had.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Self
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from plimsoll import exports
from plimsoll.diagnosis.estimates.element_counts import Populations
from plimsoll.diagnosis.estimates.format_losses import MOST, FormatLosses, Modules
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.diagnosis.view import View
from plimsoll.formats import FP16, Format
from plimsoll.results import JsonRecord

# -- step ranges for which one scale works -----------------------------------------------------------------------------


@exports.exported_by("plimsoll.diagnosis")
@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch(JsonRecord):
    """A step range with the shifts that work at all of its steps.

    Attributes:
        from_step: The first step.
        to_step: The last step.
        window: The lowest and the highest shift. None: no shift works at any of the steps.
    """

    from_step: int
    to_step: int
    window: tuple[int, int] | None


def stretches_of(steps: Ints, low: Floats, high: Floats) -> list[Stretch]:
    """Return the fewest step ranges, each as long as one shift works (or none does).

    Steps at which nothing was recorded (NaN) belong to the range around them. Shifts are by step, or by layer and step.
    """
    low = np.fmax.reduce(np.atleast_2d(low), axis=0, initial=np.nan)
    high = np.fmin.reduce(np.atleast_2d(high), axis=0, initial=np.nan)
    stretches: list[Stretch] = []
    for step, lowest, highest in zip(steps.tolist(), low.tolist(), high.tolist(), strict=True):
        known = not (np.isnan(lowest) or np.isnan(highest))
        here = (int(lowest), int(highest)) if known and lowest <= highest else None
        last = stretches[-1] if stretches else None
        if last is None:
            stretches.append(Stretch(from_step=step, to_step=step, window=here))
        elif not known or here == last.window:
            stretches[-1] = Stretch(from_step=last.from_step, to_step=step, window=last.window)
        else:
            both = _both(last.window, here)
            if both is None:
                stretches.append(Stretch(from_step=step, to_step=step, window=here))
            else:
                stretches[-1] = Stretch(from_step=last.from_step, to_step=step, window=both)
    return stretches


def sentence(fmt: str, stretches: list[Stretch], scaled: bool) -> str:
    """Return the requirements of a format in one sentence.

    >>> one = Stretch(from_step=0, to_step=3990, window=(9, 13))
    >>> sentence("fp16", [one, Stretch(from_step=4000, to_step=9990, window=None)], True)
    'FP16 needs a scale of 2^9 to 2^13 until step 3,990, no scale works afterwards.'
    >>> none = Stretch(from_step=0, to_step=45, window=None)
    >>> sentence("e4m3", [none, Stretch(from_step=50, to_step=55, window=(11, 11)), none], True)
    'E4M3 has no scale that works until step 45, one of 2^11 until step 55, none afterwards.'
    """
    name = fmt.upper()
    if not stretches:
        return f"{name}: nothing was recorded to judge it by."
    if len(stretches) == 1 and stretches[0].window is None:
        return f"No scale works for {name} at any step."
    if len(stretches) == 1:
        return f"{name} {_need(stretches[0], scaled)} at all steps."
    if len(stretches) > 4:
        unusable = sum(1 for stretch in stretches if stretch.window is None)
        tail = f", and in {unusable} of the {len(stretches)} step ranges no scale works" if unusable else ""
        return f"No single scale works for {name}: it would have to change {len(stretches) - 1} times{tail}."
    first, *rest = stretches
    clauses = [f"{name} {_need(first, scaled)} until step {first.to_step:,}"]
    none = "none" if first.window is None else "no scale works"
    clauses += [f"{_then(stretch, none)} until step {stretch.to_step:,}" for stretch in rest[:-1]]
    return ", ".join([*clauses, f"{_then(rest[-1], none)} afterwards"]) + "."


def block_sentence(fmt: str, stretches: list[Stretch]) -> str:
    """Return in one sentence whether a block format works.

    >>> bad = Stretch(from_step=0, to_step=90, window=None)
    >>> block_sentence("mxfp4", [bad, Stretch(from_step=100, to_step=900, window=(0, 0))])
    'MXFP4 may lose 1 % or more of some layer until step 90, works afterwards.'
    """
    name = fmt.upper()
    if not stretches:
        return f"{name}: nothing was recorded to judge it by."
    if len(stretches) == 1:
        return f"{name} {_effect(stretches[0])} at all steps."
    if len(stretches) > 4:
        lossy = sum(1 for stretch in stretches if stretch.window is None)
        return f"{name} may lose 1 % or more of some layer in {lossy} of {len(stretches)} step ranges."
    clauses = [f"{_effect(stretch)} until step {stretch.to_step:,}" for stretch in stretches[:-1]]
    return f"{name} {', '.join(clauses)}, {_effect(stretches[-1])} afterwards."


def _effect(stretch: Stretch) -> str:
    return "may lose 1 % or more of some layer" if stretch.window is None else "works"


def _need(stretch: Stretch, scaled: bool) -> str:
    if stretch.window is None:
        return "has no scale that works"
    low, high = stretch.window
    if low <= 0 <= high:
        return f"works without a scale{f', and with {scales(low, high)},' if scaled else ''}"
    return f"needs a scale of {scales(low, high)}"


def _then(stretch: Stretch, none: str) -> str:
    return none if stretch.window is None else f"one of {scales(*stretch.window)}"


def scales(low: int, high: int) -> str:
    """Return the scales between two shifts as all surfaces write them.

    >>> scales(7, 25), scales(7, 7)
    ('2^7 to 2^25', '2^7')
    """
    return f"2^{low}" if low == high else f"2^{low} to 2^{high}"


def _both(a: tuple[int, int] | None, b: tuple[int, int] | None) -> tuple[int, int] | None:
    if a is None or b is None or max(a[0], b[0]) > min(a[1], b[1]):
        return None
    return max(a[0], b[0]), min(a[1], b[1])


# -- scales by layer and step ------------------------------------------------------------------------------------------

TOLERANCE = 0.01  # of a layer's values that may be lost

# What was computed of a record, by format.
_KNOWN: WeakKeyDictionary[FormatLosses, dict[Format, tuple[Floats, Floats]]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True, eq=False)
class Scales:
    """Lowest and highest shift that work, layers by steps. NaN where no value was recorded."""

    cells: Cells
    names: tuple[str, ...]
    low: Floats
    high: Floats

    @classmethod
    def of(cls, view: View, fmt: Format = FP16, until: int | None = None) -> Self | None:
        """Return the usable scales of the gradients up to a step. None without gradients."""
        narrow = view.narrow("gradients")
        if narrow is None:
            return None
        scales = cls.of_record(narrow, fmt, until)
        flushed = flushed_before(view, narrow.cells, _layers(narrow.cells))[:, : scales.low.shape[1]]
        if not flushed.any():
            return scales
        count = flushed.shape[1]
        places: Ints = np.arange(count, dtype=np.int64)
        known: Ints = np.maximum.accumulate(np.where(np.isnan(scales.low), 0, places), axis=1)
        before = np.take_along_axis(scales.low, known, axis=1)
        at_least = np.log2(view.scale_at(narrow.cells.steps[:count])) + 1
        return replace(scales, low=np.where(flushed, np.fmax(before, at_least), scales.low))

    @classmethod
    def of_record(cls, narrow: FormatLosses, fmt: Format, until: int | None = None) -> Self:
        """Return the usable scales of a collection up to a step, computed once for each record and format."""
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
        lowest_of, highest_of = int(lowest.max(axis=1).argmax()), int(highest.min(axis=1).argmin())
        low, high = int(lowest[lowest_of].max()), int(highest[highest_of].min())
        return (self.names[lowest_of], low), (self.names[highest_of], high)

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
        """True if one scale works for all layers at most of the last steps, a quarter of all."""
        recent = slice(-(-3 * self.low.shape[1] // 4) - 1, None)
        return bool(np.median(_known(self.need[recent] - self.room[recent], 1.0)) <= 0)

    @property
    def each_serves(self) -> bool:
        """True if each layer has a scale that works for it at most of the last steps."""
        recent = slice(-(-3 * self.low.shape[1] // 4) - 1, None)
        gaps = _over_layers(np.fmax, self.low[:, recent] - self.high[:, recent])
        return bool(np.median(_known(gaps, 1.0)) <= 0)

    @property
    def advised(self) -> tuple[int, int] | None:
        """The scales that work at all steps, else those of the last step that has gradients. None: no step has any."""
        there = np.flatnonzero(~np.isnan(self.need))
        if self.window is not None or not len(there):
            return self.window
        last = int(there[-1])
        return int(self.need[last]), int(self.room[last])


# Where the gradients of a module's output are flushed, those of its parameters are zero too, in any format: nothing of
# them lies near a floor, and they are lost all the same.
def flushed_before(view: View, cells: Cells, modules: Modules) -> NDArray[np.bool_]:
    """Return at which modules and steps parameter gradients are zero, and the gradients of the output underflow."""
    silent = modules.total(cells.total(cells.nonzero)) == 0
    outputs = view.narrow("activation_gradients") if silent.any() else None
    flushed = np.zeros(silent.shape, dtype=bool)
    if outputs is None or not outputs.censors.any():
        return flushed
    place = {name.removesuffix(":output"): i for i, name in enumerate(outputs.cells.names) if ":output" in name}
    _, mine, theirs = np.intersect1d(cells.steps, outputs.cells.steps, return_indices=True)
    for module in np.flatnonzero(silent.any(axis=1)).tolist():
        output = place.get(modules.names[module])
        if output is not None:
            flushed[module, mine] = silent[module, mine] & (outputs.fraction[output, theirs] > MOST)
    return flushed


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
