"""Rules of an optimizer's updates and state: what rounding takes, and what rules an update instead of gradients."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from plimsoll.diagnosis.estimates.element_counts import Populations
from plimsoll.diagnosis.estimates.format_losses import Modules
from plimsoll.diagnosis.finding import Finding, Spot
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
from plimsoll.diagnosis.rules.optimizer.kept_narrow import KeptNarrow
from plimsoll.diagnosis.tables.optimizer_states import (
    SECOND_MOMENTS,
    TOWARD_ZERO,
    added_decay,
    exchanged_states,
    in_other_units,
    lost_second_moments,
    recorded_epsilon,
    spared_updates,
    without_a_zero,
)
from plimsoll.diagnosis.tables.wiring_facts import facts, listed_in, weights_stay, with_epsilon_of_zero
from plimsoll.diagnosis.view import View
from plimsoll.formats import get_element
from plimsoll.runs import Event
from plimsoll.spectrum.fit.population import ordinal
from plimsoll.text import percent

_MOST = 1e6  # times the size of a gradient
_DEFAULT = 1e-8  # epsilon of torch's Adam
_UNMOVED = "These weights were the same after the step: their updates were zero, or smaller than their rounding."
NEVER_MOVED = "No weight has moved since the first step, although gradients and the learning rate are not zero."
_NEAR_ZERO = "No action is needed if the learning rate is near zero."
_LOOK = "Look at what the optimizer adds: a rate that is far too small, or a state that is zero in its format."
_EXCHANGED = "states of other parameters"
_ROUNDED_STATE = "a state that is rounded"
_OVER_EPSILON = "Adam divided by epsilon instead of by the size of the gradients for a while, and does not any more."
_UNEVEN_CODES = (
    "Keep the second moments in FP32, or in codes that have an exponent. Evenly spaced ones hold no small values: the "
    "root of a value below half a step is zero, and the update explodes."
)


@dataclass(frozen=True, kw_only=True)
class UpdatesSwallowed(Rule):
    """Weights that were to move and are the same after the step."""

    id = "updates-swallowed"
    says = "weights do not change although their gradients are not zero"
    meaning = "Updates are smaller than the rounding of the weights they are added to, so they are lost at each step."
    advice = "Keep FP32 master weights (MasterWeights), round stochastically, or compensate (bf16-kahan)."
    actions = ("stop",)
    figure = "updates"
    items = {"unmoved": EvidenceItem(unit="share", of_worst=" unmoved")}
    location_item = EvidenceItem("Unmoved", "share")
    # Of FP32 weights it is a note, and still the first thing to look at where a run does not learn.
    is_noted = True

    share: float = threshold(0.5, "N3: an update below 2^-12 of its weight is lost in FP16, below 2^-9 in BF16")
    samples: float = threshold(3, "the first steps of a warm-up move little")

    # An update below half the distance to a weight's neighbour is rounded away. Of weights in 16 bits that is an alarm,
    # unless what is cut off is kept (masters, a compensation), or made up for by rounding at random. Weights in FP32
    # are information: their updates vanish where the learning rate does. If none has ever moved, it is a warning.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding for weights in 16 bits or fewer, one for others, one for rounding toward zero."""
        cells = view.cells("updates")
        if cells is None:
            return
        for event in [e for e in view.events if e.kind == "update" and e.details.get("update") == TOWARD_ZERO][:1]:
            spots = [Spot(name=name, since_step=event.step) for name in listed_in(event, "parameters")]
            yield self.finding(
                "alarm", spots, {"cause": TOWARD_ZERO, "layers": len(spots)}, until_step=view.last_step,
                collection="updates",
                meaning="Each step rounds these weights toward zero, however small the update is: they shrink, and "
                "updates away from zero are lost.",
                advice="Round to nearest, or by chance: add random bits below the last place before they are cut off.",
            )  # fmt: skip
        for narrowed in (True, False):
            spots, until = self._unmoved(view, narrowed=narrowed)
            if not spots or (not narrowed and self.stay_zero(view)):
                continue
            evidence = {"worst": spots[0].name, "unmoved": spots[0].value, "layers": len(spots)}
            severity, meaning, advice = ("alarm", None, None) if narrowed else ("info", _UNMOVED, _NEAR_ZERO)
            if not narrowed and self.moves_nothing(view):
                severity, meaning, advice = "warning", NEVER_MOVED, _LOOK
            yield self.finding(
                severity, spots, evidence, until_step=until, collection="updates",
                meaning=meaning, advice=advice, actions=None if narrowed else (),
            )  # fmt: skip

    def moves_nothing(self, view: View) -> bool:
        """Return True if no weight has ever moved, though gradients and the learning rate are not zero."""
        cells = view.cells("updates")
        if cells is None or not weights_stay(view):
            return False
        spots, _ = self._unmoved(view, narrowed=False)
        pushed = np.count_nonzero(~np.isnan(cells.share_of("unmoved", "pushed")).all(axis=1))  # that get gradients
        return 0 < len(spots) == pushed

    def stay_zero(self, view: View) -> list[Spot]:
        """Return the layers whose weights are zero, if no weight has ever moved: no rounding keeps them."""
        spots, _ = self._unmoved(view, narrowed=False) if self.moves_nothing(view) else ([], 0)
        return [spot for spot in spots if not _largest_weight(view, spot.name)]

    def _unmoved(self, view: View, *, narrowed: bool) -> tuple[list[Spot], int]:
        """Return layers in 16 bits or fewer, or others, whose weights steps leave as they were, and until when."""
        cells = view.cells("updates")
        if cells is None:
            return [], -1
        moments, _ = KeptNarrow().first_moments_flushed(view)
        flushed = {spot.name.rpartition(":")[0] for spot in moments}  # their cause is known
        shares = cells.share_of("unmoved", "pushed")
        is_narrow = cells.total(cells.by_format(lambda fmt: fmt.bits <= 16).astype(np.int64)) > 0
        spared = spared_updates(view, cells) | (
            cells.total_of("nans") > 0
        )  # a NaN plus anything is that NaN: no rounding
        spared |= np.array([name in flushed for name in cells.names])[:, None]
        mine = ~np.isnan(shares) & (is_narrow == narrowed) & ~spared
        spans = layer_spans(shares > self.share, mine, self.samples)
        return (worst(cells, spans, shares), last_of(cells, spans)) if spans else ([], -1)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the largest share of weights that a step left as they were, where, and since when."""
        if context.cause == TOWARD_ZERO:
            return Phrase(
                what=f"each step rounds the weights of {context.place} toward zero {context.since}",
                remedy="round to nearest or by chance",
            )
        if context.finding.severity == "warning":
            what, remedy = f"no weight of {context.place} has moved {context.since}", "look at what the optimizer adds"
            return Phrase(what=what, remedy=remedy)
        return Phrase(
            what=f"steps leave up to {percent(context.number('unmoved'))} of the weights of {context.place} unchanged "
            f"{context.since}",
            remedy="keep FP32 master weights or round stochastically",
        )


def _largest_weight(view: View, name: str) -> float:
    """Return the largest magnitude that a weight ever had; Inf if it is not recorded."""
    cells = view.cells("weights")
    return (
        math.inf
        if cells is None or name not in cells.names
        else float(np.nanmax(cells.true_absmax[cells.names.index(name)], initial=0.0))
    )


@dataclass(frozen=True, kw_only=True)
class SecondMomentLost(Rule):
    """Second moments flushed to zero where the first moments are not (T8)."""

    id = "second-moment-lost"
    says = "Adam's second moments are zero where the first ones are not, or epsilon is zero in their format"
    meaning = "The update divides by a root that is zero: the next small gradient makes it explode."
    advice = (
        "Keep the optimizer's state in FP32. A larger epsilon only hides the problem: Adam is then no longer adaptive."
    )
    actions = ("stop",)
    figure = "spectrogram"
    items = {"lost": EvidenceItem(unit="share")}
    location_item = EvidenceItem("Lost", "share")

    share: float = threshold(0.05, "of the values whose first moment is not zero")
    epsilon: float = threshold(1e-8, "T8: the default of Adam")
    samples: float = threshold(2, "the first step's moments may be of an empty gradient")
    near: float = threshold(2.0**16, "times the format's smallest value: it cannot have lost what is so far above it")

    # Adam divides by the root of second moments plus an epsilon, and 1e-8 is zero in FP16 too: the division is by zero,
    # or by whatever was put in epsilon's place.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the optimizer's state."""
        cells = view.cells("optimizer")
        certain = with_epsilon_of_zero(view)
        spans: list[tuple[int, int, int]] = []
        shares = np.empty((0, 0))
        if cells is not None:
            shares = lost_second_moments(cells)
            shares[[cells.names.index(name) for name in without_a_zero(view, cells)]] = np.nan  # they are true zeros
            # Where epsilon is zero too, the division is by zero: one sample is proof. So it is where moments are NaN at
            # all later samples.
            known = ~np.isnan(shares)
            is_broken = np.flatnonzero(known.any(axis=0)).tolist() == [0] and len(cells.steps) > 1
            enough = 1 if certain or is_broken else self.samples
            spans = layer_spans(shares > self.share, known, enough)
        if cells is None or not spans:
            yield from self._certain(view, certain)
            return
        spots = worst(cells, spans, shares)
        rows = np.isin(cells.layer, [layer for layer, *_ in spans])
        places: list[int] = np.unique(cells.format[rows]).tolist()
        formats = [cells.formats[i] for i in places]
        lost = [name for name in formats if get_element(name, "diagnose").smallest_subnormal / 2 >= self.epsilon]
        evidence = {
            "worst": spots[0].name,
            "lost": spots[0].value,
            "format": ", ".join(formats),
            "epsilon_is_zero": "yes" if lost or certain else "no",
        }
        # A format leaves values down to its smallest one. Where none is near it, something else rounds the state.
        smallest = cells.by_format(lambda fmt: fmt.smallest_subnormal)
        least = np.fmin.reduce((cells.columns["absmin"] / smallest)[rows], initial=np.inf)
        if not certain and least > self.near:
            evidence["cause"] = _ROUNDED_STATE
        yield self.finding(
            "alarm", spots, evidence, until_step=last_of(cells, spans), collection="optimizer",
            advice=_UNEVEN_CODES if evidence.get("cause") == _ROUNDED_STATE else None,
        )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the share of lost moments, or that epsilon is zero."""
        share = percent(context.number("lost"))
        if context.cause == _ROUNDED_STATE:
            return Phrase(
                what=f"up to {share} of Adam's second moments of {context.place} have been rounded to zero "
                f"{context.since}",
                remedy="keep them in FP32, or in codes that have an exponent",
            )
        what = f"{context.format} has lost up to {share} of Adam's second moments of"
        if "lost" not in context.finding.evidence:
            what = f"Adam's epsilon is zero in {context.format}, the format of its second moments, in"
        return Phrase(what=f"{what} {context.place} {context.since}", remedy="keep the optimizer's state in FP32")

    def is_fatal(self, finding: Finding, last_step: int) -> bool:  # noqa: ARG002  (every alarm is)
        """Return True: the state's format loses them at every step."""
        return True

    def _certain(self, view: View, events: list[Event]) -> Iterator[Finding]:
        """An epsilon that is zero, where no second moment has been seen to be zero so far."""
        if not events:
            return
        first = events[0]
        listed = cast("list[str]", first.details.get("parameters", []))
        spots = [Spot(name=f"{name}:exp_avg_sq", since_step=first.step) for name in listed]
        evidence = {
            "format": "fp16", "epsilon": float(cast("float", first.details.get("epsilon", 0.0))),
            "epsilon_is_zero": "yes", "parameters": len(listed),
        }  # fmt: skip
        yield self.finding(
            "alarm", spots, evidence, until_step=max(view.last_step, first.step), collection="optimizer",
            meaning="Adam divides by zero where the square of a gradient is zero in FP16, which gives Inf or NaN.",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EpsilonDominates(Rule):
    """Second moments whose root is below epsilon: the update is no longer adaptive."""

    id = "epsilon-dominates"
    says = "most square roots of Adam's second moments are below its epsilon"
    meaning = (
        "Adam divides by epsilon instead of by the size of the gradients: it acts as plain momentum at another rate."
    )
    advice = "Lower epsilon (1e-15 in FP32), or raise the gradients: check whether the loss is divided too often."
    figure = "spectrogram"
    items = {"below_epsilon": EvidenceItem(unit="share", of_worst=" below epsilon")}
    location_item = EvidenceItem("Below epsilon", "share")
    is_secondary = True

    share: float = threshold(0.5, "of a module's nonzero second moments")
    epsilon: float = threshold(_DEFAULT, "T8: the default of Adam; the run's own is used where it is recorded")
    samples: float = threshold(5, "second moments need some steps to fill")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the optimizer's state."""
        cells = view.cells("optimizer")
        if cells is None:
            return
        epsilon = (recorded_epsilon(view) if self.epsilon == _DEFAULT else None) or self.epsilon
        split, others = [name.rpartition(":") for name in cells.names], in_other_units(view)
        second = np.array([state in SECOND_MOMENTS and parameter not in others for parameter, _, state in split])
        populations = Populations(cells=cells)
        points = populations.points(ordinal(epsilon**2), 0)
        below = populations.below(points, inclusive=False).estimate
        modules, mine = Modules.of(cells), second[:, None]
        nonzero = modules.total(np.where(mine, cells.total(cells.nonzero), np.nan))
        small = modules.total(np.where(mine, cells.total(below), np.nan))
        with np.errstate(all="ignore"):
            shares = np.where(nonzero > 0, small / nonzero, np.nan)
        spans = layer_spans(shares > self.share, ~np.isnan(shares), self.samples)
        if spans:
            spots = worst(cells, spans, shares, modules.main_layers(cells, among=second))
            evidence = {"worst": spots[0].name, "below_epsilon": spots[0].value, "epsilon": epsilon}
            until = last_of(cells, spans)
            # Where a branch begins at zero, or nearly so, what comes before its factor gets next to nothing at first.
            # That is over soon.
            after = np.count_nonzero(cells.steps > until)
            lasted = len(cells.steps) - after - min(first for _, first, _ in spans)
            is_over = after >= max(self.samples, lasted)
            yield self.finding(
                "info" if is_over else "warning", spots, evidence, until_step=until, collection="optimizer",
                meaning=_OVER_EPSILON if is_over else None, advice="No action is needed." if is_over else None,
            )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return where and since when."""
        if context.finding.severity == "info":
            return Phrase(
                what=f"Adam divided by its epsilon in {context.place} until step {context.finding.until_step:,}"
            )
        return Phrase(
            what=f"Adam has divided by its epsilon in {context.place} {context.since}, not by the gradients' size",
            remedy="lower epsilon or raise the gradients",
        )

    def figure_arguments(self, finding: Finding) -> Mapping[str, Any]:
        """Mark the second moments whose root is epsilon."""
        epsilon = finding.evidence.get("epsilon", 0.0)
        if isinstance(epsilon, str) or not epsilon > 0:
            return {}
        return {"mark": (float(epsilon) ** 2, "roots below epsilon")}


_OF_SGD = (
    "At each step SGD takes the learning rate times the decay from each weight, with momentum 1 / (1 - momentum) times "
    "as much. Weights shrink until the loss's gradient is as large as the decay: what was learned is soon gone."
)
_FOR_SGD = "Use a far smaller decay: 1e-4 to 5e-4 is usual with SGD. 0.01 to 0.1 is meant for AdamW."


@dataclass(frozen=True, kw_only=True)
class DecayDominates(Rule):
    """Weight decay that an Adam or SGD adds to the gradients, where it rivals them."""

    id = "decay-dominates"
    says = "the weight decay that Adam or SGD adds to the gradients rivals them, and weights have shrunk"
    meaning = (
        "Adam divides the sum of gradient and decay by its size. Where the decay is the larger part, weights shrink by "
        "up to the learning rate at each step, until the loss's gradient is as large as the decay."
    )
    advice = (
        "Use AdamW, which takes the decay from the weights: 0.01 to 0.1 is meant for it. With Adam a far smaller decay "
        "is usual, such as 1e-4."
    )
    figure = "spectrogram"
    items = {"ratio": EvidenceItem("Decay over gradient"), "size": EvidenceItem("Size since the first sample", "share")}
    location_item = EvidenceItem("Decay over gradient")
    is_secondary = True

    decay: float = threshold(0.01, "usual in AdamW, a hundred times what is usual where it is added to gradients")
    ratio: float = threshold(0.5, "of a gradient's size: where decay holds a weight, the rest is the noise of batches")
    size: float = threshold(0.75, "of the first size: decay that balances the gradients of grown weights does no harm")
    share: float = threshold(0.5, "of the matrices; rows of a table that are seldom seen shrink in sound trainings too")
    samples: float = threshold(5, "that show it; a note unless half of those of the last half of the run do")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the first optimizer that adds decay to gradients."""
        added = added_decay(view)
        if added is None:
            return
        with np.errstate(invalid="ignore"):
            holds = (added.ratio >= self.ratio) & (added.size <= self.size) & (added.decays >= self.decay)[:, None]
        known = ~np.isnan(added.ratio) & ~np.isnan(added.size)
        dominates = known.any(axis=0) & (
            np.count_nonzero(holds, axis=0) >= self.share * np.count_nonzero(known, axis=0)
        )
        places: list[int] = np.flatnonzero(dominates).tolist()
        if len(places) < self.samples:
            return
        first, last = places[0], places[-1]
        since = int(added.steps[first])
        often = holds[:, dominates].mean(axis=1)
        spots: list[Spot] = []
        for i in np.flatnonzero(often >= min(0.5, often.max())).tolist():
            ratio = min(float(np.nanmedian(added.ratio[i, dominates])), _MOST)  # of a gradient of zero
            spots.append(Spot(name=added.names[i], since_step=since, value=ratio))
        spots.sort(key=lambda spot: -spot.value)
        place = added.names.index(spots[0].name)
        evidence = {
            "optimizer": added.optimizer, "decay": float(added.decays[place]), "worst": spots[0].name,
            "ratio": spots[0].value, "size": float(np.nanmedian(added.size[place, dominates])), "layers": len(spots),
        }  # fmt: skip
        lasts = bool(dominates[len(dominates) // 2 :].mean() >= 0.5)
        of_sgd = added.optimizer == "SGD"
        yield self.finding(
            "warning" if lasts else "info", spots, evidence, until_step=int(added.steps[last]), collection="weights",
            meaning=_OF_SGD if of_sgd else None, advice=_FOR_SGD if of_sgd else None,
        )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return whose decay it is, where, and since when."""
        name, decay = context.text("optimizer"), context.number("decay")
        return Phrase(
            what=f"the weight decay of {decay:g} that {name} adds to the gradients has rivalled them in "
            f"{context.place} {context.since}",
            effect=f"and {context.layer} has shrunk to {percent(context.number('size'))}",
            remedy="use a far smaller decay" if name == "SGD" else "use AdamW, or a far smaller decay",
        )


@dataclass(frozen=True, kw_only=True)
class StateCleared(Rule):
    """An optimizer's state that is cleared, or begun again, every few steps, or that is of other parameters."""

    id = "state-cleared"
    says = (
        "the optimizer's state is cleared, or begun again by a new one, before its means are of enough steps; or "
        "parameters have the states of others"
    )
    meaning = (
        "The optimizer's state is lost every few steps: Adam begins again each time, with updates of the size of the "
        "learning rate, however small the gradients are."
    )
    advice = "Make the optimizer once, before the first epoch, and do not clear its state."
    figure = "loss_and_scale"
    items = {"steps": EvidenceItem("Steps between"), "first": EvidenceItem(unit="location")}

    times: float = threshold(3, "on end; methods that begin again on purpose leave thousands of steps between")
    grown: float = threshold(100, "times a second moment grows at once, beyond all that it was; gradients explain less")
    near: float = threshold(1.25, "times what another parameter had: a state that was loaded is the same")
    parameters: float = threshold(2, "that grew so, and that fell faster than beta2 lets them: one may be a chance")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding of the first optimizer, one of states of other parameters."""
        exchanged = exchanged_states(view, times=self.grown, near=self.near, parameters=self.parameters)
        if exchanged is not None:
            names, others = exchanged.names, exchanged.others
            which = f" ({names[0]} has those of {others[0]})" if others else ""
            yield self.finding(
                "warning", [Spot(name=name, since_step=exchanged.step) for name in names],
                {"cause": _EXCHANGED, "first": names[0], "parameters": len(names)}, until_step=view.last_step,
                meaning=f"Parameters have the second moments of others of the same size{which}. The optimizer's state "
                "was loaded in another order, and updates are far too large for some weights, too small for others.",
                advice="A state_dict goes by the parameters' places, not by their names. Give the optimizer its "
                "parameters in the order in which they were saved, or match states by name, and resume again.",
            )  # fmt: skip
        for event in facts(view, "state cleared")[:1]:
            steps, times = (int(str(event.details.get(name, 0))) for name in ("steps", "times"))
            if times < self.times:
                continue
            evidence = {"optimizer": str(event.details.get("optimizer", "")), "steps": steps}
            yield self.since_event("warning", event, view, evidence)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return how often the state is lost, or whose states are those of others."""
        if context.cause == _EXCHANGED:
            return Phrase(
                what=f"{context.place} has had the optimizer's state of another parameter {context.since}"
                if context.is_single else
                f"{len(context.finding.where)} parameters have had the optimizer's states of others {context.since}",
                remedy="load the state in the order in which it was saved",
            )  # fmt: skip
        return Phrase(
            what=f"the state of {context.text('optimizer')} is cleared every {context.number('steps'):,.0f} steps or "
            f"so, seen {context.since}",
            effect="and its updates are as large as at the start each time",
            remedy="make the optimizer once and keep its state",
        )
