"""Rules of what a training keeps: values with too few digits, and modules in the wrong mode.

They read the facts of `plimsoll.watch.steps.kept_narrow` and `evaluation_mode`, events of kind "wiring".
"""

from collections.abc import Iterator
from dataclasses import dataclass

from plimsoll.diagnosis.finding import Finding, Severity, Spot
from plimsoll.diagnosis.rules.base import EvidenceItem, FindingContext, Phrase, Rule, threshold
from plimsoll.diagnosis.rules.wiring import facts, listed_in
from plimsoll.diagnosis.view import View
from plimsoll.runs import Event
from plimsoll.text import percent

_NEVER = float("nan")  # a spot without a number
_NEVER_UPDATED = (
    "Batch norms in evaluation mode use running statistics that have never been updated (mean 0, variance 1): they "
    "normalise nothing."
)
_SINCE = (
    "The model was in training mode before, and is trained in evaluation mode since: dropout is off, and batch norms "
    "use the statistics of before."
)


@dataclass(frozen=True, kw_only=True)
class KeptNarrow(Rule):
    """FP32 weights, gradients, moments, indices or a loss that something rounds."""

    id = "kept-narrow"
    says = (
        "weights, gradients, second moments, indices or a sum of losses are rounded to a narrow format, and what they "
        "need is lost"
    )
    meaning = "Something rounds FP32 values to a narrow format, and small changes or small values are lost."
    advice = "Keep them in FP32, and cast a copy where a narrow format is needed."
    figure = "loss_and_scale"
    items = {
        "lost": EvidenceItem("Lost", "share"),
        "decay": EvidenceItem("Decay of the second moments"),
        "terms": EvidenceItem("Numbers added"),
    }

    lost: float = threshold(0.25, "of the updates of weights: fewer are a note")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding for each fact."""
        for event in facts(view, "weights rounded"):
            fmt, lost = _format(event), _share(event)
            yield self._finding(
                view, event, "weights rounded after each step", "warning" if lost >= self.lost else "info",
                meaning=f"FP32 weights are rounded to {fmt} after each step, so that {percent(lost)} of the updates "
                "in the first steps were undone.",
                advice=f"Keep the FP32 weights as they are, and write {fmt} into a copy of them. Or use an optimizer "
                f"for {fmt} weights that rounds at random or compensates (MasterWeights, bf16-kahan).",
            )  # fmt: skip
        for event in facts(view, "gradients rounded"):
            fmt = _format(event)
            yield self._finding(
                view, event, "gradients rounded before the step", "warning",
                meaning=f"Between the backward pass and the optimizer's step gradients are rounded to {fmt}, and "
                f"{percent(_share(event))} of them become zero.",
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

    def phrase(self, context: FindingContext) -> Phrase:
        """Return what is rounded, and the remedy."""
        cause, fmt = context.text("cause"), context.text("format").upper()
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

    def _indices(self, view: View) -> Iterator[Finding]:
        events = facts(view, "indices rounded")
        by_name = {name: event for event in reversed(events) for name in listed_in(event, "parameters")}
        if not by_name:
            return
        event = next(iter(by_name.values()))
        spots = [Spot(name=name, since_step=event.step, value=_NEVER) for name, event in by_name.items()]
        fmt = _format(event)
        yield self.finding(
            "warning", spots, {"cause": "indices rounded", "format": str(event.details.get("format", ""))},
            until_step=max(view.last_step, event.step),
            meaning=f"The ids that these tables are indexed with have been rounded to {fmt}: neighbouring ids are the "
            "same row, and the rows between are never used.",
            advice="Leave integers out when a batch or a model's input is cast to a narrow format.",
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
        return self.finding(
            severity, (), evidence, since_step=event.step, until_step=max(view.last_step, event.step),
            meaning=meaning, advice=advice,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EvaluationMode(Rule):
    """A model that is trained in evaluation mode, or batch norms that have seen no data."""

    id = "evaluation-mode"
    says = "the model is trained in evaluation mode: dropout is off, and batch norms do not normalise by the batch"
    meaning = "In evaluation mode dropout does nothing, and batch norms use statistics of earlier data."
    advice = "Call model.train() before training, and again after each evaluation."
    figure = "loss_and_scale"

    norms: float = threshold(1, "batch norms that have never seen data: the fact is exact")

    # Fine-tuning with frozen batch norms is usual, and a model from a library is often in evaluation mode: a note.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, the last that is known."""
        events = facts(view, "evaluation mode")
        if not events:
            return
        event = events[-1]
        whole, later = event.details.get("whole") is True, event.details.get("later") is True
        dropouts, norms, initial = (listed_in(event, key) for key in ("dropouts", "norms", "initial"))
        spots = [Spot(name=name, since_step=event.step, value=_NEVER) for name in initial or norms or dropouts]
        evidence: dict[str, float | int | str] = {
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
        what = f"the model is trained in evaluation mode, seen {context.since}"
        if context.number("never_updated") > 0:
            what = f"batch norms in evaluation mode normalise nothing, seen {context.since}"
        return Phrase(what=what, remedy="call model.train()")


def _format(event: Event) -> str:
    return str(event.details.get("format", "")).upper()


def _share(event: Event) -> float:
    value = event.details.get("lost")
    return float(value) if isinstance(value, int | float) else 0.0
