"""Losses whose gradients begin at unit scale; their values are torch's own.

A mean over b rows divides every gradient by b: in FP16 that alone loses them. Here the gradient is that of the sum,
times a constant: so it does not depend on the batch, and nothing of it was ever small. The sum itself is in FP32.
"""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.errors import ArgumentError
from plimsoll.unit import _formulas
from plimsoll.unit._scaled import check_floating, multiplied


def cross_entropy(
    input: Tensor,  # noqa: A002  (torch's name)
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    mult: float = 1.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of `mult * input`; the gradient of the logits begins at unit scale.

    The value is torch's. The gradient is that of the sum over all rows, whichever reduction, times s / sqrt(s - 1)
    for s classes.

    Raises `ArgumentError`, and `UnsupportedTensorError` for logits that are not floating point.
    """
    check_floating("cross_entropy", input=input, weight=weight)
    check_reduction("cross_entropy", reduction)
    classes = input.shape[1] if input.dim() > 1 else input.shape[0]
    x = multiplied(input, 1.0, _formulas.cross_entropy(classes) / mult)
    x = x if mult == 1 else x * mult
    losses = F.cross_entropy(
        x, target, weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    return reduced(losses, reduction, _counted(target, weight, ignore_index, losses))


def check_reduction(operation: str, reduction: object) -> None:
    """Refuses another name than torch's three."""
    if reduction not in ("mean", "sum", "none"):
        raise ArgumentError(
            f"{operation}: expected reduction to be 'mean', 'sum' or 'none'; got {reduction!r}. Take 'mean'."
        )


def reduced(losses: Tensor, reduction: str, count: float | Tensor) -> Tensor:
    """The losses put together; whichever way, each gets the gradient that comes as it is."""
    if reduction == "none":
        return losses
    total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    if reduction == "mean":
        total = multiplied(total, 1 / count, 1.0) if isinstance(count, Tensor) or count else total / count
    return total.to(losses.dtype)


def _counted(target: Tensor, weight: Tensor | None, ignored: int, losses: Tensor) -> float | Tensor:
    """What a mean divides by: rows, those that are not ignored, or the sum of their classes' weights."""
    if target.dtype.is_floating_point:
        return losses.numel()
    kept = target != ignored
    if weight is None:
        return kept.sum().to(torch.float32)
    return (weight.detach().float()[torch.where(kept, target, 0)] * kept).sum()
