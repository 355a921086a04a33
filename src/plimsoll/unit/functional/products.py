"""Matrix products at unit scale."""

import math

import torch
from torch import Tensor

from plimsoll.unit.factors import formulas
from plimsoll.unit.factors.constraints import Constraint, check_constraint, constrained
from plimsoll.unit.factors.formulas import Factors, root
from plimsoll.unit.functional.ideal_factors import check_factors as check_factors, resolved as resolved
from plimsoll.unit.functional.sums import broadcast
from plimsoll.unit.scaled_multiply import check_floating, multiplied


def matmul(
    input: Tensor,  # noqa: A002  (torch's name)
    other: Tensor,
    *,
    constraint: Constraint | None = "gmean",
    factors: Factors | None = None,
) -> Tensor:
    """`torch.matmul` at unit scale: of (..., b, m) by (..., m, n), m^-1/2 forward; n^-1/2 and b^-1/2 backward.

    Either operand may have one dimension, and batches broadcast: every factor counts the terms that are really summed.
    Computed in torch's own product, whose sums grow to sqrt(m) before they are scaled: in FP16 that is 256 of 65,504
    for m = 65,536. NaN and Inf pass through.

    Args:
        input: the left operand, floating point.
        other: the right one.
        constraint: how the three factors become one; None leaves each ideal.
        factors: factors of one's own, output and both inputs; they stand in for the ideal ones and the constraint.

    Raises `ArgumentError`, and `UnsupportedTensorError` for tensors that are not floating point.

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
    """`torch.nn.functional.linear` at unit scale: fan_in^-1/2 forward, fan_out^-1/2 for the input's gradient.

    The gradients of weight and bias are cut edges, with rows^-1/2 of their own, whatever the constraint. The bias is
    added to the sums, and so multiplied by the output's factor too.

    Args:
        input: (..., fan_in), floating point.
        weight: (fan_out, fan_in), of unit variance.
        bias: (fan_out,).
        constraint: how the factors of output and input become one; None leaves each ideal.
        factors: factors of one's own, in place of the ideal ones and the constraint.

    Raises `ArgumentError`, and `UnsupportedTensorError` for tensors that are not floating point.
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
    """`linear` for a model's last product: fan_in^-1 forward, so that its outputs start small at any width.

    That is u-muP's output rule. The edge behind it is a cut edge, hence no constraint by default. Arguments and
    exceptions are those of `linear`.
    """
    fan_out, fan_in = weight.shape[-2:] if weight.dim() > 1 else (1, weight.shape[-1])
    return _linear("linear_readout", input, weight, bias, constraint, factors, formulas.readout(fan_in, fan_out))


def _linear(
    operation: str, x: Tensor, weight: Tensor, bias: Tensor | None, constraint: Constraint | None,
    factors: Factors | None, ideal: Factors,
) -> Tensor:  # fmt: skip
    check_floating(operation, input=x, weight=weight, bias=bias)
    factors = resolved(operation, constraint, factors, ideal)
    of_weight = factors.weight
    if of_weight is None:
        of_weight = root(x.numel() // max(x.shape[-1], 1)) if x.numel() else 1.0
    weight = multiplied(weight, 1.0, of_weight / factors.moment)
    bias = None if bias is None else multiplied(bias, 1.0, of_weight)
    out = torch.nn.functional.linear(multiplied(x, 1.0, factors.inputs[0]), weight, bias)
    return multiplied(out, factors.output, 1.0)


def _matmul_factors(a: Tensor, b: Tensor, constraint: Constraint | None) -> tuple[float, ...]:
    inner = a.shape[-1] if a.dim() else 1
    columns = b.shape[-1] if b.dim() > 1 else 1
    rows = a.shape[-2] if a.dim() > 1 else 1
    batch = broadcast(a.shape[:-2], b.shape[:-2])
    ideal = formulas.matmul(inner, a.numel(), b.numel(), rows * columns * math.prod(batch))
    return constrained(constraint, ideal.output, *ideal.inputs)
