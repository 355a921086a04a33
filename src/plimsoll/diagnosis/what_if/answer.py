"""`whatif`: the effect of another format, at any shift, on recorded values.

Nothing is trained again: a spectrum has the number of values in each binade, and a format's limits decide which of them
it represents. Every fraction is an interval. Real casts of the same tensors lie inside it.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from weakref import WeakKeyDictionary, ref

import numpy as np

from plimsoll.diagnosis.estimates.block_counts import BlockCells, BlockTallies
from plimsoll.diagnosis.estimates.element_counts import Populations, Tallies
from plimsoll.diagnosis.estimates.format_losses import FormatLosses
from plimsoll.diagnosis.estimates.rounding_noise import Noise
from plimsoll.diagnosis.estimates.usable_scales import TOLERANCE, Scales, Stretch, stretches_of
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.diagnosis.view import View, view_of
from plimsoll.diagnosis.what_if.result import Prediction, WhatIf
from plimsoll.errors import ArgumentError, FormatError, NotRecordedError
from plimsoll.formats import BlockFormat, Format, get
from plimsoll.runs import Run
from plimsoll.spectrum.fit.element_fit import checked_shift
from plimsoll.tensor_collections import FORWARD

# -- block formats, from the block records of a run --------------------------------------------------------------------

_TALLIES: WeakKeyDictionary[BlockCells, dict[int, tuple[Ints, int, BlockTallies]]] = WeakKeyDictionary()


def answer_of_blocks(view: View, collection: str, fmt: BlockFormat, shift: int | None) -> WhatIf:
    """Return the prediction for a collection that the run has."""
    cells_and_losses = view.in_blocks(collection)
    if cells_and_losses is None:
        raise _not_recorded(collection, fmt, ())
    rows, unrecorded, tallies = _tallies_of(cells_and_losses, fmt.block)
    if not len(rows):
        raise _not_recorded(collection, fmt, cells_and_losses[0].length.tolist())
    narrow, cells, chosen = cells_and_losses[1], tallies.blocks.cells, 0 if shift is None else shift
    fit = tallies.fit(fmt, chosen)
    hidden = np.where(narrow.censors[rows], cells.column("zeros"), 0)
    nonzero, unseen, lost = cells.total(cells.nonzero), cells.total(hidden), _by_cell(cells, fit.lost)
    with np.errstate(all="ignore"):
        share = np.where(nonzero + unseen > 0, (lost[1] + unseen) / (nonzero + unseen), np.nan)
    high = np.where(np.isnan(share), np.nan, chosen)
    low = high + (share >= TOLERANCE)  # no window at all where too much is lost
    return WhatIf(
        path=str(view.run.path),
        format=fmt.name,
        shift=chosen,
        chosen=shift is None,
        collections=(collection,),
        censored=bool(hidden.any()),
        steps=cells.steps,
        names=cells.names,
        prediction=Prediction(
            nonzero=nonzero,
            hidden=unseen,
            lost=lost,
            subnormal=_by_cell(cells, fit.subnormal),
            overflow=_by_cell(cells, fit.overflow),
            noise=cells.total(fit.noise),
            signal=cells.total(fit.signal),
        ),
        low=low,
        high=high,
        stretches=stretches_of(cells.steps, low, high),
        block=fmt.block,
        unrecorded=unrecorded,
        nonfinite=int(np.nansum(cells.nonfinite)),
    )


def has_records(view: View, collection: str, fmt: BlockFormat) -> bool:
    """Return whether a collection has the records of a block format."""
    cells_and_losses = view.in_blocks(collection)
    return cells_and_losses is not None and bool((cells_and_losses[0].length == fmt.block).any())


def block_bytes(found: tuple[BlockCells, FormatLosses]) -> int:
    """Return the memory of a collection's records and of the tallies made from them."""
    tallies = _TALLIES.get(found[0], {})
    return found[0].size_bytes + sum(tally.blocks.size_bytes for _, _, tally in tallies.values())


def _tallies_of(found: tuple[BlockCells, FormatLosses], block: int) -> tuple[Ints, int, BlockTallies]:
    """Return the rows with that block length's record, the omitted cells, the tallies."""
    blocks = found[0]
    remembered = _TALLIES.setdefault(blocks, {})
    if block not in remembered:
        cells = blocks.cells
        missing = (blocks.length != block) & (cells.column("count") > 0)
        without = np.zeros(len(cells.names) * len(cells.steps), dtype=bool)
        without[cells.cell[missing]] = True  # of a cell of several rows, all must have one
        rows = np.flatnonzero(~without[cells.cell])
        if not (blocks.length[rows] == block).any():
            rows = rows[:0]
        remembered[block] = rows, int(without.sum()), BlockTallies(blocks=_of_steps(blocks.of_rows(rows)))
    return remembered[block]


def _of_steps(blocks: BlockCells) -> BlockCells:
    """Return the records, with only the steps that they have."""
    steps, at = np.unique(blocks.cells.steps[blocks.cells.at], return_inverse=True)
    return replace(blocks, cells=replace(blocks.cells, steps=steps, at=at))


def _not_recorded(collection: str, fmt: BlockFormat, lengths: Iterable[int]) -> NotRecordedError:
    others = sorted({length for length in lengths if length})
    got = f"records of block={', '.join(map(str, others))}" if others else "none"
    return NotRecordedError(
        f"whatif: expected block records of {collection} for {fmt.name}, whose blocks have {fmt.block} values; got "
        f"{got}. Watch with block={fmt.block} (plimsoll run --block {fmt.block}), or ask Spectrum.fit of "
        f"pl.measure(x, block={fmt.block})."
    )


# -- `whatif`, and formats of single values ----------------------------------------------------------------------------

_TRIED = 48  # shifts that are tried where none works throughout
SHIFTS = range(-24, 41)  # scales that someone may use, as powers of two


def whatif(
    run: "Run | View | str | os.PathLike[str]",
    fmt: object,
    shift: int | None = None,
    collection: str = "gradients",
    inference: bool = False,
) -> WhatIf:
    """Return a format's effect on a run's tensors: per layer, per step and overall.

    Values are true values: a loss scale under which they were recorded is undone first. So for gradients the shift is
    the future loss scale. Values that the run's own format has lost cannot be seen. Then `WhatIf.censored` is true, and
    zeros count in the upper bound of the loss, as in `Spectrum.fit`.

    Block formats are answered from the block records of a run that was watched with ``block=32`` (MX) or ``block=16``
    (NVFP4). They scale each block themselves. A shift only moves values at the ends of the scales' range, so 0 is best.

    Args:
        run: The run, its folder, or a view of it.
        fmt: The format.
        shift: Values are multiplied by ``2**shift``. Default: the highest that overflows nowhere with one binade to
            spare, if it loses little. Else the one with the smallest loss and overflow. 0 for formats so wide that the
            best would be beyond 2**40.
        collection: Name of the collection. Default: "gradients".
        inference: Whether to judge weights and activations unscaled, in place of a collection. Default: False.

    Returns:
        The answer.

    Raises:
        NotRecordedError: The run lacks the collection, or the records of a block format.
        FormatError: The format does not exist or holds scales only.
        ArgumentError: The shift is no integer in range.
    """
    chosen, view = _format(fmt), view_of(run, None, "whatif")
    if shift is not None:
        remedy = "Values are multiplied by 2**shift. Without one, the best is chosen."
        shift = checked_shift("whatif", shift, remedy)
    if not isinstance(collection, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"whatif: expected collection by its name; got {collection!r}. Write 'gradients'.")
    if inference and collection != "gradients":
        raise ArgumentError(
            f"whatif: expected no collection with inference=True, which means weights and activations; got "
            f"{collection!r}. Leave one of the two out."
        )
    names = [name for name in FORWARD if view.cells(name) is not None] if inference else [collection]
    parts = [_part(view, name, chosen, 0 if inference else shift) for name in names]
    if not parts:
        raise NotRecordedError(
            "whatif: expected a run with weights or activations; got one with neither. Watch with collect= naming them."
        )
    return parts[0] if len(parts) == 1 else parts[0].joined(parts[1])


def _format(fmt: object) -> Format | BlockFormat:
    resolved = get(fmt)
    if isinstance(resolved, Format) and not resolved.signed:
        raise FormatError(
            f"whatif: expected a format for values; got {resolved.name}, which holds scales. Ask for another."
        )
    return resolved


def _part(view: View, collection: str, fmt: Format | BlockFormat, shift: int | None) -> WhatIf:
    narrow = view.narrow(collection)
    if narrow is None:
        there = ", ".join(view.run.tensors) or "none"
        raise NotRecordedError(
            f"whatif: expected a collection that the run has; got {collection!r}. It has {there}. Choose one of these."
        )
    if isinstance(fmt, BlockFormat):
        return answer_of_blocks(view, collection, fmt, shift)
    return predictor_of(narrow).answer(str(view.run.path), fmt, shift)


def predictor_of(narrow: FormatLosses) -> "Predictor":
    """Return a collection's predictor, kept as long as the view keeps the collection."""
    # A user asks about many shifts.
    predictor = _PREDICTORS.get(narrow)
    if predictor is None:
        predictor = _PREDICTORS[narrow] = Predictor(narrow)
    return predictor


def predictor_bytes(narrow: FormatLosses) -> int:
    """Return the memory of a collection's predictor, if there is one."""
    predictor = _PREDICTORS.get(narrow)
    return 0 if predictor is None else predictor.size_bytes


class Predictor:
    """Predictions for one collection and any format; what does not depend on the shift is computed once."""

    def __init__(self, narrow: FormatLosses) -> None:
        self._cells = cells = narrow.cells
        # Not the record itself, which is the key that this is kept by, and would then stay for ever.
        self._narrow = ref(narrow)
        self._values = Populations(cells=cells)
        self._noise = Noise(values=self._values)
        hidden = np.where(narrow.censors, cells.column("zeros"), 0)
        self._nonzero, self._hidden, self._censored = cells.total(cells.nonzero), cells.total(hidden), hidden.any()
        self._windows: dict[Format, tuple[Floats, Floats, list[Stretch]]] = {}
        self._best: dict[Format, int] = {}

    @property
    def size_bytes(self) -> int:
        """Memory of what is kept in addition to the cells."""
        arrays = [bound for low, high, _ in self._windows.values() for bound in (low, high)]
        return self._noise.size_bytes + sum(bound.nbytes for bound in (*arrays, self._nonzero, self._hidden))

    def windows(self, fmt: Format) -> tuple[Floats, Floats, list[Stretch]]:
        """Return each cell's lowest and highest shift that work, and the step ranges."""
        if fmt not in self._windows:
            narrow = self._narrow()
            assert narrow is not None  # whoever asks holds it
            low, high = Scales.of_record(narrow, fmt).of_tensors
            self._windows[fmt] = low, high, stretches_of(self._cells.steps, low, high)
        return self._windows[fmt]

    def best_shift(self, fmt: Format) -> int:
        """Return the best single shift for all layers and steps."""
        if fmt not in self._best:
            self._best[fmt] = _best_shift(self._values, fmt, *self.windows(fmt)[:2])
        return self._best[fmt]

    def answer(self, path: str, fmt: Format, shift: int | None) -> WhatIf:
        """Return the prediction for a shift. None: for the best one."""
        cells, values = self._cells, self._values
        low, high, stretches = self.windows(fmt)
        chosen = self.best_shift(fmt) if shift is None else shift
        lost = values.lost(fmt, chosen)
        over = values.overflow(fmt, chosen)
        noise, signal = self._noise.of(fmt, chosen, over.estimate)
        return WhatIf(
            path=path,
            format=fmt.name,
            shift=chosen,
            chosen=shift is None,
            collections=(cells.collection,),
            censored=bool(self._censored),
            steps=cells.steps,
            names=cells.names,
            prediction=Prediction(
                nonzero=self._nonzero,
                hidden=self._hidden,
                lost=_by_cell(cells, lost),
                subnormal=_by_cell(cells, values.subnormal(fmt, chosen, lost)),
                overflow=_by_cell(cells, over),
                noise=cells.total(noise),
                signal=cells.total(signal),
            ),
            low=low,
            high=high,
            stretches=stretches,
            nonfinite=int(np.nansum(cells.nonfinite)),
        )


_PREDICTORS: WeakKeyDictionary[FormatLosses, Predictor] = WeakKeyDictionary()


def _by_cell(cells: Cells, tallies: Tallies) -> tuple[Floats, Floats, Floats]:
    low, high, estimate = (
        cells.total(np.asarray(number, dtype=np.float64)) for number in (tallies.low, tallies.high, tallies.estimate)
    )
    return low, high, estimate


def _best_shift(values: Populations, fmt: Format, low: Floats, high: Floats) -> int:
    """Return the best single shift for all layers and steps."""
    if np.isnan(low).all():
        return 0
    lowest, highest = int(np.nanmax(low)), int(np.nanmin(high))
    if lowest <= highest:
        best = max(lowest, highest - 1)
        return 0 if lowest <= 0 and best >= SHIFTS.stop else best
    # None works throughout. From where overflow begins (less a binade) up to where nothing is lost any more.
    first, last = highest - 1, min(lowest, int(np.nanmax(high)))
    tried = np.unique(np.linspace(first, max(last, first), _TRIED).astype(np.int64)).tolist()
    return min(tried, key=lambda shift: (_harm(values, fmt, shift), shift))


def _harm(values: Populations, fmt: Format, shift: int) -> float:
    """Return the number of values lost, with all values of steps that overflow."""
    cells = values.cells
    lost, over = values.lost(fmt, shift).estimate, values.overflow(fmt, shift).estimate
    total = np.bincount(cells.at, weights=cells.nonzero)
    with np.errstate(all="ignore"):
        share = np.where(total > 0, np.bincount(cells.at, weights=lost) / total, 0.0)
    # A step at which anything overflows is skipped.
    return float(np.where(np.bincount(cells.at, weights=over) > 0, 1.0, share).mean())
