"""Rule of the spectral scaler: from measured gradients to the next power-of-two scale.

All is counted in binades. A gradient's *level* is the exponent of the largest one with the scale undone; the *line* is
how far up the format lets scaled gradients reach. The scale is the highest power of two at which

    level expected next + what such forecasts usually miss by + margin + reserve

stays below the line. Levels come from clean steps only, so that a non-finite step leaves no trace in the statistics.

- **Below.** Where more than `TOLERANCE` of the values lie in the format's lowest binade, or below it, about as many are
  being lost: the rule is bolder then, with half the margin, and covers fewer of the jumps.
- **Overflow** lowers the scale at once, by 1 binade, and by 4 and 12 if the next steps overflow too: the way out of a
  run of hard batches takes three steps and not one a binade. After `CALM` clean steps the scale climbs back, a binade
  a step.
- **What is not seen.** Overflow happens to any gradient of the backward pass; the parameters' gradients, which are
  measured, may lie below those of the activations. How far is learned, as the *reserve*: where the way back up meets
  overflow `REFUSALS` times, the scale that failed is the limit from there on, held as a distance from the level seen,
  so that it follows the gradients when they drift. `MANY` single overflows within `SPELL` steps take one binade more.
  The reserve is given back binade by binade, every `probe` clean steps; each time that meets overflow within `PROOF`
  steps it is taken again, and the next try waits twice as long.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from plimsoll.scaling.spectral.trend import Trend

TOLERANCE = 1e-3  # of the nonzero values, in the lowest binade or below
SHARE, BOLD_SHARE = 0.98, 0.95  # of forecasts that are covered
DROPS = (1, 4, 12)  # binades, for overflows in a row; the last for all that follow
CALM = 10  # clean steps before the scale climbs back
LONGEST_CALM = 2000
REFUSALS = 3
MANY, SPELL = 4, 1000
PROOF = 100
PROBES = (100, 1000, 16_000)  # clean steps before a binade of reserve is tried: learned by a refusal; by many; at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Measurement of one step's gradients, with the scale in them.

    `absmax` is the largest finite magnitude; `nonzero` counts finite nonzero values, and `faint` those among them that
    lie in the format's lowest binade or below.
    """

    overflowed: bool
    absmax: float = 0.0
    nonzero: int = 0
    faint: int = 0


@dataclass(slots=True)
class Memory:
    """State of the rule from step to step: plain numbers and the trend."""

    trend: Trend = field(default_factory=Trend)
    step: int = 0
    overflows: int = 0  # in a row, up to now
    cap: int | None = None  # exponent that the scale climbs from after overflow; None: it is free
    calm: int = CALM  # clean steps that the next climb waits for
    waits: int = 0  # clean steps that this one still does
    free: int = PROOF  # clean steps since the scale is free, or since the last probe
    refusals: int = 0  # climbs in a row that met overflow
    reserve: int = 0
    probe: int = PROBES[0]
    settled: int = 0  # clean steps since the reserve changed
    singles: list[int] = field(default_factory=list[int])  # steps of the latest single overflows
    probing: bool = False  # whether the last change of the reserve gave a binade back
    surprise: bool = False  # whether the latest run of overflows came neither on the way up nor soon after
    faint: bool = False  # whether too many values are about to be lost

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers, that `from_dict` makes an equal memory of."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**plain, "trend": self.trend.to_dict(), "singles": list(self.singles)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Memory":
        """The memory that `to_dict` wrote."""
        plain: dict[str, Any] = {**saved, "trend": Trend.from_dict(saved["trend"]), "singles": list(saved["singles"])}
        return cls(**plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpectralRule:
    """The numbers that the rule works by: `line` is the exponent (a fraction) at which the format overflows."""

    line: float
    margin: float
    lowest: int  # exponent of the smallest scale
    highest: int

    def next_exponent(self, memory: Memory, look: Look, scale: float) -> int:
        """The exponent of the next scale, after a step whose gradients carried `scale`; the memory takes it in."""
        memory.step += 1
        exponent = math.frexp(scale)[1] - 1
        found = self._after_overflow(memory, exponent) if look.overflowed else self._after_clean(memory, look, scale)
        return min(max(found, self.lowest), self.highest)

    def drop(self, memory: Memory) -> int:
        """By how many binades an overflow in the next step would lower the scale."""
        return DROPS[min(memory.overflows, len(DROPS) - 1)]

    def open_exponent(self, memory: Memory) -> int | None:
        """The highest exponent that keeps the margin and the reserve, by the trend; None before the first level."""
        level, latest = memory.trend.forecast, memory.trend.latest
        if level is None or latest is None:
            return None
        if memory.cap is not None:
            level = max(level, latest)  # hard batches that are going on show first there
        share, margin = (BOLD_SHARE, self.margin / 2) if memory.faint else (SHARE, self.margin)
        usual = memory.trend.usual_error(share)
        return math.floor(self.line - level - usual - margin - memory.reserve)

    # -- overflow ------------------------------------------------------------------------------------------------------

    def _after_overflow(self, memory: Memory, exponent: int) -> int:
        if not memory.overflows:
            self._blame(memory, exponent)
        lowered = max(exponent - self.drop(memory), self.lowest)
        memory.overflows += 1
        memory.cap, memory.waits, memory.free = lowered, memory.calm, 0
        return lowered

    def _blame(self, memory: Memory, exponent: int) -> None:
        """The first of a run of overflows: was it met on the way up, after a probe, or out of nothing?"""
        memory.surprise = memory.cap is None and (memory.probing or memory.free >= PROOF)
        if memory.probing and memory.free < PROOF:
            memory.reserve, memory.probe = memory.reserve + 1, min(2 * memory.probe, PROBES[-1])
            memory.probing, memory.settled = False, 0
        elif memory.cap is not None or memory.free < PROOF:
            memory.refusals += 1
            memory.calm = min(2 * memory.calm, LONGEST_CALM)
            if memory.refusals >= REFUSALS:
                self._learn(memory, exponent)

    def _learn(self, memory: Memory, exponent: int) -> None:
        """The scale that failed becomes the limit, as a distance from what is seen."""
        limit = self.open_exponent(memory)
        if limit is not None and limit >= exponent:
            memory.reserve += limit - exponent + 1
            memory.probe, memory.settled, memory.probing = PROBES[0], 0, False
        memory.refusals, memory.calm = 0, CALM

    # -- clean steps ---------------------------------------------------------------------------------------------------

    def _after_clean(self, memory: Memory, look: Look, scale: float) -> int:
        if memory.overflows == 1 and memory.surprise:
            self._count_single(memory)
        memory.overflows = 0
        memory.free += 1
        self._give_back(memory)
        if look.absmax > 0:
            # What a run of hard batches shows says nothing about how far forecasts are off at other times.
            memory.trend.add(math.log2(look.absmax) - math.log2(scale), learn=memory.cap is None)
            memory.faint = look.faint > TOLERANCE * look.nonzero
        target = self.open_exponent(memory)
        if memory.cap is not None:
            return self._climb(memory, target)
        return math.frexp(scale)[1] - 1 if target is None else target

    def _climb(self, memory: Memory, target: int | None) -> int:
        """The way back after overflow: stays, then a binade a step up to where the trend would have it."""
        cap = memory.cap or 0
        if memory.waits:
            memory.waits -= 1
        elif target is not None:
            cap += 1
        if target is None or cap < target:
            memory.cap = cap
            return cap
        memory.cap, memory.free = None, 0
        return target

    def _count_single(self, memory: Memory) -> None:
        """Overflows one at a time are jumps larger than what is covered: many of them ask for more room."""
        memory.singles = [*memory.singles, memory.step][-MANY:]
        if len(memory.singles) == MANY and memory.step - memory.singles[0] <= SPELL:
            memory.reserve += 1
            memory.singles.clear()
            memory.probe = min(max(2 * memory.probe, PROBES[1]), PROBES[-1])
            memory.settled, memory.probing = 0, False

    def _give_back(self, memory: Memory) -> None:
        if memory.cap is None and memory.free == PROOF:
            memory.calm, memory.refusals, memory.probing = CALM, 0, False
        if not memory.reserve:
            return
        memory.settled += 1
        if memory.settled >= memory.probe and memory.cap is None:
            memory.reserve -= 1
            memory.settled, memory.free, memory.probing = 0, 0, True
