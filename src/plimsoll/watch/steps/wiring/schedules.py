"""Checks of learning rates and weight decay, and of the schedules that set the rates.

Rates are read from the parameter groups before each step of an optimizer:

- a rate that is 0, NaN, Inf or next to nothing, and weight decay that 16-bit weights lose;
- a rate that has come to its end and rises again;
- a rate whose highest value is the square of the one that the optimizer was given;
- rates that begin again, as they were at first, with a schedule that was made again before the first one's end.

`ReduceLROnPlateau` reports each of its calls. One that lowers a rate, and whose metric has moved only the other way
since the first call, may wait for the wrong direction. One whose last metrics were NaN or Inf waits for nothing. Adams
that add much weight decay to the gradients are recorded too.
"""

import copy
import math
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plimsoll.kernels.device_value import DeviceValue, number, ready, resolved
from plimsoll.kernels.dtypes import FORMATS, SIXTEEN_BIT
from plimsoll.watch.parameters.updates import OWN, kind_of
from plimsoll.watch.steps.wiring.checks import Fact, FollowedOptimizer, Training, TrainingCheck

_TINY = 2.0**-17  # of the highest rate that a group has had: less moves nothing in a training's usual number of steps
_ENDED, _AGAIN = 0.01, 0.25  # of a rate's peak: a schedule has come to its end, and rises again
_RESTART = 0.5  # of it, in one step: a schedule that begins again, as it should
# Less than this of a weight is lost at any weight.
_HALF_ULP = {dtype: 2.0 ** -(FORMATS[dtype].mantissa_bits + 2) for dtype in SIXTEEN_BIT}
_WINDOW = 3  # of the last metrics, at least: with the first one they are four
_AWAY = 0.1  # of the first metric, by which the last ones lie on the side that the schedule does not wait for
_SETTLED_STEPS = 20  # after which a highest rate is judged
_LARGEST_BASE = 0.1  # 0.1 and more, squared, may be a rate that is meant; so may a base of 1
_SAME = 1e-6  # relative
_ALIKE = 5  # different rates on end that are those of the start, bit for bit: no other schedule has them
_LENGTHS = ("T_max", "total_steps", "total_iters")  # calls after which a schedule has come to its end
_TIMES = 2  # that a schedule without a length has begun again in the middle of its rise
_MUCH_DECAY = 0.01  # what is usual where it is taken from the weights; added to gradients, 1e-4 is
_FORGOTTEN = 0.005  # of a weight, that SGD's decay takes at each step: a third of it is left after 200
# These add decay to the gradients unless they are asked to take it from the weights. AdamW is a class of its own.
_ADAPTIVE = (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop)


class RateCourse:
    """The course of a learning rate: its peak, and its lowest since."""

    def __init__(self) -> None:
        self.peak = self.before = self.lowest = 0.0
        self.lowest_at = 0

    def rises_again(self, rate: float, step: int) -> bool:
        """Take the rate of a step; return True if it has come to its end before, and has risen since, little by little.

        A cosine does that past its length.
        """
        begins = rate >= self.peak or rate - self.before > _RESTART * self.peak
        self.peak = rate if begins else self.peak
        if begins or rate < self.lowest:
            self.lowest, self.lowest_at = rate, step
        self.before = rate
        return self.lowest < _ENDED * self.peak and rate > _AGAIN * self.peak


class CutSchedule(NamedTuple):
    """A schedule in whose place another one was made."""

    moves: int  # of the rate
    length: int  # 0: it has no end
    rate: float  # the last


# Warm restarts have a schedule of their own, or one that comes to its end before it is made again.
class Beginnings:
    """The first rates of an optimizer's schedule, and those of one that is made for it later."""

    def __init__(self) -> None:
        self.first: list[float] = []  # the first rates of all that differ from the one before
        self._present: list[float] | None = None  # those of the schedule that was made last
        self._moves = 0  # of the rate, with the present schedule
        self._rises = True
        self._last = math.nan
        self.cut: CutSchedule | None = None  # the last one
        self.began_at = 0
        self.times = 0  # that it has begun again before its end

    def made(self, scheduler: Any, step: int) -> None:
        """Note a schedule that was made at this step."""
        length = next((n for name in _LENGTHS if isinstance(n := getattr(scheduler, name, None), int)), 0)
        early = self._moves + 1 < length if length else self._rises and len(self.first) > 1
        if self._moves:
            self._present = list[float]() if early else None
            self.cut, self.began_at = CutSchedule(self._moves, length, self._last), step
            self._moves, self._rises, self._last = 0, True, math.nan

    def begin_again(self, rate: float, *, is_new: bool) -> bool:
        """Take the rate of a step; return True if it is now clear that the schedule has begun again, too early.

        `is_new`: the optimizer has no state. It begins again too, as it should with its schedule.
        """
        if is_new and not self._moves:
            self._present = None
        if rate == self._last:
            return False
        self._rises &= not rate < self._last
        self._last = rate
        self._moves += 1
        if self._present is None:
            if len(self.first) < _ALIKE and self.cut is None:
                self.first.append(rate)
            return False
        self._present.append(rate)
        if len(self._present) < _ALIKE:
            return False
        alike, self._present = self._present == self.first, None
        self.times += alike
        return alike and self.times == (1 if self.cut is not None and self.cut.length else _TIMES)


class Rates:
    """Rates and decays of one optimizer, from step to step."""

    def __init__(self) -> None:
        self.beginnings = Beginnings()
        self.groups: list[tuple[str, float]] = []  # of each parameter group, what was said of its rate and decay
        self.first = RateCourse()  # of the first group
        self.highest: list[float] = []  # the highest rate of each
        self.steps = 0  # that have begun
        self.is_whole = False  # seen from the first step that the optimizer has ever made


class MetricCourse:
    """The metrics that a schedule was given: the first, the best, and the last few.

    Args:
        mode: "min" if the schedule waits for the metric to fall, "max" if to rise.
        window: How many of the last metrics are kept. The first is not among them.
    """

    def __init__(self, mode: str, window: int) -> None:
        self.sign = -1.0 if mode == "max" else 1.0
        self.count = 0
        self.first = self.best = math.nan
        self.last: deque[float] = deque(maxlen=window)
        self.coming: deque[float | DeviceValue] = deque()  # not on the host yet
        self.undefined = 0  # of the last metrics on end: NaN or Inf
        self.is_said = False

    def take(self, metric: object) -> None:
        """Take the metric of a call; waits for no device."""
        self.count += 1
        self.coming.append(number(metric))
        while self.coming and ready(self.coming[0]):
            self._settle(self.coming.popleft())

    def _settle(self, metric: "float | DeviceValue") -> None:
        value = float(resolved(metric) or 0.0)
        self.undefined = 0 if math.isfinite(value) else self.undefined + 1
        if math.isnan(self.first):
            self.first = self.best = value
            return
        self.last.append(value)
        # A NaN or Inf would end all comparisons: from then on the best is unknown.
        better = value if self.sign * value < self.sign * self.best else self.best
        self.best = better if math.isfinite(value) else math.nan

    def snapshot(self) -> "MetricCourse":
        """Return the course as it is now, for another thread."""
        kept = copy.copy(self)
        kept.last, kept.coming = self.last.copy(), self.coming.copy()
        return kept

    def settle(self) -> None:
        """Read the metrics that are still to come. May wait for a device."""
        while self.coming:
            self._settle(self.coming.popleft())

    def moved_away(self, threshold: float, *, relative: bool) -> float:
        """Return the mean of the last metrics if they lie on the other side of the first. May wait for a device.

        NaN if they do not, or if any metric was better than the first, or not finite.

        Args:
            threshold: The least change that counts for the schedule.
            relative: Whether that is a share of the first metric.
        """
        self.settle()
        if len(self.last) < (self.last.maxlen or 0) or self.best != self.first:
            return math.nan
        mean, size = math.fsum(self.last) / len(self.last), abs(self.first)
        away = self.sign * (mean - self.first)
        return mean if away >= _AWAY * size and away > threshold * (size if relative else 1.0) else math.nan


class Schedules(TrainingCheck):
    """Schedules, rates and decays of a training's optimizers."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._rates: weakref.WeakKeyDictionary[FollowedOptimizer, Rates] = weakref.WeakKeyDictionary()
        self._metrics: weakref.WeakKeyDictionary[Any, MetricCourse | None] = weakref.WeakKeyDictionary()

    def step_begins(self, optimizer: Any, followed: FollowedOptimizer) -> None:
        """An optimizer's step is called: record what is new of its rates and decays."""
        name, rates = followed.name, self._rates_of(followed)
        groups: list[dict[str, Any]] = optimizer.param_groups
        rates.highest += [0.0] * (len(groups) - len(rates.highest))
        for place, group in enumerate(groups):
            if isinstance(rate := group.get("lr"), float) and rates.highest[place] < rate < math.inf:
                rates.highest[place] = rate
        if not rates.steps:
            rates.is_whole = not optimizer.state and self.session.step == 0
            self._look_at_added_decay(optimizer, name)
        rates.steps += 1
        first = groups[0].get("lr") if groups else None
        if isinstance(first, float) and math.isfinite(first) and rates.first.rises_again(first, self.session.step):
            at = rates.first.lowest_at
            self.facts.record(
                "rate rises again", f"the rate of {name} had come to its end at step {at:,} and rises again",
                key=f"rate rises again: {name}", optimizer=name, lowest_at=at, rate=first,
                lowest=rates.first.lowest, peak=rates.first.peak,
            )  # fmt: skip
        beginnings = rates.beginnings
        if isinstance(first, float) and beginnings.begin_again(first, is_new=not optimizer.state):
            self._say_again(name, beginnings)
        if beginnings.cut is None:  # else the rate may have come down by beginning again
            self._look_for_squares(groups, name, rates)
        self._look_at_groups(optimizer, name, rates)

    def _look_at_groups(self, optimizer: Any, name: str, rates: Rates) -> None:
        """Record start and end of bad rates (0, tiny, NaN, Inf) and underflowing decay."""
        now = [
            (_rate_of(group, highest), _decay_of(group, optimizer))
            for group, highest in zip(optimizer.param_groups, rates.highest, strict=False)
        ]
        before, rates.groups = rates.groups, now
        if now == before or (not before and not any(rate or decay for rate, decay in now)):
            return
        names = self.training.names()
        groups = [
            {"rate": rate, "decay": decay, "parameters": [n for p in group["params"] if (n := names.get(id(p)))]}
            for (rate, decay), group in zip(now, optimizer.param_groups, strict=True)
            if rate or decay
        ]
        bad = sorted({f"rate {rate}" for rate, _ in now if rate})
        bad += ["decay lost to rounding"] if any(decay for _, decay in now) else []
        self.session.say(
            "wiring",
            f"{name}: {', '.join(bad) or 'as usual'}",
            fact="groups",
            optimizer=name,
            groups=groups,
            of=len(now),
        )

    def schedule_made(self, scheduler: Any, followed: FollowedOptimizer) -> None:
        """A schedule of learning rates was made."""
        rates = self._rates_of(followed)
        rates.beginnings.made(scheduler, self.session.step + bool(rates.steps))

    def _rates_of(self, followed: FollowedOptimizer) -> Rates:
        return self._rates.setdefault(followed, Rates())

    def _say_again(self, name: str, beginnings: Beginnings) -> None:
        if beginnings.cut is None:
            return
        moves, length, rate = beginnings.cut
        of = f" of {length:,}" if length else ""
        self.facts.record(
            "schedule again", f"the schedule of {name} was made again after {moves:,}{of} rates, and starts over",
            key=f"schedule again: {name}", optimizer=name, began_at=beginnings.began_at, moves=moves, length=length,
            before=rate, rate=beginnings.first[0],
        )  # fmt: skip

    # LambdaLR multiplies `initial_lr` by what its function returns, which is to be a factor. If that is the rate, the
    # highest is `initial_lr` squared. A warm-up may begin there (from 1e-6 to 1e-3), so the rate has to have come down
    # again. A schedule in steps of ten may come by there, so it has to be seen from the optimizer's first step on.
    def _look_for_squares(self, groups: list[dict[str, Any]], name: str, rates: Rates) -> None:
        """Record a highest rate that is the square of the rate that the optimizer was given."""
        if rates.steps < _SETTLED_STEPS or not rates.is_whole:
            return
        for group, highest in zip(groups, rates.highest, strict=False):
            base, rate = group.get("initial_lr"), group.get("lr")
            if not isinstance(base, float) or not isinstance(rate, float) or not 0 < base < _LARGEST_BASE:
                continue
            if rate < highest and abs(highest - base * base) <= _SAME * base * base:
                self.facts.record(
                    "rate squared", f"the highest rate of {name} is {highest:g}, the square of {base:g}",
                    key=f"rate squared: {name}", optimizer=name, base=base, highest=highest, steps=rates.steps,
                )  # fmt: skip
                return

    def _look_at_added_decay(self, optimizer: Any, name: str) -> None:
        """Record the matrices of which an Adam or SGD adds much decay to the gradients."""
        if type(optimizer) not in (*_ADAPTIVE, torch.optim.SGD) or kind_of(optimizer) != OWN:
            return
        names, listed = self.training.names(), list[dict[str, Any]]()
        for group in optimizer.param_groups:
            decay = group.get("weight_decay")
            matrices = [n for p in group["params"] if p.dim() > 1 and (n := names.get(id(p)))]
            coupled = not group.get("decoupled_weight_decay", False)
            if isinstance(decay, int | float) and _MUCH_DECAY <= decay < math.inf and coupled and matrices:
                if type(optimizer) is torch.optim.SGD and not _forgets(group):
                    continue
                listed.append({"decay": float(decay), "parameters": matrices})
        if listed:
            message = f"{name} adds a weight decay of {listed[0]['decay']:g} to the gradients"
            self.facts.record("decay added", message, key=f"decay added: {name}", optimizer=name, groups=listed)

    def plateau_steps(self, scheduler: Any, metric: object, followed: FollowedOptimizer, *, lowered: bool) -> None:
        """A `ReduceLROnPlateau` has taken a metric: record one that waits for the wrong direction, or has none."""
        if scheduler not in self._metrics:
            # A schedule that goes on from a checkpoint has had better metrics that were not seen.
            window = max(int(scheduler.patience), _WINDOW)
            is_whole = scheduler.last_epoch <= 1
            self._metrics[scheduler] = MetricCourse(scheduler.mode, window) if is_whole else None
        course = self._metrics[scheduler]
        if course is None or course.is_said:
            return
        course.take(metric)
        if not lowered:
            return
        name, mode, count = followed.name, str(scheduler.mode), course.count
        snapshot = course.snapshot()
        threshold, is_relative = float(scheduler.threshold), scheduler.threshold_mode == "rel"
        patience = int(scheduler.patience)

        def read() -> list[Fact]:
            snapshot.settle()
            if snapshot.undefined > patience and not course.is_said:
                course.is_said = True
                message = (
                    f"ReduceLROnPlateau lowers the rate of {name} after {snapshot.undefined} metrics of NaN or Inf"
                )
                return [Fact("plateau undefined", message, {"optimizer": name, "metrics": snapshot.undefined})]
            mean = snapshot.moved_away(threshold, relative=is_relative)
            if math.isnan(mean) or course.is_said:
                return []
            course.is_said = True
            way = "risen" if mode == "min" else "fallen"
            message = f"ReduceLROnPlateau lowers the rate of {name}, and its metric has {way} since the first call"
            details = {
                "optimizer": name, "mode": mode, "first": snapshot.first, "now": mean, "metrics": count,
            }  # fmt: skip
            return [Fact("plateau misread", message, details)]

        self.facts.record_from(read)


def _forgets(group: dict[str, Any]) -> bool:
    """Return True if SGD's decay takes a good part of each weight at each step, at the rate without a warm-up."""
    rate, momentum = group.get("initial_lr", group.get("lr")), group.get("momentum", 0.0)
    numbers = isinstance(rate, int | float) and isinstance(momentum, int | float) and momentum < 1
    return numbers and rate * group["weight_decay"] / (1 - momentum) >= _FORGOTTEN


def _rate_of(group: Mapping[str, Any], highest: float) -> str:
    """Return the fault of the group's rate, or ""; waits for no device."""
    rate = group.get("lr")
    if isinstance(rate, Tensor):
        rate = rate.item() if rate.device.type == "cpu" and rate.numel() == 1 else None
    if not isinstance(rate, int | float):
        return ""
    if math.isnan(rate):
        return "nan"
    if rate == 0 or not math.isfinite(rate):
        return "inf" if rate else "zero"
    return "tiny" if rate < _TINY * highest else ""


def _decay_of(group: Mapping[str, Any], optimizer: Any) -> float:
    """Return the share of weights that decoupled decay takes but 16 bits lose, or 0."""
    rate, decay = group.get("lr"), group.get("weight_decay")
    if not isinstance(rate, float) or not isinstance(decay, int | float) or kind_of(optimizer) != OWN:
        return 0.0
    decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    params: list[Tensor] = group["params"]
    if not decoupled or not params or not 0 < rate * decay < math.inf:
        return 0.0
    bound = _HALF_ULP.get(params[0].dtype)
    return 2.0 ** round(math.log2(rate * decay)) if bound is not None and rate * decay < bound else 0.0
