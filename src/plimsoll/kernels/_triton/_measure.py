"""The measuring kernel: all statistics of a row in one pass over memory.

A program takes some tiles of one tensor. Of each tile it first finds the largest positive, the largest negative and the
smallest nonzero magnitude (three integer reductions, one instruction a warp); their exponents say which road to take:

- All nonzero values lie within 31 binades (nearly always): `tl.histogram` over 32 bins, the last one for zeros. The
  counts stay in registers from tile to tile while the window fits.
- Within 63 binades (squares of gradients, say): the same with 64 bins.
- Else, or where the tile holds NaN, Inf or a subnormal: 512 bins over all the row's binades, every class told apart.

Few bins matter where `tl.histogram` counts by warp votes (Triton 3.6): there 32 bins cost 21 instructions a value and
512 bins 85, half of these in the slow popcount unit. Later versions count by atomics in shared memory.

Sums run in float64 in each thread and are added across threads once a program. A program ends with a few relaxed
atomics on its row. The row's layout makes zero the identity of all of them (`kernels._layout`), so accumulating needs
nothing besides this one launch.

Bytes of a tensor are addressed by number, not by a pointer argument: a table of addresses is what lets one launch read
thousands of tensors. Vector loads need 16-byte alignment, so a tensor that starts off a 16-byte border is read from
the border before it, with the values in front masked.
"""

import triton
import triton.language as tl

from plimsoll.kernels import _layout as layout
from plimsoll.kernels._triton import _bits
from plimsoll.kernels._triton._tally import (
    add_counts,
    bins,
    count_all,
    count_non_finite,
    magnitude_of,
    tally_blocks,
)

THREADS = 128
WARPS = THREADS // 32
MAP_SHIFT = 40  # a map word: tensor << 40 | program within the tensor

_FP64 = _bits.FP64
_INF64 = tl.constexpr(layout.ABSMIN_TOP)
_SUM, _HISTOGRAM = tl.constexpr(layout.SUM), tl.constexpr(layout.HISTOGRAM)
_POSITIVE, _NEGATIVE = tl.constexpr(layout.POSITIVE), tl.constexpr(layout.NEGATIVE)
_NEAREST = tl.constexpr(layout.NEAREST)
_MAP_SHIFT, _MAP_MASK = tl.constexpr(MAP_SHIFT), tl.constexpr((1 << MAP_SHIFT) - 1)
_THREADS = tl.constexpr(THREADS)


@triton.jit(do_not_specialize=["address", "length", "row_length", "row", "bank", "per_program"])
def measure_one(
    address: tl.int64, length: tl.int64, row_length: tl.int64, row: tl.int64, bank, per_program: tl.int64,
    WIDTH: tl.constexpr, KIND: tl.constexpr, POINTEE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tensor, described by the arguments."""
    first = tl.program_id(0).to(tl.int64) * per_program
    counters = bank + row.to(tl.int64) * WIDTH
    # The interpreter makes an int32 of an address below 2**31, whatever the annotation says.
    _measure(address.to(tl.int64), length, row_length, counters, first, per_program, KIND, POINTEE, BLOCK, TILE)


@triton.jit(do_not_specialize=["table", "programs", "bank", "per_program"])
def measure_table(
    table, programs, bank, per_program: tl.int64,
    WIDTH: tl.constexpr, KIND: tl.constexpr, POINTEE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Many tensors: `programs` says which program works where, `table` holds four words a tensor."""
    word = tl.load(programs + tl.program_id(0))
    entry = table + 4 * (word >> _MAP_SHIFT)
    first = (word & _MAP_MASK) * per_program
    counters = bank + tl.load(entry + 3) * WIDTH
    _measure(
        tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), counters, first, per_program, KIND, POINTEE, BLOCK, TILE
    )


@triton.jit
def _measure(
    address, length, row_length, counters, first, per_program,
    KIND: tl.constexpr, POINTEE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = KIND == _FP64
    ITEM: tl.constexpr = POINTEE.primitive_bitwidth // 8
    FRACTION_BITS: tl.constexpr = 52 if WIDE else 23
    TOP_FIELD: tl.constexpr = 2047 if WIDE else 255
    # Binade index of exponent field 0; both carriers have their bias and the row begins at 2**-149.
    ORIGIN: tl.constexpr = (149 - 1023) if WIDE else (149 - 127)
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    UINT: tl.constexpr = tl.uint64 if WIDE else tl.uint32

    head = (address & 15) // ITEM
    slots, blocks = _extent(length, row_length, head, BLOCK)
    last = tl.minimum(first + per_program, tl.cdiv(slots, TILE))

    window = tl.zeros((32,), tl.int32)
    base = tl.full((), 1, tl.int32)
    valid = tl.zeros((), tl.int64)
    counted = tl.zeros((), tl.int64)
    total = tl.zeros((_THREADS,), tl.float64)
    absolute = tl.zeros((_THREADS,), tl.float64)
    squares = tl.zeros((_THREADS,), tl.float64)
    positive = tl.zeros((), INT)
    negative = tl.zeros((), INT)
    nearest = tl.full((), -1, INT).to(UINT, bitcast=True)

    for tile in range(first, last):
        raw, loaded = _load(address, head, length, row_length, blocks, tile, POINTEE, ITEM, BLOCK, TILE)
        bits = _bits.decode(raw, KIND)
        valid += loaded
        up, down, near = _extremes(bits, WIDE)
        lowest = ((near + 1) >> 1).to(INT, bitcast=True)
        highest = tl.maximum(up, down)
        top = (highest >> FRACTION_BITS).to(tl.int32)
        bottom = tl.where(highest == 0, top + 1, (lowest >> FRACTION_BITS).to(tl.int32))
        field = ((bits >> FRACTION_BITS) & TOP_FIELD).to(tl.int32)
        if BLOCK:
            tally_blocks(counters, bits, tile, blocks, WIDE, BLOCK, TILE)
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
        values = _bits.to_double(bits, WIDE)
        total += _by_thread(values, ITEM, TILE)
        absolute += _by_thread(tl.abs(values), ITEM, TILE)
        squares += _by_thread(values * values, ITEM, TILE)

    counted += add_counts(counters + _HISTOGRAM, window, base + ORIGIN, 32)
    pair = tl.arange(0, 2)
    tl.atomic_add(counters + pair, tl.where(pair == 0, valid, valid - counted), sem="relaxed")
    _add_moments(counters, total, absolute, squares)
    smallest = ((nearest + 1) >> 1).to(INT, bitcast=True)
    _raise_key(counters + _POSITIVE, _key(positive, WIDE))
    _raise_key(counters + _NEGATIVE, _key(negative, WIDE))
    _raise_key(counters + _NEAREST, tl.where(smallest == 0, 0, _INF64 - _key(smallest, WIDE)))


@triton.jit
def _extent(length, row_length, head, BLOCK: tl.constexpr):
    """Slots that tiles cover, and blocks among them; a ragged row (row_length > 0) is padded to whole blocks."""
    if BLOCK:
        rows = tl.where(row_length > 0, length // tl.maximum(row_length, 1), 1)
        blocks = rows * tl.cdiv(tl.where(row_length > 0, row_length, length), BLOCK)
        slots = blocks * BLOCK
    else:
        blocks = tl.zeros((), tl.int64)
        slots = head + length
    return slots, blocks


@triton.jit
def _load(
    address, head, length, row_length, blocks, tile,
    POINTEE: tl.constexpr, ITEM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile's elements, 0 where there is none, and how many there are."""
    lane = tl.arange(0, TILE)
    start = tile * TILE
    if BLOCK:
        whole = (row_length == 0) & (head == 0) & (start + TILE <= length)
    else:
        whole = (start >= head) & (start + TILE <= head + length)
    if whole:
        # Only an unmasked load of known alignment becomes 16-byte instructions.
        aligned = tl.multiple_of((address - head * ITEM).to(tl.pointer_type(POINTEE)), 16)
        raw = tl.load(aligned + tl.multiple_of(start, TILE) + lane)
        loaded = tl.full((), TILE, tl.int64)
    elif BLOCK:
        raw, loaded = _load_blocks(address, length, row_length, blocks, tile, POINTEE, BLOCK, TILE)
    else:
        offset = start - head + lane
        there = (offset >= 0) & (offset < length)
        raw = tl.load(address.to(tl.pointer_type(POINTEE)) + offset, mask=there, other=0)
        loaded = tl.minimum(start + TILE, head + length) - tl.maximum(start, head)
    return raw, loaded


@triton.jit
def _load_blocks(
    address, length, row_length, blocks, tile, POINTEE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    n = tl.where(row_length > 0, row_length, length)
    across = tl.cdiv(n, BLOCK)
    block = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    row = block // across
    column = (block - row * across) * BLOCK
    width = tl.where(block < blocks, tl.minimum(n - column, BLOCK), 0)
    lane = tl.arange(0, BLOCK)[None, :]
    offset = (row * n + column)[:, None] + lane
    raw = tl.load(address.to(tl.pointer_type(POINTEE)) + offset, mask=lane < width[:, None], other=0)
    return raw.reshape(TILE), tl.sum(width)


@triton.jit
def _extremes(bits, WIDE: tl.constexpr):
    """Largest positive magnitude, largest negative one, and twice the smallest nonzero one less 1.

    Where there is none, the first two are 0 and the last is the largest integer. The bits of floats order as the
    values do: as signed integers for positive ones, as unsigned ones for negative ones.
    """
    unsigned = bits.to(tl.uint64 if WIDE else tl.uint32, bitcast=True)
    up = tl.maximum(tl.max(bits), 0)
    down = tl.max(unsigned).to(bits.dtype, bitcast=True)
    down = tl.where(down < 0, magnitude_of(down, WIDE), 0)
    return up, down, tl.min((unsigned << 1) - 1)


@triton.jit
def _by_thread(values, ITEM: tl.constexpr, TILE: tl.constexpr):
    """The sum of what each thread loaded, 16 bytes side by side, as often as need be: no thread talks to another."""
    SIDE: tl.constexpr = 16 // ITEM
    return tl.sum(tl.sum(values.reshape(TILE // (_THREADS * SIDE), _THREADS, SIDE), axis=2), axis=0)


@triton.jit
def _add_moments(counters, total, absolute, squares):
    sums = (counters + _SUM).to(tl.pointer_type(tl.float64), bitcast=True)
    tl.atomic_add(sums, tl.sum(total), sem="relaxed")
    tl.atomic_add(sums + 1, tl.sum(absolute), sem="relaxed")
    tl.atomic_add(sums + 2, tl.sum(squares), sem="relaxed")


@triton.jit
def _key(magnitude, WIDE: tl.constexpr):
    return _bits.to_double(magnitude, WIDE).to(tl.int64, bitcast=True)


@triton.jit
def _raise_key(slot, key):
    tl.atomic_max(slot, key, mask=key > 0, sem="relaxed")
