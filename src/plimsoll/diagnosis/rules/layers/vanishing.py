"""Rules of what is lost on its way through layers: gradients, and the differences between examples."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis.estimates.format_losses import Modules
from plimsoll.diagnosis.finding import Finding, Spot
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
from plimsoll.diagnosis.rules.casts import CastFlushes
from plimsoll.diagnosis.rules.layers.zeros import LEAVE_ZERO, DeadLayer, StructuralZeros
from plimsoll.diagnosis.rules.nonfinite import Nonfinite
from plimsoll.diagnosis.rules.underflow import UnderflowHigh
from plimsoll.diagnosis.tables.cells import Cells, Floats, module_ends
from plimsoll.diagnosis.tables.wiring_facts import ONE_VALUE_NORM, facts, first_fact, listed_in
from plimsoll.diagnosis.tables.zero_gradients import always_zero, is_constant_aside
from plimsoll.diagnosis.view import View
from plimsoll.text import number, percent

_TWO_VALUES = "norm of two values"  # a fact of the watch
_LAST_BATCH = "norm of the last batch"  # likewise, and the cause in the evidence
_EPSILON = "inputs below epsilon"
_STOPPED = "gradients stop"
_PULLED = "only pulls"  # a fact of the watch, and the cause in the evidence
_ROWS = "rows alike"  # likewise


@dataclass(frozen=True, kw_only=True)
class NormOfFewValues(Rule):
    """Norms over one or two values, with statistics of one batch, or of values below their epsilon."""

    id = "norm-of-few-values"
    says = (
        "a norm is over one value, a batch norm over two, one evaluates by the statistics of the last batch, or what "
        "comes in is smaller than the norm's epsilon"
    )
    meaning = "The norm is over a single value: it puts out a constant (its bias) or a sign, whatever comes in."
    advice = "Normalise over more values: look at normalized_shape, and at the order of the dimensions."
    figure = "spectrogram"
    items = {
        "values": EvidenceItem("Values of each norm"),
        "epsilon": EvidenceItem("Epsilon"),
        "mean_square": EvidenceItem("Mean square of its inputs"),
    }

    layers: float = threshold(1, "the facts are exact, and no sound model has such a norm")
    below: float = threshold(0.1, "of epsilon, the mean square of what comes in: the norm divides by epsilon's root")
    samples: float = threshold(5, "branches that begin at zero leave it within a few")

    # The mean of one value is the value, and its root mean square is its size: nothing of it but a sign is left. Two
    # values lie as far above their mean as below it: 1 and -1. torch's momentum is the share of the new batch, other
    # libraries' that which is kept.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding of each kind of such norms."""
        for fact, evidence, meaning, advice in (
            (ONE_VALUE_NORM, {"values": 1}, self.meaning, self.advice),
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
        yield from self._below_epsilon(view)

    # A mean square is at least as large as any variance of the same values. What is over at the end was a beginning.
    def _below_epsilon(self, view: View) -> Iterator[Finding]:
        """Yield one finding of the norms whose inputs have a mean square below their epsilon, to the end."""
        cells, listed = view.cells("activations"), view.run.manifest.get("norms")
        if cells is None or not isinstance(listed, Mapping):
            return
        epsilons = cast("Mapping[str, object]", listed)
        size, small = np.full(cells.shape, np.nan), np.zeros(cells.shape, dtype=bool)
        for name, into, out in module_ends(cells):
            epsilon = epsilons.get(name)
            if isinstance(epsilon, float) and epsilon > 0:
                size[out] = cells.rms[into] ** 2 / epsilon
                small[out] = (size[out] > 0) & (size[out] < self.below)
        spans = [
            (layer, first, last)
            for layer, first, last in layer_spans(small, ~np.isnan(size), self.samples)
            if np.flatnonzero(~np.isnan(size[layer]))[-1] == last
        ]
        if not spans:
            return
        spans.sort(key=lambda span: float(np.nanmin(size[span[0]])))
        spots = [Spot(name=cells.names[layer], since_step=int(cells.steps[first])) for layer, first, _ in spans]
        name = spots[0].name.removesuffix(":output")
        epsilon = float(str(epsilons[name]))
        square = float(np.nanmin(size[spans[0][0]])) * epsilon
        yield self.finding(
            "warning", spots, {"cause": _EPSILON, "epsilon": epsilon, "mean_square": square, "layers": len(spots)},
            until_step=last_of(cells, spans), collection="activations",
            meaning=f"What comes into {name} has a mean square of {number(square)}, far below the norm's epsilon of "
            f"{number(epsilon)}. The norm divides by the root of epsilon, so it puts out values far below 1.",
            advice="Scale the inputs to a size near 1 before the norm, or give it an epsilon far below their variance.",
        )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return where, and what is left."""
        if context.cause == _EPSILON:
            return Phrase(
                what=f"inputs of {context.place} have been smaller than the norm's epsilon "
                f"({number(context.number('epsilon'))}) {context.since}",
                effect="and are not normalised",
                remedy="scale them to a size near 1",
            )
        if context.cause == _LAST_BATCH:
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
                yield self.finding(
                    "warning", [Spot(name=name, since_step=event.step) for name in names],
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
    samples: float = threshold(5, LEAVE_ZERO)
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
        spans = [
            span for span in layer_spans(holds, judged, self.samples) if holds[span[0]][judged[span[0]]].mean() > 0.5
        ]
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
        if context.cause == _STOPPED:
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
        at_limit = 0.0
        for layer, name in enumerate(outputs.names):
            module, _, kind = name.rpartition(":")
            into, out = place.get(name), place.get(f"{module}:input")
            if kind == "output" and into is not None and out is not None:
                comes, leaves = 1 - zeros[into][theirs], 1 - zeros[out][theirs]
                stopped = leaves <= (1 - self.saturated) * comes
                if stopped.all() and (share[layer, mine] >= self.saturated).all():
                    alive |= bool((comes > 0).all())  # behind saturated layers all may be zero
                    at_limit = max(at_limit, float(share[layer, mine].max()))
                    spots.append(Spot(name=name, since_step=int(outputs.steps[mine[0]])))
        if alive and len(spots) >= self.layers:
            evidence = {"layers": len(spots), "at_their_limit": at_limit}
            yield self.finding(
                "warning", spots, evidence, until_step=int(outputs.steps[mine[-1]]), collection="activations",
                meaning="These layers are saturated from the start: most outputs are at 1 or -1, where the derivative "
                "is zero, so hardly a gradient comes through.",
                advice="Initialise the layers before them with smaller weights (nn.init.xavier_uniform_), or normalise "
                "what comes in.",
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OutputsAlike(Rule):
    """Outputs all of whose values are one number or neighbours in their format, or whose rows become one vector."""

    id = "outputs-alike"
    says = (
        "all values of a module's output are one number, or the few next to it that their format has; most rows of a "
        "batch get the same output; or the loss is best when all outputs are the same"
    )
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
        """Yield one finding of the values, one of rows, one of the loss."""
        yield from self._rows(view)
        yield from self._pulled(view)
        cells = view.cells("activations")
        if cells is None:
            return
        with np.errstate(all="ignore"):
            count, top = cells.total_of("count"), cells.highest(cells.columns["absmax"])  # as held, with its scale
            mean = np.abs(cells.total_of("sum")) / count
            deviation = np.sqrt(np.maximum(cells.total_of("sumsq") / count - mean**2, 0.0))
            spread = deviation / _spacing(cells, top)
        one_number = mean >= top * (1 - 2.0**-30)  # what adding doubles may lose
        norms = {name for event in facts(view, ONE_VALUE_NORM) for name in listed_in(event, "modules")}
        judged = [":output" in name and name.rpartition(":")[0] not in norms for name in cells.names]
        holds = (one_number | (spread <= self.spread)) & (count >= self.values) & (top > 0) & (cells.nonfinite == 0)
        holds &= np.array(judged)[:, None]
        holds[self._ratios(view, cells, one_number & (top == 1.0))] = False
        spans = [
            (layer, first, last)
            for layer, first, last in layer_spans(holds, cells.recorded, self.samples)
            if not _is_learned(top[layer, first : last + 1], one_number[layer, first : last + 1])
            and not is_constant_aside(view, cells, (layer, first, last))
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

    # Rows that are equal to the last bit, of inputs that differ, have lost what they differ in on their way: behind
    # ReLUs that are zero for all of them there is nothing but the biases.
    def _rows(self, view: View) -> Iterator[Finding]:
        """Yield one finding of the outputs whose rows differed at first, and are most of them one vector at the end."""
        last = {name: event for event in facts(view, _ROWS) for name in listed_in(event, "modules")}
        alike = {name: event for name, event in last.items() if event.details.get("holds") is True}
        # A dropout of nearly all values leaves many rows with nothing but the biases.
        if not alike or any(found.severity == "warning" for found in StructuralZeros().findings(view)):
            return
        spots = [Spot(name=name, since_step=int(str(e.details["since"]))) for name, e in alike.items()]
        first = alike[spots[0].name]
        same, of = (int(str(first.details[key])) for key in ("rows", "of"))
        yield self.finding(
            "warning", spots, {"cause": _ROWS, "same": same, "of": of}, until_step=max(view.last_step, first.step),
            collection="activations",
            meaning=f"{same} of {of} rows of a batch get the same output to the last bit, although their inputs "
            "differ. At first all rows were different: the outputs have collapsed into one vector.",
            advice="Look for hidden values that are zero for nearly all rows, and lower the learning rate. With a "
            "loss that compares the rows of a batch, take all or semi-hard pairs before the hardest ones.",
        )  # fmt: skip

    def _pulled(self, view: View) -> Iterator[Finding]:
        """Yield one finding of a loss that only pulls results of the same weights together."""
        event = first_fact(view, _PULLED)
        if event is not None:
            yield self.finding(
                "warning", (), {"cause": _PULLED}, since_step=event.step, until_step=max(view.last_step, event.step),
                figure="loss_and_scale",
                meaning="The loss only pulls pairs of the model's own outputs together. Both sides come from the same "
                "weights and have gradients, and nothing holds different rows apart: the loss is perfect once all "
                "rows have the same output. Representations collapse so.",
                advice="Detach one side of each pair (a stop-gradient, or a target network without gradients), or add "
                "what holds rows apart: negative pairs, or a term of variance and covariance.",
            )  # fmt: skip

    # A policy's ratio to itself is 1 in the first pass after each draw, and a watch that records every tenth step may
    # see these alone. It is trained through. A table or a factor that rounding has made 1 has no gradient, and in 16
    # bits what has one may be rounded too.
    def _ratios(self, view: View, cells: Cells, is_one: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the FP32 outputs with gradients that are exactly 1 at all samples, of which there are few."""
        passed = view.cells("activation_gradients")
        trained = set(passed.names) - always_zero(passed) if passed is not None else set[str]()
        wide = [name in trained and fmt == "fp32" for name, fmt in zip(cells.names, cells.last_formats, strict=True)]
        seldom = len(cells.steps) > 1 and bool((np.diff(cells.steps) > 1).all())
        return np.array(wide, dtype=bool) & (is_one | ~cells.recorded).all(axis=1) & seldom

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the outputs, their value, and what the format holds there; or what is the same."""
        if context.cause == _PULLED:
            return Phrase(
                what="the loss only pulls outputs of the same weights together, and is perfect once all are the same, "
                f"seen {context.since}",
                remedy="detach one side of each pair",
            )
        if context.cause == _ROWS:
            return Phrase(
                what=f"{context.number('same'):.0f} of {context.number('of'):.0f} rows of {context.place} have been "
                f"one vector {context.since}",
                effect="although their inputs differ",
                remedy="look for hidden values that are zero for all rows, and lower the learning rate",
            )
        near, spacing = context.number("near"), context.number("spacing")
        return Phrase(
            what=f"all outputs of {context.place} have been about {number(near)} {context.since}",
            effect=f"where {context.format} has numbers {number(spacing)} apart",
            remedy="look for rounding or a clamp",
        )


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


def _spacing(cells: Cells, sizes: Floats) -> Floats:
    """Return the distance of neighbouring numbers of each cell's format at a size."""
    lowest = cells.highest(cells.by_format(lambda fmt: fmt.min_exponent).astype(np.float64))
    digits = cells.highest(cells.by_format(lambda fmt: fmt.mantissa_bits).astype(np.float64))
    with np.errstate(all="ignore"):
        return np.exp2(np.maximum(np.floor(np.log2(sizes)), lowest) - digits)


def _is_learned(sizes: Floats, one_number: NDArray[np.bool_]) -> bool:
    """Return whether outputs of one number change from sample to sample, as a learned factor does."""
    return bool(one_number.all()) and len(np.unique(sizes)) > 1
