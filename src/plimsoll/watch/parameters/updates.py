"""Updates: by how much a step changes the weights, and which weights it left where they were.

The change is the difference of the weights after and before the step, so sampled steps need a copy of them. Where every
step is sampled the copy's memory is kept: taking it anew each time costs more than the copying.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll import kernels
from plimsoll.watch.session import Core


class Updates:
    """The copies of one watch."""

    def __init__(self, core: Core) -> None:
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
        """What says that a weight should have moved: its gradient; nothing where there is none."""
        g = p.grad
        plain = None if g is None or g.is_sparse else self.core.readable(g, "updates")
        if plain is not None:
            return plain
        if device not in self._nothing:
            self._nothing[device] = torch.empty(0, device=device)
        return self._nothing[device]


def by_device(named: Mapping[str, Tensor]) -> dict[torch.device, list[str]]:
    """The names of the tensors on each device."""
    found: dict[torch.device, list[str]] = {}
    for name, x in named.items():
        found.setdefault(x.device, []).append(name)
    return found


def _alike(a: Tensor, b: Tensor) -> bool:
    return cast("Any", a).shape == b.shape and a.stride() == b.stride()
