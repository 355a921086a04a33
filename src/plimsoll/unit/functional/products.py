"""Additions, matrix products and look-ups in a table at unit scale."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.errors import ArgumentError
from plimsoll.unit import formulas
from plimsoll.unit.arguments import check_floating, check_tau
from plimsoll.unit.formulas import Constraint, Factors, check_constraint, constrained, root
from plimsoll.unit.functional.ideal_factors import check_factors, resolve_factors
from plimsoll.unit.scaled_multiply import multiplied

# -- additions: weighted sums, and weighted residual branches ----------------------------------------------------------


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


# -- products and tables -----------------------------------------------------------------------------------------------


def matmul(
    input: Tensor,  # noqa: A002  (torch's name)
    other: Tensor,
    *,
    constraint: Constraint | None = "gmean",
    factors: Factors | None = None,
) -> Tensor:
    """Return `torch.matmul` at unit scale.

    For (..., b, m) by (..., m, n) the factors are m^-1/2 forward, and n^-1/2 and b^-1/2 backward. Either operand may
    have one dimension, and batches broadcast: every factor counts the terms that are really summed. Torch's own product
    computes the sums, which grow to sqrt(m) before they are scaled. In FP16 that is 256 of 65,504 for m = 65,536. NaN
    and Inf pass through.

    Args:
        input: Left operand, floating point.
        other: Right operand, floating point.
        constraint: How the three factors become one. None leaves each ideal. Default: `"gmean"`.
        factors: Custom factors of the output and both inputs. They replace the ideal ones and the constraint.

    Raises:
        ArgumentError: `constraint` or `factors` is not allowed.
        UnsupportedTensorError: A tensor is not floating point.

    >>> x, y = torch.ones(2, 16), torch.ones(16, 16)
    >>> matmul(x, y, constraint=None)[0, 0]
    tensor(4.)
    """
    check_floating("matmul", input=input, other=other)
    check_constraint("matmul", constraint)
    if factors is not None:
        check_factors("matmul", factors, inputs=2)
        out, left, right = factors.output, *factors.inputs
    else:
        out, left, right = _matmul_factors(input, other, constraint)
    return multiplied(torch.matmul(multiplied(input, 1.0, left), multiplied(other, 1.0, right)), out, 1.0)


def linear(
    input: Tensor,  # noqa: A002  (torch's name)
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    constraint: Constraint | None = "gmean",
    factors: Factors | None = None,
) -> Tensor:
    """Return `torch.nn.functional.linear` at unit scale.

    The factors are fan_in^-1/2 forward and fan_out^-1/2 for the input's gradient. The gradients of weight and bias are
    cut edges and have rows^-1/2 under every constraint. The bias is added to the sums, so the output's factor
    multiplies it too.

    Args:
        input: Floating-point tensor of shape (..., fan_in).
        weight: Tensor of shape (fan_out, fan_in), of unit variance.
        bias: Tensor of shape (fan_out,). Default: None.
        constraint: How the factors of output and input become one. None leaves each ideal. Default: `"gmean"`.
        factors: Custom factors. They replace the ideal ones and the constraint.

    Raises:
        ArgumentError: `constraint` or `factors` is not allowed.
        UnsupportedTensorError: A tensor is not floating point.
    """
    return _linear("linear", input, weight, bias, constraint, factors, formulas.linear)


def linear_readout(
    input: Tensor,  # noqa: A002  (torch's name)
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    constraint: Constraint | None = None,
    factors: Factors | None = None,
) -> Tensor:
    """Return `linear` for a model's last product: fan_in^-1 forward.

    So outputs start small at any width. That is u-muP's rule for outputs. The edge after it is a cut edge, so there is
    no constraint by default. Arguments and errors are those of `linear`.
    """
    return _linear("linear_readout", input, weight, bias, constraint, factors, formulas.readout)


def embedding(
    input: Tensor,  # noqa: A002  (torch's name)
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Return `torch.nn.functional.embedding` of a table of unit variance.

    Arguments are torch's. The factor of the table's gradient is sqrt(vocabulary / tokens). It brings the gradient to
    unit scale over the whole table, for any distribution of tokens. The table is a cut edge, so there is no constraint.
    With `scale_grad_by_freq`, torch divides by each token's count in addition.

    Raises:
        UnsupportedTensorError: The table is not floating point.
    """
    check_floating("embedding", weight=weight)
    if max_norm is not None:
        # Before the table is scaled: the scaled one is a view, which autograd forbids to change in place.
        with torch.no_grad():
            torch.embedding_renorm_(weight, input.contiguous(), max_norm, norm_type)
    weight = multiplied(weight, 1.0, formulas.embedding(weight.size(0), input.numel()))
    return F.embedding(input, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


def _linear(
    operation: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    constraint: Constraint | None,
    factors: Factors | None,
    formula: Callable[[int, int], Factors],
) -> Tensor:
    check_floating(operation, input=x, weight=weight, bias=bias)
    fan_out, fan_in = weight.shape[-2:] if weight.dim() > 1 else (1, weight.size(-1))
    factors = resolve_factors(operation, constraint, factors, formula(fan_in, fan_out))
    weight_factor = factors.weight
    if weight_factor is None:
        weight_factor = root(x.numel() // max(x.size(-1), 1)) if x.numel() else 1.0
    weight = multiplied(weight, 1.0, weight_factor / factors.moment)
    bias = None if bias is None else multiplied(bias, 1.0, weight_factor)
    out = F.linear(multiplied(x, 1.0, factors.inputs[0]), weight, bias)
    return multiplied(out, factors.output, 1.0)


def _matmul_factors(a: Tensor, b: Tensor, constraint: Constraint | None) -> tuple[float, ...]:
    inner = a.shape[-1] if a.dim() else 1
    columns = b.shape[-1] if b.dim() > 1 else 1
    rows = a.shape[-2] if a.dim() > 1 else 1
    batch = broadcast(a.shape[:-2], b.shape[:-2])
    ideal = formulas.matmul(inner, a.numel(), b.numel(), rows * columns * math.prod(batch))
    return constrained(constraint, ideal.output, *ideal.inputs)
