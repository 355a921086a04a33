"""Changes of weights: their size, their kind, and steps without an optimizer.

`Updates` measures the difference of the weights after and before a step. `UpdateKinds` records how an optimizer steps
16-bit weights, so that rules can judge weights that do not move. `Probe` finds steps that a script makes without an
optimizer.
"""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll import kernels
from plimsoll.kernels.dtypes import SIXTEEN_BIT
from plimsoll.watch.session import WatchSession

OWN = "own"  # the kind of an optimizer that declares none
# A probe compares a few values of a few weights: enough for a step that moves all, and microseconds on a CPU.
_PROBED_TENSORS, _PROBED_VALUES = 8, 256


class Updates:
    """Copies of the weights before a sampled step, and measurement of the changes."""

    def __init__(self, core: WatchSession) -> None:
        self.core = core
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
        if not wanted or not self.core.has_room(len(wanted), size):
            return
        for name, p in wanted.items():
            live = self.core.readable(p, "updates", name)
            if live is not None:
                self._before[name] = self._copied(name, live)
        # Allocating the copies again costs more than the copying, so they are reused if every step is sampled.
        self._buffers = dict(self._before) if self._samples_every_step() else {}

    def read(self, params: Mapping[str, Tensor]) -> None:
        """Measures the changes after the step."""
        core = self.core
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for name, p in params.items():
            old, new = self._before.pop(name, None), core.readable(p, "updates", name)
            if old is not None and new is not None:
                pairs[name] = (old, new.detach())
        sample = core.sample
        if sample is None:
            return
        for device, names in by_device({name: new for name, (_, new) in pairs.items()}).items():
            rows = sample.rows(device)
            for first, number, bank, span in rows.spans(len(names)):
                part = names[first : first + len(span)]
                olds, news = zip(*(pairs[name] for name in part), strict=True)
                pushes = [self._push(params[name], device) for name in part]
                kernels.update_into(list(olds), list(news), pushes, bank, list(span), rows.moves_of_bank())
                for offset, name in enumerate(part):
                    rows.updates.append(rows.enter(number + offset, core.series_of("updates", name, params[name])))

    def _copied(self, name: str, live: Tensor) -> Tensor:
        live = live.detach()
        buffer = self._buffers.get(name)
        if buffer is None or buffer.dtype != live.dtype or buffer.device != live.device or not _alike(buffer, live):
            return live.clone()
        return buffer.copy_(live)

    def _samples_every_step(self) -> bool:
        settings = self.core.settings
        return settings.intervals.get("updates") == 1 or "updates" in settings.recorded

    def _push(self, p: Tensor, device: torch.device) -> Tensor:
        """Return the gradient, which shows if a weight should have moved, or an empty one."""
        g = p.grad
        plain = None if g is None or g.is_sparse else self.core.readable(g, "updates")
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


def _alike(a: Tensor, b: Tensor) -> bool:
    return cast("Any", a).shape == b.shape and a.stride() == b.stride()


class UpdateKinds:
    """Record of how optimizers step 16-bit weights, with an event at each change.

    The first event is when a weight is first met. Whatever changes the way of an optimizer's step sets its attribute
    `plimsoll_update`: "masters", "stochastic" or "kahan".
    """

    def __init__(self, core: WatchSession) -> None:
        self._core = core
        self._recorded: dict[str, str] = {}

    def record(self, optimizer: Any, named: Mapping[str, Tensor]) -> None:
        """Record how the optimizer steps the weights whose kind is new or has changed."""
        kind = kind_of(optimizer)
        new = [name for name, p in named.items() if p.dtype in SIXTEEN_BIT and self._recorded.get(name) != kind]
        if new:
            self._recorded.update(dict.fromkeys(new, kind))
            who = type(optimizer).__name__
            message = f"{who} steps {len(new)} 16-bit weights: {kind}"
            self._core.say("update", message, optimizer=who, update=kind, parameters=new)


def kind_of(optimizer: Any) -> str:
    """Return how an optimizer steps 16-bit weights."""
    return str(getattr(optimizer, "plimsoll_update", OWN))


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
