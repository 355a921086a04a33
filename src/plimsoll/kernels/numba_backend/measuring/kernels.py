"""Measuring on the CPU: one pass over memory, in blocks of 4,096 values.

Blocks stay in the first-level cache. Per block: (1) one vector loop takes the exponent byte of every value and the
three extremes as integers; (2) bytes are counted for the occupied binades only, from the highest down, 32 at a time
(`count_four`): a block of real data spans 15 to 40 binades, and this beats a scalar histogram up to about 60; (3)
moments are summed in float64 by a loop that may reorder, which is safe since NaN and Inf were cleared first.
Sixteen-bit values are widened to float32 bits in a buffer, float64 has its own loop, and 8-bit codes are simply
counted: everything follows from 256 numbers. Float32 has its kernel in `float32_kernels`, which sweeps over long
tensors instead.

Kernels take addresses, so that a call with a thousand tensors is one call. Other kernels use some of these parts too.
"""

import numpy as np
from numba import carray

from plimsoll import row_layout
from plimsoll.kernels.numba_backend.compiling import (
    as_float32,
    as_float64,
    as_int64,
    as_uint32,
    as_uint64,
    count_four,
    inlined,
    kernel,
    pointer,
    summing_kernel,
    widen_half,
)

_BLOCK = 4096
_MOST_BINADES = 56  # in a block; beyond, a scalar histogram is faster than counting each

_INF32, _INF64, _MAGNITUDE64 = 0x7F80_0000, 0x7FF0_0000_0000_0000, 0x7FFF_FFFF_FFFF_FFFF
_TINY32 = 2.0**-149

# Row fields as globals of this module, which kernels take as constants.
_COUNT, _ZEROS, _NANS = row_layout.COUNT, row_layout.ZEROS, row_layout.NANS
_POS_INFS, _NEG_INFS = row_layout.POS_INFS, row_layout.NEG_INFS
_POSITIVE, _NEGATIVE, _NEAREST = row_layout.POSITIVE, row_layout.NEGATIVE, row_layout.NEAREST
_SUM, _ABSSUM, _SUMSQ, _SUMFOURTH = row_layout.SUM, row_layout.ABSSUM, row_layout.SUMSQ, row_layout.SUMFOURTH
_HISTOGRAM, _BINADES = row_layout.HISTOGRAM, row_layout.BINADES
_ABSMIN_TOP, _WORDS = row_layout.ABSMIN_TOP, row_layout.NARROW


# -- the parts of one block of float32 bits ---------------------------------------------------------------------------


@inlined
def scan(bits, exponents, n):
    """Write exponent bytes; return the largest bits by sign, the smallest less one.

    A smallest magnitude of zero wraps.
    """
    positive, negative, nearest = np.int32(0), np.uint32(0), np.uint32(0xFFFF_FFFF)
    for i in range(n):
        value = bits[i]
        magnitude = value & np.uint32(0x7FFF_FFFF)
        exponents[i] = np.uint8(magnitude >> np.uint32(23))
        positive = max(positive, np.int32(value))
        negative = max(negative, value)
        nearest = min(nearest, np.uint32(magnitude - np.uint32(1)))
    return (
        np.uint32(positive),
        negative & np.uint32(0x7FFF_FFFF) if negative >> np.uint32(31) else np.uint32(0),
        nearest,
    )


@summing_kernel
def _moments(values):
    total, absolute, squares, fourths = 0.0, 0.0, 0.0, 0.0
    for i in range(values.size):
        value = np.float64(values[i])
        square = value * value
        total += value
        absolute += abs(value)
        squares += square
        fourths += square * square
    return total, absolute, squares, fourths


@inlined
def _add_moments(sums, moments):
    total, absolute, squares, fourths = moments
    sums[_SUM] += total
    sums[_ABSSUM] += absolute
    sums[_SUMSQ] += squares
    sums[_SUMFOURTH] += fourths


@inlined
def _clear_nonfinite(bits, clean, n, row):
    """Count NaN and Inf, copy the bits with zeros for them; return their number."""
    nans, positive, negative = 0, 0, 0
    for i in range(n):
        value = bits[i]
        magnitude = value & np.uint32(0x7FFF_FFFF)
        nans += magnitude > np.uint32(_INF32)
        positive += value == np.uint32(_INF32)
        negative += value == np.uint32(_INF32 | 0x8000_0000)
        clean[i] = value if magnitude < np.uint32(_INF32) else np.uint32(0)
    row[_NANS] += nans
    row[_POS_INFS] += positive
    row[_NEG_INFS] += negative
    return nans + positive + negative


@inlined
def _count_vector(exponents, n, top, lowest, counts, offset):
    """Add counts of bytes `top` to `lowest` >= 1 to ``counts[0, byte + offset]``.

    Returns the sum.
    """
    chunks = (n + 31) // 32
    count = 0
    while top >= lowest:
        packed = count_four(exponents, chunks, top)
        for i in range(min(4, top - lowest + 1)):
            equal = (packed >> (16 * i)) & 0xFFFF
            counts[0, top - i + offset] += equal
            count += equal
        top -= 4
    return count


@inlined
def _count_scalar(exponents, n, counts):
    """As `_count_codes`, for exponents.

    Returns how many are not zero, whose own count is left at zero.
    """
    _count_codes(exponents, n, counts)
    zeros = counts[0, 0] + counts[1, 0] + counts[2, 0] + counts[3, 0]
    counts[:, 0] = 0
    return n - zeros


@inlined
def _count_codes(codes, n, counts):
    """Add one for each code to one of four histograms, so that equals do not wait."""
    quarter = n // 4
    first, second, third, fourth = (
        codes[:quarter], codes[quarter : 2 * quarter], codes[2 * quarter : 3 * quarter], codes[3 * quarter : n],
    )  # fmt: skip
    for i in range(quarter):
        counts[0, first[i]] += 1
        counts[1, second[i]] += 1
        counts[2, third[i]] += 1
        counts[3, fourth[i]] += 1
    for i in range(quarter, n - 3 * quarter):
        counts[0, fourth[i]] += 1


@inlined
def _count_zeros(bits, n, row, cleared, low):
    """Count zeros, and subnormals by binade, of `low` values with a zero exponent.

    `cleared` NaN or Inf are among them.
    """
    zeros = 0
    for i in range(n):
        zeros += (bits[i] & np.uint32(0x7FFF_FFFF)) == np.uint32(0)
    row[_ZEROS] += zeros - cleared
    if low > zeros:
        for i in range(n):
            magnitude = bits[i] & np.uint32(0x7FFF_FFFF)
            if magnitude != 0 and magnitude < np.uint32(0x0080_0000):
                row[_HISTOGRAM + np.int64(as_uint32(np.float32(magnitude)) >> np.uint32(23)) - 127] += 1


@inlined
def key_of(magnitude):
    """Return the float64 bits of the value of float32 magnitude bits.

    Subnormals, flushed or not, are converted in integers.
    """
    if magnitude < np.uint32(0x0080_0000):
        return as_int64(np.float64(magnitude) * _TINY32)
    return as_int64(np.float64(as_float32(magnitude)))


@inlined
def add_block(bits, n, extremes, exponents, clean, row, sums, counts):
    """Count a block of `n` scanned float32 bits into the row and into `counts`.

    `counts` goes by biased exponent. Returns the lowest and the highest exponent that it counted.
    """
    positive, negative, nearest = extremes
    cleared, top, lowest = 0, 0, 255
    if max(positive, negative) >= np.uint32(_INF32):
        cleared = _clear_nonfinite(bits, clean, n, row)
        bits = clean
        positive, negative, nearest = scan(bits, exponents, n)
    for i in range(n, (n + 31) // 32 * 32):
        exponents[i] = 255
    counted = 0
    if nearest != np.uint32(0xFFFF_FFFF):
        top = np.int64(max(positive, negative) >> np.uint32(23))
        lowest = max(np.int64((nearest + np.uint32(1)) >> np.uint32(23)), 1)
        if top - lowest < _MOST_BINADES:
            counted = _count_vector(exponents, n, top, lowest, counts, 0)
        else:
            counted = _count_scalar(exponents, n, counts)
    if counted < n:
        _count_zeros(bits, n, row, cleared, n - counted)
    _add_moments(sums, _moments(bits[:n].view(np.float32)))
    row[_POSITIVE] = max(row[_POSITIVE], key_of(positive))
    row[_NEGATIVE] = max(row[_NEGATIVE], key_of(negative))
    if nearest != np.uint32(0xFFFF_FFFF):
        row[_NEAREST] = max(row[_NEAREST], _ABSMIN_TOP - key_of(nearest + np.uint32(1)))
    return lowest, top


@inlined
def fold(counts, row, low, high):
    """Moves counts by biased float32 exponent, from `low` to `high`, to the row.

    Exponents 0 and 255 were counted one by one.
    """
    for e in range(low, high + 1):
        row[_HISTOGRAM + e + 22] += counts[0, e] + counts[1, e] + counts[2, e] + counts[3, e]  # index 0: binade -149
        for i in range(4):
            counts[i, e] = 0


# -- kernels: each over a list of parts, given by address, length and the address of the row they are counted into ----
# `table` is the address of the list, three words a part; if it is 0, the arguments describe the only part. That is what
# makes measuring a small tensor cheap: integers cost a call next to nothing. `fresh` is how many words of that only
# part's row are emptied first. `variant` says more about the dtype, where there is more to say.


@inlined
def part_of(table, part, address, length, row):
    """Address, length and row address of a part."""
    if table:
        words = carray(pointer(table + 24 * part), (3,), np.int64)
        return words[0], words[1], words[2]
    return address, length, row


@inlined
def row_at(address, fresh):
    """The row of a bank at an address, zeroed as far as `fresh` says."""
    row = carray(pointer(address), (_WORDS,), np.int64)
    if fresh:
        carray(pointer(address), (fresh,), np.int64)[:] = 0
    return row


@kernel
def measure_float64(table, parts, address, length, row_address, fresh, _):
    """Counts the values of float64 parts into a row."""
    clean, exponents, wide = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.uint16)
    counts = np.zeros((4, 2048), np.int64)
    for part in range(parts):
        address, length, row_address = part_of(table, part, address, length, row_address)
        row = row_at(row_address, fresh)
        sums = row.view(np.float64)
        row[_COUNT] += length
        bits = carray(pointer(address), (length,), np.uint64)
        low, high = 2047, 0
        for start in range(0, length, _BLOCK):
            n = min(_BLOCK, length - start)
            lowest, top = add_block64(bits[start : start + n], n, exponents, wide, clean, row, sums, counts)
            low, high = min(low, lowest), max(high, top)
        fold64(counts, row, low, high)


@inlined
def fold64(counts, row, low, high):
    """Adds counts per float64 exponent to a row, whose binades are those of float32."""
    for e in range(low, high + 1):
        count = counts[0, e] + counts[1, e] + counts[2, e] + counts[3, e]
        row[_HISTOGRAM + min(max(e - 1023 + 149, 0), _BINADES - 1)] += count
        for i in range(4):
            counts[i, e] = 0


@inlined
def _scan64(bits, n):
    """Return the largest bits by sign, the smallest less one (zero wraps), and zeros."""
    positive, negative, nearest, zeros = np.int64(0), np.uint64(0), np.uint64(0xFFFF_FFFF_FFFF_FFFF), 0
    for i in range(n):
        magnitude = bits[i] & np.uint64(_MAGNITUDE64)
        zeros += magnitude == np.uint64(0)
        positive = max(positive, np.int64(bits[i]))
        negative = max(negative, bits[i])
        nearest = min(nearest, np.uint64(magnitude - np.uint64(1)))
    return positive, negative, nearest, zeros


@inlined
def _clear_nonfinite64(bits, clean, n, row):
    """As `_clear_nonfinite`, of float64 bits."""
    nans, positive, negative = 0, 0, 0
    for i in range(n):
        magnitude = bits[i] & np.uint64(_MAGNITUDE64)
        nans += magnitude > np.uint64(_INF64)
        infinite = magnitude == np.uint64(_INF64)
        positive += infinite and bits[i] == magnitude
        negative += infinite and bits[i] != magnitude
        clean[i] = bits[i] if magnitude < np.uint64(_INF64) else np.uint64(0)
    row[_NANS] += nans
    row[_POS_INFS] += positive
    row[_NEG_INFS] += negative
    return nans + positive + negative


@inlined
def add_block64(bits, n, exponents, wide, clean, row, sums, counts):
    """As `add_block`, of float64 bits, which it scans itself."""
    top, lowest, bad = 0, 2047, 0
    positive, negative, nearest, zeros = _scan64(bits, n)
    if max(positive, np.int64(negative & np.uint64(_MAGNITUDE64))) >= _INF64:
        bad = _clear_nonfinite64(bits, clean, n, row)
        bits = clean
        positive, negative, nearest, zeros = _scan64(bits, n)
        zeros -= bad
    if zeros + bad < n:
        top = max(positive, np.int64(negative & np.uint64(_MAGNITUDE64))) >> 52
        lowest = np.int64((nearest + np.uint64(1)) >> np.uint64(52))
        if 0 < lowest and top - lowest < _MOST_BINADES:
            for i in range(n):  # zeros end at byte 0 or wrap to below 254 - 56
                exponents[i] = np.uint8(254 - top + np.int64((bits[i] >> np.uint64(52)) & np.uint64(0x7FF)))
                exponents[i] = exponents[i] if bits[i] << np.uint64(1) else np.uint8(0)
            for i in range(n, (n + 31) // 32 * 32):
                exponents[i] = 0
            _count_vector(exponents, n, np.int64(254), 254 - top + lowest, counts, top - 254)
        else:
            for i in range(n):
                wide[i] = np.uint16((bits[i] >> np.uint64(52)) & np.uint64(0x7FF))
            subnormal = n - zeros - bad - _count_scalar(wide, n, counts)
            row[_HISTOGRAM] += subnormal  # far below the lowest binade
    row[_ZEROS] += zeros
    _add_moments(sums, _moments(bits[:n].view(np.float64)))
    row[_POSITIVE] = max(row[_POSITIVE], positive)
    if negative >> np.uint64(63):
        row[_NEGATIVE] = max(row[_NEGATIVE], np.int64(negative & np.uint64(_MAGNITUDE64)))
    if nearest != np.uint64(0xFFFF_FFFF_FFFF_FFFF):
        row[_NEAREST] = max(row[_NEAREST], _ABSMIN_TOP - np.int64(nearest + np.uint64(1)))
    return lowest, top


@kernel
def measure_codes(table, parts, address, length, row_address, fresh, variant):
    """The variant is the address of the float64 values of the 256 codes."""
    values = carray(pointer(variant), (256,), np.uint64)
    counts = np.zeros((4, 256), np.int64)
    for part in range(parts):
        address, length, row_address = part_of(table, part, address, length, row_address)
        row = row_at(row_address, fresh)
        sums = row.view(np.float64)
        row[_COUNT] += length
        codes = carray(pointer(address), (length,), np.uint8)
        _count_codes(codes, length, counts)
        for code in range(256):
            count = counts[0, code] + counts[1, code] + counts[2, code] + counts[3, code]
            if count:
                _add_repeated(values[code], count, row, sums)
        counts[:, :] = 0


@inlined
def _add_repeated(bits, count, row, sums):
    """Counts one float64 value, given by its bits, `count` times."""
    magnitude = np.int64(bits & np.uint64(_MAGNITUDE64))
    negative = np.int64(bits >> np.uint64(63))
    if magnitude > _INF64:
        row[_NANS] += count
    elif magnitude == _INF64:
        row[_NEG_INFS if negative else _POS_INFS] += count
    elif magnitude == 0:
        row[_ZEROS] += count
    else:
        value = as_float64(np.uint64(bits))
        square = value * value
        sums[_SUM] += value * count
        sums[_ABSSUM] += abs(value) * count
        sums[_SUMSQ] += square * count
        sums[_SUMFOURTH] += square * square * count
        key = _NEGATIVE if negative else _POSITIVE
        row[key] = max(row[key], magnitude)
        row[_NEAREST] = max(row[_NEAREST], _ABSMIN_TOP - magnitude)
        row[_HISTOGRAM + min(max((magnitude >> 52) - 1023 + 149, 0), _BINADES - 1)] += count


# -- the block record: values below their block's largest --------------------------------------------------------------

# Row fields as globals of this module, which kernels take as constants.
_BLOCKS, _ZERO_BLOCKS = row_layout.BLOCKS, row_layout.ZERO_BLOCKS
_NONFINITE_BLOCKS, _POISONED = row_layout.NONFINITE_BLOCKS, row_layout.POISONED
_DEPTHS, _MAXIMA = row_layout.DEPTHS, row_layout.MAXIMA


@kernel
def measure_blocks(address, kind, height, columns, block, row, table):
    """The block record of a matrix, of any dtype (`kind`, an index of _KINDS)."""
    index = np.empty(block, np.int64)  # binade index of each value; -1 for zero, -2 for NaN and Inf
    bits32 = carray(pointer(address), (height * columns,), np.uint32)
    bits16 = carray(pointer(address), (height * columns,), np.uint16)
    bits64 = carray(pointer(address), (height * columns,), np.uint64)
    codes = carray(pointer(address), (height * columns,), np.uint8)
    for line in range(height):
        for first in range(0, columns, block):
            n = min(block, columns - first)
            at = line * columns + first
            if kind == 0:
                for i in range(n):
                    index[i] = _binade_index(bits32[at + i] & np.uint32(0x7FFF_FFFF))
            elif kind == 1:
                for i in range(n):
                    index[i] = _binade_index(np.uint32(bits16[at + i] & np.uint32(0x7FFF)) << np.uint32(16))
            elif kind == 2:
                for i in range(n):
                    index[i] = _binade_index(widen_half(np.uint32(bits16[at + i] & np.uint32(0x7FFF))))
            elif kind == 3:
                for i in range(n):
                    index[i] = _binade_index64(bits64[at + i])
            else:
                for i in range(n):
                    index[i] = _binade_index64(as_uint64(table[codes[at + i]]))
            _add_one_block(index, n, row)


@inlined
def _binade_index(magnitude):
    if magnitude >= np.uint32(_INF32):
        return -2
    if magnitude < np.uint32(0x0080_0000):
        return np.int64(as_uint32(np.float32(magnitude)) >> np.uint32(23)) - 127 if magnitude else -1
    return np.int64(magnitude >> np.uint32(23)) + 22


@inlined
def _binade_index64(bits):
    magnitude = np.int64(bits & np.uint64(0x7FFF_FFFF_FFFF_FFFF))
    if magnitude >= _INF64:
        return -2
    if magnitude == 0:
        return -1
    return min(max((magnitude >> 52) - 1023 + 149, 0), _BINADES - 1)


@inlined
def _add_one_block(index, n, row):
    top, bad, nonzero = -1, False, 0
    for i in range(n):
        top = max(top, index[i])
        bad |= index[i] == -2
        nonzero += index[i] >= 0
    row[_BLOCKS] += 1
    if bad:
        row[_NONFINITE_BLOCKS] += 1
        row[_POISONED] += nonzero
    elif top < 0:
        row[_ZERO_BLOCKS] += 1
    else:
        row[_MAXIMA + top] += 1
        for i in range(n):
            if index[i] >= 0:
                row[_DEPTHS + top - index[i]] += 1
