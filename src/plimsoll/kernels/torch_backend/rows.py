"""Rows of banks added up with numpy: the reference."""

import numpy as np
from numpy.typing import NDArray

from plimsoll.kernels import row_layout

_KEYS = slice(row_layout.POSITIVE, row_layout.NEAREST + 1)
_SUMS = slice(row_layout.SUM, row_layout.SUMSQ + 1)
_COUNTS = (slice(0, row_layout.POSITIVE), slice(row_layout.HISTOGRAM, None))


def merge_rows(target: NDArray[np.int64], groups: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    """Adds each row j to row ``groups[j]`` of the target, by the layout's rules."""
    order = np.argsort(groups, kind="stable")
    found, starts = np.unique(groups[order], return_index=True)
    if not found.size:
        return
    rows = rows[order]
    for fields in _COUNTS:
        target[found, fields] += np.add.reduceat(rows[:, fields], starts, axis=0)
    target[found, _KEYS] = np.maximum(target[found, _KEYS], np.maximum.reduceat(rows[:, _KEYS], starts, axis=0))
    sums = np.add.reduceat(rows.view(np.float64)[:, _SUMS], starts, axis=0)
    target.view(np.float64)[found, _SUMS] += sums
