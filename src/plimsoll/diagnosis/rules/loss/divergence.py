"""Rules of a loss that rises, or that falls without a bound.

Losses have no common unit. A rise is held against the noise of the losses before it, against the level that the run
began at, and against what it had learned by then.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from plimsoll.diagnosis.finding import SEVERITIES, Finding, Severity, Spot
from plimsoll.diagnosis.rules.base import EvidenceItem, FindingContext, Phrase, Rule, threshold
from plimsoll.diagnosis.rules.layers.zeros import DeadLayer
from plimsoll.diagnosis.rules.nonfinite import Nonfinite
from plimsoll.diagnosis.rules.wiring.without_effect import OptimizerIdle
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.diagnosis.tables.trend import Rise, beginning, comes_back, falls, gradual_rise, levels, rises
from plimsoll.diagnosis.tables.wiring_facts import first_fact
from plimsoll.diagnosis.view import View
from plimsoll.runs import Event
from plimsoll.text import number, percent

_EARLY = 50  # steps within which a blow-up belongs to the beginning
_AT_ONCE = 3  # losses on end that no single bad batch explains
_BLOWN_UP = 100.0  # times the unit of the loss: after five such losses on end nobody need wait for more
_FIVE = 5
_PAST_ZERO = "a positive number that has passed zero"
_UNLEARNED = 1000.0  # times the unit: so far the loss may climb slowly, or fall below zero, as an agent's does
_MEANINGS = {
    "diverged": "The loss rose and has not come back: the run diverges.",
    "never learned": "The loss blew up at the start and has stayed above its first value: nothing is learned.",
    "growing spikes": "Spikes of the loss come again and again, higher each time.",
    "coming back": "The loss rose far and is on its way back.",
    "came back late": "The loss rose and stayed there for many steps before it came back.",
    "higher": "The loss is above its usual level, but below where the run began or little above it.",
    "just risen": "The loss rose at the end of the record.",
    "came back": "The loss rose far above its usual level and came back by itself.",
    "in part": "The loss rose far above its usual level. It is below that again, and still above where it began.",
}
_ASCENDS = "an optimizer that maximises an error"
_MAXIMISED = "an error with a minus sign"
_TOO_HIGH = "Start again from new weights, with a much lower learning rate or a warm-up."
_COMPARE = "Train a few hundred steps in FP32 as well, and compare (plimsoll parity): does the loss fall there?"
_ADVICE: dict[Severity, str] = {
    "info": "No action is needed if it is rare. If such spikes grow, clip gradients or lower the learning rate.",
    "warning": "Clip gradients or lower the learning rate, and look at the batches there.",
    "alarm": "Restore the checkpoint before the rise, skip its batches, and lower the learning rate or clip.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """A rise with its severity and course."""

    rise: Rise
    severity: Severity
    course: str


@dataclass(frozen=True, kw_only=True)
class LossSpike(Rule):
    """A loss far above its usual level: an alarm, or a note if it returns at once."""

    id = "loss-spike"
    says = "the loss rises far above its usual level; an alarm if it does not come back"
    meaning = _MEANINGS["came back"]
    advice = _ADVICE["info"]
    actions = ("rollback", "skip")
    figure = "loss_and_scale"
    items = {
        "usual": EvidenceItem("Usual loss"),
        "level": EvidenceItem("Called a spike above"),
        "began_at": EvidenceItem("Loss at the start"),
        "now": EvidenceItem("Median of the last losses"),
        "accumulated": EvidenceItem("Backwards added up in a step"),
        "weights_as_at_step": EvidenceItem("Step whose weights came back"),
    }

    deviations: float = threshold(10, "median absolute deviations, as in the flight recorder")
    rise: float = threshold(0.5, "and this share of the median itself")
    window: float = threshold(50, "steps whose median it is compared with")
    least: float = threshold(20, "steps before there is a usual level; the first losses stand for it until then")
    lasting: float = threshold(20, "steps: longer than single bad batches explain")
    share: float = threshold(0.6, "of these are above the level; losses of a broken run may be zero in between")
    beyond: float = threshold(2, "times the first loss above it (times 1, if that is less): worse than untrained")
    height: float = threshold(10, "times the same: a blow-up, however short")
    learned: float = threshold(0.5, "of what the loss had fallen is lost")
    repeats: float = threshold(8, "spikes, of which the later half is four times as high as the earlier")
    input: float = threshold(8, "times the largest input before: three binades")
    blank: float = threshold(0.5, "of an input's values are zero, and were not before: dropped values are fewer")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding of each recorded loss."""
        if _ascent(view) is not None:  # `loss-unbounded` says why it rises
            return
        for name, (steps, loss) in view.losses.items():
            yield from self._finding(view, name, steps, loss)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the course of the loss, and the model's input if it grew with the loss."""
        phrase, times = self._course(context), context.number("input_times")
        if math.isfinite(zeros := context.number("input_zeros")):
            remedy = f"look at the batches there: {percent(zeros)} of the model's input are zeros"
            return replace(phrase, remedy=remedy)
        if math.isfinite(as_at := context.number("weights_as_at_step")):
            return replace(phrase, remedy=f"look for what wrote the weights of step {as_at:,.0f} over the model's")
        if not math.isfinite(times):
            return phrase
        return replace(phrase, remedy=f"look at the batches there: the model's input is {number(times)} times as large")

    def _course(self, context: FindingContext) -> Phrase:
        highest, usual, now = (context.number(name) for name in ("highest", "usual", "now"))
        course, spikes = context.text("course"), context.number("spikes")
        loss = str(context.finding.evidence.get("loss", "the loss"))
        rose = f"{loss} rose from {number(usual)} {context.at} to {number(highest)}"
        if course == "diverged":
            return Phrase(
                what=f"{rose} and did not come back",
                effect=f"{number(now)} at the end" if now < highest / 2 else "",
                remedy="restore the checkpoint before it, and lower the learning rate or clip",
            )
        if course == "never learned":
            return Phrase(
                what=f"{rose} and never fell below where it began ({number(context.number('began_at'))})",
                remedy="start again with a much lower learning rate or a warm-up",
            )
        if course == "came back late":
            until = f"came back only after step {context.finding.until_step:,}"
            return Phrase(what=f"{rose} and {until}", remedy="look at the batches there")
        if course == "growing spikes":
            what = f"{loss} spiked {spikes:,.0f} times {context.since}, higher each time, to {number(highest)}"
            return Phrase(what=what, remedy="clip gradients or lower the learning rate")
        return Phrase(
            what=f"{loss} spiked to {number(highest)} (usually {number(usual)}) {context.at}",
            effect=f"{spikes:,.0f} spikes in all" if spikes > 1 else "",
            remedy="clip gradients or lower the learning rate",
        )

    def is_fatal(self, finding: Finding, last_step: int) -> bool:  # noqa: ARG002  (every alarm is)
        """Return True: an alarm is a loss that did not come back."""
        return True

    def consequence(self, finding: Finding, last_step: int) -> str:  # noqa: ARG002
        """Return since when the loss stayed high."""
        return f"and the loss rose at step {finding.since_step:,} and stayed high"

    def _finding(self, view: View, name: str, steps: Ints, loss: Floats) -> Iterator[Finding]:
        broken = bool(len(loss)) and not np.isfinite(loss[-1])
        steps, loss = steps[np.isfinite(loss)], loss[np.isfinite(loss)]
        if len(loss) < 2:
            return
        all_rises = self._rises(loss)
        judged = [self._judged(loss, one_rise, broken) for one_rise in all_rises] + self._never_learned(loss, all_rises)
        if not judged:
            return
        worst_of = max(judged, key=lambda known: (SEVERITIES.index(known.severity), float(loss[known.rise.peak])))
        severity, course = worst_of.severity, worst_of.course
        if severity == "info" and self._grow(loss, all_rises):
            severity, course = "warning", "growing spikes"
        rise = worst_of.rise
        now = float(np.median(loss[-int(self.lasting) :]))
        before = max(beginning(loss), rise.usual)
        if course == "came back" and now > before + self.rise * abs(before):
            course = "in part"
        evidence: dict[str, float | int | str] = {
            "course": course,
            "spikes": len(all_rises),
            "highest": float(loss[rise.peak]),
            "at_step": int(steps[rise.peak]),
            "usual": rise.usual,
            "level": rise.level,
            "began_at": beginning(loss),
        }
        if not broken:  # else the last losses are no numbers
            evidence["now"] = now
        if name != "loss":
            evidence["loss"] = name
        speaks_of_one = course not in (
            "came back",
            "in part",
            "growing spikes",
        )  # the finding speaks of one rise, else of all
        since = rise.first if speaks_of_one else all_rises[0].first
        until = rise.last if speaks_of_one else max(one_rise.last for one_rise in all_rises)
        if course == "never learned":
            until = len(loss) - 1
        advice = {"never learned": _TOO_HIGH, "in part": _COMPARE}.get(course, _ADVICE[severity])
        if severity == "alarm" and (micro := _accumulated(view)) > 1:
            evidence["accumulated"] = micro
            advice = f"{advice} {micro} backwards are added up in each step: divide their loss by {micro} if not done."
        if severity != "info":
            advice = self._add_cause(view, int(steps[since]), evidence, advice)
        yield self.finding(
            severity, (), evidence, since_step=int(steps[since]), until_step=int(steps[until]),
            meaning=_MEANINGS[course], advice=advice, actions=() if severity == "info" else None,
        )  # fmt: skip

    def _add_cause(self, view: View, since: int, evidence: dict[str, float | int | str], advice: str) -> str:
        """Put into the evidence what the loss rose with, if it is known; return the advice for it."""
        back = next((back for back, note in OptimizerIdle().put_back(view) if not note and back.has(since)), None)
        if back is not None:
            evidence["weights_as_at_step"] = back.as_at
            return (
                "Look for what has written older weights over the model's (FP32 masters that were not loaded, or a "
                f"checkpoint): at step {back.step} they were those of step {back.as_at} again."
            )
        if (blank := self._blank_input(view, since)) is not None:
            evidence |= {"input": blank[0], "input_zeros": blank[1]}
            return (
                f"Look for what makes the batches from there on: {percent(blank[1])} of {blank[0]} are zeros, as where "
                "a loader returns blanks for what it cannot read. Then go on from a checkpoint before it."
            )
        grown = self._grown_input(view, since)
        if grown is None:
            return advice
        evidence |= {"input": grown[0], "input_times": grown[1]}
        return f"Look at the batches from there on: {grown[0]} is {grown[1]:.3g} times as large as before. {advice}"

    def _grown_input(self, view: View, since: int) -> tuple[str, float] | None:
        """Return the model's input that rose beyond all before with the loss, and by how much; None if none did."""
        times = {
            name: float(now.max() / before.max()) if before.max() > 0 else 0.0
            for name, before, now in self._inputs(view, since, lambda cells: cells.rms)
        }
        largest = max(times, key=lambda name: times[name], default="")
        return (largest, times[largest]) if largest and times[largest] >= self.input else None

    # Between the last sample before the rise and the first one after it lie steps with and without the loss's cause.
    def _blank_input(self, view: View, since: int) -> tuple[str, float] | None:
        """Return the model's input that became zeros as the loss rose, and the share of zeros; None if none did."""
        for name, before, now in self._inputs(view, since, lambda cells: cells.zero_fraction):
            if now.max() - before.max() >= self.blank:
                return name, float(now.max())
        return None

    def _inputs(
        self, view: View, since: int, column: Callable[[Cells], Floats]
    ) -> Iterator[tuple[str, Floats, Floats]]:
        """Yield the model's inputs with a column's values at the samples well before a rise, and at those near it."""
        cells, root = view.cells("activations"), view.run.manifest.get("root")
        if cells is None:
            return
        earlier = cells.steps < since - self.lasting
        near = ~earlier & (cells.steps <= cells.steps[cells.steps >= since].min(initial=since))
        if np.count_nonzero(earlier) < _AT_ONCE:
            return
        for place, name in enumerate(cells.names):
            if name.startswith(f"{root}:input"):
                before, now = (
                    values[~np.isnan(values)] for values in (column(cells)[place, at] for at in (earlier, near))
                )
                if len(before) and len(now):
                    yield name, before, now

    def rose_at(self, view: View) -> list[int]:
        """Return the steps at which rises of a loss begin that are more than a note."""
        return [step for steps, loss in view.losses.values() for step in self._rose_at(steps, loss)]

    def _rose_at(self, steps: Ints, loss: Floats) -> list[int]:
        steps, loss = steps[np.isfinite(loss)], loss[np.isfinite(loss)]
        if len(loss) < 2:
            return []
        judged = (self._judged(loss, rise) for rise in self._rises(loss))
        return [int(steps[known.rise.first]) for known in judged if known.severity != "info"]

    def _rises(self, loss: Floats) -> list[Rise]:
        lasting, began = int(self.lasting), beginning(loss)
        usual, level = levels(
            loss, window=int(self.window), least=int(self.least), deviations=self.deviations, rise=self.rise
        )
        early = np.isnan(usual)
        early[0] = False  # what the run began at is no rise
        usual[early], level[early] = began, began + self.beyond * _unit(began)
        all_rises = rises(loss, usual, level, lasting=lasting, share=self.share)
        if not any(rise.lasts and rise.open for rise in all_rises):
            limit = began + self.height * _unit(began)
            gradual = gradual_rise(loss, beyond=limit, window=int(self.window), lasting=lasting, share=self.share)
            if gradual is not None and (
                gradual.usual < began - 0.5 * abs(began) or gradual.height > began + _UNLEARNED * _unit(began)
            ):
                all_rises.append(gradual)
        return all_rises

    # Alarms: at the end most losses are above the level before the rise, and far above the first losses, or half of
    # what was learned is lost; or the run blew up at its start and never came below its first losses again. Warnings:
    # the rise lasted, far above the first losses; or it is on its way back from there; or spikes grow. Everything else
    # is a note.
    def _judged(self, loss: Floats, rise: Rise, broken: bool = False) -> _Judged:
        """Return the severity of a rise. `broken`: after the last finite loss come NaN or Inf."""
        began = beginning(loss)
        unit = _unit(began)
        far = rise.height > began + self.beyond * unit
        if not rise.lasts:
            losses = loss[rise.first : rise.last + 1]
            if rise.open and len(losses) >= _FIVE and bool((losses[-_FIVE:] > began + _BLOWN_UP * unit).all()):
                return _Judged(rise=rise, severity="alarm", course="diverged")
            if rise.open and broken and bool((losses[-_AT_ONCE:] > began + self.height * unit).all()):
                return _Judged(rise=rise, severity="alarm", course="diverged")
            severe = len(losses) >= _AT_ONCE and bool((losses > began + self.height * unit).all())
            course = "just risen" if rise.open else "came back"
            return _Judged(rise=rise, severity="warning" if severe else "info", course=course)
        if not rise.open:
            noted = not (far or self._bursts(loss, rise)) or rise.first < self.least  # how a run finds its feet
            return _Judged(rise=rise, severity="info" if noted else "warning", course="came back late")
        lost, had = rise.height - rise.usual, began - rise.usual
        forgot = had > 0.2 * abs(began) and lost >= self.learned * had
        forgot = forgot and (had > 0.8 * abs(began) or rise.height <= began + self.beyond * abs(began))
        if not (far or forgot):
            return _Judged(rise=rise, severity="info", course="higher")
        if rise.height < began + _BLOWN_UP * unit and comes_back(loss, rise):
            return _Judged(rise=rise, severity="warning" if far else "info", course="coming back")
        return _Judged(rise=rise, severity="alarm", course="diverged")

    def _bursts(self, loss: Floats, rise: Rise) -> bool:
        """Return True if some losses on end were far above the first ones, however low the others of the rise are."""
        far = loss[rise.first : rise.last + 1] > beginning(loss) + self.height * _unit(beginning(loss))
        return bool(np.convolve(far, np.ones(_AT_ONCE), "valid").max(initial=0) == _AT_ONCE)

    def _never_learned(self, loss: Floats, found: list[Rise]) -> list[_Judged]:
        """The first blow-up, if the run has never since been better than at its beginning."""
        began, lasting = beginning(loss), int(self.lasting)
        early = [r for r in found if r.first < _EARLY and float(loss[r.peak]) > began + self.height * _unit(began)]
        now = float(np.median(loss[-lasting:]))
        if not early or len(loss) - early[-1].peak < _EARLY or now < began - 0.05 * abs(began):
            return []
        rise = max(early, key=lambda r: float(loss[r.peak]))
        later = loss[-max(len(loss) // 2, lasting) :]
        if float(later.max()) - began > 0.5 * (float(loss[rise.peak]) - began):
            return []  # such losses belong to its noise
        improves = falls(later)
        return [_Judged(rise=rise, severity="warning" if improves else "alarm", course="never learned")]

    def _grow(self, loss: Floats, found: list[Rise]) -> bool:
        """Return True if many spikes reach ever farther beyond the noise, and the last is worse than untrained."""
        began = beginning(loss)
        small = 0.01 * _unit(began)  # losses of before may all be zero
        heights = np.array(
            [(float(loss[rise.peak]) - rise.usual) / max(rise.level - rise.usual, small) for rise in found]
        )
        if len(heights) < self.repeats or float(loss[found[-1].peak]) < began + self.beyond * _unit(began):
            return False
        if not falls(-heights):
            return False
        half = len(heights) // 2
        return bool(np.median(heights[half:]) >= 4 * np.median(heights[:half]))


def _unit(began: float) -> float:
    """Return the unit of rises: the first loss, at least 1.

    Before an agent's first reward the first loss may be next to nothing.
    """
    return max(abs(began), 1.0)


def _accumulated(view: View) -> int:
    """Return how many backwards a step adds up by the watch's record, at least 1."""
    counts = [event.details.get("accumulated") for event in view.events if event.kind == "loss"]
    return max((count for count in counts if isinstance(count, int)), default=1)


@dataclass(frozen=True, kw_only=True)
class RateTooHigh(Rule):
    """First updates as large as the weights, after which the loss hardly falls."""

    id = "rate-too-high"
    says = (
        "the first updates replace the weights, and the loss does not recover; or a positive number is thrown past "
        "zero, and layers die"
    )
    meaning = "The learning rate is too high at the start: the first updates replaced the initial weights."
    advice = _TOO_HIGH
    actions = ("stop",)
    figure = "loss_and_scale"
    explained_by = {LossSpike.id: "anywhere", Nonfinite.id: "anywhere"}
    items = {
        "moved": EvidenceItem("Of the weights' norm, moved in one step", "share"),
        "began_at": EvidenceItem("Loss at the start"),
        "now": EvidenceItem("Median of the last losses"),
        "was": EvidenceItem("At the start"),
        "is": EvidenceItem("After"),
    }

    share: float = threshold(0.3, "of the norm of all weights in one step; usual rates move 0.001 to 0.03")
    early: float = threshold(20, "steps: the beginning of a run")
    rise: float = threshold(0.1, "of the first loss: the median of the losses of that beginning is above it by so much")
    learned: float = threshold(0.3, "of the first loss: a run that has learned more than this has recovered")
    least: float = threshold(50, "losses before it is judged")

    # Adam moves every weight by the learning rate at its first step. If that is a good part of the weights' own size,
    # the initialisation is lost. Sound trainings do not do this, or recover from it.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the whole run, and one of a single number that has passed zero."""
        yield from self._past_zero(view)
        updates = view.cells("updates")
        steps, loss = view.scalar("loss")
        steps, loss = steps[np.isfinite(loss)], loss[np.isfinite(loss)]
        if updates is None or len(loss) < self.least or loss[0] <= 0:
            return
        with np.errstate(all="ignore"):
            moved = np.sqrt(np.nansum(updates.norm**2, axis=0) / np.nansum(self._squared_weights(updates), axis=0))
        early = (updates.steps < self.early) & (np.nan_to_num(moved) >= self.share)
        if not early.any():
            return
        began, now = float(loss[0]), float(np.median(loss[-int(self.early) :]))
        after = loss[1 : int(self.early)]
        if np.median(after) < began * (1 + self.rise) or now < began * (1 - self.learned):
            return
        at = int(np.flatnonzero(early)[0])
        evidence = {"moved": float(moved[at]), "began_at": began, "now": now}
        yield self.finding("warning", (), evidence, since_step=int(updates.steps[at]), until_step=int(steps[-1]))

    def phrase(self, context: FindingContext) -> Phrase:
        """Return how far the first update moved the weights, and the loss since."""
        if context.cause == _PAST_ZERO:
            return Phrase(
                what=f"{context.text('parameter')} has passed zero, seen {context.since}",
                effect=f"and {context.number('layers'):.0f} layers no longer learn",
                remedy="divide its gradient by the root of the number of values that it scales",
            )
        began, now = number(context.number("began_at")), number(context.number("now"))
        return Phrase(
            what=f"the update {context.at} moved the weights by {percent(context.number('moved'))} of their size",
            effect=f"and the loss is {now}, after {began} at the start",
            remedy="start again with a much lower learning rate or a warm-up",
        )

    def _past_zero(self, view: View) -> Iterator[Finding]:
        """Yield one finding of positive numbers in layers that died, which became negative before."""
        thrown, dead, until = DeadLayer().past_zero(view)
        if thrown:
            name, since, before, at = thrown[0]
            spots = [Spot(name=each, since_step=step, value=value) for each, step, _, value in thrown]
            evidence = {"cause": _PAST_ZERO, "parameter": name, "was": before, "is": at, "layers": len(dead)}
            yield self.finding(
                "warning", [*spots, *dead], evidence, until_step=until,
                meaning=f"{name} is a single number. It was {before:.3g} at the start, and {at:.3g} at step {since:,}: "
                "its updates have thrown it past zero, and layers that depend on it put out zeros or get no gradients.",
                advice="If it is a quantiser's step, divide its gradient by the root of the number of values times the "
                "largest code (LSQ). Else give it a parameter group with a lower rate, or learn its logarithm.",
            )  # fmt: skip

    @staticmethod
    def _squared_weights(updates: Cells) -> Floats:
        return updates.total(updates.column("weight_norm") ** 2)


@dataclass(frozen=True, kw_only=True)
class LossUnbounded(Rule):
    """A loss that falls below zero by orders of magnitude, faster and faster."""

    id = "loss-unbounded"
    says = "the loss falls below zero without bound, faster and faster, or is the negative of an error"
    meaning = "Nothing bounds the loss from below, and the weights grow with it: the training does not learn its task."
    advice = "Check the sign of the loss: an error that is maximised falls like this. Otherwise bound it from below."
    figure = "loss_and_scale"
    items = {
        "began_at": EvidenceItem("Loss at the start"),
        "now": EvidenceItem("Median of the last losses"),
    }

    times: float = threshold(_UNLEARNED, "times the first loss below zero (times 1, if that is less): no usual reward")
    least: float = threshold(40, "losses: ten in each quarter")
    losses: float = threshold(
        10, "the first ones, all below zero: the fact is exact, and they say that it is trained on"
    )

    # The negative of an error is a fact of the graph behind the loss. A backward that no optimizer steps on, as for an
    # adversarial input, has no part in the recorded loss, which then is not below zero.
    #
    # Losses that are learned fall ever slower, those below zero too (likelihoods, rewards). Where an error is
    # maximised, the loss falls as the error grows. Four parts of the record are compared, so the first losses do not
    # matter.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the recorded loss."""
        steps, loss = view.scalar("loss")
        steps, loss = steps[np.isfinite(loss)], loss[np.isfinite(loss)]
        event = first_fact(view, "maximised")
        if (ascent := _ascent(view)) is not None and len(loss) >= self.losses:
            yield self._ascends(ascent, steps, loss)
            return
        if event is not None and len(loss) >= self.losses and bool((loss[: int(self.losses)] < 0).all()):
            error = str(event.details.get("error", "an error"))
            evidence = {"began_at": float(loss[0]), "now": float(np.median(loss[-_FIVE:])), "cause": _MAXIMISED}
            yield self.finding(
                "warning", (), evidence, since_step=int(steps[0]), until_step=int(steps[-1]),
                meaning=f"The loss is the negative of {error}: each step makes the right answers less likely.",
                advice="Take the minus sign out. If the model is to unlearn these answers, no action is needed.",
            )  # fmt: skip
            return
        if len(loss) < self.least:
            return
        began = float(np.median(loss[:_FIVE]))
        limit = -self.times * _unit(began)
        parts = np.array_split(loss, 4)
        fallen = -np.diff([float(np.median(part)) for part in parts])
        if np.median(parts[-1]) > limit or not (0 < fallen[0] < fallen[1] < fallen[2]) or not falls(parts[-1]):
            return
        since = int(np.flatnonzero(loss <= limit)[0])
        evidence = {"began_at": began, "now": float(np.median(loss[-_FIVE:]))}
        yield self.finding("warning", (), evidence, since_step=int(steps[since]), until_step=int(steps[-1]))

    def is_fatal(self, finding: Finding, last_step: int) -> bool:  # noqa: ARG002  (each step makes it worse)
        """Return whether an optimizer maximises the error."""
        return finding.evidence.get("cause") == _ASCENDS

    def _ascends(self, event: Event, steps: Ints, loss: Floats) -> Finding:
        began, now = float(np.median(loss[:_FIVE])), float(np.median(loss[-_FIVE:]))
        error, who = str(event.details.get("error", "an error")), event.details.get("optimizer")
        return self.finding(
            "alarm" if now > 2 * began else "warning", (), {"began_at": began, "now": now, "cause": _ASCENDS},
            since_step=int(steps[0]), until_step=int(steps[-1]),
            meaning=f"{who} was made with maximize=True, and the loss is {error}: each step makes the right answers "
            "less likely.",
            advice="Take maximize=True out, or give the optimizer what is to rise. If the model is to unlearn these "
            "answers, no action is needed.",
        )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the first and the last loss."""
        began, now = number(context.number("began_at")), number(context.number("now"))
        if context.cause == _ASCENDS:
            return Phrase(
                what=f"the optimizer maximises an error, {began} at first and {now} at the end",
                remedy="take maximize=True out",
            )
        if context.cause == _MAXIMISED:
            return Phrase(
                what=f"the training maximises an error: the loss is its negative, {began} at first and {now} at the "
                "end",
                remedy="take the minus sign out",
            )
        return Phrase(
            what=f"the loss falls without bound, from {began} to {now}, faster and faster {context.since}",
            remedy="check its sign, or bound it from below",
        )


def _ascent(view: View) -> Event | None:
    """Return the fact that an optimizer maximises a loss that is an error; None if none does."""
    event = first_fact(view, "maximised")
    return event if event is not None and event.details.get("optimizer") else None
