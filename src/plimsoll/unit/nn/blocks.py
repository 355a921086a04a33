"""Blocks of several modules: MLPs, residual branches, and stacks of branches."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, Self, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from plimsoll.checks import integer
from plimsoll.errors import ArgumentError
from plimsoll.unit import (
    formulas,
    functional as U,  # noqa: N812
)
from plimsoll.unit.arguments import check_tau
from plimsoll.unit.formulas import Constraint, Factors, check_constraint, constrained
from plimsoll.unit.nn.functions import GELU, Dropout, ReLU, Sigmoid, SiLU, Tanh
from plimsoll.unit.nn.layers import Linear
from plimsoll.unit.optim.parameter_kinds import tag_depth

# -- two products with an activation between them, with factors of the chain -------------------------------------------

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


# -- residual branches with a weight, and stacks whose weights follow the depth ----------------------------------------


# A branch has the share tau of the variance of the sum, the stream that it is added to has the rest. If every branch
# had the same share, each would shrink all earlier ones. So the shares fall along a stack. All branches count equally,
# and the input of the stack counts as much as one branch of each layer. Before branch i (from 0) of a stack of n
# layers, the stream has `n + i` parts, and the branch is one of `n + i + 1` (u-muP's default rule).
def residual_tau(branch: int, layers: int) -> float:
    """Return the share of a residual branch in a stack of so many layers.

    Args:
        branch: Number of the branch, from 0 over the whole stack.
        layers: Number of layers.

    Raises:
        ArgumentError: A number is out of range.

    >>> [residual_tau(branch, layers=2) for branch in range(2)]
    [0.3333333333333333, 0.25]
    """
    branch = integer("residual_tau", "branch", branch, low=0, remedy="The first one is 0.")
    layers = integer("residual_tau", "layers", layers, low=1, remedy="Count the stack's layers.")
    return 1.0 / (layers + branch + 1)


@runtime_checkable
class Branching(Protocol):
    """Module with residual branches, whose shares `taus` has in running order."""

    taus: list[float]


class Residual(nn.Module):
    """Residual branch: ``sqrt(tau) * branch(x) + sqrt(1 - tau) * x``.

    The branch's weight is applied forward at its end and backward at its start, so that everything inside is at unit
    scale. Each operation inside needs a constraint, since the stream is another path around it.

    Args:
        branch: Module of the branch. Further arguments of a call are passed to it.
        tau: Share of the branch in the variance, between 0 and 1. A `Stack` sets it. Default: 0.5.

    Raises:
        ArgumentError: `tau` is not between 0 and 1.

    >>> import torch
    >>> block = Residual(nn.Identity(), tau=0.36)
    >>> block(torch.ones(1))
    tensor([1.4000])
    """

    def __init__(self, branch: nn.Module, tau: float = 0.5) -> None:
        check_tau("Residual", tau)
        super().__init__()
        self.branch = branch
        self.taus = [tau]

    def forward(self, input: Tensor, *arguments: Any, **keywords: Any) -> Tensor:  # noqa: A002  (torch's name)
        """Return the stream after the branch."""
        branch, skip = U.residual_split(input, self.taus[0])
        return U.residual_add(self.branch(branch, *arguments, **keywords), skip, self.taus[0])

    def extra_repr(self) -> str:
        """Return the share."""
        return f"tau={self.taus[0]:.4g}"


class Stack(nn.Sequential):
    """`torch.nn.Sequential` of residual layers, with depth and shares of branches.

    Layers are `Residual`, the transformer layers, or modules that contain them. The optimizers multiply learning rates
    inside by depth^-1/2.

    >>> stack = Stack(*(Residual(nn.Identity()) for _ in range(3)))
    >>> stack[0].taus, stack[2].taus
    ([0.25], [0.16666666666666666])
    """

    def __init__(self, *layers: Any) -> None:
        super().__init__(*layers)
        spread(self, self)

    def append(self, module: nn.Module) -> Self:
        """Add a layer, and set all shares again."""
        super().append(module)
        return self._spread()

    def insert(self, index: int, module: nn.Module) -> Self:
        """Add a layer at a position, and set all shares again."""
        super().insert(index, module)
        return self._spread()

    def __delitem__(self, idx: slice | int) -> None:
        super().__delitem__(idx)
        self._spread()

    def __setitem__(self, idx: int, module: nn.Module) -> None:
        super().__setitem__(idx, module)
        self._spread()

    def __iadd__(self, other: Iterable[nn.Module]) -> Self:
        super().__iadd__(cast("Any", other))
        return self._spread()

    def __imul__(self, other: int) -> Self:
        super().__imul__(other)
        return self._spread()

    def __getitem__(self, idx: slice | int) -> Any:
        """Return a layer, or several with the shares and the depth that they have in this stack."""
        if not isinstance(idx, slice):
            return super().__getitem__(idx)
        part = nn.Sequential(OrderedDict(list(self._modules.items())[idx]))
        if len(self):
            tag_depth(part, len(self))
        return part

    def _spread(self) -> Self:
        spread(self, self)
        return self


def spread(stack: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Set the shares of all branches in the layers, and tag the stack with its depth."""
    listed = list(layers)
    branches = 0
    for module in (inner for layer in listed for inner in branching(layer)):
        module.taus = [residual_tau(branches + i, len(listed)) for i in range(len(module.taus))]
        branches += len(module.taus)
    if listed:
        tag_depth(stack, len(listed))


def branching(layer: nn.Module) -> Iterator[Branching]:
    """Yield the modules with branches in a layer, which may be the layer itself."""
    modules: Iterator[Any] = layer.modules()
    return (module for module in modules if isinstance(module, Branching))
