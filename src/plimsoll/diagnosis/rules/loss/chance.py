"""Rule of a classifier whose loss is that of guessing."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np

from plimsoll.diagnosis.estimates.format_losses import Modules
from plimsoll.diagnosis.finding import Finding, Spot
from plimsoll.diagnosis.rules.base import EvidenceItem, FindingContext, Phrase, Rule, threshold
from plimsoll.diagnosis.rules.optimizer.updates import UpdatesSwallowed
from plimsoll.diagnosis.rules.underflow import UnderflowHigh
from plimsoll.diagnosis.tables.cells import Floats, Ints
from plimsoll.diagnosis.tables.wiring_facts import first_fact, listed_in, random_trunk
from plimsoll.diagnosis.view import View
from plimsoll.text import number, percent

_FAR_OFF = "begins far off"  # a fact of the watch, and the cause in the evidence
_ABOVE = "above guessing"
_RANDOM = "frozen layers as drawn"
_COSINES = "cosines held small"  # likewise
_HARDLY = "weights hardly move"
_SIGNED, _BYTE = 127, 255  # the largest bytes, with and without a sign
_MANY = 64  # values that are all whole: no chance


@dataclass(frozen=True, kw_only=True)
class LossAtChance(Rule):
    """A cross entropy that begins far above that of guessing, or stays where guessing is."""

    id = "loss-at-chance"
    says = "a classifier's loss stays where guessing is, rises far above it, begins there, or can only be there"
    meaning = "The loss is that of guessing among the classes: what the model has learned does not help."
    advice = (
        "Check that inputs and labels still belong together (sorted or shuffled apart, off by one, rows mixed by a "
        "view or reshape where a transpose was meant), and that the inputs say something of the labels; then the "
        "learning rate."
    )
    figure = "loss_and_scale"
    items = {
        "guessing": EvidenceItem("Loss of guessing"),
        "loss": EvidenceItem("Loss"),
        "lowest": EvidenceItem("Lowest loss"),
    }
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
        yield from self._of_cosines(view)
        if event is not None and len(loss) >= size:
            guessing = math.log(int(cast("int", event.details["classes"])))
            guessing *= float(cast("float", event.details.get("times", 1.0)))
            means = loss[: len(loss) // size * size].reshape(-1, size).mean(axis=1)
            if first_fact(view, _COSINES) is None:  # else it says why
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

    def _of_cosines(self, view: View) -> Iterator[Finding]:
        """Yield one finding of scores between bounds within which no loss is much below that of guessing."""
        event = first_fact(view, _COSINES)
        if event is None:
            return
        factor, lowest, classes = (float(cast("float", event.details[key])) for key in ("factor", "lowest", "classes"))
        evidence = {"guessing": math.log(classes), "lowest": lowest, "factor": factor, "cause": _COSINES}
        yield self.since_event(
            "warning", event, view, evidence,
            meaning=f"The scores are cosines times a constant of {factor:.3g}, so they lie between -{factor:.3g} and "
            f"{factor:.3g}. The softmax over them stays nearly uniform whatever is learned: the loss cannot fall below "
            f"{lowest:.4g}, where guessing costs {math.log(classes):.4g}.",
            advice="Divide cosines by the temperature (0.07 is usual), do not multiply by it. Or learn the factor.",
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
        trunk = random_trunk(view)
        if trunk is None:
            way = min(way, _way(view))
            moved = f"Updates of a weight matrix add up to {percent(way)} of its size: the steps are not too small."
            advice = f"{self.advice.partition('; ')[0]}. {moved}" if self.way <= way < math.inf else None
            yield self.finding("warning", (), evidence, since_step=since, until_step=until, advice=advice)
            return
        names = listed_in(trunk, "modules")
        yield self.finding(
            "warning", [Spot(name=f"{name}.weight", since_step=since) for name in names],
            evidence | {"cause": _RANDOM}, since_step=since, until_step=until,
            meaning="The loss is that of guessing among the classes, and the frozen layers before all that is trained "
            "hold the random weights that torch drew for them: no checkpoint was loaded into them.",
            advice="Compare the keys of the checkpoint with those of the model (a prefix such as module. is usual), "
            "and load it with strict=True, or look at what load_state_dict returns. Or unfreeze the layers.",
        )  # fmt: skip

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
        if context.cause == _COSINES:
            return Phrase(
                what=f"scores are cosines times {number(context.number('factor'))}, seen {context.since}",
                effect=f"so the loss cannot fall below {number(context.number('lowest'))}, where guessing costs "
                f"{number(context.number('guessing'))}",
                remedy="divide by the temperature",
            )
        loss, guessing = (number(context.number(name)) for name in ("loss", "guessing"))
        if context.cause == _FAR_OFF:
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
        if context.cause == _ABOVE:
            is_over = context.finding.severity == "info"
            return Phrase(
                what=f"the loss has risen to {loss}, where guessing costs {guessing}, {context.since}"
                + (f", {until}" if is_over else ""),
                remedy="" if is_over else "compare the gradients of a batch with those of the plain loss",
            )
        if context.finding.severity == "info":
            return Phrase(what=f"the loss was {loss}, which guessing costs, {until}, and has left it since")
        if context.cause == _HARDLY:
            return Phrase(
                what=f"the loss is {loss}, where guessing costs {guessing}, and has hardly moved {context.since}",
                effect=f"as weights have gone {percent(context.number('way'))} of their size at most",
                remedy="raise the learning rate",
            )
        if context.cause == _RANDOM:
            return Phrase(
                what=f"the loss has stayed at {loss}, which guessing costs, {context.since}, over frozen layers that "
                "are as they were drawn",
                remedy="load the checkpoint with strict=True",
            )
        return Phrase(
            what=f"the loss has stayed at {loss}, which guessing costs, {context.since}",
            effect="so nothing that helps is learned",
            remedy="check that inputs and labels belong together",
        )


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
