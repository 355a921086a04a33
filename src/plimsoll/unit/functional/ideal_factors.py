"""Factors of a function, ideal or custom, and the checks of its arguments."""

from collections.abc import Callable

import torch
from torch import Tensor

from plimsoll.errors import ArgumentError
from plimsoll.unit import formulas
from plimsoll.unit.arguments import check_floating
from plimsoll.unit.formulas import Attention, Constraint, Curve, Factors, check_constraint, constrained
from plimsoll.unit.scaled_multiply import multiplied


def apply_checked(
    operation: str,
    function: Callable[..., Tensor],
    ideal: Factors,
    constraint: Constraint | None,
    *settings: object,
    **inputs: Tensor,
) -> Tensor:
    """Run a function of tensors between its factors, after common checks.

    Torch's function receives the inputs, then the settings, all by position. Inputs have their public names, for
    errors.
    """
    check_floating(operation, **inputs)
    check_constraint(operation, constraint)
    return apply_factors(function, ideal, constraint, *inputs.values(), settings=settings)


def apply_factors(
    function: Callable[..., Tensor],
    ideal: Factors,
    constraint: Constraint | None,
    *inputs: Tensor,
    settings: tuple[object, ...] = (),
) -> Tensor:
    """Run a function of tensors between its factors."""
    output, *gradients = constrained(constraint, ideal.output, *ideal.inputs)
    if constraint is not None:
        # One factor for all directions: an ordinary product, which every order of differentiation handles exactly.
        return multiplied(function(*inputs, *settings), output, output)
    scaled = (multiplied(x, 1.0, factor) for x, factor in zip(inputs, gradients, strict=True))
    return multiplied(function(*scaled, *settings), output, 1.0)


def resolve_factors(operation: str, constraint: Constraint | None, custom: Factors | None, ideal: Factors) -> Factors:
    """Return the custom factors, or the ideal ones under the constraint, checked."""
    check_constraint(operation, constraint)
    if custom is not None:
        check_factors(operation, custom, inputs=len(ideal.inputs))
        return custom
    output, *inputs = constrained(constraint, ideal.output, *ideal.inputs)
    return Factors(output=output, inputs=tuple(inputs), weight=ideal.weight)


def check_factors(operation: str, factors: object, *, inputs: int) -> None:
    """Raise an error unless `factors` is a `Factors` for this number of inputs."""
    if not isinstance(factors, Factors) or len(factors.inputs) != inputs:
        raise ArgumentError(
            f"{operation}: expected factors to be Factors with {inputs} input(s); got {factors!r}. Leave it out for "
            "the ideal ones."
        )


def times(x: Tensor, mult: float) -> Tensor:
    """Return `mult * x`, or `x` itself if the multiplier is 1."""
    return x if mult == 1 else x * mult


# The integrals behind some factors are NumPy's, computed once for each multiplier. They run while a compiler traces,
# never inside the compiled code, so the code contains their results as constants.
@torch.compiler.assume_constant_result
def nonlinear(name: str, mult: float) -> Factors:
    """Return the factors of a function of one number."""
    return formulas.nonlinear(name, mult)


@torch.compiler.assume_constant_result
def gated(name: str, mult: float) -> Factors:
    """Return the factors of a product of one number and a function of another."""
    return formulas.gated(name, mult)


@torch.compiler.assume_constant_result
def largest(count: int) -> float:
    """Return the standard deviation of the largest of so many normal values."""
    return formulas.largest(count)


@torch.compiler.assume_constant_result
def softmax_curves(mult: float) -> tuple[Curve, Curve, Curve]:
    """Return the curves of a softmax."""
    return formulas.softmax_curves(mult)


@torch.compiler.assume_constant_result
def attention_curves(mult: float, width: int, causal: bool) -> Attention:
    """Return the curves of attention."""
    return formulas.attention_curves(mult, width, causal)
