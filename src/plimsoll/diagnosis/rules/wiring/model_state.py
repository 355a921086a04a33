"""Rules of a model's mode and of its first weights."""

from collections.abc import Iterator
from dataclasses import dataclass

from plimsoll.diagnosis.finding import Finding, Spot
from plimsoll.diagnosis.rules.base import EvidenceItem, FindingContext, Phrase, Rule, threshold
from plimsoll.diagnosis.tables.wiring_facts import facts, first_fact, listed_in
from plimsoll.diagnosis.view import View
from plimsoll.runs import Event
from plimsoll.text import number, percent

_NEVER_UPDATED = (
    "Batch norms in evaluation mode use running statistics that have never been updated (mean 0, variance 1): they "
    "normalise nothing."
)
_FOLLOW = "frozen norms follow"  # a fact of the watch, and the cause in the evidence
_FROZEN_NORMS = (
    "These batch norms have frozen weights and are in training mode: their running statistics follow the data, and "
    "what was trained with the old ones no longer fits them."
)
_GAINS, _OUTLIERS = "gains drawn", "outliers drawn"  # facts of the watch, and the causes in the evidence
_SINCE = (
    "The model was in training mode before, and is trained in evaluation mode since: dropout is off, and batch norms "
    "use the statistics of before."
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
        if context.cause == _FOLLOW:
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
    """First weights that are not drawn as they should be: units that are copies, gains around zero, far outliers."""

    id = "symmetric-weights"
    says = (
        "the units of a layer have the same weights, and move as one; or weights were drawn wrongly: gains of norms "
        "around zero, or a few weights at one value far from the others"
    )
    meaning = "The units began with equal weights and get equal gradients: the layer is as good as a single unit."
    advice = "Initialise the layer at random (nn.init.kaiming_normal_). Only its bias may begin at a constant."
    figure = "loss_and_scale"
    items = {
        "first": EvidenceItem(unit="location"),
        "deviation": EvidenceItem("Deviation of the gains"),
        "value": EvidenceItem("Size of the outliers"),
        "deviations": EvidenceItem("In deviations of the others"),
        "share": EvidenceItem("Of the weights", "share"),
    }

    layers: float = threshold(1, "the facts are exact: layers that begin at a constant otherwise differ after a step")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding of all layers whose units are copies, one of gains, one of outliers."""
        since = {name: event.step for event in facts(view, "equal rows") for name in listed_in(event, "parameters")}
        if since and len(since) >= self.layers:
            spots = [Spot(name=name, since_step=step) for name, step in since.items()]
            evidence: dict[str, float | int | str] = {"first": spots[0].name, "layers": len(spots)}
            until = max(view.last_step, *since.values())
            yield self.finding("warning", spots, evidence, until_step=until, collection="weights")
        for event in facts(view, _GAINS)[:1]:
            names = listed_in(event, "parameters")
            deviation = float(str(event.details.get("deviation", 0.0)))
            yield self._drawn(
                view, event, names, {"cause": _GAINS, "deviation": deviation, "layers": len(names)},
                f"The gains of all norms began near zero, with both signs and a deviation of {number(deviation)}: they "
                "were initialised as weights are. Norms multiply each channel by such a gain, where 1 is usual.",
                "Let gains of norms begin at 1 and their biases at 0: leave norms, or all parameters of one "
                "dimension, out of the loop that draws the weights.",
            )  # fmt: skip
        for event in facts(view, _OUTLIERS)[:1]:
            names = listed_in(event, "parameters")
            value, share, deviations = (
                float(str(event.details.get(name, 0.0))) for name in ("value", "share", "deviations")
            )
            yield self._drawn(
                view, event, names,
                {"cause": _OUTLIERS, "value": value, "deviations": deviations, "share": share, "layers": len(names)},
                f"A few of the first weights ({percent(share)}, at random places) are outliers of exactly the same "
                f"size, {number(value)}, which is {number(deviations)} times the deviation of the others. They come "
                "from how the weights were drawn.",
                "Draw the weights in FP32 and cast them then: a uniform number in 16 bits is often exactly 0 or 1, of "
                "which a logarithm or an inverse error function makes Inf. Cut the draw at two or three deviations "
                "(a and b of trunc_normal_ are values, not deviations).",
            )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return which layers."""
        if context.cause == _GAINS:
            return Phrase(
                what="the gains of the norms were initialised around zero, with a deviation of "
                f"{number(context.number('deviation'))}",
                remedy="let them begin at 1",
            )
        if context.cause == _OUTLIERS:
            return Phrase(
                what=f"{context.place} began with outliers of {number(context.number('value'))}, "
                f"{number(context.number('deviations'))} times the deviation of its other weights",
                remedy="draw the weights in FP32",
            )
        return Phrase(
            what=f"the units of {context.place} are copies of each other and move as one, seen {context.since}",
            remedy="initialise their weights at random",
        )

    def _drawn(
        self, view: View, event: Event, names: list[str], evidence: dict[str, float | int | str], meaning: str,
        advice: str,
    ) -> Finding:  # fmt: skip
        spots = [Spot(name=name, since_step=event.step) for name in names]
        until = max(view.last_step, event.step)
        return self.finding(
            "warning", spots, evidence, until_step=until, collection="weights", meaning=meaning, advice=advice
        )
