"""`WhatIf`: the answer of `whatif`, as rows, a table, a sentence, or data."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from plimsoll import exports
from plimsoll.diagnosis.estimates.usable_scales import Stretch, block_sentence, scales, sentence, stretches_of
from plimsoll.diagnosis.finding import collection_words, shown, value_words
from plimsoll.diagnosis.tables.cells import Floats, Ints
from plimsoll.errors import NotRecordedError
from plimsoll.results import NotebookRepr, as_data, fields_of
from plimsoll.spectrum import Fit, Interval
from plimsoll.text import capital, percent, steps

if TYPE_CHECKING:
    from rich.table import Table

# -- the effect of a format on every cell of a collection, as counts ---------------------------------------------------

Tally = tuple[Floats, Floats, Floats]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prediction:
    """Numbers of values by cell (layers by steps): at least, at most, about.

    NaN where nothing was recorded.
    """

    nonzero: Floats
    hidden: Floats  # zeros that a narrow format may have made of values
    lost: Tally
    subnormal: Tally
    overflow: Tally
    noise: Floats  # sum of squared errors
    signal: Floats  # sum of squares

    def each(self, change: Callable[[Floats], Floats]) -> "Prediction":
        """Return the prediction with each of its numbers changed in one way."""

        def all_of(tally: Tally) -> Tally:
            return change(tally[0]), change(tally[1]), change(tally[2])

        return Prediction(
            nonzero=change(self.nonzero),
            hidden=change(self.hidden),
            lost=all_of(self.lost),
            subnormal=all_of(self.subnormal),
            overflow=all_of(self.overflow),
            noise=change(self.noise),
            signal=change(self.signal),
        )

    def summed(self, axis: int) -> "Prediction":
        """Return the prediction with its layers (0) or its steps (1) added up."""
        return self.each(lambda values: summed(values, axis))


def summed(values: Floats, axis: int) -> Floats:
    """Return the sum over layers (0) or steps (1), without unrecorded cells."""
    return np.nansum(values, axis=axis)


# -- the answer --------------------------------------------------------------------------------------------------------

_NARROW = 0.005  # half a per cent of values: an interval of blocks so narrow is shown as a point


@exports.exported_by("plimsoll.diagnosis")
@dataclass(frozen=True, slots=True, kw_only=True)
class Row(NotebookRepr):
    """One tensor over all steps, or all tensors.

    Fractions are of the nonzero finite values.

    Attributes:
        window: The shifts that work at all steps. None: none. For gradients those of the whole module, whose parameters
            are judged together. A block format scales each block itself: the shift in question, or None if it does not
            work.
        worst_step: The step at which most is lost or overflows.
    """

    name: str
    fit: Fit
    window: tuple[int, int] | None
    worst_step: int
    worst_lost: float

    def __str__(self) -> str:
        """Return one line: the layer, the effect of the format, and the worst step."""
        return f"{shown(self.name)}: {self.fit}; worst at step {self.worst_step:,}"

    def to_dict(self) -> dict[str, object]:
        """Return JSON-able data."""
        data = fields_of(self)
        effect = {name: as_data(getattr(self.fit, name)) for name in ("lost", "subnormal", "overflow", "snr_db")}
        return {"name": data.pop("name"), **effect, **{name: value for name, value in data.items() if name != "fit"}}


@exports.exported_by("plimsoll.diagnosis")
@dataclass(frozen=True, kw_only=True, eq=False)
class WhatIf(NotebookRepr):
    """Effect of a format on a run, at one shift.

    Attributes:
        shift: The shift.
        chosen: Whether `whatif` chose it.
        censored: Whether the run's own format may have lost values. They count in the upper bounds of the loss.
        rows: The tensors, those that lose most first. Equal ones are sorted by the width of their window.
        overall: All tensors together.
        stretches: Step ranges with the shifts that work for all layers: nothing overflows, and no layer loses 1 %.
        block: Block length of a block format, else 0. A block format works if no layer loses 1 %. Its values saturate
            by design.
        unrecorded: Number of cells without a block record. They are left out.
        nonfinite: Number of NaN and infinite values. They are left out.
    """

    path: str
    format: str
    shift: int
    chosen: bool
    collections: tuple[str, ...]
    censored: bool
    steps: Ints
    names: tuple[str, ...]
    prediction: Prediction
    low: Floats
    high: Floats
    stretches: list[Stretch]
    block: int = 0
    unrecorded: int = 0
    nonfinite: int = 0

    @cached_property
    def rows(self) -> list[Row]:
        """A row for each tensor."""
        all_rows = self._rows(self.names, self.prediction, self.low, self.high)
        return sorted(
            all_rows, key=lambda row: (-(row.fit.lost.estimate + row.fit.overflow.estimate), _room(row.window))
        )

    @cached_property
    def overall(self) -> Row:
        """All layers together."""
        low, high = _reduced(np.fmax, self.low, 0), _reduced(np.fmin, self.high, 0)
        whole = self.prediction.summed(0)
        return self._rows(("all",), whole.each(lambda steps: steps[None, :]), low[None, :], high[None, :])[0]

    @property
    def sentence(self) -> str:
        """The requirements of the format in one sentence."""
        needs = sentence(self.format, self.stretches, scaled="gradients" in self.collections[0])
        if self.block:
            needs = block_sentence(self.format, self.stretches)
            if self.unrecorded:
                needs += f" Layers without a block record at a step ({self.unrecorded:,} times) are left out."
        left_out = f"leaving out {self.nonfinite:,} NaN and infinite values" if self.nonfinite else ""
        if not self.censored:
            return f"{capital(left_out)}: {needs}" if left_out else needs
        hidden, visible = np.nansum(self.prediction.hidden), np.nansum(self.prediction.nonzero)
        which = " and ".join(value_words(collection) for collection in self.collections)
        of = (
            f"{percent(hidden / (hidden + visible))} of all {which} at {steps(int(self.steps[0]), int(self.steps[-1]))}"
        )
        more = f", {left_out}" if left_out else ""
        return f"Based on the values that survived the run's own format ({of} were already zero){more}: {needs}"

    def at(self, name: str, step: int) -> Fit:
        """Return the effect on one layer at one step."""
        place = np.flatnonzero(self.steps == step)
        if name not in self.names or not len(place):
            raise NotRecordedError(
                f"WhatIf.at: expected a layer and a step of the table; got {name!r}, {step}. See rows."
            )
        return self._fit(self.prediction, (self.names.index(name), int(place[0])))

    def over_time(self, name: str | None = None) -> tuple[Ints, Floats, Floats]:
        """Return the steps, and the lost and overflowing fraction at each (estimates).

        Args:
            name: The layer. Default: all layers together.
        """
        if name is not None and name not in self.names:
            raise NotRecordedError(f"WhatIf.over_time: expected a layer of the table; got {name!r}. See rows.")
        layers = np.arange(len(self.names)) if name is None else np.array([self.names.index(name)])
        total = summed(self.prediction.nonzero[layers], 0)
        with np.errstate(all="ignore"):
            lost, over = (
                np.where(total > 0, summed(tally[2][layers], 0) / total, 0.0)
                for tally in (self.prediction.lost, self.prediction.overflow)
            )
        return self.steps, lost, over

    def joined(self, other: "WhatIf") -> "WhatIf":
        """Return both as one. The collection distinguishes their layers."""
        steps = np.union1d(self.steps, other.steps)
        both = (self, other)

        def stacked(*parts: Floats) -> Floats:
            result = np.full((sum(len(p) for p in parts), len(steps)), np.nan)
            start = 0
            for part, whole in zip(parts, both, strict=True):
                result[start : start + len(part), np.searchsorted(steps, whole.steps)] = part
                start += len(part)
            return result

        def tally(name: str) -> Tally:
            mine, theirs = getattr(self.prediction, name), getattr(other.prediction, name)
            return stacked(mine[0], theirs[0]), stacked(mine[1], theirs[1]), stacked(mine[2], theirs[2])

        p, q = self.prediction, other.prediction
        prediction = Prediction(
            nonzero=stacked(p.nonzero, q.nonzero),
            hidden=stacked(p.hidden, q.hidden),
            lost=tally("lost"),
            subnormal=tally("subnormal"),
            overflow=tally("overflow"),
            noise=stacked(p.noise, q.noise),
            signal=stacked(p.signal, q.signal),
        )
        low, high = stacked(self.low, other.low), stacked(self.high, other.high)
        return replace(
            self,
            collections=self.collections + other.collections,
            censored=self.censored or other.censored,
            steps=steps,
            names=tuple(f"{answer.collections[0]} {name}" for answer in both for name in answer.names),
            prediction=prediction,
            low=low,
            high=high,
            unrecorded=self.unrecorded + other.unrecorded,
            nonfinite=self.nonfinite + other.nonfinite,
            stretches=stretches_of(steps, low, high),
        )

    def to_dict(self) -> dict[str, object]:
        """Return all of it as JSON-able data."""
        steps, lost, over = self.over_time()
        return {
            "run": self.path,
            "format": self.format,
            "shift": self.shift,
            "chosen": self.chosen,
            "collections": list(self.collections),
            "censored": self.censored,
            "sentence": self.sentence,
            "stretches": as_data(self.stretches),
            "overall": self.overall.to_dict(),
            "rows": as_data(self.rows),
            "over_time": {"step": steps.tolist(), "lost": lost.tolist(), "overflow": over.tolist()},
        }

    def table(self, most: int = 20, width: int | None = None) -> "Table":
        """Return a table for the terminal: all layers together, and those that lose most.

        Args:
            most: Largest number of layers. Default: 20.
            width: Width in columns. Default: that of the content.
        """
        from rich import box
        from rich.table import Table

        how = ", the best single one" if self.chosen and not self.block else ""
        title = f"{self.format.upper()} at 2^{self.shift}{how}: {', '.join(map(collection_words, self.collections))}"
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False,
                      pad_edge=False, width=width)  # fmt: skip
        table.add_column("tensor", overflow="ellipsis", no_wrap=True, ratio=1)
        for head in ("lost", "subnormal", "overflow", "SNR dB", "works" if self.block else "scales"):
            table.add_column(head, justify="right", no_wrap=True)
        listed = self.rows[:most]
        for row in [self.overall, *listed]:
            table.add_row(*_cells_of(row, in_blocks=self.block > 0), end_section=row is self.overall)
        if len(self.rows) > len(listed):
            table.caption = f"and {len(self.rows) - len(listed)} tensors that lose less"
            table.caption_justify = "left"
        return table

    def __repr__(self) -> str:
        return f"<WhatIf: {self.format} of {', '.join(self.collections)} in {self.path}: {self.sentence}>"

    def __str__(self) -> str:
        """Return the sentence, and the loss at the shift."""
        fit, written = self.overall.fit, _range if self.block else interval_words
        return (
            f"{self.sentence} At 2^{self.shift}: lost {written(fit.lost)}, subnormal {written(fit.subnormal)}, "
            f"overflow {written(fit.overflow)}."
        )

    def _rows(self, names: Sequence[str], p: Prediction, low: Floats, high: Floats) -> list[Row]:
        """Return a row for each name of a prediction."""
        with np.errstate(all="ignore"):
            bad = np.nan_to_num((p.lost[2] + p.overflow[2]) / p.nonzero)
        worst = bad.argmax(axis=1)
        whole = p.summed(1)
        windows = zip(_reduced(np.fmax, low, 1).tolist(), _reduced(np.fmin, high, 1).tolist(), strict=True)
        return [
            Row(
                name=name,
                fit=self._fit(whole, i),
                window=None if math.isnan(lowest) or lowest > highest else (int(lowest), int(highest)),
                worst_step=int(self.steps[worst[i]]),
                worst_lost=float(bad[i, worst[i]]),
            )
            for i, (name, (lowest, highest)) in enumerate(zip(names, windows, strict=True))
        ]

    def _fit(self, p: Prediction, place: int | tuple[int, int]) -> Fit:
        def at(values: Floats) -> float:
            value = float(values[place])
            return 0.0 if math.isnan(value) else value

        def interval(tally: Tally) -> Interval:
            low, high, estimate = (at(bound) / nonzero if nonzero else 0.0 for bound in tally)
            return Interval(low=low, high=high, estimate=estimate)

        nonzero, hidden, noise, signal = at(p.nonzero), at(p.hidden), at(p.noise), at(p.signal)
        lost = interval(p.lost)
        if hidden:
            high = (at(p.lost[1]) + hidden) / (nonzero + hidden)
            lost = Interval(low=lost.low, high=max(high, lost.high), estimate=lost.estimate)
        return Fit(
            format=self.format,
            shift=self.shift,
            lost=lost,
            subnormal=interval(p.subnormal),
            overflow=interval(p.overflow),
            snr_db=10 * math.log10(signal / noise) if noise > 0 and signal > 0 else math.inf,
        )


def _room(window: tuple[int, int] | None) -> float:
    """Return the number of scales that work, -Inf for none, so that it sorts first."""
    return -math.inf if window is None else window[1] - window[0]


def _cells_of(row: Row, *, in_blocks: bool) -> list[str]:
    fit = row.fit
    window = "none" if row.window is None else scales(*row.window)
    if in_blocks:
        window = "no" if row.window is None else "yes"
    noise = "inf" if math.isinf(fit.snr_db) else f"{fit.snr_db:.0f}"
    written = _range if in_blocks else estimate_words
    return [shown(row.name), *(written(share) for share in (fit.lost, fit.subnormal, fit.overflow)), noise, window]


def estimate_words(interval: Interval) -> str:
    """Return an interval as its estimate in per cent, "about 0" where it may be more."""
    return "about 0 %" if interval.estimate == 0 < interval.high else percent(interval.estimate)


def interval_words(interval: Interval) -> str:
    """Return an interval as its estimate in per cent, with its ends if they differ.

    >>> interval_words(Interval(low=0.0, high=0.19, estimate=0.0))
    'about 0 % (0 % to 19 %)'
    """
    low, high = percent(interval.low), percent(interval.high)
    return estimate_words(interval) + ("" if low == high else f" ({low} to {high})")


def _range(interval: Interval) -> str:
    """Return an interval in per cent as its estimate, or its ends if it is too wide."""
    # Of blocks it is known how deep values lie below their block's largest one, but not where in a binade that one is.
    if interval.high - interval.low <= max(_NARROW, 0.5 * interval.low):
        return estimate_words(interval)
    return f"{percent(interval.low)} to {percent(interval.high)}"


def _reduced(choose: "np.ufunc", values: Floats, axis: int) -> Floats:
    return choose.reduce(values, axis=axis, initial=np.nan)
