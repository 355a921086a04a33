"""Facts on weights and gradients that no spectrum shows: a few values of each are compared with what they were before.

- At the first step, what each data-parallel rank begins with.
- Ten steps later, layers whose units are copies of each other, and move as one.

Nothing here waits for a device: numbers are read on the background thread, as soon as they are there.
"""

import math
import weakref
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from plimsoll.kernels.device_value import DeviceValue
from plimsoll.runs import Event, Record
from plimsoll.watch.names import clean
from plimsoll.watch.session import WatchSession

_LAYERS = 256  # whose rows are compared
_SIDE = 16  # rows, and values of each
_NEAR = 1e-3  # of how far the weights have moved: rows that are nearer to each other move as one
_FIRST = 16  # weights of which each rank records the first values


class FirstWeights:
    """Weights at the first step of a training, and ten steps later."""

    def __init__(self, core: WatchSession) -> None:
        self.core = core
        self._kept: list[tuple[str, weakref.ref[Tensor], Tensor]] | None = None

    @torch.no_grad()
    def first_step_begins(self) -> None:
        """Keep a few values of each layer. Does nothing when called again."""
        model = self.core.model()
        if self._kept is not None or model is None:
            return
        self._record_rank(model)
        layers = [
            (raw, m) for raw, m in _modules(model) if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        ]
        weights = [(f"{clean(raw)}.weight".lstrip("."), m.weight) for raw, m in layers[:_LAYERS]]
        some = [(name, p) for name, p in weights if p.requires_grad and p.shape[0] > 1 and _is_plain(p)]
        self._kept = [(name, weakref.ref(p), _rows(p)) for name, p in some]

    # Units that begin as copies of each other get equal gradients, and so they stay copies. Layers that begin at a
    # constant and are none (heads, residual branches, adapters) have rows that differ after a step: what follows them
    # differs. Rows that do not move at all are left out: nothing reaches them.
    @torch.no_grad()
    def look_at_rows(self) -> None:
        """Record the layers whose rows have moved, and are equal still."""
        for_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
        for name, ref, before in self._kept or ():
            p = ref()
            if p is not None and _is_plain(p) and p.device == before.device:
                now = _rows(p)
                far = torch.stack([(now - before).abs().amax(), (now - now[:1]).abs().amax()])
                for_device.setdefault(p.device, []).append((name, far))
        self._kept = []
        for found in for_device.values():
            self._hand_over([name for name, _ in found], DeviceValue(torch.stack([far for _, far in found])))

    def _hand_over(self, names: list[str], far: DeviceValue) -> None:
        step = self.core.step

        def produce() -> list[Record]:
            table = cast("list[list[float]]", far.tensor().tolist())
            equal = [n for n, (moved, apart) in zip(names, table, strict=True) if moved > 0 and apart <= _NEAR * moved]
            return [fact(step, "equal rows", "units are copies of each other", parameters=equal)] if equal else []

        self.core.writer.submit(produce, 200)

    # DistributedDataParallel sends rank 0's weights to all ranks, unless it is told not to; then ranks that drew other
    # weights average gradients that fit none of their models.
    def _record_rank(self, model: nn.Module) -> None:
        ranks, step = self.core.ranks, self.core.step
        if ranks.wrapper != "DistributedDataParallel" or ranks.data_parallel < 2 or self.core.settings.ranks != "each":
            return
        weights = [(clean(raw), p) for raw, p in model.named_parameters() if p.dim() > 1 and _is_plain(p)]
        weights = weights[:: -(-len(weights) // _FIRST) or 1]
        # What other ranks record too: of parameters that the wrapper ignores each rank has its own.
        shared = [(name, p) for name, p in weights if ranks.data_index == 0 or not ranks.counts(p)]
        values = {name: DeviceValue(p.detach().reshape(-1)[:_SIDE].float()) for name, p in shared}

        def produce() -> list[Record]:
            listed = {name: cast("list[float]", value.tensor().tolist()) for name, value in values.items()}
            finite = {name: some for name, some in listed.items() if all(math.isfinite(x) for x in some)}
            return [fact(step, "first weights", "what this rank begins with", weights=finite)] if finite else []

        self.core.writer.submit(produce, 4000)


def fact(step: int, name: str, message: str, **details: object) -> Event:
    """Return an event of kind "wiring"."""
    return Event(step=step, kind="wiring", message=message, details={"fact": name, **details})


def _modules(model: nn.Module) -> "Iterable[tuple[str, nn.Module]]":
    return cast("Iterable[tuple[str, nn.Module]]", model.named_modules())


def _is_plain(x: Tensor) -> bool:
    plain = type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided and not x.is_meta and not x.is_inference()
    return plain and x.numel() > 0 and x.is_contiguous()


def _rows(p: Tensor) -> Tensor:
    """Sixteen rows from all over a weight, and the first sixteen values of each."""
    rows = p.detach().flatten(1)
    return rows[:: -(-len(rows) // _SIDE), :_SIDE].float().clone()
