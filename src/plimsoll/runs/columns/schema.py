"""Columns of a run's parts: names, types, and tables of scalars and events.

docs/reference/run-format.md describes them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from plimsoll.runs.columns.arrow import Array, Schema, Table, array, pa, strings
from plimsoll.runs.records import EXTRAS, OPTIONAL_EXTRAS
from plimsoll.spectrum.record import BLOCK_COUNTS, COUNTS, EXTREMES, SUMS

SCHEMA = 1  # the version that readers check

Kind = Literal["spectra", "scalars", "events"]
KINDS: tuple[Kind, ...] = ("spectra", "scalars", "events")

ADDED = ("sumfourth",)  # columns that parts of older versions lack: null there

_WORDS: list[tuple[str, Any]] = [("collection", pa.string()), ("name", pa.string()), ("format", pa.string())]
_INT64_LIST = pa.list_(pa.field("element", pa.int64()))
SCHEMAS: Mapping[Kind, Schema] = {
    "spectra": pa.schema(
        [("step", pa.int64()), *_WORDS, ("shared", pa.bool_()), *((n, pa.int64()) for n in COUNTS)]
        + [(n, pa.float64()) for n in (*EXTREMES, *SUMS, "scale")]
        + [("lowest", pa.int16()), ("binades", _INT64_LIST)]
        + [(n, pa.float64()) for n in EXTRAS if not any(n in group for group in OPTIONAL_EXTRAS)]
    ),
    "scalars": pa.schema([("step", pa.int64()), ("name", pa.string()), ("value", pa.float64())]),
    "events": pa.schema(
        [("step", pa.int64()), *((n, pa.string()) for n in ("kind", "message", "details")), ("time", pa.float64())]
    ),
}
# Block records, values in a last bin and errors are columns only in parts that have some of them. Readers ask
# for columns by name, so a reader that is older than they are still reads such a part.
_BLOCK_FIELDS: Sequence[Any] = (
    pa.field("block", pa.int32()),
    *(pa.field(name, pa.int64()) for name in BLOCK_COUNTS),
    pa.field("depths", _INT64_LIST),
    pa.field("lowest_maximum", pa.int16()),
    pa.field("maxima", _INT64_LIST),
)
BLOCK_COLUMNS: tuple[str, ...] = tuple(field.name for field in _BLOCK_FIELDS)
_GROUPS: Sequence[Sequence[Any]] = (
    _BLOCK_FIELDS,
    *(tuple(pa.field(name, pa.float64()) for name in group) for group in OPTIONAL_EXTRAS),
)
WIDE: Schema = pa.schema([*SCHEMAS["spectra"], *(field for group in _GROUPS for field in group)])
# Parts that were written before scalars had times lack this column.
TIMED: Schema = pa.schema([*SCHEMAS["scalars"], ("time", pa.float64())])


def schema_with(kind: Kind, names: Collection[str]) -> Schema:
    """Return a kind's schema, with the groups of optional columns that `names` needs."""
    if kind == "scalars":
        return TIMED if "time" in names else SCHEMAS[kind]
    if kind != "spectra":
        return SCHEMAS[kind]
    groups = [group for group in _GROUPS if any(field.name in names for field in group)]
    return pa.schema([*SCHEMAS[kind], *(field for group in groups for field in group)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Identity of one series."""

    collection: str
    name: str
    format: str  # format of the values when they were measured
    shared: bool  # whether ranks hold different parts of one tensor, which readers add up


def rows_table(rows: Sequence[Mapping[str, Any]], kind: Kind) -> Table:
    """Return the table of scalars or events, in the given order."""
    columns: list[Array] = []
    schema = TIMED if kind == "scalars" else SCHEMAS[kind]
    for field in schema:
        values = [row[field.name] for row in rows]
        columns.append(
            strings(values) if field.type == pa.string() else array(np.array(values, field.type.to_pandas_dtype()))
        )
    return pa.Table.from_arrays(columns, schema=schema)


def words(values: Sequence[str], codes: NDArray[np.int64]) -> Array:
    """Return a dictionary column of strings, given by their position in `values`."""
    distinct = sorted(set(values))
    position = {value: i for i, value in enumerate(distinct)}
    recoded = np.array([position[value] for value in values], dtype=np.int32)[codes]
    return pa.DictionaryArray.from_arrays(array(recoded), strings(distinct))


def conformed(table: Table, schema: Schema) -> Table:
    """Return the table with a schema's columns, order and types; null where missing."""
    for field in schema:
        if field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(len(table), field.type))
    return table.select(schema.names).cast(schema)
