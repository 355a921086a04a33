"""Rules of casts to 8 bits: saturation, underflow, unused codes, unit scale left.

All four judge the values at the scale of the cast, which a run of FP8 layers records. The thresholds come from the
format's own numbers, so the rules hold for E4M3, E5M2 and any other format that a module casts to.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import floor, isfinite, log2
from statistics import NormalDist
from typing import Any

import numpy as np

from plimsoll.diagnosis.estimates.cast_cells import COLLECTIONS, CastCells, cast_cells
from plimsoll.diagnosis.finding import Finding, Severity, Spot
from plimsoll.diagnosis.rules.base import EvidenceItem, FindingContext, Phrase, Rule, spells, threshold
from plimsoll.diagnosis.tables.cells import Floats
from plimsoll.diagnosis.view import View
from plimsoll.formats import Format
from plimsoll.text import percent, power

_SAMPLES = "not reported from a single sample"
_SERVES = 0.01  # of a tensor's values that a scale which serves may flush, as in `whatif`
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
        serving = cast.serving(layer, first, last, _SERVES)
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
    spans = spells(shares > least, ~np.isnan(shares), samples)
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

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding for each collection."""
        return self._of_shares(view, "saturated", lambda cast: cast.saturated)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the share beyond the largest value."""
        return self._phrase(context, "saturated", "been beyond", "and are cut to its largest value")


@dataclass(frozen=True, kw_only=True)
class CastFlushes(ShareRule):
    """Nonzero values that become zero in the format that they are cast to."""

    id = "cast-flushes"
    says = "many values that a module casts to 8 bits become zero"
    meaning = "The products of these values are missing from the sums."
    advice = f"Raise the tensor's scale if a higher one works, or use E5M2 for it. {_UNIT}, {_MODULE}."
    actions = ("to_bf16",)
    items = {"flushed": EvidenceItem(unit="share")}
    location_item = EvidenceItem("Lost", "share")

    share: float = threshold(0.05, "T6: above 5 % of values lost; unit normal ones lose 0.08 % in E4M3")
    grave: float = threshold(0.25, "a quarter of one tensor")
    samples: float = threshold(3, _SAMPLES)

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding for each collection."""
        return self._of_shares(view, "flushed", lambda cast: cast.flushed)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the share below the smallest value."""
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
        for layer, first, last in spells(outside, known, self.samples):
            begun = np.flatnonzero(known[layer])[: int(self.samples)]
            if abs(float(np.median(sizes[layer, begun]))) <= bound:
                span = sizes[layer, first : last + 1]
                drifted.append((cast, layer, first, last, float(span[np.nanargmax(np.abs(span))])))
        return drifted
