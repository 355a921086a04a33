"""Functions of one number at unit scale: the factors of GELU and the like are integrals (`factors.nonlinear`)."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.errors import ArgumentError
from plimsoll.unit.factors.constraints import Constraint, check_constraint
from plimsoll.unit.factors.formulas import RELU
from plimsoll.unit.functional.ideal_factors import carried_out
from plimsoll.unit.functional.input_multiplier import checked_mult, gated, nonlinear
from plimsoll.unit.scaled_multiply import check_floating


def gelu(
    input: Tensor,  # noqa: A002  (torch's name)
    approximate: str = "none",
    *,
    mult: float = 1.0,
    constraint: Constraint | None = "gmean",
) -> Tensor:
    """`torch.nn.functional.gelu` of `mult * input` at unit scale: 1.701 forward and 1.481 backward where mult is 1.

    In the dtype of `input`; NaN and Inf are torch's.

    Args:
        input: floating point.
        approximate: "none" or "tanh", as torch's.
        mult: what multiplies the input first; above zero. Small, the function is nearly linear; large, nearly ReLU.
        constraint: how the two factors become one; None leaves each ideal.

    Raises `ArgumentError`, and `UnsupportedTensorError` for a tensor that is not floating point.

    >>> gelu(torch.tensor([1.0]), constraint=None)
    tensor([1.4311])
    """
    if approximate not in ("none", "tanh"):
        raise ArgumentError(f"gelu: expected approximate to be 'none' or 'tanh'; got {approximate!r}. Take 'none'.")
    name = "gelu" if approximate == "none" else "gelu_tanh"
    return _applied("gelu", name, lambda x: F.gelu(x, approximate=approximate), input, mult, constraint)


def silu(input: Tensor, *, mult: float = 1.0, constraint: Constraint | None = "gmean") -> Tensor:  # noqa: A002
    """`torch.nn.functional.silu` of `mult * input` at unit scale. Arguments and exceptions are those of `gelu`."""
    return _applied("silu", "silu", F.silu, input, mult, constraint)


def relu(input: Tensor, *, constraint: Constraint | None = "gmean") -> Tensor:  # noqa: A002
    """`torch.nn.functional.relu` at unit scale: sqrt(2 / (1 - 1/pi)) forward and sqrt(2) backward.

    A multiplier would change nothing, so there is none. Otherwise as `gelu`.
    """
    check_floating("relu", input=input)
    check_constraint("relu", constraint)
    return carried_out(F.relu, RELU, constraint, input)


def tanh(input: Tensor, *, mult: float = 1.0, constraint: Constraint | None = "gmean") -> Tensor:  # noqa: A002
    """`torch.tanh` of `mult * input` at unit scale: 1.593 forward, 1.467 backward where mult is 1. As `gelu`."""
    return _applied("tanh", "tanh", torch.tanh, input, mult, constraint)


def sigmoid(input: Tensor, *, mult: float = 1.0, constraint: Constraint | None = "gmean") -> Tensor:  # noqa: A002
    """`torch.sigmoid` of `mult * input` at unit scale: 4.801 forward, 4.723 backward where mult is 1. As `gelu`.

    The values keep their mean, one half times the factor: unit scale is of the deviation from it.
    """
    return _applied("sigmoid", "sigmoid", torch.sigmoid, input, mult, constraint)


def silu_glu(
    input: Tensor,  # noqa: A002  (torch's name)
    gate: Tensor,
    *,
    mult: float = 1.0,
    constraint: Constraint | None = "gmean",
) -> Tensor:
    """``input * silu(mult * gate)`` at unit scale, as in SwiGLU: 1.677 forward and for the input, 1.623 for the gate.

    Args:
        input: what passes the gate, floating point.
        gate: of the same shape.
        mult: what multiplies the gate first; above zero.
        constraint: how the three factors become one; None leaves each ideal.

    Raises `ArgumentError`, and `UnsupportedTensorError` for tensors that are not floating point.
    """
    check_floating("silu_glu", input=input, gate=gate)
    if input.shape != gate.shape:
        raise ArgumentError(
            f"silu_glu: expected input and gate of one shape; got {tuple(input.shape)} and {tuple(gate.shape)}. Expand "
            "one of them first, if that is meant."
        )
    check_constraint("silu_glu", constraint)
    mult = checked_mult("silu_glu", mult)

    def plain(x: Tensor, g: Tensor) -> Tensor:
        return x * F.silu(_times(g, mult))

    return carried_out(plain, gated("silu", mult), constraint, input, gate)


def _applied(
    operation: str, name: str, function: Callable[[Tensor], Tensor], x: Tensor, mult: float,
    constraint: Constraint | None,
) -> Tensor:  # fmt: skip
    check_floating(operation, input=x)
    check_constraint(operation, constraint)
    mult = checked_mult(operation, mult)

    def plain(x: Tensor) -> Tensor:
        return function(_times(x, mult))

    return carried_out(plain, nonlinear(name, mult), constraint, x)


def _times(x: Tensor, mult: float) -> Tensor:
    return x if mult == 1 else x * mult
