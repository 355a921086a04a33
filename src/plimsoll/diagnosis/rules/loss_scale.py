"""The loss scale: too low, collapsed, swinging, or none that would serve."""

import bisect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from plimsoll.diagnosis.estimates.module_parameters import Modules
from plimsoll.diagnosis.estimates.usable_scales import Scales
from plimsoll.diagnosis.finding import Finding, Spot
from plimsoll.diagnosis.rules.base import Mask, Rule, Where, stretches, threshold
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.diagnosis.view import View, log2
from plimsoll.tensor_collections import WITH_LOSS_SCALE

_SAMPLES = "a single sample proves nothing"
_CAME_BACK = "Many steps in a row overflowed. The scale has come back; until then small gradients were zero."


@dataclass(frozen=True, kw_only=True)
class ScaleLow(Rule):
    """Gradients are lost at the bottom while the top of the format is empty."""

    id = "scale-low"
    says = "gradients underflow although the loss scale has room to rise"
    meaning = "The loss scale is far lower than necessary: small gradients are zero and nothing overflows."
    advice = (
        "Raise the loss scale. If it is static, multiply it by 2 to the number of free binades less one. Or use a "
        "SpectralScaler."
    )
    actions = ("raise_scale",)
    figure = "scale_window"
    explained_by: ClassVar[Mapping[str, Where]] = {"nonfinite": "anywhere"}

    binades: float = threshold(6, "a factor of 64: beyond what the largest gradients vary from step to step")
    lost: float = threshold(0.01, "T6: below 1 % is sound")
    grave: float = threshold(0.05, "T6: above 5 % is not")
    samples: float = threshold(3, _SAMPLES)

    def findings(self, view: View) -> Iterator[Finding]:
        """One, of gradients in narrow formats."""
        narrow = view.narrow("gradients")
        if narrow is None or not narrow.censors.any():
            return
        cells, modules = narrow.cells, Modules.of(narrow.cells)
        lost = np.where(view.solved(cells.steps), np.nan, modules.underflow(narrow))
        most = np.fmax.reduce(lost, axis=0, initial=np.nan)
        free = self._free(view, cells)
        holds = (most > self.lost) & (free >= self.binades)
        known = np.flatnonzero(~np.isnan(most))
        spans = stretches(holds[known], self.samples)
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
        severity = "alarm" if spots[0].value > self.grave else "warning"
        yield self.finding(severity, spots, evidence, until_step=int(cells.steps[last]), collection="gradients")

    def _free(self, view: View, cells: Cells) -> Floats:
        """At each step of the gradients, the binades between the largest value that the format held and its top."""
        found = np.full(len(cells.steps), np.inf)
        for collection in WITH_LOSS_SCALE:
            narrow = view.narrow(collection)
            if narrow is None:
                continue
            top = np.array([fmt.max for fmt in narrow.known])[narrow.cells.format]
            held = narrow.cells.column("absmax") * (narrow.held / narrow.cells.scale)
            room = log2(np.where(narrow.censors & (held > 0), top / np.where(held > 0, held, 1.0), np.nan))
            place = np.searchsorted(cells.steps, narrow.cells.steps[narrow.cells.at])
            there = (place < len(cells.steps)) & ~np.isnan(room)
            there[there] &= cells.steps[place[there]] == narrow.cells.steps[narrow.cells.at[there]]
            np.minimum.at(found, place[there], room[there])
        return found


@dataclass(frozen=True, kw_only=True)
class NoSingleScale(Rule):
    """The layers' gradients span more binades than FP16 has between losing 1 % and overflow."""

    id = "no-single-scale"
    says = "no single loss scale keeps the gradients of all layers in FP16's range"
    meaning = "Where the largest layer's gradients do not overflow, the smallest layer's are lost."
    advice = "Give layers their own scales (LayerScaler), or train in BF16; a higher or lower scale cannot help."
    actions = ("layer_scale", "to_bf16")
    figure = "scale_window"
    explained_by: ClassVar[Mapping[str, Where]] = {"nonfinite": "anywhere"}

    gap: float = threshold(3, "one or two binades missing cost a few per cent of one layer")
    samples: float = threshold(3, _SAMPLES)

    def findings(self, view: View) -> Iterator[Finding]:
        """One, of a run whose loss is scaled or whose gradients are narrow."""
        narrow = view.narrow("gradients")
        if narrow is None or not (narrow.censors.any() or view.scaled):
            return
        scales = Scales.of(view)
        if scales is None:
            return
        steps, missing = scales.cells.steps, scales.need - scales.room
        known = np.flatnonzero(~np.isnan(missing))
        spans = stretches(missing[known] > 0, self.samples)
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
        severity = "alarm" if missing[worst] >= self.gap else "warning"
        yield self.finding(severity, spots, evidence, until_step=int(steps[at[-1]]), collection="gradients")


@dataclass(frozen=True, kw_only=True)
class ScaleCollapse(Rule):
    """A fall of the loss scale within few steps, after it had once settled; a warning where the scale came back.

    The search from a high first scale down to the one that serves is no collapse: steps before the scale has stayed
    the same for `settled` steps do not count. A scale that has fallen below `floor` counts always.
    """

    id = "scale-collapse"
    says = "the loss scale falls far within few steps"
    meaning = "Many steps in a row overflowed and were skipped. At the scale that is left, small gradients are zero."
    advice = (
        "Look at the batches from there on. Lower the learning rate or clip; a scaler that regrows "
        "(DynamicScaler's regrowth_interval, SpectralScaler) recovers, and a closure repeats the lost batches."
    )
    actions = ("raise_scale", "skip", "rollback")
    figure = "loss_and_scale"
    explained_by: ClassVar[Mapping[str, Where]] = {"nonfinite": "anywhere"}

    binades: float = threshold(5, "T4: ten hard batches halve the scale ten times; single overflows halve it once")
    window: float = threshold(100, "steps")
    settled: float = threshold(20, "steps without a change, after which the search for the first scale is over")
    floor: float = threshold(1.0, "a scale below 1 shrinks gradients that overflow by themselves")

    def findings(self, view: View) -> Iterator[Finding]:
        """One, of the recorded loss scale."""
        steps, scale = _known_scale(view)
        begin = _settled(scale, int(self.settled))
        sunk = (scale < self.floor) & (scale < np.maximum.accumulate(scale))
        if begin is None:
            below = np.flatnonzero(sunk)
            if len(below):
                yield self._told(steps, scale, int(below[0]), int(below[-1]), 0)
            return
        fallen = _fallen(steps, scale, begin, self.window)
        holds = np.flatnonzero((fallen >= self.binades) | sunk)
        if len(holds):
            first = int(holds[0])
            begin = begin if first >= begin else 0  # it sank below the floor before it settled there
            yield self._told(steps, scale, _start_of_fall(scale, first, begin), int(holds[-1]), begin)

    def _told(self, steps: Ints, scale: Floats, first: int, last: int, begin: int) -> Finding:
        before = float(scale[begin : first + 1].max())
        lowest = float(scale[first : last + 1].min())
        evidence = {"from": before, "to": lowest, "binades": float(np.log2(before / lowest))}
        since, until = int(steps[first]), int(steps[last])
        low = np.flatnonzero(scale[last:] < before / 2.0**self.binades)  # as far below as makes a collapse
        if scale[-1] < self.floor or (len(low) and last + low[-1] == len(scale) - 1):
            return self.finding("alarm", (), evidence, since_step=since, until_step=until)
        back = int(steps[last + (int(low[-1]) + 1 if len(low) else 0)])
        return self.finding(
            "warning", (), {**evidence, "back_at_step": back}, since_step=since, until_step=until, meaning=_CAME_BACK
        )


@dataclass(frozen=True, kw_only=True)
class ScaleOscillation(Rule):
    """The loss scale goes up and down again and again, and each fall is a lost step."""

    id = "scale-oscillation"
    says = "the loss scale keeps rising and falling, and steps are skipped at each fall"
    meaning = "The scaler tries scales that overflow over and over: the steps at which it falls are lost."
    advice = "Use a longer growth interval, a ceiling (max_scale), or SpectralScaler, which sees the overflow coming."
    actions = ("lower_scale",)
    figure = "loss_and_scale"

    share: float = threshold(0.05, "a scaler that grows every 2,000 steps loses 0.05 % of them")
    grave: float = threshold(0.2, "every fifth step lost")
    window: float = threshold(200, "steps")
    falls: float = threshold(8, "fewer are chance")

    def findings(self, view: View) -> Iterator[Finding]:
        """One, of the recorded loss scale."""
        steps, scale = _known_scale(view)
        if len(scale) < self.falls:
            return
        change: Floats = np.sign(np.diff(scale))
        window = int(self.window)
        falls, rises = _within(change < 0, window), _within(change > 0, window)
        share = falls / np.minimum(np.arange(1, len(change) + 1), window)
        holds = np.flatnonzero((falls >= self.falls) & (rises >= self.falls / 2) & (share > self.share))
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


def _known_scale(view: View) -> tuple[Ints, Floats]:
    steps, scale = view.scalar("scale")
    known = np.isfinite(scale) & (scale > 0)
    return steps[known], scale[known]


def _settled(scale: Floats, samples: int) -> int | None:
    """Where the scale has first stayed the same for so many samples: the first of them."""
    spans = stretches(np.diff(scale) == 0, samples - 1) if len(scale) >= samples else []
    return spans[0][0] if spans else None


def _fallen(steps: Ints, scale: Floats, begin: int, window: float) -> Floats:
    """How many binades below its highest value of the last `window` steps the scale lies, from `begin` on."""
    result, known = np.zeros(len(scale)), steps.tolist()
    for i in range(begin + 1, len(scale)):
        if scale[i] < scale[i - 1]:
            start = bisect.bisect_left(known, known[i] - window)
            highest: float = scale[max(begin, start) : i + 1].max()
            result[i] = math.log2(highest / float(scale[i]))
    return result


def _start_of_fall(scale: Floats, at: int, begin: int) -> int:
    """The first sample of the fall that leads to a place: back over all that did not rise, then to where it fell.

    Not back beyond `begin`, where the scale had settled: the search before it may have been a fall too.
    """
    start = at
    while start > begin and scale[start - 1] >= scale[start]:
        start -= 1
    return start + int(np.argmax(scale[start : at + 1] < scale[start])) if scale[start] > scale[at] else at


def _within(holds: Mask, window: int) -> Ints:
    """How many of the last `window` values hold, at each place."""
    running = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(holds, dtype=np.int64)])
    ends = np.arange(1, len(running))
    return running[ends] - running[np.maximum(ends - window, 0)]
