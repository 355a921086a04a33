"""Residual branches with a weight, and stacks whose weights follow the depth."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, Self, runtime_checkable

from torch import Tensor, nn

from plimsoll.unit import functional as U  # noqa: N812
from plimsoll.unit.arguments import check_tau
from plimsoll.unit.optim.parameter_kinds import tag_depth


# A branch has the share tau of the variance of the sum, the stream that it is added to has the rest. If every branch
# had the same share, each would shrink all earlier ones. So the shares fall along a stack. All branches count equally,
# and the input of the stack counts as much as one branch of each layer. Before branch i (from 0) of a stack of n
# layers, the stream has `n + i` parts, and the branch is one of `n + i + 1` (u-muP's default rule).
def residual_tau(branch: int, layers: int) -> float:
    """Return the share of a residual branch in a stack of so many layers.

    Args:
        branch: Number of the branch, from 0 over the whole stack.
        layers: Number of layers.

    >>> [residual_tau(branch, layers=2) for branch in range(2)]
    [0.3333333333333333, 0.25]
    """
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
