"""Spectra read from parts: ranks merged, scales undone, in pieces of bounded size."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.runs.columns import row_order, step_table
from plimsoll.runs.columns.arrow import Table, array, pa, pc, values_of
from plimsoll.runs.columns.schema import SCHEMAS, WIDE, Series, conformed, schema_with
from plimsoll.runs.columns.spectrum_columns import (
    blocks_of,
    columns_of,
    digests,
    numbers,
    rows_of,
    spectra_table,
    stored_spectrum,
    summed,
    true_spectrum,
)
from plimsoll.runs.reading.module_casts import PREFIX
from plimsoll.runs.reading.row_selection import Steps, by_collection, select
from plimsoll.runs.reading.run_folder import RunContents, RunFolder
from plimsoll.runs.records import EXTRAS
from plimsoll.runs.storage import manifest
from plimsoll.spectrum import Spectrum
from plimsoll.spectrum.record import COUNTS, EXTREMES, SUMS
from plimsoll.tensor_collections import OF_MODULES

_ROWS = 1 << 14  # rows that are decoded at a time: some 40 MB as rows of a bank
_READ = 1 << 16  # rows that are read at a time: some 30 MB as columns; each reading opens every part once
_CHOICE_SECONDS = 10.0  # for `merge_choices`, while a training that has ended waits for its run to be closed


def read(
    contents: RunContents, collection: str, names: Sequence[str], steps: Steps, *, raw: bool
) -> Iterator[tuple[int, str, str, Spectrum]]:
    """Yield step, collection, name and spectrum, name after name, steps ascending."""
    for table in _pieces(contents, collection, names, steps):
        for start in range(0, len(table), _ROWS):
            yield from _decoded(_whole_steps(table, start), raw=raw)


def rows(
    contents: RunContents, collection: str, name: str, columns: Sequence[str], steps: Steps | None = None
) -> Table:
    """Return some columns of one series at some steps or all, replicas counted once."""
    steps = steps or Steps()
    if len(contents.folder.ranks) == 1:
        wanted = [c for c in WIDE.names if c in {"step", "collection", "name", "format", *columns}]
        equal = {"collection": [collection], "name": [name]}
        return select(contents.folder, "spectra", equal=equal, steps=steps, columns=wanted)
    return next(_pieces(contents, collection, [name], steps))


def table(contents: RunContents, chosen: Sequence[tuple[str, Sequence[str]]], steps: Steps, *, blocks: bool) -> Table:
    """Return series as one table, with a row for each series, step and scale.

    It has the columns of a part. Those of block records exist only with `blocks`, and if one of the rows has a record.
    """
    tables = [pa.Table.from_batches([], SCHEMAS["spectra"])]
    for _, each in tables_of(contents, chosen, steps, blocks=blocks):
        is_word = [pa.types.is_dictionary(field.type) for field in each.schema]
        plain = [f.with_type(pa.string()) if word else f for f, word in zip(each.schema, is_word, strict=True)]
        tables.append(each.cast(pa.schema(plain)))
    return pa.concat_tables(tables, promote_options="default")


def tables_of(
    contents: RunContents,
    chosen: Sequence[tuple[str, Sequence[str]]],
    steps: Steps,
    *,
    blocks: bool,
    moved: bool = True,
) -> Iterator[tuple[str, Table]]:
    """Yield each collection and its rows, as in `table`, or series among each other unless `moved`.

    Words may be dictionaries.
    """
    several = len(contents.folder.ranks) > 1
    # Collections that are wanted whole are read in one pass over the parts, without a search for names.
    known: Mapping[str, Sequence[str]] = {} if several or not contents.is_whole else contents.tensors()
    whole = [collection for collection, names in chosen if list(names) == list(known.get(collection, ()))]
    together = by_collection(contents.folder, whole, steps, blocks=blocks, moved=moved)
    for collection, names in chosen:
        if collection in whole:
            tables = [next(together)[1].drop_columns(["rank"])]
        else:
            pieces = _pieces(contents, collection, names, steps, blocks=blocks)
            tables = [each for p in pieces for each in (_summed(p) if several else [p.drop_columns(["rank"])])]
        if tables:
            yield collection, pa.concat_tables(tables, promote_options="default")


def _summed(piece: Table) -> Iterator[Table]:
    """Yield the rows with those of all ranks added up."""
    if blocks_of(piece) is None:
        made = summed(piece, row_order.starts([row_order.codes(piece[c]) for c in ("name", "step", "format", "scale")]))
        yield conformed(made, schema_with("spectra", made.column_names))
        return
    for start in range(0, len(piece), _ROWS):
        table = _whole_steps(piece, start)
        columns = [row_order.codes(table[c]) for c in ("name", "step", "format", "scale")]
        starts = row_order.starts(columns)
        if not len(starts):
            continue
        first = table.take(array(starts))
        series = [Series(**row) for row in first.select(["collection", "name", "format", "shared"]).to_pylist()]
        merged, blocks = step_table.merged_rows(rows_of(table), blocks_of(table), starts)
        entries = step_table.StepTable(
            series=np.arange(len(starts)),
            scales=numbers(first, "scale"),
            rows=merged,
            extras=step_table.merged_extras(np.stack([numbers(table, name) for name in EXTRAS], axis=1), starts),
            blocks=blocks,
        )
        made = spectra_table([columns_of(values_of(first["step"]), entries)], series)
        yield conformed(made, schema_with("spectra", made.column_names))


def _pieces(
    contents: RunContents, collection: str, names: Sequence[str], steps: Steps, *, blocks: bool = True
) -> Iterator[Table]:
    """Yield rows of whole series, small ones at once, by name and step, no replicas."""
    for some in _groups(contents, names, steps):
        wanted = {"collection": [collection], "name": some}
        rows = select(contents.folder, "spectra", equal=wanted, steps=steps, blocks=blocks)
        if len(contents.folder.ranks) > 1:
            rows = _without_replicas(contents, collection, rows, steps)
        yield rows


def _groups(contents: RunContents, names: Sequence[str], steps: Steps) -> Iterator[Sequence[str]]:
    """Yield the names in groups of about `_READ` rows at these steps."""
    # Parts are sorted by name. So groups of neighbours in this order are in few row groups of each part.
    many, names = len(names) > 1, sorted(names)
    per_series = max(1, int(steps.mask(contents.steps()).sum()) * len(contents.folder.ranks)) if many else 1
    at_once = max(1, _READ // per_series)
    for start in range(0, len(names), at_once):
        yield names[start : start + at_once]


def _without_replicas(contents: RunContents, collection: str, rows: Table, steps: Steps) -> Table:
    # A table for each series takes 0.1 ms, so that the shared ones, which are most, are passed over at once.
    candidates = rows.filter(array(~_has_shared(rows)))
    plain = {name: series for name, series in _series(candidates) if is_plain(series)}
    _decide(contents, collection, plain, steps)
    parts = parts_of_batch(contents.folder.manifests, collection)
    replicas = {name for name in plain if contents.replicas[collection, name]}
    keep = np.ones(len(rows), dtype=bool)
    for name, here in row_order.spans(rows, "name"):
        if name in replicas:
            keep[here] = counted_once(plain[name], parts)
    return rows.filter(array(keep)) if replicas else rows


def _has_shared(rows: Table) -> NDArray[np.bool_]:
    names = row_order.codes(rows["name"])
    return np.isin(names, names[values_of(rows["shared"])])


def _series(table: Table) -> Iterator[tuple[str, Table]]:
    for name, here in row_order.spans(table, "name"):
        yield name, table[here]


def _decide(contents: RunContents, collection: str, plain: dict[str, Table], steps: Steps) -> None:
    """Decide and remember which series are replicas, from all steps of the run."""
    parts = parts_of_batch(contents.folder.manifests, collection)
    undecided = [name for name in plain if (collection, name) not in contents.replicas]
    if steps == Steps():
        contents.replicas.update({(collection, name): are_replicas(plain[name], parts) for name in undecided})
        return
    for some in _groups(contents, undecided, Steps()):
        wanted = {"collection": [collection], "name": some}
        for name, series in _series(select(contents.folder, "spectra", equal=wanted, blocks=False)):
            contents.replicas[collection, name] = are_replicas(series, parts)


def _whole_steps(table: Table, start: int) -> Table:
    """Return about `_ROWS` rows from `start` on, cut where a name or a step begins."""
    return table.slice(_boundary(table, start), _boundary(table, start + _ROWS) - _boundary(table, start))


def _boundary(table: Table, row: int) -> int:
    def key(i: int) -> tuple[object, object]:
        return table["name"][i].as_py(), table["step"][i].as_py()

    while 0 < row < len(table) and key(row) == key(row - 1):
        row -= 1
    return min(row, len(table))


def _decoded(table: Table, *, raw: bool) -> Iterator[tuple[int, str, str, Spectrum]]:
    """Yield spectra with the rows of one step and name merged."""
    columns = [row_order.codes(table[c]) for c in ("name", "step", "format", "scale")]
    starts = row_order.starts(columns)
    merged, blocks = rows_of(table), blocks_of(table)
    # Rows of one scale and format are merged as rows, which is fast. Others are merged as spectra.
    if len(starts) < len(table):
        merged, blocks = step_table.merged_rows(merged, blocks, starts)
    lengths = [0] * len(merged) if blocks is None else blocks.tolist()
    entries = table.select(["collection", "name", "step", "format", "scale"]).take(array(starts)).to_pylist()
    pending: tuple[int, str, str, Spectrum] | None = None
    for row, block, entry in zip(merged, lengths, entries, strict=True):
        spectrum = (
            stored_spectrum(row, entry["format"], block)
            if raw
            else true_spectrum(row, entry["format"], entry["scale"], block)
        )
        key = (entry["step"], entry["collection"], entry["name"])
        if pending is not None and pending[:3] == key:
            pending = (*key, pending[3] + spectrum)
        else:
            if pending is not None:
                yield pending
            pending = (*key, spectrum)
    if pending is not None:
        yield pending


def merge_choices(path: Path) -> Mapping[str, Mapping[str, Sequence[str]]] | None:
    """Return for a closed run which plain series count once, and which add up.

    Readers find it in the manifest. The sums are over ranks. None if a rank is missing or behind rank 0, or if the
    decision takes too long. Readers decide for themselves then.
    """
    folder = RunFolder(path, warn=False)
    contents = RunContents(folder)
    if not _all_there(folder):
        return None
    plain: dict[str, dict[str, None]] = {}
    for content in folder.manifests.values():
        for series in manifest.series_of(content):
            if not series.shared:
                plain.setdefault(series.collection, {})[series.name] = None
    deadline = time.monotonic() + _CHOICE_SECONDS
    for collection, names in plain.items():
        for _ in _pieces(contents, collection, list(names), Steps(), blocks=False):
            if time.monotonic() > deadline:
                return None
    result: dict[str, dict[str, list[str]]] = {"counted_once": {}, "summed": {}}
    for (collection, name), are_replicas in sorted(contents.replicas.items()):
        result["counted_once" if are_replicas else "summed"].setdefault(collection, []).append(name)
    return result


def _all_there(folder: RunFolder) -> bool:
    """Return whether every rank has recorded as many steps as rank 0."""
    ends = dict.fromkeys(range(folder.world_size), -1)
    for part in folder.of("spectra"):
        if part.rank in ends:
            ends[part.rank] = max(ends[part.rank], folder.visible_end(part))
    return min(ends.values()) >= ends[0] >= 0


# -- ranks' records of a series: sums of shards, one of replicas -------------------------------------------------------

# A shared series is added up. A plain one (``shared=False``) is a replica on every rank if all ranks have the same
# spectrum of it at every step that they have in common. Otherwise ranks have different values, which are added up.
# Activations are compared among ranks that share a part of the batch, and added up over different parts. The manifest
# has the part of each rank (`data_index`).

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

    The table has all rows of one series.
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
def merged_scalar(
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
