"""Functions of one number at unit scale: the factors of GELU and the like are integrals (`_nonlinear`)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.errors import ArgumentError
from plimsoll.unit._constraints import Constraint, check_constraint, constrained
from plimsoll.unit._formulas import Factors
from plimsoll.unit._nonlinear import nonlinear
from plimsoll.unit._scaled import check_floating, multiplied


def gelu(
    input: Tensor,  # noqa: A002  (torch's name)
    approximate: str = "none",
    *,
    mult: float = 1.0,
    constraint: Constraint | None = "gmean",
) -> Tensor:
    """`torch.nn.functional.gelu` of `mult * input` at unit scale: 1.701 forward and 1.481 backward where mult is 1.

    Args:
        input: floating point.
        approximate: "none" or "tanh", as torch's.
        mult: what multiplies the input first; above zero. Small, the function is nearly linear; large, nearly ReLU.
        constraint: how the two factors become one; None leaves each ideal.

    Raises `ArgumentError`, and `UnsupportedTensorError` for a tensor that is not floating point.
    """
    if approximate not in ("none", "tanh"):
        raise ArgumentError(f"gelu: expected approximate to be 'none' or 'tanh'; got {approximate!r}. Take 'none'.")
    check("gelu", input, mult, constraint)
    alpha, x = _prepared("gelu" if approximate == "none" else "gelu_tanh", input, mult, constraint)
    return multiplied(F.gelu(x, approximate=approximate), alpha, 1.0)


def silu(input: Tensor, *, mult: float = 1.0, constraint: Constraint | None = "gmean") -> Tensor:  # noqa: A002
    """`torch.nn.functional.silu` of `mult * input` at unit scale. Arguments and exceptions are those of `gelu`."""
    check("silu", input, mult, constraint)
    alpha, x = _prepared("silu", input, mult, constraint)
    return multiplied(F.silu(x), alpha, 1.0)


def relu(input: Tensor, *, constraint: Constraint | None = "gmean") -> Tensor:  # noqa: A002
    """`torch.nn.functional.relu` at unit scale: sqrt(2 / (1 - 1/pi)) forward and sqrt(2) backward, whatever multiplies it."""
    check("relu", input, 1.0, constraint)
    alpha, x = _prepared("relu", input, 1.0, constraint)
    return multiplied(F.relu(x), alpha, 1.0)


def tanh(input: Tensor, *, mult: float = 1.0, constraint: Constraint | None = "gmean") -> Tensor:  # noqa: A002
    """`torch.tanh` of `mult * input` at unit scale: 1.593 forward, 1.467 backward where mult is 1. As `gelu`."""
    check("tanh", input, mult, constraint)
    alpha, x = _prepared("tanh", input, mult, constraint)
    return multiplied(torch.tanh(x), alpha, 1.0)


def sigmoid(input: Tensor, *, mult: float = 1.0, constraint: Constraint | None = "gmean") -> Tensor:  # noqa: A002
    """`torch.sigmoid` of `mult * input` at unit scale: 4.802 forward, 4.722 backward where mult is 1. As `gelu`."""
    check("sigmoid", input, mult, constraint)
    alpha, x = _prepared("sigmoid", input, mult, constraint)
    return multiplied(torch.sigmoid(x), alpha, 1.0)


def check(operation: str, x: Tensor, mult: float, constraint: Constraint | None) -> None:
    """What all of these refuse."""
    check_floating(operation, input=x)
    check_constraint(operation, constraint)
    check_mult(operation, mult)


def check_mult(operation: str, mult: Any) -> None:
    """Refuses what is no positive number."""
    if isinstance(mult, bool) or not isinstance(mult, int | float) or not 0 < mult < float("inf"):
        raise ArgumentError(
            f"{operation}: expected mult to be a number above zero; got {mult!r} ({type(mult).__name__}). 1.0 leaves "
            "the input as it is."
        )


_UNIT = {name: nonlinear(name) for name in ("gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "relu")}


@torch.compiler.assume_constant_result
def _factors(name: str, mult: float) -> Factors:
    """Looked up while compiling, never inside what is compiled."""
    return nonlinear(name, mult)


def _prepared(name: str, x: Tensor, mult: float, constraint: Constraint | None) -> tuple[float, Tensor]:
    ideal = _UNIT[name] if mult == 1 else _factors(name, mult)
    alpha, beta = constrained(constraint, ideal.output, *ideal.inputs)
    x = multiplied(x, 1.0, beta)
    return alpha, x if mult == 1 else x * mult
