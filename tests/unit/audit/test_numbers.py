"""What an audit measures, against the same numbers taken by hand."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import plimsoll as pl
from plimsoll.unit import Audit, Row, audit
from tests.support.spectra import same


def row(found: Audit, name: str) -> Row:
    return next(r for r in found.rows if r.name == name)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.gelu(self.up(x))
        return self.down(h + 0.5 * h)


def test_every_operation_has_its_values_and_its_gradient() -> None:
    torch.manual_seed(0)
    model, x = Two(), torch.randn(16, 32)
    found = audit(model, x, loss=lambda y: y.square().mean())

    up = model.up(x)
    gelu = functional.gelu(up)
    half = 0.5 * gelu
    both = gelu + half
    down = model.down(both)
    square = down.square()
    loss = square.mean()
    results = [up, gelu, half, both, down, square, loss]
    gradients = torch.autograd.grad(loss, results, retain_graph=True)
    wanted = ["up linear", "model gelu", "model mul", "model add", "down linear", "loss square", "loss mean"]
    assert [r.name for r in found.operations] == wanted
    for each, value, gradient in zip(found.operations, results, gradients, strict=True):
        assert same(each.forward, pl.measure(value)) and same(each.backward, pl.measure(gradient))
        assert each.shape == tuple(value.shape) and each.dtype == "float32" and each.absence is None
        assert each.forward_std == pytest.approx(pl.measure(value).std) and each.position == wanted.index(each.name) + 1

    of_weights = torch.autograd.grad(loss, list(model.parameters()))
    assert [r.name for r in found.parameters] == [name for name, _ in model.named_parameters()]
    for each, p, gradient in zip(found.parameters, model.parameters(), of_weights, strict=True):
        assert same(each.forward, pl.measure(p)) and same(each.backward, pl.measure(gradient))
    assert [r.forward for r in found.inputs] == [pl.measure(x)] and found.inputs[0].absence == "frozen"


def test_the_line_of_the_users_code_is_named() -> None:
    found = audit(Two(), torch.randn(4, 32))
    lines = [int(str(r.source).rpartition(":")[2]) for r in found.operations]
    assert all(str(r.source).startswith(__file__) for r in found.operations)
    first = Two.forward.__code__.co_firstlineno
    assert lines == [first + 1, first + 1, first + 2, first + 2, first + 2]


def test_in_place_operations_have_the_gradients_of_their_own_values() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            y.mul_(3.0)
            y += 1.0
            return functional.relu(y, inplace=True)

    torch.manual_seed(0)
    model, x = InPlace(), torch.randn(16, 8)
    found = audit(model, x, loss=lambda y: y.sum())
    a = model.inner(x)
    b = a * 3.0
    c = b + 1.0
    d = functional.relu(c)
    gradients = torch.autograd.grad(d.sum(), [a, b, c, d])
    assert [r.operation for r in found.operations] == ["linear", "mul", "add", "relu", "sum"]
    for each, value, gradient in zip(found.operations, [a, b, c, d], gradients, strict=False):
        assert same(each.forward, pl.measure(value)) and same(each.backward, pl.measure(gradient))


def test_without_a_loss_outputs_get_gradients_of_unit_variance() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 256), nn.Linear(8, 256)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"a": self.a(x), "b": self.b(x), "labels": torch.arange(4)}

    found = audit(Pair(), torch.randn(64, 8))
    for name in ("a linear", "b linear"):
        assert row(found, name).backward_std == pytest.approx(1.0, abs=5 / math.sqrt(2 * 64 * 256))
    assert row(found, "a linear").backward != row(found, "b linear").backward


def test_a_scalar_output_or_the_models_own_loss_is_where_the_backward_begins() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x: Tensor, y: Tensor, *, whole: bool = False) -> object:
            logits = self.inner(x)
            loss = functional.cross_entropy(logits, y)
            return {"loss": loss, "logits": logits} if whole else loss

    model, x, y = Own(), torch.randn(16, 8), torch.arange(16) % 4
    logits = model.inner(x)
    wanted = torch.autograd.grad(functional.cross_entropy(logits, y), logits)[0]
    for example in ((x, y), {"x": x, "y": y}, {"x": x, "y": y, "whole": True}):
        assert same(row(audit(model, example), "inner linear").backward, pl.measure(wanted))
