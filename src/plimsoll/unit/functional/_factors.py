"""The factors that a function is to use: its own ideal ones under a constraint, or those that it is given."""

from plimsoll.errors import ArgumentError
from plimsoll.unit._constraints import Constraint, check_constraint, constrained
from plimsoll.unit._formulas import Factors


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
