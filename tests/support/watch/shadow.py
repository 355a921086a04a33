"""What the tests of the shadow step share: a model in FP16, its oracle in FP32, and what a run says of zeros."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.runs import Run
from tests.support.watch.recording import only_run

SMALL = 2.0**-18  # what losses are multiplied by, so that some gradients are flushed in FP16


class HalfLinear(nn.Module):
    """A linear layer that computes in FP16, or in whatever dtype an oracle asks for."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.dtype = nn.Parameter(torch.randn(inputs, outputs) * 0.3), torch.float16

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.dtype) @ self.weight.to(self.dtype)).float()


def halves() -> nn.Sequential:
    """Hidden layers computed in FP16, between gates whose gradients span many binades."""
    return nn.Sequential(HalfLinear(8, 16), nn.ReLU(), HalfLinear(16, 16), nn.ReLU(), HalfLinear(16, 2))


def spread(x: Tensor) -> Tensor:
    """A loss whose gradients lie on both sides of what FP16 can hold."""
    return (x * torch.logspace(-4, 0, x.numel(), base=10).reshape(x.shape)).sum() * SMALL


def gradients_of(model: nn.Module, losses: list[Callable[[nn.Module], Tensor]]) -> dict[str, Tensor]:
    model.zero_grad()
    for loss in losses:
        loss(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def wide(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The oracle's model: a copy that computes in FP32 throughout."""
    twin = copy.deepcopy(model).to(dtype)
    for module in twin.modules():
        if isinstance(module, HalfLinear):
            module.dtype = dtype
    return twin


def counts(real: Tensor, shadow: Tensor) -> tuple[int, int]:
    return int(((real == 0) & (shadow != 0)).sum()), int(((real == 0) & (shadow == 0)).sum())


def found(run: Run, collection: str, name: str, step: int = 0) -> tuple[int, int]:
    """The recorded counts of underflowed and of structural zeros."""
    count = run.spectrum(collection, name, step).count
    pair = []
    for statistic in ("underflowed", "structural"):
        steps, values = run.series(collection, name, statistic)
        pair.append(round(float(values[list(steps).index(step)]) * count))
    assert sum(pair) == run.spectrum(collection, name, step).zeros
    return pair[0], pair[1]


def counted_steps(run: Run, collection: str) -> dict[str, list[int]]:
    """At which steps each tensor has counts."""
    steps = {name: list(run.series(collection, name, "underflowed")[0]) for name in run.tensors[collection]}
    return {name: at for name, at in steps.items() if at}


def messages(run: Run) -> list[str]:
    return [event.message for event in run.events() if event.kind in {"shadow", "failure"}]


def shadowed(model: nn.Module, path: Path, loss: Callable[[nn.Module], Tensor], **options: object) -> Run:
    """One step with a shadow; the run that it leaves."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=path, **{"shadow_every": 1, "every": 1000, **options}):
        loss(model).backward()
        optimizer.step()
    return only_run(path)


def tapped(model: nn.Module, loss: Tensor | Callable[[nn.Module], Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Each direct child's output and its gradient."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda _module, _args, output: (output.retain_grad(), outputs.__setitem__(name, output))[0]

    handles = [child.register_forward_hook(keep(name)) for name, child in model.named_children()]
    loss(model).backward()
    for handle in handles:
        handle.remove()
    return {name: (y.detach(), y.grad) for name, y in outputs.items()}
