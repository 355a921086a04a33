"""Rules of the format's top: values near it, approaching it, and saturated."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from plimsoll.diagnosis.finding import Finding, Spot
from plimsoll.diagnosis.rules.base import (
    EvidenceItem,
    FindingContext,
    Phrase,
    Rule,
    last_of,
    layer_spans,
    outcome,
    threshold,
    worst,
)
from plimsoll.diagnosis.rules.nonfinite import Nonfinite
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.diagnosis.tables.trend import Trend, looks, trend
from plimsoll.diagnosis.view import View, log2
from plimsoll.formats import FP16
from plimsoll.tensor_collections import OVERFLOW_ORDER
from plimsoll.text import percent, times_two_to

_SAMPLES = "not reported from a single sample"
_SCORES = ":scores"  # of a module: the largest attention score of each head and sample
_FEW = 8  # samples without which there is no trend
_WIDE = 2.0**100  # formats that reach above it do not overflow before FP32 does


@dataclass(frozen=True, kw_only=True)
class OverflowAhead(Rule):
    """Values near the largest that their format holds, or on their way there."""

    id = "overflow-ahead"
    says = "values come near the largest one of their format"
    meaning = "Slightly larger values would be infinite, and everything computed from them NaN."
    advice = "Run these layers in BF16 or FP32, or clamp them: a value held at the maximum does little harm."
    actions = ("to_bf16", "clamp")
    figure = "spectrogram"
    location_item = EvidenceItem("Binades left")

    binades: float = threshold(1.0, "half of the largest value: one doubling away")
    within: float = threshold(5.0, "a trend is reported from so many binades below the top on")
    horizon: float = threshold(0.5, "and if it comes there within so many times the steps so far")
    confidence: float = threshold(0.99, "Mann-Kendall test, two-sided")
    samples: float = threshold(2, "one of them may be a single wild batch")

    # Judged are activations, weights and optimizer state in FP16 (and other formats of more than 8 bits that reach as
    # little), and of gradients where no loss scale is used: a scaler brings scaled ones to the top on purpose. The
    # format's most negative value itself is taken for a mask.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield findings for each collection: values near the top, and approaching it."""
        for collection in OVERFLOW_ORDER:
            cells = view.cells(collection)
            if cells is None or (view.scaled and collection.endswith("gradients")):
                continue
            distance = _distance(cells)
            if np.isnan(distance).all():
                continue
            near = layer_spans(distance < self.binades, ~np.isnan(distance), self.samples)
            if near:
                spots = [replace(spot, value=-spot.value) for spot in worst(cells, near, -distance)]
                evidence = {"binades_left": spots[0].value, "worst": spots[0].name}
                yield self.finding("alarm", spots, evidence, until_step=last_of(cells, near), collection=collection)
            yield from self._coming(cells, distance, {layer for layer, *_ in near})

    def phrase(self, context: FindingContext) -> Phrase:
        """Return how near the worst location came to the top."""
        left, remaining = context.number("binades_left"), context.number("steps_to_overflow")
        near = "within a factor of two of" if left < 1 else f"within {left:.1f} binades of"
        return Phrase(
            what=f"{context.tensors} of {context.layer} came {near} the format's largest value {context.at}",
            effect=f"about {remaining:,.0f} steps from overflow at this rate" if math.isfinite(remaining) else "",
            remedy="run the layer in BF16 or clamp it",
        )

    def _coming(self, cells: Cells, distance: Floats, near: set[int]) -> Iterator[Finding]:
        coming: list[tuple[Spot, Trend, int]] = []
        for layer in np.flatnonzero((distance < self.within).any(axis=1)).tolist():
            if layer not in near:
                coming += self._trend_of(cells, distance[layer], cells.names[layer])
        if not coming:
            return
        coming.sort(key=lambda each: each[1].steps_to(0.0))
        spot, rise, _ = coming[0]
        evidence = {
            "binades_left": spot.value,
            "steps_to_overflow": rise.steps_to(0.0),
            "binades_per_1000_steps": 1000 * rise.slope,
            "confidence": rise.confidence,
            "worst": spot.name,
        }
        until = max(until for *_, until in coming)
        spots = [spot for spot, *_ in coming]
        meaning = "At the present trend these values leave the format within the time that the run has taken so far."
        if not any(self._comes(cells, distance[cells.names.index(spot.name)]) for spot in spots):
            yield self.finding(
                "info", spots, evidence, until_step=until, collection=cells.collection, actions=(),
                advice="No action is needed.",
                meaning=f"These values rose toward the top of their format {outcome(cells, spots)}.",
            )  # fmt: skip
            return
        yield self.finding("warning", spots, evidence, until_step=until, collection=cells.collection, meaning=meaning)

    def _comes(self, cells: Cells, distance: Floats) -> bool:
        """Return True if, by the record's second half, values would arrive within its length."""
        known = np.flatnonzero(~np.isnan(distance))
        half = known[len(known) // 2 :] if len(known) >= 2 * _FEW else known
        rise = trend(cells.steps[half], -distance[half])
        if rise is None or rise.confidence < self.confidence or rise.low <= 0:
            return False
        return rise.steps_to(0.0) <= float(cells.steps[known[-1]] - cells.steps[known[0]])

    def _trend_of(self, cells: Cells, distance: Floats, name: str) -> list[tuple[Spot, Trend, int]]:
        known = np.flatnonzero(~np.isnan(distance))
        since, last, until = -1, None, 0
        for samples in looks(len(known)):
            seen = known[:samples]
            if not distance[seen[-1]] < self.within:
                continue
            rise = trend(cells.steps[seen], -distance[seen])
            if rise is None or rise.confidence < self.confidence or rise.low <= 0:
                continue
            elapsed = float(cells.steps[seen[-1]] - cells.steps[seen[0]])
            if rise.steps_to(0.0) <= self.horizon * elapsed:
                until = int(cells.steps[seen[-1]])
                since, last = until if since < 0 else since, rise
        return [] if last is None else [(Spot(name=name, since_step=since, value=-last.end), last, until)]


@dataclass(frozen=True, kw_only=True)
class AttentionLogits(Rule):
    """Attention scores that grow until the softmax is a choice of one key."""

    id = "attention-logits"
    says = "the largest attention scores of a layer grow steadily, beyond those of sound trainings"
    meaning = "Attention collapses to single keys, whose scores BF16 holds with errors of a quarter and more."
    advice = "Normalise queries and keys (QK-norm), clip their weights (QK-clip), or cap the scores."
    actions = ("to_bf16",)
    figure = "spectrogram"
    explained_by = {Nonfinite.id: "anywhere"}
    items = {"score": EvidenceItem("Largest score"), "grown_binades": EvidenceItem("Binades grown")}
    location_item = EvidenceItem("Largest score")

    score: float = threshold(100.0, "where QK-clip intervenes (arXiv 2507.20534); sound scores stay near 10 to 30")
    binades: float = threshold(2.0, "a factor of four since the first samples")
    confidence: float = threshold(0.99, "Mann-Kendall test, two-sided")

    # Scores are recorded as "MODULE:scores", the largest of each head and sample. A rounding to BF16 moves a score of
    # 128 by up to a half, and so its weight by a factor of 1.6.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the activations."""
        cells = view.cells("activations")
        if cells is None or not any(name.endswith(_SCORES) for name in cells.names):
            return
        top = cells.highest(cells.column("max") / cells.scale)
        grown_scores: list[tuple[Spot, float, int, bool]] = []
        for layer, name in enumerate(cells.names):
            if name.endswith(_SCORES):
                sizes = log2(top[layer])
                grown_scores += _risen(cells.steps, sizes, name, self.binades, math.log2(self.score), self.confidence)
        yield from _settled_or_not(
            self, grown_scores, "activations", lambda spot, grown: {"score": spot.value, "grown_binades": grown},
            "The scores grew during the training", cells,
        )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return where, since when, and how far."""
        return Phrase(
            what=f"attention scores of {context.layers.replace(_SCORES, '')} have grown steadily, seen {context.since}",
            effect=f"to {context.number('score'):,.0f} so far",
            remedy="normalise queries and keys, or cap the scores",
        )

    def figure_arguments(self, finding: Finding) -> Mapping[str, Any]:  # noqa: ARG002  (the same for every finding)
        """Mark the score from which on the rule speaks."""
        return {"mark": (self.score, "where QK-clip intervenes")}


@dataclass(frozen=True, kw_only=True)
class ActivationGrowth(Rule):
    """Activations that keep growing, such as deep transformers' residual sums (T9)."""

    id = "activation-growth"
    says = "activations (attention, residual sums) grow steadily toward the top of FP16"
    meaning = (
        "The layer adds more than it normalises away. At this rate it overflows FP16 within as many steps as so far."
    )
    advice = "Watch these layers. Clamp them, normalise the branch (QK-norm, pre-norm), or keep them out of FP16."
    actions = ("clamp", "to_bf16")
    figure = "spectrogram"
    explained_by = {Nonfinite.id: "anywhere", AttentionLogits.id: "same module"}
    location_item = EvidenceItem("Binades grown")

    binades: float = threshold(5.0, "a factor of 32 since the first samples")
    least: float = threshold(1024.0, "T9: six binades below FP16's largest value; smaller ones do no harm")
    horizon: float = threshold(1, "a warning if it leaves FP16 within so many times the steps so far")
    confidence: float = threshold(0.99, "Mann-Kendall test, two-sided")

    # Activations count in whatever format they are recorded: a run in BF16 has no overflow to fear from it, but its
    # rounding grows along, and the weights will not work for inference in FP16.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the activations."""
        cells = view.cells("activations")
        if cells is None:
            return
        sizes = log2(_magnitudes(cells))  # activations carry no scale
        grown: list[tuple[Spot, float, float, int]] = []
        for layer in np.flatnonzero((sizes > np.log2(self.least)).any(axis=1)).tolist():
            grown += self._growth(cells, sizes[layer], cells.names[layer])
        on = [each for each in grown if each[2] < math.inf]
        if not grown:
            return
        shown = sorted(on or grown, key=lambda each: -each[1])  # the nearest to the top first
        spots, top = [spot for spot, *_ in shown], shown[0][1]
        evidence: dict[str, float | int | str] = {
            "worst": spots[0].name,
            "grown_binades": spots[0].value,
            "absmax": float(2.0**top),
            "binades_left_in_fp16": float(np.log2(FP16.max) - top),
        }
        until = max(until for *_, until in shown)
        if not on:
            yield self.finding(
                "info", spots, evidence, until_step=until, collection="activations", actions=(),
                meaning=f"The layer's activations grew during the training, {outcome(cells, spots)}.",
                advice="No action is needed. Before inference in FP16, check the binades left.",
            )  # fmt: skip
            return
        evidence["steps_to_overflow"] = shown[0][2]
        beyond = "They are beyond the largest value of FP16 already, and still grow."
        meaning = beyond if top >= np.log2(FP16.max) else None
        yield self.finding(
            "warning", spots, evidence, until_step=until, collection="activations", meaning=meaning
        )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return where, since when, and by how much."""
        return Phrase(
            what=f"{context.tensors} of {context.layers} have grown steadily, seen {context.since}",
            effect=f"{times_two_to(context.number('grown_binades'))} so far",
            remedy="normalise or clamp them, and keep them out of FP16",
        )

    def figure_arguments(self, finding: Finding) -> Mapping[str, Any]:  # noqa: ARG002  (the same for every finding)
        """Draw the limits of FP16, in whatever format the activations are."""
        return {"formats": ["fp16"]}

    def _growth(self, cells: Cells, sizes: Floats, name: str) -> list[tuple[Spot, float, float, int]]:
        """Return the spot, its last size, the steps to FP16's end, and the last growth.

        The steps are infinite if it settled.
        """
        known = np.flatnonzero(~np.isnan(sizes))
        since, most, until = None, 0.0, 0
        for samples in looks(len(known)):
            seen = known[:samples]
            first = float(np.median(sizes[seen[: max(samples // 8, 1)]]))
            now = float(np.median(sizes[seen[-max(samples // 8, 1) :]]))
            if now - first < self.binades or now < np.log2(self.least):
                continue
            rise = trend(cells.steps[seen], sizes[seen])
            if rise is None or rise.confidence < self.confidence or rise.low <= 0:
                continue
            until = int(cells.steps[seen[-1]])
            since, most = (until if since is None else since), max(most, now - first)
        if since is None:
            return []
        half = known[len(known) // 2 :]
        late, left = trend(cells.steps[half], sizes[half]), math.inf
        top = float(np.median(sizes[known[-max(len(known) // 8, 1) :]]))
        if late is not None and late.confidence >= self.confidence and late.low > 0:
            elapsed = float(cells.steps[known[-1]] - cells.steps[known[0]])
            left = max(float(np.log2(FP16.max)) - top, 0.0) / late.slope
            left = left if left <= self.horizon * elapsed and top >= np.log2(self.least) else math.inf
        until = int(cells.steps[known[-1]]) if left < math.inf else until
        return [(Spot(name=name, since_step=since, value=most), top, left, until)]


@dataclass(frozen=True, kw_only=True)
class KurtosisGrowth(Rule):
    """Activations whose outliers outgrow all other values."""

    id = "kurtosis-growth"
    says = "a few activations of a layer outgrow all others steadily"
    meaning = "Outliers set the layer's scale, so that 8-bit formats leave few digits to all other values."
    advice = "Keep the layer in 16 bits, scale it in small blocks, or normalise the branch that makes the outliers."
    actions = ("to_bf16",)
    figure = "heatmap"
    explained_by = {Nonfinite.id: "anywhere"}
    items = {"kurtosis": EvidenceItem("Kurtosis"), "grown_binades": EvidenceItem("Binades grown")}
    location_item = EvidenceItem("Kurtosis")
    is_secondary = True

    kurtosis: float = threshold(256.0, "normal values have 3, ReLU's 6, activations of sound small models under 100")
    binades: float = threshold(4.0, "a factor of 16 since the first samples")
    largest: float = threshold(2.0, "binades that the largest value has grown by: not the others that shrank")
    reach: float = threshold(16.0, "the largest value: softmax and gates end at 1")
    confidence: float = threshold(0.99, "Mann-Kendall test, two-sided")

    # The kurtosis of normal values is 3, and that of a few outliers the number of values over theirs. Where the largest
    # value grows along, the outliers are large and not only rare, as those of a sparse layer or a softmax are.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the activations."""
        cells = view.cells("activations")
        if cells is None:
            return
        kurtosis, sizes = log2(cells.kurtosis), log2(cells.true_absmax)
        grown_layers: list[tuple[Spot, float, int, bool]] = []
        level = math.log2(self.kurtosis)
        for layer in np.flatnonzero((kurtosis >= level).any(axis=1) & (sizes >= np.log2(self.reach)).any(axis=1)):
            name, there = cells.names[layer], sizes[layer]
            grown = _risen(cells.steps, kurtosis[layer], name, self.binades, level, self.confidence)
            wide = _risen(cells.steps, there, name, self.largest, math.log2(self.reach), self.confidence)
            if grown and wide:
                spot, by, until, on = grown[0]
                since = max(spot.since_step, wide[0][0].since_step)
                spot = Spot(name=name, since_step=since, value=spot.value)
                grown_layers.append((spot, by, max(until, since), on and wide[0][3]))
        yield from _settled_or_not(
            self, grown_layers, "activations", lambda spot, grown: {"kurtosis": spot.value, "grown_binades": grown},
            "The layer's outliers grew during the training", cells,
        )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return where, since when, and the kurtosis."""
        return Phrase(
            what=f"outliers among the {context.tensors} of {context.layers} have outgrown the rest, seen "
            f"{context.since}",
            effect=f"kurtosis {context.number('kurtosis'):,.0f} so far",
            remedy="keep the layer in 16 bits or normalise it",
        )

    def figure_arguments(self, finding: Finding) -> Mapping[str, Any]:  # noqa: ARG002  (the same for every finding)
        """Draw the kurtosis."""
        return {"statistic": "kurtosis"}


@dataclass(frozen=True, kw_only=True)
class SaturatedFP8(Rule):
    """Tensors in 8 bits or fewer that press against the top of their format."""

    id = "saturated-fp8"
    says = "many values of an 8-bit tensor lie in the format's top binade, and the largest value is reached"
    meaning = "The tensor's scale is too high: its large values all become the largest one."
    advice = "Lower the tensor's scale, refresh it more often, or give the tensor E5M2 or 16 bits."
    actions = ("lower_scale", "to_bf16")
    figure = "code_usage"
    items = {"in_top_binade": EvidenceItem(unit="share", of_worst=" in the top binade")}
    location_item = EvidenceItem("In the top binade", "share")

    share: float = threshold(
        0.25, "normal values scaled to their absmax have 2 % there, evenly spread ones of E4M3 43 %"
    )
    grave: float = threshold(0.5, "half of all values")
    samples: float = threshold(3, _SAMPLES)

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding for each collection."""
        for collection in view.run.tensors:
            cells = view.cells(collection)
            if cells is None or not any(fmt.bits <= 8 for fmt in cells.elements):
                continue
            shares = self._shares(cells)
            spans = layer_spans(shares > self.share, ~np.isnan(shares), self.samples)
            if spans:
                spots = worst(cells, spans, shares)
                severity = "alarm" if spots[0].value > self.grave else "warning"
                evidence = {"worst": spots[0].name, "in_top_binade": spots[0].value}
                yield self.finding(severity, spots, evidence, until_step=last_of(cells, spans), collection=collection)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the share, where, and since when."""
        return Phrase(
            what=f"{percent(context.number('in_top_binade'))} of the {context.tensors} of {context.layers} have sat in "
            f"FP8's top binade {context.since}",
            remedy="lower the tensor's scale or use E5M2",
        )

    def _shares(self, cells: Cells) -> Floats:
        narrow = cells.by_format(lambda fmt: fmt.bits <= 8)
        under = cells.below_binade(cells.by_format(lambda fmt: fmt.max_exponent))
        reached = narrow & (cells.column("absmax") >= cells.by_format(lambda fmt: fmt.max)) & (cells.nonzero > 0)
        counts = np.where(reached, cells.nonzero - under, 0)
        with np.errstate(all="ignore"):
            shares = cells.total(counts) / cells.total(cells.nonzero)
        return np.where(cells.total(narrow.astype(np.int64)) > 0, shares, np.nan)


def _risen(
    steps: Ints, sizes: Floats, name: str, binades: float, level: float, confidence: float
) -> list[tuple[Spot, float, int, bool]]:
    """Return the location of a rise by so many binades to a level, binades, last step, and if it goes on."""
    known = np.flatnonzero(~np.isnan(sizes))
    since, most, until = None, 0.0, 0
    for samples in looks(len(known)):
        seen = known[:samples]
        first, now = (float(np.median(part)) for part in _ends(sizes[seen]))
        rise = trend(steps[seen], sizes[seen])
        if now < level or now - first < binades or rise is None or rise.confidence < confidence or rise.low <= 0:
            continue
        until = int(steps[seen[-1]])
        since, most = (until if since is None else since), max(most, now - first)
    if since is None:
        return []
    half = known[len(known) // 2 :]
    late = trend(steps[half], sizes[half])
    # A trend of the second half needs eight samples. With fewer, the whole one is all there is.
    on = len(half) < _FEW or (late is not None and late.confidence >= confidence and late.low > 0)
    on = on and float(np.median(_ends(sizes[known])[1])) >= level
    spot = Spot(name=name, since_step=since, value=float(2.0 ** np.max(sizes[known])))
    return [(spot, most, int(steps[known[-1]]) if on else until, on)]


def _ends(sizes: Floats) -> tuple[Floats, Floats]:
    width = max(len(sizes) // 8, 1)
    return sizes[:width], sizes[-width:]


def _settled_or_not(
    rule: Rule,
    found: list[tuple[Spot, float, int, bool]],
    collection: str,
    evidence: Callable[[Spot, float], Mapping[str, float]],
    what: str,
    cells: Cells,
) -> Iterator[Finding]:
    """Yield the finding of what still rises. A note of what rose if nothing does."""
    on = [growth for growth in found if growth[3]]
    shown = sorted(on or found, key=lambda growth: -growth[0].value)
    if not shown:
        return
    spots, until = [spot for spot, *_ in shown], max(until for _, _, until, _ in shown)
    numbers = {"worst": spots[0].name, **evidence(spots[0], shown[0][1])}
    if on:
        yield rule.finding("warning", spots, numbers, until_step=until, collection=collection)
        return
    yield rule.finding(
        "info", spots, numbers, until_step=until, collection=collection, actions=(),
        meaning=f"{what}, {outcome(cells, spots)}.", advice="No action is needed.",
    )  # fmt: skip


def _magnitudes(cells: Cells) -> Floats:
    """Return each cell's largest stored magnitude. A format's lowest value is a mask, and left out."""
    low, high = cells.column("min"), cells.column("max")
    masked = low <= -cells.by_format(lambda fmt: fmt.max)
    return cells.highest(np.fmax(np.abs(high), np.where(masked, 0.0, np.abs(low))))


def _distance(cells: Cells) -> Floats:
    """Return the binades from each cell's largest value to its format's top, or NaN."""
    narrow = cells.by_format(lambda fmt: fmt.max < _WIDE and fmt.bits > 8)
    if not narrow.any():
        return np.full(cells.shape, np.nan)
    top = cells.highest(np.where(narrow, cells.by_format(lambda fmt: fmt.max), np.nan))
    return log2(top) - log2(_magnitudes(cells))
