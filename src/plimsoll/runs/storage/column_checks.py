"""Checks of every column of a part when it is read."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from plimsoll import row_layout
from plimsoll.errors import PlimsollError
from plimsoll.formats import get_element
from plimsoll.runs.columns.arrow import Table, pa, pc, values_of
from plimsoll.runs.columns.schema import ADDED, BLOCK_COLUMNS, BLOCK_COUNTS, COUNTS, EXTREMES, SCHEMAS, TIMED, WIDE
from plimsoll.runs.columns.spectrum_columns import list_items, numbers
from plimsoll.runs.records import EXTRAS
from plimsoll.runs.storage.limits import EVENT_BYTES, RANGES, DamageError, check_depth, from_json
from plimsoll.runs.storage.parts import Part

_POSITIVE = (np.nextafter(0.0, 1.0), np.finfo(np.float64).max)
_MAGNITUDE = (0.0, float("inf"))
# A crafted first binade ended a reader inside scipy.
_BINADES = (row_layout.LOWEST_BINADE, row_layout.LOWEST_BINADE + row_layout.BINADES - 1)
_LENGTHS = (0, row_layout.BINADES)
_WORD_BYTES = 1 << 16
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

    Raises:
        DamageError: A column's values cannot be true.
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
        _check_range(pc.binary_length(words), f"{name}, bytes", (0, _WORD_BYTES))
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
