"""The training step in one object: the same loop at every level, from FP32 to 16 bits without masters.

An overflowing batch is repeated at a lower scale, so that no level loses one; a checkpoint resumes bit for bit.
"""

import copy

import torch
from torch import nn

import plimsoll as pl

LEVELS = ["fp32", "tf32", "amp-fp16", "amp-bf16", "fp16-master", "bf16-master", "bf16-stochastic", "bf16-kahan"]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model and optimizer each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of that step."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
    return x, x[:, :4].argmax(1)


def train(loop: pl.precision.Loop, first: int, last: int) -> list[float]:
    """Trains over these steps; the losses."""
    losses = []
    for step in range(first, last):
        x, y = batch(step)
        with loop.forward():
            loss = nn.functional.cross_entropy(loop.model(x).float(), y)
        loop.step(loss)
        losses.append(loss.item())
    return losses


print(f"{'level':<16}{'weights':<16}{'norms':<15}{'loss at first':>13}{'at last':>9}")
ends = {}
for level in LEVELS:
    model, optimizer = make()
    with pl.prepare(model, optimizer, level, clip_norm=1.0) as loop:
        losses = train(loop, 0, 60)
        kinds = [str(model[i].weight.dtype).removeprefix("torch.") for i in (0, 1)]
        ends[level] = sum(losses[-10:]) / 10
        print(f"{level:<16}{kinds[0]:<16}{kinds[1]:<15}{losses[0]:>13.3f}{ends[level]:>9.3f}")
    assert model[0].weight.dtype == torch.float32  # the loop is closed
assert all(abs(end - ends["fp32"]) < 0.05 for end in ends.values())

model, optimizer = make()
loop = pl.prepare(model, optimizer, "fp16-master", max_retries=20)
x, y = batch(0)
outcome = loop.step(lambda: 1e3 * nn.functional.cross_entropy(model(x), y))
print(f"\nA batch that overflows: {outcome.retries} repetitions, stepped at a scale of {outcome.scale:g}.")
assert outcome.stepped
assert outcome.retries > 0
loop.close()

loop = pl.prepare(model, optimizer, "bf16-stochastic")
train(loop, 0, 5)
state = copy.deepcopy(loop.state_dict())
expected = train(loop, 5, 10)
other, other_optimizer = make()
resumed = pl.prepare(other, other_optimizer, "bf16-stochastic")
resumed.load_state_dict(state)
assert train(resumed, 5, 10) == expected
print("Resumed from a checkpoint: the same losses to the last bit.")
