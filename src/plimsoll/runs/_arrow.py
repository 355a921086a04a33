"""pyarrow, which comes without type stubs: its modules with their types left open, once, and names to annotate with."""

from typing import Any

import pyarrow as _pa  # noqa: ICN001  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.compute as _pc  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.parquet as _pq  # pyright: ignore[reportMissingTypeStubs]

pa: Any = _pa
pc: Any = _pc
pq: Any = _pq

Table = Any
Schema = Any
Array = Any
ParquetFile = Any
ParquetWriter = Any
