"""Rules of losses that are given what they cannot use, of their targets, and of tokens that do not come through.

These rules read the facts of `plimsoll.watch.steps.wiring.loss_graph`, events of kind "wiring".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from plimsoll.diagnosis.finding import Finding
from plimsoll.diagnosis.rules.base import EvidenceItem, FindingContext, Phrase, Rule, threshold
from plimsoll.diagnosis.tables.wiring_facts import facts
from plimsoll.diagnosis.view import View
from plimsoll.runs import Event
from plimsoll.text import percent

# Facts of the watch, and causes in the evidence.
_ROWS, _PAIRS = "softmax over rows", "pairs"
_NO_LOGARITHMS = "no logarithms"
_NOT_SHIFTED, _PADDING, _SEEN = "not shifted", "padding counted", "next seen"
_OF_THE_NEXT = (
    "The targets are the tokens at the next places, and attention has no causal mask: the model sees the token that it "
    "is to predict, and learns to copy it. The loss says nothing of what it can predict."
)
_CAUSAL = "Let each place see those before it alone: is_causal=True, or a mask that is -inf above the diagonal."
_OF_PADDING = (
    "Most of the targets that count in the loss are one token, at places where the model is given that token too: "
    "padding. The loss is mostly of places that mean nothing, and so are the gradients."
)
_LEAVE_OUT = "Set the targets of padding to -100, or give the loss ignore_index."
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
            event = _first_of(view, fact, self.losses)
            if event is not None:
                evidence = {"rows": int(cast("int", event.details.get("rows", 0))), "cause": fact}
                yield self.since_event("warning", event, view, evidence, meaning=meaning, advice=advice)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return what the loss compares."""
        rows = f"{context.number('rows'):,.0f}"
        if context.cause == _ROWS:
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
        event = _first_of(view, "out of reach", self.batches)
        if event is not None:
            evidence = {name: str(event.details.get(name, "")) for name in ("function", "low", "high")}
            yield self.since_event("warning", event, view, evidence)

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
            event = _first_of(view, fact, self.losses)
            if event is not None:
                evidence = {"function": str(event.details.get("function", ""))}
                if fact == _NO_LOGARITHMS:
                    evidence["cause"] = fact
                yield self.since_event("warning", event, view, evidence, meaning=meaning, advice=advice)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return which function is applied twice."""
        function = context.text("function")
        if context.cause == _NO_LOGARITHMS:
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


@dataclass(frozen=True, kw_only=True)
class TargetsRepeatInputs(Rule):
    """A cross entropy whose targets are tokens that the model is given, or sees."""

    id = "targets-repeat-inputs"
    says = (
        "the targets of a language model are its own inputs, or tokens that its attention sees, or most of those that "
        "count are padding"
    )
    meaning = (
        "The model is to put out the token that it is given at each place, and not the one after it: it learns to copy."
    )
    advice = "Shift one of both by a place: scores[:, :-1] against tokens[:, 1:]."
    figure = "loss_and_scale"
    items = {"share": EvidenceItem("Padding among the targets", "share", hide_zero=True)}

    batches: float = threshold(1, "the facts are exact, of 32 targets or more; of padding one half, one token repeated")

    # Where attention looks at all places, targets may well be inputs: an autoencoder puts out what it is given.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding of targets that were not shifted, one of those that are seen, one of padding."""
        for fact, meaning, advice in (
            (_NOT_SHIFTED, None, None),
            (_SEEN, _OF_THE_NEXT, _CAUSAL),
            (_PADDING, _OF_PADDING, _LEAVE_OUT),
        ):
            event = _first_of(view, fact, self.batches)
            if event is not None:
                share = float(cast("float", event.details.get("share", 0.0))) if fact == _PADDING else 0.0
                evidence = {"cause": fact, "share": share, "token": int(cast("int", event.details.get("token", 0)))}
                yield self.since_event("warning", event, view, evidence, meaning=meaning, advice=advice)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return which targets."""
        if context.cause == _PADDING:
            share, token = percent(context.number("share")), f"{context.number('token'):.0f}"
            return Phrase(
                what=f"{share} of the targets are token {token}, which is the input there too, seen {context.since}",
                effect="so the loss is mostly of padding",
                remedy="give the loss ignore_index",
            )
        if context.cause == _SEEN:
            return Phrase(
                what=f"the targets are the tokens at the next places, and attention sees them, {context.since}",
                effect="so the model copies what it is to predict",
                remedy="give attention a causal mask",
            )
        return Phrase(
            what=f"the targets are the model's own input tokens, at the same places, seen {context.since}",
            effect="so it learns to copy",
            remedy="shift the targets by one place",
        )


@dataclass(frozen=True, kw_only=True)
class TokensHidden(Rule):
    """Tokens that a model is given and does not read."""

    id = "tokens-hidden"
    says = "attention reads the padding of each row, and a mask hides all other tokens"
    meaning = (
        "The mask has the other convention: attention reads the padding and nothing else, so the model sees no token."
    )
    advice = (
        "Invert the mask: in scaled_dot_product_attention True takes part, in the key_padding_mask of "
        "MultiheadAttention and of nn.Transformer True is left out."
    )
    figure = "loss_and_scale"
    items = {"hidden": EvidenceItem("Tokens that are hidden"), "rows": EvidenceItem("Rows with padding")}

    batches: float = threshold(1, "the fact is exact: of four rows or more each place is read or hidden the wrong way")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding."""
        event = _first_of(view, "padding read", self.batches)
        if event is not None:
            evidence = {key: int(cast("int", event.details.get(key, 0))) for key in ("token", "rows", "hidden")}
            yield self.since_event("warning", event, view, evidence)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return what attention reads."""
        return Phrase(
            what=f"a mask lets attention read token {context.number('token'):.0f} alone, the padding at the ends of "
            f"rows, seen {context.since}",
            effect="and hides all others",
            remedy="invert the mask",
        )


@dataclass(frozen=True, kw_only=True)
class BatchesOfOneClass(Rule):
    """Batches that are sorted by class."""

    id = "batches-of-one-class"
    says = "the targets of a batch are of one class, and those of other batches of another: data is not shuffled"
    meaning = "Each class is learned in turn, and forgotten in the next: gradients of a batch know one class."
    advice = "Shuffle: DataLoader(shuffle=True), or a permutation of all rows in each epoch."
    figure = "loss_and_scale"
    items = {"batches": EvidenceItem("Sampled batches of one class"), "of": EvidenceItem("Sampled batches")}

    batches: float = threshold(5, "of ten or more, half of all; drawn at random, eight rows of a class are no chance")

    # One frequent class gives batches of one class too, but always of the same.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the whole run."""
        for event in facts(view, "one class"):
            alike, of, classes = (int(cast("int", event.details.get(key, 0))) for key in ("batches", "of", "classes"))
            if alike >= self.batches:
                evidence = {"batches": alike, "of": of, "classes": classes}
                yield self.since_event("warning", event, view, evidence)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return in how many batches."""
        alike, of = (f"{context.number(key):.0f}" for key in ("batches", "of"))
        return Phrase(
            what=f"{alike} of {of} sampled batches had targets of one class, and not always the same, seen "
            f"{context.since}",
            effect="so each class is forgotten in the next",
            remedy="shuffle the data",
        )


def _first_of(view: View, fact: str, least: float) -> Event | None:
    """Return the first event of a fact that was recorded so often. None: it was not."""
    found = facts(view, fact)
    return found[0] if found and len(found) >= least else None
