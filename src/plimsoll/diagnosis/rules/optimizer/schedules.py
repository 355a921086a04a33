"""Rules of learning rate schedules."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from plimsoll.diagnosis.finding import Finding
from plimsoll.diagnosis.rules.base import EvidenceItem, FindingContext, Phrase, Rule, threshold
from plimsoll.diagnosis.tables.wiring_facts import facts
from plimsoll.diagnosis.view import View
from plimsoll.runs import Event
from plimsoll.text import number

_SOME = 5  # losses
_AGAIN, _NO_METRIC = "begins again", "metric undefined"


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
        if context.cause == _AGAIN:
            before, rate = number(context.number("before")), number(context.number("rate"))
            return Phrase(
                what=f"the schedule of {name} was made again and starts over {context.since}: its rate goes from "
                f"{before} back to {rate}",
                remedy="make it once, and load its state at a resume",
            )
        if context.cause == _NO_METRIC:
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


# A training that diverges has metrics that get worse too, and its schedule is right to lower the rate.
def _has_risen(view: View, step: int) -> bool:
    """Return whether the loss at a step is above that at the start of the run."""
    steps, loss = view.scalar("loss")
    loss = loss[np.isfinite(loss) & (steps <= step)]
    return len(loss) > 2 * _SOME and bool(np.median(loss[-_SOME:]) > np.median(loss[:_SOME]))


def _names_in(event: Event) -> dict[str, float | int | str]:
    return {"optimizer": str(event.details.get("optimizer", ""))}
