"""Matrix products with a weight of unit variance."""

from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.unit import functional as U  # noqa: N812  (as F for torch's)
from plimsoll.unit.factors.constraints import Constraint, check_constraint
from plimsoll.unit.factors.formulas import Factors
from plimsoll.unit.nn.initialization import draw_unit, own_settings
from plimsoll.unit.optim.parameter_kinds import tag


class Linear(nn.Linear):
    """`torch.nn.Linear` at unit scale: the weight is drawn with unit variance, a factor each way stands beside it.

    Arguments, attributes and the state are torch's. The weight's kind is "weight", the bias's "bias".

    Args:
        in_features: size of an input's last dimension.
        out_features: size of an output's.
        bias: whether a bias is added; it begins at zero.
        device: where the parameters are made.
        dtype: theirs.
        constraint: how the factors of output and input's gradient become one; see `unit.functional.linear`.
        factors: factors of one's own, in place of the ideal ones and the constraint.

    Raises `ArgumentError`.

    >>> layer = Linear(1024, 64, constraint=None)
    >>> round(layer(torch.randn(64, 1024)).std().item(), 1)
    1.0
    """

    constraint: Constraint | None
    factors: Factors | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        constraint: Constraint | None = "gmean",
        factors: Factors | None = None,
    ) -> None:
        check_constraint(type(self).__name__, constraint)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.constraint, self.factors = constraint, factors
        tag(self, weight="weight", bias="bias")

    def reset_parameters(self) -> None:
        """Draws the weight anew: normal, of unit variance; the bias becomes zero."""
        draw_unit(self.weight, self.bias)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """The product at unit scale, see `unit.functional.linear`."""
        return U.linear(input, self.weight, self.bias, constraint=self.constraint, factors=self.factors)

    def extra_repr(self) -> str:
        """torch's, and the factors' origin."""
        return super().extra_repr() + own_settings(constraint=self.constraint, factors=self.factors)


class LinearReadout(Linear):
    """The last product of a model: `Linear` whose outputs are fan_in^-1 times the sums, so that they start small.

    That is u-muP's rule for outputs: at any width the first step moves them alike. Behind it comes the loss alone, a
    cut edge, hence no constraint by default. The weight's kind is "readout". Arguments are those of `Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        constraint: Constraint | None = None,
        factors: Factors | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, constraint=constraint, factors=factors)
        tag(self, weight="readout")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """The product, see `unit.functional.linear_readout`."""
        return U.linear_readout(input, self.weight, self.bias, constraint=self.constraint, factors=self.factors)
