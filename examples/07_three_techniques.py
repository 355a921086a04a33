"""Three techniques make FP16 training work; without any one of them it stalls.

FP32 accumulation: sums of products are kept in FP32 and rounded once. Loss scaling: gradients below 2^-24 are lifted
above it before FP16 sees them. Master weights: updates that FP16 would swallow add up in FP32. The task has all three
problems: long sums of positive products, a loss that is a small mean, and a low learning rate. Without loss scaling, or
without masters, no weight moves at all.
"""

import contextlib
from typing import Any

import torch
from torch import nn

import plimsoll as pl

FEATURES, BATCH, STEPS = 256, 256, 250
NO_SCALING = pl.scaling.StaticScaler(1.0, device="cpu")


def train(level: str, *, scaler: Any = None, accumulate: str = "fp32", masters: bool = True) -> tuple[float, float]:
    """The mean loss of the first and of the last twenty steps."""
    torch.manual_seed(0)
    truth = 1 + 0.03 * torch.randn(1, FEATURES)
    model = nn.Linear(FEATURES, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, eps=1e-12)
    losses = []
    with pl.prepare(model, optimizer, level, scaler=scaler) as loop:
        for _ in range(STEPS):
            x = torch.rand(BATCH, FEATURES)
            narrow = accumulate != "fp32"
            sums = (
                pl.emulate("fp16", lists=None, accumulate=accumulate, chunk=4) if narrow else contextlib.nullcontext()
            )
            with loop.forward(), sums:
                loss = nn.functional.mse_loss(model(x).float(), x @ truth.T) / 2**24
            loop.step(loss)
            if not masters:
                loop.optimizer.take_model_weights()  # what FP16 has rounded away is gone
            losses.append(loss.item() * 2**24)
    return sum(losses[:20]) / 20, sum(losses[-20:]) / 20


if __name__ == "__main__":
    runs = {
        "FP32": train("fp32"),
        "FP16 with all three": train("fp16-master"),
        "without FP32 accumulation": train("fp16-master", accumulate="fp16"),
        "without loss scaling": train("fp16-master", scaler=NO_SCALING),
        "without master weights": train("fp16-master", masters=False),
    }
    print(f"{'':<28}{'loss at first':>14}{'at last':>10}")
    for name, (first, last) in runs.items():
        print(f"{name:<28}{first:>14.4f}{last:>10.4f}")
    full, *without = [last for _, last in list(runs.values())[1:]]
    assert full < 1.2 * runs["FP32"][1]
    assert full < 0.6 * runs["FP16 with all three"][0]
    assert all(last > 1.5 * full for last in without)
