"""Additions at unit scale: weighted sums, and weighted residual branches."""

import itertools
import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from plimsoll.errors import ArgumentError
from plimsoll.unit.arguments import check_floating, check_tau
from plimsoll.unit.factors import formulas
from plimsoll.unit.factors.formulas import Constraint, check_constraint, constrained
from plimsoll.unit.scaled_multiply import multiplied


def add(
    input: Tensor | float,  # noqa: A002  (torch's name)
    other: Tensor | float,
    *more: Tensor | float,
    weights: Sequence[float] | None = None,
    constraint: Constraint | None = "gmean",
) -> Tensor:
    """Return the sum of two or more independent terms at unit scale.

    That is ``sum(w_i x_i) / sqrt(sum(w_i^2))``, or n^-1/2 times the plain sum of n terms. With a constraint, forward
    and backward have one more factor, and gradients keep the proportions of the weights. With None, every term's
    gradient is at unit scale.

    A number, or a 0-d tensor among larger ones, shifts the sum and does not spread it. It has its weight in the sum,
    but counts neither in the norm of the weights nor in the constraint.

    Args:
        input: First operand, a floating-point tensor or a number.
        other: Second operand.
        more: Further operands. All of them broadcast as in torch, and at least one is a tensor.
        weights: One for each operand, not zero. Default: all equal.
        constraint: How the factors of the sum and of all terms become one. Default: `"gmean"`.

    Raises:
        ArgumentError: No operand is a tensor, or `weights` or `constraint` is not allowed.
        UnsupportedTensorError: A tensor is not floating point.

    >>> add(torch.ones(2), torch.ones(2), constraint=None)
    tensor([1.4142, 1.4142])
    >>> add(torch.ones(2), 3.0), add(torch.ones(2), torch.tensor(3.0))
    (tensor([4., 4.]), tensor([4., 4.]))
    """
    operands = (input, other, *more)
    tensors = _tensors(operands)
    check_constraint("add", constraint)
    shape = broadcast(*(x.shape for x in tensors))
    spreads = [isinstance(x, Tensor) and (x.dim() > 0 or not shape) for x in operands]
    normed = _normed(weights, spreads)
    numel = math.prod(shape)
    counts = (numel / x.numel() if isinstance(x, Tensor) and numel else 1.0 for x in operands)
    ideal = formulas.total(normed, tuple(counts))
    alpha, *shared = constrained(constraint, ideal.output, *itertools.compress(ideal.inputs, spreads))
    betas = ideal.inputs if constraint is None else shared[:1] * len(operands)
    parts = [
        multiplied(x, w * alpha, w * beta) if isinstance(x, Tensor) else x * w * alpha
        for x, w, beta in zip(operands, normed, betas, strict=True)
    ]
    return cast("Tensor", sum(parts[1:], start=parts[0]))


def residual_split(input: Tensor, tau: float = 0.5) -> tuple[Tensor, Tensor]:  # noqa: A002  (torch's name)
    """Return `input` twice: for the branch and for the skip connection.

    `residual_add` joins them with the same tau. The weight sqrt(tau) of the branch's gradient is applied here, at the
    start of the branch, and not at its end. So gradients inside the branch are at unit scale. The gradient of the whole
    is exact.

    Args:
        input: Floating-point tensor.
        tau: The branch's share of the variance of the sum, between 0 and 1. Default: 0.5.

    Raises:
        ArgumentError: `tau` is not between 0 and 1.
        UnsupportedTensorError: The tensor is not floating point.
    """
    check_floating("residual_split", input=input)
    check_tau("residual_split", tau)
    return multiplied(input, 1.0, math.sqrt(tau)), input


def residual_add(branch: Tensor, skip: Tensor, tau: float = 0.5) -> Tensor:
    """Return ``sqrt(tau) * branch + sqrt(1 - tau) * skip``.

    It is at unit scale if both are, and independent. The branch's gradient is not multiplied here, since
    `residual_split` does it. Errors are those of `residual_split`.

    >>> x = torch.ones(1, requires_grad=True)
    >>> branch, skip = residual_split(x, tau=0.36)
    >>> residual_add(branch * 2, skip, tau=0.36).backward()
    >>> x.grad  # 0.6 * 2 + 0.8
    tensor([2.])
    """
    check_floating("residual_add", branch=branch, skip=skip)
    check_tau("residual_add", tau)
    return multiplied(branch, math.sqrt(tau), 1.0) + skip * math.sqrt(1 - tau)


def broadcast(*shapes: Sequence[int]) -> Sequence[int]:
    """Return the shape that all of them broadcast to."""
    return cast("Sequence[int]", torch.broadcast_shapes(*shapes))


def _tensors(operands: Sequence[Tensor | float]) -> list[Tensor]:
    """Return the operands that are tensors, after all operands are checked."""
    tensors = {f"operand {i}": x for i, x in enumerate(operands) if not _is_number(x)}
    check_floating("add", **cast("dict[str, Tensor]", tensors))
    if not tensors:
        raise ArgumentError(f"add: expected a tensor among the operands; got {operands!r}. Add numbers with +.")
    return list(cast("dict[str, Tensor]", tensors).values())


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _normed(weights: Sequence[float] | None, spreads: Sequence[bool]) -> tuple[float, ...]:
    """Return the weights, divided by the norm of those whose operands spread the sum."""
    count = len(spreads)
    values = (1.0,) * count if weights is None else tuple(weights)
    if len(values) != count or not all(w and math.isfinite(w) for w in values):
        raise ArgumentError(
            f"add: expected {count} finite weights, one for each operand, none of them zero; got {weights!r}. Leave a "
            "term out that is to have no weight."
        )
    norm = math.sqrt(sum(w * w for w in itertools.compress(values, spreads)))
    return tuple(w / norm for w in values)
