"""An audit leaves everything as it was: the model, its gradients and hooks, random generators, watches, torch."""

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.unit import audit
from tests.support.cases import each


class Busy(nn.Module):
    """Batch norm, dropout, a counter, a list that grows, an attribute that is made in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
        self.seen: list[int] = []
        self.calls = 0
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.total += 1
        self.last = x
        x.add_(random.random() + np.random.random())  # noqa: NPY002
        return self.inner(x)


def state_of(model: nn.Module) -> dict[str, Any]:
    return {
        "tensors": {name: x.clone() for name, x in model.state_dict().items()},
        "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "identities": [(name, id(p), p.data_ptr()) for name, p in model.named_parameters()],
        "attributes": {name: sorted(vars(m)) for name, m in model.named_modules()},
        "modes": [m.training for m in model.modules()],
        "random": (torch.get_rng_state(), random.getstate(), str(np.random.get_state())),  # noqa: NPY002
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.equal(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@each("training", [True, False])
@each("gradients", [True, False])
def test_nothing_of_the_model_changes(training: bool, gradients: bool) -> None:
    torch.manual_seed(0)
    model, x = Busy().train(training), torch.randn(16, 8)
    if gradients:
        model(x.clone()).square().sum().backward()
    model.inner[0].weight.register_hook(lambda g: pytest.fail("a parameter's hook ran"))
    before, given = state_of(model), x.clone()
    calls, seen = model.calls, list(model.seen)
    found = audit(model, x)
    assert found.training is training and len(found.parameters) == 6
    assert same(before, state_of(model)) and x.equal(given)
    assert (model.calls, model.seen) == (calls, seen) and hasattr(model, "last") is gradients


def test_nothing_changes_where_the_model_raises_or_its_backward_does() -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *_: Tensor) -> Tensor:
            raise RuntimeError("in the backward")

    class Raises(Busy):
        fails_forward = False

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.fails_forward:
                raise ValueError("in the forward")
            return Bad.apply(y)

    apply = torch.autograd.Function.__dict__["apply"]
    model, x = Raises(), torch.randn(4, 8)
    before = state_of(model)
    with pytest.raises(RuntimeError, match="in the backward"):
        audit(model, x)
    model.fails_forward = True
    with pytest.raises(ValueError, match="in the forward"):
        audit(model, x)
    before["attributes"][""] = sorted([*before["attributes"][""], "fails_forward"])
    assert same(before, state_of(model))
    assert torch.autograd.Function.__dict__["apply"] is apply


def test_it_computes_what_the_model_computes_bit_for_bit() -> None:
    torch.manual_seed(3)
    model, x = Busy(), torch.randn(16, 8)
    alike = copy.deepcopy(model)
    outputs: list[Tensor] = []
    audit(model, x, loss=lambda y: (outputs.append(y.detach().clone()), y.sum())[1])
    assert outputs[0].equal(alike(x.clone()))


def test_what_the_loss_reaches_beside_the_model_keeps_its_gradient() -> None:
    beside = torch.ones(4, requires_grad=True)
    kept = torch.full((4,), 7.0)
    beside.grad = kept
    model, x = nn.Linear(8, 4), torch.randn(2, 8, requires_grad=True)
    audit(model, x, loss=lambda y: (y * beside).sum())
    assert beside.grad is kept and kept.equal(torch.full((4,), 7.0)) and x.grad is None


def test_a_loss_that_is_a_module_is_lent_too() -> None:
    class Loss(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.scale = model, nn.Parameter(torch.tensor(2.0))

        def forward(self, y: Tensor) -> Tensor:
            return (y * self.scale).square().mean() + self.model[0].weight.square().sum()

    model = nn.Sequential(nn.Linear(8, 4))
    loss = Loss(model)
    found = audit(model, torch.randn(16, 8), loss=loss)
    assert loss.scale.grad is None and model[0].weight.grad is None
    assert [r.name for r in found.operations] == ["0 linear", "loss mul", "loss square", "loss mean", "loss square #2",
                                                  "loss sum", "loss add"]  # fmt: skip
    assert found.parameters[0].backward is not None


def test_a_watch_of_the_model_hears_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runs: list[pl.Run] = []
    for name, audited in (("plain", False), ("audited", True)):
        torch.manual_seed(1)
        alike = copy.deepcopy(model)
        optimizer = torch.optim.SGD(alike.parameters(), lr=0.1)
        with pl.watch(alike, optimizer, run=tmp_path / name, every=1):
            for _ in range(2):
                if audited:
                    audit(alike, torch.full((4, 8), 100.0))
                optimizer.zero_grad()
                alike(torch.randn(16, 8)).square().mean().backward()
                optimizer.step()
        runs.append(pl.Run(tmp_path / name))
    plain, audited_run = (list(run.spectra()) for run in runs)
    assert plain == audited_run and len(plain) > 10
    assert np.array_equal(runs[0].scalars("loss")[1], runs[1].scalars("loss")[1])


def test_two_audits_are_the_same() -> None:
    model, x = Busy(), torch.randn(16, 8)
    assert audit(model, x) == audit(model, x)
