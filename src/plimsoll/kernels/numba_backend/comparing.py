"""Differences of values from a reference, on the CPU: one pass over both.

Blocks of 1,024 pairs. A first loop over bits says whether there are zeros, which are counted, and NaN or Inf, whose
pairs are left out. A second one subtracts and sums in float64, in vectors. The largest error is that of the difference
in the values' own dtype.
"""

import numpy as np
import torch
from numba import carray
from torch import Tensor

from plimsoll import row_layout
from plimsoll.kernels.numba_backend import threads
from plimsoll.kernels.numba_backend.compiling import (
    as_float32,
    as_float64,
    as_uint32,
    as_uint64,
    inlined,
    kernel,
    pointer,
    summing_kernel,
)
from plimsoll.kernels.numba_backend.memory import pieces
from plimsoll.kernels.operators.checks import alike

_BLOCK = 1024
_ERRORS = row_layout.ERRORS
_COMPARED, _ERROR, _ERRORSQ = row_layout.COMPARED, row_layout.ERROR, row_layout.ERRORSQ
_REFERENCE, _REFERENCESQ = row_layout.REFERENCE, row_layout.REFERENCESQ
_ERROR_REFERENCE = row_layout.ERROR_REFERENCE
_LARGEST_ERROR = row_layout.LARGEST_ERROR
_MADE_NONFINITE, _REFERENCE_NONFINITE = row_layout.MADE_NONFINITE, row_layout.REFERENCE_NONFINITE
_UNDERFLOWED, _STRUCTURAL = row_layout.UNDERFLOWED, row_layout.STRUCTURAL


def compare(values: Tensor, reference: Tensor, row: Tensor) -> None:
    """Add to a row of errors how values differ from a reference of the same shape."""
    target = row.numpy()
    dtype = torch.float64 if torch.float64 in (values.dtype, reference.dtype) else torch.float32
    if values.dtype == reference.dtype == dtype and alike(values, reference):
        _compare_dense(values, reference, target)
        return
    for low, wide in zip(pieces(values), pieces(reference), strict=True):
        _compare_dense(low.to(dtype).contiguous(), wide.to(dtype).contiguous(), target)


def _compare_dense(values: Tensor, reference: Tensor, target: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> None:
    """Compares tensors of one dtype that lie alike in memory, in even shares."""
    count, size = values.numel(), values.element_size()
    compare_kernel = compare_float64 if size == 8 else compare_float32
    shares = threads.shares(count)
    if shares == 1:
        compare_kernel(values.data_ptr(), reference.data_ptr(), count, target)
        return
    parts = np.zeros((shares, _ERRORS))
    step = -(-count // shares)

    def work(share: int) -> None:
        start = share * step
        length = max(0, min(step, count - start))
        place = values.data_ptr() + size * start, reference.data_ptr() + size * start
        compare_kernel(*place, length, parts[share])

    threads.run([lambda share=share: work(share) for share in range(shares)])
    largest = max(target[_LARGEST_ERROR], parts[:, _LARGEST_ERROR].max())
    target += parts.sum(axis=0)
    target[_LARGEST_ERROR] = largest


# The range of both sides goes first: so light a loop fetches a block at the pace of memory, and the sums find it in the
# cache. One loop that sums too has fewer reads under way: 1.9 ns a pair from memory, against 1.3. Extremes are found
# among bits: a maximum of floats is not compiled into vectors (0.8 against 0.3 ns a value). The casts to 32 bits undo
# Numba's widening of integers, which would halve the vectors' lanes.


@inlined
def _range32(values):
    """Return the least and the largest magnitude, as bits."""
    bits = values.view(np.uint32)
    least, most = np.uint32(0xFFFF_FFFF), np.uint32(0)
    for i in range(bits.size):
        magnitude = np.uint32(bits[i] & np.uint32(0x7FFF_FFFF))
        least, most = min(least, magnitude), max(most, magnitude)
    return least, most


@inlined
def _range64(values):
    bits = values.view(np.uint64)
    least, most = np.uint64(0xFFFF_FFFF_FFFF_FFFF), np.uint64(0)
    for i in range(bits.size):
        magnitude = bits[i] & np.uint64(0x7FFF_FFFF_FFFF_FFFF)
        least, most = min(least, magnitude), max(most, magnitude)
    return least, most


@summing_kernel
def _sums32(values, reference):
    """Return sums over pairs that are all finite, and the largest error."""
    error = errorsq = total = totalsq = product = 0.0
    largest = np.uint32(0)
    for i in range(values.size):
        bits = as_uint32(np.float32(values[i] - reference[i]))
        largest = max(largest, np.uint32(bits & np.uint32(0x7FFF_FFFF)))
        x = np.float64(reference[i])
        e = np.float64(values[i]) - x
        error += e
        errorsq += e * e
        total += x
        totalsq += x * x
        product += e * x
    return error, errorsq, total, totalsq, product, np.float64(as_float32(largest))


@summing_kernel
def _sums64(values, reference):
    error = errorsq = total = totalsq = product = 0.0
    largest = np.uint64(0)
    for i in range(values.size):
        x = reference[i]
        e = values[i] - x
        largest = max(largest, as_uint64(e) & np.uint64(0x7FFF_FFFF_FFFF_FFFF))
        error += e
        errorsq += e * e
        total += x
        totalsq += x * x
        product += e * x
    return error, errorsq, total, totalsq, product, as_float64(largest)


@inlined
def _add(sums, n, row):
    """Add what was found of n finite pairs."""
    error, errorsq, total, totalsq, product, largest = sums
    row[_COMPARED] += n
    row[_ERROR] += error
    row[_ERRORSQ] += errorsq
    row[_REFERENCE] += total
    row[_REFERENCESQ] += totalsq
    row[_ERROR_REFERENCE] += product
    row[_LARGEST_ERROR] = max(row[_LARGEST_ERROR], largest)


@inlined
def _keep_finite(values, reference, inf, kept_values, kept_reference, row):
    """Copy the pairs that are finite on both sides, count the others; return how many."""
    kept = 0
    for i in range(values.size):
        here, there = abs(values[i]) < inf, abs(reference[i]) < inf
        if not there:
            row[_REFERENCE_NONFINITE] += 1
        elif not here:
            row[_MADE_NONFINITE] += 1
        else:
            kept_values[kept], kept_reference[kept] = values[i], reference[i]
            kept += 1
    return kept


@inlined
def _count_zeros(values, reference, row):
    """Count zeros of the values by their reference; where that is NaN, as neither."""
    zeros = structural = neither = np.uint32(0)
    for i in range(values.size):
        zero, x = values[i] == 0, reference[i]
        zeros = np.uint32(zeros + np.uint32(zero))
        structural = np.uint32(structural + np.uint32(zero & (x == 0)))
        neither = np.uint32(neither + np.uint32(zero & np.isnan(x)))
    row[_STRUCTURAL] += structural
    row[_UNDERFLOWED] += np.int64(zeros) - structural - neither


@kernel
def compare_float32(values, reference, length, row):
    """Compares two stretches of float32, by their addresses."""
    kept_values, kept_reference = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
    for start in range(0, length, _BLOCK):
        n = min(_BLOCK, length - start)
        y = carray(pointer(values + 4 * start), (n,), np.float32)
        x = carray(pointer(reference + 4 * start), (n,), np.float32)
        (least, most), (_, most_reference) = _range32(y), _range32(x)
        if least == 0:
            _count_zeros(y, x, row)
        if max(most, most_reference) >= np.uint32(0x7F80_0000):
            n = _keep_finite(y, x, np.float32(np.inf), kept_values, kept_reference, row)
            _add(_sums32(kept_values[:n], kept_reference[:n]), n, row)
        else:
            _add(_sums32(y, x), n, row)


@kernel
def compare_float64(values, reference, length, row):
    """Compares two stretches of float64, by their addresses."""
    kept_values, kept_reference = np.empty(_BLOCK, np.float64), np.empty(_BLOCK, np.float64)
    for start in range(0, length, _BLOCK):
        n = min(_BLOCK, length - start)
        y = carray(pointer(values + 8 * start), (n,), np.float64)
        x = carray(pointer(reference + 8 * start), (n,), np.float64)
        (least, most), (_, most_reference) = _range64(y), _range64(x)
        if least == 0:
            _count_zeros(y, x, row)
        if max(most, most_reference) >= np.uint64(0x7FF0_0000_0000_0000):
            n = _keep_finite(y, x, np.inf, kept_values, kept_reference, row)
            _add(_sums64(kept_values[:n], kept_reference[:n]), n, row)
        else:
            _add(_sums64(y, x), n, row)
