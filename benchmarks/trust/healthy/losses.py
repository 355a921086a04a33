"""Losses of all shapes: falls by many orders, plateaus, wobbles, jumps of single batches, zeros."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.trust.registry import healthy
from benchmarks.trust.toys import batches, clusters, mlp, surface
from benchmarks.trust.training import Training


@healthy("noise-free-regression", learns=0.01)
def noise_free(run: Training) -> None:
    """A linear map learned exactly: the loss falls by many orders of magnitude."""
    x = torch.randn(512, 12)
    y = x @ torch.randn(12, 4)
    model = nn.Linear(12, 4)
    batch = batches(x, y)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x), y)

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), loss, 300)


@healthy("wobble-at-a-new-level", held_back=True, learns=0.2)
def wobble(run: Training) -> None:
    """The loss falls by orders, then wobbles where the rate's noise keeps it."""
    x = torch.randn(1024, 8)
    y = x @ torch.randn(8, 1) * 5 + 0.1 * torch.randn(1024, 1)
    model = mlp(8, 64, 1)
    batch = batches(x, y, size=16)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-2), loss, 400)


@healthy("label-smoothing", learns=0.7)
def smoothing(run: Training) -> None:
    """Smoothed labels: the loss has a floor far above zero."""
    model = mlp(16, 64, 64, 10)
    batch = batches(*clusters(spread=0.4))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y, label_smoothing=0.2)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss, 250)


@healthy("poisson-counts", learns=0.9)
def poisson(run: Training) -> None:
    """Counts, whose rate is the exponential of the output."""
    x = torch.randn(2048, 8)
    y = torch.poisson((0.8 * x @ torch.randn(8, 1) / 8**0.5 + 1).exp())
    model = mlp(8, 32, 1)
    batch = batches(x, y, size=64)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        output = model(x).float()
        run.measures.append(float(F.poisson_nll_loss(output.detach(), y, full=True)))
        return F.poisson_nll_loss(output, y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 250)


@healthy("quantiles", held_back=True)
def quantiles(run: Training) -> None:
    """The pinball loss of three quantiles."""
    x, y = surface(noise=0.3)
    model = mlp(8, 64, 64, 3)
    batch = batches(x, 3 * y, size=64)
    levels = torch.tensor([0.1, 0.5, 0.9])

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        off = y - model(x)
        return torch.maximum(levels * off, (levels - 1) * off).mean()

    run.train(model, torch.optim.AdamW(model.parameters(), lr=4e-3), loss, 300)


@healthy("multi-task")
def multi_task(run: Training) -> None:
    """A shared trunk with a regression and a classification, of unlike sizes."""
    x, y = clusters()
    values = x[:, :2].sum(dim=1, keepdim=True) * 10
    trunk, heads = mlp(16, 64, 64), nn.ModuleDict({"class": nn.Linear(64, 10), "value": nn.Linear(64, 1)})
    model = nn.ModuleDict({"trunk": trunk, "heads": heads})
    batch = batches(x, y, values)

    def loss(step: int) -> Tensor:
        x, y, value = batch(step)
        h = torch.relu(trunk(x))
        return F.cross_entropy(heads["class"](h), y) + 0.05 * F.mse_loss(heads["value"](h), value)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss, 250)


@healthy("plateau-then-learning", held_back=True, learns=0.6)
def plateau(run: Training) -> None:
    """A parity of bits: nothing for a hundred steps or more, then all of it."""
    x = torch.randint(0, 2, (4096, 16)).float() * 2 - 1
    y = (x[:, 0] * x[:, 1] * x[:, 2] > 0).long()
    model = mlp(16, 128, 2)
    batch = batches(x, y, size=128)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss, 400)


@healthy("single-bad-batches")
def bad_batches(run: Training) -> None:
    """Every seventieth batch is mislabelled; the loss is back at the next one."""
    model = mlp(16, 64, 64, 10)
    batch = batches(*clusters(spread=0.4))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), (y + 1) % 10 if step % 70 == 69 else y)

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.5), loss, 300, clip=0.5)


@healthy("curriculum", held_back=True, learns=0.7)
def curriculum(run: Training) -> None:
    """Batches become harder in four stages: the loss rises at each and falls again."""
    centres = torch.randn(10, 16)
    model = mlp(16, 64, 64, 10)

    def loss(step: int) -> Tensor:
        y = torch.randint(10, (32,))
        x = centres[y] + (0.3 + 0.15 * (step // 80)) * torch.randn(32, 16)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), loss, 320)


@healthy("hinge-to-zero", learns=0.3)
def hinge(run: Training) -> None:
    """A margin loss that is exactly zero for most batches once classes are apart."""
    model = mlp(16, 64, 10)
    batch = batches(*clusters(spread=0.3))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.multi_margin_loss(model(x).float(), y)

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), loss, 300)


@healthy("triplets", held_back=True)
def triplets(run: Training) -> None:
    """Triplets with a margin; many are far enough apart and count nothing."""
    centres = torch.randn(10, 16)
    model = mlp(16, 64, 8)

    def loss(step: int) -> Tensor:
        y = torch.randint(10, (32,))
        other = (y + torch.randint(1, 10, (32,))) % 10
        anchor, same, far = (model(centres[c] + 0.8 * torch.randn(32, 16)) for c in (y, y, other))
        return F.triplet_margin_loss(anchor.float(), same.float(), far.float(), margin=1.0)

    run.train(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss, 250)


@healthy("drifting-stream", learns=0.6)
def stream(run: Training) -> None:
    """Online learning of data that slowly turn: the loss stays up a little and is followed."""
    model = mlp(8, 64, 1, act=nn.Tanh)
    a, b = torch.randn(8, 1), torch.randn(8, 1)

    def loss(step: int) -> Tensor:
        part = min(1.0, step / 400)
        x = torch.randn(32, 8)
        return F.mse_loss(model(x), torch.sin(x @ ((1 - part) * a + part * b)))

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 400)
