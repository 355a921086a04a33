"""Rules of layers that put out zeros: dead ones, inputs that are too small, zeros that are no underflow."""

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from plimsoll.diagnosis.estimates.format_losses import Modules
from plimsoll.diagnosis.finding import Finding, Spot, collection_words
from plimsoll.diagnosis.rules.base import (
    EvidenceItem,
    FindingContext,
    Phrase,
    Rule,
    last_of,
    layer_spans,
    threshold,
    worst,
)
from plimsoll.diagnosis.rules.casts import CastFlushes
from plimsoll.diagnosis.rules.loss.targets import TokensHidden
from plimsoll.diagnosis.rules.nonfinite import Nonfinite
from plimsoll.diagnosis.rules.optimizer.updates import UpdatesSwallowed
from plimsoll.diagnosis.rules.underflow import UnderflowHigh
from plimsoll.diagnosis.tables.cells import module_ends
from plimsoll.diagnosis.tables.wiring_facts import (
    ONE_VALUE_NORM,
    ROUNDED_GRADIENTS,
    facts,
    first_fact,
    frozen_weights,
    largest_input,
    listed_in,
    without_gradient,
)
from plimsoll.diagnosis.tables.zero_gradients import (
    Growth,
    always_zero,
    erased_samples,
    grown_before,
    held_at_zero,
    is_constant_aside,
    lost_after_backward,
    where_gradients_stop,
    without_rows,
)
from plimsoll.diagnosis.view import View
from plimsoll.formats import FP16
from plimsoll.runs import Event
from plimsoll.tensor_collections import UNDERFLOW_ORDER
from plimsoll.text import number, percent

_AT_ZERO = "weights of zero without a gradient"
_ZERO_ON_BOTH_SIDES = (
    "Their weights are all zero and get no gradient, so they stay zero. Two factors, or two layers in a row, that both "
    "begin at zero do that."
)
_AS_LORA = "Initialise the first of the two at random, as LoRA does."
_INPUTS_SMALL = "inputs-small"
_SQUARES = "squares beyond FP16 within a norm"
_MANY = 0.25  # of what a norm puts out
_NO_SLOPE = "a weight without a slope"
_ZERO_INPUTS = "inputs of zero wherever gradients come"
# What a finding says of weights whose gradients are zero while those of their biases are not, by cause.
_OF_WEIGHTS_ALONE = {
    _NO_SLOPE: (
        "what the layer computes from the weight has no slope.",
        (
            "If the forward rounds the weight (round, sign, a cast to integers), pass the gradient through the "
            "rounding: weight + (rounded - weight).detach(), a straight-through estimator."
        ),
    ),
    _ZERO_INPUTS: (
        "gradients come only to rows of the input that are zero, as those of padding are.",
        (
            "Look at the mask: one of the other meaning lets attention read the padding and nothing else. True takes "
            "part in scaled_dot_product_attention, and is left out in the key_padding_mask of MultiheadAttention."
        ),
    ),
}
_NOTHING_LEFT = "underflow, or no gradient"
_NO_GRADIENTS = (
    "Their gradients are all zero, and did not underflow: no gradient comes to these layers, or only zeros come into "
    "them."
)
_ZERO_IN_ANY_FORMAT = "Most of these {} are zero, and none are near the format's smallest: they are zero in any format."
_DROPOUT = "dropout"
_HIDDEN = (
    "Nothing that these layers put out changes the loss. Look behind them for a mask that hides all of it, attention "
    "over another dimension than the places (batch_first), or a product with zeros."
)
_NO_ROWS = "no rows"
_NOTHING_ROUTED = "Nothing is routed to these layers: they are called with no rows at all."
_ROUTE = (
    "Look at what chooses the rows of each (a router, and what balances it): a bias that balances in a 16-bit format "
    "cannot take small steps. Or do without these layers."
)
_SLOWER = "Lower the learning rate of what grew, or clip its gradient. Re-initialise these layers if they stay so."
LEAVE_ZERO = "layers that begin at zero (a zero-initialised residual branch) leave it after a step or two"


@dataclass(frozen=True, slots=True, kw_only=True)
class _SilentGradients:
    """Modules without a gradient: the earliest first, until when, and why.

    `never` of them have never had one. `unknown`: their format may have flushed it. `stops`: the module that gradients
    come to and do not leave, or the model's output. `is_over`: all of them have gradients again.
    """

    spots: list[Spot]
    until: int
    never: int
    unknown: bool
    stops: str | None
    is_over: bool


@dataclass(frozen=True, kw_only=True)
class DeadLayer(Rule):
    """Layers with outputs of zero or their bias alone, or with zero gradients."""

    id = "dead-layer"
    says = "a layer outputs only zeros or its bias, or its gradients are all zero, and it is not underflow"
    meaning = "The layer no longer takes part in the training."
    advice = (
        "Check its input and its bias (a ReLU that no input activates), and whether anything is routed to it. "
        "Re-initialise it, or lower the learning rate."
    )
    figure = "zero_heatmap"
    explained_by = {
        Nonfinite.id: "anywhere", CastFlushes.id: "same module", UnderflowHigh.id: "same module",
        _INPUTS_SMALL: "anywhere", TokensHidden.id: "anywhere",
    }  # fmt: skip
    items = {
        "first": EvidenceItem(unit="location"),
        "zeros": EvidenceItem(unit="share"),
        "never_alive": EvidenceItem(hide_zero=True),
        "grew": EvidenceItem("Grew just before", "location"),
        "grew_times": EvidenceItem("Times as large"),
    }
    location_item = EvidenceItem("Zeros", "share")

    zeros: float = threshold(0.999, "of an output's values; ReLU, dropout and masks leave more than that")
    samples: float = threshold(5, LEAVE_ZERO)

    # Underflow is left to its own rules. A gradient in a narrow format that was never anything but zero cannot be
    # distinguished from underflow without a shadow step, and the finding says so.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield a finding on outputs, and one on gradients where outputs are alive."""
        if UpdatesSwallowed().moves_nothing(view):  # layers are what they began as
            return
        zeroed, last, largest = self._zeroed_rows(view)
        if zeroed:
            yield self._squares(zeroed, last, largest)
        spots, until = self.dead_outputs(view)
        known = self._known(view)
        spots = [s for s in spots if s.name.partition(":")[0] not in _modules_of(zeroed) and s.name not in known]
        at_zero = self.at_zero(view, spots)
        if spots and (at_zero or not InputsSmall().are_small(view)):
            evidence: dict[str, float | int | str] = {
                "first": spots[0].name, "layers": len(spots), "zeros": spots[0].value,
            }  # fmt: skip
            meaning, advice = None, None
            if at_zero:
                evidence |= {"cause": _AT_ZERO, "at_zero": len(at_zero)}
                meaning, advice = _ZERO_ON_BOTH_SIDES, _AS_LORA
            elif (grown := grown_before(view, spots[0].since_step)) is not None:
                evidence |= _evidence_of(grown)
                meaning, advice = f"{self.meaning} {_what_grew(grown)}", _SLOWER
            yield self.finding(
                "warning", spots, evidence, until_step=until, collection="activations", meaning=meaning, advice=advice
            )
        silent = self.silent_gradients(view)
        if any(spot.value >= self.zeros for spot in zeroed):  # no gradient comes through them
            return
        if silent is not None and silent.stops is None:  # else gradients-vanish says where they stop
            yield from self._without_gradients(view, silent, known)
        yield from self._without_slope(view)

    def _without_gradients(self, view: View, silent: _SilentGradients, known: Set[str]) -> Iterator[Finding]:
        """Yield one finding of layers whose gradients are zero in the backward too, without those of known cause."""
        lost, few = self._lost(view, silent), int(self.samples)
        spots = [spot for spot in silent.spots if spot not in lost and spot.name not in known]
        if spots and silent.is_over:
            yield self.finding(
                "info", spots, {"first": spots[0].name, "layers": len(spots)}, until_step=silent.until,
                collection="gradients", advice="No action is needed.",
                meaning="Their gradients were all zero for a while, and are not any more.",
            )  # fmt: skip
        elif spots and {spot.name for spot in spots} <= (still := held_at_zero(view)[0]) and len(still) > 1:
            evidence = {
                "first": spots[0].name, "layers": len(spots), "cause": _AT_ZERO,
                "at_zero": len({name.rpartition(".")[0] for name in still}),
            }  # fmt: skip
            yield self.finding(
                "warning", spots, evidence, until_step=silent.until, collection="gradients",
                meaning=_ZERO_ON_BOTH_SIDES, advice=_AS_LORA,
            )  # fmt: skip
        elif spots and silent.unknown:
            yield self._perhaps_underflow(view, silent, spots)
        elif spots:
            evidence: dict[str, float | int | str] = {
                "first": spots[0].name, "layers": len(spots), "never_alive": min(silent.never, len(spots)),
            }  # fmt: skip
            meaning, advice = _NO_GRADIENTS, _HIDDEN if silent.never == len(silent.spots) else None
            rowless = {since: without_rows(view, since, few) for since in {spot.since_step for spot in spots}}
            if all(spot.name.rpartition(".")[0] in rowless[spot.since_step] for spot in spots):
                evidence["cause"], meaning, advice = _NO_ROWS, _NOTHING_ROUTED, _ROUTE
            elif (grown := grown_before(view, spots[0].since_step)) is not None:
                evidence |= _evidence_of(grown)
                meaning, advice = f"{_NO_GRADIENTS} {_what_grew(grown)}", _SLOWER
            yield self.finding(
                "warning", spots, evidence, until_step=silent.until, collection="gradients", meaning=meaning,
                advice=advice,
            )  # fmt: skip

    # A shadow step begins with the gradient that the loss gives the model's output, as it is. If that is zero, so is
    # all that follows from it, in any format.
    def _perhaps_underflow(self, view: View, silent: _SilentGradients, spots: list[Spot]) -> Finding:
        """Return the finding of gradients in a narrow format that have never been anything but zero."""
        passed, root = view.cells("activation_gradients"), f"{view.run.manifest.get('root')}:output"
        at_output = root if root in always_zero(passed) else ""
        narrow = passed.format_of(root) if passed is not None and at_output else ""
        evidence: dict[str, float | int | str] = {
            "first": spots[0].name, "layers": len(spots), "never_alive": len(spots), "cause": _NOTHING_LEFT,
        }  # fmt: skip
        scale = "Raise the loss scale" if view.scaled else "Scale the loss (GradScaler)"
        cells = view.cells("gradients")
        shadowed = cells is not None and not np.isnan(cells.total_of("underflowed")).all()
        if at_output:
            meaning = (
                f"The gradient that the loss gives the model's output is zero already, in {narrow.upper()}: it is too "
                "small for that format, or the loss does not depend on the output."
            )
            advice = f"{scale}, or compute the loss from the output in FP32."
        else:
            meaning = "Their gradients have always been zero: either nothing reaches them, or all of it underflows."
            advice = f"{scale}, and see if they stay zero." + (
                "" if shadowed else " A shadow step (shadow_every) distinguishes the two."
            )
        return self.finding(
            "warning", spots, evidence, until_step=silent.until, collection="gradients", meaning=meaning, advice=advice
        )

    def phrase(self, context: FindingContext) -> Phrase:
        """Return where and since when."""
        if context.cause == _AT_ZERO:
            return Phrase(
                what=f"all weights of {context.number('at_zero'):.0f} layers are zero and get no gradient, seen "
                f"{context.since}",
                remedy="initialise one layer of each pair at random",
            )
        if context.cause == _SQUARES:
            return Phrase(
                what=f"{percent(context.number('zeros'))} of what {context.place} puts out has been zero "
                f"{context.since}: squares of its inputs overflow in FP16",
                remedy="compute the norm in FP32",
            )
        if context.cause == _NO_SLOPE:
            return Phrase(
                what=f"all gradients of {context.place} have been zero {context.since}, and those of the bias not",
                remedy="pass gradients through the rounding of the weight",
            )
        if context.cause == _ZERO_INPUTS:
            return Phrase(
                what=f"all gradients of {context.place} have been zero {context.since}: they come only to inputs that "
                "are zero, as padding is",
                remedy="look at the mask",
            )
        if context.cause == _NOTHING_LEFT:
            return Phrase(
                what=f"all {context.tensors} of {context.place} have been zero {context.since}: they underflow, or "
                "nothing reaches them",
                remedy="raise the loss scale" if len(context.view.scalar("scale")[0]) else "scale the loss",
            )
        if context.finding.severity == "info":
            until = f"until step {context.finding.until_step:,}"
            return Phrase(what=f"all {context.tensors} of {context.place} were zero {until}, and are not any more")
        of_outputs = context.finding.collection == "activations"
        if context.cause == _NO_ROWS:
            return Phrase(
                what=f"nothing has been routed to {context.place} {context.since}",
                remedy="look at the router and what balances it",
            )
        if grew := context.text("grew"):
            times = f"{number(context.number('grew_times'))} times as large"
            return Phrase(
                what=f"all {'outputs' if of_outputs else context.tensors} of {context.place} have been zero "
                f"{context.since}, when {grew} had become {times}",
                remedy="lower its learning rate, or clip its gradient",
            )
        if not of_outputs and context.number("never_alive") == context.number("layers"):
            return Phrase(
                what=f"all {context.tensors} of {context.place} have been zero {context.since}, and this is no "
                "underflow of their own format",
                remedy="look for what hides its outputs from the loss",
            )
        kind = "outputs" if of_outputs else context.tensors
        whose = "" if of_outputs else " of their own format"
        return Phrase(
            what=f"all {kind} of {context.place} have been zero {context.since}, and this is no underflow{whose}",
            remedy="check the layer's input and bias, or lower the learning rate",
        )

    def is_fatal(self, finding: Finding, last_step: int) -> bool:  # noqa: ARG002  (zeros stay zeros)
        """Return whether a norm puts out next to nothing: what comes before it cannot learn."""
        return finding.evidence.get("cause") == _SQUARES

    def lost_after_backward(self, view: View) -> tuple[list[Spot], int]:
        """Return parameters whose gradients are zero at the step and were not in the backward, and until when."""
        silent = self.silent_gradients(view)
        return ([], 0) if silent is None else (self._lost(view, silent), silent.until)

    def _lost(self, view: View, silent: _SilentGradients) -> list[Spot]:
        modules = {spot.name.rpartition(".")[0] for spot in silent.spots}
        had = lost_after_backward(view, modules, silent.spots[0].since_step, int(self.samples))
        return [spot for spot in silent.spots if spot.name.rpartition(".")[0] in had]

    def _known(self, view: View) -> set[str]:
        """Return what has a cause that another rule names."""
        return {spot.name for spot in (*self.past_zero(view)[1], *self.unbalanced(view)[1])}

    # A step of a quantiser, a scale or a width gets one gradient from all values that it scales, so the rate that suits
    # weights throws it past zero. Biases of a single value pass zero in sound trainings. A layer that has died shows
    # that something is wrong, and this what.
    def past_zero(self, view: View) -> tuple[list[tuple[str, int, float, float]], list[Spot], int]:
        """Return single numbers of layers that died, which were positive and became negative before, in order.

        Each comes with the step, its first value and the negative one. Then the spots that died since, and until when.
        """
        passed = _passed_zero(view)
        if not passed:
            return [], [], 0
        (dead, last), silent = self.dead_outputs(view), self.silent_gradients(view)
        if silent is not None and not silent.is_over and not silent.unknown:
            dead, last = [*dead, *silent.spots], max(last, silent.until)
        modules = {s.name.partition(":")[0] if ":" in s.name else s.name.rpartition(".")[0] for s in dead}
        until = max((spot.since_step for spot in dead), default=0)
        found = [each for each in passed if each[0].rpartition(".")[0] in modules and each[1] <= until]
        return found, [spot for spot in dead if found and spot.since_step >= found[0][1]], last

    # A buffer that is written at each step and stays may be a mask. Where it has a value for each of several experts,
    # and some of these get no rows, it is most likely what should have brought rows to them.
    def unbalanced(self, view: View) -> tuple[Event | None, list[Spot], int]:
        """Return the fact of a 16-bit buffer that stays, parameters of experts that get no rows, and until when."""
        events = facts(view, "buffer still")
        silent = self.silent_gradients(view) if events else None
        if silent is None or silent.is_over:
            return None, [], 0
        since = {spot.since_step for spot in silent.spots}
        rowless = {step: without_rows(view, step, int(self.samples)) for step in since}
        idle = [spot for spot in silent.spots if spot.name.rpartition(".")[0] in rowless[spot.since_step]]
        for event in events:
            owner = listed_in(event, "parameters")[0].rpartition(".")[0]
            mine = [s for s in idle if _experts_around(view, s.name, owner) == event.details.get("values")]
            if mine:
                return event, mine, silent.until
        return None, [], 0

    def at_zero(self, view: View, spots: list[Spot]) -> set[str]:
        """Return the modules of some outputs whose weights begin at zero and stay there."""
        # Weights that begin at zero leave it, unless a zero on either side keeps their gradient at zero too.
        still = always_zero(view.cells("weights")) & always_zero(view.cells("gradients"))
        return _modules_of(spots) & {name.removesuffix(".weight") for name in still}

    # A sum of squares is Inf in FP16 from a value of 256 on, in each row that has one. What a norm divides by that is
    # zero. A ReLU, which has no weight, makes zeros of what is negative alone; a mask makes them of small values too.
    def _zeroed_rows(self, view: View) -> tuple[list[Spot], int, float]:
        """Return the outputs that are zero in whole rows under large FP16 inputs, until when, and the largest input."""
        cells, weights = view.cells("activations"), view.cells("weights")
        if cells is None or weights is None:
            return [], 0, 0.0
        sizes: dict[str, set[float]] = {}
        for name, size in zip(weights.names, np.nanmax(weights.total_of("count"), axis=1).tolist(), strict=True):
            sizes.setdefault(name.rpartition(".")[0], set()).add(size)
        is_fp16 = np.array([name == FP16.name for name in cells.formats], dtype=float)[cells.format]
        large = (-cells.highest(-is_fp16) == 1) & (cells.true_absmax >= math.sqrt(FP16.max))
        zeros, counts, most = cells.total_of("zeros"), cells.total_of("count"), cells.highest(cells.columns["max"])
        share = np.full(cells.shape, np.nan)
        sources = dict[str, int]()
        for module, into, out in module_ends(cells):
            widths = sizes.get(module, {0.0})
            if len(widths) > 1 or any(name.startswith(f"{module}.") for name in cells.names):
                continue
            width = max(widths)
            with np.errstate(all="ignore"):
                in_rows = (zeros[out] % width == 0) & (counts[out] % width == 0) if width else zeros[out] == counts[out]
                of_all = zeros[out] / counts[out]
            holds = large[into] & in_rows & (zeros[out] > 0) & (zeros[into] == 0) & (most[into] > 0)
            share[out] = np.where(np.isnan(zeros[out]), np.nan, np.where(holds, of_all, 0.0))
            sources[cells.names[out]] = into
        spans = layer_spans(share > 0, ~np.isnan(share), self.samples)
        if not spans:
            return [], 0, 0.0
        spots = worst(cells, spans, share)
        largest = float(np.nanmax(cells.true_absmax[sources[spots[0].name]]))
        return spots, last_of(cells, spans), largest

    def _squares(self, spots: list[Spot], until: int, largest: float) -> Finding:
        share = spots[0].value
        evidence = {"cause": _SQUARES, "first": spots[0].name, "layers": len(spots), "zeros": share}
        return self.finding(
            "alarm" if share > _MANY else "warning", spots, evidence, until_step=until, collection="activations",
            meaning=f"Values of up to {number(largest)} come in, in FP16. Their squares exceed 65,504: a norm that is "
            f"computed from them divides by Inf, and {percent(share)} of what it puts out is zero, in whole rows.",
            advice="Compute the norm from x.float(), as torch's RMSNorm and LayerNorm do. Look for what makes its "
            "inputs so large.",
        )  # fmt: skip

    def dead_outputs(self, view: View) -> tuple[list[Spot], int]:
        """Return the outputs that are zero, the earliest first, and until when."""
        outputs = view.cells("activations")
        if outputs is None:
            return [], 0
        # A layer that begins at zero stays there where no gradient reaches it: `untrained-parameters` says why.
        cut, reached = without_gradient(view), view.run.tensors.get("gradients", ())
        cut = {module for module in _and_parents(cut) if not any(name.startswith(f"{module}.") for name in reached)}
        is_output = [":output" in name and name.partition(":")[0] not in cut for name in outputs.names]
        fraction = np.where(np.array(is_output)[:, None], outputs.zero_fraction, np.nan)
        spans = layer_spans(fraction >= self.zeros, ~np.isnan(fraction), self.samples)
        spans = [span for span in spans if not is_constant_aside(view, outputs, span)]
        if not spans:
            return [], 0
        return sorted(worst(outputs, spans, fraction), key=lambda spot: spot.since_step), last_of(outputs, spans)

    def silent_gradients(self, view: View) -> _SilentGradients | None:
        """Return the modules whose outputs are alive and whose gradients are zero; None if there are none."""
        narrow = view.narrow("gradients")
        if narrow is None or first_fact(view, ROUNDED_GRADIENTS) is not None:  # a cast flushed them
            return None
        cells, modules = narrow.cells, Modules.of(narrow.cells)
        lost, nonzero = modules.total(narrow.lost_of_cell), modules.total(cells.total(cells.nonzero))
        values = modules.total(cells.total_of("zeros"))
        silent = (values > 0) & (nonzero == 0) & (lost == 0)
        dead = _modules_of(self.dead_outputs(view)[0])
        dead |= {name.rpartition(".")[0] or name for name in frozen_weights(view)}  # no gradient is meant to come there
        alive = np.array([name not in dead for name in modules.names])[:, None]
        # NaN is no zero. A loss of zero has no gradient, and gradients that the script erased say nothing of a layer.
        elsewhere = view.solved(cells.steps) | erased_samples(view)
        judged = ~np.isnan(nonzero) & (modules.total(cells.nonfinite) == 0) & ~elsewhere[None, :]
        spans = layer_spans(silent & alive, judged, self.samples)
        if not spans:
            return None
        # Experts and heads may be idle at first. What has had a gradient at each of the last samples is not dead.
        few = int(self.samples)
        alive_now = [bool((nonzero[layer, np.flatnonzero(judged[layer])[-few:]] > 0).all()) for layer, *_ in spans]
        is_over = all(alive_now)
        spans = spans if is_over else [span for span, now in zip(spans, alive_now, strict=True) if not now]
        largest_first = worst(cells, spans, values, modules.main_layers(cells))
        spots = sorted((replace(spot, value=1.0) for spot in largest_first), key=lambda spot: spot.since_step)
        never, until = sum(np.nanmax(nonzero[layer]) == 0 for layer, *_ in spans), last_of(cells, spans)
        unknown = never > 0 and bool(narrow.censors.any())
        stops = None if unknown else where_gradients_stop(view, spots[0].since_step, int(self.samples))
        return _SilentGradients(
            spots=spots, until=until, never=int(never), unknown=unknown,
            stops=None if stops in dead or is_over else stops, is_over=is_over,
        )  # fmt: skip

    # A layer's weight and bias get their gradients from the same output. If only the weight's is zero, although
    # its input is not, the forward computes with something of the weight that has no slope; or gradients come only to
    # rows of the input that are zero. Products that are too small for the gradient's format are left out. The first
    # samples decide, for good.
    def _without_slope(self, view: View) -> Iterator[Finding]:
        """Yield findings of weights whose gradients are zero, although their biases' are not."""
        cells, inputs = view.cells("gradients"), view.cells("activations")
        if cells is None or inputs is None:
            return
        norms = {name for event in facts(view, ONE_VALUE_NORM) for name in listed_in(event, "modules")}
        _, mine, theirs = np.intersect1d(cells.steps, inputs.steps, return_indices=True)
        nonzero, size = cells.total(cells.nonzero), cells.highest(cells.columns["absmax"])
        floor, counts = cells.highest(cells.by_format(lambda fmt: fmt.smallest_normal)), cells.total_of("count")
        zeros = inputs.total_of("zeros")
        biases = {name: place for place, name in enumerate(cells.names)}
        entries = {name: place for place, name in enumerate(inputs.names)}
        spots: dict[str, list[Spot]] = {_NO_SLOPE: [], _ZERO_INPUTS: []}
        for place, name in enumerate(cells.names):
            module, _, kind = name.rpartition(".")
            bias, entry = biases.get(f"{module}.bias"), entries.get(f"{module}:input")
            if kind != "weight" or module in norms or bias is None or entry is None:
                continue
            with np.errstate(all="ignore"):
                clear = size[bias, mine] * inputs.true_absmax[entry, theirs] >= floor[place, mine]
            seen = mine[clear][: int(self.samples)]
            if len(seen) >= self.samples and (nonzero[place, seen] == 0).all():
                of_rows = zeros[entry, theirs[clear][: int(self.samples)]]
                width = counts[place, seen] / counts[bias, seen]  # of a row of the input
                cause = _ZERO_INPUTS if ((of_rows > 0) & (of_rows % width == 0)).all() else _NO_SLOPE
                spots[cause].append(Spot(name=name, since_step=int(cells.steps[seen[0]]), value=1.0))
        for cause, (meaning, advice) in _OF_WEIGHTS_ALONE.items():
            if spots[cause]:
                evidence = {"first": spots[cause][0].name, "layers": len(spots[cause]), "cause": cause}
                yield self.finding(
                    "warning", spots[cause], evidence, until_step=view.last_step, collection="gradients",
                    meaning=f"Gradients of these weights are always zero, and those of their biases are not: {meaning}",
                    advice=advice,
                )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class InputsSmall(Rule):
    """Inputs of a model so small that its layers put out zeros."""

    id = _INPUTS_SMALL
    says = "the model's inputs are so small that layers see hardly more than their biases, and put out zeros"
    meaning = "Layers see hardly more than their biases, which moved until nothing came out."
    advice = "Scale the inputs to a size of about 1. If they are scaled already, look whether it is done twice."
    figure = "spectrogram"
    explained_by = {Nonfinite.id: "anywhere", CastFlushes.id: "same module", UnderflowHigh.id: "same module"}
    items = {"largest_input": EvidenceItem("Largest input of the model"), "zeros": EvidenceItem(unit="share")}
    location_item = EvidenceItem("Zeros", "share")

    small: float = threshold(2.0**-6, "pixels divided by 255 twice are below 2^-7; inputs are made of size 1 or so")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding of the outputs that are zero."""
        dead = DeadLayer()
        spots, until = dead.dead_outputs(view)
        if spots and self.are_small(view) and not dead.at_zero(view, spots):
            largest = largest_input(view)
            evidence = {"largest_input": largest, "layers": len(spots), "zeros": spots[0].value}
            yield self.finding(
                "warning", spots, evidence, until_step=until, collection="activations",
                meaning=f"The model's inputs are at most {number(largest)}. {self.meaning}",
            )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return how small the inputs are, and what is zero."""
        return Phrase(
            what=f"the model's inputs are at most {number(context.number('largest_input'))}",
            effect=f"and all outputs of {context.place} have been zero {context.since}",
            remedy="scale the inputs to a size of about 1",
        )

    def are_small(self, view: View) -> bool:
        """Return True if the model's inputs are."""
        return largest_input(view) < self.small


@dataclass(frozen=True, kw_only=True)
class StructuralZeros(Rule):
    """Zeros that are zero in any format: a note, to distinguish them from underflow."""

    id = "structural-zeros"
    says = "many values are zero in any format (ReLU, unused rows, masks): no underflow"
    meaning = _ZERO_IN_ANY_FORMAT.format("values")
    advice = "No action is needed. A shadow step (shadow_every) confirms it."
    figure = "zero_heatmap"
    items = {"zeros": EvidenceItem(unit="share", of_worst=" zero")}
    location_item = EvidenceItem("Zeros", "share")
    is_secondary = True

    zeros: float = threshold(0.5, "half of a layer's values")
    lost: float = threshold(0.01, "T6: below 1 % of the others is no underflow")
    samples: float = threshold(3, "not reported from a single sample")
    kept: float = threshold(0.1, "of the values that come into a dropout: 0.9 as the share to drop is too much of it")
    tolerance: float = threshold(2, "times what a dropout makes of sums and of squares: the choice is random")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding for each collection in narrow formats, and one of dropouts."""
        yield from self._dropped(view)
        for collection in UNDERFLOW_ORDER:
            narrow = view.narrow(collection)
            if narrow is None or not narrow.censors.any():
                continue
            if collection == "gradients" and first_fact(view, ROUNDED_GRADIENTS) is not None:  # a cast made them zero
                continue
            cells = narrow.cells
            zeros = np.where(cells.total(cells.nonzero) > 0, cells.zero_fraction, np.nan)
            narrowed = cells.total(narrow.censors.astype(np.int64)) > 0
            holds = narrowed & (zeros > self.zeros) & (narrow.fraction < self.lost)
            spans = layer_spans(holds, ~np.isnan(zeros), self.samples)
            if spans:
                spots = worst(cells, spans, zeros)
                evidence = {"worst": spots[0].name, "zeros": spots[0].value, "layers": len(spots)}
                yield self.finding(
                    "info", spots, evidence, until_step=last_of(cells, spans), collection=collection,
                    meaning=_ZERO_IN_ANY_FORMAT.format(collection_words(collection)),
                )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return where and since when."""
        if context.cause == _DROPOUT:
            return Phrase(
                what=f"about {percent(context.number('zeros'))} of what comes into {context.place} has been set to "
                f"zero {context.since}, as a dropout does",
                remedy="give it the share to drop, not the one to keep",
            )
        return Phrase(what=f"many {context.tensors} of {context.place} are zero in any format {context.since}")

    # A dropout divides what it keeps by the share that it keeps, so that the sum stays. ReLU, masks and top-k do not.
    def _dropped(self, view: View) -> Iterator[Finding]:
        """Yield one finding of the dropouts that keep next to nothing."""
        cells = view.cells("activations")
        if cells is None:
            return
        nonzero = cells.total(cells.nonzero)
        with np.errstate(all="ignore"):
            sums = cells.total(cells.columns["abssum"] / cells.scale)
            squares = cells.total(cells.columns["sumsq"] / cells.scale**2)
            share = np.full(cells.shape, np.nan)
            for _, into, out in module_ends(cells):
                kept = nonzero[out] / nonzero[into]
                alike = cells.total_of("count")[into] == cells.total_of("count")[out]
                share[out] = np.where(alike & (nonzero[into] > 0), 1 - kept, np.nan)
                of_sums, of_squares = sums[out] / sums[into], squares[out] / squares[into] * kept
                few = np.flatnonzero((kept > 0) & (kept <= self.kept))[: int(self.samples)]  # judged once, for good
                means = np.array([of_sums[few].mean(), of_squares[few].mean()]) if len(few) else np.zeros(2)
                if (means < 1 / self.tolerance).any() or (means > self.tolerance).any():
                    share[out] = np.nan
        spans = layer_spans(share >= 1 - self.kept, ~np.isnan(share), self.samples)
        if spans:
            spots = sorted(worst(cells, spans, share), key=lambda spot: cells.names.index(spot.name))
            typical = float(np.nanmedian(share[[layer for layer, *_ in spans]]))
            evidence = {"cause": _DROPOUT, "zeros": typical, "layers": len(spots), "first": spots[0].name}
            yield self.finding(
                "warning", spots, evidence, until_step=last_of(cells, spans), collection="activations",
                meaning=f"About {percent(typical)} of the values that come in are set to zero, and the others are "
                f"multiplied by {1 / (1 - typical):.0f}, as a dropout with such a share does: hardly a value comes "
                "through.",
                advice="The argument of torch's dropout is the share to drop, not to keep. 0.1 to 0.5 is usual.",
            )  # fmt: skip


def _passed_zero(view: View) -> list[tuple[str, int, float, float]]:
    """Return parameters of one number that begin above zero and are below it later, but for biases, in order.

    Each comes with the step of the first sample below zero, its first value and that one.
    """
    cells = view.cells("weights")
    if cells is None:
        return []
    values, counts = cells.total(cells.columns["sum"] / cells.scale), cells.total_of("count")
    found: list[tuple[str, int, float, float]] = []
    for place, name in enumerate(cells.names):
        seen = np.flatnonzero(np.isfinite(values[place]))
        below = seen[values[place, seen] < 0]
        if name.rpartition(".")[2] == "bias" or not len(below) or np.nanmax(counts[place]) != 1:
            continue
        first, after = float(values[place, seen[0]]), float(values[place, below[0]])
        if first > 0:
            found.append((name, int(cells.steps[below[0]]), first, after))
    return sorted(found, key=lambda each: each[1])


def _experts_around(view: View, name: str, owner: str) -> int:
    """Return how many numbered modules lie side by side where a parameter of a module below `owner` is."""
    inside = f"{owner}." if owner else ""
    parts = name.removeprefix(inside).split(".") if name.startswith(inside) else []
    place = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
    before = inside + "".join(f"{part}." for part in parts[:place])
    modules = {output.partition(":")[0] for output in view.run.tensors.get("activations", ())}
    siblings = {module.removeprefix(before).partition(".")[0] for module in modules if module.startswith(before)}
    return sum(part.isdigit() for part in siblings) if place >= 0 else 0


def _evidence_of(grown: Growth) -> dict[str, float | int | str]:
    return {"grew": grown.name, "grew_times": grown.times}


def _what_grew(grown: Growth) -> str:
    return (
        f"Just before, between steps {grown.after_step:,} and {grown.step:,}, {grown.name} became "
        f"{number(grown.times)} times as large: {number(grown.size_before)}, then {number(grown.size)}."
    )


def _and_parents(names: set[str]) -> set[str]:
    """Return the modules of parameters, and the modules that these are in."""
    return {name[:place] for name in names for place, letter in enumerate(name) if letter == "."}


def _modules_of(spots: Sequence[Spot]) -> set[str]:
    return {spot.name.partition(":")[0] for spot in spots}
