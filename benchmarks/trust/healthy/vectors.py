"""Multi-layer perceptrons: optimizers, regularisers, schedules."""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.trust.registry import healthy
from benchmarks.trust.toys import batches, clusters, mlp, surface
from benchmarks.trust.training import Training


def _regress(run: Training, optimizer: str, steps: int = 250, **arguments: float) -> None:
    model = mlp(8, 64, 64, 1, act=nn.Tanh)
    batch = batches(*surface())
    made = getattr(torch.optim, optimizer)(model.parameters(), **arguments)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x), y)

    run.train(model, made, loss, steps)


@healthy("mlp-regression-adamw")
def mlp_regression(run: Training) -> None:
    """Regression with AdamW."""
    _regress(run, "AdamW", lr=3e-3)


@healthy("mlp-adagrad", learns=0.6)
def adagrad(run: Training) -> None:
    """Regression with Adagrad, whose state only grows."""
    _regress(run, "Adagrad", lr=3e-2)


@healthy("mlp-rmsprop")
def rmsprop(run: Training) -> None:
    """Regression with RMSprop."""
    _regress(run, "RMSprop", lr=1e-3)


class Lion(torch.optim.Optimizer):
    """The sign of a momentum, with decay: every weight moves by the same amount."""

    def __init__(self, params: object, lr: float = 1e-3, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """One update."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                momentum = state.setdefault("exp_avg", torch.zeros_like(p))
                direction = momentum.lerp(p.grad, 0.1).sign_()
                p.mul_(1 - group["lr"] * group["decay"]).add_(direction, alpha=-group["lr"])
                momentum.lerp_(p.grad, 0.01)


@healthy("mlp-lion")
def lion(run: Training) -> None:
    """Classification with an optimizer of the user's own, which moves by signs."""
    model = mlp(16, 64, 64, 10)
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, Lion(model.parameters(), lr=1e-3), loss, 200)


@healthy("mlp-classification-sgd", held_back=True)
def classification(run: Training) -> None:
    """Classification with SGD and momentum."""
    model = mlp(16, 64, 64, 10)
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), loss, 250)


@healthy("logistic-regression")
def logistic(run: Training) -> None:
    """One linear layer on binary labels."""
    x = torch.randn(1024, 30)
    y = (x @ torch.randn(30, 1) + 0.5 * torch.randn(1024, 1) > 0).float()
    model = nn.Linear(30, 1)
    batch = batches(x, y, size=64)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.binary_cross_entropy_with_logits(model(x), y)

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.5), loss, 300)


@healthy("dropout-heavy", learns=0.8)
def dropout(run: Training) -> None:
    """Half of all values dropped in each of three layers."""
    model = nn.Sequential(
        nn.Linear(16, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)
    )  # fmt: skip
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), loss, 250)


@healthy("weight-decay-heavy", held_back=True, learns=0.7)
def decay(run: Training) -> None:
    """Weights that shrink until decay and gradients balance."""
    model = mlp(16, 128, 128, 10)
    batch = batches(*clusters(spread=1.0))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1.0), loss, 400)


@healthy("warm-up-cosine")
def warm_up(run: Training) -> None:
    """A rate that rises from nothing and falls to nothing."""
    model = mlp(16, 64, 64, 10, act=nn.GELU)
    batch = batches(*clusters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    steps = 300

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / 60) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, optimizer, loss, steps, scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, rate))


@healthy("restarts", held_back=True)
def restarts(run: Training) -> None:
    """A rate that jumps back up to its first value three times."""
    model = mlp(16, 64, 64, 10)
    batch = batches(*clusters(spread=0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=80, eta_min=1e-3)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, optimizer, loss, 320, scheduler=scheduler, clip=1.0)


@healthy("gradient-accumulation", learns=0.5)
def accumulation(run: Training) -> None:
    """Four micro-batches a step, clipped."""
    model = mlp(16, 64, 64, 10)
    batch = batches(*clusters(), size=16)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), loss, 150, accumulate=4, clip=1.0)


@healthy("low-rank-adapters", held_back=True)
def adapters(run: Training) -> None:
    """A frozen base whose adapters begin at zero."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Parameter(torch.randn(4, base.in_features) / base.in_features**0.5)
            self.up = nn.Parameter(torch.zeros(base.out_features, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + F.linear(F.linear(x, self.down), self.up)

    model = mlp(16, 128, 128, 10)
    x, y = clusters(spread=0.4)
    first = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(100):  # the base knows another assignment of classes
        first.zero_grad()
        F.cross_entropy(model(x), (y + (y % 2) * 2) % 10).backward()
        first.step()
    model = nn.Sequential(*(Adapted(layer) if isinstance(layer, nn.Linear) else layer for layer in model))
    batch = batches(x, y)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    trained = [p for p in model.parameters() if p.requires_grad]
    run.train(model, torch.optim.AdamW(trained, lr=5e-3), loss, 300)


@healthy("new-head-on-frozen-base")
def new_head(run: Training) -> None:
    """Only the last layer is trained; the optimizer holds only it."""
    model = mlp(16, 128, 128, 10)
    model[:-1].requires_grad_(False)
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.Adam(model[-1].parameters(), lr=1e-2), loss, 250)


@healthy("distillation")
def distillation(run: Training) -> None:
    """A small network learns the soft labels of a large one."""
    teacher, student = mlp(16, 256, 10).requires_grad_(False), mlp(16, 48, 48, 10)
    with torch.no_grad():
        teacher[-1].weight.mul_(8)
    batch = batches(torch.randn(2048, 16), size=64)

    def loss(step: int) -> Tensor:
        (x,) = batch(step)
        return 4 * F.kl_div((student(x) / 2).log_softmax(-1), (teacher(x) / 2).softmax(-1), reduction="batchmean")

    run.train(student, torch.optim.AdamW(student.parameters(), lr=4e-3), loss, 350)


@healthy("one-cycle")
def one_cycle(run: Training) -> None:
    """A rate that climbs to a high top and falls far below where it began."""
    model = mlp(8, 64, 64, 1, act=nn.SiLU)
    batch = batches(*surface())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=301)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x), y)

    run.train(model, optimizer, loss, 300, scheduler=scheduler)
