"""Losses whose gradients start at unit scale. Their values are torch's."""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.checks import one_of
from plimsoll.errors import ArgumentError
from plimsoll.unit import formulas
from plimsoll.unit.arguments import check_floating, check_mult
from plimsoll.unit.functional.ideal_factors import times
from plimsoll.unit.scaled_multiply import multiplied


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
    """Return `torch.nn.functional.cross_entropy` of `mult * input`.

    The logits' gradient starts at unit scale. The value is torch's, in the logits' dtype. The gradient is that of the
    sum over rows, times s / sqrt(s - 1) for s classes, divided by `mult`. It is at unit scale exactly if all classes
    are equally likely, as a new model predicts. If logits are at unit scale instead, it is larger by sqrt(1 +
    sum(p^2)), a few per cent for tens of classes.

    Args:
        input: Logits of shape (rows, classes, ...) or (classes,), floating point.
        target: Classes or their probabilities, as in torch.
        weight: Weight of each class. Default: None.
        ignore_index: Target whose rows do not count. Default: -100.
        reduction: `"mean"`, `"sum"` or `"none"`. The gradient is the same with all three. Default: `"mean"`.
        label_smoothing: Share of a target that goes to all classes. Default: 0.
        mult: Multiplies the logits first. From 2**-32 to 2**32. It is one over a temperature. Default: 1.

    Raises:
        ArgumentError: `reduction` or `mult` is not allowed.
        UnsupportedTensorError: The logits are not floating point.

    >>> logits = torch.zeros(1000, 2, requires_grad=True)
    >>> loss = cross_entropy(logits, torch.zeros(1000, dtype=torch.long))
    >>> loss.backward()
    >>> round(loss.item(), 4), logits.grad[0].tolist()
    (0.6931, [-1.0, 1.0])
    """
    check_floating("cross_entropy", input=input, weight=weight)
    _check_reduction("cross_entropy", reduction)
    mult = check_mult("cross_entropy", mult)
    x = times(multiplied(input, 1.0, formulas.cross_entropy(_classes(input)) / mult), mult)
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
    """Return `torch.nn.functional.nll_loss`, with a gradient of the sum.

    It is multiplied by sqrt(classes). A row of the sum's gradient has one element that is not zero, which is -1.
    Everything else is as in `cross_entropy`, which needs no log-probabilities in 16 bits.
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
    """Return `torch.nn.functional.binary_cross_entropy_with_logits` of `mult * input`.

    The logits' gradient is that of the sum, times 2 / `mult`. It starts at unit scale, since probability minus label is
    one half either way in a new model. Everything else is as in `cross_entropy`.
    """
    operation = "binary_cross_entropy_with_logits"
    check_floating(operation, input=input, weight=weight, pos_weight=pos_weight)
    _check_reduction(operation, reduction)
    mult = check_mult(operation, mult)
    x = times(multiplied(input, 1.0, formulas.BINARY / mult), mult)
    losses = F.binary_cross_entropy_with_logits(x, target, weight, reduction="none", pos_weight=pos_weight)
    return _reduced(losses, reduction, losses.numel())


def mse_loss(
    input: Tensor,  # noqa: A002  (torch's name)
    target: Tensor,
    reduction: str = "mean",
) -> Tensor:
    """Return `torch.nn.functional.mse_loss`, with gradients of the sum.

    Those of both sides are multiplied by 8^-1/2. That is unit scale for two independent sides at unit scale. Both must
    have one shape. There is no `mult`, which would only be a factor. Everything else is as in `cross_entropy`.
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
    one_of(operation, "reduction", reduction, ("mean", "sum", "none"), remedy="Use 'mean'.")


# A mean over b rows divides every gradient by b, which alone makes gradients underflow in FP16. Here the gradient is
# that of the sum, times a constant. It does not depend on the batch, and no step of its computation is small. The sum
# itself is computed in FP32. With `reduction` "mean" and "sum" the values differ and the gradients do not. A weight on
# the loss multiplies the gradients as usual.
def _reduced(losses: Tensor, reduction: str, count: float | Tensor) -> Tensor:
    """Return the losses reduced. Each receives the incoming gradient unchanged."""
    if reduction == "none":
        return losses
    total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    if reduction == "mean":
        divisor = torch.as_tensor(count, dtype=total.dtype, device=total.device)
        # The quotient is for no rows, whose mean is NaN in torch.
        total = multiplied(total, 1 / divisor, 1.0) if losses.numel() else total / divisor
    return total.to(losses.dtype)


def _counted(losses: Tensor, target: Tensor, weight: Tensor | None, ignored: int) -> float | Tensor:
    """Return a mean's divisor: the counted rows, or the sum of their weights."""
    if target.dtype.is_floating_point:
        return losses.numel()
    counts = target != ignored
    if weight is None:
        return counts.sum()
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    return (wide[torch.where(counts, target, 0)] * counts).sum()


def _classes(x: Tensor) -> int:
    return x.shape[1] if x.dim() > 1 else x.size(0)
