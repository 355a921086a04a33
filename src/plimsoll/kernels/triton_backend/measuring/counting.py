"""Counting a tile into a row's integers: binades, non-finite values, blocks."""

import triton
import triton.language as tl

from plimsoll import row_layout

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
