"""FP8 training without a loss scale: at unit scale every cast's scale is a constant."""

import torch
from torch import Tensor, nn

from plimsoll import fp8, unit

STEPS, WIDTH = 150, 64


def model() -> nn.Module:
    """A small unit-scaled classifier, always from the same start."""
    torch.manual_seed(0)
    return nn.Sequential(unit.nn.Linear(16, WIDTH), unit.nn.GELU(), unit.nn.Linear(WIDTH, WIDTH), unit.nn.GELU(),
                         unit.nn.LinearReadout(WIDTH, 4))  # fmt: skip


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Points, and which of four directions each of them lies nearest to."""
    directions = torch.randn(16, 4, generator=torch.Generator().manual_seed(7))
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
    return x, (x @ directions).argmax(1)


def train(net: nn.Module) -> float:
    """The mean loss of the last steps."""
    optimizer = unit.optim.AdamW(net, lr=2**-4)
    losses = []
    for step in range(STEPS):
        x, target = batch(step)
        loss = nn.functional.cross_entropy(net(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses[-20:]) / 20


wide = train(model())
eight = fp8.convert(model(), "unit")  # the readout stays: eight.fp8_left says so
print(*eight.fp8_left)
print(f"gradients are cast to {eight[2].casts()['gradients']}: the format, and a scale that is a constant")
narrow = train(eight)
print(f"loss in FP32 {wide:.3f}, in FP8 {narrow:.3f}, from {torch.log(torch.tensor(4.0)):.3f} at the start")
assert narrow < 0.6 * 1.386
assert narrow < 1.1 * wide
