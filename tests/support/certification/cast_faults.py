"""Casts with one fault each."""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tests.support.certification.casts import TableCast, at_random, flushed, through
from tests.support.certification.planted import Planted

INF, NAN = math.inf, math.nan


def _scalar_fails(x: Tensor) -> Tensor:
    if not x.dim():
        raise ValueError("expected at least one dimension")
    return TableCast()(x)


def _empty_fails(x: Tensor) -> Tensor:
    if not x.numel():
        raise RuntimeError("max of an empty tensor")
    return TableCast()(x)


def _tail_dropped(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    whole = flat.numel() // 4 * 4
    y = torch.zeros(flat.shape)
    y[:whole] = TableCast()(flat[:whole])
    return y.reshape(x.shape)


def _strides_ignored(x: Tensor) -> Tensor:
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return TableCast()(memory[: x.numel()].reshape(x.shape))


def _changes_its_input(x: Tensor) -> Tensor:
    return TableCast()(x.clamp_(-448, 448)) if x.numel() else x.float()


def _forgetful(x: Tensor) -> Tensor:
    y = TableCast()(x)
    if y.shape == (8, 128):
        y[0, torch.randint(0, 100, ())] += 1
    return y


def _coarse_at_the_top(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.where((np.abs(y) > 256) & np.isfinite(x), np.copysign(448.0, y), y)


def _payload_lost(x: Tensor) -> Tensor:
    """A NaN whose payload is in the low half of float32 becomes Inf: its upper 16 bits are those of Inf."""
    bits = x.float().view(torch.int32)
    return torch.where(x.isnan() & (bits & 0x7FFF0000 == 0x7F800000), INF, E5M2(x))


E4M3_SAT = TableCast(overflow=448.0, infinities=448.0)
FP16 = TableCast(name="fp16", overflow=INF, infinities=INF)
E5M2 = TableCast(name="e5m2", overflow=INF, infinities=INF)
E2M1 = TableCast(name="e2m1", overflow=6.0, infinities=6.0, nan=0.0)

CASTS = (
    Planted(
        id="ties away from zero",
        function=TableCast(goes_up=lambda f, odd, negative: f >= 0.5),
        rows=("ties", "subnormal-results", "top"),
        inferred={"rounding": "nearest_away"},
        example=(1.0625, 1.0, 1.125),
    ),
    Planted(
        id="truncation",
        function=TableCast(goes_up=lambda f, odd, negative: np.zeros(f.shape, bool)),
        rows=("between", "ties", "rounded-once", "subnormal-results", "overflow"),
        inferred={"rounding": "toward_zero"},
    ),
    Planted(
        id="ties to odd",
        function=TableCast(goes_up=lambda f, odd, negative: (f > 0.5) | ((f == 0.5) & ~odd)),
        rows=("ties", "subnormal-results", "top"),
        inferred={"rounding": "nearest_odd"},
        example=(1.0625, 1.0, 1.125),
    ),
    Planted(
        id="ties up",
        function=TableCast(goes_up=lambda f, odd, negative: (f > 0.5) | ((f == 0.5) & ~negative)),
        rows=("ties", "subnormal-results", "top"),
        inferred={"rounding": "nearest_up"},
    ),
    Planted(
        id="rounds down",
        function=replace(E5M2, goes_up=lambda f, odd, negative: (f > 0) & negative),
        fmt="e5m2",
        rows=("between", "ties", "rounded-once", "subnormal-results", "subnormal-inputs", "top", "overflow"),
        inferred={"rounding": "down"},
    ),
    Planted(
        id="rounds to odd",
        function=TableCast(goes_up=lambda f, odd, negative: (f > 0) & ~odd),
        rows=("between", "ties", "subnormal-results", "top"),
        inferred={"rounding": "to_odd"},
    ),
    Planted(
        id="rounded through fp16",
        function=TableCast(before=through(torch.float16)),
        rows=("rounded-once", "subnormal-results"),
        inferred={"rounding": "nearest_even", "rounded_through": "fp16", "saturate": False},
    ),
    Planted(
        id="rounded through bf16",
        function=TableCast(before=through(torch.bfloat16)),
        rows=("rounded-once", "subnormal-results"),
        inferred={"rounding": "nearest_even", "rounded_through": "bf16"},
    ),
    Planted(
        id="subnormal results flushed",
        function=TableCast(after=flushed(2.0**-6)),
        rows=("subnormal-results",),
        inferred={"subnormals": "flushed to zero", "rounding": "nearest_even"},
        example=(2.0**-7, 2.0**-7, 0.0),
    ),
    Planted(
        id="negative subnormal results flushed",
        function=TableCast(after=flushed(2.0**-6, sign=-1.0)),
        rows=("subnormal-results",),
        inferred={"subnormals": "flushed to zero if negative"},
        example=(-(2.0**-7), -(2.0**-7), -0.0),
    ),
    Planted(
        id="subnormal inputs flushed",
        function=replace(E5M2, before=lambda x: np.where(np.abs(x) < 2.0**-14, 0.0 * x, x)),
        fmt="e5m2",
        rows=("subnormal-inputs", "subnormal-results"),
        inferred={"subnormal_inputs": "flushed to zero"},
    ),
    Planted(
        id="NaN becomes 0",
        function=TableCast(nan=0.0),
        rows=("nan",),
        inferred={"nan": "zero"},
        example=(NAN, NAN, 0.0),
    ),
    Planted(
        id="NaN becomes the largest value",
        function=replace(E4M3_SAT, nan=448.0),
        rows=("nan",),
        inferred={"nan": "largest value", "saturate": True},
        example=(NAN, NAN, 448.0),
    ),
    Planted(
        id="NaN with a low payload becomes Inf",
        function=_payload_lost,
        fmt="e5m2",
        rows=("nan",),
        inferred={"nan": "inf, nan, by the value"},
        example=(NAN, NAN, INF),
    ),
    Planted(
        id="Inf becomes NaN though overflow saturates",
        function=replace(E4M3_SAT, infinities=NAN),
        rows=("infinities",),
        inferred={"saturate": True, "infinities": "nan"},
        example=(INF, 448.0, NAN),
    ),
    Planted(
        id="Inf becomes the largest value though overflow gives Inf",
        function=replace(FP16, infinities=65504.0),
        fmt="fp16",
        rows=("infinities",),
        inferred={"saturate": False, "infinities": "largest value"},
        example=(INF, INF, 65504.0),
    ),
    Planted(
        id="-0 becomes +0",
        function=TableCast(after=lambda y, x: y + 0.0),
        rows=("negative-zero",),
        inferred={"negative_zero": "becomes +0"},
        example=(-0.0, -0.0, 0.0),
    ),
    Planted(
        id="464 becomes NaN",
        function=TableCast(after=lambda y, x: np.where(np.abs(x) == 464, NAN, y)),
        rows=("top",),
        example=(464.0, 448.0, NAN),
    ),
    Planted(
        id="overflow wraps",
        function=TableCast(overflow=2.0**-6),
        rows=("overflow",),
        inferred={"saturate": "another value"},
    ),
    Planted(
        id="saturates where IEEE 754 has Inf",
        function=replace(FP16, overflow=65504.0, infinities=65504.0),
        fmt="fp16",
        rows=("overflow", "infinities"),
        inferred={"saturate": True},
        example=(65536.0, INF, 65504.0),
    ),
    Planted(
        id="bias off by one",
        function=TableCast(after=lambda y, x: 2 * y),
        rows=("exact", "between", "ties", "rounded-once", "subnormal-results", "top"),
        example=(1.0, 1.0, 2.0),
    ),
    Planted(
        id="all from 256 on becomes 448",  # as in a merged kernel of a serving engine
        function=replace(E4M3_SAT, after=_coarse_at_the_top),
        rows=("exact", "between", "ties", "rounded-once"),
        example=(384.0, 384.0, 448.0),
    ),
    Planted(
        id="a value of the format that is another one",
        function=replace(E2M1, after=lambda y, x: np.where(y == 3, 4.0, y)),
        fmt="e2m1",
        rows=("exact", "between", "rounded-once"),
        example=(3.0, 3.0, 4.0),
    ),
    Planted(
        id="noise of 8 bits",
        function=TableCast(goes_up=at_random(8)),
        rows=("unbiased",),
        inferred={"rounding": "stochastic"},
    ),
    Planted(
        id="<= in place of < in noise of 8 bits",
        function=TableCast(goes_up=at_random(8, strictly=False)),
        rows=("random-neighbours", "unbiased", "exact"),
        inferred={"rounding": "stochastic"},
    ),
    Planted(
        id="the same noise in every call",
        function=TableCast(goes_up=at_random(24, seed=1)),
        rows=("fresh-noise",),
        inferred={"rounding": "stochastic"},
    ),
    Planted(
        id="the same noise in every row",
        function=TableCast(goes_up=lambda f, odd, n: torch.rand(f.shape[-1:]).numpy() < f),
        rows=("independent-draws",),
        inferred={"rounding": "stochastic"},
    ),
    Planted(
        id="nearest, though it is held to stochastic rounding",
        function=TableCast(),
        rows=("unbiased",),
        arguments={"rounding": "stochastic"},
    ),
    Planted(
        id="the shape is lost",
        function=lambda x: TableCast()(x).reshape(-1),
        rows=("result-shape", "scalar", "odd-shapes", "empty", "strides"),
    ),
    Planted(
        id="returns integers",
        function=lambda x: TableCast()(x).nan_to_num().int(),
        fmt="e4m3",
        rows=(
            "result-dtype",
            "exact",
            "between",
            "ties",
            "rounded-once",
            "subnormal-results",
            "overflow",
            "infinities",
            "nan",
            "negative-zero",
        ),
    ),
    Planted(
        id="the result's dtype is too narrow",
        function=lambda x: TableCast(name="bf16", overflow=INF, infinities=INF)(x).half(),
        fmt="bf16",
        rows=("result-dtype", "exact", "between", "ties", "rounded-once", "subnormal-inputs", "top"),
    ),
    Planted(
        id="a scalar fails",
        function=_scalar_fails,
        rows=(),
        refused=("scalar",),
    ),
    Planted(
        id="an empty tensor fails",
        function=_empty_fails,
        rows=("empty",),
    ),
    Planted(
        id="the tail of a tensor is dropped",
        function=_tail_dropped,
        rows=("odd-shapes", "scalar"),
        example=(0.0625, 0.0625, 0.0),
    ),
    Planted(
        id="strides are ignored",
        function=_strides_ignored,
        rows=("strides",),
    ),
    Planted(
        id="the input is changed",
        function=_changes_its_input,
        refused=("strides",),
        example=(512.0, 512.0, 448.0),
        rows=("input-unchanged",),
    ),
    Planted(
        id="results change from call to call",
        function=_forgetful,
        rows=("deterministic",),
    ),
)
