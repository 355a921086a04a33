"""`scaled`: two constants, under everything that torch does to a function."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.unit.functional import scaled
from tests.support.cases import each

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@each("dtype", DTYPES)
@each(("alpha", "beta"), [(0.5, 3.0), (1.0, 3.0), (0.5, 1.0), (2.0, 2.0), (1.0, 1.0), (-1.0, 0.0)])
def test_alpha_multiplies_forward_and_beta_backward(dtype: torch.dtype, alpha: float, beta: float) -> None:
    x = torch.randn(3, 4, dtype=dtype, requires_grad=True)
    gradient = torch.randn(3, 4, dtype=dtype)
    y = scaled(x, alpha, beta)
    y.backward(gradient)
    assert y.dtype == x.grad.dtype == dtype
    assert torch.equal(y, x * alpha) and torch.equal(x.grad, gradient * beta)


def test_a_product_is_rounded_once() -> None:
    x = torch.full((1,), 60000.0, dtype=torch.float16, requires_grad=True)
    y = scaled(x, 2.0**-20, 2.0**-20 * 3)
    y.backward(torch.full((1,), 60000.0, dtype=torch.float16))
    assert y.item() == torch.tensor(60000.0 * 2.0**-20, dtype=torch.float16).item()
    assert x.grad.item() == torch.tensor(60000.0 * 3 * 2.0**-20, dtype=torch.float16).item()


def test_with_both_constants_one_it_is_the_tensor_itself() -> None:
    x = torch.randn(3, requires_grad=True)
    assert scaled(x) is x
    y = scaled(x, 1.0, 2.0)
    assert y is not x and y.data_ptr() == x.data_ptr()  # a view: nothing is copied


@each(
    ("x", "why"),
    [
        (torch.tensor([float("nan"), float("inf"), -float("inf")]), "NaN passes"),
        (torch.zeros(0, 3), "empty"),
        (torch.tensor(2.0), "0-d"),
        (torch.randn(4, 5).T[::2], "strided"),
    ],
)
def test_odd_tensors(x: torch.Tensor, why: str) -> None:
    x = x.requires_grad_()
    y = scaled(x, 0.5, 3.0)
    y.backward(x.detach())
    torch.testing.assert_close(y.detach(), x.detach() * 0.5, equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(x.grad, x.detach() * 3, equal_nan=True, rtol=0, atol=0)


def test_twice_differentiable() -> None:
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(scaled(x**3, 0.5, 3.0).sum(), x, create_graph=True)
    torch.testing.assert_close(first, 9 * x**2)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 18 * x)


def test_the_gradient_of_the_gradient_that_comes_in_is_multiplied_by_beta() -> None:
    x, v = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    (first,) = torch.autograd.grad(scaled(x, 0.5, 3.0), x, v, create_graph=True)
    (of_v,) = torch.autograd.grad(first.sum(), v)
    assert of_v.tolist() == [3.0] * 5


def test_vmap_and_grad_of_functions() -> None:
    x = torch.randn(4, 5)
    assert torch.equal(torch.vmap(lambda r: scaled(r, 0.5, 3.0))(x), x * 0.5)
    gradients = torch.vmap(torch.func.grad(lambda r: scaled(r, 0.5, 3.0).square().sum()))(x)
    torch.testing.assert_close(gradients, x * 0.5 * 2 * 3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    x = torch.randn(4, requires_grad=True)
    checkpoint(lambda t: scaled(t.sin(), 0.5, 3.0), x, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(x.grad, 3 * x.detach().cos())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_without_a_break_and_alike(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: scaled(scaled(t, 0.5, 3.0).sin(), 2.0, 1.0), fullgraph=True, backend=backend)
    x = torch.randn(4, requires_grad=True)
    y = compiled(x)
    y.sum().backward()
    torch.testing.assert_close(y, 2 * (x * 0.5).sin())
    torch.testing.assert_close(x.grad, 3 * (x.detach() * 0.5).cos())


def test_factors_may_be_tensors() -> None:
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    y = scaled(x, torch.tensor(0.5), torch.tensor(3.0))
    y.backward(torch.ones_like(y))
    assert y.dtype == torch.bfloat16 and y.tolist() == [0.5, 0.5] and x.grad.tolist() == [3.0, 3.0]


@each("dtype", [torch.int64, torch.bool, torch.complex64])
def test_other_kinds_of_tensors_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(
        UnsupportedTensorError, match=rf"scaled: expected a floating-point tensor; got x=a tensor \({dtype}"
    ):
        scaled(torch.zeros(2, dtype=dtype), 2.0, 1.0)


@each(
    ("factors", "reported"),
    [
        ((float("nan"), 1.0), "scaled: expected alpha to be finite; got nan"),
        ((1.0, float("inf")), "scaled: expected beta to be finite; got inf"),
        (("2", 1.0), "scaled: expected alpha to be a number; got '2' (str)"),
        ((True, 1.0), "scaled: expected alpha to be a number; got True (bool)"),
        (
            (torch.ones(2), 1.0),
            "scaled: expected alpha to be a number, or a 0-d tensor that needs no gradient; got a tensor",
        ),
        ((1.0, torch.tensor(1.0, requires_grad=True)), "scaled: expected beta to be a number, or a 0-d tensor"),
        ((torch.tensor(1), 1.0), "scaled: expected alpha to be a number, or a 0-d tensor"),
    ],
)
def test_other_factors_are_refused(factors: tuple[object, object], reported: str) -> None:
    import re

    with pytest.raises(ArgumentError, match=re.escape(reported)):
        scaled(torch.ones(1), *factors)
