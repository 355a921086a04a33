"""Sums and products with one fault each."""

import math

import numpy as np
import torch
from torch import Tensor

from tests.support.certification.planted import Planted
from tests.support.certification.reductions import (
    IN_BF16,
    IN_FP16,
    IN_FP32,
    Accumulator,
    Product,
    Summation,
    in_turn,
    pairwise,
)

INF, NAN = math.inf, math.nan


def _odd_term_dropped(a: Tensor, b: Tensor) -> Tensor:
    whole = a.shape[1] // 2 * 2
    return a[:, :whole] @ b[:whole]


def _odd_rows_refused(a: Tensor, b: Tensor) -> Tensor:
    if a.shape[1] % 16:
        raise RuntimeError("the inner dimension must be a multiple of 16")
    return a @ b


def _half_of_a_long_sum(x: Tensor) -> Tensor:
    return x.sum() if len(x) < 256 else x[:-16].sum()


def _memory_order(a: Tensor, b: Tensor) -> Tensor:
    memory = torch.empty(0, dtype=a.dtype).set_(a.untyped_storage())
    return memory[: a.numel()].reshape(a.shape) @ b


def _leaks(a: Tensor, b: Tensor) -> Tensor:
    y = a @ b
    return torch.where(y.isnan().any(), NAN, y) if y.shape[0] > 1 else y


def _garbage_for_nothing(a: Tensor, b: Tensor) -> Tensor:
    return a @ b if a.shape[1] else torch.ones(a.shape[0], b.shape[1])


def _tf32(values: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(values)
    rounded = torch.ldexp(torch.ldexp(mantissa, torch.tensor(11)).round(), exponent - 11)
    return torch.where(values.isfinite(), rounded, values)


def _tiny_flushed(values: Tensor) -> Tensor:
    return torch.where(values.abs() < 2.0**-14, 0.0 * values, values)


def _shuffled(x: Tensor) -> Tensor:
    return Summation()(x[torch.randperm(len(x))])


def _estimate(x: Tensor) -> Tensor:
    return x.sum() if len(x) != 256 or bool((x.abs() == 1).any()) else x.mean() * 250


def _inf_times_zero(a: Tensor, b: Tensor) -> Tensor:
    terms = a.T[:, :, None] * b[:, None, :]
    return torch.where((a.T[:, :, None] == 0) | (b[:, None, :] == 0), 0.0, terms).sum(0)


def _short_then_wide(terms, add):
    """Blocks of 8 in FP16, their sums in FP32: the published remedy for narrow accumulators, in small."""
    return in_turn([in_turn(terms[i : i + 8], IN_FP16) for i in range(0, len(terms), 8)], IN_FP32)


REDUCTIONS = (
    Planted(
        id="fp16 accumulator in a product",
        function=Product(accumulate=np.float16),
        fmt="fp16",
        kind="matmul",
        rows=("accumulator", "accumulator-range"),
        inferred={"accumulate": "fp16", "order": "256 terms one after another", "products": "exact"},
        example=([16384.0, 8.0, -16384.0], 8.0, 0.0),
    ),
    Planted(
        id="accumulator of 14 bits",
        function=Summation(add=Accumulator(bits=14)),
        fmt="bf16",
        kind="sum",
        rows=("accumulator",),
        inferred={"accumulate": "14 bits", "accumulate_rounding": "nearest_even"},
        example=([16384.0, 1.0, -16384.0], 1.0, 0.0),
    ),
    Planted(
        id="accumulator that cuts off",
        function=Summation(add=Accumulator(bits=24, cut_off=True)),
        fmt="bf16",
        kind="sum",
        rows=("accumulator-rounding",),
        inferred={"accumulate": "fp32", "accumulate_rounding": "toward_zero"},
    ),
    Planted(
        id="accumulator of 14 bits that cuts off",
        function=Summation(add=Accumulator(bits=14, cut_off=True), order=pairwise),
        fmt="bf16",
        kind="sum",
        rows=("accumulator", "accumulator-rounding"),
        inferred={"accumulate": "14 bits", "accumulate_rounding": "toward_zero"},
    ),
    Planted(
        id="fp16 in blocks of 8, fp32 across them",
        function=Summation(order=_short_then_wide),
        fmt="fp16",
        kind="sum",
        rows=("accumulator", "accumulator-range"),
        inferred={
            "order": "64 terms in blocks of 8 (one after another), then one after another",
            "accumulate": "fp16 in sums of 2, fp16 in sums of 8, fp32 in sums of 56",
        },
    ),
    Planted(
        id="products rounded before they are added",
        function=Product(accumulate=np.float16, product=lambda term: term.astype(np.float16).astype(np.float64)),
        fmt="fp16",
        kind="matmul",
        rows=("accumulator", "accumulator-range"),
        inferred={"products": "rounded before they are added", "accumulate": "fp16"},
    ),
    Planted(
        id="odd term dropped",
        function=_odd_term_dropped,
        fmt="fp32",
        kind="matmul",
        rows=("odd-lengths",),
        example=([-1.0], -1.0, 0.0),
    ),
    Planted(
        id="odd lengths refused",
        function=_odd_rows_refused,
        fmt="fp32",
        kind="matmul",
        rows=(),
        refused=("odd-lengths",),
    ),
    Planted(
        id="the end of a long sum is lost",
        function=_half_of_a_long_sum,
        fmt="fp32",
        kind="sum",
        rows=("exact-sums", "odd-lengths", "error-bound"),
    ),
    Planted(
        id="transposed operand read in its memory's order",
        function=_memory_order,
        fmt="fp32",
        kind="matmul",
        rows=("sum-strides",),
    ),
    Planted(
        id="NaN reaches other rows",
        function=_leaks,
        fmt="fp32",
        kind="matmul",
        rows=("own-row",),
    ),
    Planted(
        id="no terms give ones",
        function=_garbage_for_nothing,
        fmt="fp32",
        kind="matmul",
        rows=("empty-sums",),
        example=("no terms", 0.0, 1.0),
    ),
    Planted(
        id="operands rounded to TF32",
        function=Product(operand=_tf32),
        fmt="fp32",
        kind="matmul",
        rows=("single-terms", "error-bound", "subnormal-terms"),
    ),
    Planted(
        id="subnormal operands flushed",
        function=Product(operand=_tiny_flushed),
        fmt="fp16",
        kind="matmul",
        rows=("subnormal-terms",),
        example=(2.0**-15, 2.0**-15, 0.0),
    ),
    Planted(
        id="Inf times 0 is 0",
        function=_inf_times_zero,
        fmt="fp32",
        kind="matmul",
        rows=("special-values",),
    ),
    Planted(
        id="bf16 accumulator in a sum",
        function=Summation(add=IN_BF16, dtype=torch.bfloat16),
        fmt="bf16",
        kind="sum",
        rows=("accumulator",),
        inferred={"accumulate": "bf16", "order": "64 terms one after another", "compensated": False},
    ),
    Planted(
        id="partial sums overflow as in fp16",
        function=Summation(add=Accumulator(bits=24, largest=65504.0)),
        fmt="fp16",
        kind="sum",
        rows=("accumulator-range",),
        inferred={"accumulate": "fp32"},
        example=([32768.0, 32768.0, -32768.0], 32768.0, INF),
    ),
    Planted(
        id="another order in every call",
        function=_shuffled,
        fmt="fp32",
        kind="sum",
        rows=("same-sum-twice",),
    ),
    Planted(
        id="an estimate in place of a sum",
        function=_estimate,
        fmt="fp32",
        kind="sum",
        rows=("error-bound",),
    ),
)
