"""The multiplier in front of a non-linearity: what it may be, and the integrals that depend on it.

The integrals are NumPy's, carried out once for every multiplier and kept. A compiler meets their results as constants:
they are taken while it traces, never inside what it compiles. A multiplier that it holds as a symbol becomes a number
with a guard, by `math.copysign`, which no symbol passes.
"""

import math

import torch

from plimsoll.errors import ArgumentError
from plimsoll.unit.factors import nonlinear as _nonlinear, softmax_moments
from plimsoll.unit.factors.formulas import Factors
from plimsoll.unit.factors.softmax_moments import Attention, Curve


def checked_mult(operation: str, mult: float) -> float:
    """`mult` as a number, if it is one above zero."""
    if isinstance(mult, bool) or not isinstance(mult, (int, float, torch.SymFloat)) or not 0 < mult < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"{operation}: expected mult to be a number above zero; got {mult!r} ({type(mult).__name__}). 1.0 leaves "
            "the input as it is."
        )
    return math.copysign(mult, 1.0)


@torch.compiler.assume_constant_result
def nonlinear(name: str, mult: float) -> Factors:
    """The factors of a function of one number."""
    return _nonlinear.nonlinear(name, mult)


@torch.compiler.assume_constant_result
def gated(name: str, mult: float) -> Factors:
    """The factors of a product of one number and a function of another."""
    return _nonlinear.gated(name, mult)


@torch.compiler.assume_constant_result
def largest(count: int) -> float:
    """The standard deviation of the largest of so many."""
    return _nonlinear.largest(count)


@torch.compiler.assume_constant_result
def softmax_curves(mult: float) -> tuple[Curve, Curve, Curve]:
    """The curves of a softmax."""
    return softmax_moments.softmax_curves(mult)


@torch.compiler.assume_constant_result
def attention_curves(mult: float, width: int, causal: bool) -> Attention:
    """The curves of attention."""
    return softmax_moments.attention_curves(mult, width, causal)
