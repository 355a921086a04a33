"""The columns of block records, and the ends of wide rows that become them.

A row that was measured in blocks is wide (`plimsoll.kernels.row_layout`): behind the binades it has what block formats
need to know. Parts have columns for that only if one of their rows does, so a run without block records is as it always
was, and an older reader, which asks for the columns it knows, reads the other ones past.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.kernels import row_layout
from plimsoll.runs.columns import trimmed_lists
from plimsoll.runs.columns.arrow import Array, Table, array, pa, values_of

Counts = NDArray[np.int64]

COUNTS = ("blocks", "zero_blocks", "nonfinite_blocks", "poisoned")
_LISTS = pa.list_(pa.field("element", pa.int64()))
FIELDS: Sequence[Any] = (
    pa.field("block", pa.int32()),
    *(pa.field(name, pa.int64()) for name in COUNTS),
    pa.field("depths", _LISTS),
    pa.field("lowest_maximum", pa.int16()),
    pa.field("maxima", _LISTS),
)
NAMES: tuple[str, ...] = tuple(field.name for field in FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockChunk:
    """Block records as flat arrays; `length` is the block length, 0 for a spectrum without a record.

    `depths` holds `depth_lengths[i]` counts for each, from depth 0 on; `maxima` likewise, from exponent `lowest` on.
    """

    length: Counts
    counts: Counts
    depth_lengths: Counts
    depths: Counts
    lowest: NDArray[np.int16]
    maxima_lengths: Counts
    maxima: Counts

    @property
    def size_bytes(self) -> int:
        """Memory of the arrays."""
        return sum(getattr(self, f.name).nbytes for f in fields(self))


def chunk_of_ends(rows: Counts, blocks: Counts) -> BlockChunk:
    """The records of wide rows, `blocks` being the block length of each."""
    depths = rows[:, row_layout.DEPTHS : row_layout.DEPTHS + row_layout.BINADES]
    maxima = rows[:, row_layout.MAXIMA : row_layout.MAXIMA + row_layout.BINADES]
    _, depth_lengths, flat_depths = trimmed_lists.trimmed(depths)  # a block's maximum is at depth 0, so all begin there
    first, maxima_lengths, flat_maxima = trimmed_lists.trimmed(maxima)
    return BlockChunk(
        length=blocks,
        counts=rows[:, row_layout.BLOCKS : row_layout.POISONED + 1].copy(),
        depth_lengths=depth_lengths,
        depths=flat_depths,
        lowest=(first + row_layout.LOWEST_BINADE).astype(np.int16),
        maxima_lengths=maxima_lengths,
        maxima=flat_maxima,
    )


def joined(parts: Sequence[tuple[int, BlockChunk | None]]) -> BlockChunk | None:
    """The records of several chunks, each given with its number of spectra; None where none has any."""
    if all(part is None for _, part in parts):
        return None
    whole = [_without_records(size) if part is None else part for size, part in parts]
    return BlockChunk(**{f.name: np.concatenate([getattr(c, f.name) for c in whole]) for f in fields(BlockChunk)})


def _without_records(size: int) -> BlockChunk:
    return chunk_of_ends(np.zeros((size, row_layout.WIDE), dtype=np.int64), np.zeros(size, dtype=np.int64))


def columns(chunk: BlockChunk, order: NDArray[np.intp]) -> Mapping[str, Array]:
    """The columns, in another order of rows."""
    none = chunk.length == 0
    return {
        "block": array(chunk.length[order].astype(np.int32), missing=none[order]),
        **{name: array(chunk.counts[order, i], missing=none[order]) for i, name in enumerate(COUNTS)},
        "depths": trimmed_lists.lists(chunk.depth_lengths, chunk.depths, order, missing=none),
        "lowest_maximum": array(chunk.lowest[order], missing=chunk.maxima_lengths[order] == 0),
        "maxima": trimmed_lists.lists(chunk.maxima_lengths, chunk.maxima, order, missing=none),
    }


def blocks_of(table: Table) -> Counts | None:
    """The block length of each row's record, 0 for none; None where no row has one."""
    if "block" not in table.column_names or table["block"].null_count == len(table):
        return None
    return whole_numbers(table, "block")


def fill_ends(table: Table, rows: Counts) -> None:
    """Writes the records into the ends of wide rows of zeros."""
    for i, name in enumerate(COUNTS):
        rows[:, row_layout.BLOCKS + i] = whole_numbers(table, name)
    lowest = whole_numbers(table, "lowest_maximum")
    for name, first in (("depths", np.zeros(len(table), np.int64)), ("maxima", lowest - row_layout.LOWEST_BINADE)):
        start, counts = trimmed_lists.flat(table[name])
        lengths = np.diff(start)
        places = np.arange(len(counts)) + np.repeat(first - start[:-1], lengths)
        beginning = row_layout.DEPTHS if name == "depths" else row_layout.MAXIMA
        rows[np.repeat(np.arange(len(table)), lengths), beginning + places] = counts


def whole_numbers(table: Table, name: str) -> Counts:
    """A column of whole numbers; 0 where it is null (of `lowest_maximum` -149, the first binade)."""
    filled = table[name].fill_null(row_layout.LOWEST_BINADE if name == "lowest_maximum" else 0)
    return values_of(filled).astype(np.int64)


def conformed(table: Table, schema: Any) -> Table:
    """The table with a schema's columns, in its order and of its types; null where the table has none."""
    for field in schema:
        if field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(len(table), field.type))
    return table.select(schema.names).cast(schema)
