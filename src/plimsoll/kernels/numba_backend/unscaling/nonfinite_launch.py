"""Counting NaN and Inf on the CPU: one call of one kernel for tensors of all dtypes."""

import ctypes
from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from plimsoll.errors import UnsupportedTensorError
from plimsoll.formats import Format
from plimsoll.kernels.dtypes import EIGHT_BIT, FLOATING, FORMATS
from plimsoll.kernels.numba_backend import threads
from plimsoll.kernels.numba_backend.measuring.rows import word_address
from plimsoll.kernels.numba_backend.memory import Words, pieces
from plimsoll.kernels.numba_backend.unscaling import nonfinite_kernels
from plimsoll.kernels.operators.tensor_checks import is_dense


def _encoding(fmt: Format) -> int:
    """Bytes of a value, and from the ninth bit on the magnitude above which codes are no numbers.

    That is 0 where only the code 0x80 is none, and for 32 and 64 bits, whose kernels have it as a constant.
    """
    limit = 0 if fmt.bits > 16 or fmt.specials == "fnuz" else fmt.max_code + 1
    return fmt.bits // 8 | limit << 8


_ENCODINGS = {dtype: _encoding(FORMATS[dtype]) for dtype in (*FLOATING, *EIGHT_BIT)}


def count_nonfinite(tensors: Sequence[Tensor], counts: Tensor, index: int) -> None:
    """Adds the number of NaN and Inf values of all tensors to ``counts[index]``."""
    place = word_address(counts, index)
    words: list[int] = []
    found = 0
    for x in tensors:
        encoding = _ENCODINGS.get(x.dtype)
        if encoding is None:
            raise UnsupportedTensorError(f"count_nonfinite: expected floating tensors; got {x.dtype}. Leave it out.")
        if x.is_contiguous() or is_dense(x):
            words += (x.data_ptr(), x.numel(), encoding)
        else:
            found += _count_strided(x, encoding)
    ctypes.c_int64.from_address(place).value += found + _count(words)


def _count(words: list[int]) -> int:
    shares = threads.shares(sum(words[1::3]))
    if shares == 1:
        return _launch(words)
    shared, _ = threads.cut(words[1::3], shares)
    found: list[int] = []

    def work(share: list[threads.Piece]) -> None:
        cut = ((words[3 * i] + start * (words[3 * i + 2] & 0xFF), n, words[3 * i + 2]) for i, start, n, _ in share)
        found.append(_launch(list(chain.from_iterable(cut))))

    threads.run([lambda share=share: work(share) for share in shared])
    return sum(found)


def _launch(words: list[int]) -> int:
    listed = Words(words)
    return nonfinite_kernels.count_nonfinite(listed.address, len(words) // 3)


def _count_strided(x: Tensor, encoding: int) -> int:
    """Counts in a tensor with gaps or repeats in its memory, 64K values at a time; what repeats is read once."""
    repeats = 1
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
            repeats *= size
    held = (piece.contiguous() for piece in pieces(x))
    return repeats * sum(_launch([piece.data_ptr(), piece.numel(), encoding]) for piece in held)
