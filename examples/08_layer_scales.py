"""Gradients that shrink 50 times a layer: no loss scale saves them all in FP16; a scale for each layer does.

The last layers' gradients would overflow at a scale that the first layers' gradients need. `LayerScaler` carries each
layer's gradient at a power of two of its own, and undoes it in FP32 in the weights' gradients.
"""

import math

import torch
from torch import nn

import plimsoll as pl

DEPTH, WIDTH = 10, 32


def chain() -> nn.Sequential:
    """Weights are small, biases are not: activations keep their size, gradients lose a factor of 50 at each layer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    for layer in model[::2]:
        nn.init.normal_(layer.weight, std=1 / 50 / WIDTH**0.5)
        nn.init.normal_(layer.bias)
    return model.half()


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss, in FP32."""
    return model(x).float().square().mean()


x = torch.randn(16, WIDTH).half()
exact = chain().double()
exact(x.double()).square().mean().backward()
expected = [layer.weight.grad for layer in exact[::2]]


def errors(model: nn.Sequential, scale: float) -> list[float]:
    """Of each layer's weight gradient, relative to the same in FP64; 1 is all lost."""
    found = [layer.weight.grad.double() / scale for layer in model[::2]]
    return [float((g - e).norm() / e.norm()) for g, e in zip(found, expected, strict=True)]


best, best_scale = [math.inf], 0.0
for shift in range(40):
    model = chain()
    (loss_of(model, x) * 2.0**shift).backward()
    if all(p.grad.isfinite().all() for p in model.parameters()) and sum(found := errors(model, 2.0**shift)) < sum(best):
        best, best_scale = found, 2.0**shift

model = chain()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
scaler = pl.scaling.LayerScaler(model)
for step in range(6):
    optimizer.zero_grad()
    scaler.scale(loss_of(model, x)).backward()
    layered = errors(model, scaler.get_scale())
    print(f"step {step}: the first layer's gradient is off by {layered[0]:.2%}")
    scaler.step(optimizer)
    scaler.update()

print(f"\nerror of each layer's weight gradient; the best one scale is 2^{math.log2(best_scale):.0f}")
print("layer   one scale   layer scales   factor")
for index, (name, factor) in enumerate(scaler.scales.items()):
    print(f"{name:>5}{best[index]:>12.2%}{layered[index]:>15.2%}    2^{math.log2(factor):.0f}")

assert best[0] == best[1] == best[2] == 1.0
assert max(layered) < 0.01
assert scaler.outcome.stepped
