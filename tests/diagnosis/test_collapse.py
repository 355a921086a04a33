"""Outputs that become the same, and losses that let them; sound ones that come near."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.cases import each
from tests.support.diagnosis.trainings import watched


class Reversed(torch.autograd.Function):
    """Results as they are, and gradients of the other sign."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:  # type: ignore[override]
        return -g


class Views(nn.Module):
    """An encoder, another one, a predictor, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.other, self.predictor = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)


def unit(x: Tensor) -> Tensor:
    return functional.normalize(x, dim=1)


def whitened(x: Tensor) -> Tensor:
    centred = x - x.mean(dim=0)
    return centred @ torch.linalg.inv(torch.linalg.cholesky(centred.mT @ centred + 0.1 * torch.eye(16)).mT)


def pull(how: str, m: Views, x: Tensor) -> Tensor:
    a, b = m.encoder(x), m.encoder(x + 0.1 * torch.randn_like(x))
    p, cos = m.predictor(a), functional.cosine_similarity
    turn = torch.linalg.qr(torch.randn(16, 16)).Q
    return {
        "cosine": (1 - cos(p, b)).mean(),
        "both ways": -0.5 * cos(p, b).mean() - cos(m.predictor(b), a).mean() / 2,
        "by hand": (2 - 2 * (unit(p) * unit(b)).sum(dim=-1)).mean(),
        "error of unit vectors": functional.mse_loss(unit(p), unit(b)),
        "detached": (1 - cos(p, b.detach())).mean(),
        "another encoder": (1 - cos(a, m.other(x))).mean(),
        "a row of another kind": -cos(p, b).mean() + cos(p, b.roll(1, 0)).mean(),
        "labels": (cos(p, b) * (2 * torch.randint(2, (32,)) - 1)).mean(),
        "with classes": functional.cross_entropy(m.head(a), x[:, :4].argmax(dim=1)) - cos(p, b).mean(),
        "uniform": -cos(p, b).mean() + torch.pdist(unit(a)).square().mul(-2).exp().mean().log(),
        "variance": functional.mse_loss(unit(a), unit(b)) + (1 - a.std(dim=0)).relu().mean(),
        "errors": functional.mse_loss(a, b),
        "whitened": functional.mse_loss(unit(whitened(a)), unit(whitened(b))),
        "turned": (1 - cos(a @ turn, m.encoder(x.flip(1)))).mean(),
        "reversed": (1 - cos(p, Reversed.apply(b))).mean(),
        "pushed": cos(p, b).mean(),
    }[how]  # fmt: skip


@each(
    ("how", "is_found"),
    [
        *[(how, True) for how in ("cosine", "both ways", "by hand", "error of unit vectors")],
        *[(how, False) for how in ("detached", "another encoder", "a row of another kind", "labels", "with classes")],
        *[(how, False) for how in ("uniform", "variance", "errors", "whitened", "turned", "reversed", "pushed")],
        # Next to the loss of a classifier, which goes backward before it or after, and with a loss scale.
        *[("cosine", False), ("both ways", False), ("cosine", True)],
    ],
)  # fmt: skip
def test_a_loss_that_only_pulls_outputs_together_is_named(how: str, is_found: bool, tmp_path: Path) -> None:
    runs = len(list(tmp_path.iterdir()))
    is_scaled = runs > 0 and is_found and how == "cosine"
    model = Views()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=is_scaled)

    def step(_: int) -> None:
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        if how == "cosine" and not is_found:
            functional.cross_entropy(model.head(model.encoder(x)), x[:, :4].argmax(dim=1)).backward()
        scaler.scale(pull(how, model, x)).backward()
        if how == "both ways" and not is_found:
            functional.cross_entropy(model.head(model.encoder(x)), x[:, :4].argmax(dim=1)).backward()
        scaler.step(optimizer)
        scaler.update()

    found = watched(tmp_path / f"{runs}", model, optimizer, step)
    assert [f.evidence["cause"] for f in found if f.rule == "outputs-alike"] == ["only pulls"] * is_found


class Points(nn.Module):
    """Rows of sixteen numbers from a hidden layer, which `shift` moves below the bound of its ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.shift = nn.Linear(8, 32), nn.Linear(32, 16), torch.zeros(32)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.drop(self.first(x)) - self.shift).relu())


@each(
    ("kind", "since"),
    [
        ("collapses", 8),
        ("parts collapse", 8),
        ("collapses and comes back", None),
        ("from the start", None),
        ("inputs become one row", None),
        ("few rows", None),
        ("evaluated", None),
        ("collapses behind a dropout of 0.95", None),  # which another rule names
    ],
)
def test_outputs_that_become_one_vector_are_named(kind: str, since: int | None, tmp_path: Path) -> None:
    model = nn.ModuleDict({"points": Points()}) if kind.startswith("parts") else Points()
    points = model["points"] if isinstance(model, nn.ModuleDict) else model
    points.drop.p = 0.95 if "dropout" in kind else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step(at: int) -> None:
        x = torch.randn(8 if kind == "few rows" else 32, 8)
        holds = 8 <= at < (16 if kind.endswith("back") else 24)
        if kind == "inputs become one row" and holds:
            x = x[:1].expand(32, 8).contiguous()
        elif kind != "evaluated":
            points.shift.fill_(100.0 * (holds or kind == "from the start"))
        elif holds:
            points.shift.fill_(100.0)
            with torch.no_grad():
                points(x)
            points.shift.fill_(0.0)
        outputs = points(x)
        optimizer.zero_grad()
        outputs.square().mean().backward()
        optimizer.step()

    findings = watched(tmp_path / kind, model, optimizer, step, 24)
    found = [f for f in findings if f.rule == "outputs-alike" and f.evidence.get("cause") == "rows alike"]
    assert [f.since_step for f in found] == ([] if since is None else [since])
    assert all((f.evidence["same"], f.evidence["of"]) == (32, 32) for f in found)
