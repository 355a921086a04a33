"""What the modules share: how parameters are drawn, what their `repr` adds, and the refusal of working in place."""

import torch
from torch import Tensor

from plimsoll.errors import ArgumentError


def draw_unit(weight: Tensor, bias: Tensor | None = None) -> None:
    """The weight becomes normal with unit variance, the bias zero."""
    with torch.no_grad():
        weight.normal_()
        if bias is not None:
            bias.zero_()


def own_settings(**settings: object) -> str:
    """``, name=value`` for each one that is not None: what a module's `extra_repr` adds to torch's."""
    return "".join(f", {name}={value!r}" for name, value in settings.items() if value is not None)


def check_mult(operation: str, mult: object) -> None:
    """Refuses what cannot multiply the input of a non-linearity."""
    if isinstance(mult, bool) or not isinstance(mult, (int, float)) or not 0 < mult < float("inf"):
        raise ArgumentError(
            f"{operation}: expected mult to be a finite number above 0; got {mult!r} ({type(mult).__name__}). 1 leaves "
            "the input as it is."
        )
