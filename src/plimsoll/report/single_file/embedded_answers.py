"""Answers stored in a report: the run, figures within a size limit, and what-if."""

import base64
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis import Finding, View, whatif
from plimsoll.diagnosis.estimates.element_counts import Populations
from plimsoll.diagnosis.estimates.usable_scales import block_sentence, sentence
from plimsoll.diagnosis.tables.cells import Cells, Floats
from plimsoll.diagnosis.what_if.answer import SHIFTS, has_records
from plimsoll.diagnosis.what_if.result import Row, WhatIf, interval_words
from plimsoll.errors import NotRecordedError
from plimsoll.formats import BLOCKS, ELEMENTS, get_element
from plimsoll.report.drawing.plotly_parts import TEMPLATES
from plimsoll.report.figure_registry import FIGURES
from plimsoll.report.page.answers import drawn, first_tensor, in_order, offered, run_answer, scalar_answer
from plimsoll.report.verdicts.run_summary import Summary
from plimsoll.results import as_data
from plimsoll.spectrum import Interval
from plimsoll.tensor_collections import IN_DISPLAY_ORDER

# -- what-if: each format at each shift --------------------------------------------------------------------------------

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
        """Note on the values that the answers are based on, where the run's format or NaN has hidden some, or ""."""
        note = self.answer.sentence.partition(self.sentence)[0].rstrip(": ")
        return f"{note}." if note else ""

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
            "stretches": as_data(self.answer.stretches),
            "overall": {name: [round(x, 6) for x in values] for name, values in self.overall.items()},
            "names": list(self.names),
            "windows": as_data(self.windows),
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
    """Return the values summed over all steps, by layer, format and scale; only counts by binade."""
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
    """Return shares in 16 bits, nonzero ones never as 0. 1: estimated as 0, but possibly more."""
    some = np.clip(np.round(shares * _ONE), 2, _ONE)
    units = np.where(shares > 0, some, at_most > 0).astype("<u2")
    return base64.b64encode(units.tobytes()).decode("ascii")


# -- the answers -------------------------------------------------------------------------------------------------------

BUDGET_BYTES = 1_600_000  # of figures, packed; in base64 that is 2.2 MB of a file whose goal is 3 MB
_FINDINGS = 24  # whose figures are shown; the most severe come first
_SPECTROGRAMS = 40
_EACH = 3  # tensors that a finding names
_SCALARS, _POINTS = 40, 300  # some 4 KB each, packed
_DRAWN = ("loss", "scale", "nonfinite")  # the figure of loss and scale shows them; a report has no figure twice


class Figures:
    """Figures of a report by question, without empty ones and those without room."""

    def __init__(self, view: View, findings: Sequence[Finding]) -> None:
        self._view, self._findings = view, findings
        self.asked: list[tuple[str, Mapping[str, Any], int]] = []
        self.bodies: list[dict[str, Any]] = []
        self._texts: dict[str, int] = {}
        self.bytes = 0

    def add(self, name: str, arguments: Mapping[str, Any], budget: int = BUDGET_BYTES) -> int | None:
        """Draw a figure as the live page's API does; return its place, None if it would exceed the budget in bytes."""
        return self._add(name, arguments, lambda: drawn(self._view, name, _query(arguments), self._findings), budget)

    def add_of_finding(self, index: int) -> int | None:
        """Draw a finding's figure and return its place; None if it is left out."""
        name, arguments = self._findings[index].figure, {"finding": index}
        if name not in FIGURES:  # a custom rule may name a figure that does not exist
            return None
        # One figure of the loss shows all findings. Each would else have the same curve with another mark.
        query = {} if name == "loss_and_scale" else _query(arguments)
        return self._add(name, arguments, lambda: drawn(self._view, name, query, self._findings), BUDGET_BYTES)

    def _add(self, name: str, arguments: Mapping[str, Any], draw: Callable[[], str], budget: int) -> int | None:
        if self.bytes >= budget:
            return None
        try:
            body: dict[str, Any] = json.loads(draw())["figure"]
        except NotRecordedError:  # what it would show was not recorded
            return None
        if (body["layout"].get("meta") or {}).get("empty"):
            return None
        del body["layout"]["template"]  # the page puts its own on, in the theme that is shown
        text = json.dumps(body, separators=(",", ":"))
        if text not in self._texts:
            self._texts[text] = len(self.bodies)
            self.bodies.append(body)
            self.bytes += _packed_bytes(text)
        self.asked.append((name, arguments, self._texts[text]))
        return self._texts[text]


def _packed_bytes(text: str) -> int:
    return len(zlib.compress(text.encode(), 1))


def embedded(view: View, summary: Summary, answers: Sequence[Offline], collection: str | None) -> dict[str, Any]:
    """Return all that a report's page asks for: run, figures, what-if answers on `collection`, if any."""
    findings = summary.findings
    figures = Figures(view, findings)
    logged = [name for name in in_order(view.run.scalar_names) if name not in _DRAWN]
    scalars = [scalar_answer(view, name, _POINTS) for name in logged[:_SCALARS]]
    figures.bytes += _packed_bytes(json.dumps(scalars, separators=(",", ":")))
    bodies = [figures.add_of_finding(i) if i < _FINDINGS else None for i in range(len(findings))]
    first = {body: i for i, body in reversed(list(enumerate(bodies))) if body is not None}
    above = {(f.figure.removesuffix("_heatmap"), f.collection) for f in findings}

    def is_above(drawing: Mapping[str, Any]) -> bool:
        return (drawing["arguments"].get("statistic"), drawing["arguments"].get("collection")) in above

    # The budget of bytes may end first: what findings already show is added last.
    pictures = [
        d
        for d in sorted(_pictures(view, findings), key=is_above)
        if figures.add(d["figure"], d["arguments"]) is not None
    ]
    hardest = [(collection, name) for name in answers[0].names] if collection and answers else []
    tensors = spectrograms(figures, view, findings, hardest)
    included, series = sum(map(len, tensors.values())), sum(summary.tensors.values())
    run = {
        **run_answer(view, summary),
        "same_figure": [None if body is None else first[body] for body in bodies],
        "pictures": pictures,
        "collections": tensors,
        "tensors_kept": "" if included == series else f"{included:,} of {series:,} tensors, those that matter most.",
        "formats": [answer.answer.format for answer in answers],
        "whatif": _needs(collection, answers) if collection and answers else None,
        "scalars": [scalar["name"] for scalar in scalars],
        "events": [],  # the page shows the words for events and settings, and not their data
        "settings": {},
    }
    formats = [answer.to_dict() for answer in answers]
    return {
        "run": run,
        "templates": {name: dict(template) for name, template in TEMPLATES.items()},
        "scalars": scalars,
        "figures": figures.asked,
        "bodies": figures.bodies,
        "whatif": {"low": SHIFTS[0], "high": SHIFTS[-1], "collection": collection, "formats": formats},
    }


def spectrograms(
    figures: Figures, view: View, findings: Sequence[Finding], hardest: Sequence[tuple[str, str]]
) -> dict[str, list[str]]:
    """Add spectrograms of the tensors that matter most; return names by collection."""
    tensors: dict[str, list[str]] = {}
    count = 0
    for collection, name in _ordered(view, findings, hardest):
        if count >= _SPECTROGRAMS:
            break
        if figures.add("spectrogram", {"collection": collection, "name": name}) is not None:
            tensors.setdefault(collection, []).append(name)
            count += 1
    return tensors


def _pictures(view: View, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return the drawings of the run, without curves that the page shows with a finding only."""
    above = {finding.figure for finding in findings}
    return [each for each in offered(view, findings) if each["section"] != "scale" or each["figure"] not in above]


def _query(arguments: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in arguments.items()}


def _needs(collection: str, answers: Sequence[Offline]) -> dict[str, object]:
    """Needs of each format, in words."""
    return {
        "collection": collection,
        "note": answers[0].censored,
        "needs": [
            {
                "format": answer.answer.format,
                "sentence": answer.sentence,
                "best": answer.best,
                "lost": interval_words(answer.at_best("lost")),
                "overflow": interval_words(answer.at_best("overflow")),
            }
            for answer in answers
        ],
    }


def _ordered(view: View, findings: Sequence[Finding], hardest: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield each tensor once: those of findings, the hardest to hold, then others."""
    first = first_tensor(view, findings)
    named = [] if first is None else [(first["collection"], first["name"])]
    named += [(f.collection, name) for f in findings if f.collection for name in f.where[:_EACH]]
    spread = [(c, names[int(i * len(names) / 6)]) for c, names in view.run.tensors.items() if names for i in range(6)]
    for collection, name in dict.fromkeys([*named, *hardest[:12], *spread]):
        if name in view.run.tensors.get(collection, ()):
            yield collection, name
