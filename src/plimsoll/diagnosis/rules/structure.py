"""Rules of models that are put together so that they cannot learn what they should."""

from collections.abc import Iterator
from dataclasses import dataclass

from plimsoll.diagnosis.finding import Finding
from plimsoll.diagnosis.rules.base import FindingContext, Phrase, Rule, threshold
from plimsoll.diagnosis.rules.wiring import facts
from plimsoll.diagnosis.view import View


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
