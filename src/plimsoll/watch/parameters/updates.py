"""Changes of weights: their size, their kind, and steps without an optimizer.

`Updates` measures the difference of the weights after and before a step. `UpdateKinds` records how an optimizer steps
16-bit weights, as it declares it or as the weights show, so that rules can judge weights that do not move. `Probe`
finds steps that a script makes without an optimizer.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll import kernels
from plimsoll.kernels.device_value import DeviceValue
from plimsoll.kernels.dtypes import FORMATS, SIXTEEN_BIT
from plimsoll.runs import Event, Record
from plimsoll.watch.parameters.followed_weights import BIASED, INEXACT, LOSSLESS, ON_AVERAGE, FollowedWeights, way_of
from plimsoll.watch.session import WatchSession

OWN = "own"  # the kind of an optimizer that declares none
TOWARD_ZERO = "toward zero"  # a kind that is found from changes of weights
_OFTEN = 4  # sampled steps up to two to this are looked at, then every second one up to its double, and so on
_VALUES = 1 << 16  # of each weight
# Updates are known by the weights that are fine enough for them. Where a weight's rounding is 2.5 times the largest of
# these updates, rounding to nearest moves nothing (measured: 0 of 2,000 values a step; by chance 10 %).
_FINE, _COARSE = 4.0, 2.5
_FEWEST_FINE, _FEWEST_MOVED = 32, 64
_BOTH_WAYS, _ONE_WAY = 0.2, 0.02  # of those that moved, the share away from zero; by chance it is a half
# A probe compares a few values of a few weights: enough for a step that moves all, and microseconds on a CPU.
_PROBED_TENSORS, _PROBED_VALUES = 8, 256


class Updates:
    """Copies of the weights before a sampled step, and measurement of the changes."""

    def __init__(self, session: WatchSession, kinds: "UpdateKinds") -> None:
        self.session, self._kinds = session, kinds
        self._before: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        self._nothing: dict[torch.device, Tensor] = {}

    def forget(self) -> None:
        """The step is over."""
        self._before.clear()

    def keep(self, params: Mapping[str, Tensor]) -> None:
        """Copies the weights before the step."""
        wanted = {name: p for name, p in params.items() if p.requires_grad}
        size = sum(p.numel() * p.element_size() for p in wanted.values())
        if not wanted or not self.session.has_room(len(wanted), size):
            return
        pairs: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        for name, p in wanted.items():
            live = self.session.readable(p, "updates", name)
            if live is not None:
                buffer = self._before[name] = self._buffer(name, live)
                pairs.setdefault((live.device, live.dtype), []).append((buffer, live.detach()))
        for copies in pairs.values():  # on a GPU a few launches for all
            _copy([buffer for buffer, _ in copies], [live for _, live in copies])
        # Allocating the copies again costs more than the copying, so they are reused if every step is sampled.
        self._buffers = dict(self._before) if self._samples_every_step() else {}

    def read(self, params: Mapping[str, Tensor]) -> None:
        """Measures the changes after the step."""
        session = self.session
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for name, p in params.items():
            old, new = self._before.pop(name, None), session.readable(p, "updates", name)
            if old is not None and new is not None:
                pairs[name] = (old, new.detach())
        sample = session.sample
        if sample is None:
            return
        self._kinds.look(pairs)
        for device, names in by_device({name: new for name, (_, new) in pairs.items()}).items():
            rows = sample.rows(device)
            for first, number, bank, span in rows.spans(len(names)):
                part = names[first : first + len(span)]
                olds, news = zip(*(pairs[name] for name in part), strict=True)
                pushes = [self._push(params[name], device) for name in part]
                kernels.update_into(list(olds), list(news), pushes, bank, list(span), rows.moves_of_bank())
                for offset, name in enumerate(part):
                    rows.updates.append(rows.enter(number + offset, session.series_of("updates", name, params[name])))

    def _buffer(self, name: str, live: Tensor) -> Tensor:
        """Return memory for a copy: that of the step before, or new one."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.dtype != live.dtype or buffer.device != live.device or not _alike(buffer, live):
            return torch.empty_like(live, requires_grad=False)
        return buffer

    def _samples_every_step(self) -> bool:
        settings = self.session.settings
        return settings.intervals.get("updates") == 1 or "updates" in settings.recorded

    def _push(self, p: Tensor, device: torch.device) -> Tensor:
        """Return the gradient, which shows if a weight should have moved, or an empty one."""
        g = p.grad
        plain = None if g is None or g.is_sparse else self.session.readable(g, "updates")
        if plain is not None:
            return plain
        if device not in self._nothing:
            self._nothing[device] = torch.empty(0, device=device)
        return self._nothing[device]


def by_device(named: Mapping[str, Tensor]) -> dict[torch.device, list[str]]:
    """The names of the tensors on each device."""
    names: dict[torch.device, list[str]] = {}
    for name, x in named.items():
        names.setdefault(x.device, []).append(name)
    return names


_copy: Callable[[list[Tensor], list[Tensor]], None] = cast("Any", torch)._foreach_copy_


def _alike(a: Tensor, b: Tensor) -> bool:
    return cast("Any", a).shape == b.shape and a.stride() == b.stride()


class UpdateKinds:
    """Record of how optimizers step 16-bit weights, with an event at each change.

    The first event is when a weight is first met. Whatever changes the way of an optimizer's step sets its attribute
    `plimsoll_update`: "masters", "stochastic" or "kahan".
    """

    def __init__(self, session: WatchSession) -> None:
        self._session = session
        self._recorded: dict[str, str] = {}
        self._who: dict[str, str] = {}  # the optimizer of each weight
        self._since: dict[str, int] = {}  # the step at which that was recorded
        self._found: dict[str, str] = {}  # what the weights have shown, on the writer's thread
        self._looks: dict[str, _Looks] = {}  # by the first weight of an optimizer
        self._followed: weakref.WeakKeyDictionary[Any, FollowedWeights] = weakref.WeakKeyDictionary()

    def record(self, optimizer: Any, named: Mapping[str, Tensor]) -> None:
        """Record how the optimizer steps the weights whose kind is new or has changed."""
        kind = kind_of(optimizer)
        if kind != OWN:
            self._followed.pop(optimizer, None)
        elif optimizer not in self._followed and any(p.dtype in SIXTEEN_BIT for p in named.values()):
            self._followed[optimizer] = FollowedWeights()
        new = [name for name, p in named.items() if p.dtype in SIXTEEN_BIT and self._recorded.get(name) != kind]
        if new:
            self._recorded.update(dict.fromkeys(new, kind))
            who = type(optimizer).__name__
            self._who.update(dict.fromkeys(new, who))
            self._since.update(dict.fromkeys(new, self._session.step))
            message = f"{who} steps {len(new)} 16-bit weights: {kind}"
            self._session.say("update", message, optimizer=who, update=kind, parameters=new)

    def follow(self, optimizer: Any, named: Mapping[str, Tensor]) -> None:
        """Follow a few values of an undeclared optimizer's weights, which show if lost updates come back.

        Args:
            optimizer: It has just stepped.
            named: Its weights.
        """
        followed = self._followed.get(optimizer)
        sums = None if followed is None else followed.after_step(named)
        if followed is None or sums is None:
            return
        who, names = type(optimizer).__name__, sorted(name for name, p in named.items() if p.dtype in SIXTEEN_BIT)
        since = self._since[names[0]]

        def produce() -> list[Record]:
            way = way_of(sums)
            if way is None or followed.way in (way, *LOSSLESS) or (followed.way == BIASED and way == INEXACT):
                return []
            followed.way = way
            if self._found.get(names[0]) in (way, TOWARD_ZERO):
                return []
            does = "moves" if way in LOSSLESS else "does not move"
            message = f"{who} {does} weights by the sum of updates that are below half their rounding: {way}"
            details = {"optimizer": who, "update": way, "parameters": names}
            self._found.update(dict.fromkeys(names, way))
            return [Event(step=since, kind="update", message=message, details=details)]

        self._session.writer.submit(produce, 400)

    def look(self, changes: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Look whether weights of an undeclared optimizer move by less than half their rounding.

        Args:
            changes: Each of its weights, before and after a sampled step.
        """
        own = {name: change for name, change in changes.items() if self._recorded.get(name) == OWN}
        if not own:
            return
        names = sorted(own)
        looks = self._looks.setdefault(names[0], _Looks(since=self._since[names[0]]))
        looks.samples += 1
        if looks.found or looks.samples % (1 << max(0, looks.samples.bit_length() - _OFTEN)):
            return
        for weights in by_device({name: new for name, (_, new) in own.items()}).values():
            moves = [count for name in weights if (count := _coarse_moves(*own[name])) is not None]
            looks.counts += [DeviceValue(torch.stack(moves).sum(dim=0))] if moves else []
        if not looks.counts:
            return
        counts, who = list(looks.counts), self._who[names[0]]

        def produce() -> list[Record]:
            moved, away = cast("list[int]", torch.stack([count.tensor() for count in counts]).sum(dim=0).tolist())
            if looks.found or moved < _FEWEST_MOVED or _ONE_WAY * moved < away < _BOTH_WAYS * moved:
                return []
            looks.found = True
            kind = TOWARD_ZERO if away <= _ONE_WAY * moved else ON_AVERAGE
            if kind == ON_AVERAGE and self._found.get(names[0]) in (BIASED, ON_AVERAGE):
                return []  # it is known, or they move both ways, but not where the gradients lead
            self._found.update(dict.fromkeys(names, kind))
            message = f"{who} moves weights though their updates are below half their rounding: {kind}"
            details = {"optimizer": who, "update": kind, "parameters": names}
            return [Event(step=looks.since, kind="update", message=message, details=details)]

        self._session.writer.submit(produce, 400)


@dataclass(slots=True, kw_only=True, eq=False)
class _Looks:
    """Looks at the weights of one optimizer: since which step, at how many samples, and what was counted."""

    since: int
    samples: int = 0
    counts: list[DeviceValue] = field(default_factory=list[DeviceValue])
    found: bool = False


def spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between neighbours in a floating dtype at each value."""
    fmt = FORMATS[dtype]
    exponent = (torch.frexp(x).exponent - 1 - fmt.mantissa_bits).clamp(min=fmt.quantum_exponent)
    return torch.ldexp(torch.ones_like(x), exponent)


def _coarse_moves(old: Tensor, new: Tensor) -> Tensor | None:
    """Return how many weights moved whose rounding is far above all updates, and how many of those away from zero."""
    if old.layout != torch.strided or not (old.is_contiguous() and new.is_contiguous()):
        return None
    before, after = (x.reshape(-1)[:_VALUES].float() for x in (old, new))
    rounding, size = spacing(before, old.dtype), (after - before).abs()
    fine = size >= _FINE * rounding
    largest = torch.where(fine, size, 0.0).amax() if before.numel() else before.sum()
    coarse = (rounding >= _COARSE * largest) & (before != 0) & (fine.sum() >= _FEWEST_FINE)
    moved = coarse & (size > 0)
    return torch.stack([moved.sum(), (moved & ((after - before) * before > 0)).sum()])


def kind_of(optimizer: Any) -> str:
    """Return how an optimizer steps 16-bit weights."""
    by_chance = getattr(optimizer, "bf16_stochastic_round", False) is True  # torchao's name for it
    return str(getattr(optimizer, "plimsoll_update", "stochastic" if by_chance else OWN))


class Probe:
    """Snapshot of weights, which shows later if a script has changed them itself.

    Args:
        parameters: The weights.
        wait: Whether values on other devices than the CPU are compared too, which waits for them. Default: no.
    """

    def __init__(self, parameters: Iterable[Tensor], *, wait: bool = False) -> None:
        weights = list(parameters)
        self._versions = [(weakref.ref(p), p._version) for p in weights]  # noqa: SLF001  (public in all but name)
        # `p.data.add_(p.grad, alpha=-lr)` does not raise the version: only values show it. On a device they would have
        # to be waited for, so there the version and dropped gradients decide.
        near = [p for p in weights if (wait or p.device.type == "cpu") and p.numel() and _is_there(p)]
        near = sorted(near, key=lambda p: p.numel())[:_PROBED_TENSORS]
        self._values = [(weakref.ref(p), _some(p).clone()) for p in near]

    def is_moved(self, *, unknown: bool = False) -> bool:
        """Return whether the weights have changed; `unknown` if that cannot be seen."""
        if any((p := ref()) is not None and p._version != version for ref, version in self._versions):  # noqa: SLF001
            return True
        if not self._values:
            return unknown and bool(self._versions)
        pairs = [(ref(), before) for ref, before in self._values]
        return any(p is not None and _is_there(p) and not torch.equal(_some(p), before) for p, before in pairs)


def _some(p: Tensor) -> Tensor:
    return p.detach().reshape(-1)[:_PROBED_VALUES]


def _is_there(p: Tensor) -> bool:
    """Return whether a parameter's storage is allocated: FSDP frees gathered ones."""
    plain = type(p.data) is Tensor and p.is_contiguous()
    return plain and p.untyped_storage().nbytes() >= (p.storage_offset() + p.numel()) * p.element_size()
