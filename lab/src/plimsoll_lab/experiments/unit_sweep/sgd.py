"""SGD for a unit-scaled model: each parameter's learning rate, so that its product takes the unscaled model's steps.

AdamW's steps have one size whatever a gradient's scale is; SGD's are the gradients, which unit scaling multiplies by
constants of each parameter's own. A product has a forward factor c beside its weight w, so that what acts is c w. With

    learning rate = that of the unscaled model * (its gradient / this gradient) / c

c w moves as the weight of an unscaled model would whose weights are c w. Gradients are root mean squares of one batch
in FP32, of the model as it is drawn and of that unscaled twin; c is measured: what the module gives by what torch's
gives with the same weight. All of it is constant from then on. (`unit.optim.SGD` has u-muP's factors of width and depth
alone; with these the sweep's small unit-scaled models trailed in trials.)
"""

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll_lab.experiments.unit_sweep.model import Characters
from plimsoll_lab.source_text import SYMBOLS, Batch


def groups(model: Characters, twin: Characters, batch: Batch, rate: float) -> list[dict[str, Any]]:
    """One group for each parameter, with its rate; `twin`: an unscaled model of the design, whose weights are set."""
    forward = dict(forward_factors(model))
    twin.load_state_dict({name: forward[name] * weight.detach() for name, weight in model.named_parameters()})
    here, there = gradients(model, batch), gradients(twin, batch)
    return [
        {"params": [parameter], "lr": rate * there[name] / here[name] / forward[name]}
        for name, parameter in model.named_parameters()
    ]


def gradients(model: Characters, batch: Batch) -> dict[str, float]:
    """The root mean square of each parameter's gradient at that batch; the model keeps none of them."""
    named = dict(model.named_parameters())
    found = torch.autograd.grad(model.loss(model(batch.inputs), batch.targets), list(named.values()))
    return {name: gradient.square().mean().sqrt().item() for name, gradient in zip(named, found, strict=True)}


@torch.no_grad()
def forward_factors(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Of each weight's name, what the module gives by what torch's module gives with the same weight."""
    named = cast("Iterator[tuple[str, nn.Module]]", model.named_modules())
    for name, module in named:
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Embedding):
            x = _example(module)
            yield f"{name}.weight", _norm(module(x)) / _norm(_as_torch(module, x))


def _norm(x: Tensor) -> float:
    return math.sqrt(x.square().sum().item())


def _as_torch(module: nn.Linear | nn.Conv1d | nn.Embedding, x: Tensor) -> Tensor:
    if isinstance(module, nn.Embedding):
        return nn.Embedding.forward(module, x)
    return nn.Linear.forward(module, x) if isinstance(module, nn.Linear) else nn.Conv1d.forward(module, x)


def _example(module: nn.Linear | nn.Conv1d | nn.Embedding) -> Tensor:
    """Any input; of no other random numbers than these."""
    generator = torch.Generator().manual_seed(0)
    device = module.weight.device
    if isinstance(module, nn.Embedding):
        return torch.arange(min(module.num_embeddings, SYMBOLS), device=device)
    if isinstance(module, nn.Conv1d):
        return torch.randn(2, module.in_channels, 2 * module.kernel_size[0], generator=generator).to(device)
    return torch.randn(4, module.in_features, generator=generator).to(device)
