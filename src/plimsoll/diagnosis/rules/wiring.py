"""Rules of wiring: training loops, optimizers, losses and layers set up wrongly.

These rules read the facts of `plimsoll.watch.steps.wiring`, events of kind "wiring". Where a recorded number can
confirm or refute a fact, it decides.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from plimsoll.diagnosis.finding import Finding, Severity, Spot
from plimsoll.diagnosis.rules.base import EvidenceItem, FindingContext, Phrase, Rule, stretches, threshold
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.diagnosis.tables.trend import exceeds_start
from plimsoll.diagnosis.tables.wiring_facts import (
    FROZEN,
    facts,
    first_fact,
    frozen_weights,
    group_states,
    groups_of,
    listed_in,
    names_of,
    weights_stay,
)
from plimsoll.diagnosis.tables.zero_gradients import erased_samples
from plimsoll.diagnosis.view import View
from plimsoll.runs import Event

_OUTSIDE = "in no optimizer"  # a fact of the watch, and the cause in the evidence
_HIDDEN = (
    "These parameters are in a list or dict of Python's, which torch does not look into: model.parameters() lacks "
    "them, and they keep their initial values."
)
_REGISTER = "Keep modules in nn.ModuleList or nn.ModuleDict, and parameters in nn.ParameterList."
_ERASED = "all zero when the optimizer steps, and not after the backward"
_TOO_EARLY = "unscaled before all of a step are added up"
_TWICE = "divided by the loss scale twice"
_ROUNDED = "rounded away as they are added up"
_CLIPPED = "clipped before all micro-batches are added up"
_CLEARED = "cleared before each micro-batch"
_NOT_CLIPPED = "not clipped: the norm is of no gradient"
_PART = "scaled in part, and unscaled as a whole"
_NEVER_UPDATED = (
    "Batch norms in evaluation mode use running statistics that have never been updated (mean 0, variance 1): they "
    "normalise nothing."
)
_FOLLOW = "frozen norms follow"  # likewise
_FROZEN_NORMS = (
    "These batch norms have frozen weights and are in training mode: their running statistics follow the data, and "
    "what was trained with the old ones no longer fits them."
)
_SINCE = (
    "The model was in training mode before, and is trained in evaluation mode since: dropout is off, and batch norms "
    "use the statistics of before."
)
_SUMS = ("sum", "abssum", "sumsq"), ("abssum", "abssum", "sumsq")  # of weights, and what they are compared with
_PUT_BACK = "weights put back"
_PUT_BACK_AFTER_A_RISE = (
    "All weights are the first ones again, as after a search for the rate: the loss had risen far above its start."
)
_LEFT = "left on frozen weights, which move still"
_OF_SCALE = "those of a loss that depends on the loss scale"
_DIVIDED = "divided by the number of micro-batches twice"
_REMEDIES = {
    _ROUNDED: "accumulate gradients in FP32",
    _CLIPPED: "clip once, after the last backward",
    _CLEARED: "call zero_grad() once a step",
    _NOT_CLIPPED: "give clip_grad_norm_ model.parameters(), after the backward",
    _PART: "scale the sum of all losses",
    _DIVIDED: "divide the loss once",
    _OF_SCALE: "divide gradients by the scale before a loss is made from them",
    _LEFT: "set them to None",
    _TWICE: "let one scaler do it, and nothing else",
    "never set to zero": "call zero_grad() once a step",
    "never unscaled": "call scaler.step(optimizer)",
    _TOO_EARLY: "call scaler.unscale_(optimizer) after the last backward",
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
        fact="clipped nothing",
        cause=_NOT_CLIPPED,
        meaning="clip_grad_norm_ is called in each step and gets no gradient: nothing is clipped.",
        advice="Call it after the backward and before the step. Give it model.parameters(), or a list: a generator "
        "that the optimizer was made from is used up.",
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
class UntrainedParameters(Rule):
    """Parameters that require gradients and are trained by nothing."""

    id = "untrained-parameters"
    says = "parameters that require gradients are in no optimizer, or never get a gradient"
    meaning = "These parameters keep their initial values."
    advice = "Add them to an optimizer, or set requires_grad to False."
    figure = "loss_and_scale"

    parameters: float = threshold(1, "the facts are exact")

    # Parameters that get gradients and are in no optimizer are a warning. Of those that never get a gradient, the ones
    # whose module comes first in the model are a warning: something cuts the model off from the loss. Others are
    # information, since a head or an expert that this training does not use has none either.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield findings on parameters without an optimizer, and without a gradient."""
        joined = names_of(view, "joined")
        for event in facts(view, _OUTSIDE):
            names = [name for name in listed_in(event, "parameters") if name not in joined]
            if len(names) >= self.parameters:
                more = {"meaning": _HIDDEN, "advice": _REGISTER} if any("[" in name for name in names) else {}
                yield self._finding(view, "warning", names, event, cause=_OUTSIDE, **more)
        event = first_fact(view, "without gradient")
        if event is None or first_fact(view, "no gradients") is not None:
            return
        came = names_of(view, "gradient came")
        names = [name for name in listed_in(event, "parameters") if name not in came]
        if len(names) < self.parameters:
            return
        ran, cut = _cut_off(view, names)
        if cut:
            yield self._finding(
                view, "warning", cut, event, cause="no gradient",
                meaning="No gradient reaches the first part of the model, which computes and is not trained.",
                advice="Look between these modules and the loss for detach(), no_grad(), .item() or .data, or for "
                "values turned into integers.",
            )  # fmt: skip
        for some, meaning in (
            (
                [n for n in names if n in ran and n not in cut],
                "These parameters compute, and no gradient reaches them.",
            ),
            ([n for n in names if n not in ran], "These parameters take no part in the training."),
        ):
            if some:
                yield self._finding(
                    view, "info", some, event, cause="no gradient", meaning=meaning,
                    advice="No action is needed if this training does not use them. Leave them out of the optimizer, "
                    "or look for a detach() behind them.",
                )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return which parameters, and why they are not trained."""
        whose = f"parameters of {context.layer}" if context.is_single else f"{len(context.finding.where)} parameters"
        how, remedy = "have had no gradient", "look for a detach() before the loss"
        if context.text("cause") == _OUTSIDE:
            how, remedy = "are in no optimizer", "give them to an optimizer"
        return Phrase(what=f"{whose} {how}, seen {context.since}", remedy=remedy)

    def _finding(self, view: View, severity: Any, names: Sequence[str], event: Event, **more: Any) -> Finding:
        cause = more.pop("cause")
        evidence: dict[str, float | int | str] = {"parameters": len(names), "cause": cause}
        evidence["optimizers"] = str(event.details.get("optimizers", ""))
        spots = [Spot(name=name, since_step=event.step) for name in names]
        return self.finding(severity, spots, evidence, until_step=max(view.last_step, event.step), **more)


@dataclass(frozen=True, kw_only=True)
class OptimizerIdle(Rule):
    """An optimizer that never steps, or whose steps move nothing or are undone."""

    id = "optimizer-idle"
    says = (
        "an optimizer never steps, steps without gradients, has a rate of 0, NaN, Inf or nearly 0, or its updates are "
        "undone"
    )
    meaning = "The weights do not change."
    advice = "Call optimizer.step() after each backward."
    actions = ("stop",)
    figure = "loss_and_scale"

    steps: float = threshold(20, "steps with a rate of 0; the ends of schedules last for one or a few")
    tail: float = threshold(1, "times the steps before it, with a rate below 2^-17 of its highest")
    moved: float = threshold(0.02, "of the weights' size, by which they had moved before they were put back")
    left: float = threshold(0.1, "of that way is left: several times what a few steps do")
    samples: float = threshold(3, "so many before it: weights that have hardly moved are near the first ones")
    risen: float = threshold(2, "times the first loss, before that: no training is lost then")
    values: float = threshold(16, "of a weight, and two such weights: a few numbers may come back by chance")

    # A rate of 0 at the end of a schedule, or at the first step of a warm-up, lasts for fewer steps and is none.
    # Cosines and exponentials end close to 0 too, for a small part of the training: one that lasts as long as all that
    # came before it ran down too soon.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding for each way in which an optimizer is idle."""
        foreign = first_fact(view, "foreign optimizer")
        if foreign is not None and weights_stay(view) is not False:
            yield self._finding(
                view, "alarm", foreign, "its parameters are not the model's",
                "Make the optimizer from model.parameters() after the model was moved, copied or wrapped.",
            )  # fmt: skip
        never = first_fact(view, "never stepped")
        if never is not None and foreign is None:
            yield from self._never(view, never)
        empty = first_fact(view, "no gradients")
        if empty is not None:
            yield self._finding(
                view, "alarm" if weights_stay(view) else "warning", empty, "its parameters have no gradients",
                "Call zero_grad() before the backward and not between it and the step, and look whether the loss "
                "depends on the parameters.",
            )  # fmt: skip
        undone = first_fact(view, "updates undone")
        if undone is not None:
            yield self._finding(
                view, "warning", undone, "its updates are undone after each step",
                "Look for a copy into the model's weights after step(): averaged weights (EMA) that evaluation has put "
                "there must be taken out again.",
                meaning="The weights are overwritten after each step with almost what they were before it.",
            )  # fmt: skip
        yield from self._put_back(view)
        yield from self._rates(view)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the optimizer and why it is idle."""
        cause = context.text("cause")
        if cause == _PUT_BACK:
            return Phrase(
                what=f"the weights are again what they were at step {context.number('as_at_step'):,.0f}, "
                f"{context.since}",
                remedy="look for older weights that were written over them, such as FP32 masters",
            )
        remedy = "look at the schedule" if "rate" in cause else "step it"
        if "undone" in cause:
            remedy = "look for what writes the weights, such as an average of them"
        if "NaN or Inf" in cause:
            remedy = "lower the loss scale, or call locate()"
        return Phrase(what=f"of {context.text('optimizer')}, {cause} {context.since}", remedy=remedy)

    # Sums of weights that were drawn again would be others, by as much as they have moved.
    def _put_back(self, view: View) -> Iterator[Finding]:
        """Yield one finding of weights that jump back to what they were at the first sample."""
        cells = view.cells("weights")
        if cells is None or len(cells.steps) <= self.samples:
            return
        several = np.nan_to_num(cells.total_of("count")).min(axis=1) >= self.values
        sums, size = (np.concatenate([cells.total_of(name)[several] for name in names]) for names in _SUMS)
        if np.count_nonzero(several) < 2:
            return
        with np.errstate(all="ignore"):
            away = np.abs(sums - sums[:, :1])
            moved = np.median(np.nan_to_num(away / size[:, :1], posinf=0.0), axis=0)
            left = np.median(np.nan_to_num(away[:, 1:] / away[:, :-1], nan=np.inf), axis=0)
        jumps = 1 + np.flatnonzero((moved[:-1] >= self.moved) & (left <= self.left))
        jumps = jumps[jumps >= self.samples]
        steps, loss = view.scalar("loss")
        lost = np.array(
            [not exceeds_start(steps, loss, *cells.steps[at - 1 : at + 1], times=self.risen) for at in jumps]
        )
        for was_lost, at in sorted(zip(lost.tolist(), jumps.tolist(), strict=True), key=lambda each: not each[0])[:1]:
            evidence = {"cause": _PUT_BACK, "as_at_step": int(cells.steps[0]), "moved": float(moved[at - 1])}
            yield self.finding(
                "warning" if was_lost else "info", (), evidence, since_step=int(cells.steps[at]),
                until_step=view.last_step, actions=(),
                meaning=f"All weights are at once what they were at step {int(cells.steps[0])} again: something has "
                "overwritten them, and what was learned until then is lost." if was_lost else _PUT_BACK_AFTER_A_RISE,
                advice="If the run was resumed, copy the loaded model into the FP32 master weights, or load these too. "
                "Else look for a load of old weights." if was_lost else "No action is needed if this was meant.",
            )  # fmt: skip

    def _never(self, view: View, event: Event) -> Iterator[Finding]:
        stay = weights_stay(view)
        if event.details.get("nonfinite"):
            yield self._finding(
                view, "alarm", event, "it has never stepped, and its gradients hold NaN or Inf",
                "If the loss is multiplied by a factor (a loss scale by hand), lower it by powers of two until the "
                "gradients are finite, or use a DynamicScaler. Else plimsoll.locate finds the operation.",
                meaning="A script that skips steps with non-finite gradients skips all of them.",
            )  # fmt: skip
        elif event.details.get("others"):
            advice = "Call its step(), or leave it out of the watch."
            yield self._finding(view, "warning", event, "it has never stepped", advice)
        elif stay or (stay is None and view.last_step < 0):
            yield self._finding(view, "alarm", event, "it has never stepped", self.advice)

    def _rates(self, view: View) -> Iterator[Finding]:
        for event, until in group_states(view):
            groups = groups_of(event)
            wild = [group for group in groups if group.get("rate") in ("nan", "inf")]
            still = [group for group in groups if group.get("rate") == "zero"]
            if wild:
                rate = "NaN" if wild[0]["rate"] == "nan" else "Inf"
                yield self._finding(
                    view, "alarm", event, f"its learning rate is {rate}",
                    "Look at the schedule: a division by zero steps or epochs is usual.", until, wild,
                    meaning="Every weight that is stepped with such a rate becomes NaN or Inf.",
                )  # fmt: skip
            elif still and until - event.step + 1 >= self.steps:
                whole = len(still) == event.details.get("of")
                yield self._finding(
                    view, ("alarm" if event.step == 0 else "warning") if whole else "info", event,
                    "its learning rate is 0", "Set a rate, or look at the schedule: it may have run out of steps.",
                    until, still,
                )  # fmt: skip

        yield from self._ran_down(view)

    def _ran_down(self, view: View) -> Iterator[Finding]:
        begun: dict[str, Event] = {}  # since when all groups of an optimizer have had hardly a rate
        named = set[str]()
        for event, until in group_states(view):
            optimizer = str(event.details.get("optimizer", ""))
            tiny = [group for group in groups_of(event) if group.get("rate") == "tiny"]
            if not tiny or len(tiny) != event.details.get("of"):
                begun.pop(optimizer, None)
                continue
            first = begun.setdefault(optimizer, event)
            if optimizer not in named and until - first.step + 1 >= max(self.steps, self.tail * first.step):
                named.add(optimizer)
                yield self._finding(
                    view, "warning", first, "its learning rate has fallen to nearly 0",
                    "Look at the schedule: one that is meant to step once an epoch and steps once a batch runs down "
                    "that soon. So does one with too small a factor.", until, tiny,
                    meaning="The learning rate fell below 2^-17 of its highest value before half of the training was "
                    "done, and moves nothing since.",
                )  # fmt: skip

    def _finding(
        self, view: View, severity: Any, event: Event, cause: str, advice: str, until: int | None = None,
        groups: Sequence[dict[str, Any]] = (), meaning: str | None = None,
    ) -> Finding:  # fmt: skip
        evidence = {"optimizer": str(event.details.get("optimizer", "")), "cause": cause}
        names = [name for group in groups for name in group.get("parameters", ())]
        spots = [Spot(name=name, since_step=event.step, value=0.0) for name in names]
        last = max(view.last_step, event.step) if until is None else until
        return self.finding(
            severity, spots, evidence, since_step=event.step, until_step=last, advice=advice, meaning=meaning,
            actions=self.actions if severity == "alarm" else (),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GradientsMishandled(Rule):
    """Gradients kept, unscaled wrongly, clipped while scaled, erased or rounded away."""

    id = "gradients-mishandled"
    says = (
        "gradients are never set to zero, unscaled never, twice or too early, clipped too early, "
        "not at all, erased, cleared between micro-batches, rounded away in their sum, divided by the micro-batches "
        "twice, scaled in part, left on frozen weights, or of a loss that depends on the scale"
    )
    meaning = "The optimizer gets gradients that are not those of the step's loss."
    advice = "Set gradients to zero once a step. Unscale them before they are clipped or used in a step."
    figure = "loss_and_scale"

    samples: float = threshold(5, "five equal norms are no coincidence")
    tolerance: float = threshold(0.002, "rounding of FP16 gradients, summed")
    rounding: float = threshold(0.001, "of the sum of magnitudes, twice what FP16 can lose of each")
    clear: float = threshold(0.01, "of the sum of magnitudes: smaller sums show nothing")
    follows: float = threshold(0.5, "powers of the scale: 1 where a term has a scaled value, 2 where it has its square")

    # The first three causes are facts. Gradients that were clipped while scaled, and unscaled afterwards, have a norm
    # (or a largest value) that times the loss scale is the same round number at every step. Those that something sets
    # to zero before the step are all zero, while the backward gives the activations others. Those that were unscaled
    # twice have biases whose gradients times the loss scale add up to the gradients of their module's output.
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
                view, "alarm", int(steps[0]), _ERASED, "all gradients", until_step=int(steps[-1]),
                meaning="The backward pass gives gradients, and all of them are zero when the optimizer steps.",
                advice="Look between backward() and step(). Clipping by a norm that is infinite multiplies gradients "
                "by 0: compute the norm in FP32. So does zero_grad() in the wrong place.",
            )  # fmt: skip
        clipped = self._clipped(view)
        if clipped is not None:
            since, what, bound = clipped
            yield self._finding(
                view, "warning", since, f"clipped to {bound:.3g} while scaled", what,
                meaning="Gradients are clipped while they carry the loss scale, which leaves them far too small.",
                advice="Call scaler.unscale_(optimizer) before clipping.",
            )  # fmt: skip
        since = self._unscaled_twice(view)
        if since is not None:
            yield self._finding(
                view, "warning", since, _TWICE, "all gradients",
                meaning="The optimizer gets gradients that are too small by the loss scale.",
                advice="scaler.step(optimizer) divides by the scale: take the division by hand out. If two scalers "
                "share the parameters, use one, and give it the sum of the losses.",
            )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the mistake and its remedy."""
        cause = context.text("cause")
        if cause == _OF_SCALE:
            return Phrase(what=f"the loss depends on the loss scale, seen {context.since}", remedy=_REMEDIES[cause])
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
                details = {**event.details, "format": str(event.details.get("format", "")).upper()}
                yield self._finding(
                    view, known.severity, event.step, known.cause, str(event.details.get("optimizer", "")),
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
        clipped = first_fact(view, "clipped early")
        if clipped is not None:
            yield self._finding(
                view, "warning", clipped.step, _CLIPPED, str(clipped.details.get("optimizer", "")),
                meaning="Gradients are clipped after each micro-batch, and the next one is added to what is left: the "
                "last micro-batches count far more than the first.",
                advice="Clip once a step, after the backward of the last micro-batch.",
            )  # fmt: skip
        if divided is not None:
            by = divided.details.get("by")
            yield self._finding(
                view, "warning", divided.step, _DIVIDED, "all gradients",
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
        for first, _ in stretches(skipped & (fallen < 0), self.samples):
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


@dataclass(frozen=True, kw_only=True)
class DecayLost(Rule):
    """Weight decay of 16-bit weights that rounding undoes at every step."""

    id = "decay-lost"
    says = "weight decay is smaller than the rounding of the 16-bit weights, and has no effect"
    meaning = "Rounding undoes the weight decay at every step, however many steps there are."
    advice = "Keep FP32 master weights (MasterWeights), round stochastically, or compensate (bf16-kahan)."
    figure = "loss_and_scale"
    is_secondary = True

    share: float = threshold(0.01, "of each weight, added up over the steps; less has no effect that matters")

    # Decoupled decay multiplies a weight by 1 - rate x decay. Where that is nearer to 1 than half the distance of
    # neighbouring values, every weight is rounded back to what it was.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of all groups."""
        lost, since, until, names = 0.0, -1, -1, dict[str, None]()
        for event, last in group_states(view):
            groups = [group for group in groups_of(event) if float(group.get("decay") or 0.0) > 0]
            if groups:
                lost += (last - event.step + 1) * max(float(group["decay"]) for group in groups)
                since, until = event.step if since < 0 else since, last
                names |= dict.fromkeys(name for group in groups for name in group.get("parameters", ()))
        if since < 0 or lost < self.share:
            return
        evidence = {"lost_of_each_weight": min(lost, 1.0), "parameters": len(names)}
        spots = [Spot(name=name, since_step=since, value=min(lost, 1.0)) for name in names]
        yield self.finding("warning", spots, evidence, until_step=until, collection="weights")

    def phrase(self, context: FindingContext) -> Phrase:
        """Return where and since when."""
        return Phrase(
            what=f"rounding has undone the weight decay of {context.place} {context.since}",
            remedy="keep FP32 master weights or round stochastically",
        )


@dataclass(frozen=True, kw_only=True)
class AverageStuck(Rule):
    """An average or counter in 16 bits whose steps are smaller than its rounding."""

    id = "average-stuck"
    says = "an average of the weights or a counter, kept in a 16-bit format, moves by less than its rounding"
    meaning = "The average moves by less than half a unit in its last place: it stays where it was."
    advice = "Keep the average in FP32, and cast a copy where 16 bits are needed."
    figure = "loss_and_scale"

    copies: float = threshold(1, "the facts are exact")

    # The fact is exact for averages with a decay of 0.9999 or less: kept in FP32, most of these values would have
    # moved. One that is slower, or that is brought up every few steps only, moves in the end, and is named no more.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding of all averages, one of all counters."""
        counters = [
            (name, event.step) for event in facts(view, "counter stuck") for name in listed_in(event, "parameters")
        ]
        if counters:
            evidence: dict[str, float | int | str] = {
                "counters": len(counters),
                "format": str(facts(view, "counter stuck")[0].details.get("format", "")),
            }
            spots = [Spot(name=name, since_step=step) for name, step in counters]
            yield self.finding(
                "warning", spots, evidence, until_step=max(view.last_step, *(step for _, step in counters)),
                meaning="The counter has reached a value at which adding one more is rounded away: it stays there.",
                advice="Keep counters as integers (torch.long), and exclude them from casts of the model.",
            )  # fmt: skip
        moving = names_of(view, "average moves")
        events = facts(view, "average stuck")
        since = {name: event.step for event in events for name in listed_in(event, "parameters") if name not in moving}
        if not since or len(since) < self.copies:
            return
        evidence = {"copies": len(since), "format": str(events[0].details.get("format", ""))}
        spots = [Spot(name=name, since_step=step) for name, step in since.items()]
        yield self.finding("warning", spots, evidence, until_step=max(view.last_step, *since.values()))

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the format and which averages or counters."""
        if "counters" in context.finding.evidence:
            return Phrase(
                what=f"rounding to {context.format} has stopped the count in {context.place} {context.since}",
                remedy="keep counters as integers",
            )
        whose, was = f"{len(context.finding.where)} averages of weights", "they were"
        if context.is_single:
            whose, was = f"the average {context.layer}", "it was"
        return Phrase(
            what=f"rounding to {context.format} keeps {whose} where {was}, seen {context.since}",
            remedy="keep averages in FP32",
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationMode(Rule):
    """A model that is trained in evaluation mode, batch norms that have seen no data, and frozen ones that see it."""

    id = "evaluation-mode"
    says = (
        "the model is trained in evaluation mode: dropout is off, and batch norms do not normalise by the batch; or "
        "frozen batch norms are in training mode"
    )
    meaning = "In evaluation mode dropout does nothing, and batch norms use statistics of earlier data."
    advice = "Call model.train() before training, and again after each evaluation."
    figure = "loss_and_scale"

    norms: float = threshold(1, "batch norms that have never seen data: the fact is exact")

    # Fine-tuning with frozen batch norms is usual, and a model from a library is often in evaluation mode: a note.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding of frozen batch norms in training mode, one of evaluation mode, the last that is known."""
        following = first_fact(view, "frozen norms follow")
        if following is not None:
            names = listed_in(following, "modules")
            spots = [Spot(name=name, since_step=following.step) for name in names]
            evidence: dict[str, float | int | str] = {"cause": _FOLLOW, "batch_norms": len(names)}
            yield self.finding(
                "warning", spots, evidence, until_step=max(view.last_step, following.step), meaning=_FROZEN_NORMS,
                advice="Call eval() on frozen parts after each model.train(): their batch norms then keep their "
                "statistics.",
            )  # fmt: skip
        events = facts(view, "evaluation mode")
        if not events:
            return
        event = events[-1]
        whole, later = event.details.get("whole") is True, event.details.get("later") is True
        dropouts, norms, initial = (listed_in(event, key) for key in ("dropouts", "norms", "initial"))
        spots = [Spot(name=name, since_step=event.step) for name in initial or norms or dropouts]
        evidence = {
            "dropouts": len(dropouts), "batch_norms": len(norms), "never_updated": len(initial),
        }  # fmt: skip
        meaning = severity = None
        if len(initial) >= max(self.norms, 1):
            severity, meaning = "warning", _NEVER_UPDATED
        elif whole and later:
            severity, meaning = "warning", _SINCE
        yield self.finding(
            severity or "info", spots, evidence, until_step=max(view.last_step, event.step), meaning=meaning
        )

    def phrase(self, context: FindingContext) -> Phrase:
        """Return which part is in evaluation mode."""
        if context.text("cause") == _FOLLOW:
            return Phrase(
                what=f"frozen batch norms ({context.place}) have followed the data {context.since}",
                effect="so what was trained before no longer fits",
                remedy="call eval() on frozen parts",
            )
        of = f" ({context.place})" if context.finding.where else ""
        what = f"the model is trained in evaluation mode{of}, seen {context.since}"
        if context.number("never_updated") > 0:
            what = f"batch norms in evaluation mode{of} normalise nothing, seen {context.since}"
        return Phrase(what=what, remedy="call model.train()")


@dataclass(frozen=True, kw_only=True)
class SymmetricWeights(Rule):
    """Layers whose units began as copies of each other, and stay copies."""

    id = "symmetric-weights"
    says = "the units of a layer have the same weights, and move as one"
    meaning = "The units began with equal weights and get equal gradients: the layer is as good as a single unit."
    advice = "Initialise the layer at random (nn.init.kaiming_normal_). Only its bias may begin at a constant."
    figure = "loss_and_scale"
    items = {"first": EvidenceItem(unit="location")}

    layers: float = threshold(1, "the facts are exact: layers that begin at a constant otherwise differ after a step")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of all such layers."""
        since = {name: event.step for event in facts(view, "equal rows") for name in listed_in(event, "parameters")}
        if not since or len(since) < self.layers:
            return
        spots = [Spot(name=name, since_step=step) for name, step in since.items()]
        evidence = {"first": spots[0].name, "layers": len(spots)}
        until = max(view.last_step, *since.values())
        yield self.finding("warning", spots, evidence, until_step=until, collection="weights")

    def phrase(self, context: FindingContext) -> Phrase:
        """Return which layers."""
        return Phrase(
            what=f"the units of {context.place} are copies of each other and move as one, seen {context.since}",
            remedy="initialise their weights at random",
        )


def _first_two(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _cut_off(view: View, names: Sequence[str]) -> tuple[set[str], list[str]]:
    """Return parameters without gradient: those of modules that ran, and early ones.

    The second are those before all that have one.
    """
    root = str(view.run.manifest.get("root", ""))
    outputs = view.run.tensors.get("activations", ())
    order = {name.rpartition(":")[0]: place for place, name in reversed(list(enumerate(outputs))) if ":output" in name}

    def place(name: str) -> int | None:
        return order.get(name.rpartition(".")[0] or root)

    ran = {name for name in names if place(name) is not None}
    places = [at for name in view.run.tensors.get("gradients", ()) if (at := place(name)) is not None]
    if not places:
        return ran, []
    return ran, [name for name in names if name in ran and cast("int", place(name)) < min(places)]
