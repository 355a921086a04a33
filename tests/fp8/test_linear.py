"""`fp8.Linear` against the same layer without FP8: they differ by rounding alone."""

import torch
from torch import Tensor

from plimsoll import fp8
from plimsoll.unit.functional._products import linear


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


def test_unit_scaling_is_that_of_the_unit_functions() -> None:
    torch.manual_seed(0)
    layer = fp8.Linear(64, 32)
    x = torch.randn(48, 64, requires_grad=True)
    weight, bias = (p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias))
    y, expected = layer(x), linear(x, weight, bias)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    found, x.grad = x.grad, None
    expected.backward(gradient)
    assert found is not None and x.grad is not None and weight.grad is not None and bias.grad is not None
    assert layer.weight.grad is not None and layer.bias.grad is not None
    assert distance(y, expected) < 0.06
    assert distance(found, x.grad) < 0.08
    assert distance(layer.weight.grad, weight.grad) < 0.08
    torch.testing.assert_close(layer.bias.grad, bias.grad)
