"""Recorded spectra of one collection as flat columns, without an object for each.

A *cell* is one layer (series) at one step. A *row* is one stored spectrum. A cell has one row, unless a step was
recorded under several scales or formats. Its rows are then added up. Binades stay the ragged lists in which they are
stored, in one array with its running sum. So the number of values below a binade is two look-ups a row.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll import row_layout
from plimsoll.formats import Format, get_element
from plimsoll.runs import Run
from plimsoll.runs.columns import row_order
from plimsoll.runs.columns.arrow import Table, values_of
from plimsoll.runs.columns.spectrum_columns import list_items, numbers
from plimsoll.runs.reading.row_selection import Steps, matching
from plimsoll.runs.reading.spectra import tables_of
from plimsoll.runs.records import EXTRAS
from plimsoll.spectrum import error_sums
from plimsoll.spectrum.record import COUNTS, EXTREMES, SUMS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """One collection of a run."""

    collection: str
    names: tuple[str, ...]  # the layers, in the order in which they were first measured
    steps: Ints  # the steps, ascending
    formats: tuple[str, ...]
    layer: Ints  # of each row, the place of its layer in `names`
    at: Ints  # of each row, the place of its step in `steps`
    format: Ints  # of each row, the place of its format in `formats`
    scale: Floats  # of each row, the factor of the stored values
    columns: Mapping[str, NDArray[Any]]
    lowest: Ints
    start: Ints
    flat: Ints  # stored binade counts of all rows; those of a row are ``flat[start:stop]``, from exponent `lowest` on

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and steps."""
        return len(self.names), len(self.steps)

    def __len__(self) -> int:
        return len(self.layer)

    # Values whose rounding is emulated are FP32 tensors. Without their formats, gradients that E4M3 had flushed were
    # dead layers.
    def emulated(self, steps: range, fmt: str) -> "Cells":
        """Return the cells with this format in place of FP32 at these steps."""
        wide = np.array([name == "fp32" for name in self.formats], dtype=bool)[self.format]
        inside = (self.steps[self.at] >= steps.start) & (self.steps[self.at] < steps.stop)
        names = np.where(wide & inside, fmt, np.array(self.formats)[self.format])
        formats, places = np.unique(names, return_inverse=True)
        return replace(self, formats=tuple(formats.tolist()), format=places)

    def of_rows(self, rows: Ints) -> "Cells":
        """Return the cells with these rows only. Names and steps stay."""
        start, flat = lists_of_rows(self.start, self.flat, rows)
        return replace(
            self,
            layer=self.layer[rows],
            at=self.at[rows],
            format=self.format[rows],
            scale=self.scale[rows],
            columns={name: column[rows] for name, column in self.columns.items()},
            lowest=self.lowest[rows],
            start=start,
            flat=flat,
        )

    def only(self, name: str) -> "Cells":
        """Return the cells of one layer."""
        cells = self.of_rows(np.flatnonzero(self.layer == self.names.index(name)))
        steps, at = np.unique(self.steps[cells.at], return_inverse=True)
        return replace(cells, names=(name,), steps=steps, layer=np.zeros(len(cells), dtype=np.int64), at=at)

    @cached_property
    def running(self) -> Ints:
        """The sum of `flat` before each place."""
        result = np.zeros(len(self.flat) + 1, dtype=np.int64)
        np.cumsum(self.flat, out=result[1:])  # without a copy, for it is the largest array of a view
        return result

    @cached_property
    def length(self) -> Ints:
        """Number of stored binades, by row."""
        return np.diff(self.start)

    @cached_property
    def nonzero(self) -> Ints:
        """Nonzero finite values of each row."""
        # Not as a difference of `running`: weights and optimizer states need no other of its numbers.
        result, some = np.zeros(len(self), dtype=np.int64), self.length > 0
        if some.any():
            result[some] = np.add.reduceat(self.flat, self.start[:-1][some])
        return result

    def column(self, name: str) -> NDArray[Any]:
        """Return a stored column by row; extras (of updates and shadow steps) are NaN in other rows."""
        return self.columns[name]

    def below_binade(self, binade: Ints) -> Ints:
        """Return how many nonzero finite values, as stored, lie below each row's binade."""
        place = np.clip(np.maximum(binade, row_layout.LOWEST_BINADE) - self.lowest, 0, self.length)
        return self.running[self.start[:-1] + place] - self.running[self.start[:-1]]

    @cached_property
    def elements(self) -> Sequence[Format]:
        """The formats that `formats` names."""
        return [get_element(name, "diagnose") for name in self.formats]

    def by_format(self, fact: Callable[[Format], float]) -> NDArray[Any]:
        """Return a fact of each row's format."""
        return np.array([fact(fmt) for fmt in self.elements])[self.format]

    # -- from rows to layers x steps

    @cached_property
    def cell(self) -> Ints:
        """The cell of each row, as one number."""
        return self.layer * len(self.steps) + self.at

    @cached_property
    def recorded(self) -> NDArray[np.bool_]:
        """True where there is a row, by layer and step."""
        is_recorded = np.zeros(self.shape, dtype=bool)
        is_recorded.ravel()[self.cell] = True
        return is_recorded

    def total(self, by_row: NDArray[Any]) -> Floats:
        """Return the sum over each cell's rows. NaN: nothing, or only NaN, was recorded."""
        size = len(self.names) * len(self.steps)
        known = None if by_row.dtype.kind != "f" else ~np.isnan(by_row)
        if known is None or known.all():
            summed = np.bincount(self.cell, weights=by_row, minlength=size)
            return np.where(self.recorded, summed.reshape(self.shape), np.nan)
        summed = np.bincount(self.cell[known], weights=by_row[known], minlength=size)
        there = np.bincount(self.cell[known], minlength=size) > 0
        return np.where(there, summed, np.nan).reshape(self.shape)

    def highest(self, by_row: Floats) -> Floats:
        """Return the largest of each cell's rows. NaN: nothing, or only NaN, is there."""
        result = np.full(len(self.names) * len(self.steps), np.nan)
        np.fmax.at(result, self.cell, by_row)
        return result.reshape(self.shape)

    @cached_property
    def last_formats(self) -> Sequence[str]:
        """The format of each layer's last row."""
        last = np.zeros(len(self.names), dtype=np.int64)
        last[self.layer] = np.arange(len(self.layer))  # of several rows the last one stays
        places: list[int] = self.format[last].tolist()
        return [self.formats[place] for place in places]

    def format_of(self, name: str) -> str:
        """Return a layer's format, of its last row."""
        return self.last_formats[self.names.index(name)]

    def total_of(self, name: str) -> Floats:
        """Return the sum of a stored column over each cell's rows."""
        return self.total(self.columns[name])

    @cached_property
    def true_absmax(self) -> Floats:
        """Largest magnitude of each cell, its scale undone. NaN without finite values."""
        return self.highest(self.columns["absmax"] / self.scale)

    @cached_property
    def nonfinite(self) -> Floats:
        """NaN and infinite values of each cell."""
        return self.total(self.columns["nans"] + self.columns["pos_infs"] + self.columns["neg_infs"])

    @cached_property
    def finite(self) -> Floats:
        """Finite values of each cell, zeros included."""
        return self.total_of("count") - self.nonfinite

    @cached_property
    def rms(self) -> Floats:
        """Root mean square of the finite values, scale undone. NaN without any."""
        with np.errstate(all="ignore"):
            return np.sqrt(self.total(self.columns["sumsq"] / self.scale**2) / self.finite)

    @cached_property
    def mean(self) -> Floats:
        """Mean of the finite values, scale undone. NaN without any."""
        with np.errstate(all="ignore"):
            return self.total(self.columns["sum"] / self.scale) / self.finite

    @cached_property
    def absmean(self) -> Floats:
        """Mean magnitude of the finite values, scale undone. NaN without any."""
        with np.errstate(all="ignore"):
            return self.total(self.columns["abssum"] / self.scale) / self.finite

    @cached_property
    def norm(self) -> Floats:
        """Euclidean norm of the finite values, scale undone."""
        with np.errstate(all="ignore"):
            return np.sqrt(self.total(self.columns["sumsq"] / self.scale**2))

    @cached_property
    def relative_update(self) -> Floats:
        """Norm of each update over that of its weight. Of updates alone; Inf or NaN where the weight is zero."""
        with np.errstate(all="ignore"):
            return self.norm / np.sqrt(self.total(self.column("weight_norm") ** 2))

    @cached_property
    def kurtosis(self) -> Floats:
        """Mean fourth power over the squared mean square, as `Spectrum.kurtosis`. NaN where it is not known."""
        with np.errstate(all="ignore"):
            result = self.total(self.columns["sumfourth"] / self.scale**4) / self.finite / self.rms**4
        return np.where(np.isfinite(result) & (result > 0), np.maximum(result, 1.0), np.nan)

    def error_sum(self, name: str) -> Floats:
        """Return each cell's sum of `ErrorSums`, scale undone. NaN: no shadow step."""
        return self.total(self.columns[name] / self.scale ** error_sums.POWERS.get(name, 0))

    @cached_property
    def zero_fraction(self) -> Floats:
        """Share of zeros among all values. NaN without any."""
        return self.share_of("zeros")

    def share_of(self, part: str, whole: str = "count") -> Floats:
        """Return the sum of a stored column over that of another, by cell."""
        with np.errstate(all="ignore"):
            return self.total_of(part) / self.total_of(whole)


def read(run: Run, collection: str, until: int | None = None, name: str | None = None) -> Cells | None:
    """Return a collection of a run up to a step, or one layer of it. None if there is nothing."""
    return dict(read_each(run, [collection], until, name)).get(collection)


def read_each(
    run: Run, collections: Sequence[str], until: int | None = None, name: str | None = None
) -> Iterator[tuple[str, Cells]]:
    """Yield those of the collections that have rows, read in one pass over the run."""
    chosen = [(each, matching(run.tensors[each], name)) for each in collections if each in run.tensors]
    contents = run._contents  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    steps = Steps(high=None if until is None else until + 1)
    for collection, table in tables_of(contents, chosen, steps, blocks=False, moved=False):
        if len(table):
            yield collection, from_table(collection, table, run.tensors[collection])


def from_table(collection: str, table: Table, order: Sequence[str]) -> Cells:
    """Return the cells of a part's table. `order`: names of layers in the order to list them."""
    names, layer = _places(table["name"], order)
    formats, fmt = _places(table["format"], ())
    steps, at = np.unique(values_of(table["step"]), return_inverse=True)
    columns: dict[str, NDArray[Any]] = {name: values_of(table[name]) for name in COUNTS}
    columns |= {name: numbers(table, name) for name in (*EXTREMES, *SUMS, *EXTRAS)}
    start, flat = list_items(table["binades"])
    return Cells(
        collection=collection,
        names=names,
        steps=steps,
        formats=formats,
        layer=layer,
        at=at.astype(np.int64),
        format=fmt,
        scale=numbers(table, "scale"),
        columns=columns,
        lowest=np.nan_to_num(numbers(table, "lowest")).astype(np.int64),
        start=start,
        flat=flat,
    )


def module_ends(cells: Cells) -> list[tuple[str, int, int]]:
    """Return each module with the places of its only input and output in `names`."""
    places = {name: place for place, name in enumerate(cells.names)}
    modules = (name.removesuffix(":output") for name in cells.names if name.endswith(":output"))
    return [(name, places[f"{name}:input"], places[f"{name}:output"]) for name in modules if f"{name}:input" in places]


def _places(column: Any, order: Sequence[str]) -> tuple[tuple[str, ...], Ints]:
    """Return the distinct words, `order` first, and the place of each row's word."""
    words, places = row_order.places(column)
    ranks = {word: i for i, word in enumerate(order)}
    by_order = sorted(range(len(words)), key=lambda i: (ranks.get(words[i], len(ranks)), words[i]))
    place = np.empty(len(words), dtype=np.int64)
    place[by_order] = np.arange(len(words))
    return tuple(words[i] for i in by_order), place[places]


# -- growing: a live run's new rows are appended to those read before --------------------------------------------------


def size_bytes(cells: Cells) -> int:
    """Return the memory of the columns, and of what was computed from them and kept."""
    arrays = [*vars(cells).values(), *cells.columns.values()]
    return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray)) + sys.getsizeof(cells.names)


def before_step(cells: Cells, step: int) -> Cells:
    """Return the rows of steps below `step`."""
    earlier = cells.steps[cells.at] < step
    if earlier.all():
        return cells
    return replace(cells.of_rows(np.flatnonzero(earlier)), steps=cells.steps[cells.steps < step])


def lists_of_rows(start: Ints, items: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Return where the lists of some rows begin, and their items: ``items[start[i]:start[i + 1]]`` of row i."""
    length = np.diff(start)[rows]
    begin = _offsets(length)
    return begin, items[np.repeat(start[:-1][rows] - begin[:-1], length) + np.arange(int(begin[-1]))]


def joined(first: Cells, later: Cells, order: Sequence[str]) -> Cells:
    """Return the rows of both, which share no cell: as one reading of all, except for the order of rows."""
    names, layer = _merged((first.names, later.names), (first.layer, later.layer), order)
    formats, fmt = _merged((first.formats, later.formats), (first.format, later.format), ())
    steps = np.union1d(first.steps, later.steps)
    at = [np.searchsorted(steps, cells.steps)[cells.at] for cells in (first, later)]
    return Cells(
        collection=first.collection,
        names=names,
        steps=steps,
        formats=formats,
        layer=layer,
        at=_end_to_end(*at),
        format=fmt,
        scale=_end_to_end(first.scale, later.scale),
        columns={name: _end_to_end(column, later.columns[name]) for name, column in first.columns.items()},
        lowest=_end_to_end(first.lowest, later.lowest),
        start=_offsets(_end_to_end(first.length, later.length)),
        flat=_end_to_end(first.flat, later.flat),
    )


def _merged(
    words: tuple[Sequence[str], Sequence[str]], places: tuple[Ints, Ints], order: Sequence[str]
) -> tuple[tuple[str, ...], Ints]:
    """Return the words in use on either side, in order, and each row's place."""
    used = {word for known, place in zip(words, places, strict=True) for word in _in_use(known, place)}
    rank = {word: i for i, word in enumerate(order)}
    merged = sorted(used, key=lambda word: (rank.get(word, len(rank)), word))
    new = {word: i for i, word in enumerate(merged)}
    moved = [
        np.array([new.get(word, -1) for word in known], dtype=np.int64)[place]
        for known, place in zip(words, places, strict=True)
    ]
    return tuple(merged), _end_to_end(*moved)


def _in_use(words: Sequence[str], places: Ints) -> list[str]:
    counted = np.bincount(places, minlength=len(words))
    return [word for word, times in zip(words, counted.tolist(), strict=True) if times]


def _offsets(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])


def _end_to_end(first: NDArray[Any], later: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([first, later])
