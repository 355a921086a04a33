"""Block formats with one fault each."""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tests.support.certification.blocks import MXFP4, MXFP8, NVFP4, floor_exponent, floor_scale, packed
from tests.support.certification.casts import TableCast
from tests.support.certification.planted import Planted

NAN = math.nan


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
