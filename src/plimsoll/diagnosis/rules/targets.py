"""Rules of losses that are given what they cannot use, and of their targets.

These rules read the facts of `plimsoll.watch.steps.wiring`, events of kind "wiring".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from plimsoll.diagnosis.finding import Finding
from plimsoll.diagnosis.rules.base import EvidenceItem, FindingContext, Phrase, Rule, threshold
from plimsoll.diagnosis.tables.wiring_facts import facts
from plimsoll.diagnosis.view import View

# Facts of the watch, and causes in the evidence.
_ROWS, _PAIRS = "softmax over rows", "pairs"
_NO_LOGARITHMS = "no logarithms"
_LOGARITHMS = (
    "The loss takes logarithms of probabilities, which are never above zero; it gets scores or probabilities, so it "
    "rewards large ones."
)
_TAKE_LOGARITHMS = "Give kl_div and nll_loss the results of log_softmax, or give scores to cross_entropy."


@dataclass(frozen=True, kw_only=True)
class LossWrongAxis(Rule):
    """A loss over the wrong dimension, or whose outputs and targets have different shapes."""

    id = "loss-wrong-axis"
    says = "the loss takes its softmax over the rows of a batch, or each output meets the targets of all rows"
    meaning = "The classes of a row do not compete with each other but the rows of a batch do: no row is classified."
    advice = "Take the (log) softmax over the classes: dim=1 of N x C, dim=-1 where the classes come last."
    figure = "loss_and_scale"
    items = {"rows": EvidenceItem("Rows")}

    losses: float = threshold(1, "the facts are exact: the graph behind the loss has this dimension, or these shapes")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding of each kind."""
        for fact, meaning, advice in (
            (_ROWS, self.meaning, self.advice),
            (
                _PAIRS,
                "Outputs of shape N x 1 and targets of shape N make N x N pairs: each output meets all targets.",
                "Give both one shape: targets.unsqueeze(1), or outputs.squeeze(1).",
            ),
        ):
            found = facts(view, fact)
            if found and len(found) >= self.losses:
                event = found[0]
                evidence = {"rows": int(cast("int", event.details.get("rows", 0))), "cause": fact}
                yield self.finding(
                    "warning", (), evidence, since_step=event.step, until_step=max(view.last_step, event.step),
                    meaning=meaning, advice=advice,
                )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return what the loss compares."""
        rows = f"{context.number('rows'):,.0f}"
        if context.text("cause") == _ROWS:
            return Phrase(
                what=f"the loss takes a softmax over the {rows} rows of a batch and not over the classes, seen "
                f"{context.since}",
                remedy="take it over the classes",
            )
        return Phrase(
            what=f"the loss compares {rows} outputs with {rows} targets of another shape, broadcast to {rows} x {rows} "
            f"pairs, seen {context.since}",
            effect="so all outputs are drawn to the mean of the targets",
            remedy="give both one shape",
        )


@dataclass(frozen=True, kw_only=True)
class TargetsOutOfReach(Rule):
    """Targets of a regression that the function before the loss cannot put out."""

    id = "targets-out-of-reach"
    says = "a regression has targets that the function before its loss cannot put out"
    meaning = "The outputs have bounds, and targets lie outside of them: the error there cannot become zero."
    advice = "End with a linear layer, or bring the targets into the range of the last function."
    figure = "loss_and_scale"

    batches: float = threshold(1, "the fact is exact; one target in twenty, since fewer may be outliers")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding."""
        found = facts(view, "out of reach")
        if found and len(found) >= self.batches:
            event = found[0]
            evidence = {name: str(event.details.get(name, "")) for name in ("function", "low", "high")}
            until = max(view.last_step, event.step)
            yield self.finding("warning", (), evidence, since_step=event.step, until_step=until)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the last function and its bounds."""
        low, high = context.text("low"), context.text("high")
        bounds = "no negative number" if high == "inf" else f"{low} to {high} only"
        return Phrase(
            what=f"the loss has targets out of reach of a {context.text('function')} before it, {context.since}",
            effect=f"since it puts out {bounds}",
            remedy="end with a linear layer, or scale the targets",
        )


@dataclass(frozen=True, kw_only=True)
class ProbabilitiesAsLogits(Rule):
    """A loss of logits that gets probabilities, or one of log probabilities that gets something else."""

    id = "probabilities-as-logits"
    says = "a loss that takes logits gets the results of a softmax or a sigmoid, or one of log probabilities others"
    meaning = (
        "The loss applies its softmax or sigmoid to probabilities: it cannot come near zero, and its gradients are far "
        "too small."
    )
    advice = "Give the loss the values from before the softmax or sigmoid, or take the logarithm and use NLLLoss."
    figure = "loss_and_scale"

    losses: float = threshold(1, "the fact is exact: the graph behind the loss has one right before the other")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding of each kind, of the whole run."""
        for fact, meaning, advice in (
            ("squashed twice", self.meaning, self.advice),
            (_NO_LOGARITHMS, _LOGARITHMS, _TAKE_LOGARITHMS),
        ):
            found = facts(view, fact)
            if found and len(found) >= self.losses:
                event = found[0]
                evidence = {"function": str(event.details.get("function", ""))}
                if fact == _NO_LOGARITHMS:
                    evidence["cause"] = fact
                yield self.finding(
                    "warning", (), evidence, since_step=event.step, until_step=max(view.last_step, event.step),
                    meaning=meaning, advice=advice,
                )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return which function is applied twice."""
        function = context.text("function")
        if context.text("cause") == _NO_LOGARITHMS:
            return Phrase(
                what=f"{function} takes log probabilities, and gets probabilities or scores, seen {context.since}",
                effect="so it falls below zero and does not fit the targets",
                remedy="give it log_softmax of the scores",
            )
        return Phrase(
            what=f"the loss applies a {function} to the results of a {function}, seen {context.since}",
            effect="so it cannot come near zero",
            remedy=f"give it the values from before the {function}",
        )
