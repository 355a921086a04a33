"""Two products with an activation between them, with factors of the chain."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from plimsoll.errors import ArgumentError
from plimsoll.unit.factors import formulas
from plimsoll.unit.factors.formulas import Constraint, Factors, check_constraint, constrained
from plimsoll.unit.nn.activations import GELU, Dropout, ReLU, Sigmoid, SiLU, Tanh
from plimsoll.unit.nn.linear import Linear

_BY_NAME: dict[str, Any] = {"relu": ReLU, "gelu": GELU, "silu": SiLU, "tanh": Tanh, "sigmoid": Sigmoid}
_BY_FUNCTION: dict[Any, Any] = {
    F.relu: ReLU,
    torch.relu: ReLU,
    F.gelu: GELU,
    F.silu: SiLU,
    F.tanh: Tanh,
    torch.tanh: Tanh,
    torch.sigmoid: Sigmoid,
}
_UNIT = tuple(_BY_NAME.values())


class MLP(nn.Module):
    """Linear, activation, dropout, Linear at unit scale.

    With a constraint, the chain's forward and backward factors have the same product. Both layers keep their ideal
    factors if `out_features` is `in_features`. Otherwise the last layer compensates for the difference.

    Args:
        in_features: Width of the input.
        hidden_features: Width between the layers. Default: four times the input's.
        out_features: Width of the output. Default: the input's.
        activation: A name ("gelu", "relu", "silu", "tanh", "sigmoid"), torch's function, or a module of `unit.nn`.
            Default: `"gelu"`.
        dropout: Probability of dropout after the activation. Default: 0.
        bias: Whether the layers have one. Default: True.
        device: Device of the parameters. Default: torch's.
        dtype: Dtype of the parameters. Default: torch's.
        constraint: How the product of the forward factors and that of the backward ones become one. None leaves each
            factor ideal. Default: `"gmean"`.

    Raises:
        ArgumentError: `activation` or `constraint` is unknown.

    >>> MLP(64)(torch.randn(8, 64)).shape
    torch.Size([8, 64])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        *,
        activation: object = "gelu",
        dropout: float = 0.0,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        constraint: Constraint | None = "gmean",
    ) -> None:
        super().__init__()
        hidden = 4 * in_features if hidden_features is None else hidden_features
        out = in_features if out_features is None else out_features
        self.linear1, self.linear2 = chained(in_features, hidden, out, bias, constraint, device, dtype)
        self.activation = activation_from("MLP", activation, constraint)
        self.dropout = Dropout(dropout)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """Return the second product of the activation of the first."""
        return self.linear2(self.dropout(self.activation(self.linear1(input))))


# On a residual branch every operation has another path around it. But no tensor inside the branch is used elsewhere. So
# it is enough that the product of all forward factors along the branch equals that of the backward ones. If a chain
# ends as wide as it starts, both products keep their ideal factors, since those of one mirror those of the other.
def chained(
    width: int,
    hidden: int,
    out: int,
    bias: bool,
    constraint: Constraint | None,
    device: Any = None,
    dtype: torch.dtype | None = None,
) -> tuple[Linear, Linear]:
    """Return two layers whose forward and backward factors have one product."""
    check_constraint("MLP", constraint)
    up, down = formulas.linear(width, hidden), formulas.linear(hidden, out)
    forward, backward = constrained(constraint, up.output * down.output, up.inputs[0] * down.inputs[0])
    down = Factors(output=forward / up.output, inputs=(backward / up.inputs[0],))
    settings: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype, "constraint": constraint}
    return Linear(width, hidden, factors=up, **settings), Linear(hidden, out, factors=down, **settings)


def activation_from(operation: str, activation: object, constraint: Constraint | None) -> nn.Module:
    """Return the unit-scaled module of an activation."""
    if isinstance(activation, _UNIT):
        return cast("nn.Module", activation)
    if isinstance(activation, str) and activation in _BY_NAME:
        return _BY_NAME[activation](constraint=constraint)
    if callable(activation) and activation in _BY_FUNCTION:
        return _BY_FUNCTION[activation](constraint=constraint)
    raise ArgumentError(
        f"{operation}: expected activation to be one of {', '.join(_BY_NAME)}, torch's function of one, or a module of "
        f"plimsoll.unit.nn; got {activation!r}. The factors of another function are not known: measure them in a "
        "custom module."
    )
