"""Merging of parts of one kind, with one row group of each in memory, and thinning by age."""

import bisect
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.errors import ArgumentError
from plimsoll.runs.columns.arrow import ParquetFile, Schema, Table, array, pa, values_of
from plimsoll.runs.columns.row_order import KEYS, ordered
from plimsoll.runs.columns.schema import SCHEMAS, Kind, conformed, schema_with
from plimsoll.runs.storage import parquet
from plimsoll.runs.storage.location import Folder
from plimsoll.runs.storage.parts import Part

Key = tuple[str, ...]
# Of a part's rows, by their steps, those to keep.
Keep = Callable[[Part, NDArray[np.int64]], NDArray[np.bool_]]


_CHUNK = 8 * parquet.ROW_GROUP  # rows joined at a time, some 15 MB


class DamagedPartError(Exception):
    """An input that cannot be read. It names the part, which can then be set aside."""

    def __init__(self, part: Part, reason: str) -> None:
        super().__init__(reason)
        self.part = part


def merge(folder: Path, parts: Sequence[Part], target: Part, keep: Keep) -> int:
    """Write the rows of `parts` that `keep` keeps as `target`; return their number."""
    sources: list[_Source] = []
    try:
        for part in parts:
            source: _Source = _read(part, lambda part=part: _Source.opened(folder, part))
            sources.append(source)
        return parquet.write(folder / target.name, target.kind, _row_groups(sources, target.kind, keep))
    finally:
        for source in sources:
            source.file.close(force=True)


def _row_groups(sources: Sequence["_Source"], kind: Kind, keep: Keep) -> Iterator[Table]:
    """Yield the merged rows in tables of whole row groups, except for the last one."""
    schema = schema_with(kind, {name for source in sources for name in source.file.schema_arrow.names})
    pending = pa.Table.from_batches([], schema)
    for low, high in _ranges(sources):
        joined = _joined(sources, kind, keep, (low, high), schema)
        pending = joined if not len(pending) else pa.concat_tables([pending, joined])
        whole = len(pending) // parquet.ROW_GROUP * parquet.ROW_GROUP
        if whole:
            yield pending.slice(0, whole)
            pending = pending.slice(whole)
    yield pending


def _ranges(sources: Sequence["_Source"]) -> Iterator[tuple[Key, Key]]:
    """Yield each range's first and last key: at most `_CHUNK` rows, at least one key."""
    rows: dict[Key, int] = {}
    for source in sources:
        for key, start, stop in zip(source.keys, source.starts, source.starts[1:], strict=False):
            rows[key] = rows.get(key, 0) + stop - start
    chunk: list[Key] = []
    total = 0
    for key in sorted(rows):
        if chunk and total + rows[key] > _CHUNK:
            yield chunk[0], chunk[-1]
            chunk, total = [], 0
        chunk.append(key)
        total += rows[key]
    if chunk:
        yield chunk[0], chunk[-1]


def _joined(sources: Sequence["_Source"], kind: Kind, keep: Keep, ends: tuple[Key, Key], schema: Schema) -> Table:
    pieces = [pa.Table.from_batches([], schema)]
    for source in sources:
        piece = _read(source.part, lambda source=source: source.rows(*ends, schema))
        lasting = keep(source.part, values_of(piece["step"]))
        pieces.append(piece if lasting.all() else piece.filter(array(lasting)))
    return ordered(pa.concat_tables(pieces), kind)


@dataclass(slots=True, kw_only=True)
class _Source:
    """One input: its keys in order, their first rows, and the row groups decoded last."""

    part: Part
    file: ParquetFile
    keys: list[Key]
    starts: list[int]
    bounds: list[int]
    groups: dict[int, Table] = field(default_factory=dict[int, Table])

    @classmethod
    def opened(cls, folder: Path, part: Part) -> "_Source":
        file = parquet.opened(Folder(folder), part, parquet.WORDS[part.kind])
        keys, starts = _runs(file, part)
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        return cls(part=part, file=file, keys=keys, starts=starts, bounds=np.cumsum([0, *sizes]).tolist())

    def rows(self, low: Key, high: Key, schema: Schema) -> Table:
        """Return the rows with keys from `low` to `high`, included, in a schema's columns."""
        start = self.starts[bisect.bisect_left(self.keys, low)]
        stop = self.starts[bisect.bisect_right(self.keys, high)]
        if start == stop:
            return pa.Table.from_batches([], schema)
        numbers = range(bisect.bisect_right(self.bounds, start) - 1, bisect.bisect_left(self.bounds, stop))
        self.groups = {i: self.groups.get(i) or self._decoded(i, schema) for i in numbers}
        offset = self.bounds[numbers[0]]
        return pa.concat_tables(self.groups.values()).slice(start - offset, stop - start)

    def _decoded(self, group: int, schema: Schema) -> Table:
        there = {*SCHEMAS[self.part.kind].names, *self.file.schema_arrow.names}  # only optional ones may be lacking
        known = [name for name in schema.names if name in there]
        return conformed(parquet.read(self.file, self.part, known, [group]), schema)


def _runs(file: ParquetFile, part: Part) -> tuple[list[Key], list[int]]:
    """Return the distinct keys in file order, their first rows, and the row count."""
    rows, key = file.metadata.num_rows, KEYS[part.kind]
    if not key or not rows:
        return ([()], [0, rows]) if rows else ([], [0])
    table = parquet.read(file, part, key).combine_chunks()
    columns = [table[name].chunk(0) for name in key]
    changed = np.any([np.diff(values_of(c.indices)) != 0 for c in columns], axis=0)
    starts = [0, *(np.flatnonzero(changed) + 1).tolist()]
    keys: list[Key] = list(zip(*(c.take(array(np.array(starts))).to_pylist() for c in columns), strict=True))
    if any(a >= b for a, b in itertools.pairwise(keys)):
        raise pa.ArrowInvalid("its rows are not in the order of its key")
    return keys, [*starts, rows]


def _read(part: Part, read: Callable[[], Any]) -> Any:
    """Return what `read` returns; raise `DamagedPartError` for damage, else OSError."""
    try:
        return read()
    except (OSError, ValueError, LookupError, TypeError, MemoryError) as error:  # pyarrow's errors are among these
        if parquet.is_damage(error):
            reason = f"{error}".splitlines()
            raise DamagedPartError(part, reason[0] if reason else type(error).__name__) from error
        raise


# -- thinning: of old spectra only every n-th step stays ---------------------------------------------------------------

# A rule is ``(age_steps, keep_every)``: of the steps that are more than `age_steps` behind the last one, those
# divisible by `keep_every` stay. A part is rewritten once for each rule that applies to all of its steps. Its
# generation is the number of rules that were applied to all of it.

Rules = tuple[tuple[int, int], ...]


def rules(thin: Sequence[tuple[int, int]]) -> Rules:
    """Return the rules, youngest age first, after a check."""
    try:
        checked = tuple(sorted((operator.index(age), operator.index(every)) for age, every in thin))
    except (TypeError, ValueError):
        checked = ((-1, 0),)
    for age, every in checked:
        if age < 0 or every < 1:
            raise ArgumentError(
                f"RunWriter: expected thin=((age_steps, keep_every), ...) with age_steps >= 0 and keep_every >= 1; got "
                f"thin={thin!r}. thin=((100_000, 100),) keeps every 100th step of what is older than 100,000 steps."
            )
    return checked


def kept(steps: NDArray[np.int64], thin: Rules, last_step: int) -> NDArray[np.bool_]:
    """Return which steps stay."""
    result = np.ones(len(steps), dtype=bool)
    for age, every in thin:
        result &= (steps >= last_step - age) | (steps % every == 0)
    return result


def due(parts: Sequence[Part], thin: Rules) -> Sequence[Part]:
    """Return the oldest part of spectra that a rule still has to be applied to."""
    if not thin or not parts or parts[0].kind != "spectra":
        return ()
    last_step = max(part.max_step for part in parts)
    for part in parts:
        if _applied(part, thin, last_step) > part.generation:
            return [part]
    return ()


def generation(parts: Sequence[Part], thin: Rules, all_parts: Sequence[Part]) -> int:
    """Return the generation of a part merged from `parts`."""
    if parts[0].kind != "spectra" or not thin:
        return max(part.generation for part in parts)
    last_step = max(part.max_step for part in all_parts)
    applied = min(_applied(part, thin, last_step) for part in parts)
    # One part rewritten keeps its range, so its generation must grow for it to cover what it replaces.
    return max(applied, parts[0].generation + 1) if len(parts) == 1 else applied


def _applied(part: Part, thin: Rules, last_step: int) -> int:
    """Return how many rules apply to all of a part."""
    return sum(part.max_step < last_step - age for age, _ in thin)
