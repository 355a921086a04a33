"""Rules of the loss: divergence, spikes, and updates that precede a spike.

Losses have no common unit. A rise is held against the noise of the losses before it, against the level that the run
began at, and against what it had learned by then.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from plimsoll.diagnosis.estimates.format_losses import Modules
from plimsoll.diagnosis.finding import SEVERITIES, Finding, Severity
from plimsoll.diagnosis.rules.base import EvidenceItem, FindingContext, Phrase, Rule, last_of, spells, threshold, worst
from plimsoll.diagnosis.rules.nonfinite import Nonfinite
from plimsoll.diagnosis.rules.optimizer import UpdatesSwallowed
from plimsoll.diagnosis.rules.underflow import UnderflowHigh
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.diagnosis.tables.trend import Rise, beginning, comes_back, falls, gradual_rise, levels, rises
from plimsoll.diagnosis.tables.wiring_facts import first_fact, optimizer_settings
from plimsoll.diagnosis.view import View
from plimsoll.text import number, percent

_FAR_OFF = "begins far off"  # a fact of the watch, and the cause in the evidence
_ABOVE = "above guessing"
_HARDLY = "weights hardly move"
_SIGNED, _BYTE = 127, 255  # the largest bytes, with and without a sign
_MANY = 64  # values that are all whole: no chance
_EARLY = 50  # steps within which a blow-up belongs to the beginning
_AT_ONCE = 3  # losses on end that no single bad batch explains
_BLOWN_UP = 100.0  # times the unit of the loss: after five such losses on end nobody need wait for more
_FIVE = 5
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

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding of each recorded loss."""
        for name, (steps, loss) in view.losses.items():
            yield from self._finding(view, name, steps, loss)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the course of the loss, and the model's input if it grew with the loss."""
        phrase, times = self._course(context), context.number("input_times")
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
            "now": now,
        }
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
        grown = None if severity == "info" else self._grown_input(view, int(steps[since]))
        if grown is not None:
            evidence |= {"input": grown[0], "input_times": grown[1]}
            advice = (
                f"Look at the batches from there on: {grown[0]} is {grown[1]:.3g} times as large as before. {advice}"
            )
        yield self.finding(
            severity, (), evidence, since_step=int(steps[since]), until_step=int(steps[until]),
            meaning=_MEANINGS[course], advice=advice, actions=() if severity == "info" else None,
        )  # fmt: skip

    def _grown_input(self, view: View, since: int) -> tuple[str, float] | None:
        """Return the model's input that rose beyond all before with the loss, or None.

        With it comes how many times larger it became.
        """
        cells, root = view.cells("activations"), view.run.manifest.get("root")
        if cells is None:
            return None
        earlier = cells.steps < since - self.lasting
        near = ~earlier & (cells.steps <= cells.steps[cells.steps >= since].min(initial=since))
        if np.count_nonzero(earlier) < _AT_ONCE or not near.any():
            return None
        largest = (0.0, "")
        for place, name in enumerate(cells.names):
            if name.startswith(f"{root}:input"):
                before, now = (np.nanmax(cells.rms[place, at], initial=0.0) for at in (earlier, near))
                largest = max(largest, (float(now / before) if before > 0 else 0.0, name))
        return (largest[1], largest[0]) if largest[0] >= self.input else None

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
        """Return the severity of a rise.

        `broken`: the values after the record's last finite loss are NaN or Inf.
        """
        began = beginning(loss)
        unit = _unit(began)
        far = rise.height > began + self.beyond * unit
        if not rise.lasts:
            losses = loss[rise.first : rise.last + 1]
            if rise.open and len(losses) >= _FIVE and bool((losses[-_FIVE:] > began + _BLOWN_UP * unit).all()):
                return _Judged(rise=rise, severity="alarm", course="diverged")
            if rise.open and broken and bool((losses[-_AT_ONCE:] > began + self.height * unit).all()):
                return _Judged(rise=rise, severity="alarm", course="diverged")
            grave = len(losses) >= _AT_ONCE and bool((losses > began + self.height * unit).all())
            course = "just risen" if rise.open else "came back"
            return _Judged(rise=rise, severity="warning" if grave else "info", course=course)
        if not rise.open:
            noted = not far or rise.first < self.least  # how a run finds its feet
            return _Judged(rise=rise, severity="info" if noted else "warning", course="came back late")
        lost, had = rise.height - rise.usual, began - rise.usual
        forgot = had > 0.2 * abs(began) and lost >= self.learned * had
        forgot = forgot and (had > 0.8 * abs(began) or rise.height <= began + self.beyond * abs(began))
        if not (far or forgot):
            return _Judged(rise=rise, severity="info", course="higher")
        if rise.height < began + _BLOWN_UP * unit and comes_back(loss, rise):
            return _Judged(rise=rise, severity="warning" if far else "info", course="coming back")
        return _Judged(rise=rise, severity="alarm", course="diverged")

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
        """Return True if many spikes grow, and the last is worse than untrained.

        They reach ever farther beyond the noise.
        """
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
    says = "the first updates replace the weights, and the loss does not recover"
    meaning = "The learning rate is too high at the start: the first updates replaced the initial weights."
    advice = _TOO_HIGH
    actions = ("stop",)
    figure = "loss_and_scale"
    explained_by = {LossSpike.id: "anywhere", Nonfinite.id: "anywhere"}
    items = {
        "moved": EvidenceItem("Of the weights' norm, moved in one step", "share"),
        "began_at": EvidenceItem("Loss at the start"),
        "now": EvidenceItem("Median of the last losses"),
    }

    share: float = threshold(0.3, "of the norm of all weights in one step; usual rates move 0.001 to 0.03")
    early: float = threshold(20, "steps: the beginning of a run")
    rise: float = threshold(0.1, "of the first loss: the median of the losses of that beginning is above it by so much")
    learned: float = threshold(0.3, "of the first loss: a run that has learned more than this has recovered")
    least: float = threshold(50, "losses before it is judged")

    # Adam moves every weight by the learning rate at its first step. If that is a good part of the weights' own size,
    # the initialisation is lost. Sound trainings do not do this, or recover from it.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the whole run."""
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
        began, now = number(context.number("began_at")), number(context.number("now"))
        return Phrase(
            what=f"the update {context.at} moved the weights by {percent(context.number('moved'))} of their size",
            effect=f"and the loss is {now}, after {began} at the start",
            remedy="start again with a much lower learning rate or a warm-up",
        )

    @staticmethod
    def _squared_weights(updates: Cells) -> Floats:
        return updates.total(updates.column("weight_norm") ** 2)


@dataclass(frozen=True, kw_only=True)
class LossUnbounded(Rule):
    """A loss that falls below zero by orders of magnitude, faster and faster."""

    id = "loss-unbounded"
    says = "the loss falls below zero without bound, faster and faster"
    meaning = "Nothing bounds the loss from below, and the weights grow with it: the training does not learn its task."
    advice = "Check the sign of the loss: an error that is maximised falls like this. Otherwise bound it from below."
    figure = "loss_and_scale"
    items = {
        "began_at": EvidenceItem("Loss at the start"),
        "now": EvidenceItem("Median of the last losses"),
    }

    times: float = threshold(_UNLEARNED, "times the first loss below zero (times 1, if that is less): no usual reward")
    least: float = threshold(40, "losses: ten in each quarter")

    # Losses that are learned fall ever slower, those below zero too (likelihoods, rewards). Where an error is
    # maximised, the loss falls as the error grows. Four parts of the record are compared, so the first losses do not
    # matter.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the recorded loss."""
        steps, loss = view.scalar("loss")
        steps, loss = steps[np.isfinite(loss)], loss[np.isfinite(loss)]
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

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the first and the last loss."""
        began, now = number(context.number("began_at")), number(context.number("now"))
        return Phrase(
            what=f"the loss falls without bound, from {began} to {now}, faster and faster {context.since}",
            remedy="check its sign, or bound it from below",
        )


@dataclass(frozen=True, kw_only=True)
class LossAtChance(Rule):
    """A cross entropy that begins far above that of guessing, or stays where guessing is."""

    id = "loss-at-chance"
    says = "a classifier's loss stays where guessing is, rises far above it, or begins there"
    meaning = "The loss is that of guessing among the classes: what the model has learned does not help."
    advice = (
        "Check that inputs and labels still belong together (sorted or shuffled apart, off by one), and that the "
        "inputs say something of the labels; then the learning rate."
    )
    figure = "loss_and_scale"
    items = {"guessing": EvidenceItem("Loss of guessing"), "loss": EvidenceItem("Loss")}
    is_secondary = True  # other findings say why

    near: float = threshold(0.02, "of the loss of guessing, above or below it: what is learned first is more")
    worse: float = threshold(2, "times the loss of guessing, after a loss below it: no sound training forgets so much")
    window: float = threshold(25, "losses whose mean is held against it")
    least: float = threshold(200, "losses from the first one on: hard tasks begin slowly")
    way: float = threshold(0.05, "of a matrix's size, added up over the steps: less of any turns no answer")
    little: float = threshold(0.1, "of the loss of guessing, and of the first loss, by which such a loss has fallen")

    # The loss of guessing is the logarithm of the number of classes. The watch knows it where the loss is a mean cross
    # entropy and nothing else. A loss that has left its place since is a note.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding of each: a loss that stays at chance, rises above it, and begins far above it."""
        event = first_fact(view, "classes")
        steps, loss = view.scalar("loss")
        size = int(self.window)
        if event is not None and len(loss) >= size:
            guessing = math.log(int(cast("int", event.details["classes"])))
            guessing *= float(cast("float", event.details.get("times", 1.0)))
            means = loss[: len(loss) // size * size].reshape(-1, size).mean(axis=1)
            yield from self._stays(view, steps, means, guessing)
            yield from self._above(steps, means, guessing)
        far = first_fact(view, _FAR_OFF)
        if far is not None:
            loss_then = float(cast("float", far.details["loss"]))
            guessing = math.log(int(cast("int", far.details["classes"])))
            evidence: dict[str, float | int | str] = {"guessing": guessing, "loss": loss_then, "cause": _FAR_OFF}
            pixels = _inputs_of_bytes(view)
            if pixels is not None:
                evidence["input"] = pixels
            yield self.finding(
                "warning", (), evidence, since_step=far.step, until_step=far.step,
                meaning="The first scores are large and wrong: the first steps only take them back."
                + ("" if pixels is None else " The model is given whole numbers up to 255, as pixels are in files."),
                advice="Initialise what makes the scores smaller (a table that is tied to the head: 0.02), or "
                "normalise what comes into it."
                if pixels is None
                else "Scale what the model is given: divide pixels by 255, or normalise them by their mean and "
                "deviation.",
            )  # fmt: skip

    def _stays(self, view: View, steps: Ints, means: Floats, guessing: float) -> Iterator[Finding]:
        size = int(self.window)
        away = ~(np.abs(means - guessing) <= self.near * guessing)
        stays = int(away.argmax()) if away.any() else len(means)
        way = math.inf
        if len(means) * size >= self.least and (means >= (1 - self.little) * max(guessing, means[0])).all():
            way = _way(view)
        if way < self.way and not _is_lost_to_rounding(view):
            yield self.finding(
                "warning", (),
                {"guessing": guessing, "loss": float(means[-1]), "cause": _HARDLY, "way": way},
                since_step=int(steps[0]), until_step=int(steps[len(means) * size - 1]),
                meaning="The loss is no better than that of guessing, or hardly, and no weight matrix has gone further "
                f"than {percent(way)} of its size in all these steps: the model has hardly begun to learn.",
                advice="Raise the learning rate, or look for what makes it small: a schedule that belongs to another "
                "optimizer, a rate that came with a loaded state, a division. An Adam needs no smaller rate for a "
                "scaled loss: it divides by the size of the gradients.",
            )  # fmt: skip
            return
        if stays * size < self.least:
            return
        evidence: dict[str, float | int | str] = {"guessing": guessing, "loss": float(means[stays - 1])}
        since, until = int(steps[0]), int(steps[stays * size - 1])
        if away.any():
            yield self.finding(
                "info", (), evidence, since_step=since, until_step=until, advice="No action is needed.",
                meaning="The loss was that of guessing among the classes; it has left it since.",
            )  # fmt: skip
            return
        yield self.finding("warning", (), evidence, since_step=since, until_step=until)

    def _above(self, steps: Ints, means: Floats, guessing: float) -> Iterator[Finding]:
        size, learned = int(self.window), np.logical_or.accumulate(means <= guessing)
        above = learned & (means > self.worse * guessing)
        lasting = np.flatnonzero(above[1:] & above[:-1])
        if not len(lasting):
            return
        last = int(lasting[-1]) + 1
        goes_on = last == len(means) - 1
        yield self.finding(
            "warning" if goes_on else "info", (),
            {"guessing": guessing, "loss": float(means[last]), "cause": _ABOVE},
            since_step=int(steps[lasting[0] * size]), until_step=int(steps[(last + 1) * size - 1]),
            meaning="The model answers worse than one that guesses, and was better before."
            if goes_on
            else "The model answered worse than one that guesses for a while.",
            advice="The gradients do not fit this loss, or the steps are too long. Compare the gradients of one batch "
            "with those of the plain loss (nothing computed again, cast or replaced in the backward), then the rate."
            if goes_on
            else "No action is needed.",
        )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the loss, and that of guessing."""
        loss, guessing = (number(context.number(name)) for name in ("loss", "guessing"))
        if context.text("cause") == _FAR_OFF:
            if context.text("input"):
                return Phrase(
                    what=f"the loss was {loss} {context.at}, where guessing costs {guessing}: inputs are whole numbers "
                    "up to 255",
                    remedy="scale them",
                )
            return Phrase(
                what=f"the loss was {loss} {context.at}, where guessing costs {guessing}: initial scores are too large",
                remedy="initialise the head or its tied table smaller",
            )
        until = f"until step {context.finding.until_step:,}"
        if context.text("cause") == _ABOVE:
            is_over = context.finding.severity == "info"
            return Phrase(
                what=f"the loss has risen to {loss}, where guessing costs {guessing}, {context.since}"
                + (f", {until}" if is_over else ""),
                remedy="" if is_over else "compare the gradients of a batch with those of the plain loss",
            )
        if context.finding.severity == "info":
            return Phrase(what=f"the loss was {loss}, which guessing costs, {until}, and has left it since")
        if context.text("cause") == _HARDLY:
            return Phrase(
                what=f"the loss is {loss}, where guessing costs {guessing}, and has hardly moved {context.since}",
                effect=f"as weights have gone {percent(context.number('way'))} of their size at most",
                remedy="raise the learning rate",
            )
        return Phrase(
            what=f"the loss has stayed at {loss}, which guessing costs, {context.since}",
            effect="so nothing that helps is learned",
            remedy="check that inputs and labels belong together",
        )


@dataclass(frozen=True, kw_only=True)
class SpikeForerunner(Rule):
    """Signs of a coming loss spike: huge updates, or gradients beyond Adam's moments."""

    id = "spike-forerunner"
    says = (
        "an update, or a gradient relative to Adam's second moment, is far above its usual size, and the loss rises "
        "after it; or Adam's betas let updates grow"
    )
    meaning = "These weights moved many times as far as usual, and the loss rose after it."
    advice = "Clip gradients or updates. A smaller beta2 (0.95) adapts sooner. Check the batches there."
    actions = ("skip", "clamp")
    figure = "updates"
    explained_by = {Nonfinite.id: "anywhere"}
    items = {"times_the_usual_update": EvidenceItem(of_worst=" times the usual update")}
    location_item = EvidenceItem("Times the usual")

    jump: float = threshold(8, "times the median of the last samples: three binades")
    lag: float = threshold(20, "squared gradient over second moment, which is 1 in the mean")
    window: float = threshold(20, "samples whose median it is compared with")
    least: float = threshold(5, "samples before there is a usual size")
    follows: float = threshold(20, "steps after it within which the loss must begin to rise")
    grave: float = threshold(32, "times the usual, and this part of the weights' norm moved: harm by itself")
    values: float = threshold(16, "of a tensor: what one number moves by, relative to itself, has no bound near zero")
    better: float = threshold(0.5, "of the loss before it is left: what was moved that far did no lasting harm")
    betas: float = threshold(1, "beta1^2 / beta2^(1/2), which must be less for Adam to converge (Kingma & Ba 2015, 4)")
    times: float = threshold(2, "times the learning rate in one update of such an Adam; usual ones stay near 1")
    samples: float = threshold(3, "not reported from a single sample")

    # After many small gradients the second moment is small, and the first large gradient is divided by its root: the
    # update is far above the usual, and the loss follows (T8). In most sound trainings updates jump without harm. So a
    # jump is a note, and a warning where the loss did follow, or where it moved a good part of the weights at once and
    # the loss has not fallen well below what it was before: rates that are tried out, and a second optimizer, do that.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding of the updates, one of the gradients."""
        rose = LossSpike().rose_at(view)
        updates = view.cells("updates")
        if updates is not None:
            ratio = np.where(updates.total_of("count") >= self.values, updates.relative_update, np.nan)
            with np.errstate(all="ignore"):
                usual = self._usual(ratio)
                times = np.where(usual > 0, ratio / usual, np.nan)  # after a standstill nothing is usual
            main = set(Modules.of(updates).main_layers(updates))
            weights = np.array([name in main for name in updates.names])[:, None]  # biases begin at zero
            far = weights & (times >= self.grave) & (ratio >= 1 / self.grave)
            at = updates.steps[far.any(axis=0)].tolist()
            harm = not all(self._is_better(view, step) for step in at)
            yield from self._jumps(updates, times, self.jump, "times_the_usual_update", rose, harm)
        gradients, optimizer = view.cells("gradients"), view.cells("optimizer")
        if gradients is not None and optimizer is not None:
            lags = _lags(gradients, optimizer)
            lags[gradients.total_of("count") < self.values] = np.nan  # the square of one number is no mean
            yield from self._jumps(gradients, lags, self.lag, "squared_gradient_over_moment", rose, False)
        yield from self._of_betas(view)

    # With the first beta near 1 and the second one not, the mean of the gradients outlasts the mean of their squares.
    def _of_betas(self, view: View) -> Iterator[Finding]:
        """Yield one finding of an Adam whose betas let updates grow, and whose updates did."""
        updates = view.cells("updates")
        unbounded = [each for each in _adams(view) if each[1] ** 2 >= self.betas * math.sqrt(each[2])]
        if updates is None or not unbounded:
            return
        rate, first, second = unbounded[0]
        times = updates.true_absmax / rate
        spans = spells(times > self.times, ~np.isnan(times), self.samples)
        if spans:
            spots, until = worst(updates, spans, times), last_of(updates, spans)
            evidence = {"cause": _BETAS, "beta1": first, "beta2": second, "times_the_rate": spots[0].value}
            yield self.finding(
                "warning", spots, evidence, until_step=until, collection="updates", actions=(),
                meaning=f"Adam's betas are ({first:g}, {second:g}): its mean of gradients lasts longer than that of "
                f"their squares, so updates grow where gradients shrink. The largest was {number(spots[0].value)} "
                "times the learning rate.",
                advice="Give the betas as (0.9, 0.999), that of the momentum first: they may be swapped.",
            )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the jump, and the rise of the loss after it."""
        if context.text("cause") == _BETAS:
            return Phrase(
                what=f"updates have grown to {number(context.number('times_the_rate'))} times the learning rate "
                f"{context.since}",
                effect=f"as Adam's betas of {context.number('beta1'):g} and {context.number('beta2'):g} let them",
                remedy="look whether the betas are swapped",
            )
        jump, rose = context.number("times_the_usual_update"), context.number("loss_rose_at")
        what = f"parameter gradients of {context.layers} outran Adam's second moment {context.at}"
        if math.isfinite(jump):
            what = f"an update of {context.layers} was {jump:,.0f} times its usual size {context.at}"
        effect = f"and the loss rose at step {rose:,.0f}" if math.isfinite(rose) else ""
        return Phrase(what=what, effect=effect, remedy="clip, and check the batches there")

    def _is_better(self, view: View, step: int) -> bool:
        """Return whether the loss has fallen well below what it was before a step."""
        few = int(self.follows)
        for steps, loss in view.losses.values():
            before, after = (loss[side & np.isfinite(loss)][-few:] for side in (steps <= step, steps > step))
            if min(len(before), len(after)) < self.least:
                return False
            level = float(np.median(before))
            if float(np.median(after)) > level - (1 - self.better) * abs(level):
                return False
        return bool(view.losses)

    def _usual(self, ratio: Floats) -> Floats:
        """The median of the last samples before each; NaN where there are too few."""
        window = int(self.window)
        padded = np.concatenate([np.full((len(ratio), window), np.nan), ratio[:, :-1]], axis=1)
        result = np.full(ratio.shape, np.nan)
        for layer in range(len(ratio)):  # one by one: all windows together are twenty times the table
            ranked = np.sort(sliding_window_view(padded[layer], window), axis=1)  # NaN last
            known = window - np.count_nonzero(np.isnan(ranked), axis=1)
            enough = np.flatnonzero(known >= self.least)
            middle = known[enough]
            result[layer, enough] = (ranked[enough, (middle - 1) // 2] + ranked[enough, middle // 2]) / 2
        return result

    def _jumps(
        self, cells: Cells, times: Floats, limit: float, what: str, rose: list[int], far: bool
    ) -> Iterator[Finding]:
        jumps = np.nan_to_num(times, nan=0.0) > limit
        spans = spells(jumps, ~np.isnan(times), 1)
        if not spans:
            return
        at = cells.steps[jumps.any(axis=0)]
        followed = [step for step in rose if bool(((at <= step) & (step - at <= self.follows)).any())]
        spots = worst(cells, spans, times)
        evidence: dict[str, float | int | str] = {"worst": spots[0].name, what: spots[0].value, "layers": len(spots)}
        evidence |= {"loss_rose_at": followed[0]} if followed else {}
        harm = bool(followed) or far
        yield self.finding(
            "warning" if harm else "info", spots, evidence, until_step=last_of(cells, spans),
            collection=cells.collection,
            meaning=None if followed else _MOVED_FAR if far else _NO_HARM,
            advice=None if harm else "No action is needed if the loss stays as it is.",
            actions=None if harm else (),
        )  # fmt: skip


def _inputs_of_bytes(view: View) -> str | None:
    """Return the model's input that is of whole numbers from 0 to 255 at all samples, beyond 127 at some; or None."""
    cells, root = view.cells("activations"), view.run.manifest.get("root")
    if cells is None:
        return None
    top, (plain, size, square) = cells.true_absmax, (cells.total_of(name) for name in ("sum", "abssum", "sumsq"))
    for place, name in enumerate(cells.names):
        known = np.flatnonzero(cells.recorded[place])
        if not name.startswith(f"{root}:input") or not len(known):
            continue
        sums = np.stack([each[place, known] for each in (top, plain, size, square)])
        whole = bool((sums == np.rint(sums)).all() and (sums[1] == sums[2]).all())  # a NaN equals nothing
        if whole and _SIGNED < float(sums[0].max()) <= _BYTE and int(cells.total_of("count")[place, known[0]]) >= _MANY:
            return name
    return None


def _way(view: View) -> float:
    """Return how far any weight matrix has gone in all steps, at most, by its size. Infinity: it is not known."""
    updates = view.cells("updates")
    if updates is None:
        return math.inf
    main = set(Modules.of(updates).main_layers(updates))
    ratio = updates.relative_update[[name in main for name in updates.names]]
    known = np.isfinite(ratio).any(axis=1)  # a matrix of zeros has no size
    steps = view.last_step + 1
    return float(np.nanmean(ratio[known], axis=1).max() * steps) if known.any() else math.inf


# A larger rate is no remedy there. The findings of these rules say what is.
def _is_lost_to_rounding(view: View) -> bool:
    """Return whether weights hardly move because their updates or gradients are rounded away."""
    return any(f.severity != "info" for rule in (UpdatesSwallowed(), UnderflowHigh()) for f in rule.findings(view))


_MOVED_FAR = "These weights moved many times as far as they usually do, by a good part of their own size."
_BETAS = "betas"
_NO_HARM = "These weights moved many times as far as they usually do, and the loss did not follow."


def _lags(gradients: Cells, optimizer: Cells) -> Floats:
    """Return gradients' squares over Adam's second moments, corrected for their start."""
    place = {name: i for i, name in enumerate(optimizer.names)}
    moments = [place.get(f"{name}:exp_avg_sq", -1) for name in gradients.names]
    common, mine, theirs = np.intersect1d(gradients.steps, optimizer.steps, return_indices=True)
    result = np.full(gradients.shape, np.nan)
    has = np.flatnonzero(np.array(moments) >= 0)
    if not len(has) or not len(common):
        return result
    memory = 1 - 0.999 ** (common + 1)  # beta2's default: with a smaller one this errs on the quiet side
    sums = optimizer.total_of("sum")[np.array(moments)[has]][:, theirs] / memory
    with np.errstate(all="ignore"):
        result[np.ix_(has, mine)] = np.where(sums > 0, gradients.norm[has][:, mine] ** 2 / sums, np.nan)
    return result


def _adams(view: View) -> list[tuple[float, float, float]]:
    """Return the learning rate at the start and the two betas of each optimizer of Adam's kind."""
    found: list[tuple[float, float, float]] = []
    for each in optimizer_settings(view):
        rate, betas = each.get("lr"), each.get("betas")
        if "adam" not in str(each.get("name")).lower() or not isinstance(rate, int | float) or not rate > 0:
            continue
        pair = [x for x in cast("list[object]", betas) if isinstance(x, int | float)] if isinstance(betas, list) else []
        if len(pair) == 2 and all(0 <= x <= 1 for x in pair):
            found.append((float(rate), float(pair[0]), float(pair[1])))
    return found
