"""Kinds that come near a planted fault, by an author who had not read the rules."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.trust.registry import healthy
from benchmarks.trust.toys import batches, clusters, mlp
from benchmarks.trust.training import Training


@healthy("padded-sequences", held_back=True)
def padded(run: Training) -> None:
    """Sequences of unlike lengths behind a finite mask of -1e4, some of them empty; padding is the row of zeros."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.qkv, self.out = nn.Embedding(17, 32, padding_idx=0), nn.Linear(32, 96), nn.Linear(32, 32)
            self.head = mlp(32, 64, 1)

        def forward(self, x: Tensor) -> Tensor:
            h, valid = self.tokens(x), x > 0
            q, k, v = self.qkv(h).chunk(3, dim=-1)
            mask = torch.where(valid, 0.0, -1e4)[:, None]
            h = (h + self.out((q @ k.transpose(1, 2) / 32**0.5 + mask).softmax(-1).to(v.dtype) @ v)) * valid[..., None]
            return self.head(h.sum(dim=1) / valid.sum(dim=1, keepdim=True).clamp(min=1))

    model, worth = Tagger(), torch.randn(17)
    worth[0] = 0.0

    def loss(step: int) -> Tensor:
        x = torch.randint(1, 17, (32, 12)) * (torch.arange(12) < torch.randint(0, 13, (32, 1)))
        y = worth[x].sum(dim=1, keepdim=True) / (x > 0).sum(dim=1, keepdim=True).clamp(min=1)
        return F.mse_loss(model(x), y)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss, 200)


@healthy("quantisation-aware", held_back=True)
def quantised(run: Training) -> None:
    """Weights and activations are rounded to 15 and 31 levels in the forward; gradients pass as if they were not."""

    class Rounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(_levels(x, 15), _levels(self.weight, 7), self.bias)

    model = nn.Sequential(Rounded(16, 64), nn.ReLU(), Rounded(64, 64), nn.ReLU(), Rounded(64, 10))
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), loss, 200)


def _levels(x: Tensor, count: int) -> Tensor:
    size = x.detach().float().abs().amax().clamp(min=1e-6) / count
    return x + (size * (x.detach().float() / size).round() - x.detach()).to(x.dtype)


@healthy("batch-norm-in-evaluation")
def frozen_statistics(run: Training) -> None:
    """Fine-tuning with batch norms in evaluation mode: their statistics are those of the data that went before."""
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64))
    model.extend([nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)])
    x, y = clusters()
    with torch.no_grad():
        for _ in range(60):
            model(x + 0.1 * torch.randn_like(x))
    model.eval()
    batch = batches(x, y)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), loss, 200)


@healthy("missing-values", held_back=True, learns=0.65)
def missing(run: Training) -> None:
    """A third of the values is NaN in the data; they are set to 0 before the model, with a flag for each of them."""
    model = mlp(24, 64, 64, 1)
    x = torch.randn(2048, 12)
    y = x[:, :1] + torch.tanh(2 * x[:, 1:2]) + 0.5 * x[:, 2:3]
    batch = batches(torch.where(torch.rand_like(x) < 0.33, torch.nan, x), y, size=64)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        gone = x.isnan()
        x = torch.cat([x.nan_to_num(0.0), gone.float()], dim=1)
        return F.smooth_l1_loss(model(x), y)

    run.train(model, torch.optim.NAdam(model.parameters(), lr=4e-3), loss, 250)


@healthy("long-warm-up", held_back=True, learns=0.6)
def long_warm_up(run: Training) -> None:
    """The rate rises for two thirds of the run, from a ten-thousandth of what it becomes."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1e-4, min(1.0, step / 200) ** 3))
    run.train(model, optimizer, loss, 300, scheduler=scheduler)


@healthy("totals-of-long-sequences", held_back=True)
def totals(run: Training) -> None:
    """Running totals of 200 places, up to the hundreds, in FP32, divided by how many they are before the model."""

    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each, self.net = nn.Linear(3, 16), mlp(16, 32, 1)

        def forward(self, x: Tensor) -> Tensor:
            total = torch.relu(self.each(x)).float().cumsum(dim=1)
            return self.net(total[:, 9::10] / torch.arange(10, 201, 10)[:, None])

    model = Running()

    def loss(step: int) -> Tensor:
        x = torch.randn(8, 200, 3) + 2 * torch.randn(8, 1, 3)
        y = (x.amax(dim=-1).cumsum(dim=1) / torch.arange(1, 201))[:, 9::10, None]
        return F.mse_loss(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 200)
