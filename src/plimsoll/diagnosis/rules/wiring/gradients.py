"""Rule of gradients that the training loop mishandles."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from plimsoll.diagnosis.finding import Finding, Severity, Spot
from plimsoll.diagnosis.rules.base import EvidenceItem, FindingContext, Phrase, Rule, find_spans, threshold
from plimsoll.diagnosis.rules.layers.zeros import DeadLayer
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.diagnosis.tables.wiring_facts import FROZEN, first_fact, frozen_weights, listed_in, optimizer_settings
from plimsoll.diagnosis.tables.zero_gradients import erased_samples
from plimsoll.diagnosis.view import View
from plimsoll.runs import Event
from plimsoll.text import number

_ERASED = "all zero when the optimizer steps, and not after the backward"
_OF_LAYERS = "zero when the optimizer steps, and not in the backward"
_OF_ONE = "clipped to those of one tensor"
_SEVERAL = 4  # tensors: of two or three one may well be the rest's multiple
_TOO_EARLY = "unscaled before all of a step are added up"
_AT_SOME = "set to zero at some steps only"
_SCALED_TWICE = "those of a loss that was scaled twice"
_TWICE = "divided by the loss scale twice"
_ROUNDED = "rounded away as they are added up"
_CLIPPED = "clipped before all micro-batches are added up"
_CLEARED = "cleared before each micro-batch"
_NOT_CLIPPED = "not clipped: the norm is of no gradient"
_PART = "scaled in part, and unscaled as a whole"
_LEFT = "left on frozen weights, which move still"
_DECAYED = "given weight decay while they carry the loss scale"
_OF_SCALE = "those of a loss that depends on the loss scale"
_DIVIDED = "divided by the number of micro-batches twice"
_REMEDIES = {
    _ROUNDED: "accumulate gradients in FP32",
    _CLIPPED: "clip once, after the last backward",
    _CLEARED: "call zero_grad() once a step",
    _NOT_CLIPPED: "give clip_grad_norm_ model.parameters(), after the backward",
    _PART: "scale the sum of all losses",
    _DIVIDED: "divide the loss once",
    _DECAYED: "call scaler.unscale_(optimizer) before it is added",
    _OF_SCALE: "divide gradients by the scale before a loss is made from them",
    _LEFT: "set them to None",
    _AT_SOME: "call zero_grad() at each step",
    _SCALED_TWICE: "call scaler.scale(loss) once",
    _TWICE: "let one scaler do it, and nothing else",
    "never set to zero": "call zero_grad() once a step",
    "never unscaled": "call scaler.step(optimizer)",
    _TOO_EARLY: "call scaler.unscale_(optimizer) after the last backward",
    _OF_LAYERS: "look at what quantises, casts or masks them in between",
    _ERASED: "compute the norm for clipping in FP32, and look for a misplaced zero_grad()",
}


class _Mishandled(NamedTuple):
    """A fact of the watch on gradients, and what a finding of it says."""

    fact: str
    cause: str
    meaning: str
    advice: str
    severity: Severity = "warning"


_MISHANDLED = (
    _Mishandled(
        fact="carried over",
        cause="never set to zero",
        meaning="Gradients are added to those of all steps before: the optimizer follows their sum.",
        advice="Call optimizer.zero_grad() once a step, before the backward.",
    ),
    _Mishandled(
        fact="carried at some steps",
        cause=_AT_SOME,
        meaning="At {carried} of {of} steps that were looked at, gradients were added to those of the step before: the "
        "optimizer steps on some batches twice.",
        advice="Call optimizer.zero_grad() after each optimizer.step(). To add up N micro-batches, step once in N "
        "backwards, where gradients are set to zero.",
    ),
    _Mishandled(
        fact="scaled twice",
        cause=_SCALED_TWICE,
        meaning="scaler.scale() gets a loss that it has scaled before. Gradients carry the scale twice and are divided "
        "by it once: they overflow early, and are too large by the scale.",
        advice="Call scaler.scale(loss) once, at the backward.",
        severity="alarm",
    ),
    _Mishandled(
        fact="not unscaled",
        cause="never unscaled",
        meaning="The optimizer gets gradients times the loss scale.",
        advice="Call scaler.step(optimizer) in place of optimizer.step().",
        severity="alarm",
    ),
    _Mishandled(
        fact="added after unscaling",
        cause=_TOO_EARLY,
        meaning="Gradients that carry the loss scale are added to those that were unscaled already: their sum is far "
        "too large, and in no proportion.",
        advice="Call scaler.unscale_(optimizer) once a step, after the backward of the last micro-batch.",
        severity="alarm",
    ),
    _Mishandled(
        fact="cleared between",
        cause=_CLEARED,
        meaning="The loss is divided by {backwards} micro-batches, and gradients are cleared before each: a step "
        "follows the last one alone, and a part of it.",
        advice="Call zero_grad() once a step, before the first micro-batch or after the optimizer's step.",
    ),
    _Mishandled(
        fact="clipped early",
        cause=_CLIPPED,
        meaning="Gradients are clipped after each micro-batch, and the next one is added to what is left: the last "
        "micro-batches count far more than the first.",
        advice="Clip once a step, after the backward of the last micro-batch.",
    ),
    _Mishandled(
        fact="clipped nothing",
        cause=_NOT_CLIPPED,
        meaning="clip_grad_norm_ is called in each step and gets no gradient: nothing is clipped.",
        advice="Call it after the backward and before the step. Give it model.parameters(), or a list: a generator "
        "that the optimizer was made from is used up.",
    ),
    _Mishandled(
        fact="decay scaled",
        cause=_DECAYED,
        meaning="The script adds {decay:g} times the weights to gradients that still carry the loss scale of "
        "{scale:,.0f}. The scaler divides both by it: a weight decay of {left:.1e} is left.",
        advice="Call scaler.unscale_(optimizer) before the decay is added, or use the optimizer's weight_decay.",
    ),
    _Mishandled(
        fact="sum rounded",
        cause=_ROUNDED,
        meaning="Gradients of {backwards} micro-batches are accumulated in {format}: late ones are less than half a "
        "unit in the last place of the sum, and are rounded away.",
        advice="Accumulate gradients in FP32 (FP32 weights with autocast, or a buffer of your own), or take fewer and "
        "larger micro-batches.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class GradientsMishandled(Rule):
    """Gradients kept, unscaled wrongly, clipped while scaled, erased or rounded away."""

    id = "gradients-mishandled"
    says = (
        "gradients are never set to zero, or not at each step, unscaled never, twice or too early, clipped too early, "
        "not at all, erased, cleared between micro-batches, rounded away in their sum, divided by the micro-batches "
        "twice, scaled twice or in part, given weight decay while scaled, left on frozen weights, clipped until one "
        "tensor has all of them, or of a loss that depends on the scale"
    )
    meaning = "The optimizer gets gradients that are not those of the step's loss."
    advice = "Set gradients to zero once a step. Unscale them before they are clipped or used in a step."
    figure = "loss_and_scale"
    items = {
        "cause": EvidenceItem("Gradients"),
        "clipped_to": EvidenceItem("Norm after clipping"),
        "rest": EvidenceItem("Norm of all others, as a share"),
    }

    samples: float = threshold(5, "five equal norms are no coincidence")
    tolerance: float = threshold(0.002, "rounding of FP16 gradients, summed")
    rounding: float = threshold(0.001, "of the sum of magnitudes, twice what FP16 can lose of each")
    clear: float = threshold(0.01, "of the sum of magnitudes: smaller sums show nothing")
    rest: float = threshold(0.003, "of the norm of all gradients is that of all tensors but one: a step on one tensor")
    most: float = threshold(0.9, "of the samples; without them a bound that is met by chance")
    follows: float = threshold(0.5, "powers of the scale: 1 where a term has a scaled value, 2 where it has its square")

    # Most causes are facts, the others are read from numbers. Gradients that were clipped while scaled, and unscaled
    # afterwards, have a norm (or a largest value) that times the loss scale is the same round number at every step.
    # Those that something sets to zero before the step are all zero, while the backward gives the activations others.
    # Those that were unscaled twice have biases whose gradients times the loss scale add up to the gradients of their
    # module's output.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding for each."""
        yield from self._of_facts(view)
        moving = frozen_weights(view, moving=True)
        if moving:
            event = cast("Event", first_fact(view, FROZEN))
            listed = _first_two(moving)
            yield self._finding(
                view, "warning", event.step, _LEFT, listed,
                meaning=f"{listed} are frozen, and have gradients of zero instead of none. So the optimizer steps on "
                "them, and weight decay and momentum move them.",
                advice="Set the gradients of what is frozen to None (zero_grad(set_to_none=True)), or leave it out of "
                "the optimizer.",
            )  # fmt: skip
        yield from self._of_losses(view)
        yield from self._of_scale(view)
        cells = view.cells("gradients")
        # A norm for clipping that overflows in FP16 is infinite, and clipping then multiplies all gradients by 0.
        steps = np.zeros(0, dtype=np.int64) if cells is None else cells.steps[erased_samples(view)]
        if len(steps) >= self.samples:
            yield self._finding(
                view, "alarm", int(steps[0]), _ERASED, "all parameters", until_step=int(steps[-1]),
                meaning="The backward pass gives gradients, and all of them are zero when the optimizer steps.",
                advice="Look between backward() and step(). Clipping by a norm that is infinite multiplies gradients "
                "by 0: compute the norm in FP32. So does zero_grad() in the wrong place.",
            )  # fmt: skip
        lost, until = DeadLayer().lost_after_backward(view)
        if lost:
            yield self.finding(
                "warning", lost, {"cause": _OF_LAYERS, "layers": len(lost)}, until_step=until, collection="gradients",
                meaning="Gradients come to the outputs of these layers, and those of their parameters are all zero "
                "when the optimizer steps: something in between sets or rounds them to zero.",
                advice="Look between the backward and the step: a quantisation or cast with one scale for all "
                "gradients, whose step a few large ones set, a mask, or a hook that sends them to other processes.",
            )  # fmt: skip
        clipped = self._clipped(view)
        if clipped is not None:
            since, what, bound = clipped
            yield self._finding(
                view, "warning", since, f"clipped to {bound:.3g} while scaled", what,
                meaning="Gradients are clipped while they carry the loss scale, which leaves them far too small.",
                advice="Call scaler.unscale_(optimizer) before clipping.",
            )  # fmt: skip
        yield from self._takes_all(view)
        since = self._unscaled_twice(view)
        if since is not None:
            yield self._finding(
                view, "warning", since, _TWICE, "all parameters",
                meaning="The optimizer gets gradients that are too small by the loss scale.",
                advice="scaler.step(optimizer) divides by the scale: take the division by hand out. If two scalers "
                "share the parameters, use one, and give it the sum of the losses.",
            )  # fmt: skip

    # Adam divides each gradient by its own size, so what clipping takes from all alike does it no harm.
    def _takes_all(self, view: View) -> Iterator[Finding]:
        """Yield one finding of gradients that are clipped at each sample until one tensor has nearly all of them."""
        cells, optimizers = view.cells("gradients"), optimizer_settings(view)
        if cells is None or len(cells.names) < _SEVERAL or not all(each.get("name") == "SGD" for each in optimizers):
            return
        squares = cells.rms**2 * cells.finite
        known = np.isfinite(squares).all(axis=0)
        norms = np.sqrt(squares[:, known].sum(axis=0))
        if len(norms) < self.samples or not optimizers:
            return
        bound = float(np.median(norms))
        one = int(np.argmax(squares[:, known].sum(axis=1)))
        rest = np.sqrt(np.delete(squares[:, known], one, axis=0).sum(axis=0))
        holds = (np.abs(norms - bound) <= self.tolerance * bound) & (rest <= self.rest * norms)
        if bound > 0 and np.count_nonzero(holds) >= self.most * len(norms):
            name, share = cells.names[one], float(np.median(rest[holds])) / bound
            since = int(cells.steps[known][np.flatnonzero(holds)[0]])
            yield self.finding(
                "warning", [Spot(name=name, since_step=since)], {"cause": _OF_ONE, "clipped_to": bound, "rest": share},
                until_step=view.last_step, collection="gradients",
                meaning=f"At nearly all samples gradients are clipped to a norm of {number(bound)}, and those of "
                f"{name} are all of it: what is left of all others together has {number(share)} of that norm, so these "
                "weights hardly move.",
                advice=f"Look why gradients of {name} are so much larger: a norm behind it divides by the size of its "
                "values, so let these begin near 1. Or clip it by itself.",
            )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the mistake and its remedy."""
        cause = context.cause
        if cause == _OF_ONE:
            return Phrase(
                what=f"gradients are clipped to a norm of {number(context.number('clipped_to'))}, and {context.place} "
                f"has nearly all of it {context.since}",
                effect="so all other weights hardly move",
                remedy="look why its gradients are so large, or clip them by themselves",
            )
        if cause == _OF_SCALE:
            return Phrase(what=f"the loss depends on the loss scale, seen {context.since}", remedy=_REMEDIES[cause])
        if cause == _SCALED_TWICE:
            return Phrase(what=f"the loss is scaled twice, seen {context.since}", remedy=_REMEDIES[cause])
        if cause == _OF_LAYERS:
            what = f"all {context.tensors} of {context.place} are {cause}, seen {context.since}"
            return Phrase(what=what, remedy=_REMEDIES[cause])
        remedy = _REMEDIES.get(cause, "call scaler.unscale_(optimizer) before clipping")
        return Phrase(what=f"gradients are {cause}, seen {context.since}", remedy=remedy)

    def _finding(self, view: View, severity: Any, since: int, cause: str, whose: str, **more: Any) -> Finding:
        evidence = {"cause": cause, "of": whose}
        until = more.pop("until_step", max(view.last_step, since))
        return self.finding(severity, (), evidence, since_step=since, until_step=until, **more)

    def _of_facts(self, view: View) -> Iterator[Finding]:
        for known in _MISHANDLED:
            event = first_fact(view, known.fact)
            if event is not None:
                whose = str(event.details.get("optimizer") or "all parameters")
                details = {**event.details, "format": str(event.details.get("format", "")).upper()}
                yield self._finding(
                    view, known.severity, event.step, known.cause, whose,
                    meaning=known.meaning.format(**details), advice=known.advice,
                )  # fmt: skip

    def _of_losses(self, view: View) -> Iterator[Finding]:
        """Yield what the graph behind the loss shows."""
        part, divided = first_fact(view, "part unscaled"), first_fact(view, "divided twice")
        if part is not None:
            listed = _first_two(listed_in(part, "parameters"))
            yield self._finding(
                view, "alarm", part.step, _PART, listed,
                meaning=f"One term of the loss was added without the loss scale. The gradients of {listed} come from "
                "it alone: they are divided by a scale that they never had, and hardly move these weights.",
                advice="Give the scaler the sum of all losses: scaler.scale(first + second).backward().",
            )  # fmt: skip
        if divided is not None:
            by = divided.details.get("by")
            yield self._finding(
                view, "warning", divided.step, _DIVIDED, "all parameters",
                meaning=f"The loss is divided by {by} twice, and a step has {by} micro-batches: gradients are {by} "
                "times too small.",
                advice="Divide the loss of a micro-batch once. prepare(accumulate=...), Accelerate and Lightning "
                "divide by themselves.",
            )  # fmt: skip

    # A step that a scaler skips leaves the weights as they are: only the batch and the scale differ at the next.
    def _of_scale(self, view: View) -> Iterator[Finding]:
        """Yield one finding of losses that fall with the scale while no step is made."""
        (steps, loss), (known, scale) = view.scalar("loss"), view.scalar("scale")
        both, mine, theirs = np.intersect1d(steps, known, return_indices=True)
        loss, scale = np.abs(loss[mine]), scale[theirs]
        with np.errstate(all="ignore"):
            lower, fallen = np.diff(np.log2(scale)), np.diff(np.log2(loss))
        skipped = (np.diff(both) == 1) & (lower < 0) & np.isin(both[:-1], sorted(view.skips)) & np.isfinite(fallen)
        for first, _ in find_spans(skipped & (fallen < 0), self.samples):
            last = first + int(self.samples) - 1  # judged once, for good
            power = float(fallen[first : last + 1].sum() / lower[first : last + 1].sum())
            if power >= self.follows:
                yield self._finding(
                    view, "alarm", int(both[first]), _OF_SCALE, f"the scale to the power of {power:.1f}",
                    meaning="The loss depends on the loss scale: while steps were skipped and no weight changed, it "
                    f"fell from {loss[first]:.3g} to {loss[last + 1]:.3g} as the scale fell. One of its terms is made "
                    "from values that still carry the scale.",
                    advice="If the loss has a penalty of gradients, divide them by scaler.get_scale() first.",
                )  # fmt: skip
                return

    def _clipped(self, view: View) -> tuple[int, str, float] | None:
        """Since when, what of the gradients, and the bound that they were clipped to."""
        cells = view.cells("gradients")
        if cells is None or not view.scaled:
            return None
        whole = cells.recorded.all(axis=0) & (np.nansum(cells.nonfinite, axis=0) == 0)
        steps = cells.steps[whole]
        if len(steps) < self.samples:
            return None
        scales = view.scale_at(steps)
        norms = np.sqrt(np.nansum(cells.norm[:, whole] ** 2, axis=0))
        largest = np.nan_to_num(cells.true_absmax[:, whole]).max(axis=0)
        first = slice(0, int(self.samples))  # judged once, for good
        for what, values in (("norm", norms), ("largest value", largest)):
            bound = self._round_constant((values * scales)[first])
            if bound is not None and self._round_constant(values[first]) is None:
                return int(steps[first][-1]), what, bound
        return None

    def _unscaled_twice(self, view: View) -> int | None:
        """Return the first step of biases' gradients too small by the loss scale, or None.

        A bias is added to its module's output, so both gradients have one sum, whatever the batch is.
        """
        gradients, passed = view.cells("gradients"), view.cells("activation_gradients")
        if gradients is None or passed is None or not view.scaled:
            return None
        steps, mine, theirs = np.intersect1d(gradients.steps, passed.steps, return_indices=True)
        places = {name: place for place, name in enumerate(passed.names)}
        pairs = [
            (place, places[output])
            for place, name in enumerate(gradients.names)
            if name.endswith(".bias") and (output := f"{name.removesuffix('.bias')}:output") in places
        ]
        if not pairs or len(steps) < self.samples:
            return None
        first, of_outputs = slice(0, int(self.samples)), [place for _, place in pairs]  # judged once, for good

        def sums(cells: Cells, column: str, rows: list[int], at: Ints) -> Floats:
            return cells.total(cells.columns[column] / cells.scale)[rows][:, at][:, first]

        biases = sums(gradients, "sum", [place for place, _ in pairs], mine)
        outputs, sizes = (sums(passed, column, of_outputs, theirs) for column in ("sum", "abssum"))
        scales = view.scale_at(steps[first])
        clear = np.abs(outputs) > self.clear * sizes
        near = np.abs(biases * scales - outputs) <= self.rounding * sizes
        twice = clear.any(axis=0).all() and near[clear].all() and (scales >= 2).all()
        return int(steps[first][-1]) if twice else None

    def _round_constant(self, values: Floats) -> float | None:
        """The number of at most two digits that all values are, within the tolerance."""
        bound = float(f"{float(np.median(values)):.1e}")
        near = bound > 0 and bool((np.abs(values / bound - 1) <= self.tolerance).all())
        return bound if near else None


def _first_two(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
