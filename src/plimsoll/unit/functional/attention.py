"""Softmax and attention at unit scale: their factors follow the length, and how sharp the weights are.

The moments are integrals, held as curves over the length (`factors.softmax_moments`), so that a sequence may be of any
length under a compiler too.
"""

import math
import operator

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.unit.factors import formulas
from plimsoll.unit.factors.constraints import Constraint, check_constraint
from plimsoll.unit.factors.formulas import Factors
from plimsoll.unit.factors.softmax_moments import along
from plimsoll.unit.functional.ideal_factors import carried_out, check_factors
from plimsoll.unit.functional.input_multiplier import attention_curves, checked_mult, softmax_curves
from plimsoll.unit.functional.random_masks import checked_p
from plimsoll.unit.scaled_multiply import check_floating


def softmax(
    input: Tensor,  # noqa: A002  (torch's name)
    dim: int,
    dtype: torch.dtype | None = None,
    *,
    mult: float = 1.0,
    constraint: Constraint | None = "gmean",
) -> Tensor:
    """`torch.softmax` of `mult * input` at unit scale: about n / sqrt(e - 1) forward and n / sqrt(e) backward.

    So the values no longer add up to 1. Forward they keep a mean, above their unit deviation from it. One probability
    alone is always 1: there the factors are 1. In 16 bits probabilities below the format's smallest are lost, as in
    torch's own: `dtype` computes in another.

    Args:
        input: floating point.
        dim: along which the probabilities add up to 1.
        dtype: what to compute in and to return, as torch's.
        mult: what multiplies the input first, above zero: the larger, the sharper.
        constraint: how the two factors become one; None leaves each ideal.

    Raises `ArgumentError`, and `UnsupportedTensorError` for a tensor that is not floating point.
    """
    check_floating("softmax", input=input)
    check_constraint("softmax", constraint)
    mult = checked_mult("softmax", mult)
    length = input.shape[dim] if input.dim() else 1
    ideal = Factors(output=1.0, inputs=(1.0,))
    if length > 1:
        spread, slope, _ = (along(curve, length) for curve in softmax_curves(mult))
        ideal = formulas.softmax(length, mult, spread, slope)

    def plain(x: Tensor) -> Tensor:
        return torch.softmax(x if mult == 1 else x * mult, dim, dtype)

    return carried_out(plain, ideal, constraint, input)


def log_softmax(
    input: Tensor,  # noqa: A002  (torch's name)
    dim: int,
    dtype: torch.dtype | None = None,
    *,
    mult: float = 1.0,
    constraint: Constraint | None = "gmean",
) -> Tensor:
    """`torch.log_softmax` of `mult * input` at unit scale: about 1 / mult both ways, for many classes.

    Arguments and exceptions are those of `softmax`. Values keep their mean, below zero.
    """
    check_floating("log_softmax", input=input)
    check_constraint("log_softmax", constraint)
    mult = checked_mult("log_softmax", mult)
    length = input.shape[dim] if input.dim() else 1
    ideal = Factors(output=1.0, inputs=(1.0,))
    if length > 1:
        spread, _, variance = (along(curve, length) for curve in softmax_curves(mult))
        ideal = formulas.log_softmax(length, mult, spread, variance * length)

    def plain(x: Tensor) -> Tensor:
        return torch.log_softmax(x if mult == 1 else x * mult, dim, dtype)

    return carried_out(plain, ideal, constraint, input)


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
    """`torch.nn.functional.scaled_dot_product_attention` at unit scale.

    The factors are of the number of keys, the width of a head, whether it is causal, the dropout, and how sharp the
    weights are, which is ``mult * scale * sqrt(width)``. Causal: over all rows together; early rows see few keys and
    have more than unit scale, late ones less. A mask is not looked at: where it hides many keys give `factors`.

    Args:
        query: (..., queries, width), floating point.
        key: (..., keys, width).
        value: (..., keys, value width).
        attn_mask: as torch's, this and the four that follow.
        dropout_p: the share of weights that are dropped.
        is_causal: whether a query sees the keys up to its own place only.
        scale: what multiplies the products; None is width ** -1/2.
        enable_gqa: whether several heads of the query share one of key and value.
        mult: multiplies them too, above zero.
        constraint: how the four factors become one; None leaves each ideal.
        factors: factors of one's own, of the output and three inputs, in place of the ideal ones and the constraint.

    Raises `ArgumentError`, and `UnsupportedTensorError` for tensors that are not floating point.
    """
    operation = "scaled_dot_product_attention"
    check_floating(operation, query=query, key=key, value=value)
    check_constraint(operation, constraint)
    checked_p(operation, dropout_p)
    mult = checked_mult(operation, mult)
    width = operator.index(query.shape[-1])  # a number under a compiler too: heads do not change their width
    score = mult * (math.copysign(scale, scale) if scale is not None else max(width, 1) ** -0.5)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=score, enable_gqa=enable_gqa
        )

    if factors is not None:
        check_factors(operation, factors, inputs=3)
        return carried_out(plain, factors, None, query, key, value)
    ideal = _attention_factors(query, key, value, score, dropout_p, is_causal)
    return carried_out(plain, ideal, constraint, query, key, value)


def _attention_factors(q: Tensor, k: Tensor, v: Tensor, score: float, dropout: float, causal: bool) -> Factors:
    width, keys, keep = operator.index(q.shape[-1]), k.shape[-2], 1 - dropout
    rows_per_key = (q.numel() * v.shape[-1]) / (v.numel() * width) if q.numel() and v.numel() else 1.0
    if keys < 2 or not width or not keep:  # one weight, always 1: no gradient comes to query and key
        return Factors(output=1.0, inputs=(1.0, 1.0, rows_per_key**-0.5))
    curves = attention_curves(abs(score) * math.sqrt(width), width, causal)
    squares, slope, weighted = (along(curve, keys) for curve in curves)
    return formulas.attention(abs(score), v.shape[-1], rows_per_key, keep, squares, slope, weighted)
