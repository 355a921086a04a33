"""Rules of layers: dead ones, zeros that are no underflow, and drift."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis.estimates.format_losses import Modules
from plimsoll.diagnosis.finding import Finding, Spot, collection_words
from plimsoll.diagnosis.rules.base import (
    EvidenceItem,
    FindingContext,
    Phrase,
    Rule,
    last_of,
    short,
    spells,
    threshold,
    worst,
)
from plimsoll.diagnosis.rules.casts import CastFlushes
from plimsoll.diagnosis.rules.nonfinite import Nonfinite
from plimsoll.diagnosis.rules.underflow import UnderflowHigh
from plimsoll.diagnosis.tables.cells import Cells, Floats, module_ends
from plimsoll.diagnosis.tables.trend import falls, goes_on, halves, looks, trend
from plimsoll.diagnosis.tables.wiring_facts import (
    ROUNDED_GRADIENTS,
    facts,
    first_fact,
    frozen_weights,
    largest_input,
    listed_in,
    without_gradient,
)
from plimsoll.diagnosis.tables.zero_gradients import always_zero, erased_samples, where_gradients_stop
from plimsoll.diagnosis.view import View, log2
from plimsoll.formats import get_element
from plimsoll.tensor_collections import FORWARD, UNDERFLOW_ORDER
from plimsoll.text import number, percent, times_two_to

_ONE_VALUE, _TWO_VALUES = "norm of one value", "norm of two values"  # facts of the watch
_LAST_BATCH = "norm of the last batch"  # likewise, and the cause in the evidence
_AT_ZERO = "weights of zero without a gradient"
_ZERO_ON_BOTH_SIDES = (
    "Their weights are all zero and get no gradient, so they stay zero. Two layers in a row that both begin at zero do "
    "that."
)
_AS_LORA = "Initialise the first of the two at random, as LoRA does."
_INPUTS_SMALL = "inputs-small"
_NO_SLOPE = "a weight without a slope"
_STOPPED = "gradients stop"
_NO_GRADIENTS = (
    "Their gradients are all zero, and did not underflow: no gradient comes to these layers, or only zeros come into "
    "them."
)
_DROPOUT = "dropout"
_ENDLESS = "a loss without a lower bound"
_BOTTOMLESS = (
    "The layer's values grow while the loss falls below zero and goes on falling: the training follows a term that has "
    "no lower bound."
)
_HIDDEN = (
    "Nothing that these layers put out changes the loss. Look behind them for a mask that hides all of it, attention "
    "over another dimension than the places (batch_first), or a product with zeros."
)
_OF_A_SIGN = (
    "Look at the loss for a term that is subtracted or has the wrong sign, or that the model can make as negative as "
    "it likes. Bound it, or turn its sign."
)
_SAMPLES = "layers that begin at zero (a zero-initialised residual branch) leave it after a step or two"


@dataclass(frozen=True, slots=True, kw_only=True)
class _SilentGradients:
    """Modules without a gradient: the earliest first, until when, and why.

    `never` of them have never had one. `unknown`: their format may have flushed it. `stops`: the module that gradients
    come to and do not leave, or the model's output.
    """

    spots: list[Spot]
    until: int
    never: int
    unknown: bool
    stops: str | None


@dataclass(frozen=True, kw_only=True)
class DeadLayer(Rule):
    """Layers with outputs of zero or their bias alone, or with zero gradients."""

    id = "dead-layer"
    says = "a layer outputs only zeros or its bias, or its gradients are all zero, and it is not underflow"
    meaning = "The layer no longer takes part in the training."
    advice = (
        "Check its input and its bias (a ReLU that no input activates). Re-initialise it, or lower the learning rate."
    )
    figure = "zero_heatmap"
    explained_by = {
        Nonfinite.id: "anywhere", CastFlushes.id: "same module", UnderflowHigh.id: "same module",
        _INPUTS_SMALL: "anywhere",
    }  # fmt: skip
    items = {
        "first": EvidenceItem(unit="location"),
        "zeros": EvidenceItem(unit="share"),
        "never_alive": EvidenceItem(hide_zero=True),
    }

    zeros: float = threshold(0.999, "of an output's values; ReLU, dropout and masks leave more than that")
    samples: float = threshold(5, _SAMPLES)

    # Underflow is left to its own rules. A gradient in a narrow format that was never anything but zero cannot be
    # distinguished from underflow without a shadow step, and the finding says so.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield a finding on outputs, and one on gradients where outputs are alive."""
        spots, until = self.dead_outputs(view)
        at_zero = self.at_zero(view, spots)
        if spots and (at_zero or not InputsSmall().are_small(view)):
            evidence: dict[str, float | int | str] = {
                "first": spots[0].name, "layers": len(spots), "zeros": spots[0].value,
            }  # fmt: skip
            evidence |= {"cause": _AT_ZERO, "at_zero": len(at_zero)} if at_zero else {}
            meaning, advice = (_ZERO_ON_BOTH_SIDES, _AS_LORA) if at_zero else (None, None)
            yield self.finding(
                "warning", spots, evidence, until_step=until, collection="activations", meaning=meaning, advice=advice
            )
        silent = self.silent_gradients(view)
        if silent is not None and silent.stops is None:  # else gradients-vanish says where they stop
            evidence = {
                "first": silent.spots[0].name, "layers": len(silent.spots), "never_alive": silent.never,
            }  # fmt: skip
            yield self.finding(
                "warning", silent.spots, evidence, until_step=silent.until, collection="gradients",
                meaning="Their gradients have always been zero: either nothing reaches them, or all of it underflows."
                if silent.unknown else _NO_GRADIENTS,
                advice="Take a shadow step (shadow_every): it distinguishes the two." if silent.unknown
                else _HIDDEN if silent.never == len(silent.spots) else None,
            )  # fmt: skip
        yield from self._without_slope(view)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return where and since when."""
        if context.text("cause") == _AT_ZERO:
            return Phrase(
                what=f"all weights of {context.number('at_zero'):.0f} layers are zero and get no gradient, seen "
                f"{context.since}",
                remedy="initialise one layer of each pair at random",
            )
        if context.text("cause") == _NO_SLOPE:
            return Phrase(
                what=f"all gradients of {context.place} have been zero {context.since}, and those of the bias not",
                remedy="pass gradients through the rounding of the weight",
            )
        of_outputs = context.finding.collection == "activations"
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

    def at_zero(self, view: View, spots: list[Spot]) -> set[str]:
        """Return the modules of some outputs whose weights begin at zero and stay there."""
        # Weights that begin at zero leave it, unless a zero on either side keeps their gradient at zero too.
        still = always_zero(view.cells("weights")) & always_zero(view.cells("gradients"))
        return _modules_of(spots) & {name.removesuffix(".weight") for name in still}

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
        spans = spells(fraction >= self.zeros, ~np.isnan(fraction), self.samples)
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
        spans = spells(silent & alive, judged, self.samples)
        if not spans:
            return None
        spots = sorted(worst(cells, spans, values, modules.main_layers(cells)), key=lambda spot: spot.since_step)
        never, until = sum(np.nanmax(nonzero[layer]) == 0 for layer, *_ in spans), last_of(cells, spans)
        unknown = never > 0 and bool(narrow.censors.any())
        stops = None if unknown else where_gradients_stop(view, spots[0].since_step, int(self.samples))
        return _SilentGradients(
            spots=spots, until=until, never=int(never), unknown=unknown,
            stops=None if stops in dead else stops,
        )  # fmt: skip

    # A layer's weight and bias get their gradients from the same output. If only the weight's is zero, although
    # its input is not, the forward computes with something of the weight that has no slope. Products that are too small
    # for the gradient's format are left out. The first samples decide, for good.
    def _without_slope(self, view: View) -> Iterator[Finding]:
        """Yield one finding of weights whose gradients are zero, although their biases' are not."""
        cells, inputs = view.cells("gradients"), view.cells("activations")
        if cells is None or inputs is None:
            return
        norms = {name for event in facts(view, _ONE_VALUE) for name in listed_in(event, "modules")}
        _, mine, theirs = np.intersect1d(cells.steps, inputs.steps, return_indices=True)
        nonzero, size = cells.total(cells.nonzero), cells.highest(cells.columns["absmax"])
        floors = np.array([get_element(name, "diagnose").smallest_normal for name in cells.formats])
        floor = cells.highest(floors[cells.format])
        biases = {name: place for place, name in enumerate(cells.names)}
        entries = {name: place for place, name in enumerate(inputs.names)}
        spots: list[Spot] = []
        for place, name in enumerate(cells.names):
            module, _, kind = name.rpartition(".")
            bias, entry = biases.get(f"{module}.bias"), entries.get(f"{module}:input")
            if kind != "weight" or module in norms or bias is None or entry is None:
                continue
            with np.errstate(all="ignore"):
                clear = size[bias, mine] * inputs.true_absmax[entry, theirs] >= floor[place, mine]
            seen = mine[clear][: int(self.samples)]
            if len(seen) >= self.samples and (nonzero[place, seen] == 0).all():
                spots.append(Spot(name=name, since_step=int(cells.steps[seen[0]]), value=1.0))
        if spots:
            evidence = {"first": spots[0].name, "layers": len(spots), "cause": _NO_SLOPE}
            yield self.finding(
                "warning", spots, evidence, until_step=view.last_step, collection="gradients",
                meaning="The gradients of these weights are always zero, and those of their biases are not: "
                "what the layer computes from the weight has no slope.",
                advice="If the forward rounds the weight (round, sign, a cast to integers), pass the gradient through "
                "the rounding: weight + (rounded - weight).detach(), a straight-through estimator.",
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
class NormOfFewValues(Rule):
    """Norms over one or two values, or with statistics of one batch."""

    id = "norm-of-few-values"
    says = "a norm is over one value, a batch norm over two, or one that evaluates by the statistics of the last batch"
    meaning = "The norm is over a single value: it puts out a constant (its bias) or a sign, whatever comes in."
    advice = "Normalise over more values: look at normalized_shape, and at the order of the dimensions."
    figure = "spectrogram"
    items = {"values": EvidenceItem("Values of each norm")}

    layers: float = threshold(1, "the facts are exact, and no sound model has such a norm")

    # The mean of one value is the value, and its root mean square is its size: nothing of it but a sign is left. Two
    # values lie as far above their mean as below it: 1 and -1. torch's momentum is the share of the new batch, other
    # libraries' that which is kept.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding of each kind of such norms."""
        for fact, evidence, meaning, advice in (
            (_ONE_VALUE, {"values": 1}, self.meaning, self.advice),
            (
                _TWO_VALUES,
                {"values": 2},
                "Each channel of the batch has two values, and the batch norm makes 1 and -1 of any two.",
                "Use larger batches (a micro-batch counts by itself), or a norm over features: LayerNorm, GroupNorm.",
            ),
            (
                _LAST_BATCH,
                {"cause": _LAST_BATCH},
                "The model evaluates by running statistics that are almost those of the last batch alone.",
                "Set momentum to 1 minus the share that is to be kept: 0.01 for what other libraries call 0.99.",
            ),
        ):
            yield from self._named(view, fact, evidence, meaning, advice)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return where, and what is left."""
        if context.text("cause") == _LAST_BATCH:
            return Phrase(
                what=f"the batch norm {context.place} keeps the statistics of the last batch alone, seen "
                f"{context.since}",
                remedy="its momentum is the share of the new batch: 0.1 is usual",
            )
        if context.number("values") == 1:
            return Phrase(
                what=f"the norm {context.place} sees single values, and has put out its bias {context.since}",
                remedy="normalise over more values",
            )
        return Phrase(
            what=f"the batch norm {context.place} normalises two values of a channel, and makes 1 and -1 of them, "
            f"seen {context.since}",
            remedy="use larger batches, or a norm over features",
        )

    def _named(self, view: View, fact: str, evidence: dict[str, Any], meaning: str, advice: str) -> Iterator[Finding]:
        """Yield the finding of a fact's first event."""
        ran = view.run.tensors.get("activations", ())
        for event in facts(view, fact)[:1]:
            names = [f"{name}:output" for name in listed_in(event, "modules") if f"{name}:output" in ran]
            if len(names) >= self.layers:
                value = float(evidence.get("values", 1))
                yield self.finding(
                    "warning", [Spot(name=name, since_step=event.step, value=value) for name in names],
                    evidence | {"layers": len(names)}, until_step=max(view.last_step, event.step),
                    collection="activations", meaning=meaning, advice=advice,
                )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GradientsVanish(Rule):
    """Gradients that vanish before the first layers, or in saturated ones."""

    id = "gradients-vanish"
    says = "gradients shrink towards the first layers until these are not trained, or a layer or the loss stops them"
    meaning = "The gradient shrinks on its way back through the layers: these weights hardly move."
    advice = "Use residual connections, normalisation or another activation, or initialise with larger weights."
    figure = "spectrogram"
    explained_by = {Nonfinite.id: "anywhere", CastFlushes.id: "same module", UnderflowHigh.id: "same module"}
    items = {
        "at_their_limit": EvidenceItem(unit="share"),
        "stops_in": EvidenceItem(unit="location"),
        "largest": EvidenceItem("Largest gradient (RMS)"),
        "worst_rms": EvidenceItem("Smallest gradient (RMS)"),
    }
    location_item = EvidenceItem("Of the largest gradient")

    smaller: float = threshold(1e-6, "times the largest RMS of a gradient; sound networks stay within 1e-4")
    moved: float = threshold(1e-7, "of a weight's norm in one step: a million steps would be needed to change it")
    samples: float = threshold(5, _SAMPLES)
    saturated: float = threshold(
        0.5, "of a layer's outputs at 1 or -1 from the first sample on; usual weights give none"
    )
    layers: float = threshold(2, "saturated layers: the last one may belong there, as in a picture that is half black")

    # A layer counts if its gradient is many times smaller than the model's largest, and its updates are too small to
    # move its weights. Adam moves layers with small gradients as far as others, so it rarely applies there.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding of the gradients, one of saturated layers, one of a layer that stops all."""
        yield from self._saturated(view)
        yield from self._stopped(view)
        gradients, updates = view.cells("gradients"), view.cells("updates")
        if gradients is None or updates is None:
            return
        rms = np.where(gradients.total(gradients.nonzero) > 0, gradients.rms, np.nan)  # zeros are left to other rules
        ratio = updates.relative_update
        place = {name: i for i, name in enumerate(updates.names)}
        common, mine, theirs = np.intersect1d(gradients.steps, updates.steps, return_indices=True)
        if len(common) < self.samples:
            return
        largest = np.nanmax(np.where(np.isnan(rms), 0.0, rms), axis=0)
        still = np.full(gradients.shape, np.nan)
        for layer, name in enumerate(gradients.names):
            if name in place:
                still[layer, mine] = ratio[place[name], theirs]
        main = set(Modules.of(gradients).main_layers(gradients))
        judged = ~np.isnan(rms) & ~np.isnan(still) & ~view.solved(gradients.steps)[None, :]
        judged &= np.array([name in main for name in gradients.names])[:, None]
        holds = judged & (rms <= self.smaller * largest[None, :]) & (still <= self.moved)
        spans = [span for span in spells(holds, judged, self.samples) if holds[span[0]][judged[span[0]]].mean() > 0.5]
        if not spans:
            return
        with np.errstate(all="ignore"):
            shares = rms / largest[None, :]
        spots = sorted(worst(gradients, spans, shares), key=lambda spot: spot.value)
        smallest = gradients.names.index(spots[0].name)
        evidence = {
            "layers": len(spots), "worst": spots[0].name, "largest": float(largest[mine[-1]]),
            "worst_rms": float(np.nanmedian(rms[smallest])),
        }  # fmt: skip
        until = last_of(gradients, spans)
        yield self.finding("warning", spots, evidence, until_step=until, collection="gradients")

    def phrase(self, context: FindingContext) -> Phrase:
        """Return where gradients vanish, and by how much."""
        if context.text("cause") == _STOPPED:
            stops = context.text("stops_in")
            return Phrase(
                what=f"no gradient has come to {context.place} {context.since}: all of it ends "
                + (f"in {short(stops)}" if ":" not in stops else "in the loss"),
                remedy="look for what has no slope there",
            )
        if "at_their_limit" in context.finding.evidence:
            return Phrase(
                what=f"{context.place} have been saturated {context.since}: up to "
                f"{percent(context.number('at_their_limit'))} of their outputs are at 1 or -1",
                effect="and pass hardly a gradient",
                remedy="initialise with smaller weights",
            )
        smallest, largest = context.number("worst_rms"), context.number("largest")
        return Phrase(
            what=f"gradients vanish in {context.layers} {context.since}: {number(smallest)} against {number(largest)}",
            effect="and these weights hardly move",
            remedy="add residual connections or normalisation",
        )

    def _stopped(self, view: View) -> Iterator[Finding]:
        """Yield one finding of the modules before one that gradients do not leave."""
        silent = DeadLayer(samples=self.samples).silent_gradients(view)
        if silent is None or silent.stops is None:
            return
        meaning, advice = _explained_stop(silent.stops)
        evidence = {"layers": len(silent.spots), "cause": _STOPPED, "stops_in": silent.stops}
        yield self.finding(
            "warning", silent.spots, evidence, until_step=silent.until, collection="gradients", meaning=meaning,
            advice=advice,
        )  # fmt: skip

    # A tanh or sigmoid that is rounded to 1 has the derivative 0: gradients come to the module, and zeros leave it. A
    # ReLU gives zeros for zeros; a binary layer with a straight-through gradient puts out ones, and passes gradients.
    def _saturated(self, view: View) -> Iterator[Finding]:
        """Yield one finding of the modules saturated since the first samples."""
        outputs, gradients = view.cells("activations"), view.cells("activation_gradients")
        if outputs is None or gradients is None:
            return
        ones = outputs.total(outputs.nonzero - outputs.below_binade(np.zeros(len(outputs), dtype=np.int64)))
        with np.errstate(all="ignore"):
            share = np.where(outputs.true_absmax == 1.0, ones / outputs.total_of("count"), np.nan)
        _, mine, theirs = np.intersect1d(outputs.steps, gradients.steps, return_indices=True)
        mine, theirs = mine[: int(self.samples)], theirs[: int(self.samples)]
        if len(mine) < self.samples:
            return
        place = {name: i for i, name in enumerate(gradients.names)}
        zeros, alive = gradients.zero_fraction, False
        spots: list[Spot] = []
        for layer, name in enumerate(outputs.names):
            module, _, kind = name.rpartition(":")
            into, out = place.get(name), place.get(f"{module}:input")
            if kind == "output" and into is not None and out is not None:
                comes, leaves = 1 - zeros[into][theirs], 1 - zeros[out][theirs]
                stopped = leaves <= (1 - self.saturated) * comes
                if stopped.all() and (share[layer, mine] >= self.saturated).all():
                    alive |= bool((comes > 0).all())  # behind saturated layers all may be zero
                    most = float(share[layer, mine].max())
                    spots.append(Spot(name=name, since_step=int(outputs.steps[mine[0]]), value=most))
        if alive and len(spots) >= self.layers:
            evidence = {"layers": len(spots), "at_their_limit": max(spot.value for spot in spots)}
            yield self.finding(
                "warning", spots, evidence, until_step=int(outputs.steps[mine[-1]]), collection="activations",
                meaning="These layers are saturated from the start: most outputs are at 1 or -1, where the derivative "
                "is zero, so hardly a gradient comes through.",
                advice="Initialise the layers before them with smaller weights (nn.init.xavier_uniform_), or normalise "
                "what comes in.",
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OutputsAlike(Rule):
    """Outputs all of whose values are one number, or neighbours in their format."""

    id = "outputs-alike"
    says = "all values of a module's output are one number, or the few next to it that their format has"
    meaning = "All values of these outputs are nearly the same: what comes in makes hardly a difference."
    advice = (
        "If they differ before they are rounded, compute in FP32, or with the small difference itself: subtract the "
        "mean, take 1 - x instead of x. Else look for a clamp, a saturated function, or a constant that hides the rest."
    )
    figure = "spectrogram"
    explained_by = {Nonfinite.id: "anywhere"}
    items = {"near": EvidenceItem("Value of all"), "spacing": EvidenceItem("Distance of neighbours in the format")}
    location_item = EvidenceItem("Standard deviation, in distances of neighbours")

    spread: float = threshold(1.5, "distances of neighbours in the format: 19 of 20 normal values are on six numbers")
    values: float = threshold(16, "values of an output; a learned temperature or a loss is a single one")
    samples: float = threshold(5, "a module whose weights begin at zero leaves its bias after a step or two")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the outputs."""
        cells = view.cells("activations")
        if cells is None:
            return
        with np.errstate(all="ignore"):
            count, top = cells.total_of("count"), cells.highest(cells.columns["absmax"])  # as held, with its scale
            mean = np.abs(cells.total_of("sum")) / count
            deviation = np.sqrt(np.maximum(cells.total_of("sumsq") / count - mean**2, 0.0))
            spread = deviation / _spacing(cells, top)
        one_number = mean >= top * (1 - 2.0**-30)  # what adding doubles may lose
        norms = {name for event in facts(view, _ONE_VALUE) for name in listed_in(event, "modules")}
        judged = [":output" in name and name.rpartition(":")[0] not in norms for name in cells.names]
        holds = (one_number | (spread <= self.spread)) & (count >= self.values) & (top > 0) & (cells.nonfinite == 0)
        holds &= np.array(judged)[:, None]
        spans = [
            (layer, first, last)
            for layer, first, last in spells(holds, cells.recorded, self.samples)
            if not _is_learned(top[layer, first : last + 1], one_number[layer, first : last + 1])
        ]
        if spans:
            spots = sorted(
                worst(cells, spans, spread), key=lambda spot: (spot.since_step, cells.names.index(spot.name))
            )
            layer, first, _ = min(spans, key=lambda span: (span[1], span[0]))
            undone = float(cells.true_absmax[layer, first] / top[layer, first])
            evidence = {
                "first": spots[0].name, "layers": len(spots), "near": float(mean[layer, first]) * undone,
                "format": cells.format_of(cells.names[layer]),
                "spacing": float(_spacing(cells, top)[layer, first]) * undone,
            }  # fmt: skip
            yield self.finding("warning", spots, evidence, until_step=last_of(cells, spans), collection="activations")

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the outputs, their value, and what the format holds there."""
        near, spacing = context.number("near"), context.number("spacing")
        return Phrase(
            what=f"all outputs of {context.place} have been about {number(near)} {context.since}",
            effect=f"where {context.format} has numbers {number(spacing)} apart",
            remedy="look for rounding or a clamp",
        )


@dataclass(frozen=True, kw_only=True)
class StructuralZeros(Rule):
    """Zeros that are zero in any format: a note, to distinguish them from underflow."""

    id = "structural-zeros"
    says = "many values are zero in any format (ReLU, unused rows, masks): no underflow"
    meaning = "Most of these values are zero, and none are near the format's smallest: they are zero in any format."
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
            spans = spells(holds, ~np.isnan(zeros), self.samples)
            if spans:
                spots = worst(cells, spans, zeros)
                evidence = {"worst": spots[0].name, "zeros": spots[0].value, "layers": len(spots)}
                meaning = self.meaning.replace("values", collection_words(collection), 1)  # outputs are in both
                yield self.finding(
                    "info", spots, evidence, until_step=last_of(cells, spans), collection=collection, meaning=meaning
                )

    def phrase(self, context: FindingContext) -> Phrase:
        """Return where and since when."""
        if context.text("cause") == _DROPOUT:
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
        spans = spells(share >= 1 - self.kept, ~np.isnan(share), self.samples)
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


@dataclass(frozen=True, kw_only=True)
class Drift(Rule):
    """Weights or activations whose size moves steadily and does not settle."""

    id = "distribution-drift"
    says = "the size of a layer's weights or outputs moves steadily and does not settle"
    meaning = (
        "The layer's values have drifted from their initial range: weight decay, normalisation and learning rate do "
        "not balance."
    )
    advice = "Set weight decay so that the norm settles, or normalise. With unit scaling, audit the layer again."
    figure = "spectrogram"
    explained_by = {Nonfinite.id: "anywhere"}
    location_item = EvidenceItem("Binades")
    is_secondary = True

    binades: float = threshold(3.0, "a factor of eight; sizes of sound layers stay within one or two binades")
    still: float = threshold(0.25, "of the way was made in the second half of the steps")
    last: float = threshold(1, "binades in each of the last two quarters; linear growth makes 0.4")
    confidence: float = threshold(0.99, "Mann-Kendall test, two-sided")

    # Unit scaling rests on sizes that stay (U5); weights that grow without end lose the precision of their updates.
    # Sizes that move while a model learns, and then settle, are a note. So are weights while the loss still halves.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding for each of weights and activations."""
        for collection in FORWARD:
            cells = view.cells(collection)
            if cells is None:
                continue
            drifts = [each for i in self._candidates(cells) if (each := self._drift(cells, i)) is not None]
            if not drifts:
                continue
            learns = collection == "weights" and halves(view.scalar("loss")[1])
            moving = [each for each in drifts if each[3] and not learns]
            state = "still do" if learns and any(each[3] for each in drifts) else "have settled"
            shown = sorted(moving or drifts, key=lambda each: -abs(each[1]))
            evidence = {"worst": shown[0][0].name, "binades": shown[0][1], "layers": len(shown)}
            spots, until = [spot for spot, *_ in shown], max(until for _, _, until, _ in shown)
            if moving:
                more: dict[str, Any] = {}
                if shown[0][1] > 0 and _falls_below_zero(view):
                    evidence["cause"] = _ENDLESS
                    more = {"meaning": _BOTTOMLESS, "advice": _OF_A_SIGN}
                yield self.finding("warning", spots, evidence, until_step=until, collection=collection, **more)
                continue
            yield self.finding(
                "info", spots, evidence, until_step=until, collection=collection,
                meaning=f"The layer's values moved while the model learned, and {state}.",
                advice="No action is needed.",
            )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the direction and how far the sizes moved."""
        binades = context.number("binades")
        direction = "grown" if binades > 0 else "shrunk"
        endless = context.text("cause") == _ENDLESS
        goes_on = f" and still {'grow' if binades > 0 else 'shrink'}" if context.finding.severity != "info" else ""
        return Phrase(
            what=f"{context.tensors} of {context.layers} have {direction} {times_two_to(abs(binades))}{goes_on}, seen "
            f"{context.since}",
            effect="while the loss falls below zero without a bound" if endless else "",
            remedy="look for a term of the loss with the wrong sign"
            if endless
            else "normalise, or balance weight decay and learning rate",
        )

    def _candidates(self, cells: Cells) -> list[int]:
        """Return the layers whose size moved far enough for a trend to be computed."""
        sizes = log2(cells.rms)
        with np.errstate(all="ignore"):
            span = np.fmax.reduce(sizes, axis=1, initial=-np.inf) - np.fmin.reduce(sizes, axis=1, initial=np.inf)
        main = set(Modules.of(cells).main_layers(cells)) if cells.collection == "weights" else set(cells.names)
        return [i for i in np.flatnonzero(span >= self.binades).tolist() if cells.names[i] in main]

    def _drift(self, cells: Cells, layer: int) -> tuple[Spot, float, int, bool] | None:
        """Return the location, its size's change, the last step, and if it still moves."""
        sizes = log2(cells.rms[layer])
        known = np.flatnonzero(~np.isnan(sizes))
        since, most, until = None, 0.0, 0
        for samples in looks(len(known)):
            seen = known[:samples]
            start, half, end = _levels(sizes[seen])
            moved = end - start
            if abs(moved) < self.binades or (end - half) / moved < self.still:
                continue
            line = trend(cells.steps[seen], sizes[seen])
            if line is None or line.confidence < self.confidence or line.low * line.high <= 0:
                continue
            until = int(cells.steps[seen[-1]])
            since = until if since is None else since
            most = moved if abs(moved) > abs(most) else most
        if since is None:
            return None
        on = goes_on(cells.steps[known], sizes[known], least=self.last, confidence=self.confidence)
        until = int(cells.steps[known[-1]]) if on else until
        return Spot(name=cells.names[layer], since_step=since, value=most), most, until, on


def _explained_stop(stops: str) -> tuple[str, str]:
    """Return meaning and advice on gradients that stop in a module, or in the loss."""
    if ":" in stops:
        meaning = "The loss gives the model's output a gradient of zero: no layer is trained."
        advice = (
            "Look at what the loss computes: a rounding, a comparison, a clamp whose bound is passed, a product of "
            "many probabilities that is zero, or a mask that leaves nothing."
        )
        return meaning, advice
    meaning = f"Gradients come to {stops} and end there: none of the layers before it is trained."
    advice = (
        f"Look at what {stops} computes. Something in it has no slope at its values (a sigmoid or softmax that has "
        "reached 0 or 1, a product of many factors that has underflowed, a rounding), or a cast in it flushes its "
        "gradient (to a narrow format without a scale)."
    )
    return meaning, advice


def _falls_below_zero(view: View) -> bool:
    """Return whether a loss has been below zero for the last quarter of its steps, and has gone on falling."""
    quarters = [loss[-(len(loss) // 4) :] for _, loss in view.losses.values() if len(loss) >= 4]
    return any(bool((quarter < 0).all()) and falls(quarter) for quarter in quarters)


def _spacing(cells: Cells, sizes: Floats) -> Floats:
    """Return the distance of neighbouring numbers of each cell's format at a size."""
    formats = [get_element(name, "diagnose") for name in cells.formats]
    lowest = cells.highest(np.array([fmt.min_exponent for fmt in formats], dtype=np.float64)[cells.format])
    digits = cells.highest(np.array([fmt.mantissa_bits for fmt in formats], dtype=np.float64)[cells.format])
    with np.errstate(all="ignore"):
        return np.exp2(np.maximum(np.floor(np.log2(sizes)), lowest) - digits)


def _is_learned(sizes: Floats, one_number: NDArray[np.bool_]) -> bool:
    """Return whether outputs of one number change from sample to sample, as a learned factor does."""
    return bool(one_number.all()) and len(np.unique(sizes)) > 1


def _and_parents(names: set[str]) -> set[str]:
    """Return the modules of parameters, and the modules that these are in."""
    return {name[:place] for name in names for place, letter in enumerate(name) if letter == "."}


def _modules_of(spots: Sequence[Spot]) -> set[str]:
    return {spot.name.partition(":")[0] for spot in spots}


def _levels(values: Floats) -> tuple[float, float, float]:
    """Return the medians of the first, the middle and the last eighth."""
    width = max(len(values) // 8, 1)
    half = len(values) // 2
    pieces = values[:width], values[half : half + width], values[-width:]
    start, middle, end = (float(np.median(piece)) for piece in pieces)
    return start, middle, end
