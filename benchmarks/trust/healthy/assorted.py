"""Kinds that the other modules lack, all held back: their author had not read the rules."""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from benchmarks.trust.registry import healthy
from benchmarks.trust.toys import batches, clusters, mlp, pictures
from benchmarks.trust.training import Training


@healthy("tabular-categories", held_back=True, learns=0.7)
def tabular(run: Training) -> None:
    """Categories of which some are rare, and numbers, in one network."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shop, self.day, self.net = nn.Embedding(80, 8), nn.Embedding(7, 3), mlp(8 + 3 + 4, 64, 32, 1)

        def forward(self, shop: Tensor, day: Tensor, x: Tensor) -> Tensor:
            return self.net(torch.cat([self.shop(shop), self.day(day), x], dim=-1))

    shop, day, x = (80 * torch.rand(2048) ** 3).long(), torch.randint(7, (2048,)), torch.randn(2048, 4)
    score = torch.randn(80)[shop] + 0.5 * torch.randn(7)[day] + x @ torch.randn(4)
    batch = batches(shop, day, x, (score > 0).float(), size=64)
    model = Table()

    def loss(step: int) -> Tensor:
        shop, day, x, y = batch(step)
        return F.binary_cross_entropy_with_logits(model(shop, day, x).squeeze(-1), y)

    run.train(model, torch.optim.RAdam(model.parameters(), lr=1e-2), loss, 250)


class Mixer(nn.Module):
    """Patches and their features mixed in turn, without attention."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.places, self.features = mlp(places, 32, places, act=nn.GELU), mlp(width, 64, width, act=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        x = x + self.places(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.features(self.norm2(x))


@healthy("mlp-mixer", held_back=True)
def mixer(run: Training) -> None:
    """Pictures in sixteen patches, two blocks that mix, NAdam."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.blocks = nn.Conv2d(1, 32, 3, stride=3), nn.Sequential(Mixer(16, 32), Mixer(16, 32))
            self.head = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks(self.patch(x).flatten(2).transpose(1, 2)).mean(dim=1))

    model, batch = Model(), batches(*pictures(), size=16)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.NAdam(model.parameters(), lr=2e-3), loss, 180)


@healthy("gated-dilated-convolutions", held_back=True)
def dilated(run: Training) -> None:
    """The next value of a signal by causal convolutions whose reach doubles, each with a gate."""

    class Gated(nn.Module):
        def __init__(self, width: int, reach: int) -> None:
            super().__init__()
            self.reach, self.both = reach, nn.Conv1d(width, 2 * width, 2, dilation=reach)
            self.out = nn.Conv1d(width, width, 1)

        def forward(self, x: Tensor) -> Tensor:
            value, gate = self.both(F.pad(x, (self.reach, 0))).chunk(2, dim=1)
            return x + self.out(torch.tanh(value) * torch.sigmoid(gate))

    model = nn.Sequential(nn.Conv1d(1, 24, 1), *(Gated(24, 2**i) for i in range(4)), nn.Conv1d(24, 1, 1))

    def loss(step: int) -> Tensor:
        t = torch.arange(33) * 0.3 + 6 * torch.rand(16, 1)
        x = (torch.sin(t) + 0.5 * torch.sin(2.7 * t + 1) + 0.02 * torch.randn(16, 33))[:, None]
        return F.mse_loss(model(x[..., :-1])[..., 16:], x[..., 17:])

    run.train(model, torch.optim.Adamax(model.parameters(), lr=4e-3), loss, 200)


@healthy("pairwise-ranking", held_back=True)
def ranking(run: Training) -> None:
    """Of two items the preferred one scores higher; only differences of scores are learned."""
    model, taste = mlp(12, 64, 1), torch.randn(12, 1)

    def loss(step: int) -> Tensor:
        one, other = torch.randn(64, 12), torch.randn(64, 12)
        first = ((one - other) @ taste > 0).float() * 2 - 1
        return F.softplus(-first * (model(one) - model(other))).mean()

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True), loss, 250)


@healthy("survival-times", held_back=True, learns=0.85)
def survival(run: Training) -> None:
    """Who fails first, from times of which a third are cut off, by a partial likelihood."""
    x = torch.randn(1024, 10)
    risk = 3 * x @ torch.randn(10) / 10**0.5
    time = torch.distributions.Exponential(1.0).sample((1024,)) / risk.exp()
    model, batch = mlp(10, 32, 1), batches(x, time, (torch.rand(1024) < 0.67).float(), size=48)

    def loss(step: int) -> Tensor:
        x, time, seen = batch(step)
        order = time.argsort(descending=True)
        score = model(x).float().squeeze(-1)[order]
        return -((score - score.logcumsumexp(0)) * seen[order]).sum() / seen.sum()

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 250)


@healthy("mixture-density", held_back=True, learns=0.7)
def mixture(run: Training) -> None:
    """A curve that has two values at most places: five normal densities, each with a spread of its own."""
    model = mlp(1, 48, 48, 15, act=nn.Tanh)

    def loss(step: int) -> Tensor:
        x = 4 * torch.rand(128, 1) - 2
        y = torch.sin(2 * x) * torch.sign(torch.randn(128, 1)) + 0.1 * torch.randn(128, 1)
        weight, mean, spread = model(x).float().chunk(3, dim=-1)
        log = -0.5 * ((y - mean) / spread.exp()) ** 2 - spread - 0.5 * math.log(2 * math.pi)
        return -torch.logsumexp(weight.log_softmax(-1) + log, dim=-1).mean()

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 300, clip=5.0)


@healthy("picture-as-a-function", held_back=True)
def sines(run: Training) -> None:
    """Sines of sines of a place give its brightness; the first layer's weights begin large."""

    class Sine(nn.Module):
        def __init__(self, into: int, out: int, first: float) -> None:
            super().__init__()
            self.linear, self.first = nn.Linear(into, out), first
            bound = 1 / into if first > 1 else (6 / into) ** 0.5
            nn.init.uniform_(self.linear.weight, -bound, bound)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self.first * self.linear(x))

    picture = pictures(size=24, noise=0.0)[0][0, 0]
    model = nn.Sequential(Sine(2, 64, 10.0), Sine(64, 64, 1.0), nn.Linear(64, 1))
    places = torch.cartesian_prod(torch.linspace(-1, 1, 24), torch.linspace(-1, 1, 24))
    batch = batches(places, picture.reshape(-1, 1), size=128)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss, 250)


@healthy("weight-norm", held_back=True)
def weight_norm(run: Training) -> None:
    """Weights that are a length times a direction, SGD with a rate that falls."""
    model = mlp(8, 64, 64, 1, act=nn.ELU)
    for layer in model[::2]:
        parametrizations.weight_norm(layer)
    x = torch.randn(1024, 8)
    batch = batches(x, x[:, :1] * x[:, 1:2] + x.sum(dim=1, keepdim=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.8)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x), y)

    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)
    run.train(model, optimizer, loss, 350, scheduler=scheduler, clip=2.0)


@healthy("vector-quantised-autoencoder", held_back=True, learns=0.7)
def quantised(run: Training) -> None:
    """Codes are replaced by the nearest of 32 entries; gradients pass as if they were not. Some entries stay unused."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder, self.codes = mlp(144, 64, 16), mlp(16, 64, 144), nn.Embedding(32, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.encoder(x).float().view(-1, 4, 4)
            near = self.codes(torch.cdist(z, self.codes.weight[None]).argmin(dim=-1))
            apart = F.mse_loss(near, z.detach()) + 0.25 * F.mse_loss(z, near.detach())
            return self.decoder((z + (near - z).detach()).flatten(1)), apart

    model, batch = Quantised(), batches(pictures(noise=0.1)[0].flatten(1))

    def loss(step: int) -> Tensor:
        (x,) = batch(step)
        made, apart = model(x)
        return F.mse_loss(made, x) + apart

    run.train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss, 300)


@healthy("rare-positives", held_back=True)
def rare(run: Training) -> None:
    """One case in forty is positive, and a focal loss lets the easy ones count little."""
    x = torch.randn(8192, 10)
    score = x @ torch.randn(10) / 10**0.5
    batch = batches(x, (score > 1.96).float(), size=128)
    model = mlp(10, 64, 64, 1)
    nn.init.constant_(model[4].bias, -2.0)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        logits = model(x).float().squeeze(-1)
        wrong = torch.where(y > 0, -logits, logits).sigmoid()
        weight = torch.where(y > 0, 0.75, 0.25) * wrong**2
        return 20 * (weight * F.binary_cross_entropy_with_logits(logits, y, reduction="none")).mean()

    run.train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss, 300)


@healthy("layers-unfrozen-in-turn", held_back=True)
def unfrozen(run: Training) -> None:
    """Only the head learns at first; the layers below follow one by one."""
    model = mlp(16, 64, 64, 10)
    model[:4].requires_grad_(False)
    batch = batches(*clusters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    def thaw(step: int) -> None:
        if step in {60, 120}:
            model[2 if step == 60 else 0].requires_grad_(True)

    run.train(model, optimizer, loss, 280, after=thaw)


@healthy("layers-left-out-at-random", held_back=True)
def stochastic_depth(run: Training) -> None:
    """Of six residual layers some are skipped at each step, the deep ones at every second."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 48), nn.Linear(48, 10)
            self.layers = nn.ModuleList([mlp(48, 48, 48) for _ in range(6)])

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for i, layer in enumerate(self.layers):
                if torch.rand(()) > 0.1 * i:
                    h = h + layer(F.layer_norm(h, (48,)))
            return self.last(h)

    model, batch = Deep(), batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), loss, 220)


@healthy("pruned-to-a-tenth", held_back=True)
def pruned(run: Training) -> None:
    """Nine in ten weights are masked from step 100 on; the rest makes good for them."""
    model = mlp(16, 128, 128, 10)
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    for layer in model[::2]:
        prune.identity(layer, "weight")

    def cut(step: int) -> None:
        if step == 100:
            for layer in model[::2]:
                size = layer.weight_orig.detach().abs()
                layer.weight_mask.copy_(size > size.flatten().kthvalue(int(0.9 * size.numel())).values)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 260, after=cut)
