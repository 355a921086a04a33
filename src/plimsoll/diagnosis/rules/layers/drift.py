"""Rule of sizes that move steadily and do not settle."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from plimsoll.diagnosis.estimates.format_losses import Modules
from plimsoll.diagnosis.finding import Finding, Spot
from plimsoll.diagnosis.rules.base import EvidenceItem, FindingContext, Phrase, Rule, outcome, threshold
from plimsoll.diagnosis.rules.nonfinite import Nonfinite
from plimsoll.diagnosis.tables.cells import Cells, Floats
from plimsoll.diagnosis.tables.trend import falls, goes_on, halves, looks, trend
from plimsoll.diagnosis.view import View, log2
from plimsoll.tensor_collections import FORWARD
from plimsoll.text import times_two_to

_ENDLESS = "a loss without a lower bound"
_BOTTOMLESS = (
    "The layer's values grow while the loss falls below zero and goes on falling: the training follows a term that has "
    "no lower bound."
)
_OF_A_SIGN = (
    "Look at the loss for a term that is subtracted or has the wrong sign, or that the model can make as negative as "
    "it likes. Bound it, or turn its sign."
)


@dataclass(frozen=True, kw_only=True)
class Drift(Rule):
    """Weights or activations whose size moves steadily and does not settle."""

    id = "distribution-drift"
    says = "the size of a layer's weights or outputs moves steadily and does not settle"
    meaning = (
        "The layer's values have drifted from their initial range: weight decay, normalisation and learning rate do "
        "not balance."
    )
    advice = "Set weight decay so that the norm settles, or normalise. With unit scaling, audit the layer again."
    figure = "spectrogram"
    explained_by = {Nonfinite.id: "anywhere"}
    location_item = EvidenceItem("Binades")
    is_secondary = True

    binades: float = threshold(3.0, "a factor of eight; sizes of sound layers stay within one or two binades")
    still: float = threshold(0.25, "of the way was made in the second half of the steps")
    last: float = threshold(1, "binades in each of the last two quarters; linear growth makes 0.4")
    confidence: float = threshold(0.99, "Mann-Kendall test, two-sided")

    # Unit scaling rests on sizes that stay (U5); weights that grow without end lose the precision of their updates.
    # Sizes that move while a model learns, and then settle, are a note. So are weights while the loss still halves.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding for each of weights and activations."""
        for collection in FORWARD:
            cells = view.cells(collection)
            if cells is None:
                continue
            drifts = [each for i in self._candidates(cells) if (each := self._drift(cells, i)) is not None]
            if not drifts:
                continue
            learns = collection == "weights" and halves(view.scalar("loss")[1])
            moving = [each for each in drifts if each[3] and not learns]
            still = learns and any(each[3] for each in drifts)
            shown = sorted(moving or drifts, key=lambda each: -abs(each[1]))
            evidence = {"worst": shown[0][0].name, "binades": shown[0][1], "layers": len(shown)}
            spots, until = [spot for spot, *_ in shown], max(until for _, _, until, _ in shown)
            if moving:
                more: dict[str, Any] = {}
                if shown[0][1] > 0 and _falls_below_zero(view):
                    evidence["cause"] = _ENDLESS
                    more = {"meaning": _BOTTOMLESS, "advice": _OF_A_SIGN}
                yield self.finding("warning", spots, evidence, until_step=until, collection=collection, **more)
                continue
            yield self.finding(
                "info", spots, evidence, until_step=until, collection=collection,
                meaning=f"The layer's values moved during the training, "
                f"{'and still do' if still else outcome(cells, spots)}.",
                advice="No action is needed.",
            )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the direction and how far the sizes moved."""
        binades = context.number("binades")
        direction = "grown" if binades > 0 else "shrunk"
        endless = context.cause == _ENDLESS
        goes_on = f" and still {'grow' if binades > 0 else 'shrink'}" if context.finding.severity != "info" else ""
        return Phrase(
            what=f"{context.tensors} of {context.layers} have {direction} {times_two_to(abs(binades))}{goes_on}, seen "
            f"{context.since}",
            effect="while the loss falls below zero without a bound" if endless else "",
            remedy="look for a term of the loss with the wrong sign"
            if endless
            else "normalise, or balance weight decay and learning rate",
        )

    def _candidates(self, cells: Cells) -> list[int]:
        """Return the layers whose size moved far enough for a trend to be computed."""
        sizes = log2(cells.rms)
        with np.errstate(all="ignore"):
            span = np.fmax.reduce(sizes, axis=1, initial=-np.inf) - np.fmin.reduce(sizes, axis=1, initial=np.inf)
        main = set(Modules.of(cells).main_layers(cells)) if cells.collection == "weights" else set(cells.names)
        return [i for i in np.flatnonzero(span >= self.binades).tolist() if cells.names[i] in main]

    def _drift(self, cells: Cells, layer: int) -> tuple[Spot, float, int, bool] | None:
        """Return the location, its size's change, the last step, and if it still moves."""
        sizes = log2(cells.rms[layer])
        known = np.flatnonzero(~np.isnan(sizes))
        since, most, until = None, 0.0, 0
        for samples in looks(len(known)):
            seen = known[:samples]
            start, half, end = _levels(sizes[seen])
            moved = end - start
            if abs(moved) < self.binades or (end - half) / moved < self.still:
                continue
            line = trend(cells.steps[seen], sizes[seen])
            if line is None or line.confidence < self.confidence or line.low * line.high <= 0:
                continue
            until = int(cells.steps[seen[-1]])
            since = until if since is None else since
            most = moved if abs(moved) > abs(most) else most
        if since is None:
            return None
        on = goes_on(cells.steps[known], sizes[known], least=self.last, confidence=self.confidence)
        until = int(cells.steps[known[-1]]) if on else until
        return Spot(name=cells.names[layer], since_step=since, value=most), most, until, on


def _falls_below_zero(view: View) -> bool:
    """Return whether a loss has been below zero for the last quarter of its steps, and has gone on falling."""
    quarters = [loss[-(len(loss) // 4) :] for _, loss in view.losses.values() if len(loss) >= 4]
    return any(bool((quarter < 0).all()) and falls(quarter) for quarter in quarters)


def _levels(values: Floats) -> tuple[float, float, float]:
    """Return the medians of the first, the middle and the last eighth."""
    width = max(len(values) // 8, 1)
    half = len(values) // 2
    pieces = values[:width], values[half : half + width], values[-width:]
    start, middle, end = (float(np.median(piece)) for piece in pieces)
    return start, middle, end
