"""Block formats in what-if tables, from the block records of a run."""

from collections.abc import Iterable
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np

from plimsoll.diagnosis.estimates.block_counts import BlockTallies
from plimsoll.diagnosis.estimates.element_counts import Tallies
from plimsoll.diagnosis.estimates.format_losses import FormatLosses
from plimsoll.diagnosis.estimates.prediction import Prediction
from plimsoll.diagnosis.tables.block_cells import BlockCells
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.diagnosis.view import View
from plimsoll.diagnosis.what_if.result import WhatIf
from plimsoll.diagnosis.what_if.scale_windows import stretches_of
from plimsoll.errors import NotRecordedError
from plimsoll.formats import BlockFormat

_TOLERANCE = 0.01  # of a layer's values that may be lost, as in windows

_TALLIES: WeakKeyDictionary[BlockCells, dict[int, tuple[Ints, int, BlockTallies]]] = WeakKeyDictionary()


def answer(view: View, collection: str, fmt: BlockFormat, shift: int | None) -> WhatIf:
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
    low = high + (share >= _TOLERANCE)  # no window at all where too much is lost
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
        stretches=stretches_of(
            cells.steps, np.fmax.reduce(low, axis=0, initial=np.nan), np.fmin.reduce(high, axis=0, initial=np.nan)
        ),
        block=fmt.block,
        unrecorded=unrecorded,
    )


def has_records(view: View, collection: str, fmt: BlockFormat) -> bool:
    """Return whether a collection has the records of a block format."""
    cells_and_losses = view.in_blocks(collection)
    return cells_and_losses is not None and bool((cells_and_losses[0].length == fmt.block).any())


def size_bytes(found: tuple[BlockCells, FormatLosses]) -> int:
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


def _by_cell(cells: Cells, tallies: Tallies) -> tuple[Floats, Floats, Floats]:
    return cells.total(tallies.low), cells.total(tallies.high), cells.total(tallies.estimate)


def _not_recorded(collection: str, fmt: BlockFormat, lengths: Iterable[int]) -> NotRecordedError:
    others = sorted({length for length in lengths if length})
    got = f"records of block={', '.join(map(str, others))}" if others else "none"
    return NotRecordedError(
        f"whatif: expected block records of {collection} for {fmt.name}, whose blocks have {fmt.block} values; got "
        f"{got}. Watch with block={fmt.block}, or ask Spectrum.fit of pl.measure(x, block={fmt.block})."
    )
