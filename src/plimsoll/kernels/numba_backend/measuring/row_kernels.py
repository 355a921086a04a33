"""Rows of a bank on the CPU: emptied and added up."""

import numpy as np
from numba import carray

from plimsoll.kernels import row_layout
from plimsoll.kernels.numba_backend.compiling import inlined, kernel, pointer

# Row fields as globals of this module, which kernels take as constants.
_POSITIVE, _NEAREST = row_layout.POSITIVE, row_layout.NEAREST
_SUM, _SUMSQ = row_layout.SUM, row_layout.SUMSQ
_OLD_SUMSQ, _MOVES = row_layout.OLD_SUMSQ, row_layout.MOVES


@kernel
def empty_rows(addresses, count, words):
    """Fills rows of so many words with zero; `addresses` is that of a list of the rows' own."""
    rows = carray(pointer(addresses), (count,), np.int64)
    for i in range(count):
        carray(pointer(rows[i]), (words,), np.int64)[:] = 0


@kernel
def merge_rows(target, groups, rows):
    """Adds each row j to row ``groups[j]`` of the target."""
    for j in range(groups.size):
        _add_row(target[groups[j]], rows[j])


@kernel
def merge_into(addresses, rows):
    """Adds each row j to the row at the j-th of the addresses, of whose list this is the address."""
    listed = carray(pointer(addresses), (rows.shape[0],), np.int64)
    for j in range(rows.shape[0]):
        _add_row(carray(pointer(listed[j]), (rows.shape[1],), np.int64), rows[j])


@kernel
def merge_moves(addresses, rows):
    """As `merge_into`, of rows of moves."""
    listed = carray(pointer(addresses), (rows.shape[0],), np.int64)
    for j in range(rows.shape[0]):
        row = carray(pointer(listed[j]), (_MOVES,), np.int64)
        for field in range(_OLD_SUMSQ):
            row[field] += rows[j, field]
        row.view(np.float64)[_OLD_SUMSQ] += rows[j].view(np.float64)[_OLD_SUMSQ]


@inlined
def _add_row(row, part):
    """Adds a row to another, as _layout says."""
    sums, part_sums = row.view(np.float64), part.view(np.float64)
    for field in range(_POSITIVE):
        row[field] += part[field]
    for field in range(_POSITIVE, _NEAREST + 1):
        row[field] = max(row[field], part[field])
    for field in range(_SUM, _SUMSQ + 1):
        sums[field] += part_sums[field]
    for field in range(_SUMSQ + 1, row.size):
        row[field] += part[field]
