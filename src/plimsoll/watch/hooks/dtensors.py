"""Placements of DTensors: which part of a whole a plain tensor is."""

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

_MADE_PLAIN = "_ToTorchTensorBackward"
_MADE_SHARDED = "_FromTorchTensorBackward"
_REDUCING = frozenset({_MADE_SHARDED, "RedistributeBackward"})

Take = Callable[[Tensor], None]


# A module that `parallelize_module` distributed gives out the local tensor of a DTensor; the node of the autograd graph
# that made it plain knows the placements still, so that its values count as those of the DTensor (`behind`).
def behind(x: Tensor) -> Tensor:
    """Return the DTensor whose local part a plain tensor is, or the tensor itself."""
    spec = _spec_behind(x)
    return x if spec is None else _sharded(x.detach(), spec)


# The gradient of a replicated DTensor may come as partial sums, which no rank can read as a number. It is reduced by
# the next node on the way back, the one that made the tensor a DTensor or redistributed it, and read after that
# (`reading`).
def reading(x: Tensor, take: Take) -> Take:
    """Return a gradient hook that calls `take` as soon as the gradient can be read."""
    spec = _spec_behind(x)
    if spec is not None:
        return lambda g: take(_sharded(g, spec))
    node = x.grad_fn
    if not hasattr(x, "placements") or node is None or node.name() not in _REDUCING:
        return take
    waiting: list[bool] = []

    def look(g: Tensor) -> None:
        if _is_partial(g):
            waiting.append(True)
        else:
            take(g)

    def after(grads: tuple[Tensor | None, ...], _: object) -> None:
        if waiting and grads and grads[0] is not None:
            waiting.clear()
            whole = node.name() == _MADE_SHARDED
            take(_sharded(grads[0], cast("Any", x)._spec) if whole else grads[0])  # noqa: SLF001

    node.register_hook(after)
    return look


def _spec_behind(x: Tensor) -> Any:
    node = x.grad_fn
    return getattr(node, "dtensor_spec", None) if node is not None and node.name() == _MADE_PLAIN else None


def _is_partial(g: Tensor) -> bool:
    return any(placement.is_partial() for placement in getattr(g, "placements", ()))


def _sharded(local: Tensor, spec: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    if isinstance(local, DTensor):
        return local
    return cast("Any", DTensor)(local, spec, requires_grad=False)
