"""Selection of rows from parts by names and steps, without replaced rows."""

import difflib
import fnmatch
import functools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from plimsoll.errors import ArgumentError, NotRecordedError
from plimsoll.runs.columns import row_order
from plimsoll.runs.columns.arrow import Array, Table, array, pa, values_of
from plimsoll.runs.columns.schema import BLOCK_COLUMNS, SCHEMAS, WIDE, Kind
from plimsoll.runs.reading.run_folder import RunFolder, SmallTables
from plimsoll.runs.storage import parquet
from plimsoll.runs.storage.location import StorageLocation
from plimsoll.runs.storage.parts import Part


def matching(names: Iterable[str], pattern: str | None) -> list[str]:
    """Return the names that equal a pattern, or else match it as a glob. All for None."""
    listed = list(names)
    if pattern is None:
        return listed
    return [pattern] if pattern in listed else fnmatch.filter(listed, pattern)


def unknown(operation: str, what: str, name: str, names: Sequence[str], *, closed: bool = True) -> NotRecordedError:
    """Return the error for an unknown name (`what` is its kind), with similar ones.

    A run that is not `closed` may still get the name.
    """
    near = difflib.get_close_matches(str(name), names, n=3, cutoff=0.4) or sorted(names)[:3]
    listed = ", ".join(repr(n) for n in near)
    advice = f"The nearest are {listed}." if near else "Nothing of this kind was recorded."
    if not closed:
        advice += " The run is open: its writer writes every few seconds, so call Run.refresh() and ask again."
    return NotRecordedError(f"{operation}: expected {what} that was recorded; got {name!r}. {advice}")


_WORD = pa.dictionary(pa.int32(), pa.string())
_GROUPS = 16  # row groups that are read at a time where only some of their rows are wanted: some 30 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Range of steps: from `low` to below `high`, every `every`-th from `low` on."""

    low: int | None = None
    high: int | None = None
    every: int = 1

    @classmethod
    def of(cls, steps: object, operation: str) -> "Steps":
        """Return the range of a slice of step numbers, all for None."""
        if steps is None:
            return cls()
        given = _whole_numbers(steps)
        if given is None or (given[2] is not None and given[2] < 1):
            raise ArgumentError(
                f"{operation}: expected steps to be a slice of step numbers, ascending; got {steps!r}. "
                "slice(100, 200) is from step 100 up to and not including 200."
            )
        low, high, every = given
        return cls(low=low, high=high, every=1 if every is None else every)

    def may_be_in(self, part: Part) -> bool:
        """Return whether a part may have such steps."""
        return (self.low is None or part.max_step >= self.low) and (self.high is None or part.min_step < self.high)

    def mask(self, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of these steps are in the range."""
        result = np.ones(len(steps), dtype=bool)
        if self.low is not None:
            result &= steps >= self.low
        if self.high is not None:
            result &= steps < self.high
        return result if self.every == 1 else result & ((steps - (self.low or 0)) % self.every == 0)


def _whole_numbers(steps: object) -> tuple[int | None, int | None, int | None] | None:
    """Return the ends and the step of a slice of whole numbers, NumPy's among them. None: it is none."""
    if not isinstance(steps, slice):
        return None
    given = cast("tuple[Any, Any, Any]", (steps.start, steps.stop, steps.step))
    try:
        low, high, every = (None if number is None else operator.index(number) for number in given)
    except TypeError:
        return None
    return low, high, every


def select(
    folder: RunFolder,
    kind: Kind,
    *,
    equal: Mapping[str, Collection[str]] | None = None,
    steps: Steps | None = None,
    columns: Sequence[str] | None = None,
    blocks: bool = True,
) -> Table:
    """Return rows with a column `rank`, sorted by key, step, format, scale and rank.

    `equal` has the allowed words by column. Optional columns that a part lacks are left out. With `blocks` those of
    block records are read too, if there are any. Words are dictionaries.
    """
    tables = _loaded(folder, kind, equal or {}, steps or Steps(), columns, blocks=blocks)
    return row_order.ordered(pa.concat_tables(tables, promote_options="default"), kind, last=("rank",))


def by_collection(
    folder: RunFolder, collections: Sequence[str], steps: Steps, *, blocks: bool, moved: bool
) -> Iterator[tuple[str, Table]]:
    """Yield each collection and its rows, as `select` returns them.

    Each part is read once for all collections. Rows of different series stay as they are stored unless `moved`.
    """
    tables = _loaded(folder, "spectra", {"collection": collections}, steps, None, blocks=blocks)
    pieces: dict[str, list[Table]] = {collection: [tables[0]] for collection in collections}
    for table in tables:
        words, places = row_order.places(table["collection"])
        for place, word in enumerate(words):
            rows = np.flatnonzero(places == place)
            # A part is sorted by collection. So these rows are a slice, which takes no memory.
            is_slice = rows[-1] - rows[0] < len(rows)
            pieces[word].append(table.slice(int(rows[0]), len(rows)) if is_slice else table.take(array(rows)))
    del tables
    for collection in collections:
        table = pa.concat_tables(pieces.pop(collection), promote_options="default")
        yield collection, row_order.ordered(table, "spectra", last=("rank",), moved=moved)


def _loaded(
    folder: RunFolder,
    kind: Kind,
    equal: Mapping[str, Collection[str]],
    wanted: Steps,
    columns: Sequence[str] | None,
    *,
    blocks: bool,
) -> list[Table]:
    """Return a table without rows, and those of the parts."""
    always = SCHEMAS[kind].names
    chosen = columns or (WIDE.names if kind == "spectra" else always)
    names = [name for name in chosen if name in always]
    more = [name for name in chosen if name not in always and (blocks or name not in BLOCK_COLUMNS)]

    def load(place: StorageLocation, part: Part) -> Table:
        return _load(place, part, (names, more), equal, wanted, folder.visible_end(part), folder.small_tables)

    # Row groups whose statistics exclude such rows are not read.
    loaded = folder.read(lambda: [p for p in folder.of(kind) if _is_worth_reading(folder, p, wanted)], load)
    words = parquet.WORDS[kind]
    types = {name: _WORD if name in words else SCHEMAS[kind].field(name).type for name in names}
    tables = [pa.Table.from_batches([], pa.schema({**types, "rank": pa.int32()}))]
    tables += [table.append_column("rank", array(np.full(len(table), part.rank, np.int32))) for part, table in loaded]
    if wanted.every != 1:
        tables = [_rows(table, wanted.mask(values_of(table["step"]))) for table in tables]
    return tables


def _is_worth_reading(folder: RunFolder, part: Part, steps: Steps) -> bool:
    return steps.may_be_in(part) and folder.visible_end(part) >= part.min_step


def _load(
    place: StorageLocation,
    part: Part,
    columns: tuple[list[str], Sequence[str]],
    equal: Mapping[str, Collection[str]],
    steps: Steps,
    end: int,
    small: SmallTables,
) -> Table:
    """Return a part's selected rows up to step `end`.

    They have the first columns, and those of the second that exist.
    """
    file = parquet.opened(place, part, parquet.WORDS[part.kind])
    there = file.schema_arrow.names
    wanted = [*columns[0], *(name for name in columns[1] if name in there)]
    high = end if steps.high is None else min(end, steps.high - 1)
    bounds: dict[str, tuple[Any, Any]] = {name: (min(values), max(values)) for name, values in equal.items() if values}
    if (steps.low is not None and steps.low > part.min_step) or high < part.max_step:
        bounds["step"] = steps.low, high
    if not bounds:
        return parquet.read(file, part, wanted)
    needed, groups = list(dict.fromkeys([*wanted, *bounds])), parquet.groups_with(file, bounds)
    tables: list[Table] = []
    for start in range(0, max(1, len(groups)), _GROUPS):
        some = groups[start : start + _GROUPS]
        table = small.get((part, *needed, *some), functools.partial(parquet.read, file, part, needed, some))
        mask = np.ones(len(table), dtype=bool)
        for name, values in equal.items():
            mask &= _is_in(table[name], frozenset(values))
        if "step" in bounds:
            mask &= Steps(low=steps.low, high=high + 1).mask(values_of(table["step"]))
        tables.append(_rows(table, mask).select(wanted))
    return pa.concat_tables(tables)


def _is_in(column: Array, words: Collection[str]) -> NDArray[np.bool_]:
    known, places = row_order.places(column)
    return np.array([word in words for word in known], dtype=bool)[places]


def _rows(table: Table, mask: NDArray[np.bool_]) -> Table:
    return table if mask.all() else table.filter(array(mask))
