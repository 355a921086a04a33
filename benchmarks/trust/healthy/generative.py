"""Models of data: autoencoders, flows, diffusion, adversaries."""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.trust.registry import healthy
from benchmarks.trust.toys import batches, mlp, pictures
from benchmarks.trust.training import Training


def _rings(count: int) -> Tensor:
    """Points on eight small heaps in a circle."""
    angle = torch.randint(8, (count,)) * (math.pi / 4)
    return torch.stack([angle.cos(), angle.sin()], dim=-1) * 2 + 0.1 * torch.randn(count, 2)


@healthy("autoencoder")
def autoencoder(run: Training) -> None:
    """Pictures through eight numbers and back."""
    model = nn.Sequential(mlp(144, 64, 8), mlp(8, 64, 144))
    batch = batches(pictures(noise=0.1)[0].flatten(1))

    def loss(step: int) -> Tensor:
        (x,) = batch(step)
        return F.mse_loss(model(x), x)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 200)


@healthy("vae", held_back=True, learns=0.8)
def vae(run: Training) -> None:
    """A variational autoencoder: reconstruction and divergence in one sum."""
    encoder, decoder = mlp(144, 64, 16), mlp(8, 64, 144)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    batch = batches(pictures(noise=0.1)[0].flatten(1))

    def loss(step: int) -> Tensor:
        (x,) = batch(step)
        mean, spread = encoder(x).float().chunk(2, dim=-1)
        z = mean + (0.5 * spread).exp() * torch.randn_like(mean)
        divergence = 0.5 * (mean**2 + spread.exp() - 1 - spread).sum(dim=-1).mean()
        return F.mse_loss(decoder(z).float(), x, reduction="none").sum(dim=-1).mean() + divergence

    run.train(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss, 220)


@healthy("gan", learns=0.88)
def gan(run: Training) -> None:
    """Two networks against each other; how far the made points are from the true ones must fall."""
    maker, judge = mlp(8, 64, 64, 2), mlp(2, 64, 64, 1, act=lambda: nn.LeakyReLU(0.2))
    makes = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.999))
    judges = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.999))
    run.watch(maker, makes, "maker")
    run.watch(judge, judges, "judge")
    for _ in range(250):
        true = _rings(64)
        with run.forward():
            made = maker(torch.randn(64, 8))
            right, wrong = judge(true).float(), judge(made.detach()).float()
            loss = F.softplus(-right).mean() + F.softplus(wrong).mean()
        run.step(loss, judges, log=False)
        with run.forward():
            loss = F.softplus(-judge(maker(torch.randn(64, 8))).float()).mean()
        run.step(loss, makes)
        far = torch.cdist(true, made.detach().float())
        run.measures.append(float(far.amin(dim=1).mean() + far.amin(dim=0).mean()))


@healthy("diffusion", held_back=True, learns=0.8)
def diffusion(run: Training) -> None:
    """A network says which noise was added to points, at any of fifty strengths."""
    model = mlp(2 + 16, 96, 96, 2, act=nn.SiLU)
    kept = torch.cumprod(1 - torch.linspace(1e-3, 0.15, 50), 0)
    waves = 2.0 ** torch.arange(8) / 50

    def loss(step: int) -> Tensor:
        x, t, noise = _rings(64), torch.randint(50, (64,)), torch.randn(64, 2)
        noisy = kept[t, None].sqrt() * x + (1 - kept[t, None]).sqrt() * noise
        angle = t[:, None] * waves
        return F.mse_loss(model(torch.cat([noisy, angle.sin(), angle.cos()], dim=-1)), noise)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss, 300)


class Coupling(nn.Module):
    """One half of the values scaled and moved as the other half says; begins as nothing."""

    def __init__(self, flip: bool) -> None:
        super().__init__()
        self.flip, self.net = flip, mlp(1, 32, 32, 2, act=nn.Tanh)
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The values and the logarithm of how the volume changed."""
        a, b = x.flip(-1).chunk(2, dim=-1) if self.flip else x.chunk(2, dim=-1)
        scale, shift = self.net(a).float().chunk(2, dim=-1)
        scale = 2 * scale.tanh()
        y = torch.cat([a, b * scale.exp() + shift], dim=-1)
        return (y.flip(-1) if self.flip else y), scale.squeeze(-1)


@healthy("normalising-flow", learns=0.9)
def flow(run: Training) -> None:
    """Coupling layers turn points into normal ones; the loss is a likelihood and may be negative."""
    model = nn.ModuleList([Coupling(bool(i % 2)) for i in range(6)])

    def loss(step: int) -> Tensor:
        x, volume = _rings(128), 0.0
        for layer in model:
            x, change = layer(x)
            volume = volume + change
        return (0.5 * (x**2).sum(dim=-1) + math.log(2 * math.pi) - volume).mean()

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 300, clip=5.0)
