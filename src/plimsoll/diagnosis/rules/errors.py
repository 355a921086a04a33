"""Rules of rounding: errors against a shadow step, clustered blocks, flips, operations of the script."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from plimsoll.diagnosis.estimates.format_losses import Modules
from plimsoll.diagnosis.finding import Finding, Spot
from plimsoll.diagnosis.rules.base import (
    EvidenceItem,
    FindingContext,
    Mask,
    Phrase,
    Rule,
    find_spans,
    last_of,
    layer_spans,
    threshold,
    worst,
)
from plimsoll.diagnosis.rules.casts import CastFlushes, CastSaturates
from plimsoll.diagnosis.rules.nonfinite import Nonfinite
from plimsoll.diagnosis.rules.underflow import UnderflowHigh
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.diagnosis.tables.trend import looks, trend
from plimsoll.diagnosis.tables.wiring_facts import facts, listed_in
from plimsoll.diagnosis.view import View
from plimsoll.runs import Event
from plimsoll.runs.records import FLIPS, MARGIN, TIES
from plimsoll.spectrum import error_sums
from plimsoll.tensor_collections import COLLECTIONS
from plimsoll.text import percent

_SHADOWED = tuple(c.name for c in COLLECTIONS if c.is_shadowed)
_BACKWARD = tuple(c.name for c in COLLECTIONS if c.is_shadowed and c.phase == "backward")
_SUMS = ("compared", "error", "errorsq", "reference", "referencesq", "error_reference")
_OTHER_COURSE = "of the activations before: then the repetition itself took another course"
_LOOKS = "shadow steps in a row: not reported from a single one"


@dataclass(frozen=True, kw_only=True)
class ErrorAboveSignal(Rule):
    """Gradients whose rounding error is as large as they are, or will soon be.

    Errors are those of shadow steps. Gradients of parameters are judged by module, and those that are next to nothing
    not at all: in exact arithmetic some are zero, as that of a key's bias, and what is recorded of them is noise.
    """

    id = "error-above-signal"
    says = "the error of gradients against a shadow step exceeds the gradients, or soon will"
    meaning = "The gradient is mostly rounding noise, so the layer no longer learns from its data."
    advice = "Give the layer a format with more digits, above all in the backward. pl.microscope says which cast it is."
    actions = ("to_bf16",)
    figure = "heatmap"
    explained_by = {Nonfinite.id: "anywhere", UnderflowHigh.id: "same module", CastFlushes.id: "same module"}
    items = {
        "relative_error": EvidenceItem("Error / gradient"),
        "snr_db": EvidenceItem("Signal to noise in dB"),
        "forward_error": EvidenceItem("Error / activations"),
    }
    location_item = EvidenceItem("Error / gradient")

    ratio: float = threshold(3**-0.5, "4.77 dB: training in FP4 stalls below it (arXiv 2505.19115); BF16 is near 40 dB")
    samples: float = threshold(3, _LOOKS)
    least: float = threshold(0.01, "of the largest gradient: in exact arithmetic smaller ones may be zero")
    forward: float = threshold(0.5, _OTHER_COURSE)
    within: float = threshold(5.0, "dB above the limit from which on the trend counts")
    horizon: float = threshold(1, "a warning if the limit is reached within so many times the steps so far")
    confidence: float = threshold(0.99, "Mann-Kendall test, two-sided")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield a finding for each collection of gradients, and one for rising errors."""
        for collection in _BACKWARD:
            cells = view.cells(collection)
            if cells is None:
                continue
            sums, names = _errors(cells)
            errors = error_sums.relative_error(sums["errorsq"], sums["referencesq"])
            sizes = np.sqrt(sums["referencesq"])
            largest = np.fmax.reduce(sizes, axis=0, initial=0.0)
            looked = ~np.isnan(errors) & (sizes > self.least * largest) & ~view.solved(cells.steps)
            found = layer_spans(errors > self.ratio, looked, self.samples)
            if found:
                yield self._above(view, cells, worst(cells, found, errors, names), last_of(cells, found))
            coming = [] if found else self._coming(cells.steps, errors, looked, names)
            if coming:
                yield self._ahead(coming, collection)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return where and since when, and how large the error is."""
        if "steps_left" in context.finding.evidence:
            return Phrase(
                what=f"the rounding error of {context.tensors} of {context.layers} has grown, seen {context.since}",
                effect=f"it reaches their size in about {context.number('steps_left'):,.0f} steps",
                remedy="give the layer's backward more digits",
            )
        return Phrase(
            what=f"{context.tensors} of {context.layers} have been mostly rounding error {context.since}",
            effect=f"signal to noise of {context.number('snr_db'):.1f} dB",
            remedy="give the layer's backward more digits",
        )

    def figure_arguments(self, finding: Finding) -> Mapping[str, Any]:  # noqa: ARG002  (the same for every finding)
        """Draw the errors."""
        return {"statistic": "error"}

    def _above(self, view: View, cells: Cells, spots: list[Spot], until: int) -> Finding:
        first = min(spot.since_step for spot in spots)
        evidence = {
            "worst": spots[0].name,
            "relative_error": spots[0].value,
            "snr_db": -20 * float(np.log10(spots[0].value)),
            "layers": len(spots),
        }
        forward = _forward_error(view, first)
        if forward > self.forward:
            return self.finding(
                "info", spots, {**evidence, "forward_error": forward}, until_step=until, collection=cells.collection,
                actions=(),
                meaning=_OTHERS, advice=_CHECK,
            )  # fmt: skip
        return self.finding("warning", spots, evidence, until_step=until, collection=cells.collection)

    def _ahead(self, coming: list[tuple[Spot, float, int, bool]], collection: str) -> Finding:
        lasting = [each for each in coming if each[3]]
        shown = sorted(lasting or coming, key=lambda each: each[1])
        spots, until = [spot for spot, *_ in shown], max(until for _, _, until, _ in shown)
        evidence = {"worst": spots[0].name, "relative_error": spots[0].value, "steps_left": shown[0][1]}
        if lasting:
            meaning = "At the present trend the error is as large as the gradient within the steps taken so far."
            return self.finding(
                "warning", spots, evidence, until_step=until, collection=collection, meaning=meaning, actions=()
            )
        return self.finding(
            "info", spots, evidence, until_step=until, collection=collection, actions=(), advice="No action is needed.",
            meaning="The error rose against the gradient and has settled below it.",
        )  # fmt: skip

    def _coming(
        self, steps: Ints, errors: Floats, looked: Mask, names: Sequence[str]
    ) -> list[tuple[Spot, float, int, bool]]:
        """Return the location, steps left, last step of the trend, and if it goes on."""
        with np.errstate(all="ignore"):
            levels = 20 * np.log10(errors / self.ratio)  # dB above the limit
        found: list[tuple[Spot, float, int, bool]] = []
        for layer in np.flatnonzero((looked & (levels > -self.within)).any(axis=1)).tolist():
            known = np.flatnonzero(looked[layer] & np.isfinite(levels[layer]))
            last = None
            for samples in looks(len(known)):
                left = self._left(steps[known[:samples]], levels[layer, known[:samples]])
                if left is not None:
                    step = int(steps[known[samples - 1]])
                    value = float(errors[layer, known[samples - 1]])
                    spot = Spot(name=names[layer], since_step=step if last is None else last[0].since_step, value=value)
                    last = spot, left, step
            if last is not None:
                half = known[len(known) // 2 :]
                now = self._left(steps[half], levels[layer, half]) if len(known) >= 16 else last[1]
                found.append((last[0], last[1] if now is None else now, last[2], now is not None))
        return found

    def _left(self, steps: Ints, levels: Floats) -> float | None:
        """Return the steps until the limit. None if it is far away or not approached."""
        rise = trend(steps, levels)
        if rise is None or rise.confidence < self.confidence or rise.low <= 0 or rise.end < -self.within:
            return None
        left = rise.steps_to(0.0)
        return left if left <= self.horizon * float(steps[-1] - steps[0]) else None


@dataclass(frozen=True, kw_only=True)
class BiasedRounding(Rule):
    """Errors that point the same way at every look: along the values, or up or down.

    Rounding to nearest errs either way, so what is left along the values is a hundredth of the error and less. A cast
    toward zero, a kernel that truncates, a saturated block and a stale scale leave most of the error there, step after
    step, and it adds up in the weights.
    """

    id = "biased-rounding"
    says = "errors against a shadow step point one way in several tensors, look after look"
    meaning = "The error does not average out over steps: it pulls all updates in one direction (arXiv 2510.04212)."
    advice = "Find the cast with pl.microscope(...).blame(). Round it to nearest or stochastically, or fix its scale."
    figure = "heatmap"
    explained_by = {Nonfinite.id: "anywhere", UnderflowHigh.id: "anywhere", CastSaturates.id: "anywhere"}
    items = {"bias": EvidenceItem("Bias", "share"), "noise": EvidenceItem("Noise", "share")}
    location_item = EvidenceItem("Bias", "share")

    part: float = threshold(0.5, "of the error's square: bias above noise")
    least: float = threshold(1e-3, "of the values: BF16 cut off toward zero leaves 0.0025")
    samples: float = threshold(10, "shadow steps in a row with one sign: by chance once in 500 layers")
    values: float = threshold(256, "in a tensor: the error of fewer may lie in one direction by chance")
    layers: float = threshold(3, "different tensors, one sign: the few weights of a small layer may be rounded one way")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding for each collection and direction."""
        for collection in _SHADOWED:
            cells = view.cells(collection)
            if cells is None:
                continue
            sums, names = _errors(cells)
            biases = _biases(sums)
            whole = error_sums.relative_error(sums["errorsq"], sums["referencesq"])
            looked = np.isfinite(whole) & (sums["compared"] >= self.values) & np.isfinite(biases).all(axis=-1)
            for kind, words in enumerate(_DIRECTIONS):
                bias = biases[..., kind]
                large = (np.abs(bias) >= self.least) & (bias * bias > self.part * whole * whole)
                for sign, direction in zip((-1, 1), words, strict=True):
                    found = _different(layer_spans(large & (np.sign(bias) == sign), looked, self.samples), sums)
                    if len(found) >= self.layers:
                        yield self._found(cells, names, found, np.abs(bias), whole, direction)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return where, since when, and in which direction."""
        return Phrase(
            what=f"rounding has pulled the {context.tensors} of {context.layers} {context.text('direction')} "
            f"{context.since}",
            effect=f"by {percent(context.number('bias'))} at every look",
            remedy="round to nearest or stochastically",
        )

    def figure_arguments(self, finding: Finding) -> Mapping[str, Any]:  # noqa: ARG002  (the same for every finding)
        """Draw the part of the errors that is bias."""
        return {"statistic": "bias"}

    def _found(
        self, cells: Cells, names: Sequence[str], found: list[tuple[int, int, int]], bias: Floats, whole: Floats,
        direction: str,
    ) -> Finding:  # fmt: skip
        spots = worst(cells, found, bias, names)
        layer, first, last = next(each for each in found if names[each[0]] == spots[0].name)
        noise = np.sqrt(np.maximum(whole**2 - bias**2, 0.0))[layer, first : last + 1]
        evidence = {
            "worst": spots[0].name, "bias": spots[0].value, "noise": float(np.nanmedian(noise)),
            "direction": direction, "layers": len(spots),
        }  # fmt: skip
        return self.finding("warning", spots, evidence, until_step=last_of(cells, found), collection=cells.collection)


@dataclass(frozen=True, kw_only=True)
class ClusteredBlock(Rule):
    """Weights of which most share the last bin of their block's format.

    A block of them holds one number. The weights of a norm lie close to each other. In MX formats those at 1.69 to 2
    times a power of two are all rounded to the largest number of the block, or clipped to it. It is a note: no record
    says which weights a training casts to a block format.
    """

    id = "clustered-block"
    says = "most weights of a layer fall into the last bin of their block's format"
    meaning = "A block format makes one number of them: a bias that the layer multiplies into all that it puts out."
    advice = "Keep these weights (those of norms, as a rule) in BF16 or FP32 if you train in a block format."
    figure = "heatmap"
    items = {"in_last_bin": EvidenceItem(unit="share", of_worst=" in the last bin")}
    location_item = EvidenceItem("In the last bin", "share")

    share: float = threshold(0.5, "of the weights: normal ones have 2 %, blocks of equal ones all or none")
    samples: float = threshold(3, "not reported from a single sample")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the weights."""
        cells = view.cells("weights")
        if cells is None:
            return
        shares = cells.share_of("last_bin")
        # A block of equal values is scaled to a number that its format holds.
        several = cells.highest(cells.column("absmax")) > -cells.highest(-cells.column("absmin"))
        shares = np.where(several, shares, 0.0 * shares)
        found = layer_spans(shares > self.share, ~np.isnan(shares), self.samples)
        if not found:
            return
        spots = worst(cells, found, shares)
        evidence = {"worst": spots[0].name, "in_last_bin": spots[0].value, "layers": len(spots)}
        yield self.finding("info", spots, evidence, until_step=last_of(cells, found), collection="weights")

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the share, where, and since when."""
        return Phrase(
            what=f"{percent(context.number('in_last_bin'))} of the weights of {context.layers} have shared the last "
            f"bin of their blocks {context.since}",
            remedy="keep them out of the block format",
        )

    def figure_arguments(self, finding: Finding) -> Mapping[str, Any]:  # noqa: ARG002  (the same for every finding)
        """Draw the share of weights in the last bin."""
        return {"statistic": "last_bin"}


@dataclass(frozen=True, kw_only=True)
class DecisionFlips(Rule):
    """Decisions for the largest of several scores that a shadow step changes.

    Routes of experts, arg max and the classes of an output. A token that goes to another expert is no small error:
    its whole path is another one, and so is the gradient.
    """

    id = "decision-flips"
    says = "rounding changes many decisions: routes to experts, arg max, or the classes of the output"
    meaning = "The format, and not the model, decides between scores that lie closer together than its digits reach."
    advice = "Compute these scores (the router, or the last layer) in FP32."
    figure = "flips_heatmap"
    explained_by = {Nonfinite.id: "anywhere"}
    items = {
        "flips": EvidenceItem("Flipped", "share"),
        "ties": EvidenceItem("Tied", "share"),
        "margin": EvidenceItem("Margin / error"),
    }
    location_item = EvidenceItem("Flipped", "share")

    share: float = threshold(0.1, "of the rows: 2 of 64 experts flip in 1 to 5 % of the rows in BF16")
    samples: float = threshold(5, _LOOKS)
    forward: float = threshold(0.5, _OTHER_COURSE)

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of all modules that decide."""
        found: list[tuple[Spot, int]] = []
        for scalar in sorted(name for name in view.run.scalar_names if name.startswith(FLIPS)):
            steps, shares = view.scalar(scalar)
            spans = find_spans(shares > self.share, self.samples)
            if spans:
                (first, _), (_, last) = spans[0], spans[-1]
                spot = Spot(
                    name=scalar.removeprefix(FLIPS),
                    since_step=int(steps[first]),
                    value=float(shares[first : last + 1].max()),
                )
                found.append((spot, int(steps[last])))
        if not found:
            return
        spots = sorted((spot for spot, _ in found), key=lambda spot: (-spot.value, spot.since_step))
        evidence: dict[str, float | int | str] = {"worst": spots[0].name, "flips": spots[0].value}
        for key, prefix in (("ties", TIES), ("margin", MARGIN)):
            steps, values = view.scalar(f"{prefix}{spots[0].name}")
            if len(values := values[steps >= spots[0].since_step]):
                evidence[key] = float(np.median(values))
        until = max(until for _, until in found)
        if all(_forward_error(view, spot.since_step, spot.name) > self.forward for spot in spots):
            yield self.finding("info", spots, evidence, until_step=until, meaning=_OTHERS, advice=_CHECK)
            return
        yield self.finding("warning", spots, evidence, until_step=until)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the share, where, and since when."""
        return Phrase(
            what=f"rounding has changed up to {percent(context.number('flips'))} of the decisions of "
            f"{context.layer} {context.since}",
            remedy="compute its scores in FP32",
        )


_OTHERS = "The activations differ as much from the shadow step's, so that what follows is not the same."
_CHECK = "Check what the shadow step cannot repeat, as masks from a generator of your own."
_DIRECTIONS = (("toward zero", "away from zero"), ("down", "up"))


def _errors(cells: Cells) -> tuple[dict[str, Floats], Sequence[str]]:
    """Return sums of errors by layer and step, and the layers; parameters by module."""
    sums = {name: cells.error_sum(name) for name in _SUMS}
    if cells.collection != "gradients":
        return sums, cells.names
    modules = Modules.of(cells)
    return {name: modules.total(values) for name, values in sums.items()}, modules.main_layers(cells)


def _biases(sums: Mapping[str, Floats]) -> Floats:
    return error_sums.directions(
        *(sums[name] for name in ("compared", "error", "reference", "referencesq", "error_reference"))
    )


def _different(found: list[tuple[int, int, int]], sums: Mapping[str, Floats]) -> list[tuple[int, int, int]]:
    """Return one span for each tensor: a layer's output is the next one's input."""
    seen = {
        (sums["errorsq"][i, first], sums["referencesq"][i, first]): (i, first, last) for i, first, last in found[::-1]
    }
    return list(seen.values())[::-1]


def _forward_error(view: View, step: int, before: str | None = None) -> float:
    """Largest relative error of activations at a step, before a module or tensor (None: all); 0 if none."""
    cells = view.cells("activations")
    if cells is None:
        return 0.0
    errors = error_sums.relative_error(cells.error_sum("errorsq"), cells.error_sum("referencesq"))
    if before is not None:  # layers are in the order of the forward
        mine = [name in (before, f"{before}:input", f"{before}:output") for name in cells.names]
        errors = errors[: mine.index(True) if any(mine) else None]
    now = errors[:, cells.steps == step]
    return float(np.max(now[np.isfinite(now)], initial=0.0))


@dataclass(frozen=True, kw_only=True)
class OperationInexact(Rule):
    """Operations of the script that lose what they are given, although their modules' outputs look sound."""

    id = "operation-inexact"
    says = (
        "an operation of the script loses what it is given: a difference of nearly equal numbers, an angle too large "
        "for its format, an overflow, sums that take nothing in any more, whole numbers that wrap"
    )
    meaning = "An operation of the script loses what it is given."
    advice = "Compute it in FP32."
    figure = "loss_and_scale"
    items = {"place": EvidenceItem("Line"), "share": EvidenceItem("Values lost", "share")}
    location_item = EvidenceItem("Values lost", "share")

    lines: float = threshold(
        1, "a line is recorded if it loses in two of the steps that are looked at, or in the only one"
    )

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding for each way in which values are lost, of all lines that lose them so."""
        by_kind: dict[str, list[Event]] = {}
        for event in facts(view, "operation inexact"):
            by_kind.setdefault(str(event.details.get("kind")), []).append(event)
        for kind, events in by_kind.items():
            if kind not in _LOSSES or len(events) < self.lines:
                continue
            loss, event = _LOSSES[kind], max(events, key=_share)
            place, formats = str(event.details.get("place")), str(event.details.get("formats"))
            share = _share(event)
            since = {name: _since(e) for e in reversed(events) for name in listed_in(e, "modules")}
            others = {2: "Another line does so too. "}.get(len(events), f"{len(events) - 1} other lines do so too. ")
            shown = formats.upper().replace(" AND ", " and ")
            yield self.finding(
                "warning",
                [Spot(name=name, since_step=step, value=share) for name, step in since.items()],
                {"cause": loss.cause, "place": place, "formats": formats, "share": share},
                since_step=min(map(_since, events)),
                until_step=max(view.last_step, event.step),
                meaning=f"{loss.meaning.format(place=place, formats=shown, share=percent(share))}. "
                f"{others if len(events) > 1 else ''}The line is: {event.details.get('text')}",
                advice=loss.advice,
            )

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the line, and what it loses."""
        line = Path(context.text("place")).name + (f" ({context.place})" if context.finding.where else "")
        remedies = {loss.cause: loss.remedy for loss in _LOSSES.values()}
        return Phrase(
            what=f"{line} computes {context.cause}, seen {context.since}",
            remedy=remedies.get(context.cause, "compute it in FP32"),
        )


class _Loss(NamedTuple):
    """One way in which an operation loses values, in words; `meaning` begins a sentence."""

    cause: str
    meaning: str
    remedy: str  # as the end of a sentence
    advice: str


_TO_FP32 = "cast what goes in to FP32"
_LOSSES = {
    "difference": _Loss(
        "a difference that is rounding",
        "The numbers that {place} subtracts in {formats} are nearly equal: {share} of their differences are zero, or "
        "no larger than the distance between neighbours in the narrow format. Their digits cancel, and what is left is "
        "rounding",
        "compute both numbers in FP32",
        "Compute both numbers in FP32 from the start (a cast of rounded ones is too late), or rewrite the difference "
        "so that nothing cancels.",
    ),
    "overflow": _Loss(
        "infinite numbers from finite ones",
        "What {place} computes in FP16 overflows: numbers beyond 65,504 become infinite, although what goes in is "
        "finite",
        _TO_FP32,
        "Cast what goes into this operation to FP32.",
    ),
    "underflow": _Loss(
        "zeros from numbers that are not zero",
        "What {place} computes in FP16 underflows: {share} of the results are zero, although what goes in is not, and "
        "the others are below the smallest normal number",
        _TO_FP32,
        "Cast what goes into this operation to FP32.",
    ),
    "epsilon": _Loss(
        "results whose epsilon is zero in FP16",
        "{place} adds a number, or clamps at one, that FP16 rounds to zero, and {share} of the results are zero: a "
        "quotient, a root or a logarithm of them is not protected",
        "use an epsilon that FP16 holds, such as 1e-4",
        "Cast to FP32 before this operation, or use an epsilon of 6e-5 or more: FP16 has few digits below it, and "
        "nothing below 6e-8.",
    ),
    "sum": _Loss(
        "sums that take nothing in any more",
        "What {place} adds in place has no effect for {share} of the numbers: the sums ({formats}) are so much larger "
        "that they are rounded back to what they were",
        "keep these sums in FP32",
        "Keep these sums (counts, averages, returns) in FP32, or round them at random.",
    ),
    "angle": _Loss(
        "sines or cosines of numbers that are too large for their digits",
        "{place} takes the sine or cosine of numbers so large that neighbours in their format are 2 radians apart or "
        "more ({share} of them, in {formats} or in a 16-bit format before): which angle it was, is lost in rounding",
        "compute the angles with more digits",
        "Compute positions, times and angles in FP32 or FP64, and take off whole turns before they are rounded.",
    ),
    "remainder": _Loss(
        "remainders of numbers that are too large for their digits",
        "{place} takes the remainder of numbers so large that {share} of them lie half of the divisor apart in "
        "{formats}, or more: what is left is rounding",
        "take the remainder of whole numbers",
        "Take the remainder of whole numbers or in FP64, and cast it afterwards.",
    ),
    "wrap": _Loss(
        "whole numbers that wrap",
        "The results of {place} do not fit into {formats}, and {share} of them wrap: they come back small, or with the "
        "other sign",
        "compute in INT32",
        "Cast to INT32, or to a floating format, before this operation.",
    ),
    "cast": _Loss(
        "numbers beyond the range of the integers they are cast to",
        "{place} casts numbers to integers, and {share} of them are beyond their range: they wrap, or worse",
        "clamp before the cast",
        "Clamp before the cast, or choose the scale by the largest value.",
    ),
    "fraction": _Loss(
        "whole numbers from fractions, nearly all of them zero",
        "{place} casts numbers to integers, and {share} of those that are not zero become zero: they lie between -1 "
        "and 1, and the cast cuts fractions off",
        "scale before the cast",
        "Multiply by the scale of the integers before the cast (255 for a picture), and round.",
    ),
}


def _share(event: Event) -> float:
    return float(str(event.details.get("share", 0)))


def _since(event: Event) -> int:
    return int(str(event.details.get("since", event.step)))
