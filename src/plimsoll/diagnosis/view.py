"""`View`: a run as matrices of layers by steps, read on demand, up to one step.

A view ends at its step `until`. So the findings in a view of a run's beginning are those that the run had when it ended
there.
"""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from plimsoll.checks import integer
from plimsoll.diagnosis.estimates.block_counts import BlockCells, read_blocks
from plimsoll.diagnosis.estimates.format_losses import FormatLosses
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints, read, read_each
from plimsoll.errors import ArgumentError, PlimsollError
from plimsoll.formats import Format, get_element
from plimsoll.runs import Cast, Event, Run

_NOTHING = 1e-6  # of the loss that a run began with
_NARROWER_THAN_FP32 = 24  # bits; FP32 has 32, TF32 19 with FP32's range
_SUCCESS = ("SystemExit: 0", "SystemExit: None", "SystemExit: ", "GeneratorExit: ")  # leave a block, and are no failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Early end of a run."""

    how: Literal["exception", "interrupt", "signal", "killed"]  # the kind of end
    step: int
    message: str  # name and text of the exception or signal

    def __str__(self) -> str:
        """Return the words that follow a run's name.

        >>> print(Ending(how="exception", step=40, message="KeyError: 'lost'"))
        ended by an exception at step 40: KeyError: 'lost'
        """
        if self.how == "killed":
            return f"stopped without closing after step {self.step:,}"
        cause = {"exception": "an exception", "interrupt": "an interrupt", "signal": "a signal"}[self.how]
        return f"ended by {cause} at step {self.step:,}: {self.message}"


class View:
    """A run up to a step.

    Args:
        run: The run.
        until: The last step of the view. Default: all.

    Raises:
        ArgumentError: `until` is no integer, or negative.
    """

    def __init__(self, run: Run, until: int | None = None) -> None:
        if not isinstance(run, Run):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(f"View: expected a plimsoll.Run; got {run!r}. Write View(plimsoll.Run(folder)).")
        remedy = "Steps count from 0; leave it out for all that was recorded."
        until = None if until is None else integer("View", "until", until, remedy=remedy)
        if until is not None and until < 0:
            raise ArgumentError(f"View: expected until to be a step, 0 or later; got until={until}. {remedy}")
        self.run, self.until = run, until
        self.reads_all = False  # whether the first question about a collection reads all of them, in one pass
        self._cells: dict[str, Cells | None] = {}
        self._narrow: dict[str, FormatLosses] = {}
        self._blocks: dict[str, tuple[BlockCells, FormatLosses] | None] = {}
        self._scalars: dict[str, tuple[Ints, Floats]] = {}

    def cells(self, collection: str) -> Cells | None:
        """Return the spectra of a collection. None if it was not recorded."""
        if collection not in self._cells:
            wanted = [collection]
            if self.reads_all and collection in self.run.tensors:
                wanted = [each for each in self.run.tensors if each not in self._cells]
            for each, cells in read_each(self.run, wanted, self.until):
                self._cells[each] = self.as_emulated(each, cells)
            self._cells |= {each: None for each in wanted if each not in self._cells}
        return self._cells[collection]

    def as_emulated(self, collection: str, cells: Cells | None) -> Cells | None:
        """Return the cells with the formats of an emulation in place of FP32."""
        # An emulation rounds values that PyTorch holds in FP32.
        if cells is not None:
            for steps, formats in self.emulations:
                if collection in formats:
                    cells = cells.emulated(steps, formats[collection])
        return cells

    @cached_property
    def emulations(self) -> Sequence[tuple[range, Mapping[str, str]]]:
        """Step ranges of emulations of all results, with their formats by collection."""
        changes = [event for event in self.events if event.kind == "emulation"]
        steps = [*(event.step for event in changes), sys.maxsize]
        spans: list[tuple[range, Mapping[str, str]]] = []
        for event, end in zip(changes, steps[1:], strict=True):
            formats = event.details.get("formats")
            if isinstance(formats, Mapping):
                pairs = cast("Mapping[str, object]", formats).items()
                spans.append((range(event.step, end), {key: str(name) for key, name in pairs if _is_format(name)}))
        return spans

    def only(self, collection: str, name: str) -> "View":
        """Return the view of one layer of a collection.

        It reads only the rows of that layer that this view has not read already.
        """
        result = View(self.run, self.until)
        result._scalars = self._scalars
        result.__dict__["casts"] = self.casts
        result.__dict__["emulations"] = self.emulations
        # What held a gradient is judged by its weight too.
        for needed in (collection, "weights") if collection == "gradients" else (collection,):
            if name not in self.run.tensors.get(needed, ()):
                result._cells[needed] = None
            elif (whole := self._cells.get(needed)) is not None:
                result._cells[needed] = whole.only(name) if name in whole.names else None
            else:
                result._cells[needed] = self.as_emulated(needed, read(self.run, needed, self.until, name))
        return result

    def scalar(self, name: str) -> tuple[Ints, Floats]:
        """Return the steps and values of a scalar. Both are empty if it was not recorded."""
        if name not in self._scalars:
            steps, values = (np.empty(0, dtype=np.int64), np.empty(0))
            if name in self.run.scalar_names:
                steps, values = self.run.scalars(name)
            there = slice(None) if self.until is None else steps <= self.until
            self._scalars[name] = steps[there], values[there]
        return self._scalars[name]

    @cached_property
    def losses(self) -> Mapping[str, tuple[Ints, Floats]]:
        """Losses by name: `loss`, then those of other optimizers, such as `loss:actor`.

        Of a batch that the loop repeated, only the loss of its last try: the others are the same loss.
        """
        others = sorted(name for name in self.run.scalar_names if name.startswith("loss:"))
        return {name: self._of_last_tries(*self.scalar(name)) for name in ("loss", *others)}

    def _of_last_tries(self, steps: Ints, loss: Floats) -> tuple[Ints, Floats]:
        ends, retries = self.scalar("retries")  # recorded at the last try of each batch
        if not self.repeats_batches:
            return steps, loss
        end = np.searchsorted(ends, steps)
        known = np.minimum(end, len(ends) - 1)
        repeated = (end < len(ends)) & (steps < ends[known]) & (steps >= ends[known] - retries[known])
        return steps[~repeated], loss[~repeated]

    @cached_property
    def events(self) -> Sequence[Event]:
        """Events by step."""
        return [e for e in self.run.events() if self.until is None or e.step <= self.until]

    @cached_property
    def skips(self) -> frozenset[int]:
        """Steps that a scaler is recorded to have skipped."""
        return frozenset(e.step for e in self.events if e.kind == "skip")

    @property
    def scaler(self) -> str:
        """Class of the run's loss scaler. Empty without one, and in runs of versions that did not record it."""
        return str(self.run.manifest.get("scaler", ""))

    @cached_property
    def repeats_batches(self) -> bool:
        """True if the loop repeats batches that overflow (`max_retries` of `prepare`): each try is a step."""
        return len(self.scalar("retries")[0]) > 0

    @cached_property
    def casts(self) -> Sequence[Cast]:
        """Casts of modules that had started by the view's end."""
        return [c for c in self.run.casts() if self.until is None or c.since_step <= self.until]

    @cached_property
    def last_step(self) -> int:
        """The last recorded step. -1: the run is empty."""
        steps = (*self.run.scalar_steps, *self.run.steps)
        return max((step for step in steps if self.until is None or step <= self.until), default=-1)

    @cached_property
    def ending(self) -> Ending | None:
        """The last recorded early end. None if the run ended properly or still goes on."""
        endings = [e for e in self.events if e.kind == "trigger" and e.details.get("reason") in ("exception", "signal")]
        endings = [e for e in endings if e.message not in _SUCCESS]
        if endings:
            last = max(endings, key=lambda event: event.step)
            interrupted = last.message.startswith("KeyboardInterrupt")
            how = "signal" if last.details.get("reason") == "signal" else "interrupt" if interrupted else "exception"
            return Ending(how=how, step=last.step, message=last.message.rstrip(": "))
        if self.until is None and self.run.was_abandoned:
            return Ending(how="killed", step=max(self.last_step, 0), message="the process is gone")
        return None

    @cached_property
    def scaled(self) -> bool:
        """True if the loss was scaled at any step."""
        values = self.scalar("scale")[1]
        return bool((values[np.isfinite(values)] != 1.0).any())

    def scale_at(self, steps: Ints) -> Floats:
        """Return the loss scale at each step: the last one recorded by then, or 1."""
        known, values = self.scalar("scale")
        if not len(known):
            return np.ones(len(steps))
        place = np.searchsorted(known, steps, side="right") - 1
        scales = values[np.maximum(place, 0)]
        return np.where(np.isfinite(scales) & (scales > 0), scales, 1.0)

    def solved(self, steps: Ints) -> NDArray[np.bool_]:
        """Return whether the loss is zero, or next to nothing, at each step."""
        known, loss = self.scalar("loss")
        finite = np.isfinite(loss)
        known, loss = known[finite], loss[finite]
        if not len(loss):
            return np.zeros(len(steps), dtype=bool)
        place = np.minimum(np.searchsorted(known, steps), len(known) - 1)
        # The gradients of a loss of zero are next to nothing too, which is no underflow.
        nothing = np.abs(loss[place]) <= _NOTHING * abs(float(np.median(loss[:5])))
        return (known[place] == steps) & nothing

    def narrow(self, collection: str) -> FormatLosses | None:
        """Return narrow formats' effect on a collection; None if it was not recorded."""
        cells = self.cells(collection)
        if cells is None:
            return None
        if collection not in self._narrow:
            self._narrow[collection] = FormatLosses(cells=cells, held=self._held(cells))
        return self._narrow[collection]

    def in_blocks(self, collection: str) -> tuple[BlockCells, FormatLosses] | None:
        """Return a collection's spectra with block records; None if it has none."""
        if collection not in self._blocks:
            blocks = read_blocks(self.run, collection, self.until)
            self._blocks[collection] = None
            if blocks is not None:
                self._blocks[collection] = blocks, FormatLosses(cells=blocks.cells, held=self._held(blocks.cells))
        return self._blocks[collection]

    def formats(self, collection: str) -> Mapping[str, Format]:
        """Return the narrowest format in which each layer of a collection was recorded."""
        cells = self.cells(collection)
        if cells is None:
            return {}
        known = cells.elements
        by_name: dict[str, Format] = {}
        pairs: list[int] = np.unique(cells.layer * len(known) + cells.format).tolist()
        for pair in pairs:
            name, fmt = cells.names[pair // len(known)], known[pair % len(known)]
            by_name[name] = min(by_name.get(name, fmt), fmt, key=lambda f: (f.bits, f.name))
        return by_name

    def _held(self, cells: Cells) -> Floats:
        """Return the scale at which each row's format contained its values."""
        if cells.collection != "gradients" or not self.scaled:
            return cells.scale
        # Parameter gradients that were unscaled since are stored at scale 1. Those of FP32 parameters passed their
        # narrow format before that, at the loss scale. Those of narrow parameters underflow at the unscaling too.
        weights = self.formats("weights")
        wide = np.array([_is_wide(weights.get(name)) for name in cells.names], dtype=bool)
        unscaled: NDArray[np.bool_] = (cells.scale == 1.0) & wide[cells.layer]
        return np.where(unscaled, self.scale_at(cells.steps)[cells.at], cells.scale)


def _is_format(name: object) -> bool:
    try:
        get_element(cast("str", name), "diagnose")
    except PlimsollError:  # a damaged event, or one of a later version
        return False
    return True


def _is_wide(fmt: Format | None) -> bool:
    """Return whether a parameter is FP32 or wider; True if it was not recorded."""
    return fmt is None or fmt.bits > _NARROWER_THAN_FP32


def log2(x: Floats) -> Floats:
    """Return the logarithm of positive numbers, and NaN for others."""
    with np.errstate(all="ignore"):
        return np.where(x > 0, np.log2(x), math.nan)


Source = Run | View | str | os.PathLike[str]


def view_of(run: Source, until: int | None, operation: str) -> View:
    """Return the view of a run or its folder up to a step; of a view itself, which takes no `until`."""
    if isinstance(run, View):
        if until is not None:
            raise ArgumentError(
                f"{operation}: expected until=None with a View, which has its own; got {until!r}. Make another View."
            )
        return run
    return View(run if isinstance(run, Run) else Run(run), until)
