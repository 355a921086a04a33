"""Matrix products and look-ups in a table at unit scale."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.unit.arguments import check_floating
from plimsoll.unit.factors import formulas
from plimsoll.unit.factors.formulas import Constraint, Factors, check_constraint, constrained, root
from plimsoll.unit.functional.ideal_factors import check_factors, resolve_factors
from plimsoll.unit.functional.sums import broadcast
from plimsoll.unit.scaled_multiply import multiplied


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
    fan_out, fan_in = weight.shape[-2:] if weight.dim() > 1 else (1, weight.shape[-1])
    return _linear("linear", input, weight, bias, constraint, factors, formulas.linear(fan_in, fan_out))


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
    fan_out, fan_in = weight.shape[-2:] if weight.dim() > 1 else (1, weight.shape[-1])
    return _linear("linear_readout", input, weight, bias, constraint, factors, formulas.readout(fan_in, fan_out))


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
    weight = multiplied(weight, 1.0, formulas.embedding(weight.shape[0], input.numel()))
    return F.embedding(input, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


def _linear(
    operation: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    constraint: Constraint | None,
    factors: Factors | None,
    ideal: Factors,
) -> Tensor:
    check_floating(operation, input=x, weight=weight, bias=bias)
    factors = resolve_factors(operation, constraint, factors, ideal)
    weight_factor = factors.weight
    if weight_factor is None:
        weight_factor = root(x.numel() // max(x.shape[-1], 1)) if x.numel() else 1.0
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
