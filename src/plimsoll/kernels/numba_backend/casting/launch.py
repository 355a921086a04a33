"""Casting on the CPU, from tensors to kernels: width, numbers, shares of threads."""

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plimsoll.formats import Format
from plimsoll.formats.codec import nan_code
from plimsoll.kernels import torch_backend
from plimsoll.kernels.dtypes import FORMATS
from plimsoll.kernels.numba_backend import threads
from plimsoll.kernels.numba_backend.casting import kernels
from plimsoll.kernels.numba_backend.memory import KINDS, pieces
from plimsoll.kernels.operators.cast_spec import (
    DOWN,
    NEAREST_AWAY,
    NEAREST_EVEN,
    OVERFLOW_INF,
    OVERFLOW_MAX,
    STOCHASTIC,
    TOWARD_ZERO,
    UP,
    BlockSpec,
    CastArguments,
    CastSpec,
)
from plimsoll.kernels.operators.checks import is_dense

_KINDS = KINDS | {torch.uint8: 4, torch.uint16: 5}
_PAIRS = 6
_NO_PLAN = np.empty(0, np.int64)
_MOST_CUT_ROWS = 64


def cast(x: Tensor, out: Tensor, arguments: CastArguments[CastSpec]) -> None:
    """Writes the values of `x`, as the format holds them, into `out` (of x's shape)."""
    spec = arguments.spec
    if not spec.signed or x.dtype not in _KINDS or out.dtype not in _KINDS:
        # E8M0 as an element format, and 8-bit carriers: correct, and not worth kernels of their own.
        torch_backend.cast(x, out, arguments)
        return
    numbers = _factor(arguments), _key(spec, arguments)
    same_memory = x.stride() == out.stride() and spec.rounding != STOCHASTIC and is_dense(x)
    if same_memory or (x.is_contiguous() and out.is_contiguous()):
        _cast_flat(x, out, spec, *numbers, 0)
        return
    offset = 0
    for piece, room in zip(pieces(x), pieces(out), strict=True):
        rounded = torch.empty(piece.shape, dtype=out.dtype, device="cpu")
        _cast_flat(piece.contiguous(), rounded, spec, *numbers, offset)
        room.copy_(rounded)
        offset += piece.numel()


def pack(x: Tensor, codes: Tensor, arguments: CastArguments[CastSpec]) -> None:
    """Write the codes of matrix `x` into `codes`; 4-bit codes two a byte."""
    spec = arguments.spec
    if not spec.signed or x.dtype not in _KINDS:
        torch_backend.pack(x, codes, arguments)
        return
    single = codes if codes.shape == x.shape else torch.empty(x.shape, dtype=torch.uint8, device="cpu")
    _cast_flat(x.contiguous(), single, spec, _factor(arguments), _key(spec, arguments), 0)
    if single is not codes:
        codes.copy_(single[:, 0::2])
        codes[:, : x.shape[1] // 2] |= single[:, 1::2] << 4


def block_cast(x: Tensor, out: Tensor, arguments: CastArguments[BlockSpec]) -> None:
    """Write matrix `x` in the block format into `out`; blocks run along the rows."""
    if x.dtype not in _KINDS or out.dtype not in _KINDS:
        torch_backend.block_cast(x, out, arguments)
        return
    written = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device="cpu")
    _cast_blocks(x, written, _KINDS[out.dtype], None, arguments)
    if written is not out:
        out.copy_(written)


def block_pack(x: Tensor, codes: Tensor, scales: Tensor, arguments: CastArguments[BlockSpec]) -> None:
    """Write element codes (as `pack`) and one scale code a block."""
    if x.dtype not in _KINDS:
        torch_backend.block_pack(x, codes, scales, arguments)
        return
    kind = _PAIRS if arguments.spec.element.format.bits == 4 else _KINDS[codes.dtype]
    _cast_blocks(x, codes, kind, scales, arguments)


def _cast_flat(x: Tensor, out: Tensor, spec: CastSpec, factor: float, key: Any, offset: int) -> None:
    """Run the kernel over equal stretches of memory from the value `offset` on."""
    count = x.numel()
    source_kind, target_kind = _KINDS[x.dtype], _KINDS[out.dtype]
    code_kind = None if out.dtype.is_floating_point else target_kind
    exponent = _exponent_of(factor)
    narrow = exponent is not None and source_kind != 3 and target_kind != 3 and _fits_float32(spec, exponent)
    width = 32 if narrow else 64
    plan = _plan(spec, width, -exponent if narrow and exponent is not None else 0)
    carrier = _carrier_plan(out.dtype, spec if factor == 1.0 else None, width)

    def task(first: int, last: int) -> None:
        ends = (x.data_ptr(), source_kind, out.data_ptr(), target_kind, code_kind, first, last, offset)
        numbers = (_directed(spec), plan, carrier, key)
        if narrow:
            kernels.cast32(*ends, *numbers)
        else:
            kernels.cast64(*ends, *numbers, factor)

    threads.run([functools.partial(task, *cut) for cut in _cuts(count, count, kernels.SPAN)])


def _cast_blocks(
    x: Tensor, out: Tensor, target_kind: int, scales: Tensor | None, arguments: CastArguments[BlockSpec]
) -> None:
    spec, tensor_scale = arguments.spec, arguments.tensor_scale
    x = x.contiguous()
    rows, columns = _shape_for_threads(x, spec.block)
    factor, source_kind = _factor(arguments), _KINDS[x.dtype]
    over = float(tensor_scale) if tensor_scale is not None else None
    narrow = factor == 1.0 and over is None and source_kind != 3 and target_kind != 3 and _blocks_fit_float32(spec)
    width = 32 if narrow else 64
    element, carrier = _plan(spec.element, width, 0), _carrier_plan(out.dtype, None, width)
    scale_format = spec.scale.format
    scale_numbers = np.array(
        (
            spec.scale.bias, scale_format.min_exponent, scale_format.max_exponent, nan_code(scale_format),
            scale_format.max_code, scale_format.mantissa_bits,
        ),
        np.int64,
    )  # fmt: skip
    key = _key(spec.element, arguments)
    code_kind = None if scales is None else target_kind
    place = None if scales is None else scales.data_ptr()
    rule = spec.rule if over is None else None

    def task(first: int, last: int) -> None:
        ends = (x.data_ptr(), source_kind, out.data_ptr(), target_kind, code_kind, place, first, last, columns)
        numbers = (spec.block, rule, _directed(spec.element), element, scale_numbers, carrier)
        if narrow:
            kernels.cast_blocks32(*ends, *numbers)
        else:
            kernels.cast_blocks64(*ends, *numbers, factor, over, spec.scale.rounding == UP, key)

    threads.run([functools.partial(task, *cut) for cut in _cuts(rows, x.numel(), 1)])


def _shape_for_threads(x: Tensor, block: int) -> tuple[int, int]:
    """Return the matrix's shape, with few long rows cut into more of whole blocks."""
    rows, columns = x.shape
    while rows < _MOST_CUT_ROWS and columns > kernels.SPAN and columns % (2 * block) == 0:
        rows, columns = 2 * rows, columns // 2
    return rows, columns


def _blocks_fit_float32(spec: BlockSpec) -> bool:
    """Return whether blocks of up to 32 bits can be scaled and rounded as float32."""
    element = spec.element.format
    # Scaling may flush a value below 2**-126, which every mode here rounds to zero anyway: not so up, down, stochastic.
    keeps_zero = spec.element.rounding in (NEAREST_EVEN, NEAREST_AWAY, TOWARD_ZERO)
    return keeps_zero and 2 <= element.max_exponent <= 100 and element.quantum_exponent >= -22


def _cuts(count: int, values: int, step: int) -> list[tuple[int, int]]:
    """Return about equal ranges over `count` things, from multiples of `step`."""
    size = -(-count // threads.shares(values))
    size = max(-(-size // step) * step, 1)
    return [(first, min(first + size, count)) for first in range(0, count, size)]


def _directed(spec: CastSpec) -> bool | None:
    """Return None for nearest even and stochastic: other modes are not compiled then."""
    return None if spec.rounding in (NEAREST_EVEN, STOCHASTIC) else True


def _factor(arguments: CastArguments[Any]) -> float:
    return arguments.scale if arguments.scale_tensor is None else float(arguments.scale_tensor)


def _key(spec: CastSpec, arguments: CastArguments[Any]) -> Any:
    """The key of the noise; None where no value is rounded at random."""
    if spec.rounding != STOCHASTIC:
        return None
    return np.uint64((arguments.seed if arguments.key is None else int(arguments.key)) & 0xFFFF_FFFF_FFFF_FFFF)


def _exponent_of(factor: float) -> int | None:
    """K where the factor is 2**k."""
    fraction, exponent = math.frexp(factor)
    return exponent - 1 if fraction == 0.5 else None


def _fits_float32(spec: CastSpec, exponent: int) -> bool:
    """Return whether float32 bits over 2**exponent can be rounded to the format."""
    fmt = spec.format
    lowest, highest = fmt.min_exponent - exponent, fmt.max_exponent - exponent
    return -126 <= lowest and highest <= 127 and lowest <= 127 and fmt.mantissa_bits <= 23


@functools.lru_cache(maxsize=512)
def _plan(spec: CastSpec, width: int, shift: int) -> Any:
    """The numbers a kernel needs for a format whose values are times 2**shift."""
    fmt = spec.format
    bias = 127 if width == 32 else 1023
    largest = _bits(math.ldexp(fmt.max, shift), width)
    beyond = {
        OVERFLOW_MAX: largest, OVERFLOW_INF: _bits(math.inf, width)
    }.get(spec.overflow, _bits(math.nan, width))  # fmt: skip
    plan = np.zeros(15, np.int64)
    plan[kernels.MANTISSA] = fmt.mantissa_bits
    plan[kernels.LOWEST] = fmt.min_exponent + shift + bias
    plan[kernels.LARGEST] = largest
    plan[kernels.BEYOND_POSITIVE] = largest if spec.rounding in (TOWARD_ZERO, DOWN) else beyond
    plan[kernels.BEYOND_NEGATIVE] = largest if spec.rounding in (TOWARD_ZERO, UP) else beyond
    plan[kernels.INFINITE] = beyond
    plan[kernels.QUANTUM] = _bits(math.ldexp(fmt.smallest_subnormal, shift), width)
    plan[kernels.NO_MANTISSA] = fmt.mantissa_bits == 0
    plan[kernels.KEEPS_SIGN] = fmt.has_negative_zero
    plan[kernels.AWAY] = {UP: 1, DOWN: 2, NEAREST_AWAY: 4}.get(spec.rounding, 0)
    plan[kernels.MAX_CODE] = fmt.max_code
    plan[kernels.INF_CODE] = fmt.max_code + 1
    plan[kernels.NAN_CODE] = nan_code(fmt)
    plan[kernels.SIGN_SHIFT] = fmt.bits - 1
    plan[kernels.BEYOND_CODE] = {OVERFLOW_MAX: fmt.max_code, OVERFLOW_INF: fmt.max_code + 1}.get(
        spec.overflow, nan_code(fmt)
    )
    return plan


def _carrier_plan(dtype: torch.dtype, spec: CastSpec | None, width: int) -> Any:
    """Return the plan of rounding to the carrier, empty if it is exact; None: codes."""
    if not dtype.is_floating_point:
        return None
    if dtype == torch.float64:
        return _NO_PLAN
    carrier = FORMATS[dtype]
    if width == 32 and (dtype == torch.float32 or (spec is not None and _holds(carrier, spec.format))):
        return _NO_PLAN
    return _plan(CastSpec.of(carrier, NEAREST_EVEN, saturate=False), width, 0)


def _holds(carrier: Format, fmt: Format) -> bool:
    return (
        carrier.mantissa_bits >= fmt.mantissa_bits
        and carrier.max >= fmt.max
        and carrier.quantum_exponent <= fmt.quantum_exponent
    )


def _bits(value: float, width: int) -> int:
    return int(np.float32(value).view(np.uint32) if width == 32 else np.float64(value).view(np.int64))
