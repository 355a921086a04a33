"""Why master weights: updates that 16 bits swallow, and four ways to keep them, at two to six bytes a weight.

The same regression is trained with weights of bfloat16 alone, and with what Plimsoll keeps in addition. In bfloat16 the
spacing of numbers is 1/128 of their size: once updates are less than half of that, nothing moves any more.
"""

import torch
from torch import nn

from plimsoll.precision import KahanWeights, MasterWeights, StochasticWeights

FEATURES = 256


def start(dtype: torch.dtype) -> nn.Linear:
    """The same model each time."""
    torch.manual_seed(0)
    return nn.Linear(FEATURES, 1, bias=False).to(dtype)


def train(model: nn.Linear, optimizer: torch.optim.Optimizer) -> float:
    """The error on fresh data after training, with a learning rate that falls as it should."""
    torch.manual_seed(1)
    teacher = torch.randn(FEATURES) / FEATURES**0.5
    dtype = model.weight.dtype
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    for _ in range(300):
        x = torch.randn(64, FEATURES).to(dtype)
        optimizer.zero_grad()
        (model(x).squeeze().float() - x.float() @ teacher).pow(2).mean().backward()
        optimizer.step()
        schedule.step()
    x = torch.randn(4096, FEATURES)
    return (x @ (model.weight.detach().float().squeeze() - teacher)).pow(2).mean().item()


def adamw(model: nn.Linear) -> torch.optim.Optimizer:
    """The inner optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)


ways = {
    "float32": lambda inner: inner,
    "bfloat16 alone": lambda inner: inner,
    "full masters": lambda inner: MasterWeights(inner, compact=False),
    "compact masters": MasterWeights,
    "Kahan": KahanWeights,
    "stochastic": StochasticWeights,
}

print(f"{'weights':<16}  {'bytes each':>10}  {'error':>9}")
errors = {}
for name, wrapped in ways.items():
    model = start(torch.float32 if name == "float32" else torch.bfloat16)
    optimizer = wrapped(adamw(model))
    errors[name] = train(model, optimizer)
    size = (model.weight.nbytes + getattr(optimizer, "nbytes", 0)) / model.weight.numel()
    print(f"{name:<16}  {size:>10g}  {errors[name]:>9.2g}")

assert errors["bfloat16 alone"] > 10 * errors["compact masters"]
assert errors["full masters"] == errors["compact masters"]  # the same numbers, two bytes less a weight
assert max(errors["Kahan"], errors["stochastic"]) < errors["bfloat16 alone"]
