"""Rule of FP32 values that something rounds to a narrow format."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis.finding import Finding, Severity, Spot
from plimsoll.diagnosis.rules.base import (
    EvidenceItem,
    FindingContext,
    Phrase,
    Rule,
    last_of,
    layer_spans,
    short,
    threshold,
    worst,
)
from plimsoll.diagnosis.tables.cells import Cells, Floats, module_ends
from plimsoll.diagnosis.tables.optimizer_states import lost_first_moments, without_a_zero
from plimsoll.diagnosis.tables.wiring_facts import ROUNDED_GRADIENTS, facts, listed_in
from plimsoll.diagnosis.view import View
from plimsoll.runs import Event
from plimsoll.text import percent

_SAMPLES = "not reported from a single sample"
_PRODUCTS = "products of gradients taken inside of autocast"
_NO_ZERO = "first moments without a zero"


@dataclass(frozen=True, kw_only=True)
class KeptNarrow(Rule):
    """FP32 weights, gradients, moments, whole numbers or sums that something rounds.

    It reads facts of `plimsoll.watch.steps.wiring` and numbers of modules.
    """

    id = "kept-narrow"
    says = (
        "weights, gradients, moments, whole numbers or sums are rounded to a narrow format, and what they need is lost"
    )
    meaning = "Something rounds FP32 values to a narrow format, and small changes or small values are lost."
    advice = "Keep them in FP32, and cast a copy where a narrow format is needed."
    figure = "loss_and_scale"
    items = {
        "lost": EvidenceItem("Lost", "share"),
        "decay": EvidenceItem("Decay of the second moments"),
        "terms": EvidenceItem("Numbers added"),
    }
    location_item = EvidenceItem("Value", "share")  # or, above 1, a number

    lost: float = threshold(0.25, "of the updates of weights: fewer are a note; and of the first moments")
    samples: float = threshold(3, _SAMPLES)
    values: float = threshold(16, "values of a tensor that are whole, or sums: fewer are chance")
    off: float = threshold(0.75, "of the exact sum: what is further off is no sum of the module's input")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding for each fact."""
        for event in facts(view, "weights rounded"):
            fmt, lost = _format(event), _share(event)
            yield self._finding(
                view, event, "weights rounded after each step", "warning" if lost >= self.lost else "info",
                meaning=f"FP32 weights are rounded to {fmt} after each step, so that {percent(lost)} of the updates "
                "in the first steps were undone.",
                advice=f"Keep the FP32 weights as they are, and write {fmt} into a copy of them. Or use an optimizer "
                "that rounds such weights at random or compensates (MasterWeights, bf16-kahan).",
            )  # fmt: skip
        for event in facts(view, ROUNDED_GRADIENTS):
            fmt, certain = _format(event), event.details.get("certain") is True
            likewise = "" if certain else ", or to a format whose subnormal values have as few digits"
            yield self._finding(
                view, event, "gradients rounded before the step", "warning",
                meaning=f"Between the backward pass and the optimizer's step gradients are rounded to {fmt}{likewise}, "
                f"and {percent(_share(event))} of them become zero.",
                advice=f"Multiply gradients by a power of two before they are cast to {fmt}, and divide by it "
                "afterwards: their largest value should be near the format's. Or send them in BF16.",
            )  # fmt: skip
        yield from self._moments(view)
        for event in facts(view, "products flushed")[:1]:
            of, place = event.details.get("optimizer"), event.details.get("state")
            yield self._finding(
                view, event, _PRODUCTS, "warning",
                meaning=f"{of} steps inside of autocast, which takes its matrix products in FP16. In its {place}, "
                f"{percent(_share(event))} of the sums of squared gradients are zero, although the gradients are not. "
                "It divides by roots of them, and updates become far too large.",
                advice="Leave autocast before the step: only the forward and the loss belong into it.",
            )  # fmt: skip
        for event in facts(view, "loss added up")[:1]:
            fmt, terms = _format(event), int(str(event.details.get("terms", 0)))
            yield self._finding(
                view, event, "loss added up one by one", "warning", terms=terms,
                meaning=f"The loss is a sum of {terms:,} numbers, added one after another in {fmt}: numbers smaller "
                "than half a unit in the last place of the sum so far are rounded away.",
                advice="Add losses up in FP32: cast them before the sum, or use torch.sum, which adds in FP32.",
            )  # fmt: skip
        yield from self._indices(view)
        yield from self._stalled_sums(view)
        yield from self._whole_numbers(view)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return what is rounded, and the remedy."""
        cause, fmt = context.cause, context.text("format")
        fmt = fmt if " " in fmt else fmt.upper()
        if cause == _NO_ZERO:
            return Phrase(
                what=f"first moments of {context.place} are rounded to codes without a zero, seen {context.since}",
                effect="so values without a gradient move",
                remedy="give the codes an exact zero",
            )
        if context.finding.collection == "optimizer":
            cause = f"first moments of {context.place} kept in 8 bits"
        elif context.finding.collection == "activations":
            cause = f"{cause} in {context.place}"
        elif context.finding.where:  # of indices, the tables that they are for
            cause = f"indices of {short(context.finding.where[0]) if context.is_single else context.place} rounded"
        cause += "" if fmt in cause else f" ({fmt})"
        remedy = "multiply them before the cast" if "gradients" in cause else "keep them in FP32"
        remedy = "step outside of autocast" if context.cause == _PRODUCTS else remedy
        what, effect = f"{cause}, seen {context.since}", ""
        if "lost" in context.finding.evidence:
            effect = f"and {percent(context.number('lost'))} are lost"
        return Phrase(what=what, effect=effect, remedy=remedy)

    def _moments(self, view: View) -> Iterator[Finding]:
        for event in facts(view, "moments narrow")[:1]:
            fmt, decay = _format(event), float(str(event.details.get("decay", 0)))
            yield self._finding(
                view, event, "second moments kept in 16 bits", "warning", decay=decay,
                meaning=f"Second moments (exp_avg_sq) are kept in {fmt} and rounded to nearest. With a decay of "
                f"{decay:g} they lose less than half a unit in the last place at a step: they rise and cannot "
                "fall, and one large gradient slows its weight for good.",
                advice="Keep second moments in FP32, or round them at random.",
            )  # fmt: skip
        for event in facts(view, "moments flushed")[:1]:
            yield self._finding(
                view, event, "second moments sent through FP16", "warning",
                meaning=f"The optimizer's second moments were replaced by values of FP16 precision, and "
                f"{percent(_share(event))} of them are zero: Adam then divides by its epsilon alone.",
                advice="Save and load the optimizer's state in FP32 (or BF16): FP16 has no number below 2^-24.",
            )  # fmt: skip

        cells, (spots, until) = view.cells("optimizer"), self.first_moments_flushed(view)
        if cells is not None and spots:
            kind = cells.format_of(spots[0].name)
            evidence = {
                "cause": "first moments rounded", "format": kind, "lost": spots[0].value, "worst": spots[0].name,
            }  # fmt: skip
            yield self.finding(
                "warning", spots, evidence, until_step=until, collection="optimizer",
                meaning=f"First moments (exp_avg) are kept in {kind.upper()}, and up to {percent(spots[0].value)} of "
                "them are zero although the second ones are not: these weights hardly move.",
                advice=f"Keep first moments in FP32 or BF16, or in {kind.upper()} times a scale for each block.",
            )  # fmt: skip

        spots = [] if cells is None else [
            Spot(name=first, since_step=0, value=share) for first, share in without_a_zero(view, cells).values()
        ]  # fmt: skip
        if spots:
            yield self.finding(
                "warning", sorted(spots, key=lambda spot: -spot.value), {"cause": _NO_ZERO},
                until_step=view.last_step, collection="optimizer",
                meaning="First moments (exp_avg) are rounded to codes of which none is zero: at the first step none of "
                "them was zero, though gradients were. Values without a gradient move by a moment that is divided by "
                "epsilon.",
                advice="Give the codes one that is exactly zero: round the zero point to a whole number of steps.",
            )  # fmt: skip

    def first_moments_flushed(self, view: View) -> tuple[list[Spot], int]:
        """Return first moments in 8 bits that are zero where the second ones are not, the worst first, and until when.

        Wider formats are left out: first moments of rows that are seldom seen become zero in them too, without harm.
        """
        cells = view.cells("optimizer")
        if cells is None:
            return [], 0
        lost = lost_first_moments(cells)
        spans = layer_spans(lost > self.lost, ~np.isnan(lost), self.samples)
        return (worst(cells, spans, lost), last_of(cells, spans)) if spans else ([], 0)

    def _indices(self, view: View) -> Iterator[Finding]:
        events = facts(view, "indices rounded")
        by_name = {name: event for event in reversed(events) for name in listed_in(event, "parameters")}
        if not by_name:
            return
        event = next(iter(by_name.values()))
        spots = [Spot(name=name, since_step=event.step) for name, event in by_name.items()]
        fmt = _format(event)
        yield self.finding(
            "warning", spots, {"cause": "indices rounded", "format": str(event.details.get("format", ""))},
            until_step=max(view.last_step, event.step),
            meaning=f"The ids that these tables are indexed with have been rounded to {fmt}: neighbouring ids are the "
            "same row, and the rows between are never used.",
            advice="Leave integers out when a batch or a model's input is cast to a narrow format.",
        )  # fmt: skip

    def _stalled_sums(self, view: View) -> Iterator[Finding]:
        """Yield one finding of the outputs that are sums over many values, stopped at powers of two."""
        cells = view.cells("activations")
        if cells is None:
            return
        spans: list[tuple[int, int, int]] = []
        for out, there in _sums_that_stop(cells, values=self.values, off=self.off):
            spans += [(out, a, b) for _, a, b in layer_spans(there[None], cells.recorded[[out]], self.samples)]
        if spans:
            spots, until = worst(cells, spans, cells.highest(cells.columns["absmax"])), last_of(cells, spans)
            kind = cells.format_of(spots[0].name)
            evidence = {
                "cause": "sums stop at powers of two",
                "format": kind,
                "worst": spots[0].name,
                "highest": spots[0].value,
            }
            yield self.finding(
                "warning", spots, evidence, until_step=until, collection="activations",
                meaning=f"Numbers are added one after another in {kind.upper()}, and the sums stop at powers of two: "
                "from there on, what is added is less than half a unit in the last place, and is rounded away.",
                advice="Add in FP32, or with one torch.sum, which adds in FP32 and rounds once.",
            )  # fmt: skip

    def _whole_numbers(self, view: View) -> Iterator[Finding]:
        """Yield one finding of whole numbers that a cast made the same as their neighbours."""
        cells = view.cells("activations")
        if cells is None:
            return
        spans: list[tuple[int, int, int]] = []
        for place, holds in _rounded_numbers(cells, values=self.values, samples=int(self.samples)):
            spans += [(place, a, b) for _, a, b in layer_spans(holds[None], cells.recorded[[place]], self.samples)]
        if spans:
            spots = sorted(worst(cells, spans, _spacing(cells)), key=lambda spot: cells.names.index(spot.name))
            kind, most = cells.format_of(spots[0].name), max(spot.value for spot in spots)
            evidence = {"cause": "whole numbers rounded", "format": kind, "first": spots[0].name, "apart": most}
            yield self.finding(
                "warning", spots, evidence, until_step=last_of(cells, spans), collection="activations",
                meaning=f"Whole numbers are cast to {kind.upper()}, whose numbers lie up to {most:g} apart there: "
                "neighbours become the same value.",
                advice="Keep positions, times and counts in FP32 or as integers, and cast what is computed from them.",
            )  # fmt: skip

    def _finding(
        self, view: View, event: Event, cause: str, severity: Severity, *, meaning: str, advice: str, **more: float
    ) -> Finding:
        evidence: dict[str, float | int | str] = {
            "cause": cause,
            "format": str(event.details.get("format", "")),
            "of": str(event.details.get("optimizer", "")),
            **more,
        }
        if "lost" in event.details:
            evidence["lost"] = _share(event)
        return self.since_event(severity, event, view, evidence, meaning=meaning, advice=advice)


def _format(event: Event) -> str:
    name = str(event.details.get("format", ""))
    return name if " " in name else name.upper()  # "8-bit codes" is no format's name


def _share(event: Event) -> float:
    value = event.details.get("lost")
    return float(value) if isinstance(value, int | float) else 0.0


# -- sums and whole numbers that a format of 16 bits rounds, from the numbers of modules -------------------------------


# Numbers that are added one by one are lost once they are less than half a unit in the last place of the sum. That unit
# doubles at each power of two, so there the sums stop: the least and the largest of them are powers of two at each
# sample. Sums of equal lengths may be too, and are exact.
def _sums_that_stop(cells: Cells, *, values: float, off: float) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """Yield outputs of modules, and the samples at which they are sums that have stopped at powers of two.

    They have so many values or more. `off`: the share of the exact sum by which they may be off.
    """
    digits = _digits(cells)
    with np.errstate(all="ignore"):
        count, added = cells.total_of("count"), cells.total_of("abssum")
        lowest, highest = -cells.highest(-cells.columns["absmin"]), cells.highest(cells.columns["absmax"])
        powers = (np.frexp(lowest)[0] == 0.5) & (np.frexp(highest)[0] == 0.5)
    for _, into, out in module_ends(cells):
        with np.errstate(all="ignore"):
            many = count[into] >= 2.0 ** digits[out] * count[out]
            large = lowest[out] >= added[into] / count[into] * 2.0 ** digits[out]
            kept = added[out] / added[into]
        inexact = (np.abs(kept - 1) > 2.0 ** -(digits[out] + 2)) & (np.abs(kept - 1) < off)
        yield out, powers[out] & many & large & inexact & (digits[out] > 0) & (count[out] >= values)


# The sum and the sum of squares of whole numbers are whole. A tensor of the same number of values and nearly the same
# sums, in 16 bits, is what they were cast to.
def _rounded_numbers(
    cells: Cells, *, values: float, samples: int
) -> Iterator[tuple[int, NDArray[np.bool_]]]:  # fmt: skip
    """Yield tensors in 16 bits, and the samples at which they are whole numbers of another one, rounded.

    They have so many values or more, and the other one has whole numbers at so many samples or more.
    """
    digits, top = _digits(cells), cells.highest(cells.columns["absmax"])
    sums = [cells.total_of(name) for name in ("sum", "abssum", "sumsq")]
    with np.errstate(all="ignore"):
        whole = (digits == 0) & (cells.total_of("count") >= values) & (top == np.rint(top))
        for each in sums:
            whole &= each == np.rint(each)
    for source in np.flatnonzero(np.count_nonzero(whole, axis=1) >= samples).tolist():
        for place in np.flatnonzero((digits > 0).any(axis=1)).tolist():
            with np.errstate(all="ignore"):
                lost = 2.0 ** -digits[place]
                same = (cells.total_of("count")[place] == cells.total_of("count")[source]) & (
                    top[source] * lost >= 4.0  # every second number and more is lost there
                )
                for each in sums:
                    same &= np.abs(each[place] - each[source]) <= lost * np.abs(each[source])
                rounded = sums[2][place] != sums[2][source]
            yield place, whole[source] & same & rounded


def _spacing(cells: Cells) -> Floats:
    """Return how far neighbours of each cell's largest value lie apart in its format of 16 bits."""
    with np.errstate(all="ignore"):
        return np.exp2(np.floor(np.log2(cells.highest(cells.columns["absmax"]))) - _digits(cells))


def _digits(cells: Cells) -> Floats:
    """Return the mantissa bits of each cell's format. 0: wider than 16 bits, or not recorded."""
    bits = cells.by_format(lambda fmt: fmt.mantissa_bits if fmt.bits <= 16 else 0)
    return np.nan_to_num(cells.highest(bits.astype(np.float64)))
