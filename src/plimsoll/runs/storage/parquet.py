"""Reading and writing of parts: encodings, row groups, checksums, and damage.

Every column of a part is checked when it is read.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from plimsoll import row_layout
from plimsoll.errors import PlimsollError, RunError
from plimsoll.formats import get_element
from plimsoll.runs.columns.arrow import WRITING_POOL, ParquetFile, ParquetWriter, Table, pa, pc, pq, values_of
from plimsoll.runs.columns.schema import (
    ADDED,
    BLOCK_COLUMNS,
    BLOCK_COUNTS,
    COUNTS,
    EXTREMES,
    SCHEMA,
    SCHEMAS,
    TIMED,
    WIDE,
    Kind,
)
from plimsoll.runs.columns.spectrum_columns import list_items, numbers
from plimsoll.runs.records import EXTRAS
from plimsoll.runs.storage import atomic_files
from plimsoll.runs.storage.limits import EVENT_BYTES, RANGES, WORD_BYTES, DamageError, check_depth, from_json
from plimsoll.runs.storage.location import StorageLocation
from plimsoll.runs.storage.parts import Part

# -- checks of columns -------------------------------------------------------------------------------------------------

_POSITIVE = (np.nextafter(0.0, 1.0), np.finfo(np.float64).max)
_MAGNITUDE = (0.0, float("inf"))
# A crafted first binade ended a reader inside scipy.
_BINADES = (row_layout.LOWEST_BINADE, row_layout.LOWEST_BINADE + row_layout.BINADES - 1)
_LENGTHS = (0, row_layout.BINADES)
_RANGES: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys((*COUNTS, *BLOCK_COUNTS), RANGES["count"]),
    **dict.fromkeys(("absmin", "absmax", "abssum", "sumsq", *ADDED, *EXTRAS), _MAGNITUDE),
    **dict.fromkeys(("error", "reference", "error_reference"), (-float("inf"), float("inf"))),
    "scale": _POSITIVE,
    "lowest": _BINADES,
    "lowest_maximum": _BINADES,
    "block": (1, 1 << 30),
    "time": (-(1 << 53), 1 << 53),
}
_NULLABLE = frozenset({*EXTREMES, *ADDED, *EXTRAS, "lowest", *BLOCK_COLUMNS})
_NEVER_NAN = ("scale", "time")
_LISTS = ("binades", "depths", "maxima")
_WORDS = ("collection", "name", "format", "kind")


def checked(table: Table, part: Part) -> Table:
    """Return the rows of a part with the types of its columns.

    Values that cannot be true are a `DamageError`.
    """
    known = {"spectra": WIDE, "scalars": TIMED, "events": SCHEMAS["events"]}[part.kind]
    fields = [(f.name, f.type if pa.types.is_dictionary(f.type) else known.field(f.name).type) for f in table.schema]
    table = table.cast(pa.schema(fields)).unify_dictionaries()
    table.validate(full=True)  # text that is no UTF-8, lists whose ends contradict each other
    if len(table):
        for name in table.column_names:
            _check_column(table[name], name, part)
        if {*COUNTS, *EXTREMES} <= {*table.column_names}:
            _check_rows(table)
    return table


def _check_column(column: Any, name: str, part: Part) -> None:
    # A part that was merged from older and newer ones has times in some of its rows.
    is_nullable = name in _NULLABLE or (name == "time" and part.kind == "scalars")
    if column.null_count and not is_nullable:
        raise DamageError(f"column {name}: {column.null_count} values are missing")
    if name in _LISTS:
        _check_range(pc.list_value_length(column), f"{name}, lengths", _LENGTHS)
        _check_range(pc.list_flatten(column), name, RANGES["count"])
    elif name == "step":
        _check_range(column, name, (part.min_step, part.max_step))
    elif name in _RANGES:
        _check_range(column, name, _RANGES[name])
        if name in _NEVER_NAN and pc.any(pc.is_nan(column)).as_py():
            raise DamageError(f"column {name}: NaN")
    elif name in _WORDS:
        words = pc.unique(column).cast(pa.string()) if pa.types.is_dictionary(column.type) else column
        _check_range(pc.binary_length(words), f"{name}, bytes", (0, WORD_BYTES))
    if name == "format":
        _check_formats(pc.unique(column).to_pylist())
    if name == "details":
        _check_details(column.to_pylist())


# Code that uses the tables relies on them: a binade out of range would be an index out of range in code without checks.
def _check_range(column: Any, name: str, allowed: tuple[float, float]) -> None:
    low, high = pc.min_max(column).as_py().values()  # of numbers: NaN and null are left out
    if low is not None and not allowed[0] <= low <= high <= allowed[1]:
        raise DamageError(f"column {name}: expected {allowed[0]} to {allowed[1]}, got {low} to {high}")


def _check_formats(names: Sequence[str]) -> None:
    for name in names:
        try:
            get_element(name, "Run")
        except PlimsollError as error:
            raise DamageError(f"column format: {name!r:.60} is none") from error


def _check_details(texts: Sequence[str]) -> None:
    for text in texts:
        details = from_json(text, EVENT_BYTES)
        if not isinstance(details, dict):
            raise DamageError("column details: expected JSON objects")
        check_depth(cast("object", details), "column details")


def _check_rows(table: Table) -> None:
    """Check that the columns of each row agree, as `Spectrum` requires."""
    count, zeros, *others = (values_of(table[name]) for name in COUNTS)
    finite = count - np.sum(others, axis=0)
    low, high, absmin, absmax = (numbers(table, name) for name in EXTREMES)
    agree = (finite >= zeros) & (np.isnan(absmin) == (finite == zeros))
    for extreme in (low, high, absmax):
        agree &= np.isnan(extreme) == (finite == 0)
    agree &= (finite == 0) | ((low <= high) & (np.maximum(-low, high) == absmax))
    if "binades" in table.column_names:
        agree &= _binades_agree(table, finite - zeros, absmin, absmax)
    if "block" in table.column_names:
        _check_blocks(table)
    if not agree.all():
        raise DamageError(f"{np.count_nonzero(~agree)} rows whose counts, extremes and binades contradict each other")


def _binades_agree(
    table: Table, nonzero: NDArray[np.int64], absmin: NDArray[np.float64], absmax: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Return whether the binades add up to the nonzero values and end at the extremes."""
    start, counts = list_items(table["binades"])
    lengths = np.diff(start)
    first, some, total = numbers(table, "lowest"), lengths > 0, np.zeros(len(table), dtype=np.int64)
    if some.any():
        total[some] = np.add.reduceat(counts, start[:-1][some])
    agree = (total == nonzero) & (np.isnan(first) == (lengths == 0))
    return agree & ((lengths == 0) | ((first == _binade(absmin)) & (first + lengths - 1 == _binade(absmax))))


def _binade(magnitudes: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.clip(np.frexp(magnitudes)[1] - 1, *_BINADES)


def _check_blocks(table: Table) -> None:
    """Check that block records are complete or absent, and within a wide row."""
    missing = pc.is_null(table["block"])
    for name in (*BLOCK_COUNTS, "depths", "maxima"):
        if name in table.column_names and not pc.is_null(table[name]).equals(missing):
            raise DamageError(f"columns block and {name}: one is missing where the other is not")
    if "maxima" in table.column_names and "lowest_maximum" in table.column_names:
        lengths = values_of(pc.list_value_length(table["maxima"]), null=0)
        first = numbers(table, "lowest_maximum")
        agree = np.isnan(first) == (lengths == 0)
        agree &= (lengths == 0) | (first + lengths - 1 <= _BINADES[1])
        if not agree.all():
            raise DamageError("columns lowest_maximum and maxima: outside the range of binades")


# -- parts -------------------------------------------------------------------------------------------------------------

# Few enough rows that one series is read without much else, enough that columns compress and footers stay short.
ROW_GROUP = 4096
# A row of the spectra of benchmarks/run_log.py (64 series, 600 steps) takes 80 bytes so; 87 with delta-encoded binades,
# 83 without splitting floats into bytes, 120 with snappy, 79 with zstd at level 9 for four times the work. Splitting
# the binades too would save 10 more, but readers older than Parquet 2.11 cannot read integers split into bytes.
WORDS = {"spectra": ("collection", "name", "format"), "scalars": ("name",), "events": ("kind",)}
_DICTIONARIES = {**WORDS, "spectra": (*WORDS["spectra"], "scale")}
_SPLIT = {
    "spectra": ("min", "max", "absmin", "absmax", "sum", "abssum", "sumsq", "sumfourth"),
    "scalars": ("value", "time"),
    "events": (),
}
# Without checksums, 360 of 600 single-bit flips in a run changed its data unseen.
SCHEMA_KEY, FOOTER = b"plimsoll.schema", b"plimsoll.footer"
_DIGITS = 8  # of a CRC-32
_MAGIC = b"PAR1"
_TAIL_BYTES = 64 << 10  # read at the end of a part at once; most footers are shorter
# A part that says it holds more would take memory without bound: equal rows compress to almost nothing.
_MOST_ROWS = 16 * ROW_GROUP  # of a row group
_MOST_BYTES = 256 << 20  # of a row group, decoded; block records of 4,096 rows have 28 MB
_ROWS_PER_BYTE = 64  # of a part; the scalars of benchmarks/run_log.py have one row for every 4 bytes


def write(path: Path, kind: Kind, tables: Iterable[Table]) -> int:
    """Write tables as one part, whole or not at all, and return the number of rows.

    Each table becomes row groups of its own.
    """
    rows = 0
    with atomic_files.replacing(path) as file:
        writer: ParquetWriter = None
        for table in tables:
            if writer is None:
                writer = pq.ParquetWriter(file, table.schema, **_options(kind, table.column_names))
                writer.add_key_value_metadata({SCHEMA_KEY: f"{SCHEMA}", FOOTER: "0" * _DIGITS})
            writer.write_table(table, row_group_size=ROW_GROUP)
            rows += len(table)
        if writer is not None:
            writer.close()
            file.flush()
            _sign(file)
    return rows


def _sign(file: Any) -> None:
    """Write the checksum into the footer of a part."""
    with pa.OSFile(file.name) as written:  # a part is written to a file that cannot be read
        footer, start = _footer(written)
    file.seek(start + _digits_at(footer))
    file.write(_checksum(footer))


def _options(kind: Kind, columns: Sequence[str]) -> dict[str, Any]:
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": [*_DICTIONARIES[kind]],
        "use_byte_stream_split": [name for name in _SPLIT[kind] if name in columns],
        # Words are dictionaries in the file but plain strings to readers, which then skip row groups by them.
        "store_schema": False,
        "write_page_checksum": True,
        "memory_pool": WRITING_POOL,
    }


# -- reading


def opened(place: StorageLocation, part: Part, words: Sequence[str] = ()) -> ParquetFile:
    """Return a part with a sound footer. Columns `words` are read as dictionaries.

    Raises a `DamageError`, or an error of pyarrow, if it is damaged, and a `RunError` if it has a newer schema.
    """
    source = place.opened(part.name)
    footer, _ = _footer(source)
    if footer.rfind(FOOTER) >= 0 and footer[_digits_at(footer) :][:_DIGITS] != _checksum(footer):
        raise DamageError("its footer's checksum differs")
    footer_file = pa.BufferReader(_MAGIC + footer + len(footer).to_bytes(4, "little") + _MAGIC)
    metadata = pq.read_metadata(footer_file)
    _check_schema(place, part, metadata)
    _check_sizes(part, metadata, source.size())
    return pq.ParquetFile(
        source, metadata=metadata, read_dictionary=[*words], pre_buffer=True, page_checksum_verification=True
    )


def _footer(source: Any) -> tuple[bytes, int]:
    """Return the footer of a part, and its position."""
    size = source.size()
    tail = source.read_at(min(size, _TAIL_BYTES), max(0, size - _TAIL_BYTES))
    if len(tail) < 3 * len(_MAGIC) or tail[-4:] != _MAGIC:
        raise DamageError("it does not end as a part does")
    length = int.from_bytes(tail[-8:-4], "little")
    if length > size - 12:
        raise DamageError("its footer is longer than the file")
    start = size - 8 - length
    return tail[-8 - length : -8] if length + 8 <= len(tail) else source.read_at(length, start), start


def _digits_at(footer: bytes) -> int:
    """Return the position of the checksum's digits, behind two bytes: kind and length."""
    return footer.rfind(FOOTER) + len(FOOTER) + 2


# Each page of a part has Parquet's own checksum. The footer has one too: its metadata entry `FOOTER` is the CRC-32 of
# the footer with zeros in place of the digits. Other Parquet readers ignore it. Parts of older writers have no
# checksums.
def _checksum(footer: bytes) -> bytes:
    at = _digits_at(footer)
    blank = footer[:at] + b"0" * _DIGITS + footer[at + _DIGITS :]
    return b"%08x" % zlib.crc32(blank)


def _check_schema(place: StorageLocation, part: Part, metadata: Any) -> None:
    entries: dict[bytes, bytes] = metadata.metadata or {}
    schema = entries.get(SCHEMA_KEY, b"1")
    if not schema.isdigit() or len(schema) > 9:
        raise DamageError(f"its schema is {schema[:20]!r}")
    if int(schema) > SCHEMA:
        raise RunError(
            f"Run: expected parts of schema {SCHEMA} or older; got schema={int(schema)} in {place}: {part.name}. "
            "Install the plimsoll that wrote it, or a newer one."
        )


def _check_sizes(part: Part, metadata: Any, size_bytes: int) -> None:
    """Check the number of rows against the manifest and against the size of the part."""
    if part.rows is not None and metadata.num_rows != part.rows:
        raise DamageError(f"{metadata.num_rows} rows, where the manifest has {part.rows}")
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    if sum(group.num_rows for group in groups) != metadata.num_rows or any(group.num_rows < 0 for group in groups):
        raise DamageError("the rows of its row groups do not add up")
    if metadata.num_rows > _ROWS_PER_BYTE * size_bytes or any(
        group.num_rows > _MOST_ROWS or group.total_byte_size > _MOST_BYTES for group in groups
    ):
        raise DamageError(f"{metadata.num_rows:,} rows are more than can be in {size_bytes:,} bytes")


def read(file: ParquetFile, part: Part, columns: Sequence[str], groups: Sequence[int] | None = None) -> Table:
    """Return checked columns of a part, of all row groups or some.

    Columns that it is too old to have are null. Types are those of the part's kind, except for words that the file was
    opened to give as dictionaries.
    """
    chosen = range(file.num_row_groups) if groups is None else groups
    lacking = [name for name in columns if name in ADDED and name not in file.schema_arrow.names]
    there = [name for name in columns if name not in lacking]
    table = file.read_row_groups([*chosen], columns=there).select(there)
    for name in lacking:
        field = SCHEMAS[part.kind].field(name)
        table = table.append_column(field, pa.nulls(len(table), field.type))
    rows = sum(file.metadata.row_group(i).num_rows for i in chosen)
    if len(table) != rows:
        raise DamageError(f"{len(table)} rows, where its footer has {rows}")
    return checked(table.select([*columns]), part)


def groups_with(file: ParquetFile, bounds: Mapping[str, tuple[Any, Any]]) -> list[int]:
    """Return the row groups that may have rows with these columns in these bounds.

    Both are included. None is no bound.
    """
    metadata = file.metadata
    places = {metadata.schema.column(i).path: i for i in range(metadata.num_columns)}
    groups: list[int] = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if all(_may_hold(group.column(places[name]).statistics, *ends) for name, ends in bounds.items()):
            groups.append(number)
    return groups


def _may_hold(statistics: Any, low: Any, high: Any) -> bool:
    if statistics is None or not statistics.has_min_max:
        return True
    return (low is None or statistics.max >= low) and (high is None or statistics.min <= high)


def is_damage(error: Exception) -> bool:
    """Return whether a reading error means a damaged file, not an unreachable one."""
    known = (pa.ArrowException, DamageError, LookupError, TypeError, MemoryError)
    if isinstance(error, RunError):
        return False
    return isinstance(error, known) or (isinstance(error, OSError) and error.errno is None)
