"""Merging of the ranks' records of a series: sums of shards, one of replicas.

A shared series is added up. A plain one (``shared=False``) is a replica on every rank if all ranks have the same
spectrum of it at every step that they have in common. Otherwise ranks have different values, which are added up.
Activations are compared among ranks that share a part of the batch, and added up over different parts. The manifest has
the part of each rank (`data_index`).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.runs.columns import row_order
from plimsoll.runs.columns.arrow import Table, array, pc, values_of
from plimsoll.runs.columns.schema import COUNTS, EXTREMES, SUMS
from plimsoll.runs.columns.spectrum_columns import digests, numbers
from plimsoll.runs.reading.module_casts import PREFIX
from plimsoll.tensor_collections import OF_MODULES

# Columns of replicas that must agree, in addition to the binades.
COMPARED = (*COUNTS, *EXTREMES, *SUMS, "format", "scale")


def parts_of_batch(manifests: Mapping[int, Mapping[str, Any]], collection: str) -> dict[int, int]:
    """Return each rank's part of the batch, or 0 if the collection has no parts."""
    if collection not in OF_MODULES:
        return {}
    entries: dict[int, dict[str, Any]] = {rank: manifest.get("ranks") or {} for rank, manifest in manifests.items()}
    return {rank: int(entry.get("data_index", 0)) for rank, entry in entries.items()}


def is_plain(table: Table) -> bool:
    """Return whether the rows of one series are of a plain tensor, on several ranks."""
    return not pc.any(table["shared"]).as_py() and len(pc.unique(table["rank"])) > 1


def are_replicas(table: Table, parts: Mapping[int, int]) -> bool:
    """Return whether the ranks of each part have the same spectra at common steps.

    Args:
        table: All rows of one series.
        parts: Part of the batch by rank.
    """
    columns = [values_of(table["step"]), _part(table, parts)]
    columns += [row_order.codes(table[name]) for name in ("format", "scale", "rank")]
    order = np.lexsort(columns[::-1])
    table, digest = table.take(array(order)), digests(table)[order]
    same_step = ~row_order.changes([column[order] for column in columns[:2]])
    differs = digest[1:] != digest[:-1]
    for name in COMPARED:
        column = row_order.codes(table[name]) if name == "format" else numbers(table, name)
        differs |= ~((column[1:] == column[:-1]) | ((column[1:] != column[1:]) & (column[:-1] != column[:-1])))
    return bool(same_step.any()) and not bool((same_step & differs).any())


def counted_once(table: Table, parts: Mapping[int, int]) -> NDArray[np.bool_]:
    """Return a mask of the replicas' rows: those of each step's and part's first rank."""
    steps, ranks = np.stack([values_of(table["step"]), _part(table, parts)]), values_of(table["rank"])
    distinct, place = np.unique(steps, axis=1, return_inverse=True)
    lowest = np.full(distinct.shape[1], np.iinfo(np.int64).max)
    np.minimum.at(lowest, place, ranks)
    return ranks == lowest[place]


# Scalars of several ranks: "nonfinite" is added up. "scale" and scales of casts ("cast:...") are the lowest rank's. Any
# other is the mean.
def one_of_scalars(
    name: str, steps: NDArray[np.int64], values: NDArray[np.float64], ranks: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the steps and values of a scalar, merged over ranks."""
    order = np.lexsort((ranks, steps))
    steps, values = steps[order], values[order]
    starts = row_order.starts([steps])
    if name == "scale" or name.startswith(PREFIX) or len(starts) == len(steps):
        return steps[starts], values[starts]
    with np.errstate(all="ignore"):
        total = np.add.reduceat(values, starts)
    return steps[starts], total if name == "nonfinite" else total / np.diff(starts, append=len(steps))


def _part(table: Table, parts: Mapping[int, int]) -> NDArray[np.int64]:
    return np.array([parts.get(rank, 0) for rank in table["rank"].to_pylist()], dtype=np.int64)
