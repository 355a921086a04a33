"""Launching the casting kernels: from specs to their arguments."""

from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from plimsoll.errors import UnsupportedTensorError
from plimsoll.formats import Format
from plimsoll.kernels.dtypes import FORMATS
from plimsoll.kernels.operators.cast_spec import (
    CEIL,
    EVEN,
    FLOOR,
    OVERFLOW_INF,
    OVERFLOW_MAX,
    RCEIL,
    BlockSpec,
    CastArguments,
    CastSpec,
)
from plimsoll.kernels.triton_backend import input_bits
from plimsoll.kernels.triton_backend.casting.kernels import (
    DOUBLE,
    GROUPS,
    RAGGED_VALUES,
    ROUND,
    SAME,
    WARPS,
    cast_dense,
    cast_ragged,
    double_bits,
    fields,
)
from plimsoll.kernels.triton_backend.measuring import launching

_IMPLICIT = 1 << 52
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def cast(x: Tensor, out: Tensor, arguments: CastArguments[CastSpec]) -> None:
    """Write the values of `x` in the format into `out` of any floating dtype."""
    _cast(x, out, arguments, codes=False)


def pack(x: Tensor, codes: Tensor, arguments: CastArguments[CastSpec]) -> None:
    """Write the codes of matrix `x` into `codes`; 4-bit codes two a byte."""
    pairs = arguments.spec.format.bits == 4
    if pairs and _straddles(x):
        single = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        _cast(x, single, arguments, codes=True)
        codes.copy_(_pair(single))
    else:
        _cast(x, codes, arguments, codes=True, nibbles=pairs)


def block_cast(x: Tensor, out: Tensor, arguments: CastArguments[BlockSpec]) -> None:
    """Write matrix `x` in the block format into `out`; blocks run along the rows."""
    _cast_blocks(x, out, None, arguments)


def block_pack(x: Tensor, codes: Tensor, scales: Tensor, arguments: CastArguments[BlockSpec]) -> None:
    """Write element codes (as `pack`) and one scale code a block."""
    if arguments.spec.element.format.bits == 4 and not _is_dense(x, arguments.spec.block):
        single = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        _cast_blocks(x, single, scales, arguments)
        codes.copy_(_pair(single))
    else:
        _cast_blocks(x, codes, scales, arguments)


def _straddles(x: Tensor) -> bool:
    """Return True if a pair of consecutive values may lie in two rows."""
    return x.shape[0] > 1 and x.shape[1] % 2 == 1


def _is_dense(x: Tensor, block: int) -> bool:
    return x.shape[1] % block == 0 and 1 < block <= 256 and block & (block - 1) == 0


def _pair(codes: Tensor) -> Tensor:
    pairs = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2)).unflatten(1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def _cast(x: Tensor, out: Tensor, arguments: CastArguments[CastSpec], codes: bool, nibbles: bool = False) -> None:
    spec = arguments.spec
    fmt = spec.format
    wide = arguments.scaled or x.dtype == torch.float64 or not _fits_float32(fmt)
    target = _Target(out)
    if x.numel():
        with launching(x):
            cast_dense[(-(-x.numel() // (GROUPS * 1024)),)](
                _input(x), target.integers, None, x.numel(),
                *_numbers(x, arguments), *fields(fmt, wide), 0, 0,
                WIDE=wide, OVERFLOW=spec.overflow, SIGNED=bool(spec.signed), **_carrier(out, codes, wide),
                CODES=codes, NIBBLES=nibbles, BLOCK=0, SCALE=None, GROUPS=GROUPS, **_constants(x, spec, arguments),
            )  # fmt: skip
    target.finish()


def _cast_blocks(x: Tensor, out: Tensor, scales: Tensor | None, arguments: CastArguments[BlockSpec]) -> None:
    spec = arguments.spec
    element = spec.element.format
    rows, n = x.shape
    codes = scales is not None
    target, scale_target = _Target(out), _Target(scales)
    runtime = (*_numbers(x, arguments), *fields(element, True), element.max_exponent, _bump(spec))
    constants: dict[str, Any] = {
        **_constants(x, spec.element, arguments),
        **_carrier(out, codes, True), "CODES": codes, "BLOCK": spec.block, "SCALE": _scale_constants(spec),
    }  # fmt: skip
    with launching(x):
        if x.numel() and _is_dense(x, spec.block):
            cast_dense[(-(-x.numel() // (GROUPS * 1024)),)](
                _input(x), target.integers, scale_target.integers, x.numel(), *runtime,
                WIDE=True, OVERFLOW=OVERFLOW_MAX, SIGNED=True, NIBBLES=codes and element.bits == 4, GROUPS=GROUPS,
                **constants,
            )  # fmt: skip
        elif x.numel():
            padded = triton.next_power_of_2(spec.block)
            group = max(1, RAGGED_VALUES // padded)
            blocks = rows * -(-n // spec.block)
            cast_ragged[(-(-blocks // group),)](
                _input(x), target.integers, scale_target.integers, blocks, n, *runtime,
                PADDED=padded, BLOCKS=group, **constants,
            )  # fmt: skip
    target.finish()
    scale_target.finish()


class _Target:
    """Output of a kernel as contiguous integers, which `finish` copies if needed."""

    def __init__(self, out: Tensor | None) -> None:
        self._out = out
        self._held = None if out is None else out if out.is_contiguous() else torch.empty_like(out).contiguous()
        self.integers = None if self._held is None else self._held.view(_INTEGERS[self._held.element_size()])

    def finish(self) -> None:
        if self._out is not None and self._held is not None and self._held is not self._out:
            self._out.copy_(self._held)


def _input(x: Tensor) -> Tensor:
    if x.dtype not in input_bits.DTYPES:
        raise UnsupportedTensorError(f"cast: expected a floating dtype; got {x.dtype}.")
    return input_bits.as_integers(x.contiguous())


def _numbers(x: Tensor, arguments: CastArguments[Any]) -> tuple[Any, ...]:
    """Return scale, its tensor, tensor scale, seed and key; tensors on x's device."""

    def on_device(scalar: Tensor | None) -> Tensor | None:
        return None if scalar is None else scalar.to(x.device)

    return (
        double_bits(arguments.scale), on_device(arguments.scale_tensor), on_device(arguments.tensor_scale),
        arguments.seed, on_device(arguments.key),
    )  # fmt: skip


def _constants(x: Tensor, spec: CastSpec, arguments: CastArguments[Any]) -> dict[str, Any]:
    # Without fusion of products and sums, so that float64 arithmetic is the reference's to the bit.
    return {
        "KIND": input_bits.kind(x.dtype), "SCALED": arguments.scaled, "ROUNDING": spec.rounding,
        "FNUZ": spec.format.specials == "fnuz", "num_warps": WARPS, "enable_fp_fusion": False,
    }  # fmt: skip


def _fits_float32(fmt: Format) -> bool:
    return fmt.signed and fmt.mantissa_bits <= 23 and fmt.min_exponent >= -126 and fmt.max <= _FLOAT32_MAX


def _carrier(out: Tensor, codes: bool, wide: bool) -> dict[str, Any]:
    """Return how rounded values become output bits, with fields if they are rounded."""
    if codes or (out.dtype == torch.float32 and not wide):
        return {"CARRIER": SAME.value, "TARGET": None}
    if out.dtype == torch.float64:
        return {"CARRIER": DOUBLE.value, "TARGET": None}
    fmt = FORMATS[out.dtype]
    overflow = OVERFLOW_INF if fmt.has_inf else OVERFLOW_MAX
    return {"CARRIER": ROUND.value, "TARGET": (*fields(fmt, wide), overflow, int(fmt.specials == "fnuz"))}


def _scale_constants(spec: BlockSpec) -> tuple[int, ...]:
    scale = spec.scale.format
    more = (scale.min_exponent, scale.max_exponent, scale.bias, spec.scale.rounding, int(scale.specials == "fnuz"))
    return (*fields(scale, True), *more)


def _bump(spec: BlockSpec) -> int:
    """Return the smallest fraction of a block's largest that raises its scale.

    It has 52 bits, and the scale takes the next exponent.
    """
    element = spec.element.format
    thresholds = {
        FLOOR: _IMPLICIT,
        CEIL: 1,
        RCEIL: (double_bits(element.max) & (_IMPLICIT - 1)) + 1,
        EVEN: _IMPLICIT - (1 << max(51 - element.mantissa_bits, 0)),
    }
    return thresholds[spec.rule]
