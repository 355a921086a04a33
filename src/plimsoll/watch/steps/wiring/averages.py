"""Averages and counters that a 16-bit format keeps from moving.

A moving average takes a small part of its distance to the weights at every step. Where that part is less than half a
unit in the last place, rounding gives back the value that it was, however far away the weights are. That shows in no
spectrum. So a few 16-bit tensors in no optimizer are followed, each beside the trained weight that it is a copy of.
A small buffer that is written at each step and stays as it is may be one of them, or a mask: the rules judge.
"""

import itertools
import weakref
from collections.abc import Callable, Collection
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.kernels.device_value import DeviceValue
from plimsoll.kernels.dtypes import FORMATS, SIXTEEN_BIT
from plimsoll.watch.names import clean
from plimsoll.watch.session import WatchSession
from plimsoll.watch.steps.wiring.checks import Fact, FollowedOptimizer, Training, TrainingCheck, is_plain

_FORMATS = {dtype: FORMATS[dtype].name for dtype in SIXTEEN_BIT}
_FOLLOWED = 16  # copies
_SAMPLE = 4096  # values of each
# Averages are checked after 1, 2, 4, 8, ... steps and then every 256. Nothing here waits for a device.
_EVERY = 256  # steps between looks: one takes about two milliseconds
_DECAY = 0.9999  # the slowest that is usual
_QUICK = 0.05  # of a batch that running statistics take at a step
_WRITES = 64  # between two looks at running statistics
_STILL = 0.1  # of their values may move
_RUNNING = ("running_mean", "running_var")
_SMALL = (2, 1024)  # values of a buffer: one for each expert, head or class
_KEPT = 32  # writes in a row that leave a buffer as it is
_SHARE = 0.1  # of the sample: less does not matter


class Averages(TrainingCheck):
    """Averages, counters and running statistics of a training that are kept in 16 bits."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._copies: list[_Copy] | None = None
        self._steps = 0  # that were seen
        self._looked = 0  # after so many steps
        self._stuck: set[str] = set()  # names, as said
        self._moving: set[str] = set()  # those of them that were seen to move later
        self._counters: list[_Counter] = []
        self._statistics: list[_Statistic] = []
        self._still: list[_Still] = []

    def step_ends(self, optimizer: Any, followed: FollowedOptimizer) -> None:
        """An optimizer's step has returned."""
        before, self._steps = self._steps, self.training.steps
        steps = self._steps
        if steps > before and (steps % _EVERY == 0 or (steps < _EVERY and steps & (steps - 1) == 0)):
            self._look()

    def closes(self) -> None:
        """The watch closes."""
        self._look()

    @torch.no_grad()
    def _look(self) -> None:
        """Compare the copies with the last look's values; the first look chooses them."""
        steps, owned = self.training.steps, self.training.owned()
        passed, self._looked = steps - self._looked, steps
        if self._copies is None:
            self._copies = _chosen(self.session, owned)
            self._counters = _counters(self.session)
            self._statistics = _statistics(self.session)
            self._still = _small_buffers(self.session)
            return
        if not passed:
            return
        for counter in self._counters:
            self._read_counter(counter)
        for statistic in self._statistics:
            self._read_statistic(statistic)
        self._still = [buffer for buffer in self._still if buffer.look(passed)]
        for buffer in [buffer for buffer in self._still if buffer.writes >= _KEPT]:
            self._still.remove(buffer)
            self.facts.record_from(buffer.facts(), size_bytes=100, numbers=True)
        looks: dict[torch.device, list[tuple[_Copy, Tensor]]] = {}
        for copy in list(self._copies):
            counts = copy.look(passed, owned)
            if counts is None:
                self._copies.remove(copy)
            else:
                looks.setdefault(counts.device, []).append((copy, counts))
        for seen in looks.values():
            self._hand_over([copy for copy, _ in seen], DeviceValue(torch.stack([counts for _, counts in seen])))

    def _read_counter(self, counter: "_Counter") -> None:
        value = counter.read()
        if value is None:
            return

        def read() -> list[Fact]:
            stuck = counter.is_stuck(*value)
            return [_fact("counter stuck", [counter.name], format=counter.format)] if stuck else []

        self.facts.record_from(read, size_bytes=100, numbers=True)

    def _read_statistic(self, statistic: "_Statistic") -> None:
        counts = statistic.look()
        if counts is None:
            return

        def read() -> list[Fact]:
            stuck = statistic.is_stuck(counts)
            return [_fact("average stuck", [statistic.name], format=statistic.format)] if stuck else []

        self.facts.record_from(read, size_bytes=100, numbers=True)

    def _hand_over(self, copies: "list[_Copy]", counts: DeviceValue) -> None:
        of = len(copies)
        facts = [(copy.name, copy.format, copy.size) for copy in copies]

        def read() -> list[Fact]:
            table = cast("list[list[int]]", counts.tensor().tolist())
            fact_of_name: dict[str, str] = {}
            moving: list[str] = []
            for (name, fmt, size), (moved, stuck) in zip(facts, table, strict=True):
                if name in self._stuck - self._moving and moved > stuck:
                    moving.append(name)
                elif name not in self._stuck and moved and stuck > max(moved, _SHARE * size):
                    fact_of_name[name] = fmt
            self._stuck.update(fact_of_name)
            self._moving.update(moving)
            found: list[Fact] = []
            if fact_of_name:
                fmt = next(iter(fact_of_name.values()))
                found.append(_fact("average stuck", list(fact_of_name), format=fmt, of=of))
            if moving:
                found.append(_fact("average moves", moving))
            return found

        self.facts.record_from(read, size_bytes=100 * of, numbers=True)


class _Copy:
    """A sampled 16-bit copy of a trained weight, and the average that it should have."""

    def __init__(self, name: str, copy: Tensor, weight: Tensor) -> None:
        self.name, self.format = name, _FORMATS[copy.dtype]
        self._copy, self._weight = weakref.ref(copy), weakref.ref(weight)
        self._stride = -(-copy.numel() // _SAMPLE) | 1  # odd: an even one may meet the same columns only
        info = torch.finfo(copy.dtype)
        self._eps, self._least = info.eps, info.eps * info.tiny
        self._read(copy, weight)
        self._slow, self.size = self._value, self._value.numel()
        # Is it a copy at all? It then is nearer to the weight than zero is.
        self._is_copy = (self._target - self._value).square().sum() < self._value.square().sum()
        self._has_moved = torch.zeros_like(self._is_copy)

    # At most 4,096 values of each are compared with a slow average of the same weights, kept in FP32: decay 0.9999. A
    # value is stuck if the slow average has left it by a unit in the last place, and it is still the same: any faster
    # average in FP32 would have moved it, too. A copy whose values are stuck while others of it move (those near zero
    # are free to) is an average. One that does not move at all is frozen, or copied again from time to time, and not
    # meant.
    def look(self, passed: int, owned: Collection[int]) -> Tensor | None:
        """Return how many sampled values moved and are stuck; None for a tensor to drop."""
        copy, weight = self._copy(), self._weight()
        if copy is None or weight is None or copy.grad is not None or id(copy) in owned:
            return None
        before, side, target = self._value, self._side, self._target
        self._read(copy, weight)
        slow = self._slow + (1 - _DECAY**passed) * ((target + self._target) / 2 - self._slow)
        moved = self._value != before
        follows = self._has_moved & ~moved & (self._side == side)  # else the slow average begins again from here
        self._slow = slow.where(follows, self._value)
        self._has_moved = self._has_moved | moved.any()
        unit = (self._value.abs() * self._eps).clamp(min=self._least)  # at most twice the spacing of values there
        stuck = ((self._slow - self._value).abs() >= unit) & ((self._target - self._value).abs() >= unit)
        return torch.stack([moved.sum(), (stuck & self._is_copy).sum()])

    def _read(self, copy: Tensor, weight: Tensor) -> None:
        self._value, self._target = self._sampled(copy), self._sampled(weight)
        self._side = (self._target - self._value).sign()  # of the copy, on which the weight lies

    def _sampled(self, x: Tensor) -> Tensor:
        return x.detach().view(-1)[:: self._stride].to(torch.float32, copy=True)


class _Counter:
    """A 16-bit buffer of one value, and its value at the last look."""

    def __init__(self, name: str, x: Tensor) -> None:
        self.name, self.format = name, _FORMATS[x.dtype]
        self._buffer, self._dtype = weakref.ref(x), x.dtype
        self._last: tuple[float, int] | None = None  # the value, and the version that had it
        self._increments: list[float] = []  # of each change in place, at the first two looks that found a change
        self._reported = False

    def read(self) -> tuple[DeviceValue, int] | None:
        """Return the value, which the device may still compute, and its version."""
        x = self._buffer()
        return None if x is None else (DeviceValue(x.float()), x._version)  # noqa: SLF001

    # A counter is a buffer of one value that has grown by the same amount with each change in place. Where adding that
    # amount once more gives the value back, it counts no further: BF16 stops at 256, FP16 at 2,048.
    def is_stuck(self, value: DeviceValue, version: int) -> bool:
        """Return True, once, if the value stopped moving although it was changed."""
        now, last = value.value(), self._last
        self._last = now, version
        if last is None or version == last[1] or self._reported:
            return False
        if now != last[0]:
            if len(self._increments) < 2:
                self._increments.append((now - last[0]) / (version - last[1]))
            return False
        if len(self._increments) < 2 or self._increments[0] != self._increments[1]:  # an average, or a constant
            return False
        following = float(torch.tensor(now + self._increments[0], device="cpu").to(self._dtype))
        self._reported = following == now
        return self._reported


class _Statistic:
    """Running statistics in 16 bits, and their values at the last look."""

    def __init__(self, name: str, x: Tensor) -> None:
        self.name, self.format = name, _FORMATS[x.dtype]
        self._buffer = weakref.ref(x)
        self._version, self._value = x._version, x.detach().reshape(-1)[:_SAMPLE].clone()  # noqa: SLF001
        self._has_moved, self._reported = False, False
        self._early = [DeviceValue(self._value.float())]  # after 1, 2, 4 and 8 steps

    def look(self) -> DeviceValue | None:
        """Return how many values there are and moved, if they were written often since the last look."""
        x = self._buffer()
        if x is not None and len(self._early) < 4:
            self._early.append(DeviceValue(x.detach().reshape(-1)[:_SAMPLE].float()))
        if x is None or x._version - self._version < _WRITES or x.device != self._value.device:  # noqa: SLF001
            return None
        now = x.detach().reshape(-1)[:_SAMPLE].clone()
        before, self._value, self._version = self._value, now, x._version  # noqa: SLF001
        return DeviceValue(torch.stack([torch.ones_like(now).sum(dtype=torch.long), (now != before).sum()]))

    # Batches differ, so statistics in FP32 change with each write. Those that moved once and stand still through all of
    # many writes are nearer to what comes in than rounding lets them come.
    def is_stuck(self, counts: DeviceValue) -> bool:
        """Return True, once, if nearly all values stand still that moved before."""
        values, moved = cast("list[int]", counts.tensor().tolist())
        stuck = self._has_moved and not self._reported and moved <= _STILL * values and not self._is_quick()
        self._has_moved |= moved > _STILL * values
        self._reported |= stuck
        return stuck

    # A step takes the same part of what is left to come in, so the first steps tell it: each one from the fifth to the
    # eighth moves (1 - part)^4.5 of what the second does.
    def _is_quick(self) -> bool:
        """Return True if a step takes a twentieth of a batch or more: then they stop near what comes in."""
        if len(self._early) < 4:
            return False
        one, two, four, eight = (value.tensor() for value in self._early)
        return bool((eight - four).abs().sum() / 4 < (1 - _QUICK) ** 4.5 * (two - one).abs().sum())


class _Still:
    """A small 16-bit buffer that is written at each step, and the values that it has had since the first look."""

    def __init__(self, name: str, x: Tensor) -> None:
        self.name, self.format, self.writes = name, _FORMATS[x.dtype], 0
        self._buffer, self._version = weakref.ref(x), x._version  # noqa: SLF001
        self._value = x.detach().clone()
        self._same: list[Tensor] = []  # of each look, whether no value has changed

    def look(self, passed: int) -> bool:
        """Compare its values; return False if it was not written at each of the steps that have passed."""
        x = self._buffer()
        if x is None or x._version - self._version < passed or x.device != self._value.device:  # noqa: SLF001
            return False
        self.writes, self._version = self.writes + passed, x._version  # noqa: SLF001
        self._same.append((x.detach() == self._value).all())
        return True

    # What is added to a zero is not rounded away, however small it is.
    def facts(self) -> Callable[[], list[Fact]]:
        """Return a function that gives the fact, if all values are as they were and none is zero."""
        same = DeviceValue(torch.stack([*self._same, (self._value != 0).all()]))
        details = {"format": self.format, "values": self._value.numel(), "writes": self.writes}
        return lambda: [_fact("buffer still", [self.name], **details)] if bool(same.tensor().all()) else []


def _small_buffers(session: WatchSession) -> list[_Still]:
    """Return the model's first small 16-bit buffers, but for running statistics."""
    model = session.model()
    named = list[tuple[str, Tensor]]() if model is None else list(model.named_buffers())
    return [
        _Still(clean(raw), x)
        for raw, x in named
        if x.dtype in _FORMATS and _SMALL[0] <= x.numel() <= _SMALL[1] and is_plain(x)
        if raw.rpartition(".")[2] not in _RUNNING
    ][:_FOLLOWED]


def _statistics(session: WatchSession) -> list[_Statistic]:
    """Return the model's first running means and variances in 16 bits."""
    model = session.model()
    found: list[_Statistic] = []
    for raw, x in list[tuple[str, Tensor]]() if model is None else model.named_buffers():
        name = raw.rpartition(".")[2]
        if x.dtype in _FORMATS and name in _RUNNING and is_plain(x):
            found.append(_Statistic(clean(raw), x))
    return found[:_FOLLOWED]


def _counters(session: WatchSession) -> list[_Counter]:
    """Return the first of the model's 16-bit buffers of one value."""
    model = session.model()
    buffers = list[tuple[str, Tensor]]() if model is None else list(model.named_buffers())
    single = [(clean(raw), x) for raw, x in buffers if x.dtype in _FORMATS and x.numel() == 1 and is_plain(x)]
    return [_Counter(name, x) for name, x in single[:_FOLLOWED]]


# Sixteen copies are chosen before their weights are sought, so that the names of these alone are compared, and not
# those of a whole large model.
def _chosen(session: WatchSession, owned: Collection[int]) -> list[_Copy]:
    """Return 16-bit tensors in no optimizer, with the trained weights named like them."""
    model = session.model()
    if model is None:
        return []
    trained: dict[tuple[object, ...], list[tuple[str, Tensor]]] = {}
    for raw, p in model.named_parameters():
        if id(p) in owned and is_plain(p):
            trained.setdefault((p.shape, p.device), []).append((clean(raw), p))
    mine = [
        (clean(raw), x)
        for raw, x in itertools.chain(model.named_parameters(), model.named_buffers())
        if x.dtype in _FORMATS and id(x) not in owned and x.grad is None and is_plain(x)
        if (x.shape, x.device) in trained
    ]
    copies: list[_Copy] = []
    for name, x in mine[:: -(-len(mine) // _FOLLOWED) or 1]:
        likeness, weight = max(
            ((_likeness(name, theirs), w) for theirs, w in trained[x.shape, x.device]), key=lambda pair: pair[0]
        )
        if any(likeness):
            copies.append(_Copy(name, x, weight))
    return copies


def _likeness(name: str, weight: str) -> tuple[int, int]:
    """Return the length of the names' common end, with and without dots, or 0."""
    if not name.endswith(weight.rpartition(".")[2]):
        return 0, 0
    return _shared_end(f".{name}", f".{weight}"), _shared_end(name.replace(".", ""), weight.replace(".", ""))


def _shared_end(a: str, b: str) -> int:
    pairs = enumerate(zip(reversed(a), reversed(b), strict=False))
    return next((place for place, (letter, other) in pairs if letter != other), min(len(a), len(b)))


_MESSAGES = {
    "average stuck": "{} averages of weights in a 16-bit format do not move",
    "average moves": "{} averages of weights in a 16-bit format have moved",
    "buffer still": "{} small buffer in a 16-bit format is written at each step and does not change",
    "counter stuck": "{} counter in a 16-bit format no longer counts",
}


def _fact(name: str, parameters: list[str], **details: object) -> Fact:
    message = f"{_MESSAGES[name].format(len(parameters))}: {', '.join(parameters[:3])}"
    return Fact(name, message, {"parameters": parameters, **details})
