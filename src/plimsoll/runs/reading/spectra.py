"""Spectra out of the parts: ranks merged, scales undone, in pieces of bounded size."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from plimsoll.runs.columns import row_order, step_table
from plimsoll.runs.columns.arrow import Table, array, pa, values_of
from plimsoll.runs.columns.schema import SCHEMAS, WIDE, Series
from plimsoll.runs.columns.spectrum_columns import blocks_of, columns_of, numbers, rows_of, spectra_table
from plimsoll.runs.reading import rank_merge, unscaling
from plimsoll.runs.reading.catalog import Catalog
from plimsoll.runs.reading.contents import RunContents
from plimsoll.runs.reading.row_selection import Steps, select
from plimsoll.runs.records import EXTRAS
from plimsoll.spectrum import Spectrum

_ROWS = 1 << 14  # rows that are decoded at a time: some 40 MB as rows of a bank
_READ = 1 << 16  # rows that are read at a time: some 30 MB as columns; each reading opens every part once


def read(
    catalog: Catalog, content: RunContents, collection: str, names: Sequence[str], steps: Steps, *, raw: bool
) -> Iterator[tuple[int, str, str, Spectrum]]:
    """Step, collection, name and spectrum, name after name, steps ascending."""
    for table in _pieces(catalog, content, collection, names, steps):
        for start in range(0, len(table), _ROWS):
            yield from _decoded(_whole_steps(table, start), raw=raw)


def rows(catalog: Catalog, content: RunContents, collection: str, name: str, columns: Sequence[str]) -> Table:
    """Some columns of one series at all steps, replicas counted once."""
    if len(catalog.ranks) == 1:
        wanted = [c for c in SCHEMAS["spectra"].names if c in {"step", "collection", "name", "format", *columns}]
        return select(catalog, "spectra", equal={"collection": [collection], "name": [name]}, columns=wanted)
    return next(_pieces(catalog, content, collection, [name], Steps()))


def table(
    catalog: Catalog, content: RunContents, chosen: Sequence[tuple[str, Sequence[str]]], steps: Steps, *, blocks: bool
) -> Table:
    """The rows of some series as one table with the columns of a part, one row for each series, step and scale.

    Block records are left out unless `blocks`; there are columns of them only if one of the rows has one.
    """
    tables = [pa.Table.from_batches([], SCHEMAS["spectra"])]
    for collection, names in chosen:
        if len(catalog.ranks) == 1 and content.is_whole and list(names) == list(content.tensors()[collection]):
            # All of it is wanted and held anyway: one pass over the parts, and no search for names.
            whole = select(catalog, "spectra", equal={"collection": [collection]}, steps=steps, blocks=blocks)
            tables.append(whole.drop_columns(["rank"]))
            continue
        for piece in _pieces(catalog, content, collection, names, steps, blocks=blocks):
            tables += _summed(piece) if len(catalog.ranks) > 1 else [piece.drop_columns(["rank"])]
    return pa.concat_tables(tables, promote_options="default")


def _summed(piece: Table) -> Iterator[Table]:
    """The rows of all ranks added up."""
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
        yield made.cast(WIDE if "block" in made.column_names else SCHEMAS["spectra"])


def _pieces(
    catalog: Catalog, content: RunContents, collection: str, names: Sequence[str], steps: Steps, *, blocks: bool = True
) -> Iterator[Table]:
    """Rows of whole series, sorted by name and step, replicas counted once; as many series at a time as are small."""
    for some in _stretches(catalog, content, names, steps):
        wanted = {"collection": [collection], "name": some}
        found = select(catalog, "spectra", equal=wanted, steps=steps, blocks=blocks)
        if len(catalog.ranks) > 1:
            found = _without_replicas(catalog, content, collection, found, steps)
        yield found


def _stretches(catalog: Catalog, content: RunContents, names: Sequence[str], steps: Steps) -> Iterator[Sequence[str]]:
    """The names, as many at a time as have about `_READ` rows at these steps."""
    many = len(names) > 1
    per_series = max(1, int(steps.mask(content.steps()).sum()) * len(catalog.ranks)) if many else 1
    at_once = max(1, _READ // per_series)
    for start in range(0, len(names), at_once):
        yield names[start : start + at_once]


def _without_replicas(catalog: Catalog, content: RunContents, collection: str, found: Table, steps: Steps) -> Table:
    found = row_order.by(found, ("name", "step", "format", "scale", "rank"))
    pieces = _by_series(found)
    plain = {name: series for name, series in pieces if rank_merge.is_plain(series)}
    _decide(catalog, content, collection, plain, steps)
    parts = rank_merge.parts_of_batch(catalog.manifests, collection)
    replicas = {name for name in plain if content.replicas[collection, name]}
    result = [rank_merge.counted_once(series, parts) if name in replicas else series for name, series in pieces]
    return pa.concat_tables([found.slice(0, 0), *result]) if replicas else found


def _by_series(table: Table) -> list[tuple[str, Table]]:
    """The name and the rows of each series, of rows that are sorted by name."""
    bounds = [*row_order.starts([row_order.codes(table["name"])]).tolist(), len(table)]
    return [
        (table["name"][start].as_py(), table.slice(start, stop - start)) for start, stop in itertools.pairwise(bounds)
    ]


def _decide(catalog: Catalog, content: RunContents, collection: str, plain: dict[str, Table], steps: Steps) -> None:
    """Whether ranks hold replicas of these series: decided over all steps, whichever are asked for, and remembered."""
    parts = rank_merge.parts_of_batch(catalog.manifests, collection)
    open_ones = [name for name in plain if (collection, name) not in content.replicas]
    if steps == Steps():
        content.replicas.update({(collection, name): rank_merge.are_replicas(plain[name], parts) for name in open_ones})
        return
    for some in _stretches(catalog, content, open_ones, Steps()):
        wanted = {"collection": [collection], "name": some}
        whole = row_order.by(select(catalog, "spectra", equal=wanted, blocks=False), ("name",))
        for name, series in _by_series(whole):
            content.replicas[collection, name] = rank_merge.are_replicas(series, parts)


def _whole_steps(table: Table, start: int) -> Table:
    """About `_ROWS` rows from `start` on, cut where a name or a step begins, so that cuts fit together."""
    return table.slice(_boundary(table, start), _boundary(table, start + _ROWS) - _boundary(table, start))


def _boundary(table: Table, row: int) -> int:
    def key(i: int) -> tuple[object, object]:
        return table["name"][i].as_py(), table["step"][i].as_py()

    while 0 < row < len(table) and key(row) == key(row - 1):
        row -= 1
    return min(row, len(table))


def _decoded(table: Table, *, raw: bool) -> Iterator[tuple[int, str, str, Spectrum]]:
    """Rows of one step and name merged: those of one scale and format as rows, the others as spectra."""
    columns = [row_order.codes(table[c]) for c in ("name", "step", "format", "scale")]
    starts = row_order.starts(columns)
    banked, blocks = rows_of(table), blocks_of(table)
    if len(starts) < len(table):
        banked, blocks = step_table.merged_rows(banked, blocks, starts)
    lengths = [0] * len(banked) if blocks is None else blocks.tolist()
    kept = table.select(["collection", "name", "step", "format", "scale"]).take(array(starts)).to_pylist()
    held: tuple[int, str, str, Spectrum] | None = None
    for row, block, entry in zip(banked, lengths, kept, strict=True):
        spectrum = (
            unscaling.stored_spectrum(row, entry["format"], block)
            if raw
            else unscaling.true_spectrum(row, entry["format"], entry["scale"], block)
        )
        key = (entry["step"], entry["collection"], entry["name"])
        if held is not None and held[:3] == key:
            held = (*key, held[3] + spectrum)
        else:
            if held is not None:
                yield held
            held = (*key, spectrum)
    if held is not None:
        yield held


def choices(catalog: Catalog, content: RunContents, chosen: Sequence[tuple[str, Sequence[str]]]) -> Iterator[None]:
    """Decides which of these plain series are replicas (`RunContents.replicas`), a piece at each step."""
    for collection, names in chosen:
        for _ in _pieces(catalog, content, collection, names, Steps(), blocks=False):
            yield
