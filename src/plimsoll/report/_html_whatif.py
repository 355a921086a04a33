"""What-if answers that a page can give without Python: each format at each shift, worked out beforehand.

Over all steps of a run a layer is one histogram for each format and scale that it was recorded in, since counts add up.
So the 65 shifts of four formats cost less than reading the run once. Numbers differ from `whatif`'s by where in one
binade the values are taken to lie: a test holds them between its bounds at one shift less and at one more. At the best
shift, which is shown first, they are `whatif`'s own, as are windows, sentences, and the order of the tensors.

Block formats, of runs that have their records, scale each block themselves: their answer is the same at all shifts.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis import View, shown, whatif
from plimsoll.diagnosis._cells import Cells, Floats
from plimsoll.diagnosis._tallies import Populations
from plimsoll.diagnosis._whatif import SHIFTS
from plimsoll.diagnosis._whatif_blocks import has_records
from plimsoll.diagnosis._whatif_result import WhatIf
from plimsoll.diagnosis._windows import block_sentence, sentence
from plimsoll.formats import MXFP4, MXFP8_E4M3, NVFP4, get_element

FORMATS = ("fp16", "bf16", "e4m3", "e5m2")
BLOCK_FORMATS = (MXFP8_E4M3, MXFP4, NVFP4)  # of runs that have block records
LAYERS = 300  # most that are kept of each format, those that fare worst
_GROUPS = 20_000  # histograms; with a scale of its own at every step there would be one a row
_ASKED = ("gradients", "activation_gradients", "activations", "weights")
_ONE = 65535  # of a share, in 16 bits
_ABOUT = 1 / _ONE  # of a share that is estimated as 0, but may be more; what is known to be some is above


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offline:
    """The answers for one format: overall and by layer, over `SHIFTS`.

    `lost` and `overflow` are estimates, layers x shifts; `overall` has "lost", "overflow" and the bounds of both.
    """

    answer: WhatIf
    names: tuple[str, ...]
    windows: tuple[tuple[int, int] | None, ...]
    lost: Floats
    overflow: Floats
    overall: dict[str, list[float]]
    left_out: int

    @property
    def best(self) -> int:
        """The best single shift; 0 for a format so wide that the best is not among those offered, if 0 serves too."""
        if self.answer.shift in SHIFTS or not _unscaled_serves(self.answer):
            return min(max(self.answer.shift, SHIFTS[0]), SHIFTS[-1])
        return 0

    @property
    def sentence(self) -> str:
        """What the format needs; `WhatIf.sentence` without what it is judged by."""
        if self.answer.block:
            return block_sentence(self.answer.format, self.answer.stretches)
        return sentence(self.answer.format, self.answer.stretches, scaled="gradients" in self.answer.collections[0])

    @property
    def censored(self) -> str:
        """What the answers are judged by, where the run's own format may have lost values; else nothing."""
        whole = self.answer.sentence
        return f"{whole.removesuffix(self.sentence).rstrip(': ')}." if self.answer.censored else ""

    def at_best(self, name: str) -> float:
        """What is overall lost, or overflows, at the best shift."""
        return self.overall[name][self.best - SHIFTS[0]]

    def rows(self, most: int) -> list[tuple[str, float, float, tuple[int, int] | None]]:
        """Name, lost, overflow and window of the layers that fare worst at the best shift."""
        at = self.best - SHIFTS[0]
        order = np.argsort(-(self.lost[:, at] + self.overflow[:, at]), kind="stable")[:most].tolist()
        return [(self.names[i], float(self.lost[i, at]), float(self.overflow[i, at]), self.windows[i]) for i in order]

    def to_dict(self) -> dict[str, object]:
        """As JSON-able data; shares by layer are 16 bits each, little-endian, in base64."""
        return {
            "format": self.answer.format,
            "sentence": self.sentence,
            "best": self.best,
            "overall": {name: [round(x, 6) for x in values] for name, values in self.overall.items()},
            "names": [shown(name) for name in self.names],
            "windows": [None if w is None else list(w) for w in self.windows],
            "lost": _packed(self.lost),
            "overflow": _packed(self.overflow),
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
    found = [_answers(whatif(view, fmt, collection=collection), values) for fmt in formats]
    return found + [_in_blocks(whatif(view, fmt, collection=collection)) for fmt in in_blocks]


def merged(cells: Cells) -> Cells:
    """The same values over all steps: one row for each layer, format and scale; of counts, those by binade only."""
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
    """The true values; a scale that is no power of two moves them to the next lower one."""
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
    layers, count = len(cells.names), cells.nonzero.astype(np.float64)
    nonzero: Floats = np.bincount(cells.layer, weights=count, minlength=layers).astype(np.float64)
    found: dict[str, list[Floats]] = {"lost": [], "overflow": []}
    overall: dict[str, list[float]] = {}
    for shift in SHIFTS:
        for name, tallies in (("lost", values.lost(fmt, shift)), ("overflow", values.overflow(fmt, shift))):
            of_layer = np.bincount(cells.layer, weights=tallies.estimate, minlength=layers)
            found[name].append(of_layer / np.maximum(nonzero, 1))
            for bound, each in (("", tallies.estimate), ("_low", tallies.low), ("_high", tallies.high)):
                overall.setdefault(name + bound, []).append(float(each.sum() / max(count.sum(), 1)))
    kept = _hardest(answer, found, nonzero)
    return Offline(
        answer=answer,
        names=tuple(answer.names[i] for i in kept),
        windows=tuple(_window(answer, i) for i in kept),
        lost=np.stack(found["lost"], axis=1)[kept],
        overflow=np.stack(found["overflow"], axis=1)[kept],
        overall=overall,
        left_out=int((nonzero > 0).sum()) - len(kept),
    )


def _in_blocks(answer: WhatIf) -> Offline:
    """The answer of a block format: that of the unscaled values, at every shift."""
    p = answer.prediction
    nonzero: Floats = np.nansum(p.nonzero, axis=1)
    found: dict[str, list[Floats]] = {}
    overall: dict[str, list[float]] = {}
    for name, (low, high, estimate) in (("lost", p.lost), ("overflow", p.overflow)):
        found[name] = [np.nansum(estimate, axis=1) / np.maximum(nonzero, 1)] * len(SHIFTS)
        for bound, each in (("", estimate), ("_low", low), ("_high", high)):
            overall[name + bound] = [float(np.nansum(each) / max(nonzero.sum(), 1))] * len(SHIFTS)
    kept = _hardest(answer, found, nonzero)
    return Offline(
        answer=answer,
        names=tuple(answer.names[i] for i in kept),
        windows=tuple((SHIFTS[0], SHIFTS[-1]) if _window(answer, i) else None for i in kept),
        lost=np.stack(found["lost"], axis=1)[kept],
        overflow=np.stack(found["overflow"], axis=1)[kept],
        overall=overall,
        left_out=int((nonzero > 0).sum()) - len(kept),
    )


def _hardest(answer: WhatIf, found: dict[str, list[Floats]], nonzero: Floats) -> list[int]:
    """The layers to keep: first those that fare worst at the best shift, then those whose window is narrowest."""
    at = min(max(answer.shift, SHIFTS[0]), SHIFTS[-1]) - SHIFTS[0]
    harm = found["lost"][at] + found["overflow"][at]
    with np.errstate(all="ignore"):
        room = np.fmin.reduce(answer.high, axis=1) - np.fmax.reduce(answer.low, axis=1)
    order: list[int] = np.lexsort((np.nan_to_num(room, nan=np.inf), -harm)).tolist()
    return [i for i in order if nonzero[i] > 0][:LAYERS]


def _unscaled_serves(answer: WhatIf) -> bool:
    windows = [stretch.window for stretch in answer.stretches]
    return all(window is not None and window[0] <= 0 <= window[1] for window in windows)


def _window(answer: WhatIf, layer: int) -> tuple[int, int] | None:
    """The shifts that serve a layer at all steps."""
    low = np.fmax.reduce(answer.low[layer], initial=np.nan)
    high = np.fmin.reduce(answer.high[layer], initial=np.nan)
    return (int(low), int(high)) if low <= high else None


def _packed(shares: Floats) -> str:
    """Shares in 16 bits; what is not zero stays so."""
    units = np.where(shares > 0, np.clip(np.round(shares * _ONE), 1, _ONE), 0).astype("<u2")
    return base64.b64encode(units.tobytes()).decode("ascii")
