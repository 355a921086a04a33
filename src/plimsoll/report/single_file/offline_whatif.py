"""Precomputed what-if answers of a report: each format at each shift."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis import View, whatif
from plimsoll.diagnosis.estimates.element_counts import Populations
from plimsoll.diagnosis.tables.cells import Cells, Floats
from plimsoll.diagnosis.what_if.answer import SHIFTS
from plimsoll.diagnosis.what_if.block_formats import has_records
from plimsoll.diagnosis.what_if.result import Row, WhatIf
from plimsoll.diagnosis.what_if.scale_windows import block_sentence, sentence
from plimsoll.formats import BLOCKS, ELEMENTS, get_element
from plimsoll.spectrum import Interval
from plimsoll.tensor_collections import IN_DISPLAY_ORDER

FORMATS = tuple(fmt.name for fmt in sorted(ELEMENTS, key=lambda fmt: (-fmt.bits, -fmt.mantissa_bits)) if fmt.in_report)
BLOCK_FORMATS = tuple(fmt for fmt in BLOCKS if fmt.in_report)  # of runs that have block records
LAYERS = 300  # most that are kept of each format, those that fare worst
_GROUPS = 20_000  # histograms; with a scale of its own at every step there would be one a row
_ASKED = tuple(c.name for c in IN_DISPLAY_ORDER if c.phase != "update")
_ONE = 65535  # of a share, in 16 bits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offline:
    """The answers for one format: overall and by tensor, over `SHIFTS`.

    `lost` and `overflow` are estimates, tensors x shifts, and `at_most` their upper bounds by the same names; `overall`
    has "lost", "overflow" and the bounds of both. Tensors are in the order of the run.
    """

    answer: WhatIf
    names: tuple[str, ...]
    windows: tuple[tuple[int, int] | None, ...]
    lost: Floats
    overflow: Floats
    at_most: dict[str, Floats]
    overall: dict[str, list[float]]
    left_out: int

    @property
    def best(self) -> int:
        """The best single shift, or what is nearest to it of those offered."""
        return min(max(self.answer.shift, SHIFTS[0]), SHIFTS[-1])

    @property
    def sentence(self) -> str:
        """Need of the format: `WhatIf.sentence` without the note on how it is judged."""
        if self.answer.block:
            return block_sentence(self.answer.format, self.answer.stretches)
        return sentence(self.answer.format, self.answer.stretches, scaled="gradients" in self.answer.collections[0])

    @property
    def censored(self) -> str:
        """Note on the answers' method where the run's format may have lost values, or ""."""
        whole = self.answer.sentence
        return f"{whole.removesuffix(self.sentence).rstrip(': ')}." if self.answer.censored else ""

    def at_best(self, name: str) -> Interval:
        """Overall share that is lost, or overflows, at the best shift."""
        estimate, low, high = (self.overall[name + bound][self.best - SHIFTS[0]] for bound in ("", "_low", "_high"))
        return Interval(low=low, high=high, estimate=estimate)

    def to_dict(self) -> dict[str, object]:
        """Return JSON-able data. Shares by tensor are 16-bit, little-endian, in base64."""
        return {
            "format": self.answer.format,
            "block": self.answer.block,
            "sentence": self.sentence,
            "best": self.best,
            "window": self.answer.overall.window,
            "stretches": [stretch.to_dict() for stretch in self.answer.stretches],
            "overall": {name: [round(x, 6) for x in values] for name, values in self.overall.items()},
            "names": list(self.names),
            "windows": [None if w is None else list(w) for w in self.windows],
            "lost": _packed(self.lost, self.at_most["lost"]),
            "overflow": _packed(self.overflow, self.at_most["overflow"]),
            "left_out": self.left_out,
        }


def collection_of(view: View) -> str | None:
    """The collection that is asked about: gradients, or what there is in their place."""
    return next((name for name in _ASKED if (cells := view.cells(name)) is not None and cells.nonzero.any()), None)


def offline(view: View, collection: str, formats: Sequence[str] = FORMATS) -> list[Offline]:
    """The answers for each format."""
    cells = view.cells(collection)
    if cells is None:
        return []
    values = Populations(cells=merged(cells))
    in_blocks = [fmt for fmt in BLOCK_FORMATS if has_records(view, collection, fmt)]
    answers = [_answers(whatif(view, fmt, collection=collection), values) for fmt in formats]
    return answers + [_in_blocks(whatif(view, fmt, collection=collection)) for fmt in in_blocks]


# Over all steps of a run a layer is one histogram for each format and scale that it was recorded in, since counts add
# up. So the 65 shifts of four formats cost less than reading the run once. Numbers differ from `whatif`'s by where in
# one binade the values are taken to lie: a test holds them between its bounds at one shift less and at one more. At the
# best shift, which is shown first, they are `whatif`'s own, as are windows, sentences, and the order of the tensors.
def merged(cells: Cells) -> Cells:
    """Return the values summed over all steps, by layer, format and scale.

    Of the counts only those by binade are summed.
    """
    scales, scale = np.unique(cells.scale, return_inverse=True)
    key = (cells.layer * len(cells.formats) + cells.format) * len(scales) + scale
    groups, group = np.unique(key, return_inverse=True)
    if len(groups) > _GROUPS and not (cells.scale == 1).all():
        return merged(_unscaled(cells))
    base = int(cells.lowest.min(initial=0))
    span = int((cells.lowest + cells.length).max(initial=0)) - base
    inside = np.arange(len(cells.flat)) - np.repeat(cells.start[:-1], cells.length)
    place = np.repeat(group * span + cells.lowest - base, cells.length) + inside
    counts = np.bincount(place, weights=cells.flat, minlength=len(groups) * span).astype(np.int64)
    first = np.unique(group, return_index=True)[1]
    return replace(
        cells,
        steps=np.zeros(1, dtype=np.int64),
        layer=cells.layer[first],
        at=np.zeros(len(groups), dtype=np.int64),
        format=cells.format[first],
        scale=cells.scale[first],
        columns={name: _extreme(cells, name, group, len(groups)) for name in ("min", "max", "absmin", "absmax")},
        lowest=np.full(len(groups), base, dtype=np.int64),
        start=np.arange(len(groups) + 1, dtype=np.int64) * span,
        flat=counts,
    )


def _unscaled(cells: Cells) -> Cells:
    """Return the true values; a scale that is no power of two counts as the lower."""
    exponent = np.frexp(cells.scale)[1].astype(np.int64) - 1
    columns = {name: cells.column(name) / cells.scale for name in ("min", "max", "absmin", "absmax")}
    return replace(
        cells, scale=np.ones(len(cells)), lowest=cells.lowest - exponent, columns={**cells.columns, **columns}
    )


def _extreme(cells: Cells, name: str, group: NDArray[np.int64], groups: int) -> Floats:
    result = np.full(groups, np.nan)
    (np.fmin if name.endswith("min") else np.fmax).at(result, group, cells.column(name))
    return result


def _answers(answer: WhatIf, values: Populations) -> Offline:
    fmt, cells = get_element(answer.format, "report"), values.cells
    count = cells.nonzero.astype(np.float64)
    shares: dict[str, list[Floats]] = {}
    for shift in SHIFTS:
        for name, tallies in (("lost", values.lost(fmt, shift)), ("overflow", values.overflow(fmt, shift))):
            for bound, tally in (("", tallies.estimate), ("_low", tallies.low), ("_high", tallies.high)):
                of_layer = np.bincount(cells.layer, weights=tally, minlength=len(cells.names)).astype(np.float64)
                shares.setdefault(name + bound, []).append(of_layer)
    if answer.shift in SHIFTS:
        for name, known in _told(answer).items():
            shares[name][answer.shift - SHIFTS[0]] = known
    nonzero: Floats = np.bincount(cells.layer, weights=count, minlength=len(cells.names)).astype(np.float64)
    return _kept(answer, shares, nonzero, tuple(row.window for row in _in_order(answer)))


# Block formats, of runs that have their records, scale each block themselves: their answer is the same at all shifts.
def _in_blocks(answer: WhatIf) -> Offline:
    """The answer of a block format: that of the unscaled values, at every shift."""
    shares = {name: [known] * len(SHIFTS) for name, known in _told(answer).items()}
    every = (SHIFTS[0], SHIFTS[-1])
    windows = tuple(None if row.window is None else every for row in _in_order(answer))
    return _kept(answer, shares, np.nansum(answer.prediction.nonzero, axis=1), windows)


def _told(answer: WhatIf) -> dict[str, Floats]:
    """Return how many values of each tensor are lost or overflow at the shift."""
    p = answer.prediction
    return {
        name + bound: np.nansum(tally[i], axis=1)
        for name, tally in (("lost", p.lost), ("overflow", p.overflow))
        for i, bound in enumerate(("_low", "_high", ""))
    }


def _in_order(answer: WhatIf) -> list[Row]:
    """The rows in the order of the run's tensors."""
    rows = {row.name: row for row in answer.rows}
    return [rows[name] for name in answer.names]


def _kept(
    answer: WhatIf,
    found: dict[str, list[Floats]],
    nonzero: Floats,
    windows: tuple[tuple[int, int] | None, ...],
) -> Offline:
    """Return the shares of all tensors, and of those worst at the best shift."""
    hidden: Floats = np.nansum(answer.prediction.hidden, axis=1)
    shares = {name: np.stack(values, axis=1) for name, values in found.items()}
    whole = nonzero + hidden if hidden.any() else nonzero
    # Zeros of the run's own format may be values that it lost: they count in the upper bound, as in `whatif`.
    shares["lost_high"] += hidden[:, None]
    of = {name: whole if name == "lost_high" else nonzero for name in shares}
    overall = {name: (np.sum(each, axis=0) / max(of[name].sum(), 1)).tolist() for name, each in shares.items()}
    overall["lost_high"] = np.maximum(overall["lost_high"], overall["lost"]).tolist()
    place = {name: i for i, name in enumerate(answer.names)}
    places = sorted(place[row.name] for row in answer.rows[:LAYERS])
    of_tensor = {name: (each / np.maximum(of[name], 1)[:, None])[places] for name, each in shares.items()}
    return Offline(
        answer=answer,
        names=tuple(answer.names[i] for i in places),
        windows=tuple(windows[i] for i in places),
        lost=of_tensor["lost"],
        overflow=of_tensor["overflow"],
        at_most={name: of_tensor[f"{name}_high"] for name in ("lost", "overflow")},
        overall=overall,
        left_out=len(answer.names) - len(places),
    )


def _packed(shares: Floats, at_most: Floats) -> str:
    """Return shares in 16 bits. 1 means estimated as 0, but possibly more.

    A share that is not zero stays so.
    """
    some = np.clip(np.round(shares * _ONE), 2, _ONE)
    units = np.where(shares > 0, some, at_most > 0).astype("<u2")
    return base64.b64encode(units.tobytes()).decode("ascii")
