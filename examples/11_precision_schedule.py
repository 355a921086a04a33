"""A schedule of precisions: the run begins and ends in FP32, and its long middle is trained in 16 bits.

Masters, Adam's moments and the loss scale pass over exactly when the level changes.
"""

import torch
from torch import nn

import plimsoll as pl

SCHEDULE = [(0, "fp32"), (20, "fp16-master"), (80, "bf16-master"), (180, "fp32")]
STEPS = 200


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model and optimizer each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(precision: object) -> tuple[list[float], nn.Module]:
    """Trains in that precision, and says when it changes; the losses and the model."""
    model, optimizer = make()
    generator = torch.Generator().manual_seed(1)
    losses, shown = [], ""
    with pl.prepare(model, optimizer, precision) as loop:
        for step in range(STEPS):
            if loop.precision != shown:
                shown = loop.precision
                stored = sum(p.numel() * p.element_size() for p in model.parameters())
                print(f"  step {step:3}: {shown:<12} weights {model[0].weight.dtype}, {stored / 1024:.1f} KiB in all")
            x = torch.randn(64, 32, generator=generator)
            with loop.forward():
                loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
            loop.step(loss)
            losses.append(loss.item())
    return losses, model


print("The schedule:")
scheduled, model = train(SCHEDULE)
print("FP32 throughout:")
reference, _ = train("fp32")

assert scheduled[:20] == reference[:20]  # the same bits until the first change
ends = [sum(losses[-20:]) / 20 for losses in (scheduled, reference)]
print(f"Mean loss of the last 20 steps: {ends[0]:.4f} by the schedule, {ends[1]:.4f} in FP32.")
assert abs(ends[0] - ends[1]) < 0.02
assert {p.dtype for p in model.parameters()} == {torch.float32}
