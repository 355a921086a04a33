"""Spectra out of the parts: ranks merged, scales undone, in pieces of bounded size."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from plimsoll.runs import _decode, _entries, _order, _ranks
from plimsoll.runs._arrow import Table, array, pa, values_of
from plimsoll.runs._catalog import Catalog
from plimsoll.runs._content import Content
from plimsoll.runs._records import EXTRAS
from plimsoll.runs._rows import blocks_of, numbers, rows_of
from plimsoll.runs._select import Steps, select
from plimsoll.runs._tables import SCHEMAS, WIDE, Series, chunk_of, spectra_table
from plimsoll.spectrum import Spectrum

_ROWS = 1 << 14  # rows that are read, and decoded, at a time: some 40 MB as rows of a bank


def read(
    catalog: Catalog, content: Content, collection: str, names: Sequence[str], steps: Steps, *, raw: bool
) -> Iterator[tuple[int, str, str, Spectrum]]:
    """Step, collection, name and spectrum, name after name, steps ascending."""
    for table in _pieces(catalog, content, collection, names, steps):
        for start in range(0, len(table), _ROWS):
            yield from _decoded(_whole_steps(table, start), raw=raw)


def rows(catalog: Catalog, content: Content, collection: str, name: str, columns: Sequence[str]) -> Table:
    """Some columns of one series at all steps, replicas counted once."""
    if len(catalog.ranks) == 1:
        wanted = [c for c in SCHEMAS["spectra"].names if c in {"step", "collection", "name", "format", *columns}]
        return select(catalog, "spectra", equal={"collection": [collection], "name": [name]}, columns=wanted)
    return next(_pieces(catalog, content, collection, [name], Steps()))


def table(
    catalog: Catalog, content: Content, chosen: Sequence[tuple[str, Sequence[str]]], steps: Steps, *, blocks: bool
) -> Table:
    """The rows of some series as one table with the columns of a part, one row for each series, step and scale.

    Block records are left out unless `blocks`; there are columns of them only if one of the rows has one.
    """
    tables = [pa.Table.from_batches([], SCHEMAS["spectra"])]
    for collection, names in chosen:
        if len(catalog.ranks) == 1 and list(names) == list(content.tensors()[collection]):
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
        columns = [_order.codes(table[c]) for c in ("name", "step", "format", "scale")]
        starts = _order.starts(columns)
        if not len(starts):
            continue
        first = table.take(array(starts))
        series = [Series(**row) for row in first.select(["collection", "name", "format", "shared"]).to_pylist()]
        merged, blocks = _entries.merged_rows(rows_of(table), blocks_of(table), starts)
        entries = _entries.Entries(
            series=np.arange(len(starts)),
            scales=numbers(first, "scale"),
            rows=merged,
            extras=_entries.merged_extras(np.stack([numbers(table, name) for name in EXTRAS], axis=1), starts),
            blocks=blocks,
        )
        made = spectra_table([chunk_of(values_of(first["step"]), entries)], series)
        yield made.cast(WIDE if "block" in made.column_names else SCHEMAS["spectra"])


def _pieces(
    catalog: Catalog, content: Content, collection: str, names: Sequence[str], steps: Steps, *, blocks: bool = True
) -> Iterator[Table]:
    """Rows of whole series, sorted by name and step, replicas counted once; as many series at a time as are small."""
    ahead = list(names)
    per_series = max(1, len(content.steps()) * len(catalog.ranks)) if len(ahead) > 1 else 1
    at_once = max(1, _ROWS // per_series)
    for start in range(0, len(ahead), at_once):
        some = ahead[start : start + at_once]
        wanted = {"collection": [collection], "name": some}
        found = select(catalog, "spectra", equal=wanted, steps=steps, blocks=blocks)
        if len(catalog.ranks) > 1:
            found = _without_replicas(catalog, content, collection, found, steps)
        yield found


def _without_replicas(catalog: Catalog, content: Content, collection: str, found: Table, steps: Steps) -> Table:
    found = _order.by(found, ("name", "step", "format", "scale", "rank"))
    names = _order.codes(found["name"])
    bounds = [*_order.starts([names]).tolist(), len(found)]
    result = [found.slice(0, 0)]
    for start, stop in itertools.pairwise(bounds):
        series = found.slice(start, stop - start)
        if _ranks.is_plain(series) and _are_replicas(catalog, content, collection, series, steps):
            series = _ranks.counted_once(series, _ranks.parts_of_batch(catalog.manifests, collection))
        result.append(series)
    return pa.concat_tables(result)


def _are_replicas(catalog: Catalog, content: Content, collection: str, series: Table, steps: Steps) -> bool:
    """Whether ranks hold replicas of a series: decided over all its steps, whichever are asked for, and remembered."""
    key = (collection, series["name"][0].as_py())
    if key not in content.replicas:
        whole = series
        if steps != Steps():
            only = {"collection": [collection], "name": [str(key[1])]}
            whole = select(catalog, "spectra", equal=only, blocks=False)
        parts = _ranks.parts_of_batch(catalog.manifests, collection)
        content.replicas[key] = _ranks.are_replicas(whole, parts)
    return content.replicas[key]


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
    columns = [_order.codes(table[c]) for c in ("name", "step", "format", "scale")]
    starts = _order.starts(columns)
    banked, blocks = rows_of(table), blocks_of(table)
    if len(starts) < len(table):
        banked, blocks = _entries.merged_rows(banked, blocks, starts)
    lengths = [0] * len(banked) if blocks is None else blocks.tolist()
    kept = table.select(["collection", "name", "step", "format", "scale"]).take(array(starts)).to_pylist()
    held: tuple[int, str, str, Spectrum] | None = None
    for row, block, entry in zip(banked, lengths, kept, strict=True):
        spectrum = (
            _decode.stored_spectrum(row, entry["format"], block)
            if raw
            else _decode.true_spectrum(row, entry["format"], entry["scale"], block)
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


def choices(catalog: Catalog, content: Content, chosen: Sequence[tuple[str, Sequence[str]]]) -> Iterator[None]:
    """Decides which of these plain series are replicas (`Content.replicas`), a piece at each step."""
    for collection, names in chosen:
        for _ in _pieces(catalog, content, collection, names, Steps(), blocks=False):
            yield
