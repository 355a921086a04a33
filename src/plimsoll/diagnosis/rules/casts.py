"""Rules of casts: saturation, underflow, unused codes, unit scale left in 8 bits, and stale casts of autocast.

The first four judge the values at the scale of the cast, which a run of FP8 layers records. The thresholds come from
the format's own numbers, so the rules hold for E4M3, E5M2 and any other format that a module casts to. A module that
rounds by hand records no cast: two of them find it by what comes in and what goes out.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, floor, frexp, isfinite, log2
from statistics import NormalDist
from typing import Any

import numpy as np

from plimsoll.diagnosis.estimates.cast_cells import COLLECTIONS, CastCells, cast_cells
from plimsoll.diagnosis.finding import Finding, Severity, Spot
from plimsoll.diagnosis.rules.base import (
    EvidenceItem,
    FindingContext,
    Mask,
    Phrase,
    Rule,
    last_of,
    layer_spans,
    threshold,
    worst,
)
from plimsoll.diagnosis.rules.underflow import FLUSHING
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints, module_ends
from plimsoll.diagnosis.tables.wiring_facts import first_fact, listed_in
from plimsoll.diagnosis.view import View
from plimsoll.formats import FP16, Format, get_element
from plimsoll.text import number, percent, power

_SAMPLES = "not reported from a single sample"
_WORKS = 0.01  # of a tensor's values that a scale that works may flush, as in `whatif`
_CONSTANT_SCALE = "a bound that stays"
_UNSIGNED = "negative inputs cut to zero"
_WRAPPED = "large values come back negative"
_ONE_SCALE = "a grid that is too coarse"
_WEIGHTS = "weights cast without a scale"
_ACTIVATIONS = "activations cast without a scale"
_ZEROS = "zero_heatmap"  # of casts by hand: the rule's own figure is of values as a recorded cast holds them
_FEW_DIGITS = "blocks of unlike values"
_MADE_NARROW = "a gradient made in the forward"
_KEPT = "kept in 8 bits"  # a fact of the watch, and the cause in the evidence
_GRADIENTS = "gradients through a narrow cast"
_QUANTA = 8  # times FP16's smallest number: what a few additions make of it
_LARGEST = (7, 8, 15, 16, 31, 63, 127, 128, 255)  # the largest whole numbers that quantised values are
_BITS = 8  # of formats in which activations are sent or kept
_BYTES = (127, 255)  # the largest of them, with a sign and without
_SIGNED = 0.1  # of the sizes of a model's input that are negative: fewer may be noise around zero
_ON_GRID = 1e-3  # of a step of the grid: the smallest of a tensor's values is so near a whole number by chance in 500
_Found = tuple[CastCells, int, int, int, float]  # cells, layer, first and last place, value

_UNIT = "For constant scales, find why the tensor has left its scale (plimsoll.unit.audit)"
_MODULE = "or keep its module in BF16"


@dataclass(frozen=True, kw_only=True)
class CastRule(Rule):
    """Base of the rules of casts: the worst cast's module, role and scale."""

    figure = "code_usage"

    def _finding(
        self, found: list[_Found], name: str, severity: Severity, collection: str, evidence: Mapping[str, float] = {}
    ) -> Finding:
        """Return a finding of these casts, the worst first."""
        found = sorted(found, key=lambda each: (-abs(each[4]), each[2]))
        spots = [Spot(name=c.cells.names[i], since_step=int(c.cells.steps[a]), value=v) for c, i, a, _, v in found]
        cast, layer, first, last, value = found[0]
        serving = cast.serving(layer, first, last, _WORKS)
        return self.finding(
            severity,
            spots,
            {
                "worst": spots[0].name,
                "module": cast.casts[layer].module,
                "role": cast.casts[layer].role,
                "format": cast.format.name,
                name: value,
                "scale": cast.scale_at(layer, last),
                "scale_that_serves": "none" if serving is None else serving,
                **evidence,
            },
            until_step=max(int(c.cells.steps[b]) for c, _, _, b, _ in found),
            collection=collection,
        )

    def _phrase(self, context: FindingContext, share: str, how: str, effect: str = "") -> Phrase:
        """Return a phrase about a share of the values, with the scale that would work."""
        scale = context.number("scale_that_serves")
        return Phrase(
            what=f"up to {percent(context.number(share))} of the {context.tensors} of {context.layers} have {how} "
            f"{context.format} {context.since}",
            effect=effect,
            remedy=f"cast them at {power(scale)}, or use BF16" if isfinite(scale) else "use BF16 for them",
        )


@dataclass(frozen=True, kw_only=True)
class ShareRule(CastRule):
    """Base of the rules on a share of values: bounds of a warning and an alarm."""

    share: float
    grave: float
    samples: float

    def _of_shares(self, view: View, name: str, shares: Callable[[CastCells], Floats]) -> Iterator[Finding]:
        """Yield one finding for each collection."""
        for collection in COLLECTIONS:
            spans = [
                span
                for cast in cast_cells(view, collection)
                for span in _above(cast, shares(cast), self.share, self.samples)
            ]
            if spans:
                alarming = max(value for *_, value in spans) > self.grave
                yield self._finding(spans, name, "alarm" if alarming else "warning", collection)


def _above(cast: CastCells, shares: Floats, least: float, samples: float) -> list[_Found]:
    """Return the layers whose share is above a bound long enough, with the highest."""
    spans = layer_spans(shares > least, ~np.isnan(shares), samples)
    return [(cast, layer, a, b, float(np.nanmax(shares[layer, a : b + 1]))) for layer, a, b in spans]


@dataclass(frozen=True, kw_only=True)
class CastSaturates(ShareRule):
    """Values beyond the largest one of the format that they are cast to."""

    id = "cast-saturates"
    says = "many values that a module casts to 8 bits exceed the format's largest one"
    meaning = "All of these values become the largest one, and their differences are lost."
    advice = f"Lower the tensor's scale. For scales from the data, use a larger margin. {_UNIT}, {_MODULE}."
    actions = ("to_bf16",)
    items = {"saturated": EvidenceItem(unit="share")}
    location_item = EvidenceItem("Saturated", "share")

    share: float = threshold(
        0.001, "T9: single values held at the top harm little; of normal ones it is 3.3 deviations"
    )
    grave: float = threshold(0.05, "one value in twenty: no outliers any more")
    samples: float = threshold(3, _SAMPLES)
    cut: float = threshold(0.5, "of what comes in, beyond a bound that stays: a clamp for outliers cuts next to none")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding for each collection, and those of modules that round by hand."""
        yield from self._of_shares(view, "saturated", lambda cast: cast.saturated)
        yield from self._by_hand(view)
        cells = view.cells("activations")
        if cells is None:
            return
        yield from self._of_signs(
            cells, _negative_cut(cells, str(view.run.manifest.get("root"))), _UNSIGNED,
            "The module rounds the model's input to codes without a sign, and all that is negative becomes zero: {} of "
            "the input's sizes. What is left are whole multiples of a 255th or 127th of the largest value.",
            "Use codes with a sign (INT8, -127 to 127), or a zero point. Codes without one are for values that are "
            "never negative, such as pixels.",
        )  # fmt: skip
        yield from self._of_signs(
            cells, _wrapped(cells), _WRAPPED,
            "The module rounds to 8-bit codes without a clamp. What is above its range wraps around and comes back "
            "with the other sign: no input is negative, but outputs reach down to -128 steps of its grid: {} of "
            "their sizes.",
            "Clamp the codes to -128 and 127 before the cast to INT8, and take the scale from usual batches, not from "
            "the first one alone.",
        )  # fmt: skip

    def _of_signs(self, cells: Cells, shares: Floats, cause: str, meaning: str, advice: str) -> Iterator[Finding]:
        """Yield one finding of the modules that lose or turn this share of the signs; `meaning` has a place for it."""
        spans = layer_spans(shares > 0, ~np.isnan(shares), self.samples)
        if spans:
            spots = worst(cells, spans, shares)
            evidence = {"cause": cause, "saturated": spots[0].value, "worst": spots[0].name}
            yield self.finding(
                "warning", spots, evidence, until_step=last_of(cells, spans), collection="activations", actions=(),
                figure="spectrogram", meaning=meaning.format(percent(spots[0].value)), advice=advice,
            )  # fmt: skip

    # A scale from the first batch is a number of many digits, and what goes out never exceeds the bound that it sets.
    # The bounds of activations (1, 6) and of clamps are round numbers.
    def _by_hand(self, view: View) -> Iterator[Finding]:
        """Yield one finding of the outputs whose largest value stays while inputs are far beyond it."""
        cells = view.cells("activations")
        if cells is None:
            return
        most, finite = cells.true_absmax, cells.finite
        shares = np.full(cells.shape, np.nan)
        for _, into, out in module_ends(cells):
            known = np.flatnonzero((most[out] > 0) & (finite[into] == finite[out]))
            if len(known) <= self.samples:
                continue
            bound = float(np.median(most[out, known[: int(self.samples)]]))
            if not _is_round(bound):
                shares[out, known] = _beyond(cells, into, known, bound) * (most[out, known] == bound)
        spans = layer_spans(shares > self.cut, ~np.isnan(shares), self.samples)
        if spans:
            spots = worst(cells, spans, shares)
            bound = max(float(most[layer, last]) for layer, _, last in spans if cells.names[layer] == spots[0].name)
            evidence = {"cause": _CONSTANT_SCALE, "saturated": spots[0].value, "worst": spots[0].name, "bound": bound}
            yield self.finding(
                "warning", spots, evidence, until_step=last_of(cells, spans), collection="activations", actions=(),
                meaning=f"The module cuts values off at a bound that stays the same ({bound:.3g}), and "
                f"{percent(spots[0].value)} or more of what comes in lies beyond it: these saturate, and their "
                "differences are lost.",
                advice="If the bound is that of a scale for FP8 or INT8, take the scale from usual batches, not from "
                "the first one alone, and refresh it.",
            )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the share beyond the largest value."""
        if context.cause == _UNSIGNED:
            return Phrase(
                what=f"{context.place} has cut all negative inputs to zero {context.since}",
                effect="as it rounds to codes without a sign",
                remedy="use codes with a sign",
            )
        if context.cause == _WRAPPED:
            return Phrase(
                what=f"large inputs of {context.place} have come back negative {context.since}",
                effect="as its 8-bit codes wrap around",
                remedy="clamp them before the cast",
            )
        if context.cause == _CONSTANT_SCALE:
            return Phrase(
                what=f"{percent(context.number('saturated'))} of the inputs of {context.place} have been beyond "
                f"{number(context.number('bound'))} {context.since}",
                effect="and are cut to it",
                remedy="take the scale from usual batches",
            )
        return self._phrase(context, "saturated", "been beyond", "and are cut to its largest value")


@dataclass(frozen=True, kw_only=True)
class CastFlushes(ShareRule):
    """Nonzero values that become zero in the format that they are cast to."""

    id = "cast-flushes"
    says = "many values become zero in a cast to 8 bits, or in one that a module does by hand"
    meaning = "The products of these values are missing from the sums."
    advice = f"Raise the tensor's scale if a higher one works, or use E5M2 for it. {_UNIT}, {_MODULE}."
    actions = ("to_bf16",)
    items = {"flushed": EvidenceItem(unit="share")}
    location_item = EvidenceItem("Lost", "share")

    share: float = threshold(0.05, "T6: above 5 % of values lost; unit normal ones lose 0.08 % in E4M3")
    grave: float = threshold(0.25, "a quarter of one tensor")
    samples: float = threshold(3, _SAMPLES)
    coarse: float = threshold(0.75, "of the values that a module rounds to INT8 or INT4; normal ones lose 2 % or 22 %")
    missing: float = threshold(0.02, "of the magnitudes' sum, where a module rounds to 8 bits: less does no harm")
    blocks: float = threshold(0.4, "of the values that it rounds to few digits; normal ones lose 9 % in MXFP4")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding for each collection, and of casts by hand: of what modules take, weights, and gradients."""
        yield from self._of_shares(view, "flushed", lambda cast: cast.flushed)
        yield from self._by_hand(view)
        yield from self._unscaled(view)
        yield from self._kept(view)
        yield from self._weights(view)
        yield from self._gradients(view)
        yield from self._made_narrow(view)

    def _made_narrow(self, view: View) -> Iterator[Finding]:
        """Yield one finding of a loss that makes its gradient in the forward, in FP16."""
        event = first_fact(view, "gradient made narrow")
        if event is not None:
            who, lost = (event.details.get(name) for name in ("function", "lost"))
            share = float(str(lost))
            evidence = {"cause": _MADE_NARROW, "function": str(who), "flushed": share, "format": "fp16"}
            yield self.since_event(
                "warning", event, view, evidence, actions=(), figure=_ZEROS,
                meaning=f"{who} computes its gradient in the forward and keeps it in FP16, before a loss scale has "
                f"multiplied it: {percent(share)} of it is zero, and the rest is below FP16's smallest normal number.",
                advice="Keep that gradient in FP32 or BF16, or multiply it by a power of two before the cast and "
                "divide by it in the backward.",
            )  # fmt: skip

    # The smallest values of an FP32 gradient are whole multiples of FP16's smallest number, which is chance in some
    # millions. Gradients elsewhere are smaller, so they were not zero before. Where the loss is scaled, the rules of
    # underflow judge what FP16 loses.
    def _gradients(self, view: View) -> Iterator[Finding]:
        """Yield one finding of the FP32 gradients that came through FP16, where most became zero."""
        cells = view.cells("activation_gradients")
        if cells is None or view.scaled:
            return
        least = -cells.highest(-cells.columns["absmin"])
        quanta, nonzero = least / FP16.smallest_subnormal, cells.total(cells.nonzero) > 0
        wide = np.array([fmt == "fp32" for fmt in cells.last_formats])[:, None]
        smaller = (nonzero & (least < FP16.smallest_subnormal / 4)).any(axis=0)
        with np.errstate(invalid="ignore"):
            cut = wide & nonzero & smaller & (quanta == np.rint(quanta)) & (quanta <= _QUANTA)
        zeros = cells.zero_fraction
        spans = layer_spans(cut & (zeros > self.grave), ~np.isnan(zeros), self.samples)
        if spans:
            spots = sorted(worst(cells, spans, zeros), key=lambda spot: (-spot.value, cells.names.index(spot.name)))
            evidence = {"cause": _GRADIENTS, "flushed": spots[0].value, "worst": spots[0].name, "format": "fp16"}
            yield self.finding(
                "warning", spots, evidence, until_step=last_of(cells, spans), collection="activation_gradients",
                actions=(), figure=_ZEROS,
                meaning="These FP32 gradients are whole multiples of FP16's smallest number, and "
                f"{percent(spots[0].value)} of them are zero at the worst step: a cast to FP16 in the forward takes "
                "its gradient through FP16 on the way back.",
                advice="Cast to BF16, or multiply the loss by a loss scale (GradScaler) and divide the gradients by "
                "it, or leave that part in FP32.",
            )  # fmt: skip

    def _kept(self, view: View) -> Iterator[Finding]:
        """Yield one finding of what is kept for the backward in 8 bits without a scale."""
        event = first_fact(view, _KEPT)
        zeros = 0.0 if event is None else float(str(event.details["zeros"]))
        if event is not None and zeros >= self.grave:
            evidence: dict[str, float | int | str] = {"cause": _KEPT, "flushed": zeros}
            evidence |= {key: str(event.details[key]) for key in ("operation", "format")}
            yield self.since_event(
                "warning", event, view, evidence, actions=(), figure="loss_and_scale",
                meaning=f"What {evidence['operation']} keeps for its backward is stored in "
                f"{str(evidence['format']).upper()} without a scale, and {percent(zeros)} of it is zero there: the "
                "forward is sound, and gradients are computed from zeros.",
                advice="Store a scale with it that brings the largest value near the format's largest, or keep it in "
                "BF16.",
            )  # fmt: skip

    # A cast leaves the smallest number of its format as the smallest weight, and a largest one with its few digits.
    # Training would move weights off both, so what is found has been cast and stays as it is, or is cast at each step.
    def _weights(self, view: View) -> Iterator[Finding]:
        """Yield one finding of weights that are in a narrow format, or went through one, where many became zero."""
        cells = view.cells("weights")
        if cells is None:
            return
        most, least, zeros = cells.true_absmax, -cells.highest(-cells.columns["absmin"]), cells.zero_fraction
        for fmt in FLUSHING:
            digits = np.ldexp(np.frexp(most)[0], fmt.mantissa_bits + 1)
            with np.errstate(invalid="ignore"):
                cut = (least == fmt.smallest_subnormal) & (digits == np.rint(digits)) & (zeros > self.grave)
            first = cut[:, : int(self.samples)]
            layers = [
                i for i in np.flatnonzero(first.all(axis=1)).tolist() if _holds(cells.format_of(cells.names[i]), fmt)
            ]
            if layers and first.shape[1]:
                since = int(cells.steps[0])
                spots = [Spot(name=cells.names[i], since_step=since, value=float(zeros[i, 0])) for i in layers]
                spots.sort(key=lambda spot: -spot.value)
                evidence = {"cause": _WEIGHTS, "flushed": spots[0].value, "worst": spots[0].name, "format": fmt.name}
                yield self.finding(
                    "warning", spots, evidence, until_step=view.last_step, collection="weights", actions=(),
                    figure=_ZEROS,
                    meaning=f"These weights were cast to {fmt.name.upper()} without a scale: up to "
                    f"{percent(spots[0].value)} of them are below half of its smallest number, and became zero.",
                    advice="Multiply weights by a power of two before the cast, so that the largest comes near the "
                    "format's, and divide by it afterwards. Or give each block a scale (MXFP8).",
                )  # fmt: skip
                return

    # What comes out has the digits of an 8-bit format, and its smallest number as the smallest value, at each sample.
    # What came in had the same largest value, with more digits. A scale that is divided by afterwards moves both off.
    def _unscaled(self, view: View) -> Iterator[Finding]:
        """Yield one finding of the modules that round to an 8-bit format without a scale, where many become zero."""
        cells = view.cells("activations")
        if cells is None:
            return
        most, least, nonzero = cells.true_absmax, -cells.highest(-cells.columns["absmin"]), cells.total(cells.nonzero)
        sums = cells.total(cells.columns["abssum"] / cells.scale)
        for fmt in (fmt for fmt in FLUSHING if fmt.bits == _BITS):
            lost, gone = np.full(cells.shape, np.nan), 0.0
            for _, into, out in module_ends(cells):
                own = cells.format_of(cells.names[out])
                if own == fmt.name or not _holds(own, fmt):
                    continue
                with np.errstate(all="ignore"):
                    cut = (least[out] == fmt.smallest_subnormal) & (least[into] < fmt.smallest_subnormal / 2)
                    cut &= _has_digits(most[out], fmt.mantissa_bits + 1) & (cells.finite[into] == cells.finite[out])
                    cut &= most[out] >= fmt.smallest_normal  # else all of it is at the bottom: underflow-high
                    cut &= np.abs(most[out] / most[into] - 1) <= 2.0 ** -(fmt.mantissa_bits + 1)
                    missing = 1 - sums[out] / sums[into]
                    share = np.where(cut & (missing >= self.missing), 1 - nonzero[out] / nonzero[into], 0.0)
                known = np.flatnonzero(~np.isnan(nonzero[out]))
                if len(known) >= self.samples and (cut & ~_has_digits(most[into], fmt.mantissa_bits + 1))[known].all():
                    lost[out], gone = np.where(np.isnan(nonzero[out]), np.nan, share), max(gone, *missing[known])
            spans = layer_spans(lost > self.grave, ~np.isnan(lost), self.samples)
            if spans:
                spots = worst(cells, spans, lost)
                evidence = {
                    "cause": _ACTIVATIONS, "flushed": spots[0].value, "worst": spots[0].name, "format": fmt.name,
                    "missing": gone,
                }  # fmt: skip
                flushed, name = percent(spots[0].value), fmt.name.upper()
                yield self.finding(
                    "warning", spots, evidence, until_step=last_of(cells, spans), collection="activations", actions=(),
                    figure=_ZEROS,
                    meaning=f"The module rounds to {name} without a scale: {flushed} of what comes in is below half of "
                    f"that format's smallest number and becomes zero, with up to {percent(gone)} of the sum of all "
                    "magnitudes.",
                    advice="Multiply by what brings the largest value of a row or tensor near the format's largest "
                    "before the cast, and divide by it afterwards. Or send these values in BF16.",
                )  # fmt: skip

    # Quantised values are whole numbers times a step, of which the largest value has 127 or so. Small values become
    # zero, and what is left sums up to nearly the same.
    def _by_hand(self, view: View) -> Iterator[Finding]:
        """Yield one finding of the modules that round nearly all that comes in to zero."""
        cells = view.cells("activations")
        if cells is None:
            return
        most, least, nonzero = cells.true_absmax, -cells.highest(-cells.columns["absmin"]), cells.total(cells.nonzero)
        least, sums = least / cells.highest(cells.scale), cells.total(cells.columns["abssum"] / cells.scale)
        shares = np.full(cells.shape, np.nan)
        with np.errstate(all="ignore"):
            steps = np.multiply.outer(np.array(_LARGEST), least / most)
            on_grid = np.abs(steps - np.rint(steps)) <= _ON_GRID
        in_blocks = shares.copy()
        short = _has_digits(least, 2) & _has_digits(most, 4) & (least < most)
        short &= ~np.isin(least, [fmt.smallest_subnormal for fmt in FLUSHING])  # no block, but a format without a scale
        for _, into, out in module_ends(cells):
            with np.errstate(all="ignore"):
                same = (cells.finite[into] == cells.finite[out]) & (nonzero[out] > 0)
                same &= np.abs(sums[out] / sums[into] - 1) <= self.grave
                changed = np.abs(most[out] / most[into] - 1)
                lost = np.where(same, 1 - nonzero[out] / nonzero[into], np.nan)
            known = np.flatnonzero(~np.isnan(lost))[: int(self.samples)]
            if len(known) and (changed[known] <= self.grave).all() and short[out, known].all():
                in_blocks[out] = np.where(short[into], np.nan, lost)
            elif len(known) and on_grid[:, out, known].all(axis=1).any():
                shares[out] = np.where(changed <= 1 / min(_LARGEST), lost, np.nan)
        yield from self._rounded(
            cells, in_blocks, self.blocks, _FEW_DIGITS,
            "The module rounds to a format of few digits with powers of two as scales, and {} of its inputs become "
            "zero: the largest value of a block sets its scale, and the others are far smaller.",
            "Let blocks run along the dimension that a product sums over, the last one, where values are of like size. "
            "Or use smaller blocks, or a format with more range (MXFP8).",
        )  # fmt: skip
        yield from self._rounded(
            cells, shares, self.coarse, _ONE_SCALE,
            "The module rounds to whole numbers times a step, and {} of its inputs become zero: a few large values set "
            "the step for all.",
            "Use a scale for each channel or block, or treat the channel with the large values apart.",
        )  # fmt: skip

    def _rounded(
        self, cells: Cells, shares: Floats, least: float, cause: str, meaning: str, advice: str
    ) -> Iterator[Finding]:
        """Yield one finding of the modules that round a larger share to zero; `meaning` has a place for it."""
        spans = layer_spans(shares > least, ~np.isnan(shares), self.samples)
        if spans:
            spots = worst(cells, spans, shares)
            evidence = {"cause": cause, "flushed": spots[0].value, "worst": spots[0].name}
            yield self.finding(
                "warning", spots, evidence, until_step=last_of(cells, spans), collection="activations", actions=(),
                figure=_ZEROS, meaning=meaning.format(percent(spots[0].value)), advice=advice,
            )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the share below the smallest value."""
        if context.cause == _GRADIENTS:
            return Phrase(
                what=f"a cast to FP16 has made {percent(context.number('flushed'))} of the gradients at "
                f"{context.place} zero {context.since}",
                remedy="scale the loss, or cast to BF16",
            )
        if context.cause == _FEW_DIGITS:
            return Phrase(
                what=f"{context.place} has rounded {percent(context.number('flushed'))} of its inputs to zero "
                f"{context.since}",
                effect="because its blocks hold values of unlike sizes",
                remedy="look at the dimension along which blocks run",
            )
        if context.cause == _KEPT:
            return Phrase(
                what=f"{percent(context.number('flushed'))} of what {context.text('operation')} keeps for the backward "
                f"in {context.format} is zero, seen {context.since}",
                effect="so its gradients are wrong",
                remedy="store it with a scale",
            )
        if context.cause == _ACTIVATIONS:
            return Phrase(
                what=f"{context.place} has rounded {percent(context.number('flushed'))} of its inputs to zero in "
                f"{context.format} {context.since}",
                effect="because no scale is used",
                remedy="scale them before the cast",
            )
        if context.cause == _WEIGHTS:
            return Phrase(
                what=f"a cast to {context.format} has made {percent(context.number('flushed'))} of the weights of "
                f"{context.place} zero, seen {context.since}",
                remedy="scale them by a power of two before the cast",
            )
        if context.cause == _MADE_NARROW:
            return Phrase(
                what=f"{percent(context.number('flushed'))} of the gradient that {context.text('function')} makes in "
                f"its forward is zero in FP16, seen {context.since}",
                remedy="keep it in FP32 or BF16",
            )
        if context.cause == _ONE_SCALE:
            return Phrase(
                what=f"{context.place} has rounded {percent(context.number('flushed'))} of its inputs to zero "
                f"{context.since}",
                effect="because a few large values set the step of its grid",
                remedy="use a scale for each channel",
            )
        return self._phrase(context, "flushed", "been below", "and become zero")


@dataclass(frozen=True, kw_only=True)
class CodesUnused(CastRule):
    """A tensor that sits in the bottom of its format, the top left empty."""

    id = "codes-unused"
    says = "a tensor that is cast to 8 bits uses only the format's lowest binades"
    meaning = "Its values have fewer digits than the format offers at a higher scale."
    advice = f"Raise the tensor's scale by the free binades. {_UNIT}, {_MODULE}."
    actions = ("to_bf16",)
    items = {"with_fewer_digits": EvidenceItem(unit="share")}
    location_item = EvidenceItem("With fewer digits", "share")

    share: float = threshold(0.25, "of the values have fewer digits; of unit normal ones in E4M3 it is 1.2 %")
    room: float = threshold(3, "binades between the largest value and the top; a power of two leaves up to one")
    samples: float = threshold(3, _SAMPLES)

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding for each collection."""
        for collection in COLLECTIONS:
            unused: list[_Found] = []
            for cast in cast_cells(view, collection):
                with np.errstate(invalid="ignore"):
                    low = np.where(cast.room >= self.room, cast.coarse, np.where(np.isnan(cast.coarse), np.nan, 0.0))
                unused += _above(cast, low, self.share, self.samples)
            if unused:
                cast, layer, _, last, _ = max(unused, key=lambda each: each[4])
                top, free = cast.format.max_exponent, floor(float(cast.room[layer, last]))
                binades = top - cast.format.quantum_exponent + 1
                used = {"binades_used": max(binades - free, 0), "binades": binades}
                yield self._finding(unused, "with_fewer_digits", "warning", collection, used)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the share of subnormal values."""
        return self._phrase(context, "with_fewer_digits", "had fewer digits than")


@dataclass(frozen=True, kw_only=True)
class UnitDrift(CastRule):
    """A tensor that began at unit scale and has left its format's good sizes."""

    id = "unit-drift"
    says = "a tensor that began at unit scale has left [2^-k, 2^k], where its 8-bit format works at a constant scale"
    meaning = "The constant scale fitted at the start of the training and no longer does."
    advice = (
        "Give the module's tensors scales from their data (fp8-tensor), or use BF16. Or set weight decay so that sizes "
        "settle."
    )
    actions = ("to_bf16",)
    figure = "spectrogram"
    location_item = EvidenceItem("Binade")

    fewer: float = threshold(0.25, "of normal values of that size are subnormal, as for codes-unused")
    beyond: float = threshold(0.001, "of normal values of that size saturate, as for cast-saturates")
    samples: float = threshold(3, "so many inside at the beginning, and so many in a row outside")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding for each collection."""
        for collection in COLLECTIONS:
            drifted: list[_Found] = []
            bounds: dict[str, int] = {}
            for cast in cast_cells(view, collection, constant=True):
                bounds[cast.format.name] = self.bound(cast.format)
                drifted += self._left(cast, bounds[cast.format.name])
            if drifted:
                worst = max(drifted, key=lambda each: abs(each[4]))[0].format.name
                yield self._finding(drifted, "binades", "warning", collection, {"bound": bounds[worst]})

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the size and its bounds."""
        bound = context.number("bound")
        return Phrase(
            what=f"{context.tensors} of {context.layers} have been at 2^{context.number('binades'):.0f}, out of "
            f"2^-{bound:.0f} to 2^{bound:.0f}, {context.since}",
            effect="where unit scaling's constant casts do not work",
            remedy="use fp8-tensor or BF16 for them",
        )

    def figure_arguments(self, finding: Finding) -> Mapping[str, Any]:
        """Draw the format's limits at a scale of 1. They are of the values as cast."""
        return {"formats": [finding.evidence.get("format")]} if finding.evidence.get("scale") == 1.0 else {}

    # The bound is 2^-k to 2^k, k from the format: normal values of size 2^-k have `fewer` of them subnormal, of size
    # 2^k `beyond` of them saturated, whichever is nearer. It is 4 for E4M3, 12 for E5M2.
    def bound(self, fmt: Format) -> int:
        """Return the k of a format."""
        normal = NormalDist()
        low = log2(fmt.smallest_normal / normal.inv_cdf(0.5 + self.fewer / 2))
        high = log2(fmt.max / normal.inv_cdf(1 - self.beyond / 2))
        return max(floor(min(-low, high)), 1)

    def _left(self, cast: CastCells, bound: int) -> list[_Found]:
        sizes, known = cast.sizes, ~np.isnan(cast.sizes)
        with np.errstate(invalid="ignore"):
            outside = np.abs(sizes) > bound
        drifted: list[_Found] = []
        for layer, first, last in layer_spans(outside, known, self.samples):
            begun = np.flatnonzero(known[layer])[: int(self.samples)]
            if abs(float(np.median(sizes[layer, begun]))) <= bound:
                span = sizes[layer, first : last + 1]
                drifted.append((cast, layer, first, last, float(span[np.nanargmax(np.abs(span))])))
        return drifted


@dataclass(frozen=True, kw_only=True)
class CastsStale(Rule):
    """Forwards that use casts of weights from before the last step."""

    id = "casts-stale"
    says = "autocast keeps its casts of the weights from step to step, so no forward sees an update"
    meaning = (
        "Autocast casts a weight once and keeps the cast until its outermost context is left. It is never left, so "
        "forwards use the weights of the first step, and the model does not learn."
    )
    advice = "Enter autocast for each forward, and leave it before optimizer.step(); or pass cache_enabled=False."
    actions = ("stop",)
    figure = "loss_and_scale"

    parameters: float = threshold(1, "the facts are exact: the same cast, of a weight that was written since")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding of the weights."""
        event = first_fact(view, "stale casts")
        names = [] if event is None else listed_in(event, "parameters")
        if event is not None and len(names) >= self.parameters:
            spots = [Spot(name=name, since_step=event.step) for name in names]
            evidence = {"parameters": len(names)}
            yield self.finding("alarm", spots, evidence, until_step=max(view.last_step, event.step))

    def phrase(self, context: FindingContext) -> Phrase:
        """Return whose casts are old."""
        whose = context.layer if context.is_single else f"{len(context.finding.where)} weights"
        return Phrase(
            what=f"autocast keeps its old casts of {whose} {context.since}",
            effect="and no forward sees an update",
            remedy="enter autocast for each forward",
        )


def _is_round(value: float) -> bool:
    """Return whether a number is one that is written with two digits, or a power of two."""
    return abs(value / float(f"{value:.1e}") - 1) <= _ON_GRID**2 or frexp(value)[0] == 0.5


def _beyond(cells: Cells, layer: int, places: Ints, bound: float) -> Floats:
    """Return the share of a layer's values in the binades above that of a bound."""
    above = np.full(len(cells), ceil(log2(bound)), dtype=np.int64) + np.rint(np.log2(cells.scale)).astype(np.int64)
    counts = cells.total(cells.nonzero - cells.below_binade(above))[layer]
    return counts[places] / cells.finite[layer, places]


# Inside a model a ReLU may be part of a quantiser. What a model is given has its sign for a reason. A ReLU alone keeps
# the smallest values, which a grid does not have.
def _negative_cut(cells: Cells, root: str) -> Floats:
    """Return what share of the model's input is negative where a module rounds the rest of it to an unsigned grid."""
    shares = np.full(cells.shape, np.nan)
    given = [place for place, name in enumerate(cells.names) if name.startswith(f"{root}:input")]
    low, high = -cells.highest(-cells.columns["min"]), cells.highest(cells.columns["max"])
    plain, size, square = (cells.total_of(name) for name in ("sum", "abssum", "sumsq"))
    most, least = cells.highest(cells.columns["absmax"]), -cells.highest(-cells.columns["absmin"])
    for name, into, out in module_ends(cells):
        if name == root or not any((square[into] == square[place]).any() for place in given):
            continue
        with np.errstate(all="ignore"):
            positive, negative = (size[into] + plain[into]) / 2, (size[into] - plain[into]) / 2
            same = (cells.finite[into] == cells.finite[out]) & (low[out] == 0)
            same &= np.abs(plain[out] / positive - 1) <= 1 / _BYTES[0]
            same &= np.abs(high[out] - high[into]) <= most[into] / _BYTES[0]
            steps = [by * least[out] / base for by in _BYTES for base in (most[into], most[out])]
            on_grid = np.array([(each > 0.5) & (np.abs(each - np.rint(each)) <= _ON_GRID) for each in steps])
        known = np.flatnonzero(cells.recorded[into] & cells.recorded[out])
        if len(known) and on_grid[:, known].all(axis=1).any():
            share = negative / size[into]
            shares[out, known] = np.where(same & (share >= _SIGNED), share, 0.0)[known]
    return shares


# No input is negative, the outputs reach down to -128 steps, and hardly a value below half of the range has changed
# its size: a rotation or a layer before the rounding would have changed most.
def _wrapped(cells: Cells) -> Floats:
    """Return what share of the outputs is negative where a module's 8-bit codes have wrapped around."""
    shares = np.full(cells.shape, np.nan)
    low, high = -cells.highest(-cells.columns["min"]), cells.highest(cells.columns["max"])
    plain, size = cells.total_of("sum"), cells.total_of("abssum")
    least = -cells.highest(-cells.columns["absmin"])
    for _, into, out in module_ends(cells):
        known = np.flatnonzero(cells.recorded[into] & cells.recorded[out])
        with np.errstate(all="ignore"):
            step = np.maximum(high[out] / 127, low[out] / -128)  # one of the two is among the values of a large batch
            on_grid = (least[out] > step / 2) & (np.abs(least[out] / step - np.rint(least[out] / step)) <= _ON_GRID)
            holds = on_grid & (low[into] >= 0) & (cells.finite[into] == cells.finite[out])
            holds &= (low[out] <= -64 * step) & (high[out] >= 64 * step) & (high[into] > 127.5 * step)
        if not holds[known].any():
            continue
        binade = np.full(len(cells), floor(log2(64 * float(np.nanmedian(step[known][holds[known]])))), dtype=np.int64)
        large = cells.total(cells.nonzero - cells.below_binade(binade))
        with np.errstate(all="ignore"):
            holds &= np.abs(large[out] - large[into]) <= 0.1 * large[into]
        share = (size[out] - plain[out]) / (2 * size[out])
        shares[out, known] = np.where(holds, share, np.where(on_grid, 0.0, np.nan))[known]
    return shares


def _holds(name: str, fmt: Format) -> bool:
    """Return whether a format has the digits and the powers of two of another."""
    own = get_element(name, "diagnose")
    return own.mantissa_bits >= fmt.mantissa_bits and own.exponent_bits >= fmt.exponent_bits


def _has_digits(values: Floats, digits: int) -> Mask:
    """Return where values have at most so many binary digits."""
    scaled = np.ldexp(np.frexp(values)[0], digits)
    return np.isfinite(values) & (values > 0) & (scaled == np.rint(scaled))
