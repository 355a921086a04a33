"""The factors that a function is to use: its own ideal ones under a constraint, or those that it is given."""

from collections.abc import Callable

from torch import Tensor

from plimsoll.errors import ArgumentError
from plimsoll.unit.factors.constraints import Constraint, check_constraint, constrained
from plimsoll.unit.factors.formulas import Factors
from plimsoll.unit.scaled_multiply import multiplied


def carried_out(
    function: Callable[..., Tensor], ideal: Factors, constraint: Constraint | None, *inputs: Tensor
) -> Tensor:
    """The function between its factors; where a constraint makes them one, times it: exact in every derivative."""
    output, *gradients = constrained(constraint, ideal.output, *ideal.inputs)
    if constraint is not None:
        return multiplied(function(*inputs), output, output)
    scaled = (multiplied(x, 1.0, factor) for x, factor in zip(inputs, gradients, strict=True))
    return multiplied(function(*scaled), output, 1.0)


def resolved(operation: str, constraint: Constraint | None, given: Factors | None, ideal: Factors) -> Factors:
    """The factors to use: those given, else the ideal ones under the constraint; both checked."""
    check_constraint(operation, constraint)
    if given is not None:
        check_factors(operation, given, inputs=len(ideal.inputs))
        return given
    output, *inputs = constrained(constraint, ideal.output, *ideal.inputs)
    return Factors(output=output, inputs=tuple(inputs), weight=ideal.weight)


def check_factors(operation: str, factors: object, *, inputs: int) -> None:
    """Refuses what is no record of factors, or one for another number of inputs."""
    if not isinstance(factors, Factors) or len(factors.inputs) != inputs:
        raise ArgumentError(
            f"{operation}: expected factors to be Factors with {inputs} input(s); got {factors!r}. Leave it out for "
            "the ideal ones."
        )
