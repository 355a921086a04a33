"""Counting of a tile into a row: binades, non-finite values, blocks, moments."""

import triton
import triton.language as tl

from plimsoll import row_layout
from plimsoll.kernels.triton_backend import input_bits

# -- integers of a row -------------------------------------------------------------------------------------------------

_INF64 = tl.constexpr(row_layout.ABSMIN_TOP)
_BINADES = tl.constexpr(row_layout.BINADES)
_NANS, _HISTOGRAM = tl.constexpr(row_layout.NANS), tl.constexpr(row_layout.HISTOGRAM)
_POS_INFS, _NEG_INFS = tl.constexpr(row_layout.POS_INFS), tl.constexpr(row_layout.NEG_INFS)
_BLOCKS, _DEPTHS, _MAXIMA = (
    tl.constexpr(row_layout.BLOCKS),
    tl.constexpr(row_layout.DEPTHS),
    tl.constexpr(row_layout.MAXIMA),
)
_NO_BIN = tl.constexpr(511)  # the bin of the full histogram for what is not to be counted


@triton.jit
def bins(field, base, LAST: tl.constexpr):
    """Return the index in the window from `base` on; lower fields take the last bin.

    Zeros have field 0, which wraps around.
    """
    distance = (field - base).to(tl.uint32, bitcast=True)
    return tl.minimum(distance, LAST).to(tl.int32, bitcast=True)


@triton.jit
def add_counts(counters, counts, first, N: tl.constexpr):
    """Add all but the last of N bins to the histogram from `first` on; return the sum."""
    lane = tl.arange(0, N)
    counts = tl.where(lane < N - 1, counts, 0)
    # Only float64 has binades outside the row's: they go to its ends.
    index = tl.minimum(tl.maximum(first + lane, 0), _BINADES - 1)
    tl.atomic_add(counters + index, counts.to(tl.int64), mask=counts > 0, sem="relaxed")
    return tl.sum(counts).to(tl.int64)


@triton.jit
def count_all(counters, bits, WIDE: tl.constexpr):
    """Adds a tile's finite, non-zero values per binade to the counters."""
    magnitude = magnitude_of(bits, WIDE)
    there = (magnitude != 0) & (magnitude < infinity(WIDE))
    counts = tl.histogram(tl.where(there, _binade(magnitude, WIDE), _NO_BIN), 512)
    return add_counts(counters + _HISTOGRAM, counts, 0, 512)


@triton.jit
def count_non_finite(counters, bits, WIDE: tl.constexpr):
    """Adds a tile's NaN, Inf and -Inf to the counters."""
    magnitude = magnitude_of(bits, WIDE)
    limit = infinity(WIDE)
    nans = tl.sum((magnitude > limit).to(tl.int32))
    ups = tl.sum(((magnitude == limit) & (bits > 0)).to(tl.int32))
    downs = tl.sum(((magnitude == limit) & (bits < 0)).to(tl.int32))
    tl.atomic_add(counters + _NANS, nans.to(tl.int64), mask=nans > 0, sem="relaxed")
    tl.atomic_add(counters + _POS_INFS, ups.to(tl.int64), mask=ups > 0, sem="relaxed")
    tl.atomic_add(counters + _NEG_INFS, downs.to(tl.int64), mask=downs > 0, sem="relaxed")
    return (nans + ups + downs).to(tl.int64)


@triton.jit
def tally_blocks(counters, bits, tile, blocks, WIDE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Count a tile's block record: values below the maxima, and the maxima's places."""
    COUNT: tl.constexpr = TILE // BLOCK
    there = tile * COUNT + tl.arange(0, COUNT) < blocks
    magnitude = magnitude_of(bits, WIDE).reshape(COUNT, BLOCK)
    limit = infinity(WIDE)
    largest = tl.max(magnitude, axis=1)
    finite = largest < limit
    nonzero = (magnitude != 0) & (magnitude < limit)
    top = _binade(largest, WIDE)
    depth = tl.where(nonzero & finite[:, None], top[:, None] - _binade(magnitude, WIDE), -1)
    if tl.max(depth) < 31:
        shallow = tl.histogram(bins(depth.reshape(TILE), 0, 31), 32)
        add_counts(counters + _DEPTHS, shallow, 0, 32)
    else:
        add_counts(counters + _DEPTHS, tl.histogram(bins(depth.reshape(TILE), 0, _NO_BIN), 512), 0, 512)
    maxima = tl.histogram(tl.where(finite & (largest != 0), top, _NO_BIN), 512)
    add_counts(counters + _MAXIMA, maxima, 0, 512)

    exist = tl.sum(there.to(tl.int32))
    zero = tl.sum((there & (largest == 0)).to(tl.int32))
    broken = tl.sum((~finite).to(tl.int32))
    poisoned = tl.sum((nonzero & ~finite[:, None]).to(tl.int32))
    lane = tl.arange(0, 4)
    counts = tl.where(lane < 2, tl.where(lane == 0, exist, zero), tl.where(lane == 2, broken, poisoned))
    tl.atomic_add(counters + _BLOCKS + lane, counts.to(tl.int64), mask=counts > 0, sem="relaxed")


@triton.jit
def magnitude_of(bits, WIDE: tl.constexpr):
    """Bit patterns without their signs."""
    if WIDE:
        return bits & 0x7FFFFFFFFFFFFFFF
    else:
        return bits & 0x7FFFFFFF


@triton.jit
def _binade(magnitude, WIDE: tl.constexpr):
    """Binade index of nonzero finite magnitude bits."""
    if WIDE:
        index = (magnitude >> 52).to(tl.int32) + (149 - 1023)
        return tl.minimum(tl.maximum(index, 0), _BINADES - 1)
    else:
        # A subnormal is its bits as an integer times 2**-149: as a float, that integer shows its leading bit.
        leading = (magnitude.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        field = magnitude >> 23
        return tl.where(field == 0, leading, field + (149 - 127))


@triton.jit
def infinity(WIDE: tl.constexpr):
    """The bit pattern of infinity."""
    if WIDE:
        return tl.full((), _INF64, tl.int64)
    else:
        return tl.full((), 0x7F800000, tl.int32)


# -- a tile, some of whose counts stay in registers to the end ---------------------------------------------------------

# Of each tile three integer reductions (one instruction a warp) first find the largest positive, the largest negative
# and the smallest nonzero magnitude; their exponents say which road to take:
#
# - All nonzero values lie within 31 binades (nearly always): `tl.histogram` over 32 bins, the last one for zeros. The
#   counts stay in registers from tile to tile while the window fits.
# - Within 63 binades (squares of gradients, say): the same with 64 bins.
# - Else, or where the tile holds NaN, Inf or a subnormal: 512 bins over all the row's binades, every class by itself.

THREADS = 128
WARPS = THREADS // 32

_SUM = tl.constexpr(row_layout.SUM)
_POSITIVE, _NEGATIVE = tl.constexpr(row_layout.POSITIVE), tl.constexpr(row_layout.NEGATIVE)
_NEAREST = tl.constexpr(row_layout.NEAREST)
_THREADS = tl.constexpr(THREADS)


@triton.jit
def begin(WIDE: tl.constexpr):
    """Return the registers before a program's first tile, for `tally` and `finish`."""
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    UINT: tl.constexpr = tl.uint64 if WIDE else tl.uint32
    window = tl.zeros((32,), tl.int32)
    base = tl.full((), 1, tl.int32)
    counted = tl.zeros((), tl.int64)
    total = tl.zeros((_THREADS,), tl.float64)
    absolute = tl.zeros((_THREADS,), tl.float64)
    squares = tl.zeros((_THREADS,), tl.float64)
    fourths = tl.zeros((_THREADS,), tl.float64)
    positive = tl.zeros((), INT)
    negative = tl.zeros((), INT)
    nearest = tl.full((), -1, INT).to(UINT, bitcast=True)
    return window, base, counted, positive, negative, nearest, total, absolute, squares, fourths


# Few bins matter where `tl.histogram` counts by warp votes (Triton 3.6): there 32 bins cost 21 instructions a value and
# 512 bins 85, half of these in the slow popcount unit. Later versions count by atomics in shared memory.
@triton.jit
def tally(counters, bits, state, WIDE: tl.constexpr, ITEM: tl.constexpr, TILE: tl.constexpr):
    """Counts a tile's decoded bits; the last two constants say how threads loaded it."""
    window, base, counted, positive, negative, nearest, total, absolute, squares, fourths = state
    FRACTION_BITS: tl.constexpr = 52 if WIDE else 23
    TOP_FIELD: tl.constexpr = 2047 if WIDE else 255
    # Binade index of exponent field 0; both carriers have their bias and the row begins at 2**-149.
    ORIGIN: tl.constexpr = (149 - 1023) if WIDE else (149 - 127)
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32

    up, down, near = _extremes(bits, WIDE)
    lowest = ((near + 1) >> 1).to(INT, bitcast=True)
    highest = tl.maximum(up, down)
    top = (highest >> FRACTION_BITS).to(tl.int32)
    bottom = tl.where(highest == 0, top + 1, (lowest >> FRACTION_BITS).to(tl.int32))
    field = ((bits >> FRACTION_BITS) & TOP_FIELD).to(tl.int32)
    plain = (top < TOP_FIELD) & (bottom > 0)
    if plain & (top - bottom < 31):
        if (highest != 0) & ((bottom < base) | (top > base + 30)):
            counted += add_counts(counters + _HISTOGRAM, window, base + ORIGIN, 32)
            window = tl.zeros((32,), tl.int32)
            base = tl.maximum(bottom - (30 - (top - bottom)) // 2, 1)
        window += tl.histogram(bins(field, base, 31), 32)
    elif plain & (top - bottom < 63):
        counts = tl.histogram(bins(field, bottom, 63), 64)
        counted += add_counts(counters + _HISTOGRAM, counts, bottom + ORIGIN, 64)
    else:
        counted += count_all(counters, bits, WIDE)
        if top == TOP_FIELD:
            counted += count_non_finite(counters, bits, WIDE)
            bits = tl.where(field < TOP_FIELD, bits, 0)
            up, down, near = _extremes(bits, WIDE)
    positive = tl.maximum(positive, up)
    negative = tl.maximum(negative, down)
    nearest = tl.minimum(nearest, near)
    values = input_bits.to_double(bits, WIDE)
    total += by_thread(values, ITEM, TILE)
    absolute += by_thread(tl.abs(values), ITEM, TILE)
    square = values * values
    squares += by_thread(square, ITEM, TILE)
    fourths += by_thread(square * square, ITEM, TILE)
    return window, base, counted, positive, negative, nearest, total, absolute, squares, fourths


# Sums run in float64 in each thread and are added across threads once a program. A program ends with a few relaxed
# atomics on its row. The row's layout makes zero the identity of all of them (`row_layout`), so accumulating needs
# nothing besides this one launch.
@triton.jit
def finish(counters, valid, state, WIDE: tl.constexpr):
    """Write a program's registers after its last tile; `valid`: number of values."""
    window, base, counted, positive, negative, nearest, total, absolute, squares, fourths = state
    ORIGIN: tl.constexpr = (149 - 1023) if WIDE else (149 - 127)
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    counted += add_counts(counters + _HISTOGRAM, window, base + ORIGIN, 32)
    pair = tl.arange(0, 2)
    tl.atomic_add(counters + pair, tl.where(pair == 0, valid, valid - counted), sem="relaxed")
    _add_moments(counters, total, absolute, squares, fourths)
    smallest = ((nearest + 1) >> 1).to(INT, bitcast=True)
    _raise_key(counters + _POSITIVE, _key(positive, WIDE))
    _raise_key(counters + _NEGATIVE, _key(negative, WIDE))
    _raise_key(counters + _NEAREST, tl.where(smallest == 0, 0, _INF64 - _key(smallest, WIDE)))


@triton.jit
def _extremes(bits, WIDE: tl.constexpr):
    """Return the largest positive, the largest negative, twice the smallest less 1.

    They are magnitudes, the smallest a nonzero one.
    """
    # Where there is none, the first two are 0 and the last is the largest integer. The bits of floats order as the
    # values do: as signed integers for positive ones, as unsigned ones for negative ones.
    unsigned = bits.to(tl.uint64 if WIDE else tl.uint32, bitcast=True)
    up = tl.maximum(tl.max(bits), 0)
    down = tl.max(unsigned).to(bits.dtype, bitcast=True)
    down = tl.where(down < 0, magnitude_of(down, WIDE), 0)
    return up, down, tl.min((unsigned << 1) - 1)


@triton.jit
def by_thread(values, ITEM: tl.constexpr, TILE: tl.constexpr):
    """Return the sums over each thread's loads: no thread talks to another.

    A load is 16 bytes side by side.
    """
    SIDE: tl.constexpr = 16 // ITEM
    return tl.sum(tl.sum(values.reshape(TILE // (_THREADS * SIDE), _THREADS, SIDE), axis=2), axis=0)


@triton.jit
def _add_moments(counters, total, absolute, squares, fourths):
    sums = (counters + _SUM).to(tl.pointer_type(tl.float64), bitcast=True)
    tl.atomic_add(sums, tl.sum(total), sem="relaxed")
    tl.atomic_add(sums + 1, tl.sum(absolute), sem="relaxed")
    tl.atomic_add(sums + 2, tl.sum(squares), sem="relaxed")
    tl.atomic_add(sums + 3, tl.sum(fourths), sem="relaxed")


@triton.jit
def _key(magnitude, WIDE: tl.constexpr):
    return input_bits.to_double(magnitude, WIDE).to(tl.int64, bitcast=True)


@triton.jit
def _raise_key(slot, key):
    tl.atomic_max(slot, key, mask=key > 0, sem="relaxed")
