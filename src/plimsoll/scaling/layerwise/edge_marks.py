"""Exponents of gradients: the tag on a tensor, and the function that changes it.

A tensor has the *exponent* k if its gradient arrives multiplied by ``scale * 2**k``. The exponent is known when the
tensor is created, and a tag on the tensor records it. If an operation works at another exponent than its input has, the
input passes through a `Shift`, which does nothing forward and multiplies by a power of two backward. Any exponents give
the same gradients in exact arithmetic. They only decide which values fit into a narrow format on the way.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from plimsoll.errors import StateError
from plimsoll.kernels.dtypes import SIXTEEN_BIT

OUTSIDE = -1  # number of a unit for code that belongs to none
_MARK = "_plimsoll_exponent"


class ScaleTag(NamedTuple):
    """Exponent and origin of a tensor that requires a gradient."""

    exponent: int
    unit: int  # unit that has this exponent, or OUTSIDE
    derived: bool  # computed from parameters only, so that it can take any exponent of activations
    version: int  # of the tensor when it was tagged: a later write invalidates the tag


class ScaleChange(NamedTuple):
    """Change of a gradient between a tensor and a use of it at `exponent`."""

    exponent: int
    shift: int  # the gradient is multiplied by 2**shift
    unit: int = OUTSIDE
    widen: bool = False  # to float32, for the gradient of a parameter
    tap: Callable[[Tensor], None] | None = None  # receives the gradient as it arrives


class Shift(torch.autograd.Function):
    """Identity whose gradient is multiplied by a power of two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, edge: ScaleChange) -> Tensor:
        """Return a view of the tensor."""
        ctx.edge = edge
        return x.view_as(x)  # a view, so that torch refuses a write that would bypass it

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Multiply the gradient by the edge's power of two."""
        return _pulled(ctx.edge, grad_outputs[0]), None


class OutputShift(Shift):
    """`Shift` for the output of a model, which may be written to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, edge: ScaleChange) -> Tensor:
        """Return the values without their graph."""
        ctx.edge = edge
        return x.detach()


def mark(x: Tensor, exponent: int, unit: int = OUTSIDE, *, derived: bool = False) -> None:
    """Tag a tensor with its exponent."""
    setattr(x, _MARK, (exponent, unit, derived, _version(x)))  # plain values: tensors pickle with their attributes


def marked(x: Tensor) -> ScaleTag | None:
    """Return the tag, if there is a valid one."""
    tag = getattr(x, _MARK, None)
    return ScaleTag(*tag) if tag is not None and tag[3] == _version(x) else None


def _version(x: Tensor) -> int:
    return cast("Any", x)._version  # noqa: SLF001  (torch has no public name for it)


def edge_of(node: object) -> ScaleChange | None:
    """Return the edge of an autograd node, if the node is a `Shift`."""
    edge = getattr(node, "edge", None)
    return edge if isinstance(edge, ScaleChange) else None


def _pulled(edge: ScaleChange, g: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        raise StateError(
            "LayerScaler: expected a backward without create_graph=True; got one through a model with layer scales, "
            "which second derivatives would have wrong. Run the forward of a gradient penalty under `with "
            "scaler.suspended():`."
        )
    if edge.tap is not None:
        edge.tap(g)
    if edge.widen and g.dtype in SIXTEEN_BIT:
        wide = g.float()
        return wide.mul_(math.ldexp(1.0, edge.shift)) if edge.shift else wide
    # The kernel has the factor in float32 or float64 for any dtype of g, so the product is rounded once.
    return g * math.ldexp(1.0, edge.shift) if edge.shift else g


def shifted(x: Tensor, edge: ScaleChange) -> Tensor:
    """Return the tensor for a use at the edge's exponent."""
    # Not by `Function.apply`, which is patched during a forward. It also checks for torch.func transforms, which
    # `forward_mode` has done.
    base: Any = super(torch.autograd.Function, Shift)
    return cast("Tensor", base.apply(x, edge))


def behind(x: Tensor) -> dict[int, int]:
    """Return the exponents in a tensor's graph, each with a unit. A leaf has 0."""
    units: dict[int, int] = {}
    for edge in _nearest(x.grad_fn):
        units.setdefault(edge.exponent if edge else 0, edge.unit if edge else OUTSIDE)
    return units


def _nearest(start: Any) -> Iterator[ScaleChange | None]:
    """Yield the nearest edges behind a node, and None for each leaf before an edge."""
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
