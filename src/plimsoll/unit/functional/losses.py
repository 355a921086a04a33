"""Losses whose gradients begin at unit scale; their values are torch's own.

A mean over b rows divides every gradient by b: in FP16 that alone loses them. Here the gradient is that of the sum,
times a constant: it does not depend on the batch, and nothing of it was ever small. The sum itself is in FP32. So with
`reduction` "mean" and "sum" the values differ and the gradients do not, while a weight on the loss
multiplies them as ever.
"""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.errors import ArgumentError
from plimsoll.unit.factors import formulas
from plimsoll.unit.functional.input_multiplier import checked_mult
from plimsoll.unit.scaled_multiply import check_floating, multiplied


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

    The value is torch's, in the logits' dtype. The gradient is that of the sum over rows, times s / sqrt(s - 1) for s
    classes, and over `mult`: exact where all classes are equally likely, as a model says at its start. Where logits are
    at unit scale instead, it is larger by sqrt(1 + sum(p^2)), a few per cent for tens of classes.

    Args:
        input: logits, (rows, classes, ...) or (classes,), floating point.
        target: classes or their probabilities, as torch's, this and the four that follow.
        weight: of each class.
        ignore_index: the target whose rows do not count.
        reduction: "mean", "sum" or "none"; the gradient is the same with all three.
        label_smoothing: the share of a target that goes to all classes.
        mult: what multiplies the logits first, above zero: one over a temperature.

    Raises `ArgumentError`, and `UnsupportedTensorError` for logits that are not floating point.

    >>> logits = torch.zeros(1000, 2, requires_grad=True)
    >>> loss = cross_entropy(logits, torch.zeros(1000, dtype=torch.long))
    >>> loss.backward()
    >>> round(loss.item(), 4), logits.grad[0].tolist()
    (0.6931, [-1.0, 1.0])
    """
    check_floating("cross_entropy", input=input, weight=weight)
    _check_reduction("cross_entropy", reduction)
    mult = checked_mult("cross_entropy", mult)
    x = _times(multiplied(input, 1.0, formulas.cross_entropy(_classes(input)) / mult), mult)
    losses = F.cross_entropy(
        x, target, weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    return _reduced(losses, reduction, _counted(losses, target, weight, ignore_index))


def nll_loss(
    input: Tensor,  # noqa: A002  (torch's name)
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """`torch.nn.functional.nll_loss`; the gradient of the log-probabilities is that of the sum, times sqrt(classes).

    Of its s elements a row has one, -1. Otherwise as `cross_entropy`, which needs no log-probabilities in 16 bits.
    """
    check_floating("nll_loss", input=input, weight=weight)
    _check_reduction("nll_loss", reduction)
    x = multiplied(input, 1.0, formulas.nll(_classes(input)))
    losses = F.nll_loss(x, target, weight, ignore_index=ignore_index, reduction="none")
    return _reduced(losses, reduction, _counted(losses, target, weight, ignore_index))


def binary_cross_entropy_with_logits(
    input: Tensor,  # noqa: A002  (torch's name)
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
    *,
    mult: float = 1.0,
) -> Tensor:
    """`torch.nn.functional.binary_cross_entropy_with_logits` of `mult * input`; the logits' gradient is at unit scale.

    That of the sum, times 2 over `mult`: probability less label is one half either way at the start. As
    `cross_entropy`.
    """
    operation = "binary_cross_entropy_with_logits"
    check_floating(operation, input=input, weight=weight, pos_weight=pos_weight)
    _check_reduction(operation, reduction)
    mult = checked_mult(operation, mult)
    x = _times(multiplied(input, 1.0, formulas.BINARY / mult), mult)
    losses = F.binary_cross_entropy_with_logits(x, target, weight, reduction="none", pos_weight=pos_weight)
    return _reduced(losses, reduction, losses.numel())


def mse_loss(
    input: Tensor,  # noqa: A002  (torch's name)
    target: Tensor,
    reduction: str = "mean",
) -> Tensor:
    """`torch.nn.functional.mse_loss`; the gradients of both sides are those of the sum, times 8^-1/2.

    For two independent sides at unit scale, of one shape. Otherwise as `cross_entropy`; `mult` would only be a factor,
    and there is none.
    """
    check_floating("mse_loss", input=input, target=target)
    _check_reduction("mse_loss", reduction)
    if input.shape != target.shape:
        raise ArgumentError(
            f"mse_loss: expected input and target of one shape; got {tuple(input.shape)} and {tuple(target.shape)}. "
            "Expand one of them first, if that is meant."
        )
    losses = F.mse_loss(multiplied(input, 1.0, formulas.MSE), multiplied(target, 1.0, formulas.MSE), reduction="none")
    return _reduced(losses, reduction, losses.numel())


def _check_reduction(operation: str, reduction: object) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ArgumentError(
            f"{operation}: expected reduction to be 'mean', 'sum' or 'none'; got {reduction!r}. Take 'mean'."
        )


def _reduced(losses: Tensor, reduction: str, count: float | Tensor) -> Tensor:
    """The losses put together; whichever way, each gets the gradient that comes as it is."""
    if reduction == "none":
        return losses
    total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    if reduction == "mean":
        counted = torch.as_tensor(count, dtype=total.dtype, device=total.device)
        total = multiplied(total, 1 / counted, 1.0) if losses.numel() else total / counted  # torch's NaN for no rows
    return total.to(losses.dtype)


def _counted(losses: Tensor, target: Tensor, weight: Tensor | None, ignored: int) -> float | Tensor:
    """What a mean divides by: rows, those that are not ignored, or the sum of their classes' weights."""
    if target.dtype.is_floating_point:
        return losses.numel()
    kept = target != ignored
    if weight is None:
        return kept.sum()
    return (weight.detach().float()[torch.where(kept, target, 0)] * kept).sum()


def _classes(x: Tensor) -> int:
    return x.shape[1] if x.dim() > 1 else x.shape[0]


def _times(x: Tensor, mult: float) -> Tensor:
    return x if mult == 1 else x * mult
