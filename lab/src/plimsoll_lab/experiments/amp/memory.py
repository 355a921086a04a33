"""The memory of a training step, static and dynamic told apart (X2), counted to the byte.

Counted on "meta", where a tensor has a shape, a dtype and a storage, and no values: so BERT-base at 64 texts of 128
tokens takes seconds, and the level casts as it does on a GPU, with no emulation to widen anything.

- Static: weights, gradients, masters and the optimizer's state, by their tensors after a step.
- Dynamic: what autograd keeps for the backward, by `saved_tensors_hooks`, each storage once, parameters left out. It is
  a constant (16-bit copies of the weights, statistics of norms) and so much for each sample: two batches give both.

What kernels need while they run, and what an allocator adds, is in neither. TF32 is a way to multiply: its memory is
FP32's.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plimsoll.precision import Loop, prepare
from plimsoll.precision.weights.base import SixteenBitOptimizer
from plimsoll_lab.experiments.amp.networks import Network, moved

_BATCHES = (16, 32)  # FP8 products pad to multiples of 16 rows, where none are padded
_GIBI = 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of a network's training step at a level.

    `fixed`: what is kept for the backward whatever the batch. `per_sample`: what is kept for each sample; `wide`: the
    part of it that has 4 bytes a value or more.
    """

    weights: int
    gradients: int
    masters: int
    state: int
    fixed: int
    per_sample: int
    wide: int

    @property
    def static(self) -> int:
        """What stays from step to step."""
        return self.weights + self.gradients + self.masters + self.state

    def dynamic(self, batch: float) -> float:
        """What is kept from the forward to the backward of so many samples."""
        return self.fixed + self.per_sample * batch

    def total(self, batch: float) -> float:
        """Both."""
        return self.static + self.dynamic(batch)

    def batch_at(self, times: float) -> float:
        """The batch at which the dynamic memory is so many times the static one."""
        return (times * self.static - self.fixed) / self.per_sample


def footprint(network: Network, level: str) -> Footprint:
    """The memory of the network's step at that level."""
    with torch.device("meta"):
        model = network.make()
    with prepare(model, network.optimizer(model), level) as loop:
        (few, few_wide), (many, many_wide) = (_kept(network, loop, batch) for batch in _BATCHES)
        static = _static(model, loop)
    more = _BATCHES[1] - _BATCHES[0]
    per_sample = (many - few) // more
    return Footprint(
        fixed=few - per_sample * _BATCHES[0], per_sample=per_sample, wide=(many_wide - few_wide) // more, **static
    )  # fmt: skip


def _kept(network: Network, loop: Loop, batch: int) -> tuple[int, int]:
    """Bytes that autograd keeps of a forward of so many samples, and those of wide values; gradients are there then."""
    kept: list[Tensor] = []
    parameters = {_place(p) for p in loop.model.parameters()}
    inputs = moved(network.draw(0, 0, batch), "meta")
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x),
        _DropoutAsOnGpus(),
        loop.forward(),
    ):
        loss = network.loss(loop.model, inputs)
    activations = [x for x in kept if _place(x) not in parameters]
    loss.backward()
    return _bytes(activations), _bytes(x for x in activations if x.itemsize >= 4)


def _static(model: nn.Module, loop: Loop) -> dict[str, int]:
    """Bytes by what they are for, after a step of the optimizer alone: gradients are there, values play no part."""
    gradients = _bytes(p.grad for p in model.parameters() if p.grad is not None)
    for optimizer in loop.optimizers:
        optimizer.step()
    masters = [
        x
        for optimizer in loop.optimizers
        if isinstance(optimizer, SixteenBitOptimizer)
        for pair in optimizer.pairs
        for x in pair.store.kept
    ]
    state = [
        x
        for optimizer in loop.optimizers
        for values in optimizer.state.values()
        for x in values.values()
        if isinstance(x, Tensor) and x.dim()
    ]
    return {
        "weights": _bytes(model.parameters()), "gradients": gradients, "masters": _bytes(masters),
        "state": _bytes(state),
    }  # fmt: skip


class _DropoutAsOnGpus(TorchFunctionMode):
    """Dropout as the kernel that GPUs have: it keeps a mask of bytes, and not one in the input's dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: dict[str, Any] = kwargs or {}
        if func is nn.functional.dropout and given.get("training", True):
            return torch.native_dropout(args[0], given.get("p", 0.5), True)[0]
        return func(*args, **given)


def _place(x: Tensor) -> int:
    """The storage itself, by which two views of one are known; "meta" has no addresses."""
    return x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all storages, each counted once. They are alive together, so that no two have one place."""
    held = list(tensors)
    return sum({_place(x): x.untyped_storage().nbytes() for x in held}.values())


def gibibytes(count: float) -> str:
    """In words."""
    return f"{count / _GIBI:.2f} GiB"
