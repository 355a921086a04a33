"""Measuring on a GPU: all statistics of a row in one pass over memory.

A program takes some tiles of one tensor, and counts each as `counting` says. There is one launch for each dtype, or one
without a table for a single tensor.
"""

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from plimsoll.errors import UnsupportedTensorError
from plimsoll.kernels.operators.checks import is_dense
from plimsoll.kernels.triton_backend import input_bits
from plimsoll.kernels.triton_backend.counting import WARPS, begin, finish, tally, tally_blocks

# -- tables of addresses on the device, made once and kept -------------------------------------------------------------

# One launch that reads many tensors needs their addresses in device memory. In steady state training the same tensors
# come back at the same addresses, so tables are kept by their content: a hit costs a look-up, no copy, no allocation.

_MOST_TABLES = 256  # each some tens of KB: a model has a few lists (weights, gradients), each at few sets of addresses

Key = tuple[object, ...]


class _Table:
    __slots__ = ("captured", "copied", "streams", "words")

    def __init__(self, words: Tensor, copied: torch.cuda.Event | None, stream: int) -> None:
        self.words = words
        self.copied = copied
        self.streams = {stream}
        self.captured = False


class Tables:
    """A bounded cache of int64 device tensors by content, least recently used out."""

    def __init__(self, most: int = _MOST_TABLES) -> None:
        self._most = most
        self._tables: OrderedDict[Key, _Table] = OrderedDict()
        self._lock = threading.Lock()  # backward hooks run in autograd's threads

    def __len__(self) -> int:
        return len(self._tables)

    # A table found in the cache may be captured: its address never changes, and once captured it is never evicted,
    # since the graph reads it at every replay. (`torch.cuda.graph` synchronizes before it captures, so the copy is done
    # by then.) A table that is not in the cache cannot be made during capture: its copy would only run at replay, from
    # memory that must then stay alive, and its memory would come from the graph's own pool. `find` answers None, and
    # the caller launches once per tensor instead, with the addresses as arguments, which the graph keeps.
    def find(self, key: Key, device: torch.device, make: Callable[[], np.ndarray]) -> Tensor | None:
        """Return a key's table on `device`; a missing one is made, but not in capture."""
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with self._lock:
            full_key = (device, *key)
            table = self._tables.get(full_key)
            if table is None:
                if capturing:
                    return None
                table = self._tables[full_key] = _move(make(), device)
                self._evict()
            else:
                self._tables.move_to_end(full_key)
                _join_stream(table, device, capturing)
            table.captured |= capturing
            return table.words

    def _evict(self) -> None:
        excess = len(self._tables) - self._most
        if excess > 0:
            for key in [key for key, table in self._tables.items() if not table.captured][:excess]:
                del self._tables[key]


def _move(words: np.ndarray, device: torch.device) -> _Table:
    host = torch.from_numpy(words)
    if device.type != "cuda":
        return _Table(host, None, 0)
    # The allocator of pinned memory keeps this buffer until the copy has run.
    moved = host.pin_memory().to(device, non_blocking=True)
    stream = torch.cuda.current_stream(device)
    return _Table(moved, stream.record_event(), stream.cuda_stream)


# The copy is asynchronous, from pinned memory, on the stream of the first use. Another stream waits for it by an event
# before its first launch.
def _join_stream(table: _Table, device: torch.device, capturing: bool) -> None:
    if table.copied is None:
        return
    stream = torch.cuda.current_stream(device)
    if stream.cuda_stream not in table.streams and not capturing:
        stream.wait_event(table.copied)
        table.words.record_stream(stream)
        table.streams.add(stream.cuda_stream)


# -- kernel ------------------------------------------------------------------------------------------------------------

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
    """Measure tensors of four words each in `table`, by the programs in `programs`."""
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


# -- launch ------------------------------------------------------------------------------------------------------------

# Values of a tile, by the bytes of one: 32 to a thread (16 of float64) are enough bytes in flight with four programs
# an SM, its number at 128 registers a thread. What these do not hold are mostly constants of the loop (the compile test
# looks), and four programs should beat three. The block record needs registers of its own.
_TILES = {1: 4096, 2: 4096, 4: 4096, 8: 2048}
_BLOCK_TILES = {1: 2048, 2: 1024, 4: 1024, 8: 512}
REGISTERS = 128
_PROGRAMS = 4  # for each SM, before any takes a second tile: as many as run at once, so that atomics are few
_MOST_TILES = 32  # of one program, so that programs of a large tensor end at about the same time

tables = Tables()


class _Job(NamedTuple):
    """A tensor as the kernel sees it; `row_length` 0: blocks ignore the rows."""

    address: int
    length: int
    row_length: int
    row: int
    slots: int


def measure(tensors: Sequence[Tensor], bank: Tensor, rows: Sequence[int], accumulate: bool, block: int) -> None:
    """Count each tensor into its row; without `accumulate` the row starts empty."""
    if not accumulate:
        empty(bank, rows)
    if block > min(_BLOCK_TILES.values()):  # it makes a tile as long, which need not be longer than the rows
        longest = max((x.shape[-1] for x in tensors if x.dim()), default=1)
        block = min(block, max(triton.next_power_of_2(longest), 2))
    by_dtype: dict[torch.dtype, list[_Job]] = {}
    alive: list[Tensor] = []  # contiguous copies, until the launches that read them are enqueued
    for x, row in zip(tensors, rows, strict=True):
        if x.numel() == 0:
            continue
        if x.dtype not in input_bits.DTYPES:
            raise UnsupportedTensorError(f"measure: expected a floating dtype; got {x.dtype}.")
        alive.append(x if not block and is_dense(x) else x.contiguous())
        by_dtype.setdefault(x.dtype, []).append(_job(alive[-1], row, block))
    with launching(bank):
        for dtype, jobs in by_dtype.items():
            _launch(jobs, dtype, bank, block)


def measure_one(x: Tensor, bank: Tensor, row: int) -> None:
    """As `measure`, of one tensor into a row that is emptied first."""
    measure([x], bank, [row], False, 0)


def _job(x: Tensor, row: int, block: int) -> _Job:
    address, length = x.data_ptr(), x.numel()
    if not block:
        return _Job(address, length, 0, row, length + address % 16 // x.element_size())
    n = x.shape[-1] if x.dim() else 1
    count = length // n
    row_length = n if count > 1 and n % block else 0
    blocks = count * -(-n // block) if row_length else -(-length // block)
    return _Job(address, length, row_length, row, blocks * block)


def _launch(jobs: list[_Job], dtype: torch.dtype, bank: Tensor, block: int) -> None:
    tile = max(_BLOCK_TILES[dtype.itemsize], block) if block else _TILES[dtype.itemsize]
    per_program, programs = share([job.slots for job in jobs], tile, bank.device)
    fixed: dict[str, Any] = {
        "WIDTH": bank.stride(0), "KIND": input_bits.kind(dtype), "POINTEE": input_bits.pointee(dtype), "BLOCK": block,
        "TILE": tile, "num_warps": WARPS, "maxnreg": REGISTERS, "enable_fp_fusion": True,
    }  # fmt: skip
    if len(jobs) > 1:
        key = (tile * per_program, *jobs)
        words = tables.find(key, bank.device, functools.partial(table_words, [job[:4] for job in jobs], programs))
        if words is not None:
            measure_table[(sum(programs),)](words, words[4 * len(jobs) :], bank, per_program, **fixed)
            return
    for job, count in zip(jobs, programs, strict=True):
        measure_tensor[(count,)](job.address, job.length, job.row_length, job.row, bank, per_program, **fixed)


def share(slots: Sequence[int], tile: int, device: torch.device) -> tuple[int, list[int]]:
    """Return the number of tiles of a program, and of each tensor's programs."""
    tiles = sum(-(-count // tile) for count in slots)
    per_program = min(-(-tiles // (_PROGRAMS * processors(device))), _MOST_TILES)
    return per_program, [-(-count // (tile * per_program)) for count in slots]


def table_words(jobs: Sequence[tuple[int, ...]], programs: list[int]) -> np.ndarray:
    """Return each tensor's words, then each program's tensor and place in it."""
    entries = np.array(jobs, dtype=np.int64).ravel()
    counts = np.array(programs, dtype=np.int64)
    tensor = np.repeat(np.arange(len(jobs), dtype=np.int64), counts)
    within = np.arange(len(tensor), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.concatenate((entries, (tensor << MAP_SHIFT) | within))


def empty(bank: Tensor, rows: Sequence[int]) -> None:
    """Fill rows with zeros: by row if they are few runs, else by a table of numbers."""
    runs = _runs(rows)
    if len(runs) > 2:
        key = ("rows", *runs)
        index = tables.find(key, bank.device, lambda: np.array(sorted(set(rows)), dtype=np.int64))
        if index is not None:
            bank.index_fill_(0, index, 0)
            return
    for first, last in runs:
        bank[first : last + 1].zero_()


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for row in sorted(set(rows)):
        if runs and runs[-1][1] == row - 1:
            runs[-1] = (runs[-1][0], row)
        else:
            runs.append((row, row))
    return runs


def launching(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make x's GPU current for Triton; silence numpy's overflow in the interpreter."""
    return torch.cuda.device(x.device) if x.is_cuda else np.errstate(all="ignore")


@functools.cache
def processors(device: torch.device) -> int:
    """The number of SMs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def interpreted() -> bool:
    """Return True if this process's kernels run in Triton's interpreter.

    Triton decides that when they are decorated.
    """
    return not isinstance(measure_tensor, triton.JITFunction)
