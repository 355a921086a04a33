"""Decisions that rounding changes, against those that tests make themselves in FP64."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import plimsoll as pl
from plimsoll.runs import Run
from plimsoll.watch.shadow.decisions import Choice, class_axis, compared
from tests.support.cases import each
from tests.support.watch.shadow import wide


class Router(nn.Module):
    """Two of 64 experts for each token, each of which is a scale."""

    def __init__(self, features: int = 16, smallest: bool = False) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(features, 64), nn.Parameter(torch.randn(64, features))
        self.smallest, self.scores = smallest, []

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        self.scores.append(scores.detach().clone())
        best = scores.topk(2, dim=-1, largest=not self.smallest)
        return (best.values.softmax(-1)[..., None] * self.experts[best.indices]).sum(-2) * x


class Model(nn.Module):
    def __init__(self, again: bool = False, smallest: bool = False) -> None:
        super().__init__()
        self.first, self.router, self.head = nn.Linear(16, 16), Router(smallest=smallest), nn.Linear(16, 10)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(self.router, x, use_reentrant=False) if self.again else self.router(x)
        return self.head(x)


def trained(model: nn.Module, folder: Path, loss: Callable[[Tensor], Tensor], call: nn.Module | None = None) -> Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pl.watch(model, optimizer, run=folder, every=1, shadow_every=1):
        for _ in range(2):
            y = (model if call is None else call)(batch(next(model.parameters()).dtype))
            loss(y.float()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return Run(folder)


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(400, 16, generator=torch.Generator().manual_seed(3)).to(dtype)


def classes(y: Tensor) -> Tensor:
    return functional.cross_entropy(y, torch.arange(len(y)) % 10)


def at(run: Run, name: str) -> float:
    steps, values = run.scalars(name)
    assert list(steps)[-1] == 1
    return float(values[-1])


@each("smallest, again", [(False, False), (True, False), (False, True)])
def test_routes_that_bf16_changes(tmp_path: Path, smallest: bool, again: bool) -> None:
    torch.manual_seed(2)
    model = Model(again=again, smallest=smallest).bfloat16()
    twin = wide(copy.deepcopy(model), torch.float64)
    run = trained(model, tmp_path / f"{smallest}{again}", classes)
    low, high = model(batch(torch.bfloat16)), twin(batch(torch.bfloat16).double())
    sign = -1 if smallest else 1
    chosen, wanted = (
        [set(row.tolist()) for row in (sign * m.router.scores[-1]).topk(2).indices] for m in (model, twin)
    )
    flips = sum(a != b for a, b in zip(chosen, wanted, strict=True)) / 400
    assert 0 < flips < 0.2
    assert at(run, "flips:router") == pytest.approx(flips, abs=1 / 400)
    kept = (sign * model.router.scores[-1].double()).topk(3).values
    assert at(run, "ties:router") == pytest.approx(float((kept[:, 1] == kept[:, 2]).float().mean()), abs=1 / 400)
    best = (sign * twin.router.scores[-1]).topk(3).values
    error = (model.router.scores[-1].double() - twin.router.scores[-1]).square().mean(-1).sqrt() * 2**0.5
    assert at(run, "margin:router") == pytest.approx(float(((best[:, 1] - best[:, 2]) / error).median()), rel=0.05)
    assert at(run, "flips:model:output") == pytest.approx(
        float((low.argmax(-1) != high.argmax(-1)).float().mean()), abs=2 / 400
    )


def test_fp32_changes_nothing(tmp_path: Path) -> None:
    run = trained(Model(), tmp_path / "run", classes)
    assert at(run, "flips:router") == at(run, "flips:model:output") == 0
    assert "margin:router" not in run.scalar_names


def test_other_losses_have_no_classes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = trained(Model().bfloat16(), tmp_path / "run", lambda y: y.square().mean())
    assert "flips:router" in run.scalar_names
    assert "flips:model:output" not in run.scalar_names


def test_training_is_as_without(tmp_path: Path) -> None:
    def weights(shadow: int | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Model(), nn.Dropout(0.2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.watch(model, optimizer, run=tmp_path / f"{shadow}", every=1, shadow_every=shadow):
            for _ in range(4):
                classes(model(batch())).backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    for one, other in zip(weights(None), weights(1), strict=True):
        assert torch.equal(one, other)


def test_compiled(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model().bfloat16()
    model.router.forward = lambda x: x[..., :16] * x.topk(2).values.sum(-1, keepdim=True)  # type: ignore[assignment]
    run = trained(model, tmp_path / "run", classes, torch.compile(model, backend="aot_eager"))
    assert at(run, "flips:router") > 0


def test_gradients_of_classifiers() -> None:
    def gradient(shape: tuple[int, ...], loss: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.randn(shape, requires_grad=True)
        loss(x).backward()
        assert x.grad is not None
        return x.grad

    target = torch.randint(0, 10, (8,))
    assert class_axis(gradient((8, 10), lambda x: functional.cross_entropy(x, target))) == -1
    ignored = target.clone()
    ignored[:3] = -100
    assert class_axis(gradient((8, 10), lambda x: functional.cross_entropy(x, ignored))) == -1
    images = torch.randint(0, 10, (2, 5, 4))
    assert class_axis(gradient((2, 10, 5, 4), lambda x: functional.cross_entropy(x, images))) == 1
    assert class_axis(gradient((8, 10), lambda x: functional.cross_entropy(x, target).half())) == -1
    assert class_axis(gradient((8, 10), lambda x: x.square().sum())) is None
    assert class_axis(gradient((8, 10), lambda x: x.sum())) is None
    assert class_axis(gradient((8, 1), lambda x: x.sum())) is None
    assert class_axis(gradient((8,), lambda x: x.square().sum())) is None
    assert class_axis(torch.zeros(8, 10)) is None


def test_ties_and_margins() -> None:
    reference = torch.tensor([[4.0, 3.0, 2.9, 0.0], [1.0, 2.0, 3.0, 4.0]])
    values = torch.tensor([[4.0, 3.0, 3.0, 0.0], [1.0, 2.5, 2.0, 4.0]])
    found = compared(*(Choice(module="", scores=x, count=2) for x in (values, reference)))
    assert found.tied.tolist() == [True, False]
    assert found.flipped.tolist()[1]
    assert found.margins.tolist() == pytest.approx(
        [0.1 / (2**0.5 * 0.05), 1.0 / (2**0.5 * (1.25 / 4) ** 0.5)], rel=1e-5
    )
