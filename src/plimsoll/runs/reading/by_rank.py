"""Records of data-parallel ranks side by side: losses, and sizes of activations.

Ranks that share a part of the batch (tensor or pipeline parallel ones) count as one, under the lowest rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from plimsoll.runs.columns import row_order
from plimsoll.runs.columns.arrow import Table, values_of
from plimsoll.runs.columns.spectrum_columns import numbers
from plimsoll.runs.reading import spectra
from plimsoll.runs.reading.row_selection import select
from plimsoll.runs.reading.run import Run

_READ = 1 << 20  # rows that are read at a time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ByRank:
    """A number of each rank at the steps that all recorded: `values[rank, step]`."""

    name: str
    ranks: tuple[int, ...]
    steps: NDArray[np.int64]
    values: NDArray[np.float64]


def parts_of(run: Run) -> dict[int, int]:
    """Return each rank's part of the batch; empty if the run is not data-parallel."""
    if len(run.ranks) < 2:
        return {}
    folder = run._folder  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    entries = {rank: cast("dict[str, Any]", m.get("ranks") or {}) for rank, m in folder.manifests.items()}
    if entries and all(int(entry.get("data_parallel", 1)) > 1 for entry in entries.values()):
        return {rank: int(entry.get("data_index", 0)) for rank, entry in entries.items()}
    # Ranks that average their gradients without a wrapper are recognized by weights that are equal on all of them.
    weights = run.tensors.get("weights", ())
    if not weights or any(entry.get("wrapper") or entry.get("mesh") for entry in entries.values()):
        return {}
    wanted = {"collection": ["weights"], "name": [weights[0]]}
    table = row_order.by(select(folder, "spectra", equal=wanted, blocks=False), ("name",))
    return {rank: rank for rank in run.ranks} if spectra.is_plain(table) and spectra.are_replicas(table, {}) else {}


def losses(run: Run, parts: Mapping[int, int]) -> ByRank:
    """Return the loss of each rank."""
    table = select(run._folder, "scalars", equal={"name": ["loss"]})  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    return _apart("loss", table, values_of(table["value"]), np.ones(len(table)), parts)


def activation_sizes(run: Run, parts: Mapping[int, int]) -> Iterator[ByRank]:
    """Yield the root mean square of activations, layer by layer, on each rank."""
    names = run.tensors.get("activations", ())
    at_once = max(1, _READ // max(1, len(run.steps) * len(run.ranks)))
    columns = ["step", "collection", "name", "format", "scale", "count", "sumsq"]
    for start in range(0, len(names), at_once):
        some = names[start : start + at_once]
        wanted = {"collection": ["activations"], "name": some}
        table = select(run._folder, "spectra", equal=wanted, columns=columns)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        squares, counts = numbers(table, "sumsq") / numbers(table, "scale") ** 2, numbers(table, "count")
        spans = dict(row_order.spans(table, "name"))
        for name in some:
            mine = spans.get(name, slice(0))
            sizes = _apart(name, table[mine], squares[mine], counts[mine], parts)
            with np.errstate(invalid="ignore"):
                yield ByRank(name=name, ranks=sizes.ranks, steps=sizes.steps, values=np.sqrt(sizes.values))


def _apart(
    name: str, table: Table, values: NDArray[np.float64], counts: NDArray[np.float64], parts: Mapping[int, int]
) -> ByRank:
    """Sum of values over sums of counts, by rank and step."""
    of, at = values_of(table["rank"]), values_of(table["step"])
    lowest: dict[int, int] = {}
    for rank in sorted(set(of.tolist()) & set(parts)):
        lowest.setdefault(parts[rank], rank)
    ranks = tuple(sorted(lowest.values()))
    chosen = np.isin(of, ranks)
    steps, place = np.unique(at[chosen], return_inverse=True)
    total, count = np.zeros((len(ranks), len(steps))), np.zeros((len(ranks), len(steps)))
    cell = np.searchsorted(ranks, of[chosen]), place
    np.add.at(total, cell, values[chosen])
    np.add.at(count, cell, counts[chosen])
    whole = (count > 0).all(axis=0)
    return ByRank(name=name, ranks=ranks, steps=steps[whole], values=total[:, whole] / count[:, whole])
