"""The norm of all gradients together, in FP32 whatever they are kept in, and clipping by it.

An FP16 gradient's norm overflows in FP16 although no value does, and BF16 adds up badly; so squares are added in FP32.
Nothing here waits for a device.
"""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.precision.distributed import is_sharded

_TINY = 1e-6  # as torch.nn.utils.clip_grad_norm_: the bound is met from below


def gradients_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """The gradients that the optimizers will read."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [p.grad for group in groups for p in group["params"] if p.grad is not None]


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm over all gradients, as FP32 of no dimension on the first one's device; 0 where there are none."""
    if not gradients:
        return torch.zeros(())
    place = gradients[0].device
    plain = [_summed(g) for g in gradients if not is_sharded(g)]
    sharded = [g for g in gradients if is_sharded(g)]
    norms: list[Tensor] = [_norm(g, dtype=torch.float32).to(place) for g in plain]
    norms += [_sharded_norm(found).to(place) for found in _by_mesh(sharded)]
    return _norm(torch.stack(norms))


def clip(gradients: Sequence[Tensor], norm: Tensor, bound: float) -> None:
    """Multiplies the gradients in place so that their norm is at most the bound; a non-finite norm spoils them."""
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
    """The values of a gradient; those of a sparse one with equal indices added up."""
    return g.coalesce()._values() if g.is_sparse else g  # noqa: SLF001


def _by_mesh(sharded: Sequence[Tensor]) -> list[list[Any]]:
    found: dict[Any, list[Any]] = {}
    for g in sharded:
        found.setdefault(cast("Any", g).device_mesh, []).append(g)
    return list(found.values())


def _sharded_norm(gradients: Sequence[Any]) -> Tensor:
    """One reduction for all gradients of a mesh."""
    norms = [_norm(g if g.dtype == torch.float32 else g.float()) for g in gradients]
    total = _norm(torch.stack(norms))
    return total.full_tensor()
