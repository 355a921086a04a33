"""Planted deviations: functions with one fault each, the row that must name it, and what must be inferred."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.certification.blocks import MXFP4, MXFP8, NVFP4, floor_exponent, floor_scale, packed
from tests.support.certification.casts import TableCast, at_random, flushed, through
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
from tests.support.formats.scalar_reference import CATALOGUE, decode

INF, NAN = math.inf, math.nan


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A function with a fault.

    `rows` are all rows that deviate, the first of which names the fault. `inferred` are facts that must be found.
    `example` is the counterexample of the first row as (input, expected, got), where it is worth writing down; None
    stands for anything.
    """

    id: str
    function: Callable[..., Any]
    fmt: str = "e4m3"
    kind: str = "cast"
    rows: tuple[str, ...]
    inferred: Mapping[str, object] = field(default_factory=dict)
    example: tuple[object, object, object] | None = None
    refused: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


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
        function=TableCast(goes_up=lambda f, odd, negative: (f > 0.5) | ((f == 0.5) & odd), after=lambda y, x: np.where(np.abs(x) == 464, NAN, y)),
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
        function=lambda x: TableCast(goes_up=lambda f, odd, n: torch.rand(f.shape[-1:]).numpy() < f)(x),
        rows=("independent-draws",),
        inferred={"rounding": "stochastic"},
    ),
    Planted(
        id="nearest, though it is held to stochastic rounding",
        function=TableCast(),
        rows=("unbiased", "fresh-noise"),
        arguments={"rounding": "stochastic"},
    ),
    Planted(id="the shape is lost", function=lambda x: TableCast()(x).reshape(-1), rows=("result-shape", "scalar", "odd-shapes", "empty", "strides")),
    Planted(id="returns integers", function=lambda x: TableCast()(x).nan_to_num().int(), fmt="e4m3", rows=("result-dtype", "exact", "between", "ties", "rounded-once", "subnormal-results", "overflow", "infinities", "nan", "negative-zero")),
    Planted(id="the result's dtype is too narrow", function=lambda x: TableCast(name="bf16", overflow=INF, infinities=INF)(x).half(), fmt="bf16", rows=("result-dtype", "exact", "between", "ties", "rounded-once", "subnormal-inputs", "top")),
    Planted(id="a scalar fails", function=_scalar_fails, rows=(), refused=("scalar",)),
    Planted(id="an empty tensor fails", function=_empty_fails, rows=("empty",)),
    Planted(id="the tail of a tensor is dropped", function=_tail_dropped, rows=("odd-shapes", "scalar"), example=(0.0625, 0.0625, 0.0)),
    Planted(id="strides are ignored", function=_strides_ignored, rows=("strides",)),
    Planted(id="the input is changed", function=_changes_its_input, refused=("strides",), example=(512.0, 512.0, 448.0), rows=("input-unchanged",)),
    Planted(id="results change from call to call", function=_forgetful, rows=("deterministic",)),
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- blocks


def _ceil_exponent(absmax: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(absmax)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)


def _rounded_logarithm(absmax: Tensor) -> Tensor:
    """In float32 the logarithm of the value below a power of two is that of the power."""
    return torch.log2(absmax.float()).floor().to(torch.int32)


def _normal_only(absmax: Tensor) -> Tensor:
    """Maxima below float32's smallest normal value count as 1."""
    return floor_exponent(torch.where(absmax < 2.0**-126, 1.0, absmax))


def _garbage_for_zeros(x: Tensor) -> Tensor:
    y = MXFP4(x)
    blocks = x.unflatten(-1, (-1, 32)) if x.numel() and x.shape[-1] % 32 == 0 else None
    if blocks is None:
        return y
    zero = (blocks == 0).all(-1, keepdim=True).expand(blocks.shape).flatten(-2)
    return torch.where(zero, NAN, y)


def _reads_on(x: Tensor) -> Tensor:
    """Blocks run through the whole tensor: the last one of a row goes on in the next row."""
    flat = x.reshape(1, -1)
    return MXFP4(flat).reshape(x.shape)


def _along_the_first_axis(x: Tensor) -> Tensor:
    return MXFP4(x.transpose(0, -1)).transpose(0, -1) if x.dim() > 1 else MXFP4(x)


def _truncated_scale(absmax: Tensor) -> Tensor:
    return TableCast(goes_up=lambda f, odd, n: np.zeros(f.shape, bool), overflow=448.0, infinities=448.0)(
        absmax / 6
    ).double()


def _never_subnormal(absmax: Tensor) -> Tensor:
    return NVFP4.scale_of(absmax).clamp(min=2.0**-6)


BLOCKS = (
    Planted(
        id="scale rounded up",
        function=replace(MXFP8, scale_of=floor_scale(8, _ceil_exponent)),
        fmt="mxfp8_e4m3",
        rows=("scale", "scale-edges", "scale-range"),
        inferred={"scale_rule": "ceil"},
    ),
    Planted(
        id="scale rounded up, in codes",
        function=lambda x: packed(replace(MXFP8, scale_of=floor_scale(8, _ceil_exponent)), x),
        fmt="mxfp8_e4m3",
        kind="pack",
        rows=("scale", "scale-edges", "scale-range"),
        inferred={"scale_rule": "ceil"},
        example=(1.5, 2.0**-8, 2.0**-7),
    ),
    Planted(
        id="scale by a rounded logarithm",
        function=lambda x: packed(replace(MXFP4, scale_of=floor_scale(2, _rounded_logarithm)), x)[::-1],
        fmt="mxfp4",
        kind="pack",
        rows=("scale-edges",),
        inferred={"scale_rule": "floor"},
    ),
    Planted(
        id="scale by a rounded logarithm, of values",
        function=replace(MXFP4, scale_of=floor_scale(2, _rounded_logarithm)),
        fmt="mxfp4",
        rows=("scale-edges",),
        inferred={"scale_rule": "floor"},
    ),
    Planted(
        id="subnormal block maximum",
        function=replace(MXFP4, scale_of=floor_scale(2, _normal_only)),
        fmt="mxfp4",
        rows=("scale-range",),
    ),
    Planted(
        id="scale off by one binade",
        function=replace(MXFP4, scale_of=floor_scale(3)),
        fmt="mxfp4",
        rows=("scale", "scale-edges", "scale-range", "exact", "between", "ties", "subnormal-results"),
        inferred={"scale_rule": "unknown"},
    ),
    Planted(
        id="NaN in a block ignored",
        function=replace(MXFP4, poison=False),
        fmt="mxfp4",
        rows=("nan-block",),
        inferred={"nan": "zero"},
        example=(NAN, NAN, 0.0),
    ),
    Planted(
        id="a block of zeros becomes NaN",
        function=_garbage_for_zeros,
        fmt="mxfp4",
        rows=("zero-block",),
        example=("a block of zeros", 0.0, NAN),
    ),
    Planted(
        id="elements beyond the largest become NaN",
        function=replace(MXFP8, element=TableCast()),
        fmt="mxfp8_e4m3",
        rows=("clamped",),
    ),
    Planted(
        id="elements truncated",
        function=replace(MXFP4, element=replace(MXFP4.element, goes_up=lambda f, odd, n: np.zeros(f.shape, bool))),
        fmt="mxfp4",
        rows=("between", "ties", "rounded-once", "subnormal-results"),
        inferred={"rounding": "toward_zero", "scale_rule": "floor"},
    ),
    Planted(
        id="a short last block reads the next row",
        function=_reads_on,
        fmt="mxfp4",
        rows=("ragged-block",),
    ),
    Planted(
        id="blocks along the wrong axis",
        function=_along_the_first_axis,
        fmt="mxfp4",
        rows=(
            "own-block",
            "scale",
            "scale-edges",
            "scale-range",
            "clamped",
            "between",
            "ties",
            "subnormal-results",
            "odd-shapes",
        ),
    ),
    Planted(
        id="blocks of 64 values",
        function=replace(MXFP4, block=64),
        fmt="mxfp4",
        rows=("own-block", "scale", "scale-edges", "scale-range", "odd-shapes"),
    ),
    Planted(
        id="short blocks refused",
        function=replace(MXFP4, pad=False),
        fmt="mxfp4",
        rows=(),
        refused=("ragged-block",),
    ),
    Planted(
        id="no tensor scale",
        function=replace(NVFP4, tensor_scale=None),
        fmt="nvfp4",
        rows=("tensor-scale",),
    ),
    Planted(
        id="NVFP4 scale cut off",
        function=replace(NVFP4, scale_of=_truncated_scale),
        fmt="nvfp4",
        rows=("scale", "scale-edges", "scale-range", "tensor-scale"),
    ),
    Planted(
        id="NVFP4 scale never subnormal",
        function=lambda x: packed(replace(NVFP4, scale_of=_never_subnormal), x),
        fmt="nvfp4",
        kind="pack",
        rows=("scale-range",),
    ),
    Planted(
        id="half bytes swapped",
        function=lambda x: packed(MXFP4, x, high_first=True),
        fmt="mxfp4",
        kind="pack",
        rows=("half-order",),
        inferred={"scale_rule": "floor"},
    ),
)


# ----------------------------------------------------------------------------------------------------------------- codes


def _decoded(name: str, codes: Tensor) -> Tensor:
    """The values of codes, from the table of the specification."""
    spec = CATALOGUE[name]
    table = torch.tensor([decode(spec, code) for code in range(2**spec.bits)], dtype=torch.float64)
    return table[codes.long()]


def _nibbles(codes: Tensor, *, high_first: bool = False) -> Tensor:
    pairs = (codes & 15, codes >> 4)
    return torch.stack(pairs[::-1] if high_first else pairs, -1).flatten(-2)


def _mx(
    codes: Tensor, scales: Tensor, *, power=lambda codes: torch.where(codes == 255, NAN, 2.0 ** (codes.double() - 127))
) -> Tensor:
    return _decoded("e4m3", codes) * power(scales).repeat_interleave(32, -1)


def mx_values(codes: Tensor, scales: Tensor) -> Tensor:
    """MXFP8's values, right."""
    return _mx(codes, scales).float()


def nvfp4_values(codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> Tensor:
    """NVFP4's values, right."""
    spread = _decoded("e4m3", scales).repeat_interleave(16, -1)
    return (_decoded("e2m1", _nibbles(codes)) * spread * tensor_scale.double()).float()


CODES = (
    Planted(
        id="NaN scale ignored",
        function=lambda codes, scales: _mx(codes, scales, power=lambda s: 2.0 ** (s.double() - 127)).float(),
        fmt="mxfp8_e4m3",
        kind="unpack",
        rows=("nan-scale",),
    ),
    Planted(
        id="smallest scale flushed",
        function=lambda codes, scales: (_mx(codes, scales) * (scales > 0).repeat_interleave(32, -1)).float(),
        fmt="mxfp8_e4m3",
        kind="unpack",
        rows=("decoded", "decoded-subnormals"),
    ),
    Planted(
        id="subnormal products flushed",
        function=lambda scales, codes: torch.where((y := mx_values(codes, scales)).abs() < 2.0**-126, 0.0 * y, y),
        fmt="mxfp8_e4m3",
        kind="unpack",
        rows=("decoded-subnormals",),
    ),
    Planted(
        id="scale's bias off by one",
        function=lambda codes, scales: 2 * mx_values(codes, scales),
        fmt="mxfp8_e4m3",
        kind="unpack",
        rows=("decoded", "decoded-subnormals"),
    ),
    Planted(
        id="Inf is a number",
        function=lambda codes: torch.where(
            codes & 0x7F == 0x7C,
            torch.copysign(torch.tensor(65536.0), _decoded("e5m2", codes)),
            _decoded("e5m2", codes),
        ),
        fmt="e5m2",
        kind="unpack",
        rows=("decoded-nan",),
        example=(0x7C, INF, 65536.0),
    ),
    Planted(
        id="-0 is +0",
        function=lambda codes: _decoded("e4m3", codes).float() + 0.0,
        kind="unpack",
        rows=("decoded-zeros",),
        example=(0x80, -0.0, 0.0),
    ),
    Planted(
        id="tensor scale ignored",
        function=lambda codes, scales, over: nvfp4_values(codes, scales, over / over),
        fmt="nvfp4",
        kind="unpack",
        rows=("tensor-scale-applied", "decoded"),
    ),
    Planted(
        id="half bytes read in the other order",
        function=lambda codes: _decoded("e2m1", _nibbles(codes, high_first=True)).float(),
        fmt="e2m1",
        kind="unpack",
        rows=("half-order",),
    ),
    Planted(
        id="values change from call to call",
        function=lambda codes: _decoded("e4m3", codes).float() * (1 + (codes.numel() == 1024) * torch.rand(())),
        kind="unpack",
        rows=("repeatable",),
    ),
)


# ------------------------------------------------------------------------------------------------------------ reductions


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


def _tf32(values: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(values)
    return np.where(np.isfinite(values), np.ldexp(np.rint(np.ldexp(mantissa, 11)), exponent - 11), values)


def _tiny_flushed(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) < 2.0**-14, 0.0 * values, values)


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


FP16_SUM = Summation(add=IN_FP16, dtype=torch.float16)
REDUCTIONS = (
    Planted(
        id="fp16 accumulator in a product",
        function=Product(summation=FP16_SUM),
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
        function=Product(
            summation=Summation(product=lambda terms: terms.astype(np.float16).astype(float), add=IN_FP16)
        ),
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
