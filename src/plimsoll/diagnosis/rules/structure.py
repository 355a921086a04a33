"""Rules of models that are put together so that they cannot learn what they should."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from plimsoll.diagnosis.finding import Finding, Spot
from plimsoll.diagnosis.rules.base import EvidenceItem, FindingContext, Phrase, Rule, threshold
from plimsoll.diagnosis.rules.wiring import facts, listed_in
from plimsoll.diagnosis.view import View


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
        spots = [Spot(name=name, since_step=step, value=math.nan) for name, step in since.items()]
        evidence = {"first": spots[0].name, "layers": len(spots)}
        until = max(view.last_step, *since.values())
        yield self.finding("warning", spots, evidence, until_step=until, collection="weights")

    def phrase(self, context: FindingContext) -> Phrase:
        """Return which layers."""
        return Phrase(
            what=f"the units of {context.place} are copies of each other and move as one, seen {context.since}",
            remedy="initialise their weights at random",
        )


@dataclass(frozen=True, kw_only=True)
class ProbabilitiesAsLogits(Rule):
    """A loss that takes logits, and gets probabilities: its softmax or sigmoid is applied twice."""

    id = "probabilities-as-logits"
    says = "a loss that takes logits gets the results of a softmax or a sigmoid"
    meaning = (
        "The loss applies its softmax or sigmoid to probabilities: it cannot come near zero, and its gradients are far "
        "too small."
    )
    advice = "Give the loss the values from before the softmax or sigmoid, or take the logarithm and use NLLLoss."
    figure = "loss_and_scale"

    losses: float = threshold(1, "the fact is exact: the graph behind the loss has one right before the other")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the whole run."""
        found = facts(view, "squashed twice")
        if found and len(found) >= self.losses:
            event = found[0]
            evidence = {"function": str(event.details.get("function", ""))}
            yield self.finding(
                "warning", (), evidence, since_step=event.step, until_step=max(view.last_step, event.step)
            )

    def phrase(self, context: FindingContext) -> Phrase:
        """Return which function is applied twice."""
        function = context.text("function")
        return Phrase(
            what=f"the loss applies a {function} to the results of a {function}, seen {context.since}",
            effect="so it cannot come near zero",
            remedy=f"give it the values from before the {function}",
        )
