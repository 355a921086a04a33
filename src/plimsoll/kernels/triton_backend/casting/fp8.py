"""Casting a matrix and its transpose to 8-bit codes: the kernel and its launch."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plimsoll.kernels.operators.fp8_cast import NAN_CODE, Cast
from plimsoll.kernels.triton_backend import input_bits
from plimsoll.kernels.triton_backend.counting import WARPS, begin, finish, tally
from plimsoll.kernels.triton_backend.measuring import REGISTERS, empty, interpreted, launching, share

HEIGHT, WIDTH = 128, 64
_COUNTED_HEIGHT = 64  # counting holds more in registers
# From compute capability 8.9 the hardware's own conversion rounds, with saturation (the compile test looks for it in
# the code); else, and in the interpreter, integers do.
_CONVERTS = (8, 9)
_NAN = tl.constexpr(NAN_CODE)


# A program takes tiles of the matrix. Each is loaded once in the order in which it lies, counted by `counting`
# where there is a bank, multiplied, rounded, and stored twice: as it is, and transposed. For the second store Triton
# exchanges the tile's codes through shared memory, so that both stores, and the load, touch memory in whole lines: a
# tile is 128 rows high, the 128 bytes of a line of the transpose, and 64 columns wide, 128 bytes of 16-bit values.
@triton.jit(do_not_specialize=["row", "per_program"])
def fp8_cast_matrix(
    x, codes, columns, bank, scale_at, scale, rows, width, row_stride, column_stride, padded_rows, padded_width,
    row: tl.int64, per_program,
    E5M2: tl.constexpr, KIND: tl.constexpr, ROW_WORDS: tl.constexpr, HARDWARE: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Cast tiles row by row; `codes`, `columns` and `scale_at` may be None."""
    TILE: tl.constexpr = HEIGHT * WIDTH
    ITEM: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    across = tl.cdiv(padded_width, WIDTH)
    first = tl.program_id(0) * per_program
    last = tl.minimum(first + per_program, across * tl.cdiv(padded_rows, HEIGHT))
    factor = scale
    if scale_at is not None:
        factor = tl.load(scale_at)
    counters = bank
    if ROW_WORDS:
        counters = bank + row.to(tl.int64) * ROW_WORDS
    valid = tl.zeros((), tl.int64)
    state = begin(False)
    for tile in range(first, last):
        down = tile // across * HEIGHT + tl.arange(0, HEIGHT)
        right = tile % across * WIDTH + tl.arange(0, WIDTH)
        there = (down < rows)[:, None] & (right < width)[None, :]
        offset = down.to(tl.int64)[:, None] * row_stride + right.to(tl.int64)[None, :] * column_stride
        bits = input_bits.decode(tl.load(x + offset, mask=there, other=0), KIND)
        if ROW_WORDS:
            valid += tl.sum(there.to(tl.int32))
            state = tally(counters, bits.reshape(TILE), state, False, ITEM, TILE)
        code = _round(bits.to(tl.float32, bitcast=True) * factor, E5M2, HARDWARE)
        inside = (down < padded_rows)[:, None] & (right < padded_width)[None, :]
        if codes is not None:
            place = down.to(tl.int64)[:, None] * padded_width + right[None, :]
            tl.store(codes + place, code, mask=inside)
        if columns is not None:
            place = right.to(tl.int64)[:, None] * padded_rows + down[None, :]
            tl.store(columns + place, tl.trans(code), mask=tl.trans(inside))
    if ROW_WORDS:
        finish(counters, valid, state, False)


@triton.jit
def _round(values, E5M2: tl.constexpr, HARDWARE: tl.constexpr):
    """The code of each float32 value, as uint8."""
    if HARDWARE:
        if E5M2:
            return values.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        DROP: tl.constexpr = 21 if E5M2 else 20
        REBIAS: tl.constexpr = (112 if E5M2 else 120) << 23
        LEAST: tl.constexpr = (113 if E5M2 else 121) << 23
        MOST: tl.constexpr = 0x47600000 if E5M2 else 0x43E00000
        # Adding this rounds to a multiple of the format's smallest value, and leaves their number in the low bits.
        SHIFTER: tl.constexpr = (134 if E5M2 else 141) << 23
        bits = values.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        clamped = tl.minimum(magnitude, MOST)
        normal = (clamped + ((1 << (DROP - 1)) - 1) + ((clamped >> DROP) & 1) - REBIAS) >> DROP
        shifter = tl.full((), SHIFTER, tl.int32).to(tl.float32, bitcast=True)
        small = (clamped.to(tl.float32, bitcast=True) + shifter).to(tl.int32, bitcast=True) - SHIFTER
        code = tl.where(clamped < LEAST, small, normal) | ((bits >> 24) & 0x80)
        return tl.where(magnitude > 0x7F800000, _NAN, code).to(tl.uint8)


def fp8_cast(x: Tensor, cast: Cast) -> None:
    """Write the codes of `x` and its transpose, and count x. Strides may be any."""
    if cast.bank is not None:
        empty(cast.bank, [cast.row])
    if x.numel() == 0:
        return
    written = cast.codes if cast.codes is not None else cast.columns
    assert written is not None
    padded_rows, padded_width = written.shape if cast.codes is not None else reversed(written.shape)
    height = HEIGHT if cast.bank is None else _COUNTED_HEIGHT
    tiles = triton.cdiv(padded_rows, height) * triton.cdiv(padded_width, WIDTH)
    per_program, programs = (1, [tiles]) if cast.bank is None else share([tiles], 1, x.device)
    fixed: dict[str, Any] = {
        "E5M2": cast.dtype == torch.float8_e5m2, "KIND": input_bits.kind(x.dtype),
        "ROW_WORDS": 0 if cast.bank is None else cast.bank.stride(0), "HARDWARE": _converts(x),
        "HEIGHT": height, "WIDTH": WIDTH, "num_warps": 2 * WARPS if cast.bank is None else WARPS,
    }  # fmt: skip
    if cast.bank is not None:
        fixed["maxnreg"] = REGISTERS
    with launching(x):
        fp8_cast_matrix[(programs[0],)](
            input_bits.as_integers(x), cast.codes, cast.columns, cast.bank, cast.scale_tensor,
            float(cast.scale), *x.shape,
            *x.stride(), padded_rows, padded_width, cast.row, per_program, **fixed,
        )  # fmt: skip


def _converts(x: Tensor) -> bool:
    return not interpreted() and x.is_cuda and torch.cuda.get_device_capability(x.device) >= _CONVERTS
