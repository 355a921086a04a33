"""Dropout at unit scale."""

from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.errors import ArgumentError
from plimsoll.unit.factors import formulas
from plimsoll.unit.factors.constraints import Constraint, check_constraint
from plimsoll.unit.scaled_multiply import check_floating, multiplied


def dropout(
    input: Tensor,  # noqa: A002  (torch's name)
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    constraint: Constraint | None = "gmean",
) -> Tensor:
    """`torch.nn.functional.dropout` at unit scale: sqrt(1 - p) both ways, and nothing where it is not training.

    Both ideal factors are one number, so every constraint gives the same. `inplace` must be False.

    Raises `ArgumentError`, and `UnsupportedTensorError` for a tensor that is not floating point.
    """
    check_floating("dropout", input=input)
    check_constraint("dropout", constraint)
    checked_p("dropout", p)
    refuse_inplace("dropout", inplace)
    factor = formulas.dropout(p) if training else 1.0
    return multiplied(F.dropout(input, p, training), factor, factor)


def refuse_inplace(operation: str, inplace: bool) -> None:
    """Refuses to write over the input: its values are not at the scale of the result."""
    if inplace:
        raise ArgumentError(
            f"{operation}: expected inplace=False, since the result has another scale than its input; got "
            f"inplace={inplace!r}. Leave it out."
        )


def checked_p(operation: str, p: float) -> float:
    """`p`, if it is a probability."""
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p <= 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"{operation}: expected the share to drop between 0 and 1; got {p!r} ({type(p).__name__}). "
            "0.1 drops a tenth."
        )
    return p
