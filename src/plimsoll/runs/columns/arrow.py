"""Modules of pyarrow without type checks, since it has no stubs, and type aliases."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as _pa  # noqa: ICN001  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.compute as _pc  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.fs as _fs  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.parquet as _pq  # pyright: ignore[reportMissingTypeStubs]
from numpy.typing import NDArray

pa: Any = _pa
pc: Any = _pc
fs: Any = _fs
pq: Any = _pq

Table = Any
Schema = Any
Array = Any
ParquetFile = Any
ParquetWriter = Any

# Parts are built in this pool, since Arrow's own keeps what was freed. With columns built one by one, that is 4 MB of a
# training process's memory (benchmarks/watch.py).
WRITING_POOL: Any = pa.system_memory_pool()


# `array`, `strings` and `values_of` convert between its arrays and NumPy's. pyarrow's own `array`, `to_numpy` and
# `fill_null` import pandas if that is installed: 0.4 s, and some 50 MB of a training process's memory.
def array(values: NDArray[Any], missing: NDArray[np.bool_] | None = None) -> Array:
    """Return a NumPy array of numbers or booleans as Arrow array, null if `missing`."""
    values = np.ascontiguousarray(values)
    data = _bits(values) if values.dtype == bool else pa.py_buffer(values)
    there = None if missing is None else _bits(~missing)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [there, data])


def strings(values: Sequence[str]) -> Array:
    """Return an Arrow array of strings."""
    encoded = [value.encode() for value in values]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), len(encoded), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))])


def values_of(column: Array, null: float = np.nan) -> NDArray[Any]:
    """Return a column of numbers or booleans as NumPy array, with `null` for nulls.

    With NaN, integers among which there are nulls become floats.
    """
    parts = [_values(part, null) for part in (column.chunks if isinstance(column, pa.ChunkedArray) else [column])]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, column.type.to_pandas_dtype())


def _values(part: Array, null: float) -> NDArray[Any]:
    dtype, (there, data) = np.dtype(part.type.to_pandas_dtype()), part.buffers()
    span = slice(part.offset, part.offset + len(part))
    if data is None:
        values = np.empty(0, dtype)
    else:
        values = _truths(data)[span] if dtype.kind == "b" else np.frombuffer(data, dtype, span.stop)[span]
    return np.where(_truths(there)[span], values, null) if part.null_count else values


def _truths(bits: Any) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_)


def _bits(truths: NDArray[np.bool_]) -> Any:
    return pa.py_buffer(np.packbits(truths, bitorder="little"))
