"""`scaled` multiplies by different constants forward and backward."""

from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.errors import ArgumentError
from plimsoll.unit.arguments import check_floating, described


def scaled(x: Tensor, alpha: float | Tensor = 1.0, beta: float | Tensor = 1.0) -> Tensor:
    """Return `x * alpha`, whose gradient is multiplied by `beta` instead.

    Both products have the dtype of `x` and are rounded once. NaN and Inf pass through. If both constants are 1, the
    result is `x` itself. If they are equal, it is an ordinary product. A constant of 1 costs nothing in its direction.
    The gradient of the gradient is multiplied by `beta` again. The function works under torch.compile, torch.func.vmap
    and checkpointing. Torch refuses forward-mode differentiation if the two constants differ.

    Args:
        x: Floating-point tensor.
        alpha: Multiplies the tensor: a finite number or a 0-d tensor. Default: 1.
        beta: Multiplies the gradient: a finite number or a 0-d tensor. Default: 1.

    Raises:
        ArgumentError: A constant is not finite, or is a tensor that needs a gradient.
        UnsupportedTensorError: The tensor is not floating point.

    >>> x = torch.ones(2, requires_grad=True)
    >>> y = scaled(x, 0.5, 3.0)
    >>> y.sum().backward()
    >>> y.tolist(), x.grad.tolist()
    ([0.5, 0.5], [3.0, 3.0])
    """
    check_floating("scaled", x=x)
    for name, factor in (("alpha", alpha), ("beta", beta)):
        _check_factor(name, factor)
    return multiplied(x, alpha, beta)


def multiplied(x: Tensor, alpha: float | Tensor, beta: float | Tensor) -> Tensor:
    """Return `scaled` without its checks, for factors of formulas."""
    if _same(alpha, beta):
        return x if _is_one(alpha) else _times(x, alpha)
    return cast("Tensor", _Scaled.apply(x, alpha, beta))


class _Scaled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, alpha: float | Tensor, _beta: float | Tensor) -> Tensor:
        return x.view_as(x) if _is_one(alpha) else _times(x, alpha)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004  (torch's names)
        ctx.beta = inputs[2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # An ordinary product, so that a second differentiation multiplies by beta again.
        return gradient if _is_one(ctx.beta) else _times(gradient, ctx.beta), None, None


def _times(x: Tensor, factor: float | Tensor) -> Tensor:
    """Return the product in the dtype of `x`."""
    product = x * factor
    return product if product.dtype == x.dtype else product.to(x.dtype)


def _is_one(factor: float | Tensor) -> bool:
    return not isinstance(factor, Tensor) and factor == 1


def _same(alpha: float | Tensor, beta: float | Tensor) -> bool:
    if isinstance(alpha, Tensor) or isinstance(beta, Tensor):
        return alpha is beta
    return alpha == beta


def _check_factor(name: str, factor: object) -> None:
    if isinstance(factor, Tensor):
        if factor.dim() != 0 or factor.requires_grad or not factor.dtype.is_floating_point:
            raise ArgumentError(
                f"scaled: expected {name} to be a number, or a 0-d tensor that needs no gradient; got "
                f"{described(factor)}. Multiply with * where it is a tensor or is trained."
            )
        return
    if isinstance(factor, bool) or not isinstance(factor, (int, float, torch.SymFloat, torch.SymInt)):
        raise ArgumentError(f"scaled: expected {name} to be a number; got {described(factor)}. Give a float.")
    if not isinstance(factor, (torch.SymFloat, torch.SymInt)) and not -float("inf") < factor < float("inf"):
        raise ArgumentError(f"scaled: expected {name} to be finite; got {factor}. Give a finite number.")
