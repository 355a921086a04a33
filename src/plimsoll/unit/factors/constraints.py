"""Constraints: where the forward factor and those of the gradients must be one number.

An edge of the graph that is no cut edge has other ways around it. If a gradient were multiplied by another factor than
the value on such an edge, the ways would add up in wrong proportions: a wrong gradient, not a scaled one. There the
factors of an operation become one.
"""

import math
from typing import Literal, cast, get_args

from plimsoll.errors import ArgumentError

Constraint = Literal["gmean", "hmean", "amean", "to_output_scale", "to_grad_input_scale"]
_NAMES: tuple[str, ...] = get_args(Constraint)


def constrained(constraint: Constraint | None, output: float, *inputs: float) -> tuple[float, ...]:
    """The factors ``(output, *inputs)`` under a constraint: all of them one number, or with None as they are.

    Args:
        constraint: "gmean", "hmean", "amean": the geometric, harmonic or arithmetic mean of all of them;
            "to_output_scale": the output's; "to_grad_input_scale": that of the first input's gradient.
        output: the ideal factor forward, above zero.
        inputs: those of the inputs' gradients.

    Raises `ArgumentError` for another name.

    >>> constrained("gmean", 0.25, 1.0), constrained(None, 0.25, 1.0), constrained("to_output_scale", 0.25, 1.0)
    ((0.5, 0.5), (0.25, 1.0), (0.25, 0.25))
    """
    check_constraint("constrained", constraint)
    factors = (output, *inputs)
    if constraint is None or not inputs:
        return factors
    return (_shared(constraint, factors),) * len(factors)


def check_constraint(operation: str, constraint: object) -> None:
    """Refuses a name that is none."""
    if constraint is not None and constraint not in _NAMES:
        raise ArgumentError(
            f"{operation}: expected constraint to be None or one of {', '.join(_NAMES)}; got {constraint!r}. Take "
            "'gmean' where the operation has other ways around it, None where it has none."
        )


def _shared(constraint: Constraint, factors: tuple[float, ...]) -> float:
    if constraint == "to_output_scale":
        return factors[0]
    if constraint == "to_grad_input_scale":
        return factors[1]
    if constraint == "hmean":
        return len(factors) / sum(1 / factor for factor in factors)
    if constraint == "amean":
        return sum(factors) / len(factors)
    # As products and powers, for factors that a compiler keeps as symbols.
    return cast("float", math.prod(factors) ** (1 / len(factors)))
