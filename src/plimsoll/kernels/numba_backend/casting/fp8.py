"""Casting of a matrix to 8-bit codes on the CPU, in bands that threads share.

A band has 64 rows, each read once. A band's values are widened to float32 where they are not, counted if asked for,
multiplied, and rounded by integers. Then its codes, which are still in the cache, are transposed in tiles of 64 by 64.
"""

import functools
import itertools

import numpy as np
import torch
from numba import carray
from torch import Tensor

from plimsoll import row_layout
from plimsoll.kernels.numba_backend import threads
from plimsoll.kernels.numba_backend.compiling import as_float32, as_uint32, inlined, kernel, pointer, widen_half
from plimsoll.kernels.numba_backend.measuring.kernels import add_block, fold, scan
from plimsoll.kernels.numba_backend.memory import KINDS, empty_rows, merge_into, row_addresses
from plimsoll.kernels.operators.fp8_cast import NAN_CODE, Cast


def fp8_cast(x: Tensor, cast: Cast) -> None:
    """Writes the codes of `x` and of its transpose, and counts x into its row.

    A matrix that lies column by column is taken as its transpose; others with gaps or repeats are copied.
    """
    if not x.is_contiguous() and x.t().is_contiguous():
        x, cast = x.t(), cast._replace(codes=cast.columns, columns=cast.codes)
    x = x.contiguous()
    places = [] if cast.bank is None else row_addresses(cast.bank, [cast.row])
    if cast.bank is not None:
        empty_rows(places, cast.bank.shape[1])
    shares = _cut(x)
    scale = float(cast.scale if cast.scale_tensor is None else cast.scale_tensor)
    scratch = np.zeros((len(shares) if places else 0, row_layout.NARROW), np.int64)

    def work(index: int) -> None:
        row = scratch.ctypes.data + scratch.strides[0] * index if places else 0
        _launch(x, cast, *shares[index], scale, row)

    threads.run([functools.partial(work, index) for index in range(len(shares))])
    if places:
        merge_into(places * len(shares), scratch)


def _cut(x: Tensor) -> list[tuple[int, int]]:
    """Return the rows of each task: whole bands."""
    rows = x.shape[0]
    bands = -(-rows // BAND)
    count = max(1, min(threads.shares(x.numel()), bands))
    edges = [min(rows, BAND * (bands * i // count)) for i in range(count + 1)]
    return list(itertools.pairwise(edges)) if x.numel() else []


def _launch(x: Tensor, cast: Cast, first: int, last: int, scale: float, row: int) -> None:
    rows, columns = x.shape
    written = cast.codes if cast.codes is not None else cast.columns
    assert written is not None
    height = written.shape[0] if cast.codes is not None else written.shape[1]
    _cast_band(
        x.data_ptr(), x.element_size(), KINDS[x.dtype], rows, columns, first, last, np.float32(scale),
        cast.dtype == torch.float8_e5m2, 0 if cast.codes is None else cast.codes.data_ptr(),
        0 if cast.columns is None else cast.columns.data_ptr(), height, row,
    )  # fmt: skip


BAND = 64
_BLOCK = 4096
_COUNT, _WORDS = row_layout.COUNT, row_layout.NARROW
_INF32 = 0x7F80_0000
_NAN_CODE = NAN_CODE


@inlined
def _encode(bits, inverse_quantum, drop, rebias, least, most):
    """Return the code of float32 bits without its sign.

    `drop` mantissa bits go, `rebias` is the exponent's new origin.
    """
    clamped = min(bits, most)
    odd = np.uint32(clamped >> drop) & np.uint32(1)
    half = np.uint32(np.uint32(1) << np.uint32(drop - np.uint32(1))) - np.uint32(1)
    normal = np.uint32(np.uint32(clamped + half) + odd - rebias) >> drop
    # Adding this rounds to a multiple of the quantum, and leaves their number in the low bits.
    small = np.uint32(as_uint32(as_float32(clamped) + inverse_quantum) - as_uint32(inverse_quantum))
    return small if clamped < least else normal


@inlined
def _encode_e4m3(wide, scale, codes, n):
    for i in range(n):
        bits = as_uint32(as_float32(wide[i]) * scale)
        magnitude = bits & np.uint32(0x7FFF_FFFF)
        code = _encode(
            magnitude, np.float32(2.0**14), np.uint32(20), np.uint32(120 << 23), np.uint32(121 << 23),
            np.uint32(0x43E0_0000),
        )  # fmt: skip
        signed = code | (np.uint32(bits >> np.uint32(24)) & np.uint32(0x80))
        codes[i] = np.uint8(np.uint32(_NAN_CODE) if magnitude > np.uint32(_INF32) else signed)


@inlined
def _encode_e5m2(wide, scale, codes, n):
    for i in range(n):
        bits = as_uint32(as_float32(wide[i]) * scale)
        magnitude = bits & np.uint32(0x7FFF_FFFF)
        code = _encode(
            magnitude, np.float32(2.0**7), np.uint32(21), np.uint32(112 << 23), np.uint32(113 << 23),
            np.uint32(0x4760_0000),
        )  # fmt: skip
        signed = code | (np.uint32(bits >> np.uint32(24)) & np.uint32(0x80))
        codes[i] = np.uint8(np.uint32(_NAN_CODE) if magnitude > np.uint32(_INF32) else signed)


@inlined
def _widen(wide, address, kind, n):
    """Float32 bits of `n` values: float32 (0), bfloat16 (1) or float16 (2)."""
    if kind == 0:
        whole = carray(pointer(address), (n,), np.uint32)
        for i in range(n):
            wide[i] = whole[i]
    elif kind == 1:
        narrow = carray(pointer(address), (n,), np.uint16)
        for i in range(n):
            wide[i] = np.uint32(np.uint32(narrow[i]) << np.uint32(16))
    else:
        narrow = carray(pointer(address), (n,), np.uint16)
        for i in range(n):
            wide[i] = widen_half(np.uint32(narrow[i]))


@inlined
def _transpose(band, width, first, height, columns):
    """Writes the band's codes, rows from `first` on, as columns of the transpose."""
    for start in range(0, width, BAND):
        for column in range(start, min(start + BAND, width)):
            target = columns[column, first : first + height]
            for i in range(height):
                target[i] = band[i, column]


@kernel
def _cast_band(address, item, kind, rows, columns, first, last, scale, e5m2, codes_at, columns_at, height, row_at):
    """Cast rows `first` to `last`; addresses are 0 for outputs that are not wanted.

    Outputs are the codes, those of the transpose, and the row. `item` is the bytes of a value; `height` the transpose's
    row length. What both are made up with is written too: columns by every call, rows by the one that ends with the
    last row.
    """
    width = (columns + 15) // 16 * 16
    wide, exponents, clean = np.empty(_BLOCK, np.uint32), np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.uint32)
    counts, low, high = np.zeros((4, 256), np.int64), 255, 0
    row = carray(pointer(row_at), (_WORDS,), np.int64)
    band = np.zeros((BAND, width if columns_at and not codes_at else 0), np.uint8)
    codes = carray(pointer(codes_at), (height, width if codes_at else 0), np.uint8)
    transposed = carray(pointer(columns_at), (width if columns_at else 0, height), np.uint8)
    for start in range(first, last, BAND):
        end = min(start + BAND, last)
        made_up = height if end == rows else end
        lines = codes[start:made_up] if codes_at else band
        for index in range(start, end):
            line = lines[index - start]
            for start_column in range(0, columns, _BLOCK):
                n = min(_BLOCK, columns - start_column)
                _widen(wide, address + item * (index * columns + start_column), kind, n)
                if row_at:
                    extremes = scan(wide, exponents, n)
                    lowest, top = add_block(wide, n, extremes, exponents, clean, row, row.view(np.float64), counts)
                    low, high = min(low, lowest), max(high, top)
                if e5m2:
                    _encode_e5m2(wide, scale, line[start_column : start_column + n], n)
                else:
                    _encode_e4m3(wide, scale, line[start_column : start_column + n], n)
            line[columns:] = 0
        if codes_at:
            codes[end:made_up] = 0
        if columns_at:
            _transpose(lines, width, start, end - start, transposed)
            transposed[:, end:made_up] = 0
    if row_at:
        row[_COUNT] += (last - first) * columns
        fold(counts, row, low, high)
