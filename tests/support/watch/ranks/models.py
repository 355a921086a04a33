"""Models and loops whose arithmetic is exact, so that no statistic depends on the order of a reduction.

Weights are small multiples of 1/4, data small integers, the loss is linear in the output and a mean over a power of
two, and SGD's rate is a power of two: float64 holds every number that comes up.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

BATCH = 16
STEPS = 2  # the third would need more bits than float64 has


class Net(nn.Module):
    """Three layers, the last of 3 values, and a parameter of one: neither divides by 2 or 4."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.inner = nn.Sequential()
        self.inner.add_module("fc1", nn.Linear(6, 8))
        self.inner.add_module("act", nn.ReLU())
        self.inner.add_module("fc2", nn.Linear(8, 3))
        self.offset = nn.Parameter(torch.ones(1))
        integers(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.relu(self.first(x))) + self.offset


class Rounded(Net):
    """The same with FP16 in the midst of it, whose error is not exact, but the same for each sample."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner((torch.relu(self.first(x)) * 1.1).half().double()) + self.offset


def integers(model: nn.Module, seed: int = 0) -> nn.Module:
    """Gives the model weights that are small multiples of 1/4, in float64."""
    model.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-8, 9, p.shape, generator=generator).double() / 4)
    return model


def data(steps: int = STEPS, width: int = 6, out: int = 3, *, broken: bool = True) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of whole batches; the last batch has an infinity in its last sample."""
    generator = torch.Generator().manual_seed(1)
    made = [
        (
            torch.randint(-3, 4, (BATCH, width), generator=generator).double(),
            torch.randint(-2, 3, (BATCH, out), generator=generator).double(),
        )
        for _ in range(steps)
    ]
    if broken:
        made[-1][0][-1, 0] = float("inf")
    return made


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum(1).mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=2**-4, momentum=0.5)


def train(
    model: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[Tensor, Tensor]],
    part: int = 0,
    parts: int = 1,
    after: Callable[[], None] = lambda: None,
) -> list[float]:
    """Trains on one part of each batch; `after` runs between backward and step."""
    losses = []
    rows = BATCH // parts
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_of(model(x[part * rows : (part + 1) * rows]), y[part * rows : (part + 1) * rows])
        loss.backward()
        after()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Front(nn.Module):
    """The first stage of `Net` in a pipeline, with the names that its layers have in the whole."""

    def __init__(self, whole: Net) -> None:
        super().__init__()
        self.first = whole.first

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.first(x))


class Back(nn.Module):
    """The second stage of `Net`."""

    def __init__(self, whole: Net) -> None:
        super().__init__()
        self.inner, self.offset = whole.inner, whole.offset

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.offset


class Experts(nn.Module):
    """A layer that all samples pass, then two experts: one for the even samples, one for the odd ones."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(6, 6)
        self.experts = nn.ModuleDict({"e0": nn.Linear(6, 3), "e1": nn.Linear(6, 3)})
        integers(self)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.dense(x))
        return torch.stack([self.experts["e0"](x[0::2]), self.experts["e1"](x[1::2])], 1).flatten(0, 1)
