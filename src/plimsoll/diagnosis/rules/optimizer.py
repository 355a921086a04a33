"""Rules of the optimizer: lost updates, Adam's second moments and epsilon, and values kept narrow."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from plimsoll.diagnosis.estimates.element_counts import Populations
from plimsoll.diagnosis.estimates.format_losses import Modules
from plimsoll.diagnosis.finding import Finding, Severity, Spot
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
from plimsoll.diagnosis.tables.optimizer_states import (
    SECOND_MOMENTS,
    TOWARD_ZERO,
    added_decay,
    lost_first_moments,
    lost_second_moments,
    recorded_epsilon,
    spared_updates,
    without_a_zero,
)
from plimsoll.diagnosis.tables.rounded_numbers import rounded_whole_numbers, spacing, stalled_sums
from plimsoll.diagnosis.tables.wiring_facts import (
    ROUNDED_GRADIENTS,
    facts,
    listed_in,
    weights_stay,
    with_epsilon_of_zero,
)
from plimsoll.diagnosis.view import View
from plimsoll.formats import get_element
from plimsoll.runs import Event
from plimsoll.spectrum.fit.population import ordinal
from plimsoll.text import number, percent

_SAMPLES = "not reported from a single sample"
_SOME = 5  # losses
_MOST = 1e6  # times the size of a gradient
_DEFAULT = 1e-8  # epsilon of torch's Adam
_UNMOVED = "These weights were the same after the step: their updates were zero, or smaller than their rounding."
_NEVER_MOVED = "No weight has moved since the first step, although gradients and the learning rate are not zero."
_NEAR_ZERO = "No action is needed if the learning rate is near zero."
_LOOK = "Look at what the optimizer adds: a rate that is far too small, or a state that is zero in its format."
_ROUNDED_STATE = "a state that is rounded"
_UNEVEN_CODES = (
    "Keep the second moments in FP32, or in codes that have an exponent. Evenly spaced ones hold no small values: the "
    "root of a value below half a step is zero, and the update explodes."
)
_AGAIN, _NO_METRIC = "begins again", "metric undefined"
_NO_ZERO = "first moments without a zero"


@dataclass(frozen=True, kw_only=True)
class UpdatesSwallowed(Rule):
    """Weights that were to move and are the same after the step."""

    id = "updates-swallowed"
    says = "weights do not change although their gradients are not zero"
    meaning = "Updates are smaller than the rounding of the weights they are added to, so they are lost at each step."
    advice = "Keep FP32 master weights (MasterWeights), round stochastically, or compensate (bf16-kahan)."
    actions = ("stop",)
    figure = "updates"
    items = {"unmoved": EvidenceItem(unit="share", of_worst=" unmoved")}
    location_item = EvidenceItem("Unmoved", "share")
    # Of FP32 weights it is a note, and still the first thing to look at where a run does not learn.
    is_noted = True

    share: float = threshold(0.5, "N3: an update below 2^-12 of its weight is lost in FP16, below 2^-9 in BF16")
    samples: float = threshold(3, "the first steps of a warm-up move little")

    # An update below half the distance to a weight's neighbour is rounded away. Of weights in 16 bits that is an alarm,
    # unless what is cut off is kept (masters, a compensation), or made up for by rounding at random. Weights in FP32
    # are information: their updates vanish where the learning rate does. If none has ever moved, it is a warning.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding for weights in 16 bits or fewer, one for others, one for rounding toward zero."""
        cells = view.cells("updates")
        if cells is None:
            return
        for event in [e for e in view.events if e.kind == "update" and e.details.get("update") == TOWARD_ZERO][:1]:
            spots = [Spot(name=name, since_step=event.step) for name in listed_in(event, "parameters")]
            yield self.finding(
                "alarm", spots, {"cause": TOWARD_ZERO, "layers": len(spots)}, until_step=view.last_step,
                collection="updates",
                meaning="Each step rounds these weights toward zero, however small the update is: they shrink, and "
                "updates away from zero are lost.",
                advice="Round to nearest, or by chance: add random bits below the last place before they are cut off.",
            )  # fmt: skip
        moments, _ = KeptNarrow().first_moments_flushed(view)
        flushed = {spot.name.rpartition(":")[0] for spot in moments}  # their cause is known
        with np.errstate(all="ignore"):
            shares = cells.total_of("unmoved") / cells.total_of("pushed")
        narrow = np.array([fmt.bits <= 16 for fmt in (get_element(name, "diagnose") for name in cells.formats)])
        is_narrow = cells.total(narrow[cells.format].astype(np.int64)) > 0
        spared = spared_updates(view, cells) | (
            cells.total_of("nans") > 0
        )  # a NaN plus anything is that NaN: no rounding
        spared |= np.array([name in flushed for name in cells.names])[:, None]
        for narrowed in (True, False):
            mine = ~np.isnan(shares) & (is_narrow == narrowed) & ~spared
            spans = spells(shares > self.share, mine, self.samples)
            if spans:
                spots = worst(cells, spans, shares)
                evidence = {"worst": spots[0].name, "unmoved": spots[0].value, "layers": len(spots)}
                severity, meaning, advice = ("alarm", None, None) if narrowed else ("info", _UNMOVED, _NEAR_ZERO)
                if not narrowed and len(spots) == len(cells.names) and weights_stay(view):
                    severity, meaning, advice = "warning", _NEVER_MOVED, _LOOK
                yield self.finding(
                    severity, spots, evidence, until_step=last_of(cells, spans), collection="updates",
                    meaning=meaning, advice=advice, actions=None if narrowed else (),
                )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the largest share of weights that a step left as they were, where, and since when."""
        if context.text("cause") == TOWARD_ZERO:
            return Phrase(
                what=f"each step rounds the weights of {context.place} toward zero {context.since}",
                remedy="round to nearest or by chance",
            )
        if context.finding.severity == "warning":
            what, remedy = f"no weight of {context.place} has moved {context.since}", "look at what the optimizer adds"
            return Phrase(what=what, remedy=remedy)
        return Phrase(
            what=f"steps leave up to {percent(context.number('unmoved'))} of the weights of {context.place} unchanged "
            f"{context.since}",
            remedy="keep FP32 master weights or round stochastically",
        )


@dataclass(frozen=True, kw_only=True)
class SecondMomentLost(Rule):
    """Second moments flushed to zero where the first moments are not (T8)."""

    id = "second-moment-lost"
    says = "Adam's second moments are zero where the first ones are not, or epsilon is zero in their format"
    meaning = "The update divides by a root that is zero: the next small gradient makes it explode."
    advice = (
        "Keep the optimizer's state in FP32. A larger epsilon only hides the problem: Adam is then no longer adaptive."
    )
    actions = ("stop",)
    figure = "spectrogram"
    items = {"lost": EvidenceItem(unit="share")}
    location_item = EvidenceItem("Lost", "share")

    share: float = threshold(0.05, "of the values whose first moment is not zero")
    epsilon: float = threshold(1e-8, "T8: the default of Adam")
    samples: float = threshold(2, "the first step's moments may be of an empty gradient")
    near: float = threshold(2.0**16, "times the format's smallest value: it cannot have lost what is so far above it")

    # Adam divides by the root of second moments plus an epsilon, and 1e-8 is zero in FP16 too: the division is by zero,
    # or by whatever was put in epsilon's place.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the optimizer's state."""
        cells = view.cells("optimizer")
        certain = with_epsilon_of_zero(view)
        spans: list[tuple[int, int, int]] = []
        shares = np.empty((0, 0))
        if cells is not None:
            shares = lost_second_moments(cells)
            shares[[cells.names.index(name) for name in without_a_zero(view, cells)]] = np.nan  # they are true zeros
            # Where epsilon is zero too, the division is by zero: one sample is proof. So it is where moments are NaN at
            # all later samples.
            known = ~np.isnan(shares)
            is_broken = np.flatnonzero(known.any(axis=0)).tolist() == [0] and len(cells.steps) > 1
            enough = 1 if certain or is_broken else self.samples
            spans = spells(shares > self.share, known, enough)
        if cells is None or not spans:
            yield from self._certain(view, certain)
            return
        spots = worst(cells, spans, shares)
        rows = np.isin(cells.layer, [layer for layer, *_ in spans])
        places: list[int] = np.unique(cells.format[rows]).tolist()
        formats = [cells.formats[i] for i in places]
        lost = [name for name in formats if get_element(name, "diagnose").smallest_subnormal / 2 >= self.epsilon]
        evidence = {
            "worst": spots[0].name,
            "lost": spots[0].value,
            "format": ", ".join(formats),
            "epsilon_is_zero": "yes" if lost or certain else "no",
        }
        # A format leaves values down to its smallest one. Where none is near it, something else rounds the state.
        smallest = np.array([get_element(name, "diagnose").smallest_subnormal for name in cells.formats])[cells.format]
        least = np.fmin.reduce((cells.columns["absmin"] / smallest)[rows], initial=np.inf)
        if not certain and least > self.near:
            evidence["cause"] = _ROUNDED_STATE
        yield self.finding(
            "alarm", spots, evidence, until_step=last_of(cells, spans), collection="optimizer",
            advice=_UNEVEN_CODES if evidence.get("cause") == _ROUNDED_STATE else None,
        )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the share of lost moments, or that epsilon is zero."""
        share = percent(context.number("lost"))
        if context.text("cause") == _ROUNDED_STATE:
            return Phrase(
                what=f"up to {share} of Adam's second moments of {context.place} have been rounded to zero "
                f"{context.since}",
                remedy="keep them in FP32, or in codes that have an exponent",
            )
        what = f"{context.format} has lost up to {share} of Adam's second moments of"
        if "lost" not in context.finding.evidence:
            what = f"Adam's epsilon is zero in {context.format}, the format of its second moments, in"
        return Phrase(what=f"{what} {context.place} {context.since}", remedy="keep the optimizer's state in FP32")

    def is_fatal(self, finding: Finding, last_step: int) -> bool:  # noqa: ARG002  (every alarm is)
        """Return True: the state's format loses them at every step."""
        return True

    def _certain(self, view: View, events: list[Event]) -> Iterator[Finding]:
        """An epsilon that is zero, where no second moment has been seen to be zero so far."""
        if not events:
            return
        first = events[0]
        listed = cast("list[str]", first.details.get("parameters", []))
        spots = [Spot(name=f"{name}:exp_avg_sq", since_step=first.step, value=0.0) for name in listed]
        evidence = {
            "format": "fp16", "epsilon": float(cast("float", first.details.get("epsilon", 0.0))),
            "epsilon_is_zero": "yes", "parameters": len(listed),
        }  # fmt: skip
        yield self.finding(
            "alarm", spots, evidence, until_step=max(view.last_step, first.step), collection="optimizer",
            meaning="Adam divides by zero where the square of a gradient is zero in FP16, which gives Inf or NaN.",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EpsilonDominates(Rule):
    """Second moments whose root is below epsilon: the update is no longer adaptive."""

    id = "epsilon-dominates"
    says = "most square roots of Adam's second moments are below its epsilon"
    meaning = (
        "Adam divides by epsilon instead of by the size of the gradients: it acts as plain momentum at another rate."
    )
    advice = "Lower epsilon (1e-15 in FP32), or raise the gradients: check whether the loss is divided too often."
    figure = "spectrogram"
    items = {"below_epsilon": EvidenceItem(unit="share", of_worst=" below epsilon")}
    location_item = EvidenceItem("Below epsilon", "share")
    is_secondary = True

    share: float = threshold(0.5, "of a module's nonzero second moments")
    epsilon: float = threshold(_DEFAULT, "T8: the default of Adam; the run's own is used where it is recorded")
    samples: float = threshold(5, "second moments need some steps to fill")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the optimizer's state."""
        cells = view.cells("optimizer")
        if cells is None:
            return
        epsilon = (recorded_epsilon(view) if self.epsilon == _DEFAULT else None) or self.epsilon
        second = np.array([name.rpartition(":")[2] in SECOND_MOMENTS for name in cells.names])
        populations = Populations(cells=cells)
        points = populations.points(ordinal(epsilon**2), 0)
        below = populations.below(points, inclusive=False).estimate
        modules, mine = Modules.of(cells), second[:, None]
        nonzero = modules.total(np.where(mine, cells.total(cells.nonzero), np.nan))
        small = modules.total(np.where(mine, cells.total(below), np.nan))
        with np.errstate(all="ignore"):
            shares = np.where(nonzero > 0, small / nonzero, np.nan)
        spans = spells(shares > self.share, ~np.isnan(shares), self.samples)
        if spans:
            spots = worst(cells, spans, shares, modules.main_layers(cells, among=second))
            evidence = {"worst": spots[0].name, "below_epsilon": spots[0].value, "epsilon": epsilon}
            until = last_of(cells, spans)
            yield self.finding("warning", spots, evidence, until_step=until, collection="optimizer")

    def phrase(self, context: FindingContext) -> Phrase:
        """Return where and since when."""
        return Phrase(
            what=f"Adam has divided by its epsilon in {context.place} {context.since}, not by the gradients' size",
            remedy="lower epsilon or raise the gradients",
        )

    def figure_arguments(self, finding: Finding) -> Mapping[str, Any]:
        """Mark the second moments whose root is epsilon."""
        epsilon = finding.evidence.get("epsilon", 0.0)
        if isinstance(epsilon, str) or not epsilon > 0:
            return {}
        return {"mark": (float(epsilon) ** 2, "roots below epsilon")}


@dataclass(frozen=True, kw_only=True)
class DecayDominates(Rule):
    """Weight decay that an Adam adds to the gradients, where it rivals them."""

    id = "decay-dominates"
    says = "the weight decay that Adam adds to the gradients rivals them, and weights have shrunk"
    meaning = (
        "Adam divides the sum of gradient and decay by its size. Where the decay is the larger part, weights shrink by "
        "up to the learning rate at each step, until the loss's gradient is as large as the decay."
    )
    advice = (
        "Use AdamW, which takes the decay from the weights: 0.01 to 0.1 is meant for it. With Adam a far smaller decay "
        "is usual, such as 1e-4."
    )
    figure = "spectrogram"
    items = {"ratio": EvidenceItem("Decay over gradient"), "size": EvidenceItem("Size since the first sample", "share")}
    location_item = EvidenceItem("Decay over gradient")
    is_secondary = True

    decay: float = threshold(0.01, "usual in AdamW, a hundred times what is usual where it is added to gradients")
    ratio: float = threshold(0.5, "of a gradient's size: where decay holds a weight, the rest is the noise of batches")
    size: float = threshold(0.75, "of the first size: decay that balances the gradients of grown weights does no harm")
    share: float = threshold(0.5, "of the matrices; rows of a table that are seldom seen shrink in sound trainings too")
    samples: float = threshold(5, "that show it; a note unless half of those of the last half of the run do")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the first optimizer that adds decay to gradients."""
        added = added_decay(view)
        if added is None:
            return
        with np.errstate(invalid="ignore"):
            holds = (added.ratio >= self.ratio) & (added.size <= self.size) & (added.decays >= self.decay)[:, None]
        known = ~np.isnan(added.ratio) & ~np.isnan(added.size)
        dominates = known.any(axis=0) & (
            np.count_nonzero(holds, axis=0) >= self.share * np.count_nonzero(known, axis=0)
        )
        places: list[int] = np.flatnonzero(dominates).tolist()
        if len(places) < self.samples:
            return
        first, last = places[0], places[-1]
        since = int(added.steps[first])
        often = holds[:, dominates].mean(axis=1)
        spots: list[Spot] = []
        for i in np.flatnonzero(often >= min(0.5, often.max())).tolist():
            ratio = min(float(np.nanmedian(added.ratio[i, dominates])), _MOST)  # of a gradient of zero
            spots.append(Spot(name=added.names[i], since_step=since, value=ratio))
        spots.sort(key=lambda spot: -spot.value)
        place = added.names.index(spots[0].name)
        evidence = {
            "optimizer": added.optimizer, "decay": float(added.decays[place]), "worst": spots[0].name,
            "ratio": spots[0].value, "size": float(np.nanmedian(added.size[place, dominates])), "layers": len(spots),
        }  # fmt: skip
        lasts = bool(dominates[len(dominates) // 2 :].mean() >= 0.5)
        yield self.finding(
            "warning" if lasts else "info", spots, evidence, until_step=int(added.steps[last]), collection="weights"
        )

    def phrase(self, context: FindingContext) -> Phrase:
        """Return whose decay it is, where, and since when."""
        name, decay = context.text("optimizer"), context.number("decay")
        return Phrase(
            what=f"the weight decay of {decay:g} that {name} adds to the gradients has rivalled them in "
            f"{context.place} {context.since}",
            effect=f"and {context.layer} has shrunk to {percent(context.number('size'))}",
            remedy="use AdamW, or a far smaller decay",
        )


@dataclass(frozen=True, kw_only=True)
class StateCleared(Rule):
    """An optimizer's state that is cleared, or begun again, every few steps."""

    id = "state-cleared"
    says = "the optimizer's state is cleared, or begun again by a new one, before its means are of enough steps"
    meaning = (
        "The optimizer's state is lost every few steps: Adam begins again each time, with updates of the size of the "
        "learning rate, however small the gradients are."
    )
    advice = "Make the optimizer once, before the first epoch, and do not clear its state."
    figure = "loss_and_scale"
    items = {"steps": EvidenceItem("Steps between")}

    times: float = threshold(3, "on end; methods that begin again on purpose leave thousands of steps between")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding of the first optimizer."""
        for event in facts(view, "state cleared")[:1]:
            steps, times = (int(str(event.details.get(name, 0))) for name in ("steps", "times"))
            if times < self.times:
                continue
            evidence = {"optimizer": str(event.details.get("optimizer", "")), "steps": steps}
            yield self.since_event("warning", event, view, evidence)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return how often the state is lost."""
        return Phrase(
            what=f"the state of {context.text('optimizer')} is cleared every {context.number('steps'):,.0f} steps or "
            f"so, seen {context.since}",
            effect="and its updates are as large as at the start each time",
            remedy="make the optimizer once and keep its state",
        )


@dataclass(frozen=True, kw_only=True)
class SchedulePastEnd(Rule):
    """A learning rate that has come to its end and rises again."""

    id = "schedule-past-end"
    says = "a learning rate that a schedule had brought to its end rises again, little by little"
    meaning = "The training goes on past the length of its schedule: a cosine rises again there, up to its peak."
    advice = (
        "Give the schedule the length of the whole training, in what it counts: scheduler.step() once a step counts "
        "steps, once an epoch epochs."
    )
    figure = "loss_and_scale"
    items = {"peak": EvidenceItem("Highest rate"), "rate": EvidenceItem("Rate then")}

    peak: float = threshold(0.25, "of the highest rate, after less than a hundredth of it; a restart comes in one step")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding for each optimizer."""
        for event in facts(view, "rate rises again"):
            numbers = {name: float(str(event.details.get(name, "nan"))) for name in ("rate", "peak", "lowest_at")}
            if numbers["rate"] > self.peak * numbers["peak"]:
                evidence = {"optimizer": str(event.details.get("optimizer", "")), **numbers}
                until = max(view.last_step, event.step)
                yield self.finding("warning", (), evidence, since_step=int(numbers["lowest_at"]), until_step=until)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return since when the rate rises."""
        return Phrase(
            what=f"the rate of {context.text('optimizer')} had come to its end and rises again {context.since}",
            remedy="give the schedule the length of the whole training",
        )


@dataclass(frozen=True, kw_only=True)
class ScheduleMisread(Rule):
    """A schedule that misreads its metric or has none, multiplies the rate by itself, or begins again too early."""

    id = "schedule-misread"
    says = (
        "a schedule lowers the rate while its metric improves or is no number, multiplies the rate by the rate itself, "
        "or begins again before its end"
    )
    meaning = "The learning rate is far from what it is meant to be."
    advice = "Look at what the schedule is given, and what its function returns."
    figure = "loss_and_scale"
    items = {
        "first": EvidenceItem("First metric"),
        "now": EvidenceItem("Mean of the last metrics"),
        "base": EvidenceItem("Rate that was given"),
        "highest": EvidenceItem("Highest rate"),
        "metrics": EvidenceItem("Metrics of NaN or Inf"),
        "moves": EvidenceItem("Rates before it began again"),
        "before": EvidenceItem("Rate before"),
        "rate": EvidenceItem("Rate after"),
    }

    metrics: float = threshold(4, "calls; none of their metrics is better than the first by the schedule's mode")
    away: float = threshold(0.1, "of the first metric, in the mean of the last `patience` (at least 3): less is noise")
    steps: float = threshold(20, "of the optimizer, after which the rate has come down from its highest")
    base: float = threshold(0.1, "rates from here on may be meant as a part of the function's, as 1 is")
    moves: float = threshold(5, "rates on end that are those of the start, bit for bit: no other schedule has them")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding for each schedule."""
        yield from self._again(view)
        yield from self._without_metric(view)
        for event in facts(view, "plateau misread"):
            first, now = (float(str(event.details.get(name, "nan"))) for name in ("first", "now"))
            count, falls = int(str(event.details.get("metrics", 0))), event.details.get("mode") == "min"
            if count < self.metrics or not abs(now - first) >= self.away * abs(first) or _has_risen(view, event.step):
                continue
            way, right, better = ("rises", "max", "higher") if falls else ("falls", "min", "lower")
            evidence = {**_names_in(event), "mode": str(event.details["mode"]), "first": first, "now": now}
            yield self.since_event(
                "warning", event, view, evidence,
                meaning=f"ReduceLROnPlateau has lowered the rate while its metric {way}, which is no improvement for "
                f"mode='{evidence['mode']}'. A metric that gets worse from the first evaluation on looks the same.",
                advice=f"If {better} is better, pass mode='{right}'. If not, the schedule is right: the model is at "
                "its best at the first evaluation, and overfits from there on.",
            )  # fmt: skip
        for event in facts(view, "rate squared"):
            numbers = {name: float(str(event.details.get(name, "nan"))) for name in ("base", "highest")}
            if int(str(event.details.get("steps", 0))) >= self.steps and numbers["base"] < self.base:
                yield self.finding(
                    "warning", (), {**_names_in(event), **numbers}, since_step=0,
                    until_step=max(view.last_step, event.step),
                    meaning="The highest rate is the square of the rate that the optimizer was given: LambdaLR "
                    "multiplies that rate by what its function returns, and it returns the rate once more.",
                    advice="Let the function return a factor, 1 for the full rate; or give the optimizer lr=1.",
                )  # fmt: skip

    # NaN and Inf are no better than any metric before, so the schedule counts them as no improvement. Where the loss
    # itself is broken, that is the finding.
    def _without_metric(self, view: View) -> Iterator[Finding]:
        """Yield one finding for each schedule that has lowered a rate since its metrics are no numbers."""
        for event in facts(view, "plateau undefined"):
            steps, loss = view.scalar("loss")
            if not np.isfinite(loss[steps <= event.step][-_SOME:]).all():
                continue
            evidence = {**_names_in(event), "cause": _NO_METRIC, "metrics": int(str(event.details.get("metrics", 0)))}
            yield self.since_event(
                "warning", event, view, evidence,
                meaning="ReduceLROnPlateau has lowered the rate because its metric is NaN or Inf, which never is an "
                "improvement. The losses of the steps are finite.",
                advice="Look at how the metric is computed: a sum in FP16 is Inf past 65,504, a mean of none NaN.",
            )  # fmt: skip

    def _again(self, view: View) -> Iterator[Finding]:
        """Yield one finding for each optimizer whose schedule has begun again before its end."""
        for event in facts(view, "schedule again"):
            numbers = {name: float(str(event.details.get(name, "nan"))) for name in ("moves", "before", "rate")}
            if numbers["moves"] >= self.moves:
                yield self.finding(
                    "warning", (), {**_names_in(event), "cause": _AGAIN, **numbers},
                    since_step=int(str(event.details.get("began_at", event.step))),
                    until_step=max(view.last_step, event.step),
                    meaning="The schedule was made again before it had come to its end, and begins at its start, while "
                    "the optimizer goes on.",
                    advice="Make the schedule once, before the loop over epochs. At a resume, load its state as the "
                    "optimizer's: scheduler.load_state_dict.",
                )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return what the schedule does with the rate."""
        name = context.text("optimizer")
        if context.text("cause") == _AGAIN:
            before, rate = number(context.number("before")), number(context.number("rate"))
            return Phrase(
                what=f"the schedule of {name} was made again and starts over {context.since}: its rate goes from "
                f"{before} back to {rate}",
                remedy="make it once, and load its state at a resume",
            )
        if context.text("cause") == _NO_METRIC:
            return Phrase(
                what=f"the schedule of {name} has lowered the rate {context.since} after "
                f"{context.number('metrics'):,.0f} metrics of NaN or Inf",
                remedy="look at how its metric is computed",
            )
        if "mode" not in context.finding.evidence:
            highest, base = number(context.number("highest")), number(context.number("base"))
            return Phrase(
                what=f"the schedule has multiplied the rate of {name} by itself {context.since}: it was {highest} at "
                f"most, the square of {base}",
                remedy="let the function of LambdaLR return a factor",
            )
        falls = context.text("mode") == "min"
        waits, moved = ("fall", "risen") if falls else ("rise", "fallen")
        first, now = number(context.number("first")), number(context.number("now"))
        return Phrase(
            what=f"the schedule of {name} waits for the metric to {waits}, and it has {moved} since the first call "
            f"({first} to {now})",
            effect=f"and the rate has been lowered {context.at}",
            remedy=f"if {'higher' if falls else 'lower'} is better, pass mode='{'max' if falls else 'min'}'",
        )


@dataclass(frozen=True, kw_only=True)
class KeptNarrow(Rule):
    """FP32 weights, gradients, moments, whole numbers or sums that something rounds.

    It reads facts of `plimsoll.watch.steps.kept_narrow` and of the graph behind the loss, and numbers of modules.
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
        cause, fmt = context.text("cause"), context.text("format")
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
        spans = spells(lost > self.lost, ~np.isnan(lost), self.samples)
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
        for out, there in stalled_sums(cells, values=self.values, off=self.off):
            spans += [(out, a, b) for _, a, b in spells(there[None], cells.recorded[[out]], self.samples)]
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
        for place, holds in rounded_whole_numbers(cells, values=self.values, samples=int(self.samples)):
            spans += [(place, a, b) for _, a, b in spells(holds[None], cells.recorded[[place]], self.samples)]
        if spans:
            spots = sorted(worst(cells, spans, spacing(cells)), key=lambda spot: cells.names.index(spot.name))
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


# A training that diverges has metrics that get worse too, and its schedule is right to lower the rate.
def _has_risen(view: View, step: int) -> bool:
    """Return whether the loss at a step is above that at the start of the run."""
    steps, loss = view.scalar("loss")
    loss = loss[np.isfinite(loss) & (steps <= step)]
    return len(loss) > 2 * _SOME and bool(np.median(loss[-_SOME:]) > np.median(loss[:_SOME]))


def _names_in(event: Event) -> dict[str, float | int | str]:
    return {"optimizer": str(event.details.get("optimizer", ""))}


def _format(event: Event) -> str:
    name = str(event.details.get("format", ""))
    return name if " " in name else name.upper()  # "8-bit codes" is no format's name


def _share(event: Event) -> float:
    value = event.details.get("lost")
    return float(value) if isinstance(value, int | float) else 0.0
