"""Residual branches with a weight, and stacks of them whose weights follow the depth.

A branch has the share tau of the variance of the sum, the stream that it is added to the rest. Where every branch had
the same share, each would halve all before it; so the shares fall along a stack. Every branch counts as much as every
other, and what comes into the stack as much as one branch of each layer: before branch i (from 0) of a stack of n
layers the stream holds ``n + i`` parts, and the branch is one of ``n + i + 1`` (that is u-muP's default rule).
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, Self, runtime_checkable

from torch import Tensor, nn

from plimsoll.unit import functional as U  # noqa: N812
from plimsoll.unit.functional.sums import check_tau
from plimsoll.unit.optim.parameter_kinds import tag_depth


def residual_tau(branch: int, layers: int) -> float:
    """The share of a residual branch, counted from 0 over the whole stack, in a stack of so many layers.

    >>> [residual_tau(branch, layers=2) for branch in range(2)]
    [0.3333333333333333, 0.25]
    """
    return 1.0 / (layers + branch + 1)


@runtime_checkable
class Branching(Protocol):
    """A module with residual branches of its own; `taus` has the share of each, in the order in which they run."""

    taus: list[float]


class Residual(nn.Module):
    """``sqrt(tau) * branch(x) + sqrt(1 - tau) * x``: a branch around which the stream goes.

    The branch's weight is applied forward at its end and backward at its start, so that inside it everything is at unit
    scale. Its operations must share a factor each (a constraint), since the stream is another way round them.

    Args:
        branch: the module; further arguments of a call go to it.
        tau: its share of the variance; a `Stack` sets it.

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
        """The stream after the branch."""
        branch, skip = U.residual_split(input, self.taus[0])
        return U.residual_add(self.branch(branch, *arguments, **keywords), skip, self.taus[0])

    def extra_repr(self) -> str:
        """The share."""
        return f"tau={self.taus[0]:.4g}"


class Stack(nn.Sequential):
    """`torch.nn.Sequential` of residual layers: sets the shares of all branches in it, and the depth.

    Layers are `Residual`, the transformer layers, or modules that contain some. The optimizers multiply learning rates
    inside by depth^-1/2.

    >>> stack = Stack(*(Residual(nn.Identity()) for _ in range(3)))
    >>> stack[0].taus, stack[2].taus
    ([0.25], [0.16666666666666666])
    """

    def __init__(self, *layers: Any) -> None:
        super().__init__(*layers)
        spread(self, self)

    def append(self, module: nn.Module) -> Self:
        """Adds a layer; all shares are set anew."""
        super().append(module)
        return self._spread()

    def insert(self, index: int, module: nn.Module) -> Self:
        """Adds a layer at a place; all shares are set anew."""
        super().insert(index, module)
        return self._spread()

    def __delitem__(self, idx: slice | int) -> None:
        super().__delitem__(idx)
        self._spread()

    def _spread(self) -> Self:
        spread(self, self)
        return self


def spread(stack: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Sets the shares of all branches in the layers, and notes the depth at the stack."""
    listed = list(layers)
    branches = 0
    for module in (found for layer in listed for found in branching(layer)):
        module.taus = [residual_tau(branches + i, len(listed)) for i in range(len(module.taus))]
        branches += len(module.taus)
    if listed:
        tag_depth(stack, len(listed))


def branching(layer: nn.Module) -> Iterator[Branching]:
    """The modules with branches in a layer, itself among them."""
    modules: Iterator[Any] = layer.modules()
    return (module for module in modules if isinstance(module, Branching))
