"""Faults of layers: dead, vanishing, exploding, drifting."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.trust.registry import fault
from benchmarks.trust.toys import batches, clusters, mlp
from benchmarks.trust.training import Training


def _classify(
    run: Training, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 200, **more: object
) -> None:
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, optimizer, loss, steps, **more)


@fault("dead-relu", named=r"dead-layer.*\b[23]\b", tested=True)
def dead(run: Training) -> None:
    """At step 80 a bias is thrown far below zero: no input switches the ReLU on again."""
    model = mlp(16, 64, 64, 10)

    def kill(step: int) -> None:
        if step == 80:
            model[2].bias.data.fill_(-1e3)

    _classify(run, model, torch.optim.SGD(model.parameters(), lr=0.05), after=kill)


@fault("dead-from-the-start", named=r"dead-layer.*\b[01]\b")
def dead_at_start(run: Training) -> None:
    """Inputs that were not normalised, and an initial bias that switches the whole first layer off."""
    model = mlp(16, 64, 64, 10)
    nn.init.constant_(model[0].bias, -100.0)
    _classify(run, model, torch.optim.Adam(model.parameters(), lr=1e-3))


@fault("branch-times-zero", named=r"dead-layer.*branch|branch.*dead-layer")
def times_zero(run: Training) -> None:
    """From step 60 on a branch is multiplied by a schedule that has come to zero."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.branch, self.head, self.factor = mlp(16, 64), mlp(16, 64, 64), nn.Linear(64, 10), 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.trunk(x) + self.factor * self.branch(x)))

    model = Two()

    def schedule(step: int) -> None:
        model.factor = max(0.0, 1 - step / 60)

    _classify(run, model, torch.optim.SGD(model.parameters(), lr=0.05), 240, after=schedule)


@fault(
    "vanishing-gradients",
    named=r"vanish|gradients? [^.]*(tiny|too small|shrink)|updates-swallowed|moves? nothing|not move",
)
def vanishing(run: Training) -> None:
    """Twelve sigmoid layers of small weights: the first layers' gradients are 10^-12 of the last one's."""
    model = mlp(16, *[32] * 12, 10, act=nn.Sigmoid)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.05)
    _classify(run, model, torch.optim.SGD(model.parameters(), lr=0.1))


@fault("recurrence-explodes", named=r"loss-spike|explod|nonfinite.*(recurrent|gradient)|spike-forerunner|diverge")
def recurrence(run: Training) -> None:
    """A recurrent network whose matrix is pushed past 1 at step 100: gradients grow with every place."""
    recurrent, head = nn.RNN(4, 32, nonlinearity="relu", batch_first=True), nn.Linear(32, 1)
    model = nn.ModuleDict({"recurrent": recurrent, "head": head})

    def loss(step: int) -> Tensor:
        x = torch.randn(16, 20, 4)
        return F.mse_loss(head(recurrent(x)[0][:, -1]), x[:, -5:, :1].sum(dim=1))

    def push(step: int) -> None:
        if step == 100:
            recurrent.weight_hh_l0.data.add_(0.35 * torch.eye(32)).mul_(1.8)

    run.train(model, torch.optim.SGD(model.parameters(), lr=2e-3), loss, 200, after=push)


@fault("weights-drift", named=r"distribution-drift|weight(s)? (norm )?(grow|drift)", every=5)
def drift(run: Training) -> None:
    """Weights before a norm that a negative decay (a sign error) lets grow without end."""
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))

    def grow(step: int) -> None:
        model[0].weight.data *= 1.012

    _classify(run, model, torch.optim.SGD(model.parameters(), lr=0.05), 400, after=grow)


@fault("damaged-update", named=r"loss-spike", misleading="dead-layer")
def damage(run: Training) -> None:
    """At step 120 one update is 3,000 times too large; the loss stays far above where it was."""
    model = mlp(16, 64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def rate(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 150.0 if step == 119 else 0.002

    _classify(run, model, optimizer, 220, after=rate)


@fault(
    "diverges-with-zero-losses",
    named=r"alarm: loss-spike|alarm.*diverge",
    every=5,
)
def zero_losses(run: Training) -> None:
    """A loss that grows by seventeen orders of magnitude while a quarter of the batches give exactly zero."""
    model = nn.Sequential(nn.Linear(4, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)

    def loss(step: int) -> Tensor:
        x = torch.randn(8, 4)
        part = 0.0 if step % 4 == 3 else 1.0
        return part * F.mse_loss(model(x), x.sum(dim=1, keepdim=True))

    def grow(step: int) -> None:
        if step > 150:
            model[0].weight.data *= 1.2

    run.train(model, optimizer, loss, 320, after=grow)


@fault("loss-climbs-slowly", named=r"loss-spike|diverge|loss.*(climb|ris|grow)", held_back=True)
def climbs(run: Training) -> None:
    """After a good start the loss climbs steadily to a hundred times its best: a rate that a bug multiplies."""
    model, batch = mlp(16, 64, 10), batches(*clusters(spread=1.2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    def rate(step: int) -> None:
        if step > 100:
            optimizer.param_groups[0]["lr"] *= 1.04

    run.train(model, optimizer, loss, 300, after=rate)
