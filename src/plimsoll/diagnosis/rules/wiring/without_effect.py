"""Rules of what has no effect: parameters, optimizers, weight decay and averages that move nothing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from plimsoll.diagnosis.finding import Finding, Spot
from plimsoll.diagnosis.rules.base import EvidenceItem, FindingContext, Phrase, Rule, threshold
from plimsoll.diagnosis.rules.layers.zeros import DeadLayer
from plimsoll.diagnosis.rules.optimizer.updates import NEVER_MOVED, UpdatesSwallowed
from plimsoll.diagnosis.tables.optimizer_states import PutBack, weights_put_back
from plimsoll.diagnosis.tables.trend import exceeds_start
from plimsoll.diagnosis.tables.wiring_facts import (
    facts,
    first_fact,
    group_states,
    groups_of,
    listed_in,
    names_of,
    random_trunk,
    weights_stay,
)
from plimsoll.diagnosis.view import View
from plimsoll.runs import Event

_OUTSIDE = "in no optimizer"  # a fact of the watch, and the cause in the evidence
_FROZEN_DRAW = "frozen as drawn"  # likewise
_HIDDEN = (
    "These parameters are in a list or dict of Python's, which torch does not look into: model.parameters() lacks "
    "them, and they keep their initial values."
)
_REGISTER = "Keep modules in nn.ModuleList or nn.ModuleDict, and parameters in nn.ParameterList."
_OTHERS = "it is called with other parameters"
_INPUTS = "other tensors are learned through it"
_FOREIGN = "its parameters are not the model's"
_NEVER = "it has never stepped"
_NEVER_NONFINITE = "it has never stepped, and its gradients hold NaN or Inf"
_EMPTY = "its parameters have no gradients"
_UNDONE = "its updates are undone after each step"
_STILL = "its learning rate is 0"
_RAN_DOWN = "its learning rate has fallen to nearly 0"
_PUT_BACK = "weights put back"
_RELATIVE = "its steps are a share of weights that are zero"
_BALANCE = "a buffer that balances experts"
_PUT_BACK_AFTER_A_RISE = (
    "All weights are the first ones again, as after a search for the rate: the loss had risen far above its start."
)
_PUT_BACK_BY_ANOTHER = (
    "All weights are the first ones again, and an optimizer begins there: another training of the same model."
)


@dataclass(frozen=True, kw_only=True)
class UntrainedParameters(Rule):
    """Parameters that require gradients and are trained by nothing."""

    id = "untrained-parameters"
    says = (
        "parameters that require gradients are in no optimizer, or never get a gradient; or frozen layers of an "
        "optimizer are as they were drawn"
    )
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
        trunk = random_trunk(view)
        if trunk is not None and trunk.details.get("in_optimizer"):
            names = listed_in(trunk, "modules")
            yield self._finding(
                view, "warning", [f"{name}.weight" for name in names], trunk, cause=_FROZEN_DRAW,
                meaning="These layers are frozen (requires_grad is False), the optimizer has them all the same, and "
                "they hold the random weights that torch drew for them: nothing was loaded into them, and what is "
                "trained sees random features.",
                advice="Set requires_grad to True if they were to be trained by now, or load their weights: "
                "strict=False says nothing of keys that do not match. If random features are meant, leave these layers "
                "out of the optimizer.",
            )  # fmt: skip
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
        trained = {name.rpartition(".")[0] for name in view.run.tensors.get("gradients", ())}
        halves = [n for n in names if n in ran and n not in cut and n.rpartition(".")[0] in trained]
        if halves:
            yield self._finding(
                view, "warning", halves, event, cause="no gradient",
                meaning="These modules compute, and others of their parameters have gradients: what is computed from "
                "these parameters has no graph.",
                advice="Look for what the forward uses in their place: a copy or a cast that was made under no_grad "
                "or kept from an earlier call, detach(), or .data.",
            )  # fmt: skip
        for some, meaning in (
            (
                [n for n in names if n in ran and n not in cut and n not in halves],
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
        if context.cause == _OUTSIDE:
            how, remedy = "are in no optimizer", "give them to an optimizer"
        if context.cause == _FROZEN_DRAW:
            how, remedy = "are frozen as they were drawn at random", "unfreeze them or load their weights"
        return Phrase(what=f"{whose} {how}, seen {context.since}", remedy=remedy)

    def _finding(self, view: View, severity: Any, names: Sequence[str], event: Event, **more: Any) -> Finding:
        cause = more.pop("cause")
        evidence: dict[str, float | int | str] = {"parameters": len(names), "cause": cause}
        evidence["optimizers"] = str(event.details.get("optimizers", ""))
        spots = [Spot(name=name, since_step=event.step) for name in names]
        return self.finding(severity, spots, evidence, until_step=max(view.last_step, event.step), **more)


def _is_cut_off(view: View) -> bool:
    """Return whether activations were recorded and no gradient of any, which would have been recorded too."""
    collect, tensors = view.run.settings.get("collect"), view.run.tensors
    asked = isinstance(collect, Mapping) and "activation_gradients" in collect
    return asked and "activations" in tensors and "activation_gradients" not in tensors


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
        foreign, never = first_fact(view, "foreign optimizer"), first_fact(view, "never stepped")
        others, inputs = first_fact(view, "other parameters"), first_fact(view, "other tensors")
        stay = weights_stay(view) is not False
        if stay and (others is not None or inputs is not None):
            foreign = never = None
        if stay and inputs is not None:
            yield self._finding(
                view, "info", inputs, _INPUTS,
                "No action is needed if inputs, a prompt or an attack are what is learned. requires_grad_(False) on "
                "the model saves the gradients of its weights.",
                meaning="The model's own weights are not trained: gradients pass through it to other tensors.",
            )  # fmt: skip
        if stay and others is not None:
            yield self._finding(
                view, "info", others, _OTHERS,
                "No action is needed if torch.func.functional_call calls it. Activations and their gradients are then "
                "what is recorded of the training.",
                meaning="The model's own weights are not trained: it is called with others, which no module has.",
            )  # fmt: skip
        if stay and foreign is not None:
            yield self._finding(
                view, "alarm", foreign, _FOREIGN,
                "Make the optimizer from model.parameters() after the model was moved, copied or wrapped.",
            )  # fmt: skip
        if never is not None and foreign is None:
            yield from self._never(view, never)
        empty = first_fact(view, "no gradients")
        if empty is not None:
            yield self._finding(
                view, "alarm" if weights_stay(view) else "warning", empty, _EMPTY,
                "No gradient comes into the model: the loss does not depend on it. Look for a detach(), a no_grad() or "
                "a number (item()) between the outputs and the loss."
                if _is_cut_off(view)
                else "Call zero_grad() before the backward and not between it and the step, and look whether the loss "
                "depends on the parameters.",
            )  # fmt: skip
        undone = first_fact(view, "updates undone")
        if undone is not None:
            yield self._finding(
                view, "warning", undone, _UNDONE,
                "Look for a copy into the model's weights after step(): averaged weights (EMA) that evaluation has put "
                "there must be taken out again.",
                meaning="The weights are overwritten after each step with almost what they were before it.",
            )  # fmt: skip
        spots = UpdatesSwallowed().stay_zero(view)
        if spots:
            yield self.finding(
                "warning", spots, {"cause": _RELATIVE}, until_step=view.last_step, collection="updates", actions=(),
                meaning=NEVER_MOVED,
                advice=f"All weights of {spots[0].name} are zero. An optimizer whose steps are a share of the weights' "
                "size (LARS, LAMB, Adafactor with relative steps) never moves these: let them begin at small random "
                "values, or use a ratio of 1 for zero weights.",
            )  # fmt: skip
        yield from self._put_back(view)
        yield from self._rates(view)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the optimizer and why it is idle."""
        cause = context.cause
        if cause == _PUT_BACK:
            return Phrase(
                what=f"the weights are again what they were at step {context.number('as_at_step'):,.0f}, "
                f"{context.since}",
                remedy="look for older weights that were written over them, such as FP32 masters",
            )
        who = context.text("optimizer")
        never = f"{who} stepped" if who.startswith("no optimizer") else f"{who} never stepped"
        # A rate that is another again is one of the past.
        until, is_over = context.finding.until_step, context.finding.until_step < context.view.last_step
        span = context.at if until == context.finding.since_step else f"from {context.at[3:]} to step {until:,}"
        rate = f"the learning rate of {who}" if context.finding.severity != "info" else f"a learning rate of {who}"
        rate += f" {'was' if is_over else 'is'} {cause.rpartition(' ')[2]} {span if is_over else context.since}"
        what, remedy = {
            _OTHERS: ("the model is called with other parameters than its own, which are not recorded", ""),
            _INPUTS: (f"{who} steps on other tensors, learned through the model", ""),
            _FOREIGN: (f"the parameters of {who} are not the model's", "make it from model.parameters()"),
            _NEVER: (never, "call optimizer.step() after each backward"),
            _NEVER_NONFINITE: (
                f"{never}, and the gradients hold NaN or Inf", "lower the loss scale, or call locate()",
            ),
            _EMPTY: (
                f"{who} steps, and its parameters have no gradients, {context.since}",
                "look for a detach() or no_grad() between them and the loss"
                if _is_cut_off(context.view)
                else "call zero_grad() before the backward",
            ),
            _UNDONE: (
                f"the updates of {who} are undone after each step {context.since}",
                "look for what writes the weights, such as an average of them",
            ),
            _STILL: (rate, "set a rate, or look at the schedule"),
            _RELATIVE: (
                f"no weight has moved {context.since}: those of {context.place} are zero, and steps a share of them",
                "let them begin at small random values",
            ),
            _RAN_DOWN: (f"the learning rate of {who} has fallen to nearly 0 {context.since}", "look at the schedule"),
        }.get(cause, (rate, "look at the schedule"))  # fmt: skip
        return Phrase(what=what, remedy=remedy)

    def _put_back(self, view: View) -> Iterator[Finding]:
        """Yield one finding of weights that jump back to what they were at the first sample."""
        for back, note in sorted(self.put_back(view), key=lambda each: bool(each[1]))[:1]:
            evidence = {"cause": _PUT_BACK, "as_at_step": back.as_at, "moved": back.moved}
            yield self.finding(
                "info" if note else "warning", (), evidence, since_step=back.step,
                until_step=view.last_step, actions=(),
                meaning=note or f"All weights are at once what they were at step {back.as_at} again: "
                "something has overwritten them, and what was learned until then is lost.",
                advice="No action is needed if this was meant." if note else
                "If the run was resumed, copy the loaded model into the FP32 master weights, or load these too. Else "
                "look for a load of old weights.",
            )  # fmt: skip

    def put_back(self, view: View) -> list[tuple[PutBack, str]]:
        """Return when weights became the first ones again, each with why that is no loss, or with ""."""
        backs = weights_put_back(view, moved=self.moved, left=self.left, samples=self.samples, values=self.values)
        steps, loss = view.scalar("loss")
        begun = [event.step for event in facts(view, "begun again")]
        notes = [
            _PUT_BACK_BY_ANOTHER
            if any(back.has(step) for step in begun)
            else _PUT_BACK_AFTER_A_RISE
            if exceeds_start(steps, loss, back.before, back.step, times=self.risen)
            else ""
            for back in backs
        ]
        return list(zip(backs, notes, strict=True))

    def _never(self, view: View, event: Event) -> Iterator[Finding]:
        stay = weights_stay(view)
        if event.details.get("nonfinite"):
            yield self._finding(
                view, "alarm", event, _NEVER_NONFINITE,
                "If the loss is multiplied by a factor (a loss scale by hand), lower it by powers of two until the "
                "gradients are finite, or use a DynamicScaler. Else plimsoll.locate finds the operation.",
                meaning="A script that skips steps with non-finite gradients skips all of them.",
            )  # fmt: skip
        elif event.details.get("others"):
            advice = "Call its step(), or leave it out of the watch."
            yield self._finding(view, "warning", event, _NEVER, advice)
        elif stay or (stay is None and view.last_step < 0):
            yield self._finding(view, "alarm", event, _NEVER, self.advice)

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
                    _STILL, "Set a rate, or look at the schedule: it may have run out of steps.",
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
                    view, "warning", first, _RAN_DOWN,
                    "Look at the schedule: one that is meant to step once an epoch and steps once a batch runs down "
                    "that soon. So does one with too small a factor.", until, tiny,
                    meaning="The learning rate fell below 2^-17 of its highest value before half of the training was "
                    "done, and moves nothing since.",
                )  # fmt: skip

    def _finding(
        self, view: View, severity: Any, event: Event, cause: str, advice: str, until: int | None = None,
        groups: Sequence[dict[str, Any]] = (), meaning: str | None = None,
    ) -> Finding:  # fmt: skip
        whose = str(event.details.get("optimizer", ""))
        evidence = ({"optimizer": whose} if whose else {}) | {"cause": cause}
        names = [name for group in groups for name in group.get("parameters", ())]
        spots = [Spot(name=name, since_step=event.step) for name in names]
        last = max(view.last_step, event.step) if until is None else until
        return self.finding(
            severity, spots, evidence, since_step=event.step, until_step=last, advice=advice, meaning=meaning,
            actions=self.actions if severity == "alarm" else (),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DecayLost(Rule):
    """Weight decay of 16-bit weights that rounding undoes at every step."""

    id = "decay-lost"
    says = "weight decay is smaller than the rounding of the 16-bit weights, and has no effect"
    meaning = "Rounding undoes the weight decay at every step, however many steps there are."
    advice = "Keep FP32 master weights (MasterWeights), round stochastically, or compensate (bf16-kahan)."
    figure = "loss_and_scale"
    items = {"lost_of_each_weight": EvidenceItem(unit="share")}
    location_item = EvidenceItem("Lost", "share")
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
    says = (
        "an average of the weights, a counter, or a buffer that balances experts, kept in a 16-bit format, moves by "
        "less than its rounding"
    )
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
        yield from self._balances(view)
        moving = names_of(view, "average moves")
        events = facts(view, "average stuck")
        since = {name: event.step for event in events for name in listed_in(event, "parameters") if name not in moving}
        if not since or len(since) < self.copies:
            return
        evidence = {"copies": len(since), "format": str(events[0].details.get("format", ""))}
        spots = [Spot(name=name, since_step=step) for name, step in since.items()]
        yield self.finding("warning", spots, evidence, until_step=max(view.last_step, *since.values()))

    def _balances(self, view: View) -> Iterator[Finding]:
        """Yield one finding of a buffer that should balance experts and cannot move."""
        event, idle, until = DeadLayer().unbalanced(view)
        if event is None:
            return
        (name,), fmt = listed_in(event, "parameters"), str(event.details.get("format", ""))
        layers = len({spot.name.rpartition(".")[0] for spot in idle})
        evidence = {"cause": _BALANCE, "buffer": name, "format": fmt, "layers": layers}
        yield self.finding(
            "warning", [Spot(name=name, since_step=idle[0].since_step), *idle], evidence, until_step=until,
            meaning=f"Nothing is routed to these layers. {name} is written at each step, and none of its "
            f"{event.details.get('values')} values, one for each expert, changed in {event.details.get('writes')} "
            "steps. If it balances the experts, what is added to it is rounded away: it is less than half the distance "
            f"to the next number of {fmt.upper()}.",
            advice="Keep what balances experts in FP32: leave it out of casts of the model.",
        )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the format and which averages or counters."""
        if context.cause == _BALANCE:
            return Phrase(
                what=f"{context.text('buffer')} is written at each step and never changes in {context.format}",
                effect=f"and nothing is routed to {context.number('layers'):.0f} layers {context.since}",
                remedy="keep it in FP32",
            )
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


def _cut_off(view: View, names: Sequence[str]) -> tuple[set[str], list[str]]:
    """Return parameters without gradient: of modules that ran, and those before all that have one."""
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
