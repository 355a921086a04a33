"""Exponents of gradients: the tag on a tensor, and the function that changes the exponent between two uses.

The *exponent* of a tensor is k where its gradient arrives multiplied by ``scale * 2**k``. It is known when the tensor
is made, and a mark on the tensor remembers it. Where an operation works at another exponent than its input has, the
input passes through a `Shift`: nothing forward, a power of two backward. Any choice of exponents gives the same
gradients in exact arithmetic; they only decide what a narrow format can hold on the way.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from plimsoll.errors import StateError
from plimsoll.kernels.dtypes import SIXTEEN_BIT

OUTSIDE = -1  # in the place of a unit's number: code that belongs to none
_MARK = "_plimsoll_exponent"


class ScaleTag(NamedTuple):
    """Exponent and origin of a tensor that requires a gradient."""

    exponent: int
    unit: int  # whose exponent it is, or OUTSIDE
    derived: bool  # made of parameters only: it takes part at whatever exponent the activations have
    version: int  # of the tensor when it was marked: what has been written since invalidates the mark


class ScaleChange(NamedTuple):
    """Change of a gradient between a use of a tensor, at `exponent`, and the tensor itself."""

    exponent: int
    shift: int  # the gradient is multiplied by 2**shift
    unit: int = OUTSIDE
    widen: bool = False  # in float32: it goes to a parameter
    tap: Callable[[Tensor], None] | None = None  # sees the gradient as it arrives


class Shift(torch.autograd.Function):
    """The same tensor, whose gradient is multiplied by a power of two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, edge: ScaleChange) -> Tensor:
        """Passes the values through."""
        ctx.edge = edge
        return x.view_as(x)  # a view, so that torch refuses a write that would go past it

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Multiplies the gradient by the edge's power of two."""
        return _pulled(ctx.edge, grad_outputs[0]), None


class OutputShift(Shift):
    """`Shift` for what a model returns: it may be written to, as what it stands for might have been."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, edge: ScaleChange) -> Tensor:
        """Passes the values on, and no gradient."""
        ctx.edge = edge
        return x.detach()


def mark(x: Tensor, exponent: int, unit: int = OUTSIDE, *, derived: bool = False) -> None:
    """Remembers the exponent of a tensor that some operation made."""
    setattr(x, _MARK, (exponent, unit, derived, _version(x)))  # plain values: tensors pickle with their attributes


def marked(x: Tensor) -> ScaleTag | None:
    """The mark, if there is one that still holds."""
    found = getattr(x, _MARK, None)
    return ScaleTag(*found) if found is not None and found[3] == _version(x) else None


def _version(x: Tensor) -> int:
    return cast("Any", x)._version  # noqa: SLF001  (torch has no public name for it)


def edge_of(node: object) -> ScaleChange | None:
    """The edge, if the autograd node is one of a `Shift`."""
    edge = getattr(node, "edge", None)
    return edge if isinstance(edge, ScaleChange) else None


def _pulled(edge: ScaleChange, g: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        raise StateError(
            "LayerScaler: expected a backward without create_graph=True; got one through a model with layer scales, "
            "whose second derivatives would carry the wrong ones. Run the forward of a gradient penalty under `with "
            "scaler.suspended():`."
        )
    if edge.tap is not None:
        edge.tap(g)
    if edge.widen and g.dtype in SIXTEEN_BIT:
        wide = g.float()
        return wide.mul_(math.ldexp(1.0, edge.shift)) if edge.shift else wide
    # The factor is a float32 or float64 in the kernel whatever g's dtype, so the product is rounded once.
    return g * math.ldexp(1.0, edge.shift) if edge.shift else g


def shifted(x: Tensor, edge: ScaleChange) -> Tensor:
    """The tensor as a use at the edge's exponent sees it."""
    # Past `Function.apply`, which looks for torch.func transforms (`forward_mode` has) and is patched in the forward.
    past: Any = super(torch.autograd.Function, Shift)
    return cast("Tensor", past.apply(x, edge))


def behind(x: Tensor) -> dict[int, int]:
    """The exponents found behind a tensor, each with a unit that has it; 0 for a leaf without a `Shift` between."""
    found: dict[int, int] = {}
    for edge in _nearest(x.grad_fn):
        found.setdefault(edge.exponent if edge else 0, edge.unit if edge else OUTSIDE)
    return found


def _nearest(start: Any) -> Iterator[ScaleChange | None]:
    """The nearest edges behind a node; None for each leaf that is reached without one."""
    pending, seen = [start], {start}
    while pending:
        node = pending.pop()
        edge = edge_of(node)
        if edge is not None or hasattr(node, "variable"):
            yield edge
            continue
        for following, _ in getattr(node, "next_functions", ()):
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
