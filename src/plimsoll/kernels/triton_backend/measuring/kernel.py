"""The measuring kernel: all statistics of a row in one pass over memory.

A program takes some tiles of one tensor, and counts each as `tile` says.
"""

import triton
import triton.language as tl

from plimsoll.kernels.triton_backend import input_bits
from plimsoll.kernels.triton_backend.measuring.counting import tally_blocks
from plimsoll.kernels.triton_backend.measuring.tile import begin, finish, tally

MAP_SHIFT = 40  # a map word: tensor << 40 | program within the tensor

_FP64 = input_bits.FP64
PROGRAM_SHIFT, PROGRAM_MASK = tl.constexpr(MAP_SHIFT), tl.constexpr((1 << MAP_SHIFT) - 1)


@triton.jit(do_not_specialize=["address", "length", "row_length", "row", "bank", "per_program"])
def measure_tensor(
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
    """Measure many tensors, with four words each in `table`.

    `programs` says which program works where.
    """
    word = tl.load(programs + tl.program_id(0))
    entry = table + 4 * (word >> PROGRAM_SHIFT)
    first = (word & PROGRAM_MASK) * per_program
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
    head = (address & 15) // ITEM
    slots, blocks = _extent(length, row_length, head, BLOCK)
    last = tl.minimum(first + per_program, tl.cdiv(slots, TILE))
    valid = tl.zeros((), tl.int64)
    state = begin(WIDE)
    for tile in range(first, last):
        raw, loaded = load(address, head, length, row_length, blocks, tile, POINTEE, ITEM, BLOCK, TILE)
        bits = input_bits.decode(raw, KIND)
        valid += loaded
        if BLOCK:
            tally_blocks(counters, bits, tile, blocks, WIDE, BLOCK, TILE)
        state = tally(counters, bits, state, WIDE, ITEM, TILE)
    finish(counters, valid, state, WIDE)


@triton.jit
def _extent(length, row_length, head, BLOCK: tl.constexpr):
    """Return the slots that tiles cover, and their blocks.

    A ragged row (row_length > 0) is padded to whole blocks.
    """
    if BLOCK:
        rows = tl.where(row_length > 0, length // tl.maximum(row_length, 1), 1)
        blocks = rows * tl.cdiv(tl.where(row_length > 0, row_length, length), BLOCK)
        slots = blocks * BLOCK
    else:
        blocks = tl.zeros((), tl.int64)
        slots = head + length
    return slots, blocks


# Bytes of a tensor are addressed by number, not by a pointer argument: a table of addresses is what lets one launch
# read thousands of tensors. Vector loads need 16-byte alignment, so a tensor that starts off a 16-byte border is read
# from the border before it, with the values in front masked.
@triton.jit
def load(
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
