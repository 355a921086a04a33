"""What each rule's finding says inside a verdict: what happened and when, what came of it, what to do.

Shorter than a finding's own meaning and advice, and with its numbers: a finding has a page, a verdict has a line.
Every rule has a phrase of its own, which is what makes the file long.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from plimsoll.diagnosis import Finding, View, shown
from plimsoll.diagnosis.estimates.underflow_rate import underflow_rate
from plimsoll.diagnosis.remedies import scale_remedy
from plimsoll.diagnosis.wording import collection_words, how_many, layer_name
from plimsoll.tensor_collections import WITH_LOSS_SCALE
from plimsoll.text import number, percent, power, steps

_LONGEST_NAME = 48  # characters of a layer's name in a sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A finding in a sentence: `what` with since when; `effect` and `remedy` may be left out for want of room."""

    what: str
    effect: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A finding with what its sentence may need beside it."""

    finding: Finding
    view: View
    others: Sequence[Finding]

    @property
    def since(self) -> str:
        """Since when."""
        return f"since step {self.finding.since_step:,}"

    @property
    def at(self) -> str:
        """When it began."""
        return f"at step {self.finding.since_step:,}"

    @property
    def place(self) -> str:
        """The layers: one by its name, several by their number."""
        return self.layer if len(self.finding.where) == 1 else how_many(self.finding)

    @property
    def layer(self) -> str:
        """The worst layer: its module, where the collection says which of its tensors is meant."""
        name = self.finding.where[0]
        if self.finding.collection == "optimizer":
            name = name.rpartition(":")[0] or name
        return short(layer_name(name))

    @property
    def tensors(self) -> str:
        """What kind of tensor."""
        return collection_words(self.finding.collection)

    @property
    def remedy(self) -> str:
        """The run's one remedy of the loss scale."""
        found = scale_remedy(self.view, self.others)
        return "" if found is None else found.action

    def number(self, name: str) -> float:
        """A number of the evidence; NaN where there is none."""
        value = self.finding.evidence.get(name, math.nan)
        return math.nan if isinstance(value, str) else float(value)

    def has(self, rule: str) -> bool:
        """Whether that rule found something as well."""
        return any(f.rule == rule for f in self.others)


def said(finding: Finding, view: View, findings: Sequence[Finding]) -> Said:
    """What a verdict says of a finding; of a rule that is not Plimsoll's, its name and place."""
    case = Case(finding=finding, view=view, others=findings)
    phrase = _PHRASES.get(finding.rule)
    if phrase is not None:
        return phrase(case)
    place = f" in {case.place}" if finding.where else ""
    return Said(what=f"{short(finding.rule)} holds{place} {case.since}")


def short(name: str) -> str:
    """A name as a sentence can carry it."""
    clean = shown(name)
    half = _LONGEST_NAME // 2 - 2
    return clean if len(clean) <= _LONGEST_NAME else f"{clean[:half]}...{clean[-half:]}"


def _scale_collapse(case: Case) -> Said:
    found, back = case.finding, case.number("back_at_step")
    fall = f"from {power(case.number('from'))} to {power(case.number('to'))}"
    what = f"the loss scale fell {fall} at {steps(found.since_step, found.until_step)}"
    if math.isfinite(back):
        return Said(what=f"{what} and was back at step {back:,.0f}", remedy=f"if it happens again, {case.remedy}")
    rates = [underflow_rate(case.view, name, found.since_step) for name in WITH_LOSS_SCALE]
    told = [rate for rate in rates if rate is not None and rate.share >= 0.01]
    shares = " and ".join(rate.words for rate in told).replace(" gradient values and", " and", 1)
    since = f"and {shares} underflowed at {steps(told[0].first_step, told[0].last_step)}" if told else ""
    return Said(what=what, effect=since, remedy=case.remedy)


def _nonfinite(case: Case) -> Said:
    found = case.finding
    if found.evidence.get("cause") == "the loss scale is too high":
        return Said(
            what=f"the loss scale ({power(case.number('scale'))}) is too high, and gradients have overflowed "
            f"{case.since}",
            effect=f"at {int(case.number('steps_with_gradients')):,} steps",
            remedy="lower the loss scale or use a DynamicScaler",
        )
    if found.where:
        layer = case.layer
        back = "go back to the last checkpoint" if found.collection == "weights" else "locate() finds the operation"
        return Said(what=f"{case.tensors} of {layer} held NaN or Inf {case.at}", remedy=back)
    if case.number("steps_with_loss") > 0:
        lasting = found.until_step >= case.view.last_step
        what = f"the loss has been NaN or Inf {case.since}" if lasting else f"the loss was NaN or Inf {case.at}"
        return Said(what=what, remedy="go back to the last checkpoint before it; locate() finds the operation")
    steps = int(case.number("steps_with_gradients"))
    return Said(
        what=f"gradients overflowed at {steps:,} step{'s' if steps != 1 else ''} {case.since}",
        effect="and each was skipped",
        remedy="lower the scale or the learning rate, or use BF16",
    )


def _no_single_scale(case: Case) -> Said:
    evidence = case.finding.evidence
    smallest, largest = (
        shown(layer_name(str(evidence.get(name, ""))))[:30] for name in ("smallest_layer", "largest_layer")
    )
    needs, bears = (str(evidence.get(name, "")).split(" ")[0] for name in ("needs_scale", "bears_scale"))
    return Said(
        what=f"no single loss scale has served all layers {case.since}",
        effect=f"{smallest} needs {needs}, {largest} bears {bears}",
        remedy=case.remedy,
    )


def _underflow_high(case: Case) -> Said:
    lost, fmt = percent(case.number("worst_lost")), str(case.finding.evidence.get("format", "")).upper()
    one = len(case.finding.where) == 1
    share = f"up to {lost} of the {case.tensors} of {case.place}"
    return Said(
        what=f"{fmt} has flushed {share} to zero {case.since}",
        effect="" if one else f"{case.layer} most",
        remedy=_against_underflow(case),
    )


def _against_underflow(case: Case) -> str:
    if case.finding.collection == "activations":
        return "run the layer in BF16" if len(case.finding.where) == 1 else "run these layers in BF16"
    return case.remedy


def _underflow_rising(case: Case) -> Said:
    to, rate = case.number("to"), case.number("per_1000_steps")
    watch = case.finding.evidence.get("outlook", "watch") == "watch"
    remedy = "look again after as many steps as so far" if watch else case.remedy
    return Said(
        what=f"lost parameter gradients of {case.place} have been rising, seen {case.since}, to {percent(to)}",
        effect=f"by {percent(rate / 10)} in 100 steps" if rate < 10 else "",
        remedy=remedy,
    )


def _scale_low(case: Case) -> Said:
    lost, free = percent(case.number("worst_lost")), case.number("free_binades")
    return Said(
        what=f"the loss scale ({power(case.number('scale'))}) has been too low {case.since}: up to {lost} of the "
        f"parameter gradients of {case.place} are lost",
        effect=f"with {free:.0f} binades free" if math.isfinite(free) else "",
        remedy=case.remedy,
    )


def _scale_oscillation(case: Case) -> Said:
    lost = percent(case.number("share"))
    return Said(
        what=f"the loss scale has swung {case.since}, and up to {lost} of steps are lost to it",
        remedy="use a longer growth interval or a SpectralScaler",
    )


def _overflow_ahead(case: Case) -> Said:
    left, steps = case.number("binades_left"), case.number("steps_to_overflow")
    whose = f"{case.tensors} of {case.layer}"
    effect = f"about {steps:,.0f} steps from overflow at this rate" if math.isfinite(steps) else ""
    near = "within a factor of two of" if left < 1 else f"within {left:.1f} binades of"
    return Said(
        what=f"{whose} came {near} the format's largest value {case.at}",
        effect=effect,
        remedy="run the layer in BF16 or clamp it",
    )


def _activation_growth(case: Case) -> Said:
    return Said(
        what=f"{case.tensors} of {_first(case)} have grown steadily, seen {case.since}",
        effect=f"by {case.number('grown_binades'):.0f} binades so far",
        remedy="normalise or clamp them, and keep them out of FP16",
    )


def _saturated_fp8(case: Case) -> Said:
    return Said(
        what=f"{percent(case.number('in_top_binade'))} of the {case.tensors} of {_first(case)} have sat in FP8's top "
        f"binade {case.since}",
        remedy="lower the tensor's scale or use E5M2",
    )


def _cast_saturates(case: Case) -> Said:
    return Said(
        what=_of_cast(case, "saturated", "been beyond"),
        effect="and are cut to its largest value",
        remedy=_rescale(case),
    )


def _cast_flushes(case: Case) -> Said:
    return Said(what=_of_cast(case, "flushed", "been below"), effect="and become zero", remedy=_rescale(case))


def _codes_unused(case: Case) -> Said:
    return Said(what=_of_cast(case, "with_fewer_digits", "had fewer digits than"), remedy=_rescale(case))


def _unit_drift(case: Case) -> Said:
    size, bound = case.number("binades"), case.number("bound")
    return Said(
        what=f"{case.tensors} of {_first(case)} have been at 2^{size:.0f}, out of 2^-{bound:.0f} to 2^{bound:.0f}, "
        f"{case.since}",
        effect="where unit scaling's constant casts do not serve",
        remedy="use fp8-tensor or BF16 for them",
    )


def _of_cast(case: Case, share: str, how: str) -> str:
    fmt = str(case.finding.evidence.get("format", "")).upper()
    return f"up to {percent(case.number(share))} of the {case.tensors} of {_first(case)} have {how} {fmt} {case.since}"


def _rescale(case: Case) -> str:
    serving = case.number("scale_that_serves")
    return f"cast them at {power(serving)}, or use BF16" if math.isfinite(serving) else "use BF16 for them"


def _updates_swallowed(case: Case) -> Said:
    return Said(
        what=f"{percent(case.number('unmoved'))} of the weights of {case.place} have not moved {case.since}",
        remedy="keep FP32 master weights or round stochastically",
    )


def _second_moment_lost(case: Case) -> Said:
    fmt = str(case.finding.evidence.get("format", "")).upper()
    if "lost" not in case.finding.evidence:
        return Said(
            what=f"Adam's epsilon is zero in {fmt}, the format of its second moments, in {case.place} {case.since}",
            remedy="keep the optimizer's state in FP32",
        )
    lost = percent(case.number("lost"))
    return Said(
        what=f"{fmt} has lost up to {lost} of Adam's second moments of {case.place} {case.since}",
        remedy="keep the optimizer's state in FP32",
    )


def _epsilon_dominates(case: Case) -> Said:
    return Said(
        what=f"Adam has divided by its epsilon in {case.place} {case.since}, not by the gradients' size",
        remedy="lower epsilon or raise the gradients",
    )


def _loss_spike(case: Case) -> Said:
    found, times = _course_of_loss(case), case.number("input_times")
    if math.isfinite(times):
        return replace(found, remedy=f"look at the batches there: the model's input is {number(times)} times as large")
    return found


def _course_of_loss(case: Case) -> Said:
    highest, usual, now = (case.number(name) for name in ("highest", "usual", "now"))
    course, spikes = case.finding.evidence.get("course"), case.number("spikes")
    loss = str(case.finding.evidence.get("loss", "the loss"))
    rose = f"{loss} rose from {number(usual)} {case.at} to {number(highest)}"
    if course == "diverged":
        return Said(
            what=f"{rose} and did not come back",
            effect=f"{number(now)} at the end" if now < highest / 2 else "",
            remedy="go back to the checkpoint before it, and lower the learning rate or clip",
        )
    if course == "never learned":
        return Said(
            what=f"{rose} and never fell below where it began ({number(case.number('began_at'))})",
            remedy="start again with a much lower learning rate or a warm-up",
        )
    if course == "came back late":
        until = f"came back only after step {case.finding.until_step:,}"
        return Said(what=f"{rose} and {until}", remedy="look at the batches there")
    if course == "growing spikes":
        what = f"{loss} spiked {spikes:,.0f} times {case.since}, higher each time, to {number(highest)}"
        return Said(what=what, remedy="clip gradients or lower the learning rate")
    return Said(
        what=f"{loss} spiked to {number(highest)} (usually {number(usual)}) {case.at}",
        effect=f"{spikes:,.0f} spikes in all" if spikes > 1 else "",
        remedy="clip gradients or lower the learning rate",
    )


def _loss_unbounded(case: Case) -> Said:
    began, now = number(case.number("began_at")), number(case.number("now"))
    return Said(
        what=f"the loss falls without bound, from {began} to {now}, faster and faster {case.since}",
        remedy="look at its sign, or bound it from below",
    )


def _spike_forerunner(case: Case) -> Said:
    jump, rose = case.number("times_the_usual_update"), case.number("loss_rose_at")
    what = (
        f"an update of {_first(case)} was {jump:,.0f} times its usual size {case.at}"
        if math.isfinite(jump)
        else f"parameter gradients of {_first(case)} outran Adam's second moment {case.at}"
    )
    effect = f"and the loss rose at step {rose:,.0f}" if math.isfinite(rose) else ""
    return Said(what=what, effect=effect, remedy="clip, and check the batches there")


def _dead_layer(case: Case) -> Said:
    kind = "outputs" if case.finding.collection == "activations" else case.tensors
    return Said(
        what=f"all {kind} of {case.place} have been zero {case.since}, and it is no underflow",
        remedy="look at the layer's input and bias, or lower the learning rate",
    )


def _structural_zeros(case: Case) -> Said:
    return Said(what=f"many {case.tensors} of {case.place} are zero in any format {case.since}")


def _distribution_drift(case: Case) -> Said:
    binades = case.number("binades")
    way = "grown" if binades > 0 else "shrunk"
    on = " and go on" if case.finding.severity != "info" else ""
    return Said(
        what=f"{case.tensors} of {_first(case)} have {way} by {abs(binades):.0f} binades{on}, seen {case.since}",
        remedy="normalise, or balance weight decay and learning rate",
    )


def _records_lost(case: Case) -> Said:
    problem = case.finding.evidence.get("first_problem", case.finding.evidence.get("first_event", ""))
    dropped = sum(int(v) for k, v in case.finding.evidence.items() if k.startswith("dropped") and isinstance(v, int))
    lost = (
        f"{dropped:,} record{'s were' if dropped != 1 else ' was'} dropped"
        if dropped
        else "parts of the run are missing or were not measured"
    )
    return Said(
        what=f"{lost} {case.since}, so this is judged by what is left",
        effect=shown(str(problem)) if problem else "",
    )


def _untrained(case: Case) -> Said:
    cause = str(case.finding.evidence.get("cause", ""))
    how = "are in no optimizer" if cause == "in no optimizer" else "have had no gradient"
    remedy = "give them to an optimizer" if cause == "in no optimizer" else "look for a detach() before the loss"
    one = len(case.finding.where) == 1
    whose = f"parameters of {case.layer}" if one else f"{len(case.finding.where)} parameters"
    return Said(what=f"{whose} {how}, seen {case.since}", remedy=remedy)


def _optimizer_idle(case: Case) -> Said:
    who, cause = (shown(str(case.finding.evidence.get(name, ""))) for name in ("optimizer", "cause"))
    if "NaN or Inf" in cause:
        return Said(what=f"of {who}, {cause} {case.since}", remedy="lower the loss scale, or call locate()")
    return Said(what=f"of {who}, {cause} {case.since}", remedy="look at the schedule" if "rate" in cause else "step it")


def _gradients_mishandled(case: Case) -> Said:
    cause = shown(str(case.finding.evidence.get("cause", "")))
    remedies = {"never set to zero": "call zero_grad() once a step", "never unscaled": "call scaler.step(optimizer)"}
    remedy = remedies.get(cause, "call scaler.unscale_(optimizer) before clipping")
    return Said(what=f"gradients are {cause}, seen {case.since}", remedy=remedy)


def _decay_lost(case: Case) -> Said:
    return Said(
        what=f"rounding has undone the weight decay of {case.place} {case.since}",
        remedy="keep FP32 master weights or round stochastically",
    )


def _average_stuck(case: Case) -> Said:
    fmt, one = shown(str(case.finding.evidence.get("format", ""))).upper(), len(case.finding.where) == 1
    whose = f"the average {case.layer}" if one else f"{len(case.finding.where)} averages of weights"
    return Said(
        what=f"rounding to {fmt} keeps {whose} where {'it was' if one else 'they were'}, seen {case.since}",
        remedy="keep averages in FP32",
    )


def _rank_differs(case: Case) -> Said:
    what, rank = str(case.finding.evidence.get("of", "")), case.number("rank")
    have = "has" if what == "loss" else "have"
    if not math.isfinite(rank):
        return Said(what=f"the {what} of the two ranks {have} differed {case.since}", remedy="compare their batches")
    return Said(
        what=f"the {what} of rank {rank:.0f} {have} stayed away from those of the others {case.since}",
        effect=f"{case.number('its'):.3g} and not {case.number('others'):.3g}",
        remedy="compare its data and labels with another rank's",
    )


def _run_ended(case: Case) -> Said:
    by = str(case.finding.evidence.get("ended_by", ""))
    ways = {
        "exception": "an exception ended the training",
        "interrupt": "the training was interrupted",
        "signal": "a signal ended the training",
    }
    return Said(
        what=f"{ways.get(by, 'the process was gone without closing the run')} {case.at}",
        effect=shown(str(case.finding.evidence.get("message", ""))) if by in ways else "",
        remedy="go on from the last checkpoint" if by != "interrupt" else "",
    )


def _first(case: Case) -> str:
    """The layer, or how many there are and the worst of them."""
    return case.layer if len(case.finding.where) == 1 else f"{how_many(case.finding)}, {case.layer} most,"


_PHRASES: dict[str, Callable[[Case], Said]] = {
    "underflow-high": _underflow_high,
    "underflow-rising": _underflow_rising,
    "no-single-scale": _no_single_scale,
    "scale-low": _scale_low,
    "scale-collapse": _scale_collapse,
    "scale-oscillation": _scale_oscillation,
    "overflow-ahead": _overflow_ahead,
    "activation-growth": _activation_growth,
    "saturated-fp8": _saturated_fp8,
    "nonfinite": _nonfinite,
    "cast-saturates": _cast_saturates,
    "cast-flushes": _cast_flushes,
    "codes-unused": _codes_unused,
    "unit-drift": _unit_drift,
    "updates-swallowed": _updates_swallowed,
    "second-moment-lost": _second_moment_lost,
    "epsilon-dominates": _epsilon_dominates,
    "loss-spike": _loss_spike,
    "loss-unbounded": _loss_unbounded,
    "spike-forerunner": _spike_forerunner,
    "dead-layer": _dead_layer,
    "structural-zeros": _structural_zeros,
    "distribution-drift": _distribution_drift,
    "untrained-parameters": _untrained,
    "optimizer-idle": _optimizer_idle,
    "gradients-mishandled": _gradients_mishandled,
    "decay-lost": _decay_lost,
    "average-stuck": _average_stuck,
    "rank-differs": _rank_differs,
    "run-ended": _run_ended,
    "records-lost": _records_lost,
}
