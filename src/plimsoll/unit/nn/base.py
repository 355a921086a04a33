"""Bases of the modules: settings of unit scaling, weights of unit variance."""

from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.unit.arguments import check_mult
from plimsoll.unit.formulas import Constraint, Factors, check_constraint


class Constrained(nn.Module):
    """Base of modules with a constraint, placed before torch's module."""

    constraint: Constraint | None

    def _set_constraint(self, constraint: Constraint | None) -> None:
        check_constraint(type(self).__name__, constraint)
        self.constraint = constraint

    def extra_repr(self) -> str:
        """Return torch's text, then the settings of unit scaling that are not None."""
        settings = {name: getattr(self, name, None) for name in ("mult", "constraint", "factors")}
        texts = [f"{name}={value!r}" for name, value in settings.items() if value is not None]
        return ", ".join(text for text in (super().extra_repr(), *texts) if text)


class Multiplied(Constrained):
    """Base of modules that multiply the input of their non-linearity."""

    mult: float

    def _set_mult(self, mult: float, constraint: Constraint | None) -> None:
        check_mult(type(self).__name__, mult)
        self.mult = mult
        self._set_constraint(constraint)


class Weighted(Constrained):
    """Base of modules with a weight of unit variance, and with custom factors."""

    weight: Any
    bias: Any
    factors: Factors | None

    def _set_factors(self, constraint: Constraint | None, factors: Factors | None) -> None:
        self._set_constraint(constraint)
        self.factors = factors

    def reset_parameters(self) -> None:
        """Draw the weight again: normal, with unit variance. The bias becomes zero."""
        draw_unit(self.weight, self.bias)


def draw_unit(weight: Tensor, bias: Tensor | None = None) -> None:
    """Draw a normal weight with unit variance, and set the bias to zero."""
    with torch.no_grad():
        weight.normal_()
        if bias is not None:
            bias.zero_()
