"""A learning rate found on a narrow model works for a wide one: unit-scaled modules and optimizers, beside torch's."""

import random

import torch
from torch import Tensor, nn

from plimsoll.unit import nn as unn, optim as uoptim

torch.set_num_threads(1)
CONTEXT, BATCH, STEPS, WIDTHS = 4, 64, 40, (32, 64, 128, 256)
WORDS = "the loss of a small model falls while gradients keep their place in what eight bits can hold".split()
DRAW = random.Random(1).random  # the same numbers, so the same text, in every version of Python
TEXT = torch.tensor([ord(letter) for letter in " ".join(WORDS[int(len(WORDS) * DRAW())] for _ in range(20_000))])
RATES = {"unit": [2.0**k for k in range(-4, 1)], "plain": [2.0**k for k in range(-10, -5)]}


class Block(nn.Module):
    """A residual block of torch's modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        norm, up, down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.branch = nn.Sequential(norm, up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        """The stream after the branch."""
        return x + self.branch(x)


class Characters(nn.Module):
    """The next character from the four before it: a table for each place, two residual blocks, a readout."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        unit = kind == "unit"
        made, readout = (unn, unn.LinearReadout) if unit else (nn, nn.Linear)
        self.table = made.Embedding(CONTEXT * 128, width)
        self.scale = CONTEXT**-0.5 if unit else 1.0
        if unit:
            blocks = (unn.Residual(nn.Sequential(unn.LayerNorm(width), unn.MLP(width))) for _ in range(2))
            self.blocks: nn.Module = unn.Stack(*blocks)
        else:
            nn.init.normal_(self.table.weight, std=0.02)
            self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Sequential(made.LayerNorm(width), readout(width, 128))

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next character."""
        x = self.table(tokens + torch.arange(CONTEXT) * 128).sum(1) * self.scale
        return self.head(self.blocks(x))


def final_loss(width: int, kind: str, lr: float) -> float:
    """The mean loss of the last ten steps."""
    torch.manual_seed(0)
    model = Characters(width, kind)
    optimizer = uoptim.Adam(model, lr=lr) if kind == "unit" else torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for _ in range(STEPS):
        batch = TEXT[torch.randint(len(TEXT) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT + 1)]
        loss = (unn if kind == "unit" else nn).CrossEntropyLoss()(model(batch[:, :-1]), batch[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


best: dict[str, list[float]] = {}
for kind, rates in RATES.items():
    print(f"\n{kind:<8}" + "".join(f"lr {rate:<9.3g}" for rate in rates))
    for width in WIDTHS:
        losses = [final_loss(width, kind, rate) for rate in rates]
        best.setdefault(kind, []).append(rates[losses.index(min(losses))])
        print(f"{width:<8}" + "".join(f"{loss:<12.3f}" for loss in losses) + f"best at {best[kind][-1]:.3g}")

# Unit-scaled, what is best narrow is within a factor of two of what is best wide; plain, it drifts.
assert max(best["unit"]) <= 2 * min(best["unit"])
assert best["plain"][0] >= 4 * best["plain"][-1]
