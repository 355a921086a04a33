"""Spectra as dictionaries for JSON, and checks of data from outside.

This is version 2. All fields are always present. Version 1 had no `sumfourth`, which becomes NaN. A float is a JSON
number, or "nan", "inf" or "-inf", for which JSON has none. Arrays of counts are lists of pairs: exponent (or depth) and
count, ascending, without empty ones.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NoReturn, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from plimsoll import row_layout
from plimsoll.errors import ArgumentError
from plimsoll.results import as_data
from plimsoll.spectrum.record import BLOCK_COUNTS, COUNTS, EXTREMES, SUMS, BlockRecord, SpectrumRecord, read_only
from plimsoll.spectrum.source_format import Grid, Source

Record = TypeVar("Record", bound=SpectrumRecord)
VERSION = 2
_READING = "Spectrum.from_dict"
_FLOATS = (*EXTREMES, *SUMS)
_FIELDS = ("version", *COUNTS, "binades", *_FLOATS, "source", "blocks", "grid")
_SOURCE_FIELDS = ("format", "scale")
_GRID_FIELDS = ("mantissa_bits", "quantum_exponent")
_BLOCK_FIELDS = ("block", *BLOCK_COUNTS, "depths", "maxima")
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MOST = 2**63 - 1
_MOST_MANTISSA_BITS = 52


def to_dict(s: SpectrumRecord) -> dict[str, object]:
    """Return the spectrum as plain data (`Spectrum.to_dict`)."""
    return {
        "version": VERSION,
        **{name: getattr(s, name) for name in COUNTS},
        "binades": _pairs(s.binades, row_layout.LOWEST_BINADE),
        **{name: as_data(getattr(s, name)) for name in _FLOATS},
        "source": s.source and {"format": s.source.format, "scale": s.source.scale},
        "blocks": s.blocks and _from_blocks(s.blocks),
        "grid": s.grid and {name: getattr(s.grid, name) for name in _GRID_FIELDS},
    }


def from_dict(data: object, blank: Record) -> Record:
    """Return the checked spectrum of plain data, as a copy of `blank`."""
    reader = _Reader(data, _FIELDS, _READING)
    source, grid, blocks = (reader.part(name) for name in ("source", "grid", "blocks"))
    spectrum = replace(
        blank,
        **{name: reader.count(name) for name in COUNTS},
        binades=reader.counts("binades", row_layout.LOWEST_BINADE),
        **{name: reader.number(name) for name in _FLOATS},
        source=None if source is None else _to_source(source),
        blocks=None if blocks is None else _to_blocks(blocks),
        grid=None if grid is None else _to_grid(grid),
    )
    check(spectrum, _READING)
    return spectrum


def check(s: SpectrumRecord, operation: str) -> None:
    """Raise `ArgumentError` if the fields contradict each other."""
    counted = int(s.binades.sum())
    if s.zeros + s.nonfinite + counted != s.count:
        raise ArgumentError(
            f"{operation}: expected zeros + nans + infs + sum(binades) to equal count; got {s.zeros} + {s.nans} + "
            f"{s.pos_infs + s.neg_infs} + {counted} against count={s.count}. The record is damaged: measure again."
        )
    reason = _why_impossible(s)
    if reason is not None:
        raise ArgumentError(
            f"{operation}: expected {reason}; got min={s.min!r}, max={s.max!r}, absmin={s.absmin!r}, "
            f"absmax={s.absmax!r}, {s.blocks!r}. The record is damaged: measure again."
        )


def _why_impossible(s: SpectrumRecord) -> str | None:
    if any(math.isnan(x) == bool(s.finite) for x in (s.min, s.max, s.absmax)):
        return "min, max and absmax where there are finite values, and NaN where there are none"
    if math.isnan(s.absmin) == bool(s.nonzero):
        return "absmin where there are finite nonzero values, and NaN where there are none"
    if s.finite and (s.min > s.max or max(-s.min, s.max) != s.absmax):
        return "min <= max, and absmax the larger of their magnitudes"
    if s.nonzero and _ends(s.binades) != (_index(s.absmin), _index(s.absmax)):
        return "absmin and absmax in the first and the last binade with values"
    if s.grid is not None and s.grid.mantissa_bits > _MOST_MANTISSA_BITS:
        return f"a grid of at most {_MOST_MANTISSA_BITS} mantissa bits, float64's own"
    if s.grid is not None and not (s.nonzero and all(s.grid.holds(x) for x in (s.absmin, s.absmax, s.min, s.max))):
        return f"extremes on the grid {s.grid}"
    if s.blocks is None:
        return None
    if not s.count:
        return "no block record where there are no values"
    return s.blocks.why_impossible(s.nonzero)


def _ends(counts: NDArray[np.int64]) -> tuple[int, int]:
    occupied = np.flatnonzero(counts)
    return int(occupied[0]), int(occupied[-1])


def _index(magnitude: float) -> int:
    if not 0 < magnitude < math.inf:
        return -1
    return min(max(math.frexp(magnitude)[1] - 1 - row_layout.LOWEST_BINADE, 0), row_layout.BINADES - 1)


def _pairs(counts: NDArray[np.int64], lowest: int) -> list[list[int]]:
    return [[int(index) + lowest, int(counts[index])] for index in np.flatnonzero(counts)]


def _from_blocks(blocks: BlockRecord) -> dict[str, object]:
    return {
        "block": blocks.block,
        **{name: getattr(blocks, name) for name in BLOCK_COUNTS},
        "depths": _pairs(blocks.depths, 0),
        "maxima": _pairs(blocks.maxima, row_layout.LOWEST_BINADE),
    }


def _to_source(data: object) -> Source:
    reader = _Reader(data, _SOURCE_FIELDS, f"{_READING}: source")
    return Source(reader.text("format"), reader.number("scale"))


def _to_grid(data: object) -> Grid:
    reader = _Reader(data, _GRID_FIELDS, f"{_READING}: grid")
    return Grid(reader.count("mantissa_bits"), reader.integer("quantum_exponent"))


def _to_blocks(data: object) -> BlockRecord:
    reader = _Reader(data, _BLOCK_FIELDS, f"{_READING}: blocks")
    return BlockRecord(
        block=reader.count("block"),
        **{name: reader.count(name) for name in BLOCK_COUNTS},
        depths=reader.counts("depths", 0),
        maxima=reader.counts("maxima", row_layout.LOWEST_BINADE),
    )


class _Reader:
    """Typed access to a dictionary with exactly these keys, or `ArgumentError`."""

    def __init__(self, data: object, fields: Iterable[str], operation: str) -> None:
        self._operation = operation
        if not isinstance(data, dict):
            self._fail(f"a dictionary as of to_dict; got {type(data).__name__}")
        self._data = cast("dict[object, object]", data)
        expected = set[object](fields)
        if "version" in expected and self._data.get("version") == 1 and "sumfourth" not in self._data:
            self._data = {**self._data, "version": VERSION, "sumfourth": "nan"}
        if "version" in expected and self._data.get("version") != VERSION:
            self._fail(
                f"version {VERSION}; got version={self._data.get('version')!r}. "
                "Another version of plimsoll wrote it: read it with that one"
            )
        if self._data.keys() != expected:
            missing, unknown = expected - self._data.keys(), self._data.keys() - expected
            self._fail(
                f"the keys of to_dict; got missing={sorted(map(str, missing))}, unknown={sorted(map(str, unknown))}"
            )

    def part(self, name: str) -> object:
        return self._data[name]

    def text(self, name: str) -> str:
        value = self._data[name]
        return value if isinstance(value, str) else self._fail(f"text; got {name}={value!r}")

    def integer(self, name: str) -> int:
        value = self._data[name]
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _MOST:
            self._fail(f"an integer; got {name}={value!r}")
        return value

    def count(self, name: str) -> int:
        value = self.integer(name)
        return value if value >= 0 else self._fail(f"a count of zero or more; got {name}={value}")

    def number(self, name: str) -> float:
        value = self._data[name]
        if isinstance(value, str) and value in _NONFINITE:
            return _NONFINITE[value]
        too_large = isinstance(value, int) and abs(value) > _MOST
        if isinstance(value, bool) or not isinstance(value, int | float) or too_large:
            self._fail(f'a number, "nan", "inf" or "-inf"; got {name}={value!r}')
        return float(value)

    def counts(self, name: str, lowest: int) -> NDArray[np.int64]:
        value, highest = self._data[name], lowest + row_layout.BINADES - 1
        array = np.zeros(row_layout.BINADES, dtype=np.int64)
        for pair in cast("list[object]", value) if isinstance(value, list) else [value]:
            entry = _as_pair(pair)
            if entry is None or not lowest <= entry[0] <= highest or array[entry[0] - lowest]:
                self._fail(
                    f"{name} as a list of [exponent, count], each exponent once and from {lowest} to {highest}, "
                    f"each count positive; got {pair!r}"
                )
            array[entry[0] - lowest] = entry[1]
        return read_only(array)

    def _fail(self, problem: str) -> NoReturn:
        raise ArgumentError(f"{self._operation}: expected {problem}.")


def _as_pair(pair: object) -> tuple[int, int] | None:
    if not isinstance(pair, list | tuple):
        return None
    items = cast("list[object]", pair)
    if len(items) != 2 or any(isinstance(item, bool) or not isinstance(item, int) for item in items):
        return None
    exponent, count = cast("tuple[int, int]", tuple(items))
    return (exponent, count) if 0 < count <= _MOST else None
