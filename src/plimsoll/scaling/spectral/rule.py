"""Rule of the spectral scaler, from measured gradients to the next scale.

All numbers are in binades. The *level* of a step is the exponent of its largest unscaled gradient. The *line* is the
exponent at which the format overflows. The scale is the highest power of two at which

    expected next level + usual error of such forecasts + margin + reserve

is below the line. Levels come from clean steps only, so that a non-finite step leaves no trace in the statistics.

- **Underflow.** If more than `TOLERANCE` of the values are in the format's lowest binade or below, about as many
  underflow. The rule then takes half the margin, and covers fewer of the jumps.
- **Overflow** lowers the scale at once by 1 binade, and by 4 and 12 if the next steps overflow too. So a run of hard
  batches costs three steps and not one per binade. After `CALM` clean steps the scale climbs back, a binade a step.
- **Activations.** Overflow can happen to any gradient of the backward pass, but only those of parameters are measured,
  and those of activations may be larger. The rule learns the distance as the *reserve*. If the climb back overflows
  `REFUSALS` times, the failed scale becomes the limit. It is stored as a distance from the measured level, so that it
  follows gradients that drift. `MANY` single overflows within `NEAR_STEPS` steps add one binade. The reserve is reduced
  by a binade every `probe` clean steps. If an overflow follows within `PROOF` steps, the binade is added again, and the
  next attempt waits twice as long.
"""

import functools
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

# -- one-step forecast of a noisy series, with its typical error -------------------------------------------------------

VALUES = 32  # values of the line: the number of pairs grows with the square, and older steps matter less
ERRORS = 256  # errors that are remembered, so that a jump is covered for as many steps
UNKNOWN = 1.0  # error of a forecast without data, of which less is added with each error,
FEW = 32  # and none from this number of errors on


class Trend:
    """Bounded history of values, with a forecast and the errors of earlier ones.

    >>> trend = Trend()
    >>> for value in [1.0, 2.0, 3.0, 90.0, 5.0, 6.0]:
    ...     trend.add(value)
    >>> trend.forecast
    7.0
    """

    __slots__ = ("_errors", "_values", "forecast")

    forecast: float | None

    def __init__(self, values: Iterable[float] = (), errors: Iterable[float] = ()) -> None:
        self._values: deque[float] = deque((float(x) for x in values), maxlen=VALUES)
        self._errors: deque[float] = deque((float(x) for x in errors), maxlen=ERRORS)
        self.forecast = _next(self._values) if self._values else None

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float, *, learn: bool = True) -> None:
        """Add a finite value, and with `learn` the error of its forecast."""
        if learn and self.forecast is not None:
            self._errors.append(value - self.forecast)
        self._values.append(value)
        self.forecast = _next(self._values)

    @property
    def latest(self) -> float | None:
        """Median of the last three values, or None. A sudden change appears here first."""
        return _median(np.array(list(self._values)[-3:])) if self._values else None

    def usual_error(self, share: float) -> float:
        """Return the largest excess over the forecast in a share of past steps.

        While few steps are remembered, part of `UNKNOWN` is added.
        """
        unknown = UNKNOWN * max(1 - len(self._errors) / FEW, 0.0)
        return unknown + (_quantile(np.sort(list(self._errors)), share) if self._errors else 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, from which `from_dict` restores an equal trend."""
        return {"values": list(self._values), "errors": list(self._errors)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Trend":
        """Return the trend that `to_dict` wrote."""
        return cls(saved["values"], saved["errors"])


# The forecast is a straight line through the last values. Its slope is the median of the slopes between all pairs
# (Theil 1950, Sen 1968), its height the median of the residuals. A quarter of the values may be arbitrary without a
# large effect. A falling line is not followed below the median of the values: a decrease may stop, and a forecast that
# is too high does less harm here than one that is too low. No distribution around the line is assumed. Each forecast is
# compared with the value that follows, and a quantile of these errors is the usual error of the next one.
def _next(series: Iterable[float]) -> float:
    """Return the line's value one step after the last."""
    # As scipy's theilslopes, in a tenth of the time.
    values = np.array(list(series))
    if len(values) == 1:
        return float(values[0])
    later, earlier, apart = _pairs(len(values))
    slope = _median((values[later] - values[earlier]) / apart)
    steps = np.arange(len(values)) - len(values)
    return max(_median(values - slope * steps), _median(values))


def _median(values: NDArray[np.floating[Any]]) -> float:
    return _quantile(np.sort(values), 0.5)


def _quantile(ordered: NDArray[np.floating[Any]], share: float) -> float:
    """Return a quantile of ascending values."""
    # As numpy.quantile, in a tenth of the time for so few values.
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (place - below) * (ordered[above] - ordered[below]))


@functools.lru_cache(maxsize=VALUES)
def _pairs(number: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    earlier, later = np.triu_indices(number, 1)
    return later, earlier, later - earlier


# -- rule --------------------------------------------------------------------------------------------------------------

TOLERANCE = 1e-3  # share of the nonzero values that may be in the lowest binade or below
SHARE, BOLD_SHARE = 0.98, 0.95  # shares of forecast errors that are covered
DROPS = (1, 4, 12)  # binades for overflows in a row, the last for all that follow
CALM = 10  # clean steps before the scale climbs back
LONGEST_CALM = 2000
REFUSALS = 3
MANY, NEAR_STEPS = 4, 1000
PROOF = 100
# Clean steps before a binade of reserve is tried: if it is due to a refusal, to many single overflows, and at most.
PROBES = (100, 1000, 16_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """Measurement of one step's scaled gradients."""

    overflowed: bool  # whether a gradient is not finite
    absmax: float = 0.0  # largest finite magnitude
    nonzero: int = 0  # number of finite nonzero values
    faint: int = 0  # number of those in the format's lowest binade or below


@dataclass(slots=True)
class Memory:
    """State of the rule from step to step: plain numbers and the trend."""

    trend: Trend = field(default_factory=Trend)
    step: int = 0
    overflows: int = 0  # in a row, up to now
    cap: int | None = None  # exponent that the scale climbs from after an overflow, None if it is free
    calm: int = CALM  # clean steps that the next climb waits for
    waits: int = 0  # clean steps that this climb still waits for
    free: int = PROOF  # clean steps since the scale is free, or since the last probe
    refusals: int = 0  # climbs in a row that overflowed
    reserve: int = 0
    probe: int = PROBES[0]
    settled: int = 0  # clean steps since the reserve changed
    singles: list[int] = field(default_factory=list[int])  # steps of the latest single overflows
    probing: bool = False  # whether the last change of the reserve reduced it
    surprise: bool = False  # whether the latest run of overflows came neither during a climb nor soon after
    faint: bool = False  # whether too many values are about to underflow

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, from which `from_dict` restores an equal memory."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**plain, "trend": self.trend.to_dict(), "singles": list(self.singles)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Memory":
        """Return the memory that `to_dict` wrote."""
        plain: dict[str, Any] = {**saved, "trend": Trend.from_dict(saved["trend"]), "singles": list(saved["singles"])}
        return cls(**plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpectralRule:
    """Settings of the rule, in binades."""

    line: float  # exponent at which the format overflows, a fraction
    margin: float  # binades between the largest expected gradient and the line
    lowest: int  # exponent of the smallest scale
    highest: int  # exponent of the largest scale

    def next_exponent(self, memory: Memory, step: MeasuredStep, scale: float) -> int:
        """Return the exponent of the scale after a step at `scale`, and update the memory."""
        memory.step += 1
        exponent = math.frexp(scale)[1] - 1
        chosen = self._after_overflow(memory, exponent) if step.overflowed else self._after_clean(memory, step, scale)
        return min(max(chosen, self.lowest), self.highest)

    def drop(self, memory: Memory) -> int:
        """Return the binades by which an overflow in the next step lowers the scale."""
        return DROPS[min(memory.overflows, len(DROPS) - 1)]

    def open_exponent(self, memory: Memory) -> int | None:
        """Return the highest exponent with margin and reserve, or None at first."""
        level, latest = memory.trend.forecast, memory.trend.latest
        if level is None or latest is None:
            return None
        if memory.cap is not None:
            level = max(level, latest)  # ongoing hard batches appear there first
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
        """Assign the first overflow of a run to a climb, a probe, or neither."""
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
        """Set the limit to the failed scale, as a distance from the measured level."""
        limit = self.open_exponent(memory)
        if limit is not None and limit >= exponent:
            memory.reserve += limit - exponent + 1
            memory.probe, memory.settled, memory.probing = PROBES[0], 0, False
        memory.refusals, memory.calm = 0, CALM

    # -- clean steps ---------------------------------------------------------------------------------------------------

    def _after_clean(self, memory: Memory, step: MeasuredStep, scale: float) -> int:
        if memory.overflows == 1 and memory.surprise:
            self._count_single(memory)
        memory.overflows = 0
        memory.free += 1
        self._reduce_reserve(memory)
        if step.absmax > 0:
            # Errors of forecasts during hard batches are not those of other times.
            memory.trend.add(math.log2(step.absmax) - math.log2(scale), learn=memory.cap is None)
            memory.faint = step.faint > TOLERANCE * step.nonzero
        target = self.open_exponent(memory)
        if memory.cap is not None:
            return self._climb(memory, target)
        return math.frexp(scale)[1] - 1 if target is None else target

    def _climb(self, memory: Memory, target: int | None) -> int:
        """Return the exponent after an overflow: it waits, then climbs to the target."""
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
        """Count a single overflow. Many of them increase the reserve."""
        memory.singles = [*memory.singles, memory.step][-MANY:]
        if len(memory.singles) == MANY and memory.step - memory.singles[0] <= NEAR_STEPS:
            memory.reserve += 1
            memory.singles.clear()
            memory.probe = min(max(2 * memory.probe, PROBES[1]), PROBES[-1])
            memory.settled, memory.probing = 0, False

    def _reduce_reserve(self, memory: Memory) -> None:
        if memory.cap is None and memory.free == PROOF:
            memory.calm, memory.refusals, memory.probing = CALM, 0, False
        if not memory.reserve:
            return
        memory.settled += 1
        if memory.settled >= memory.probe and memory.cap is None:
            memory.reserve -= 1
            memory.settled, memory.free, memory.probing = 0, 0, True
