"""Rule of updates that precede a spike of the loss."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from plimsoll.diagnosis.estimates.format_losses import Modules
from plimsoll.diagnosis.finding import Finding
from plimsoll.diagnosis.rules.base import (
    EvidenceItem,
    FindingContext,
    Phrase,
    Rule,
    last_of,
    layer_spans,
    threshold,
    worst,
)
from plimsoll.diagnosis.rules.loss.divergence import LossSpike
from plimsoll.diagnosis.rules.nonfinite import Nonfinite
from plimsoll.diagnosis.tables.cells import Cells, Floats
from plimsoll.diagnosis.tables.optimizer_states import in_other_units, squares_over_moments
from plimsoll.diagnosis.tables.wiring_facts import optimizer_settings
from plimsoll.diagnosis.view import View
from plimsoll.text import number

_MOVED_FAR = "These weights moved many times as far as they usually do, by a good part of their own size."
_BETAS = "betas"
_NO_HARM = "These weights moved many times as far as they usually do, and the loss did not follow."


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
            layers, places, squares = squares_over_moments(gradients, optimizer)
            lags = np.full(gradients.shape, np.nan)
            lags[np.ix_(layers, places)] = squares
            lags[gradients.total_of("count") < self.values] = np.nan  # the square of one number is no mean
            lags[np.isin(gradients.names, list(in_other_units(view)))] = np.nan
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
        spans = layer_spans(times > self.times, ~np.isnan(times), self.samples)
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
        if context.cause == _BETAS:
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
        spans = layer_spans(jumps, ~np.isnan(times), 1)
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
