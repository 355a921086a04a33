"""Usable shifts of a plan's series at every step, losses over the whole run, and the loss scale.

Element formats have windows of shifts. A block format scales each block itself: its losses are in the run's block
records, if there are any of that block length. Without them a bound is known. No block's largest value is beyond the
tensor's absmax, and a block's scale rises with its largest value. So a value is lost at most if it would be at the
scale of the tensor's absmax.

FP16 modules have one loss scale if one works for all, else one for each layer, or for as many layers as it can. Windows
are of the true gradients; a module's own scale includes the loss scale.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis.estimates.block_counts import BlockCells, BlockTallies
from plimsoll.diagnosis.estimates.element_counts import Populations, Tallies, ordinals
from plimsoll.diagnosis.estimates.format_losses import FormatLosses
from plimsoll.diagnosis.estimates.rounding_noise import Noise
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.diagnosis.view import View
from plimsoll.formats import BlockFormat, Format
from plimsoll.spectrum import Interval

_FLOOR = -14  # of a loss scaler's scale
_UNKNOWN_SCALE = 16  # where nothing is known
HIGHEST = 24  # a loss scale begins no higher unless a module needs it: higher ones change nothing that is rounded
_LOWEST_OF_LAYER, _HIGHEST_OF_LAYER = -24, 100  # `LayerScaler`'s
_SLACK = 1 + 2.0**-20  # of NVFP4's scales, which are rounded to FP32
_NEVER = 10_000  # a shift that no format can need


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Shifts that work at all steps of some series (any for zeros), and the steps that bound them."""

    low: int = -_NEVER
    high: int = _NEVER
    low_step: int = -1
    high_step: int = -1

    def __and__(self, other: "Window") -> "Window":
        lower, upper = max(self, other, key=lambda w: w.low), min(self, other, key=lambda w: w.high)
        return Window(low=lower.low, low_step=lower.low_step, high=upper.high, high_step=upper.high_step)

    @property
    def bounded(self) -> bool:
        """True if there were values to hold."""
        return self.high < _NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCounts:
    """Numbers of values that a format loses (least, about, most), and that overflow for certain or maybe."""

    lost: tuple[float, float, float] = (0.0, 0.0, 0.0)
    overflow: tuple[float, float] = (0.0, 0.0)
    values: float = 0.0  # nonzero ones
    hidden: float = 0.0  # zeros that may have been values

    def __add__(self, other: "LossCounts") -> "LossCounts":
        low, estimate, high = (a + b for a, b in zip(self.lost, other.lost, strict=True))
        return LossCounts(
            lost=(low, estimate, high),
            overflow=(self.overflow[0] + other.overflow[0], self.overflow[1] + other.overflow[1]),
            values=self.values + other.values,
            hidden=self.hidden + other.hidden,
        )

    @property
    def fraction(self) -> Interval:
        """Return the lost share. Values that the run's own format may have lost are in the upper end."""
        low, estimate, high = self.lost
        known = max(self.values, 1.0)
        upper = (high + self.hidden) / max(self.values + self.hidden, 1.0)
        return Interval(low=low / known, high=max(upper, high / known), estimate=estimate / known)

    @property
    def overflows(self) -> Interval:
        """Return the overflowing share of the values."""
        low, high = (each / max(self.values, 1.0) for each in self.overflow)
        return Interval(low=low, high=high, estimate=(low + high) / 2)


class Collection:
    """One collection of a run, asked about by the names of its series."""

    def __init__(self, narrow: FormatLosses, tolerance: float, blocks: BlockCells | None = None) -> None:
        self.narrow, self.cells, self.tolerance, self.blocks = narrow, narrow.cells, tolerance, blocks
        self.values = Populations(cells=narrow.cells)
        self._place = {name: layer for layer, name in enumerate(self.cells.names)}
        self._windows: dict[str, tuple[Ints, Ints]] = {}
        self._blocks: dict[str, Tallies] = {}
        self._errors: dict[tuple[str, int], tuple[Floats, Floats]] = {}

    @classmethod
    def of(cls, view: View, collection: str, tolerance: float) -> "Collection | None":
        """Return a collection of a run. None if it was not recorded."""
        recorded = view.in_blocks(collection)
        if recorded is not None:
            return cls(recorded[1], tolerance, recorded[0])
        narrow = view.narrow(collection)
        return None if narrow is None else cls(narrow, tolerance)

    def has(self, name: str) -> bool:
        """Return whether the series has a record."""
        return name in self._place

    @cached_property
    def hidden(self) -> Floats:
        """Zeros that a row's own format may have made of values. Exact in shadow steps."""
        zeros, shadow = self.cells.column("zeros").astype(np.float64), self.cells.column("underflowed")
        return np.where(self.narrow.censors, np.where(np.isnan(shadow), zeros, shadow), 0.0)

    def count(self, names: Sequence[str]) -> float:
        """Return the usual number of values of the series at a step."""
        count = self.cells.column("count")
        return sum(float(np.median(count[self._rows([name])])) for name in names if self.has(name))

    def window(self, names: Sequence[str], fmt: Format) -> Window:
        """Return the shifts at which no series overflows and each loses little, always."""
        low, high = self._window_of_rows(fmt)
        rows = self._rows(names)
        rows = rows[self.cells.nonzero[rows] + self.hidden[rows] > 0]
        if not len(rows):
            return Window()
        worst, least = rows[np.argmax(low[rows])], rows[np.argmin(high[rows])]
        steps = self.cells.steps[self.cells.at]
        return Window(
            low=int(low[worst]), low_step=int(steps[worst]), high=int(high[least]), high_step=int(steps[least])
        )

    def spare(self, names: Sequence[str], trained: int) -> float:
        """Return the headroom to leave for the steps between samples, in binades."""
        tops = self.cells.true_absmax
        return max((spare(self.cells.steps, tops[self._place[n]], trained) for n in names if self.has(n)), default=0.0)

    def worst_of_blocks(self, names: Sequence[str], fmt: BlockFormat) -> tuple[float, int, bool]:
        """Return the largest share that a block format can lose, its step, and whether it is recorded."""
        rows = self._rows(names)
        known = self.cells.nonzero[rows] + self.hidden[rows]
        rows, known = rows[known > 0], known[known > 0]
        if not len(rows):
            return 0.0, -1, True
        share = (self._lost_in_blocks(fmt).high[rows] + self.hidden[rows]) / known
        worst = rows[np.argmax(share)]
        recorded = self.blocks is not None and bool(self.blocks.length[worst] == fmt.block)
        return float(share.max()), int(self.cells.steps[self.cells.at[worst]]), recorded

    def loss_counts(self, names: Sequence[str], fmt: Format | BlockFormat, shift: int) -> LossCounts:
        """Return a format's losses of the series over the whole run, times ``2**shift``."""
        rows = self._rows(names)
        values, hidden = float(self.cells.nonzero[rows].sum()), float(self.hidden[rows].sum())
        if isinstance(fmt, BlockFormat):
            found = self._lost_in_blocks(fmt)
            least, about, most = (float(each[rows].sum()) for each in (found.low, found.estimate, found.high))
            return LossCounts(lost=(least, about, most), values=values, hidden=hidden)
        among = Populations(cells=self.cells.of_rows(rows))
        lost, over = among.lost(fmt, shift), among.overflow(fmt, shift)
        low, estimate, high = (float(each.sum()) for each in (lost.low, lost.estimate, lost.high))
        beyond = (float(over.low.sum()), float(over.high.sum()))
        return LossCounts(lost=(low, estimate, high), overflow=beyond, values=values, hidden=hidden)

    def energy(self, names: Sequence[str]) -> float:
        """Return the series' sum of squares a step, over the later half of the steps."""
        rows = self._late(names)
        squares = self.cells.column("sumsq")[rows] / self.cells.scale[rows] ** 2
        return float(squares.sum()) / max(len(np.unique(self.cells.at[rows])), 1)

    def relative_error(self, names: Sequence[str], fmt: Format | BlockFormat, shift: int) -> float | None:
        """Return a cast's squared error over the sum of squares, in the later steps.

        These are the later half. None for a block format whose block length was not recorded.
        """
        rows = self._late(names)
        if isinstance(fmt, BlockFormat) and (self.blocks is None or (self.blocks.length[rows] != fmt.block).any()):
            return None
        noise, signal = self._noise_of_rows(fmt, shift)
        whole = signal[rows].sum()
        return float(noise[rows].sum() / whole) if whole > 0 else 0.0

    def _noise_of_rows(self, fmt: Format | BlockFormat, shift: int) -> tuple[Floats, Floats]:
        """Return the sum of squared errors and of squares, by row."""
        key = fmt.name, shift
        if key not in self._errors:
            if isinstance(fmt, BlockFormat):
                assert self.blocks is not None  # the caller has asked
                found, rows = np.zeros((2, len(self.cells))), np.flatnonzero(self.blocks.length == fmt.block)
                fit = BlockTallies(blocks=self.blocks.of_rows(rows)).fit(fmt, 0)
                found[:, rows] = fit.noise, fit.signal
                self._errors[key] = found[0], found[1]
            else:
                self._errors[key] = self._noise.of(fmt, shift)
        return self._errors[key]

    @cached_property
    def _noise(self) -> Noise:
        return Noise(values=self.values)

    def sums(self, names: Sequence[str], fmt: Format | BlockFormat, shift: int) -> tuple[float, float, float]:
        """Return three sums of magnitudes for each step, over the later half of the steps.

        They are of the values that a cast makes zero, of what it adds to values that it raises to the format's smallest
        one, and of all values. 0 for block formats, whose records do not have them.
        """
        if isinstance(fmt, BlockFormat):
            return 0.0, 0.0, 0.0
        cells = self.cells.of_rows(self._late(names))
        row = np.repeat(np.arange(len(cells)), cells.length)
        binades = np.arange(len(cells.flat)) - cells.start[:-1][row] + cells.lowest[row]
        below = fmt.quantum_exponent - 1 - shift + np.round(np.log2(cells.scale))[row]  # half of the smallest value
        sums, true = cells.flat * np.ldexp(1.0, binades.astype(np.int32)), cells.column("abssum") / cells.scale
        whole = np.maximum(np.bincount(row, sums, len(cells)), np.finfo(np.float64).tiny)
        lost, near = (np.bincount(row[held], sums[held], len(cells)) for held in (binades < below, binades == below))
        # Values of a binade are spread in the same way in all binades of a row. The smallest value is twice its start.
        added = np.maximum(2 * near / cells.scale - true * near / whole, 0.0)
        steps = max(len(np.unique(cells.at)), 1)
        return float((true * lost / whole).sum()) / steps, float(added.sum()) / steps, float(true.sum()) / steps

    def _late(self, names: Sequence[str]) -> NDArray[np.intp]:
        rows = self._rows(names)
        at = np.unique(self.cells.at[rows])
        return rows[self.cells.at[rows] >= at[len(at) // 2]] if len(at) else rows

    def nonfinite_steps(self, names: Sequence[str]) -> int:
        """At how many steps a NaN or an Inf was among the series."""
        rows = self._rows(names)
        bad = sum(self.cells.column(name)[rows] for name in ("nans", "pos_infs", "neg_infs"))
        return len(np.unique(self.cells.at[rows[np.asarray(bad) > 0]]))

    @cached_property
    def _order(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.cells.layer, kind="stable")
        return order, np.searchsorted(self.cells.layer[order], np.arange(len(self.cells.names) + 1))

    def _rows(self, names: Sequence[str]) -> NDArray[np.intp]:
        order, start = self._order
        places = [self._place[name] for name in names if name in self._place]
        parts = [order[start[place] : start[place + 1]] for place in places]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.intp)

    def _window_of_rows(self, fmt: Format) -> tuple[Ints, Ints]:
        if fmt.name not in self._windows:
            rows = np.arange(len(self.cells))
            low = self.values.lowest_shift_of_groups(fmt, self.tolerance, rows, len(rows), lambda _: self.hidden)
            self._windows[fmt.name] = low, self.values.highest_shift(fmt)
        return self._windows[fmt.name]

    def _lost_in_blocks(self, fmt: BlockFormat) -> Tallies:
        """Return the lost values by row. The upper end includes blocks with NaN or Inf."""
        if fmt.name not in self._blocks:
            found = self._lost_at_most(fmt)
            if self.blocks is not None:
                rows = np.flatnonzero(self.blocks.length == fmt.block)
                recorded = self.blocks.of_rows(rows)
                lost = BlockTallies(blocks=recorded).fit(fmt, 0).lost
                high = np.minimum(lost.high + recorded.poisoned, recorded.cells.nonzero)
                for whole, part in ((found.low, lost.low), (found.high, high), (found.estimate, lost.estimate)):
                    whole[rows] = part
            self._blocks[fmt.name] = found
        return self._blocks[fmt.name]

    def _lost_at_most(self, fmt: BlockFormat) -> Tallies:
        """Upper bound of lost values: those lost at the absmax's scale, and those in blocks with NaN or Inf."""
        point = ordinals(_flushed_below(self.cells, fmt))
        lost = self.values.below(point, inclusive=True).high
        poisoned = self.cells.column("nans") + self.cells.column("pos_infs") + self.cells.column("neg_infs")
        upper = np.minimum(lost + poisoned * (fmt.block - 1), self.cells.nonzero).astype(np.float64)
        return Tallies(low=np.zeros_like(upper), high=upper, estimate=upper / 2)


def _flushed_below(cells: Cells, fmt: BlockFormat) -> Floats:
    """Return the magnitude (as stored) up to which a block with the row's absmax loses values, by row."""
    element = fmt.element
    with np.errstate(all="ignore"):
        absmax = np.nan_to_num(cells.column("absmax") / cells.scale)
        if fmt.scale.signed and not fmt.tensor_scale:
            return _flushed_without_tensor_scale(absmax, fmt) * cells.scale
        if fmt.tensor_scale:
            scale = absmax / element.max * _SLACK
        else:
            exponent = np.frexp(absmax)[1].astype(np.int64) - 1 - element.max_exponent
            scale = np.ldexp(1.0, np.clip(exponent, fmt.scale.min_exponent, fmt.scale.max_exponent).astype(np.int32))
        return np.where(absmax > 0, element.smallest_subnormal / 2 * scale * cells.scale, 0.0)


def _flushed_without_tensor_scale(absmax: Floats, fmt: BlockFormat) -> Floats:
    """Return the same of true values, if a block's scale is its own absmax over the element's."""
    element, scale = fmt.element, fmt.scale
    ideal = np.minimum(absmax / element.max, scale.max)
    rounded = ideal * (1 + 2.0 ** -(scale.mantissa_bits + 1)) * _SLACK + scale.smallest_subnormal / 2
    # Blocks below this have a scale of zero.
    dead = np.minimum(absmax, element.max * scale.smallest_subnormal / 2)
    return np.where(absmax > 0, np.maximum(element.smallest_subnormal / 2 * rounded, dead), 0.0)


# The largest value of a tensor moves between samples, by an unknown amount. Known is how far it moved from sample to
# sample. Let the log2 of largest values have exponential tails, which fall by e in b binades. The values then
# have tails of a power law, heavier than those of most gradients.
#
# b is the mean of the absolute difference of two samples: such a difference is Laplace distributed with scale b. With n
# steps for each recorded one, the largest of the others exceeds the largest recorded one by x binades with probability
# (n - 1) / (n - 1 + exp(x / b)), since the difference of two Gumbel variables is logistic. For a risk r that is
# x = b ln((n - 1) (1 - r) / r).
#
# For a tensor that moves evenly up or down, b is its movement between samples, and it gets several times that. The mean
# of k differences is raised by two of its standard errors, 2 / sqrt(k) of it.
_RISK = 1e-3  # of a tensor whose steps in between go beyond
_UNKNOWN = 1.0  # binades: a single sample has no known movement


def spare(steps: Ints, largest: Floats, trained: int) -> float:
    """Return the binades to leave above the largest value of a series: 0 if every step was recorded.

    `largest`: the value at each step, NaN without a record. `trained`: number of steps of the run, 0 if unknown.
    """
    known = np.isfinite(largest) & (largest > 0)
    tops, at = np.log2(largest[known]), steps[known]
    if not len(tops):
        return 0.0
    apart = max(float(np.diff(at).mean()) if len(at) > 1 else 1.0, trained / len(at))
    if apart <= 1:
        return 0.0
    moved = np.abs(np.diff(tops))
    scale = float(moved.mean()) * (1 + 2 / math.sqrt(len(moved))) if len(moved) else _UNKNOWN
    return scale * max(math.log((apart - 1) * (1 - _RISK) / _RISK), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Exponents of the loss scale and of modules that need their own; `unserved` have none at this loss scale."""

    loss: int
    layers: Mapping[str, int]
    unserved: tuple[str, ...] = ()


def loss_scales(windows: Mapping[str, Window], *, margin: int, layer_scales: bool) -> Scales:
    """Return the loss scales for modules that each have a usable one."""
    ranges = {name: _range(window, margin) for name, window in windows.items() if window.bounded}
    if not ranges:
        return Scales(loss=_UNKNOWN_SCALE, layers={})
    low, high = max(low for low, _ in ranges.values()), min(high for _, high in ranges.values())
    if max(low, _FLOOR) <= high:
        return Scales(loss=_within(low, high), layers={})
    own = {name: min(high, _HIGHEST_OF_LAYER) for name, (_, high) in ranges.items() if high >= _LOWEST_OF_LAYER}
    if layer_scales and own:
        usual = int(statistics.median_low(own.values()))
        unserved = tuple(name for name in ranges if name not in own)
        return Scales(loss=min(max(usual, _FLOOR), HIGHEST), layers=own, unserved=unserved)
    return _for_most(ranges)


def _range(window: Window, margin: int) -> tuple[int, int]:
    return window.low, window.high - margin


def _within(low: int, high: int) -> int:
    return min(high, max(low, HIGHEST))


def _for_most(ranges: Mapping[str, tuple[int, int]]) -> Scales:
    """Return the scale that works for most modules, of several the lowest."""
    serving = {k: [n for n, (low, high) in ranges.items() if low <= k <= high] for k in {h for _, h in ranges.values()}}
    best = max((k for k in serving if k >= _FLOOR), key=lambda k: (len(serving[k]), -k), default=None)
    if best is None:
        return Scales(loss=_UNKNOWN_SCALE, layers={}, unserved=tuple(ranges))
    served = serving[best]
    low, high = max(ranges[n][0] for n in served), min(ranges[n][1] for n in served)
    return Scales(loss=_within(low, high), layers={}, unserved=tuple(n for n in ranges if n not in served))
