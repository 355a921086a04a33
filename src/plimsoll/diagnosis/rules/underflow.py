"""Underflow: how much narrow formats flush to zero, and whether that grows.

Both rules judge what happened in tensors of narrow formats; `UnderflowHigh` also judges modules that compute in one and
whose outputs are wide again. `estimates.format_losses` separates underflow from structural zeros. For the effect of
another format there is `whatif`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis.estimates.format_losses import Modules
from plimsoll.diagnosis.estimates.usable_scales import Scales, flushed_before
from plimsoll.diagnosis.finding import Finding, Severity, Spot
from plimsoll.diagnosis.rules.base import EvidenceItem, FindingContext, Phrase, last_of, layer_spans, threshold, worst
from plimsoll.diagnosis.rules.loss_scale import ScaleRule, by_scales, remedy_words
from plimsoll.diagnosis.rules.nonfinite import Nonfinite
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints, module_ends
from plimsoll.diagnosis.tables.trend import Trend, looks, trend
from plimsoll.diagnosis.view import View
from plimsoll.formats import E4M3, E5M2, FP16, Format
from plimsoll.tensor_collections import UNDERFLOW_ORDER
from plimsoll.text import percent

_SOUND = 0.01  # T6: below 1 % of a module's gradients is sound
_HARMLESS = "Activation gradients underflow, but hardly any of the weight gradients, which are sums of them."
_MOST_PLAUSIBLE_RATE = 10  # shares per 1,000 steps: more is a trend of a few steps, whose rate says nothing
_INSIDE = "within a module"
# Formats of more exponents have no floor that a module's values come near. Those of other makers' FP8 end at powers of
# two that values of sound modules have as well.
FLUSHING = (FP16, E5M2, E4M3)
_EXACT = 1e-6  # of a value: a root in FP32 is not exact
_SAMPLES = "not reported from a single sample"


@dataclass(frozen=True, kw_only=True)
class UnderflowHigh(ScaleRule):
    """Much of a layer, or many layers, flushed to zero."""

    id = "underflow-high"
    says = "many values of a layer, or of many layers, underflow in a narrow format"
    meaning = "Values too small for the format became zero, so their contribution to the update is lost."
    advice = (
        "Raise the loss scale. If that overflows, use a scale for each layer (LayerScaler), or BF16. A shadow step "
        "(shadow_every) confirms which zeros are lost values."
    )
    actions = ("raise_scale", "layer_scale", "to_bf16")
    figure = "underflow_heatmap"
    explained_by = {Nonfinite.id: "anywhere"}
    items = {"worst_lost": EvidenceItem("Lost at most", "share", of_worst=" lost")}
    location_item = EvidenceItem("Lost", "share")

    values: float = threshold(0.05, "T6: above 5 % and rising, change the format")
    layers: float = threshold(0.05, "T5: 5 to 20 % of layers underflow in a failing run, under 1 % in a sound one")
    grave: float = threshold(0.25, "a quarter of one layer lost is an alarm by itself")
    samples: float = threshold(3, _SAMPLES)

    # Gradients of parameters are judged by module, activations and their gradients one by one and more mildly: much of
    # these may be lost without harm (Micikevicius et al. 2018: in an SSD values below 2^-27 do not matter).
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding for each collection, for each emulated format, and for modules that underflow inside."""
        no_parameter_gradients = view.cells("gradients") is None
        weights_are_sound = False  # whether the parameters' gradients were recorded and lose next to nothing
        yield from self._flushed_from_the_output_on(view)
        yield from self._inside_modules(view)
        for collection in UNDERFLOW_ORDER:  # gradients before activation gradients
            narrow = view.narrow(collection)
            if narrow is None or not narrow.censors.any():
                continue
            cells = narrow.cells
            if collection == "gradients":
                modules = Modules.of(cells)
                lost = np.maximum(modules.harmful_underflow(narrow), flushed_before(view, cells, modules))
                fractions = np.where(view.solved(cells.steps), np.nan, lost)
                weights_are_sound = not layer_spans(fractions > _SOUND, ~np.isnan(fractions), self.samples)
                yield from self._judged(cells, fractions, modules.main_layers(cells), collection, may_alarm=True)
            else:
                backward = collection == "activation_gradients"
                fractions = np.where(backward & view.solved(cells.steps), np.nan, narrow.fraction)
                may_alarm = no_parameter_gradients and backward
                for finding in self._judged(cells, fractions, cells.names, collection, may_alarm=may_alarm):
                    harmless = weights_are_sound and backward
                    yield replace(finding, severity="info", meaning=_HARMLESS, actions=()) if harmless else finding

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the format, the largest share, and where."""
        if context.cause == _INSIDE:
            return Phrase(
                what=f"values have underflowed in {context.format} within {context.place} {context.since}: up to "
                f"{percent(context.number('worst_lost'))} of what it puts out is zero",
                remedy="compute it in FP32",
            )
        share = f"up to {percent(context.number('worst_lost'))} of the {context.tensors} of {context.place}"
        remedy = remedy_words(context)
        if context.finding.collection == "activations":
            remedy = "run the layer in BF16" if context.is_single else "run these layers in BF16"
        return Phrase(
            what=f"{share} have underflowed in {context.format} {context.since}",
            effect="" if context.is_single else f"{context.layer} most",
            remedy=remedy,
        )

    def is_fatal(self, finding: Finding, last_step: int) -> bool:  # noqa: ARG002  (zeros stay zeros)
        """Return whether a module puts out next to nothing: what comes after it cannot learn."""
        return finding.evidence.get("cause") == _INSIDE

    def _flushed_from_the_output_on(self, view: View) -> Iterator[Finding]:
        """Yield parameter gradients that are zero since an emulated format flushed those of activations."""
        outputs, narrow = view.cells("activation_gradients"), view.narrow("gradients")
        if outputs is None or narrow is None:
            return
        cells, modules = narrow.cells, Modules.of(narrow.cells)
        silent = (modules.total(cells.total(cells.nonzero)) == 0).astype(np.float64)
        for steps, formats in view.emulations:
            fmt = formats.get(outputs.collection)
            emulated = _are_in(outputs.steps, steps)[outputs.at]
            if fmt is None or not emulated.any() or outputs.nonzero[emulated].any():
                continue
            judged = _are_in(cells.steps, steps) & ~view.solved(cells.steps)
            fractions, names = np.where(judged, silent, np.nan), modules.main_layers(cells)
            yield from self._judged(cells, fractions, names, cells.collection, may_alarm=True, fmt=fmt)

    # What comes out may be FP32 again. Formats are tried from the widest one on, and one is reported: values at the
    # bottom of one format are not at that of another.
    def _inside_modules(self, view: View) -> Iterator[Finding]:
        """Yield one finding of modules that compute in a narrow format in which next to nothing is left."""
        cells = view.cells("activations")
        if cells is None:
            return
        wide = cells.highest(cells.by_format(lambda fmt: fmt.bits)) > 16
        zeros, least, most = cells.zero_fraction, -cells.highest(-cells.columns["absmin"]), cells.true_absmax
        ends = module_ends(cells)
        for fmt in FLUSHING:
            at_bottom = _are_at_bottom(least, most, fmt)
            lost = np.full(cells.shape, np.nan)
            for _module, into, out in ends:
                alive = wide[out] & (zeros[into] < zeros[out] - self.values)
                lost[out] = np.where(at_bottom[out] & alive, zeros[out], np.where(most[out] > 0, 0.0, np.nan))
            spans = layer_spans(lost > self.values, ~np.isnan(lost), self.samples)
            if not spans:
                continue
            spots = worst(cells, spans, lost)
            evidence = {
                "cause": _INSIDE, "layers": len(spots), "worst": spots[0].name, "worst_lost": spots[0].value,
                "format": fmt.name,
            }  # fmt: skip
            name = fmt.name.upper()
            yield self.finding(
                "alarm" if spots[0].value > self.grave else "warning", spots, evidence, actions=(),
                until_step=last_of(cells, spans), collection="activations",
                meaning=f"The module computes in {name} with values below the smallest one of that format. They "
                "underflow: its outputs are zero, or what the few smallest numbers give, and its inputs are not.",
                advice="Compute it in FP32, or multiply its inputs by a power of two first: squares need its square.",
            )  # fmt: skip
            return

    def _judged(
        self,
        cells: Cells,
        fractions: Floats,
        names: Sequence[str],
        collection: str,
        *,
        may_alarm: bool,
        fmt: str | None = None,
    ) -> Iterator[Finding]:
        spans = layer_spans(fractions > self.values, ~np.isnan(fractions), self.samples)
        if not spans:
            return
        spots = worst(cells, spans, fractions, names)
        many = len(spans) > self.layers * len(names)
        severe = may_alarm and (many or spots[0].value > self.grave)
        evidence = {
            "layers": len(spots),
            "of_layers": len(names),
            "worst": spots[0].name,
            "worst_lost": spots[0].value,
            "format": fmt or cells.format_of(spots[0].name),
        }
        yield self.finding(
            "alarm" if severe else "warning", spots, evidence, until_step=last_of(cells, spans), collection=collection
        )


@dataclass(frozen=True, kw_only=True)
class UnderflowRising(ScaleRule):
    """Gradients whose underflow grows over the steps."""

    id = "underflow-rising"
    says = "the share of gradients that underflows grows"
    meaning = "Gradients shrink below the smallest value of the format, more and more: the training is about to stall."
    advice = "Keep watching: check again after twice as many steps."
    actions = ("raise_scale", "layer_scale", "to_bf16")
    figure = "underflow_over_time"
    explained_by = {Nonfinite.id: "anywhere"}
    items = {
        "from": EvidenceItem("Underflow rate", "share"),
        "to": EvidenceItem(unit="share"),
        "per_1000_steps": EvidenceItem("Growth in 1,000 steps", "share"),
    }
    location_item = EvidenceItem("Lost", "share")

    watch: float = threshold(0.01, "T6: below 1 % and flat, stay")
    change: float = threshold(0.05, "T6: 5 to 10 % and rising, change")
    confidence: float = threshold(0.99, "Mann-Kendall test, two-sided")

    # The share of lost values over time, of all parameters together and of each module, by Theil-Sen slope and Mann-
    # Kendall test. The outlook: below 1 %, stay; rising from 1 to 5 %, watch; rising above 5 %, change: raise the scale
    # if one fits all layers, else scale layers apart if one fits each, else BF16.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the gradients of parameters."""
        narrow = view.narrow("gradients")
        if narrow is None or not narrow.censors.any():
            return
        cells, modules = narrow.cells, Modules.of(narrow.cells)
        fractions = np.where(view.solved(cells.steps), np.nan, modules.harmful_underflow(narrow))
        names = modules.main_layers(cells)
        rises: list[tuple[str, Trend, int, int]] = []
        for name, shares in zip(names, fractions, strict=True):
            if np.fmax.reduce(shares, initial=-np.inf) > self.watch:  # no module that has nothing finite
                line, since, until = self._rise(cells, shares)
                rises += [] if line is None else [(name, line, since, until)]
        if not rises:
            return
        rises.sort(key=lambda rise: -rise[1].end)
        spots = [Spot(name=name, since_step=since, value=line.end) for name, line, since, _ in rises]
        worst_trend = rises[0][1]
        severity: Severity = "alarm" if worst_trend.end > self.change else "warning"
        result = self.finding(
            severity,
            spots,
            {
                "from": worst_trend.start,
                "to": worst_trend.end,
                "per_1000_steps": 1000 * worst_trend.slope,
                "confidence": worst_trend.confidence,
                "layers": len(spots),
                "outlook": "watch",
            },
            until_step=max(until for *_, until in rises),
            collection="gradients",
        )
        yield self._with_outlook(result, view) if severity == "alarm" else result

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the share now, how fast it rises, and the outlook."""
        rate = context.number("per_1000_steps")
        watch = context.finding.evidence.get("outlook", "watch") == "watch"
        return Phrase(
            what=f"the underflow of parameter gradients of {context.place} has been rising, seen {context.since}, to "
            f"{percent(context.number('to'))}",
            effect=f"by {percent(rate / 10)} in 100 steps" if rate < _MOST_PLAUSIBLE_RATE else "",
            remedy="check again after twice as many steps" if watch else remedy_words(context),
        )

    def needs_other_scale(self, finding: Finding) -> bool:
        """Return whether it is an alarm. The advice of a warning is to check again later."""
        return finding.severity == "alarm"

    def _rise(self, cells: Cells, fractions: Floats) -> tuple[Trend | None, int, int]:
        """Return the significant rise that ends highest, and the first and last step at which there was one."""
        known = np.flatnonzero(~np.isnan(fractions))
        last, since, until = None, 0, 0
        for samples in looks(len(known)):
            seen = known[:samples]
            if not fractions[seen[-samples // 4 :]].max() > self.watch:
                continue
            line = trend(cells.steps[seen], fractions[seen])
            if line is None or line.confidence < self.confidence or line.low <= 0 or line.end <= self.watch:
                continue
            if line.end - line.start < self.watch:
                continue
            until = int(cells.steps[seen[-1]])
            since = until if last is None else since
            last = line if last is None or line.end > last.end else last
        return last, since, until

    def _with_outlook(self, found: Finding, view: View) -> Finding:
        outlook, remedy, actions = by_scales(Scales.of(view, until=found.until_step), scaler=view.scaler)
        evidence = {**found.evidence, "outlook": outlook}
        return replace(found, evidence=evidence, advice=str(remedy), actions=actions)


# The least magnitude is exactly the smallest number of the format, and all are among its few smallest. In a norm that
# is computed from squares, they are the roots of those.
def _are_at_bottom(least: Floats, most: Floats, fmt: Format) -> NDArray[np.bool_]:
    """Return True where values are what next to nothing leaves in a format, or the roots of it."""
    found = np.zeros(least.shape, dtype=bool)
    for power in (1.0, 0.5):
        is_smallest = np.abs(least / fmt.smallest_subnormal**power - 1) <= _EXACT
        found |= is_smallest & (most < fmt.smallest_normal**power)
    return found


def _are_in(steps: Ints, wanted: range) -> NDArray[np.bool_]:
    return (steps >= wanted.start) & (steps < wanted.stop)
