"""The norm of gradients of any dtype, as float32 gradients would have it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def total_norm(grads: Sequence[Tensor], norm_type: float, factor: Tensor | None) -> Tensor:
    """The norm over all, each brought to float32 for its own, 16-bit ones times the factor; 0 of none.

    As ``torch.nn.utils.get_total_norm`` of the gradients in float32.
    """
    if not grads:
        return torch.zeros(())
    norms = [_norm(g, norm_type, factor) for g in grads]
    return _vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)


def _norm(g: Tensor, norm_type: float, factor: Tensor | None) -> Tensor:
    narrow = g.element_size() < 4
    wide = g.to(torch.float32) if narrow else g
    if wide.is_sparse:
        wide = wide.coalesce().values()
    if narrow and factor is not None:
        wide = wide * factor.to(g.device)
    return _vector_norm(wide, norm_type)


def _vector_norm(x: Tensor, norm_type: float) -> Tensor:
    linalg: Any = torch.linalg
    return linalg.vector_norm(x, norm_type)
