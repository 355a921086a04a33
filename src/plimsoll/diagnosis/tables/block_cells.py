"""Block records of one collection as flat columns, next to their cells.

They are read together with the cells, in one table, so that rows match although a live run grows. Only questions about
block formats read them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from plimsoll import row_layout
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints, from_table
from plimsoll.runs import Run
from plimsoll.runs.columns.spectrum_columns import blocks_of, integers, list_items


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockCells:
    """The records of the rows of `cells`.

    Of each row: the block `length` (0 without a record), the `poisoned` values, how many values are at which depth
    (`depths[depth_start:...]`), and how many blocks have their maximum in which binade, from exponent `lowest` on.
    """

    cells: Cells
    length: Ints
    poisoned: Ints
    depth_start: Ints
    depths: Ints
    lowest: Ints
    maxima_start: Ints
    maxima: Ints

    def of_rows(self, rows: Ints) -> "BlockCells":
        """Return the records of these rows only."""
        depth_start, depths = _chosen(self.depth_start, self.depths, rows)
        maxima_start, maxima = _chosen(self.maxima_start, self.maxima, rows)
        return BlockCells(
            cells=self.cells.of_rows(rows),
            length=self.length[rows],
            poisoned=self.poisoned[rows],
            depth_start=depth_start,
            depths=depths,
            lowest=self.lowest[rows],
            maxima_start=maxima_start,
            maxima=maxima,
        )

    @property
    def size_bytes(self) -> int:
        """The memory of the records, and of what was computed of them and kept."""
        return sum(array.nbytes for array in vars(self).values() if isinstance(array, np.ndarray))

    @cached_property
    def by_depth(self) -> Any:
        """The values at each depth, as a sparse matrix of rows by depths."""
        # 0.12 s, a quarter of the time of `plimsoll check` on a small run, and only this function needs it.
        from scipy.sparse import csr_matrix  # pyright: ignore[reportMissingTypeStubs]

        places = np.arange(len(self.depths)) - np.repeat(self.depth_start[:-1], np.diff(self.depth_start))
        shape = (len(self.length), row_layout.BINADES)
        return csr_matrix((self.depths.astype(np.float64), places.astype(np.int32), self.depth_start), shape=shape)

    @cached_property
    def values(self) -> Floats:
        """Number of values with a depth, by row."""
        return self.by_depth @ np.ones(row_layout.BINADES)

    @cached_property
    def blocks(self) -> Floats:
        """Number of finite blocks with a nonzero value, by row."""
        return self._running[self.maxima_start[1:]] - self._running[self.maxima_start[:-1]]

    def maxima_below(self, binade: Ints) -> Floats:
        """Return how many of these blocks have their maximum below a binade, by row.

        Args:
            binade: One binade for each row, of the values as stored.
        """
        place = np.clip(binade - self.lowest, 0, np.diff(self.maxima_start))
        return self._running[self.maxima_start[:-1] + place] - self._running[self.maxima_start[:-1]]

    @cached_property
    def _running(self) -> Floats:
        return np.concatenate([np.zeros(1), np.cumsum(self.maxima, dtype=np.float64)])


def read_blocks(run: Run, collection: str, until: int | None) -> BlockCells | None:
    """Return a collection with its block records up to a step. None if it has none."""
    if collection not in run.tensors or not run.block_lengths:
        return None
    table = run.table(collection, steps=None if until is None else slice(None, until + 1))
    length = blocks_of(table)
    if length is None:
        return None
    depth_start, depths = list_items(table["depths"])
    maxima_start, maxima = list_items(table["maxima"])
    return BlockCells(
        cells=from_table(collection, table, run.tensors[collection]),
        length=length,
        poisoned=integers(table, "poisoned"),
        depth_start=depth_start,
        depths=depths,
        lowest=integers(table, "lowest_maximum"),
        maxima_start=maxima_start,
        maxima=maxima,
    )


def _chosen(start: Ints, counts: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Return the counts of some rows, and where each row's begin."""
    length = np.diff(start)[rows]
    begin = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(length)])
    return begin, counts[np.repeat(start[:-1][rows] - begin[:-1], length) + np.arange(int(begin[-1]))]
