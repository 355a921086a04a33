"""How a table becomes a part and comes back: encodings, row groups, and which failures mean damage."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from plimsoll.runs import _files
from plimsoll.runs._arrow import ParquetFile, ParquetWriter, Table, pa, pq
from plimsoll.runs._tables import SCHEMA, Kind

# Few enough rows that one series is read without much else, enough that columns compress and footers stay short.
ROW_GROUP = 4096
# A row of the spectra of benchmarks/run_log.py (64 series, 600 steps) takes 80 bytes so; 87 with delta-encoded binades,
# 83 without splitting floats into bytes, 120 with snappy, 79 with zstd at level 9 for four times the work. Splitting
# the binades too would save 10 more, but readers older than Parquet 2.11 cannot read integers split into bytes.
WORDS = {"spectra": ("collection", "name", "format"), "scalars": ("name",), "events": ("kind",)}
_DICTIONARIES = {**WORDS, "spectra": (*WORDS["spectra"], "scale")}
_SPLIT = {
    "spectra": ("min", "max", "absmin", "absmax", "sum", "abssum", "sumsq"),
    "scalars": ("value",),
    "events": (),
}


def write(path: Path, kind: Kind, tables: Iterable[Table]) -> None:
    """Writes tables as one part, whole or not at all; each becomes row groups of its own."""
    with _files.replacing(path) as file:
        writer: ParquetWriter = None
        for table in tables:
            if writer is None:
                writer = pq.ParquetWriter(file, table.schema, **_options(kind))
                writer.add_key_value_metadata({"plimsoll.schema": str(SCHEMA)})
            writer.write_table(table, row_group_size=ROW_GROUP)
        if writer is not None:
            writer.close()


def _options(kind: Kind) -> dict[str, Any]:
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": [*_DICTIONARIES[kind]],
        "use_byte_stream_split": [*_SPLIT[kind]],
        # Words are dictionaries in the file but plain strings to readers, which then skip row groups by them.
        "store_schema": False,
    }


def opened(path: Path, kind: Kind) -> ParquetFile:
    """A part, its words as dictionaries."""
    return pq.ParquetFile(path, read_dictionary=[*WORDS[kind]])


def is_damage(error: Exception) -> bool:
    """Whether a failure to read says that the file is damaged, and not that it could not be reached."""
    return isinstance(error, pa.ArrowException) or (isinstance(error, OSError) and error.errno is None)
