"""The columns of a run's parts, and the arrays of merged entries that become them.

Between a step and its part a spectrum is a slice of a few flat arrays (`Chunk`), its binades trimmed to the occupied
ones; pyarrow takes these as they are. What block formats need to know is in columns of its own (`block_columns`),
which a table has where one of its rows has such a record.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from plimsoll.kernels import row_layout
from plimsoll.runs.columns import block_columns, trimmed_lists
from plimsoll.runs.columns.arrow import Array, Schema, Table, array, pa, strings
from plimsoll.runs.columns.step_rows import StepRows
from plimsoll.runs.records import EXTRAS

SCHEMA = 1  # the version that readers check

Kind = Literal["spectra", "scalars", "events"]
KINDS: tuple[Kind, ...] = ("spectra", "scalars", "events")

COUNTS = ("count", "zeros", "nans", "pos_infs", "neg_infs")
EXTREMES = ("min", "max", "absmin", "absmax")
SUMS = ("sum", "abssum", "sumsq")

_WORDS: list[tuple[str, Any]] = [("collection", pa.string()), ("name", pa.string()), ("format", pa.string())]
SCHEMAS: Mapping[Kind, Schema] = {
    "spectra": pa.schema(
        [("step", pa.int64()), *_WORDS, ("shared", pa.bool_()), *((n, pa.int64()) for n in COUNTS)]
        + [(n, pa.float64()) for n in (*EXTREMES, *SUMS, "scale")]
        + [("lowest", pa.int16()), ("binades", pa.list_(pa.field("element", pa.int64())))]
        + [(n, pa.float64()) for n in EXTRAS]
    ),
    "scalars": pa.schema([("step", pa.int64()), ("name", pa.string()), ("value", pa.float64())]),
    "events": pa.schema(
        [("step", pa.int64()), *((n, pa.string()) for n in ("kind", "message", "details")), ("time", pa.float64())]
    ),
}
# Those of a table of spectra that has records of blocks.
WIDE: Schema = pa.schema([*SCHEMAS["spectra"], *block_columns.FIELDS])
# What a part is sorted by before the step, so that one series lies together.
KEYS: Mapping[Kind, tuple[str, ...]] = {"spectra": ("collection", "name"), "scalars": ("name",), "events": ()}
# What tells two rows of one key and step apart; of two that agree here, the later one counts.
BESIDE: Mapping[Kind, tuple[str, ...]] = {"spectra": ("format", "scale"), "scalars": (), "events": ()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What one series holds: its names, the format of its values, and whether ranks hold different parts of it."""

    collection: str
    name: str
    format: str
    shared: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """Spectra as flat arrays; `binades` holds `lengths[i]` counts for each, from exponent `lowest[i]` on."""

    step: NDArray[np.int64]
    series: NDArray[np.int64]
    scale: NDArray[np.float64]
    counts: NDArray[np.int64]
    extremes: NDArray[np.float64]
    sums: NDArray[np.float64]
    lowest: NDArray[np.int16]
    lengths: NDArray[np.int64]
    binades: NDArray[np.int64]
    extras: NDArray[np.float64]
    blocks: block_columns.BlockChunk | None

    def __len__(self) -> int:
        return len(self.step)

    @property
    def size_bytes(self) -> int:
        """Memory of the arrays."""
        beside = 0 if self.blocks is None else self.blocks.size_bytes
        return beside + sum(getattr(self, name).nbytes for name in _ARRAYS)


_ARRAYS = tuple(f.name for f in fields(Chunk) if f.name != "blocks")


def chunk(step: int, entries: StepRows) -> Chunk:
    """The chunk of one step's merged entries."""
    return chunk_of(np.full(len(entries), step, dtype=np.int64), entries)


def chunk_of(steps: NDArray[np.int64], entries: StepRows) -> Chunk:
    """The chunk of merged entries of several steps."""
    rows, blocks = entries.rows, entries.blocks
    first, lengths, binades = trimmed_lists.trimmed(
        rows[:, row_layout.HISTOGRAM : row_layout.HISTOGRAM + row_layout.BINADES]
    )
    return Chunk(
        step=steps,
        series=entries.series,
        scale=entries.scales,
        counts=rows[:, : row_layout.NEG_INFS + 1].copy(),
        extremes=extremes(rows),
        sums=rows[:, row_layout.SUM : row_layout.SUMSQ + 1].copy().view(np.float64),
        lowest=(first + row_layout.LOWEST_BINADE).astype(np.int16),
        lengths=lengths,
        binades=binades,
        extras=entries.extras,
        blocks=None if blocks is None or not blocks.any() else block_columns.chunk_of_ends(rows, blocks),
    )


def extremes(rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """The columns `EXTREMES` of rows of a bank; NaN where there is nothing to speak of, as in `Spectrum`."""
    keys = rows[:, row_layout.POSITIVE : row_layout.NEGATIVE + 1].copy().view(np.float64)
    positive, negative = keys[:, 0], keys[:, 1]
    nearest = rows[:, row_layout.NEAREST]
    absmin = np.where(nearest != 0, (row_layout.ABSMIN_TOP - nearest).view(np.float64), np.nan)
    zeros = rows[:, row_layout.ZEROS] != 0
    finite = zeros | (nearest != 0)
    low = np.where(negative > 0, -negative, np.where(zeros, 0.0, absmin))
    high = np.where(positive > 0, positive, np.where(zeros, 0.0, -absmin))
    return np.stack([low, high, absmin, np.where(finite, np.maximum(positive, negative), np.nan)], axis=1)


def spectra_table(chunks: Sequence[Chunk], series: Sequence[Series]) -> Table:
    """The table of some chunks, sorted by collection, name and step."""
    whole = chunks[0] if len(chunks) == 1 else _joined(chunks)
    used, codes = np.unique(whole.series, return_inverse=True)
    named: list[Series] = [series[int(i)] for i in used]
    by_name = sorted(range(len(named)), key=lambda i: (named[i].collection, named[i].name))
    place = np.empty(len(named), dtype=np.int64)
    place[by_name] = np.arange(len(named))
    order = np.lexsort((whole.step, place[codes]))
    codes = codes[order]
    return pa.table(
        {
            "step": array(whole.step[order]),
            "collection": words([s.collection for s in named], codes),
            "name": words([s.name for s in named], codes),
            "format": words([s.format for s in named], codes),
            "shared": array(np.array([s.shared for s in named], dtype=bool)[codes]),
            **{n: array(whole.counts[order, i]) for i, n in enumerate(COUNTS)},
            **{n: _nullable(whole.extremes[order, i]) for i, n in enumerate(EXTREMES)},
            **{n: array(whole.sums[order, i]) for i, n in enumerate(SUMS)},
            "scale": array(whole.scale[order]),
            "lowest": array(whole.lowest[order], missing=whole.lengths[order] == 0),
            "binades": trimmed_lists.lists(whole.lengths, whole.binades, order),
            **{n: _nullable(whole.extras[order, i]) for i, n in enumerate(EXTRAS)},
            **({} if whole.blocks is None else block_columns.columns(whole.blocks, order)),
        }
    )


def rows_table(rows: Sequence[Mapping[str, Any]], kind: Kind) -> Table:
    """The table of scalars or events, in the order given."""
    columns: list[Array] = []
    for field in SCHEMAS[kind]:
        values = [row[field.name] for row in rows]
        columns.append(
            strings(values) if field.type == pa.string() else array(np.array(values, field.type.to_pandas_dtype()))
        )
    return pa.Table.from_arrays(columns, schema=SCHEMAS[kind])


def words(values: Sequence[str], codes: NDArray[np.int64]) -> Array:
    """Strings given by their place in a list, equal ones made one."""
    distinct = sorted(set(values))
    place = {value: i for i, value in enumerate(distinct)}
    recoded = np.array([place[value] for value in values], dtype=np.int32)[codes]
    return pa.DictionaryArray.from_arrays(array(recoded), strings(distinct))


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    blocks = block_columns.joined([(len(c), c.blocks) for c in chunks])
    return Chunk(**{name: np.concatenate([getattr(c, name) for c in chunks]) for name in _ARRAYS}, blocks=blocks)


def _nullable(values: NDArray[np.float64]) -> Array:
    return array(values, missing=np.isnan(values))
