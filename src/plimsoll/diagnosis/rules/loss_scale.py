"""Rules of the loss scale, and the one remedy of a run with a bad scale.

The first of these that applies decides the remedy:

1. The scale was set or restored too low: restore the scaler's state.
2. The scale collapsed and the overflow stayed in few layers: a scale for each layer, since all others can keep theirs.
3. The scale collapsed otherwise: a scaler that recovers soon.
4. No single scale works for all layers: a scale for each layer.
5. All findings are warnings that were over before the last sample: nothing.
6. A higher scale works for all layers: raise it. Else a scale for each layer if each has one that works, else BF16.
"""

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from plimsoll.diagnosis.estimates.format_losses import Modules
from plimsoll.diagnosis.estimates.underflow_rate import underflow_rate
from plimsoll.diagnosis.estimates.usable_scales import Scales
from plimsoll.diagnosis.finding import Action, Finding, Severity, Spot, first_of, layer_name, shown
from plimsoll.diagnosis.rules.base import EvidenceItem, FindingContext, Mask, Phrase, Rule, find_spans, threshold
from plimsoll.diagnosis.rules.nonfinite import Nonfinite
from plimsoll.diagnosis.rules.registry import rule_of
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.diagnosis.tables.trend import beginning
from plimsoll.diagnosis.view import View, log2
from plimsoll.tensor_collections import BACKWARD, WITH_LOSS_SCALE
from plimsoll.text import percent, power, steps

_SAMPLES = "not reported from a single sample"
_FEW = 0.1  # of the tensors that a step's overflow reached: it has spread no further
_LEAST_UNDERFLOW = 0.01  # of all values: less is not worth its words in a sentence
_SET_SO = "set or restored so"
_SET = "The loss scale fell at one step, and no overflow is recorded there: it was set or restored so."
_BEGUN_AGAIN = "begun again"
_NOTHING_LOST = "Many steps in a row overflowed. The scale has come back, and hardly a gradient was lost until then."
_CAME_BACK = "Many steps in a row overflowed. The scale has come back; until then small gradients were zero."


@dataclass(frozen=True, kw_only=True)
class ScaleRule(Rule):
    """Base of the rules whose cause another loss scale may fix."""

    def needs_other_scale(self, finding: Finding) -> bool:
        """Return True unless the finding is a note. Activations carry no loss scale."""
        return finding.severity != "info" and finding.collection != "activations"


@dataclass(frozen=True, kw_only=True)
class NoSingleScale(ScaleRule):
    """Gradients of more binades than FP16 has between losing 1 % and overflow."""

    id = "no-single-scale"
    says = "no single loss scale keeps the gradients of all layers in FP16's range"
    meaning = (
        "At any scale without overflow in the layer with the largest gradients, the smallest layer's gradients "
        "underflow."
    )
    advice = "Use a scale for each layer (LayerScaler), or train in BF16. No single loss scale can help."
    actions = ("layer_scale", "to_bf16")
    figure = "scale_window"
    explained_by = {Nonfinite.id: "anywhere"}
    items = {
        "missing_binades": EvidenceItem("Missing powers of two"),
        "smallest_layer": EvidenceItem(unit="location"),
        "needs_scale": EvidenceItem("Scale that it needs"),
        "largest_layer": EvidenceItem(unit="location"),
        "bears_scale": EvidenceItem("Scale that it overflows above"),
    }
    location_item = EvidenceItem("Scale", "exponent")

    gap: float = threshold(3, "one or two binades missing cost a few per cent of one layer")
    samples: float = threshold(3, _SAMPLES)

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of a run whose loss is scaled or whose gradients are narrow."""
        narrow = view.narrow("gradients")
        if narrow is None or not (narrow.censors.any() or view.scaled):
            return
        scales = Scales.of(view)
        if scales is None:
            return
        steps, missing = scales.cells.steps, scales.need - scales.room
        known = np.flatnonzero(~np.isnan(missing))
        spans = find_spans(missing[known] > 0, self.samples)
        if not spans:
            return
        at = known[spans[0][0] : spans[-1][1] + 1]
        worst = int(at[np.nanargmax(missing[at])])
        smallest, largest = int(np.nanargmax(scales.low[:, worst])), int(np.nanargmin(scales.high[:, worst]))
        since = int(steps[at[0]])
        spots = [
            Spot(name=scales.names[smallest], since_step=since, value=float(scales.low[smallest, worst])),
            Spot(name=scales.names[largest], since_step=since, value=float(scales.high[largest, worst])),
        ]
        evidence = {
            "missing_binades": float(missing[worst]),
            "smallest_layer": spots[0].name,
            "needs_scale": f"2^{int(spots[0].value)} or more",
            "largest_layer": spots[1].name,
            "bears_scale": f"2^{int(spots[1].value)} or less",
        }
        severity = "alarm" if missing[worst] >= self.gap else "info"
        yield self.finding(severity, spots, evidence, until_step=int(steps[at[-1]]), collection="gradients")

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the two layers with the scales that bound the usable range."""
        smallest, largest = (shown(layer_name(context.text(name)))[:30] for name in ("smallest_layer", "largest_layer"))
        needs, overflows = (context.text(name).split(" ")[0] for name in ("needs_scale", "bears_scale"))
        return Phrase(
            what=f"no single loss scale has worked for all layers {context.since}",
            effect=f"{smallest} needs {needs} or more, {largest} overflows above {overflows}",
            remedy=remedy_words(context),
        )


@dataclass(frozen=True, kw_only=True)
class ScaleLow(ScaleRule):
    """Gradients are lost at the bottom while the top of the format is empty."""

    id = "scale-low"
    says = "gradients underflow although the loss scale has room to rise"
    meaning = "The loss scale is far lower than necessary: small gradients are zero and nothing overflows."
    advice = "Raise the loss scale. If it is static, multiply it by 2^(free binades - 1). Or use a SpectralScaler."
    actions = ("raise_scale",)
    figure = "scale_window"
    explained_by = {Nonfinite.id: "anywhere"}
    items = {
        "worst_lost": EvidenceItem("Lost at most", "share", of_worst=" lost"),
        "free_binades": EvidenceItem("Free below overflow, in powers of two"),
    }
    location_item = EvidenceItem("Lost", "share")

    binades: float = threshold(6, "a factor of 64: beyond what the largest gradients vary from step to step")
    lost: float = threshold(0.01, "T6: below 1 % is sound")
    grave: float = threshold(0.05, "T6: above 5 % is not")
    learned: float = threshold(0.001, "of the first loss: where less has been left since, it is a warning")
    samples: float = threshold(3, _SAMPLES)

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of gradients in narrow formats."""
        narrow = view.narrow("gradients")
        if narrow is None or not narrow.censors.any():
            return
        cells, modules = narrow.cells, Modules.of(narrow.cells)
        lost = np.where(view.solved(cells.steps), np.nan, modules.harmful_underflow(narrow))
        most = np.fmax.reduce(lost, axis=0, initial=np.nan)
        free = self._free(view, cells)
        holds = (most > self.lost) & (free >= self.binades)
        known = np.flatnonzero(~np.isnan(most))
        spans = find_spans(holds[known], self.samples)
        if not spans:
            return
        first, last = int(known[spans[0][0]]), int(known[spans[-1][1]])
        names = modules.main_layers(cells)
        over = np.flatnonzero(np.nan_to_num(lost[:, first : last + 1]).max(axis=1) > self.lost).tolist()
        since = int(cells.steps[first])
        spots = [Spot(name=names[i], since_step=since, value=float(np.nanmax(lost[i, first : last + 1]))) for i in over]
        spots.sort(key=lambda spot: -spot.value)
        spent = free[known[spans[0][0] : spans[0][1] + 1]]
        evidence = {
            "layers": len(spots),
            "of_layers": len(names),
            "free_binades": float(np.nanmin(spent)),
            "worst_lost": spots[0].value,
            "scale": float(view.scale_at(cells.steps[[first]])[0]),
        }
        severe = spots[0].value > self.grave and not self._has_learned(view, since)
        severity = "alarm" if severe else "warning"
        yield self.finding(severity, spots, evidence, until_step=int(cells.steps[last]), collection="gradients")

    # With what is left to learn, gradients vanish at any scale.
    def _has_learned(self, view: View, since: int) -> bool:
        """Return True if next to nothing of the first loss is left from this step on."""
        steps, loss = view.scalar("loss")
        known = np.isfinite(loss)
        later = loss[known & (steps >= since)]
        return len(later) > 0 and bool(np.abs(later).max() <= self.learned * abs(beginning(loss[known])))

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the scale, since when, and the largest loss."""
        free = context.number("free_binades")
        return Phrase(
            what=f"the loss scale ({power(context.number('scale'))}) has been too low {context.since}: up to "
            f"{percent(context.number('worst_lost'))} of the parameter gradients of {context.place} are lost",
            effect=f"with {free:.0f} binades free" if math.isfinite(free) else "",
            remedy=remedy_words(context),
        )

    def _free(self, view: View, cells: Cells) -> Floats:
        """Return the binades from the largest gradient to the format's largest value, by step; Inf: unknown."""
        free = np.full(len(cells.steps), np.inf)
        for collection in WITH_LOSS_SCALE:
            narrow = view.narrow(collection)
            if narrow is None:
                continue
            top = narrow.cells.by_format(lambda fmt: fmt.max)
            largest = narrow.cells.column("absmax") * (narrow.held / narrow.cells.scale)
            room = log2(np.where(narrow.censors & (largest > 0), top / np.where(largest > 0, largest, 1.0), np.nan))
            place = np.searchsorted(cells.steps, narrow.cells.steps[narrow.cells.at])
            there = (place < len(cells.steps)) & ~np.isnan(room)
            there[there] &= cells.steps[place[there]] == narrow.cells.steps[narrow.cells.at[there]]
            np.minimum.at(free, place[there], room[there])
        return free


@dataclass(frozen=True, kw_only=True)
class ScaleCollapse(ScaleRule):
    """A fall of a settled loss scale within few steps; a warning if it came back."""

    id = "scale-collapse"
    says = "the loss scale falls far within few steps"
    meaning = "Many steps in a row overflowed and were skipped. At the scale that is left, small gradients are zero."
    advice = (
        "Look at the batches from there on. Lower the learning rate or clip. Use a scaler that raises the scale again "
        "(DynamicScaler with regrowth_interval, SpectralScaler), and pass a closure to step() to retry skipped "
        "batches."
    )
    actions = ("raise_scale", "skip", "rollback")
    figure = "loss_and_scale"
    explained_by = {Nonfinite.id: "anywhere"}
    items = {
        "from": EvidenceItem("Loss scale", "scale"),
        "to": EvidenceItem(unit="scale"),
    }

    binades: float = threshold(5, "T4: ten hard batches halve the scale ten times; single overflows halve it once")
    window: float = threshold(100, "steps")
    settled: float = threshold(20, "steps without a change, after which the search for the first scale is over")
    floor: float = threshold(1.0, "a scale below 1 shrinks gradients that overflow by themselves")
    of_nan: float = threshold(
        0.5, "of its falls follow a loss of NaN or Inf, which no scale has made: nonfinite names it"
    )

    # The search from a high first scale down to the one that works is no collapse: steps before the scale has stayed
    # the same for `settled` steps do not count. A scale that has fallen below `floor` counts always, unless it settles
    # there and hardly a gradient is lost: the gradients of a large loss need such a scale.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the recorded loss scale."""
        steps, scale = _known_scale(view)
        begin = _settled(scale, int(self.settled))
        sunk = (scale < self.floor) & (scale < np.maximum.accumulate(scale))
        if begin is None:
            below = np.flatnonzero(sunk)
            if len(below):
                yield self._finding(view, steps, scale, int(below[0]), int(below[-1]), 0)
            return
        sunk &= scale[begin] >= self.floor or not _is_wanted(view, int(steps[begin]))
        fallen = _fallen(steps, scale, begin, self.window)
        holds = np.flatnonzero((fallen >= self.binades) | sunk)
        if len(holds):
            first = int(holds[0])
            begin = begin if first >= begin else 0  # it sank below the floor before it settled there
            start = _start_of_fall(scale, first, begin)
            # What fell before the loss was NaN had not collapsed: the fall is what NaN makes of the scale.
            after_nan = _after_nan(view, steps)
            start += next(iter(np.flatnonzero(after_nan[start : first + 1]).tolist()), 0)
            falls = np.flatnonzero(np.diff(scale[start : int(holds[-1]) + 1]) < 0) + start + 1
            if np.count_nonzero(after_nan[falls]) <= self.of_nan * len(falls):
                yield self._finding(view, steps, scale, start, int(holds[-1]), begin)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the fall, and what underflowed at the scale that was left."""
        finding, back = context.finding, context.number("back_at_step")
        fall = f"from {power(context.number('from'))} to {power(context.number('to'))}"
        what = f"the loss scale fell {fall} at {steps(finding.since_step, finding.until_step)}"
        if math.isfinite(back):
            return Phrase(
                what=f"{what} and was back at step {back:,.0f}",
                remedy=f"if it happens again, {remedy_words(context)}",
            )
        rates = [underflow_rate(context.view, name, finding.since_step) for name in WITH_LOSS_SCALE]
        high = [rate for rate in rates if rate is not None and rate.share >= _LEAST_UNDERFLOW]
        shares = " and ".join(rate.words for rate in high).replace(" gradient values and", " and", 1)
        effect = f"and {shares} underflowed at {steps(high[0].first_step, high[0].last_step)}" if high else ""
        return Phrase(what=what, effect=effect, remedy=remedy_words(context))

    def is_fatal(self, finding: Finding, last_step: int) -> bool:  # noqa: ARG002  (every alarm is)
        """Return True: the scale recovers too slowly for the run."""
        return True

    def _finding(self, view: View, steps: Ints, scale: Floats, first: int, last: int, begin: int) -> Finding:
        before = float(scale[begin : first + 1].max())
        lowest = float(scale[first : last + 1].min())
        evidence: dict[str, float | int | str] = {
            "from": before, "to": lowest, "binades": float(np.log2(before / lowest)),
        }  # fmt: skip
        since, until = int(steps[first]), int(steps[last])
        # No scaler lowers its scale that far at once, and none does so without an overflow.
        at_once = first > 0 and steps[first - 1] == since - 1 and float(scale[first]) == lowest
        broken, counts = view.scalar("nonfinite")
        if at_once and since - 1 not in view.skips and not (counts[broken == since - 1] > 0).any():
            evidence["cause"] = _SET_SO
        low = np.flatnonzero(scale[last:] < before / 2.0**self.binades)  # as far below as makes a collapse
        if scale[-1] < self.floor or (len(low) and last + low[-1] == len(scale) - 1):
            words = f"{_SET} At a scale of {power(lowest)}, small gradients are zero."
            return self.finding(
                "alarm", (), evidence, since_step=since, until_step=until,
                meaning=words if evidence.get("cause") else None,
            )  # fmt: skip
        back = int(steps[last + (int(low[-1]) + 1 if len(low) else 0)])
        harmless = "cause" not in evidence and _is_wanted(view, since, back)
        meaning = f"{_SET} It has come back since." if evidence.get("cause") else _CAME_BACK
        return self.finding(
            "info" if harmless else "warning", (), {**evidence, "back_at_step": back}, since_step=since,
            until_step=until, meaning=_NOTHING_LOST if harmless else meaning,
            advice="No action is needed if it is rare." if harmless else None, actions=() if harmless else None,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ScaleOscillation(Rule):
    """The loss scale goes up and down again and again, and each fall is a lost step."""

    id = "scale-oscillation"
    says = "the loss scale keeps rising and falling, and steps are skipped at each fall"
    meaning = "The scaler repeatedly tries scales that overflow. Each time it lowers the scale, a step is skipped."
    advice = (
        "Use a longer growth interval, an upper limit (max_scale), or a SpectralScaler, which predicts the overflow."
    )
    actions = ("lower_scale",)
    figure = "loss_and_scale"
    items = {
        "lowest": EvidenceItem(unit="scale"),
        "highest": EvidenceItem(unit="scale"),
    }

    share: float = threshold(0.05, "a scaler that grows every 2,000 steps loses 0.05 % of them")
    grave: float = threshold(0.2, "every fifth step lost")
    window: float = threshold(200, "steps")
    falls: float = threshold(8, "fewer are chance")
    leap: float = threshold(3, "binades at once: scalers raise their scale by a factor of two, few by four")
    again: float = threshold(3, "leaps back to the first scale, each with an overflow right after it")

    # A scaler that is made again, or whose state is not kept, leaps back to its first scale at once.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the recorded loss scale."""
        steps, scale = _known_scale(view)
        if len(scale) < self.falls:
            return
        change: Floats = np.sign(np.diff(scale))
        window = int(self.window)
        # No other scale keeps a loss from being NaN.
        falls, rises = _within((change < 0) & ~_after_nan(view, steps)[1:], window), _within(change > 0, window)
        share = falls / np.minimum(np.arange(1, len(change) + 1), window)
        holds = np.flatnonzero((falls >= self.falls) & (rises >= self.falls / 2) & (share > self.share))
        leaps = self._leaps(scale)
        if len(leaps) >= self.again:
            yield self._begun_again(steps, scale, leaps, "alarm" if share[leaps[0] :].max() > self.grave else "warning")
            return
        if not len(holds):
            return
        first = max(int(holds[0]) - window + 1, 0)
        since = int(steps[1 + first + int(np.argmax(change[first : int(holds[0]) + 1] < 0))])
        evidence = {
            "falls": int(falls[holds].max()),
            "in_steps": window,
            "share": float(share[holds].max()),
            "lowest": float(scale.min()),
            "highest": float(scale.max()),
        }
        severity = "alarm" if evidence["share"] > self.grave else "warning"
        yield self.finding(severity, (), evidence, since_step=since, until_step=int(steps[holds[-1] + 1]))

    def phrase(self, context: FindingContext) -> Phrase:
        """Return since when, and the share of skipped steps."""
        if context.cause == _BEGUN_AGAIN:
            return Phrase(
                what=f"the loss scale has jumped back to {power(context.number('highest'))} "
                f"{context.number('resets'):,.0f} times {context.since}",
                effect="and steps are lost until it has come down",
                remedy="make the scaler once, and keep its state",
            )
        return Phrase(
            what=f"the loss scale has swung {context.since}, and up to {percent(context.number('share'))} of steps are "
            "lost to it",
            remedy="use a longer growth interval or a SpectralScaler",
        )

    def is_fatal(self, finding: Finding, last_step: int) -> bool:  # noqa: ARG002
        """Return whether the scaler is made again: its scale never settles."""
        return finding.evidence.get("cause") == _BEGUN_AGAIN

    def _leaps(self, scale: Floats) -> Ints:
        """Return where the scale leaps back to its first value and falls at the next step."""
        leaps = (np.diff(np.log2(scale)) >= self.leap) & (scale[1:] == scale[0])
        falls = np.append(np.diff(scale)[1:] < 0, np.False_)
        return 1 + np.flatnonzero(leaps & falls)

    def _begun_again(self, steps: Ints, scale: Floats, leaps: Ints, severity: Severity) -> Finding:
        evidence = {
            "cause": _BEGUN_AGAIN, "resets": len(leaps), "lowest": float(scale.min()), "highest": float(scale[0]),
        }  # fmt: skip
        return self.finding(
            severity, (), evidence, since_step=int(steps[leaps[0]]), until_step=int(steps[leaps[-1]]),
            meaning=f"The scaler is made again, or its state is reset: the scale jumps back to {power(scale[0])} again "
            "and again, and each time steps are skipped until it has come down.",
            advice="Make the scaler once, before the first epoch, and save and load its state with each checkpoint.",
        )  # fmt: skip


def _known_scale(view: View) -> tuple[Ints, Floats]:
    steps, scale = view.scalar("scale")
    known = np.isfinite(scale) & (scale > 0)
    return steps[known], scale[known]


def _settled(scale: Floats, samples: int) -> int | None:
    """Return the first of so many samples in which the scale first stays the same."""
    spans = find_spans(np.diff(scale) == 0, samples - 1) if len(scale) >= samples else []
    return spans[0][0] if spans else None


def _is_wanted(view: View, since: int, until: int | None = None) -> bool:
    """Return whether hardly a gradient underflows in a step range; False if that is not known."""
    rates = [rate for name in WITH_LOSS_SCALE if (rate := underflow_rate(view, name, since, until)) is not None]
    return bool(rates) and max(rate.share for rate in rates) < _LEAST_UNDERFLOW


def _fallen(steps: Ints, scale: Floats, begin: int, window: float) -> Floats:
    """Return the binades by which the scale lies below its highest of the last `window` steps since `begin`."""
    result, known = np.zeros(len(scale)), steps.tolist()
    for i in range(begin + 1, len(scale)):
        if scale[i] < scale[i - 1]:
            start = bisect.bisect_left(known, known[i] - window)
            highest: float = scale[max(begin, start) : i + 1].max()
            result[i] = math.log2(highest / float(scale[i]))
    return result


def _after_nan(view: View, steps: Ints) -> Mask:
    """Return whether a loss was not finite at the sample before each one."""
    broken = [known[~np.isfinite(loss)] for known, loss in view.losses.values()]
    return np.append(np.False_, np.isin(steps[:-1], np.concatenate(broken)))


def _start_of_fall(scale: Floats, at: int, begin: int) -> int:
    """Return the first sample of a fall: back over all that did not rise, then on to where it fell."""
    start = at
    # The search stops at `begin`, where the scale had settled: the search before it may have been a fall too.
    while start > begin and scale[start - 1] >= scale[start]:
        start -= 1
    return start + int(np.argmax(scale[start : at + 1] < scale[start])) if scale[start] > scale[at] else at


def _within(holds: Mask, window: int) -> Ints:
    """Return, at each place, how many of the last `window` values hold."""
    running = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(holds, dtype=np.int64)])
    ends = np.arange(1, len(running))
    return running[ends] - running[np.maximum(ends - window, 0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A remedy, as the end of a sentence, and its reason."""

    action: str
    reason: str

    def __str__(self) -> str:
        return f"{self.action[:1].upper()}{self.action[1:]}: {self.reason}."


def scale_remedy(view: View, findings: Sequence[Finding]) -> Remedy | None:
    """Return the remedy for the findings on the loss scale; None without any."""
    by_rule = {finding.rule: finding for finding in reversed(findings) if rule_of(finding).needs_other_scale(finding)}
    if not by_rule:
        return None
    if ScaleCollapse.id in by_rule:
        return _against_collapse(view, by_rule[ScaleCollapse.id])
    if NoSingleScale.id in by_rule:
        evidence = by_rule[NoSingleScale.id].evidence
        needs, overflows = (str(evidence[name]).split(" ")[0] for name in ("needs_scale", "bears_scale"))
        return Remedy(
            action=_or_bf16(view.scaler, "LayerScaler"),
            reason=f"no single scale works, since {layer_name(str(evidence['smallest_layer']))} needs {needs} or more "
            f"and {layer_name(str(evidence['largest_layer']))} overflows above {overflows}",
        )
    last = max(finding.until_step for finding in by_rule.values())
    if last < _last_sample(view) and all(finding.severity == "warning" for finding in by_rule.values()):
        return Remedy(action="do nothing now", reason=f"it has been over since step {last:,}")
    return by_scales(Scales.of(view, until=last), by_rule.get(ScaleLow.id), view.scaler)[1]


def remedy_words(context: FindingContext) -> str:
    """Return the run's one remedy of the loss scale, as the end of a sentence."""
    remedy = scale_remedy(context.view, context.findings)
    return "" if remedy is None else remedy.action


def with_remedy(view: View, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, with the run's one remedy as advice on the loss scale."""
    remedy = scale_remedy(view, findings)
    if remedy is None:
        return list(findings)
    return [replace(f, advice=str(remedy)) if rule_of(f).needs_other_scale(f) else f for f in findings]


def _last_sample(view: View) -> int:
    sampled = [view.cells(name) for name in WITH_LOSS_SCALE]
    return max((int(cells.steps[-1]) for cells in sampled if cells is not None), default=-1)


def _against_collapse(view: View, collapse: Finding) -> Remedy:
    if collapse.evidence.get("cause") == _SET_SO:
        return Remedy(
            action="restore the scaler's state with the checkpoint",
            reason="the scale fell at one step at which no overflow is recorded, so it was set or restored so",
        )
    few = _overflowed_in(view, collapse)
    if few:
        return Remedy(
            action=_or_bf16(view.scaler, "LayerScaler"),
            reason=f"only {first_of([layer_name(name) for name in few], 1)} overflowed, and all others keep their "
            "scales",
        )
    if view.scaler == "SpectralScaler":
        return Remedy(
            action="clip gradients, lower the learning rate or use BF16",
            reason="these gradients grow faster than the SpectralScaler predicts",
        )
    soon = "it raises the scale again within few steps"
    retry = "" if view.repeats_batches else ", and a closure passed to step() retries the skipped batches"
    return Remedy(action="use a SpectralScaler or BF16", reason=f"{soon}{retry}")


def _or_bf16(scaler: str, other: str) -> str:
    """Return the advice to use another scaler or BF16; BF16 alone if the run's scaler is of that class."""
    return "use BF16" if scaler == other else f"use a {other} or BF16"


def _overflowed_in(view: View, collapse: Finding) -> list[str]:
    """Return the few layers whose gradients overflowed as the scale fell, if seen."""
    names: list[str] = []
    tensors = 0
    for collection in BACKWARD:
        cells = view.cells(collection)
        if cells is None:
            continue
        # The step before the first lower scale is the one that overflowed.
        there = (cells.steps >= collapse.since_step - 1) & (cells.steps <= collapse.until_step)
        bad = cells.total_of("nans") + cells.total_of("pos_infs") + cells.total_of("neg_infs")
        reached = np.flatnonzero((np.nan_to_num(bad[:, there]) > 0).any(axis=1)).tolist()
        names += [cells.names[i] for i in reached]
        tensors += len(cells.names)
    return names if 0 < len(names) <= max(_FEW * tensors, 1.0) else []


def by_scales(
    scales: Scales | None, low: Finding | None = None, scaler: str = ""
) -> tuple[str, Remedy, tuple[Action, ...]]:
    """Return advice in words, a remedy and actions, from usable scales and the finding `scale-low`, if any.

    `scaler`: the class that the run has already, which is not advised.
    """
    if scales is not None and scales.one_serves and scales.advised is not None:
        was = "" if low is None else f"{power(float(low.evidence['scale']))} is too low, and "
        lowest, highest = scales.advised
        target = f"2^{lowest}" if lowest == highest else f"between 2^{lowest} and 2^{highest}"
        remedy = Remedy(action=f"raise the loss scale to {target}", reason=f"{was}that works for all layers")
        return "raise the scale", remedy, ("raise_scale",)
    if scales is not None and scales.each_serves:
        remedy = Remedy(
            action=_or_bf16(scaler, "LayerScaler"),
            reason="no single scale works for all layers, but one for each layer does",
        )
        return "scale per layer", remedy, ("layer_scale", "to_bf16")
    if low is not None:
        other = "" if scaler == "SpectralScaler" else ", or use a SpectralScaler"
        remedy = Remedy(action=f"raise the loss scale{other}", reason="the top of the format is empty")
        return "raise the scale", remedy, ("raise_scale",)
    return "change to BF16", Remedy(action="use BF16", reason="no scale works even for single layers"), ("to_bf16",)
