"""Counting NaN and Inf on the CPU at memory's speed: one kernel for all dtypes."""

import ctypes
from collections.abc import Sequence
from itertools import chain

import numpy as np
from numba import carray
from torch import Tensor

from plimsoll.errors import UnsupportedTensorError
from plimsoll.formats import Format
from plimsoll.kernels.dtypes import EIGHT_BIT, FLOATING, FORMATS
from plimsoll.kernels.numba_backend import threads
from plimsoll.kernels.numba_backend.compiling import inlined, kernel, pointer
from plimsoll.kernels.numba_backend.memory import Words, pieces, without_repeats, word_address
from plimsoll.kernels.operators.checks import is_dense


def _encoding(fmt: Format) -> int:
    """Return bytes of a value, and above 8 bits the magnitude where numbers end.

    Codes above that magnitude are no numbers.

    That is 0 where only the code 0x80 is none, and for 32 and 64 bits, whose kernels have it as a constant.
    """
    limit = 0 if fmt.bits > 16 or fmt.specials == "fnuz" else fmt.max_code + 1
    return fmt.bits // 8 | limit << 8


_ENCODINGS = {dtype: _encoding(FORMATS[dtype]) for dtype in (*FLOATING, *EIGHT_BIT)}


def count_nonfinite(tensors: Sequence[Tensor], counts: Tensor, index: int) -> None:
    """Adds the number of NaN and Inf values of all tensors to ``counts[index]``."""
    ctypes.c_int64.from_address(word_address(counts, index)).value += count_values(tensors)


def count_values(tensors: Sequence[Tensor]) -> int:
    """Return the number of NaN and Inf values of all tensors."""
    words: list[int] = []
    total = 0
    for x in tensors:
        encoding = _ENCODINGS.get(x.dtype)
        if encoding is None:
            raise UnsupportedTensorError(f"count_nonfinite: expected floating tensors; got {x.dtype}. Leave it out.")
        if x.is_contiguous() or is_dense(x):
            words += (x.data_ptr(), x.numel(), encoding)
        else:
            total += _count_strided(x, encoding)
    return total + _count(words)


def _count(words: list[int]) -> int:
    values = sum(words[1::3])
    shares = threads.shares(values) if values > threads.SMALLEST_SHARE else 1
    if shares == 1:
        return _launch(words)
    shared, _ = threads.cut(words[1::3], shares)
    totals: list[int] = []

    def work(share: list[threads.Piece]) -> None:
        cut = ((words[3 * i] + start * (words[3 * i + 2] & 0xFF), n, words[3 * i + 2]) for i, start, n, _ in share)
        totals.append(_launch(list(chain.from_iterable(cut))))

    threads.run([lambda share=share: work(share) for share in shared])
    return sum(totals)


def _launch(words: list[int]) -> int:
    listed = Words(words)
    return _count_kernel(listed.address, len(words) // 3)


def _count_strided(x: Tensor, encoding: int) -> int:
    """Count in a tensor with gaps or repeats, each value once, 64K at a time."""
    x, repeats = without_repeats(x)
    dense = (piece.contiguous() for piece in pieces(x))
    return repeats * sum(_launch([piece.data_ptr(), piece.numel(), encoding]) for piece in dense)


# A block's largest magnitude, an integer maximum, says whether there is anything to count. Only then is the block,
# which is in the cache by now, looked at again. A maximum is one instruction for a vector of values and needs no wider
# lanes, as a count would.
_BLOCK = 4096


@inlined
def _count8(codes, limit, fnuz):
    """Count codes with a magnitude of `limit` or more; with `fnuz` 0x80, its NaN."""
    largest = np.uint8(0)
    if fnuz:
        for i in range(codes.size):
            largest = max(largest, np.uint8(codes[i] ^ np.uint8(0x7F)))
        return np.sum(codes == np.uint8(0x80)) if largest == np.uint8(0xFF) else 0
    for i in range(codes.size):
        largest = max(largest, np.uint8(codes[i] & np.uint8(0x7F)))
    if largest < limit:
        return 0
    count = 0
    for i in range(codes.size):
        count += np.uint8(codes[i] & np.uint8(0x7F)) >= limit
    return count


@inlined
def _count16(bits, limit):
    largest = np.uint16(0)
    for i in range(bits.size):
        largest = max(largest, np.uint16(bits[i] & np.uint16(0x7FFF)))
    count = 0
    if largest >= limit:
        for i in range(bits.size):
            count += np.uint16(bits[i] & np.uint16(0x7FFF)) >= limit
    return count


@inlined
def _count32(bits):
    largest = np.uint32(0)
    for i in range(bits.size):
        largest = max(largest, np.uint32(bits[i] & np.uint32(0x7FFF_FFFF)))
    count = 0
    if largest >= np.uint32(0x7F80_0000):
        for i in range(bits.size):
            count += np.uint32(bits[i] & np.uint32(0x7FFF_FFFF)) >= np.uint32(0x7F80_0000)
    return count


@inlined
def _count64(bits):
    largest = np.uint64(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & np.uint64(0x7FFF_FFFF_FFFF_FFFF))
    count = 0
    if largest >= np.uint64(0x7FF0_0000_0000_0000):
        for i in range(bits.size):
            count += (bits[i] & np.uint64(0x7FFF_FFFF_FFFF_FFFF)) >= np.uint64(0x7FF0_0000_0000_0000)
    return count


@kernel
def _count_kernel(table, parts):
    """Return the number of NaN and Inf in parts: address, length, encoding each.

    An encoding is the bytes of a value, and shifted by 8 the magnitude from which on there are no numbers, 0 for FNUZ;
    of four and eight bytes there is one only.
    """
    words = carray(pointer(table), (parts, 3), np.int64)
    count = 0
    for part in range(parts):
        address, length = words[part, 0], words[part, 1]
        size, limit = words[part, 2] & 0xFF, words[part, 2] >> 8
        for start in range(0, length, _BLOCK):
            n = min(_BLOCK, length - start)
            place = pointer(address + start * size)
            if size == 4:
                count += _count32(carray(place, (n,), np.uint32))
            elif size == 2:
                count += _count16(carray(place, (n,), np.uint16), np.uint16(limit))
            elif size == 1:
                count += _count8(carray(place, (n,), np.uint8), np.uint8(limit), limit == 0)
            else:
                count += _count64(carray(place, (n,), np.uint64))
    return count
