"""Unusual structures: graphs, embeddings, experts, equations, fixed points."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.trust.registry import healthy
from benchmarks.trust.toys import batches, clusters, mlp
from benchmarks.trust.training import Training


@healthy("mixture-of-experts")
def experts(run: Training) -> None:
    """Each input goes to one of six experts; some get little or nothing for a while."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(16, 6)
            self.experts = nn.ModuleList([mlp(16, 32, 10) for _ in range(6)])

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            share = self.gate(x).float().softmax(-1)
            best, chosen = share.max(dim=-1)
            out = torch.zeros(len(x), 10)
            for number, expert in enumerate(self.experts):
                mine = chosen == number
                if mine.any():
                    out[mine] = expert(x[mine]).float() * best[mine, None]
            load = share.mean(dim=0) * F.one_hot(chosen, 6).float().mean(dim=0)
            return out, 6 * load.sum()

    model = Experts()
    batch = batches(*clusters(spread=0.5), size=64)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        logits, balance = model(x)
        return F.cross_entropy(logits, y) + 0.01 * balance

    run.train(model, torch.optim.AdamW(model.parameters(), lr=5e-3), loss, 250)


@healthy("matrix-factorisation", held_back=True)
def factorisation(run: Training) -> None:
    """Users and films by tables, of which a batch touches a few rows."""
    true = torch.randn(300, 4) @ torch.randn(4, 200)
    users, films = nn.Embedding(300, 8), nn.Embedding(200, 8)
    for table in (users, films):
        nn.init.normal_(table.weight, std=0.3)
    model = nn.ModuleDict({"users": users, "films": films})

    def loss(step: int) -> Tensor:
        u, i = torch.randint(300, (256,)), torch.randint(200, (256,))
        return F.mse_loss((users(u) * films(i)).sum(dim=-1), true[u, i])

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-2), loss, 400)


@healthy("skip-gram", learns=0.85)
def skip_gram(run: Training) -> None:
    """Word vectors that begin close to zero; frequent words are seen often, rare ones hardly."""
    words = nn.Embedding(500, 16)
    contexts = nn.Embedding(500, 16)
    nn.init.uniform_(words.weight, -0.03, 0.03)
    nn.init.zeros_(contexts.weight)
    model = nn.ModuleDict({"words": words, "contexts": contexts})

    def loss(step: int) -> Tensor:
        w = (torch.rand(256) ** 3 * 500).long()
        near = (w // 25 * 25 + torch.randint(25, (256,))).clamp(max=499)
        far = torch.randint(500, (256,))
        right, wrong = ((words(w) * contexts(c)).sum(dim=-1).float() for c in (near, far))
        return F.softplus(-right).mean() + F.softplus(wrong).mean()

    run.train(model, torch.optim.Adam(model.parameters(), lr=2e-2), loss, 250)


@healthy("graph-network")
def graph(run: Training) -> None:
    """Labels of nodes from their neighbours, on one graph in full batches."""
    classes = torch.randint(4, (120,))
    edges = (torch.rand(120, 120) < torch.where(classes[:, None] == classes, 0.15, 0.01)).float()
    edges = ((edges + edges.T + torch.eye(120)) > 0).float()
    edges = edges / edges.sum(dim=1, keepdim=True)
    x = torch.randn(120, 8) + F.one_hot(classes, 8)
    model = nn.ModuleList([nn.Linear(8, 32), nn.Linear(32, 4)])

    def loss(step: int) -> Tensor:
        h = torch.relu(edges @ model[0](x))
        return F.cross_entropy((edges @ model[1](h))[:80], classes[:80])

    run.train(model, torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4), loss, 200)


@healthy("physics-informed", learns=0.2)
def physics(run: Training) -> None:
    """A differential equation: second derivatives inside the loss."""
    model = mlp(1, 32, 32, 1, act=nn.Tanh)

    def loss(step: int) -> Tensor:
        t = (torch.rand(64, 1) * 3).requires_grad_()
        u = model(t).float()
        (du,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), t, create_graph=True)
        begin = torch.zeros(1, 1)
        return ((ddu + u) ** 2).mean() + 5 * (model(begin).float() - 1).square().sum()

    run.train(model, torch.optim.Adam(model.parameters(), lr=4e-3), loss, 250)


@healthy("neural-ode", learns=0.5)
def neural_ode(run: Training) -> None:
    """A field is integrated in ten steps of Euler; the same network is called ten times."""
    field = mlp(2, 32, 32, 2, act=nn.Tanh)
    turn = torch.tensor([[0.8, -0.6], [0.6, 0.8]])

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 2)
        y = x
        for _ in range(10):
            y = y + 0.1 * field(y)
        return F.mse_loss(y, x @ turn * 0.7)

    run.train(field, torch.optim.Adam(field.parameters(), lr=3e-3), loss, 160)


@healthy("deep-equilibrium", held_back=True)
def equilibrium(run: Training) -> None:
    """The output is a fixed point of a layer, found without gradients and used once with them."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.inner, self.out = nn.Linear(16, 48), nn.Linear(48, 48), nn.Linear(48, 10)
            nn.init.normal_(self.inner.weight, std=0.3 / 48**0.5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.into(x)
            z = torch.zeros_like(x)
            with torch.no_grad():
                for _ in range(12):
                    z = torch.tanh(self.inner(z) + x)
            return self.out(torch.tanh(self.inner(z) + x))

    model = Fixed()
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss, 200)


@healthy("rezero-depth", held_back=True)
def rezero(run: Training) -> None:
    """Twelve residual layers, each times a factor that begins at zero."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(16, 32), nn.Linear(32, 10)
            self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(12)])
            self.factors = nn.Parameter(torch.zeros(12))

        def forward(self, x: Tensor) -> Tensor:
            h = self.into(x)
            for factor, layer in zip(self.factors, self.layers, strict=True):
                h = h + factor * torch.relu(layer(h))
            return self.out(h)

    model = Deep()
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss, 200)


@healthy("set-of-points")
def point_sets(run: Training) -> None:
    """The largest value of each feature over a set: only the winners get gradients."""
    each, whole = mlp(2, 64, 64), mlp(64, 32, 2)
    model = nn.ModuleDict({"each": each, "whole": whole})

    def loss(step: int) -> Tensor:
        scale = 0.5 + 2 * torch.rand(32, 1, 2)
        x = torch.randn(32, 20, 2) * scale
        return F.mse_loss(whole(each(x).amax(dim=1)), scale.squeeze(1))

    run.train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss, 250)


@healthy("hard-attention-memory")
def memory(run: Training) -> None:
    """Values looked up by keys in a memory that is learned, with sharp weights."""
    query, keys = nn.Linear(8, 16), nn.Parameter(torch.randn(32, 16) * 0.5)
    values = nn.Parameter(torch.zeros(32, 4))

    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.keys, self.values = query, keys, values

        def forward(self, x: Tensor) -> Tensor:
            return (2 * self.query(x) @ self.keys.T).softmax(-1) @ self.values

    model = Memory()
    x = torch.randn(1024, 8)
    batch = batches(x, torch.sign(x[:, :4]), size=64)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss, 300)


@healthy("sparse-dictionary")
def dictionary(run: Training) -> None:
    """Values are rebuilt from the 6 largest of 256 learned features: nearly all are zero, and some are never chosen."""

    class Dictionary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(32, 256), nn.Linear(256, 32)
            with torch.no_grad():
                self.decoder.weight.copy_(F.normalize(self.encoder.weight.T, dim=0))

        def forward(self, x: Tensor) -> Tensor:
            scores = self.encoder(x - self.decoder.bias).relu()
            best, chosen = scores.topk(6, dim=1)
            return self.decoder(torch.zeros_like(scores).scatter(1, chosen, best))

    model, true = Dictionary(), F.normalize(torch.randn(64, 32), dim=1)

    def loss(step: int) -> Tensor:
        strength = torch.rand(64, 64) * (torch.rand(64, 64) < 0.05)
        return F.mse_loss(model(strength @ true).float(), strength @ true) / 0.016

    def unit(step: int) -> None:
        with torch.no_grad():
            model.decoder.weight.copy_(F.normalize(model.decoder.weight, dim=0))

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 300, after=unit)
