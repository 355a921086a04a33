"""The global gradient norm in FP32, and clipping by it.

The norm of FP16 gradients can overflow in FP16 although no value does, and BF16 sums lose digits. Squares are therefore
added in FP32. Nothing here waits for a device.
"""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.precision.levels.distributed import is_sharded

_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_: the result stays just below the bound


def gradients_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """Return the gradients that the optimizers will read."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [p.grad for group in groups for p in group["params"] if p.grad is not None]


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm over all gradients as an FP32 scalar on the first one's device; 0 without gradients."""
    if not gradients:
        return torch.zeros(())
    place = gradients[0].device
    plain = [_summed(g) for g in gradients if not is_sharded(g)]
    sharded = [g for g in gradients if is_sharded(g)]
    norms: list[Tensor] = [_norm(g, dtype=torch.float32).to(place) for g in plain]
    norms += [_sharded_norm(group).to(place) for group in _by_mesh(sharded)]
    return _norm(torch.stack(norms))


def clip(gradients: Sequence[Tensor], norm: Tensor, bound: float) -> None:
    """Scale the gradients in place so that their norm is at most the bound; a non-finite norm makes them NaN."""
    coefficient = (bound / (norm + _TINY)).clamp(max=1.0)
    on = {g.device: coefficient.to(g.device) for g in gradients}
    for g in gradients:
        whole: Any = g
        values = whole.to_local() if is_sharded(g) else g._values() if g.is_sparse else g  # noqa: SLF001
        values.mul_(on[g.device])


def _norm(x: Tensor, dtype: torch.dtype | None = None) -> Any:
    linalg: Any = torch.linalg
    return linalg.vector_norm(x, dtype=dtype)


def _summed(g: Tensor) -> Tensor:
    """Return the values of a gradient; a sparse one's values with equal indices are added."""
    return g.coalesce()._values() if g.is_sparse else g  # noqa: SLF001


def _by_mesh(sharded: Sequence[Tensor]) -> list[list[Any]]:
    by_mesh: dict[Any, list[Any]] = {}
    for g in sharded:
        by_mesh.setdefault(cast("Any", g).device_mesh, []).append(g)
    return list(by_mesh.values())


def _sharded_norm(gradients: Sequence[Any]) -> Tensor:
    """Return the norm with one reduction for all gradients of a mesh."""
    norms = [_norm(g if g.dtype == torch.float32 else g.float()) for g in gradients]
    total = _norm(torch.stack(norms))
    return total.full_tensor()
