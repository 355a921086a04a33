"""Softmax and attention at unit scale, whose factors follow the length.

The moments are integrals, kept as curves over the length (`unit.formulas`). So a sequence may have any
length, under a compiler too.
"""

import math
import operator

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.errors import ArgumentError
from plimsoll.unit import formulas
from plimsoll.unit.arguments import check_floating, check_mult, check_probability, described
from plimsoll.unit.formulas import Constraint, Factors, along, check_constraint
from plimsoll.unit.functional.ideal_factors import (
    apply_checked,
    apply_factors,
    attention_curves,
    check_factors,
    softmax_curves,
    times,
)

_NO_FACTORS = Factors(output=1.0, inputs=(1.0,))


def softmax(
    input: Tensor,  # noqa: A002  (torch's name)
    dim: int,
    dtype: torch.dtype | None = None,
    *,
    mult: float = 1.0,
    constraint: Constraint | None = "gmean",
) -> Tensor:
    """Return `torch.softmax` of `mult * input` at unit scale.

    The factors are about n / sqrt(e - 1) forward and n / sqrt(e) backward for a length n, so the values no longer add
    up to 1. They keep a mean above their unit deviation from it. A single probability is always 1, and has factors of
    1. In 16 bits, probabilities below the format's smallest number underflow as in torch. Use `dtype` to compute in
    another format.

    Args:
        input: Floating-point tensor.
        dim: Dimension along which the probabilities are normalized.
        dtype: Dtype of the computation and of the result, as in torch. Default: that of the input.
        mult: Multiplies the input first. From 2**-32 to 2**32. A large one gives sharper weights. Default: 1.
        constraint: How the two factors become one. None leaves each ideal. Default: `"gmean"`.

    Raises:
        ArgumentError: `mult` or `constraint` is not allowed.
        UnsupportedTensorError: The tensor is not floating point.
    """
    check_floating("softmax", input=input)
    mult = check_mult("softmax", mult)
    length = input.size(dim) if input.dim() else 1
    ideal = _NO_FACTORS
    if length > 1:
        spread, slope, _ = (along(curve, length) for curve in softmax_curves(mult))
        ideal = formulas.softmax(length, mult, spread, slope)

    def function(x: Tensor) -> Tensor:
        return torch.softmax(times(x, mult), dim, dtype)

    return apply_checked("softmax", function, ideal, constraint, input=input)


def log_softmax(
    input: Tensor,  # noqa: A002  (torch's name)
    dim: int,
    dtype: torch.dtype | None = None,
    *,
    mult: float = 1.0,
    constraint: Constraint | None = "gmean",
) -> Tensor:
    """Return `torch.log_softmax` of `mult * input` at unit scale.

    The factors are about 1 / mult both ways for many classes. The values keep their mean, which is below zero.
    Arguments and errors are those of `softmax`.
    """
    check_floating("log_softmax", input=input)
    mult = check_mult("log_softmax", mult)
    length = input.size(dim) if input.dim() else 1
    ideal = _NO_FACTORS
    if length > 1:
        spread, _, variance = (along(curve, length) for curve in softmax_curves(mult))
        ideal = formulas.log_softmax(length, mult, spread, variance * length)

    def function(x: Tensor) -> Tensor:
        return torch.log_softmax(times(x, mult), dim, dtype)

    return apply_checked("log_softmax", function, ideal, constraint, input=input)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    mult: float = 1.0,
    constraint: Constraint | None = "gmean",
    factors: Factors | None = None,
) -> Tensor:
    """Return `torch.nn.functional.scaled_dot_product_attention` at unit scale.

    The factors depend on the number of keys, the width of a head, `is_causal`, the dropout, and how sharp the weights
    are, which is ``mult * scale * sqrt(width)``. With `is_causal` they hold over all rows together: early rows attend
    to few keys and have more than unit scale, late ones less. They do not depend on the mask. If it hides many keys,
    pass `factors`.

    Args:
        query: Floating-point tensor of shape (..., queries, width).
        key: Tensor of shape (..., keys, width).
        value: Tensor of shape (..., keys, value width).
        attn_mask: As in torch. Default: None.
        dropout_p: Share of weights that are dropped, from 0 to 1. Default: 0.
        is_causal: Whether a query attends only to keys up to its own position. Default: False.
        scale: Multiplies the products of queries and keys. Not 0. Default: width ** -1/2.
        enable_gqa: Whether several heads of the query share one head of key and value. Default: False.
        mult: Multiplies the products too. From 2**-32 to 2**32. Default: 1.
        constraint: How the four factors become one. None leaves each ideal. Default: `"gmean"`.
        factors: Custom factors of the output and the three inputs. They replace the ideal ones and the constraint.

    Raises:
        ArgumentError: An option is not allowed.
        UnsupportedTensorError: A tensor is not floating point.
    """
    operation = "scaled_dot_product_attention"
    check_floating(operation, query=query, key=key, value=value)
    check_constraint(operation, constraint)
    check_probability(operation, dropout_p)
    mult = check_mult(operation, mult)
    # A plain number under a compiler too: the width of a head never changes, and the curves below need it.
    width = operator.index(query.size(-1))
    score = mult * (math.copysign(scale, scale) if scale is not None else max(width, 1) ** -0.5)
    if not 0 < abs(score) < math.inf:
        raise ArgumentError(
            f"{operation}: expected scale to be a finite number other than 0; got {described(scale)}. Leave it out for "
            "width ** -1/2."
        )

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=score, enable_gqa=enable_gqa
        )

    if factors is not None:
        check_factors(operation, factors, inputs=3)
        return apply_factors(function, factors, None, query, key, value)
    ideal = _attention_factors(query, key, value, score, dropout_p, is_causal)
    return apply_factors(function, ideal, constraint, query, key, value)


def _attention_factors(q: Tensor, k: Tensor, v: Tensor, score: float, dropout: float, causal: bool) -> Factors:
    width, keys, keep = operator.index(q.shape[-1]), k.size(-2), 1 - dropout
    rows_per_key = (q.numel() * v.size(-1)) / (v.numel() * width) if q.numel() and v.numel() else 1.0
    if keys < 2 or not width or not keep:  # a single weight is always 1, so queries and keys get no gradient
        return Factors(output=1.0, inputs=(1.0, 1.0, rows_per_key**-0.5))
    curves = attention_curves(abs(score) * math.sqrt(width), width, causal)
    squares, slope, weighted = (along(curve, keys) for curve in curves)
    return formulas.attention(abs(score), v.shape[-1], rows_per_key, keep, squares, slope, weighted)
