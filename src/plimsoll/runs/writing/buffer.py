"""What waits in memory to be written: at most so many bytes, the oldest given up first when writing fails for long.

Records are checked and brought into the form of a row here, one by one, so that one of them that cannot be stored costs
itself only.
"""

import json
import operator
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plimsoll.runs.columns.arrow import Table
from plimsoll.runs.columns.schema import Kind, Series, rows_table
from plimsoll.runs.columns.spectrum_columns import spectra_table
from plimsoll.runs.records import Event, Scalars, size_bytes
from plimsoll.runs.storage import manifest
from plimsoll.runs.writing.dropped_records import DroppedRecords

# So much is written without waiting for the next flush, or half the bound where that is less.
_FULL_BYTES = 16 << 20


class Buffer:
    """Spectra, scalars and events in the order in which they came. Those of one record are given up together."""

    def __init__(self, bound_bytes: int, dropped: DroppedRecords) -> None:
        self._bound, self._dropped = bound_bytes, dropped
        self._spectra: deque[tuple[int, Table]] = deque()
        self._rows: dict[Kind, deque[list[dict[str, Any]]]] = {"scalars": deque(), "events": deque()}
        self._sizes: dict[Kind, deque[int]] = {"spectra": deque(), "scalars": deque(), "events": deque()}
        self._bytes = 0
        self._tried_bytes = 0

    def __len__(self) -> int:
        return sum(len(sizes) for sizes in self._sizes.values())

    @property
    def is_full(self) -> bool:
        """Whether it is worth writing now. After a failed attempt only what came since counts."""
        return self._bytes - self._tried_bytes >= min(_FULL_BYTES, self._bound // 2)

    def add_spectra(self, step: int, columns: Table) -> None:
        """Add one step's spectra, as `spectrum_columns.columns_of` returns them."""
        self._spectra.append((step, columns))
        self._add("spectra", columns.nbytes)

    def add_scalars(self, record: Scalars) -> None:
        """Takes one step's scalars."""
        step = _step(record.step)
        rows = [{"step": step, "name": str(name), "value": float(value)} for name, value in record.values.items()]
        if rows:
            self._rows["scalars"].append(rows)
            self._add("scalars", size_bytes(record))

    def add_event(self, event: Event) -> None:
        """Takes an event."""
        row = {
            "step": _step(event.step),
            "kind": str(event.kind),
            "message": str(event.message),
            "details": json.dumps(manifest.plain(event.details)),
            "time": float(event.time),
        }
        self._rows["events"].append([row])
        self._add("events", size_bytes(event))

    def _add(self, kind: Kind, size: int) -> None:
        self._sizes[kind].append(size)
        self._bytes += size

    def trim(self) -> None:
        """Gives up the oldest records beyond the bound; spectra first: they are large, and events say what happened."""
        while self._bytes > self._bound and len(self) > 1:
            kind: Kind = next(kind for kind, sizes in self._sizes.items() if sizes)
            self._waiting(kind).popleft()
            size = self._sizes[kind].popleft()
            self._bytes -= size
            self._tried_bytes = max(0, self._tried_bytes - size)
            self._dropped.count(
                "not written", 1, "plimsoll: records that cannot be written exceed the memory for them."
            )

    def span(self) -> tuple[int, int] | None:
        """The lowest and the highest step of the spectra and scalars."""
        steps = [step for step, _ in self._spectra]
        steps += [rows[0]["step"] for rows in self._rows["scalars"]]
        return (min(steps), max(steps)) if steps else None

    def tried(self) -> None:
        """Notes an attempt to write, which may fail."""
        self._tried_bytes = self._bytes

    def table(self, kind: Kind, series: Sequence[Series]) -> Table | None:
        """What waits of one kind; None for nothing."""
        if not self._sizes[kind]:
            return None
        if kind == "spectra":
            return spectra_table([columns for _, columns in self._spectra], series)
        rows = [row for rows in self._rows[kind] for row in rows]
        return rows_table(_in_order(rows) if kind == "scalars" else rows, kind)

    def clear(self, kind: Kind) -> None:
        """Forgets what was written."""
        self._bytes -= sum(self._sizes[kind])
        self._tried_bytes = min(self._tried_bytes, self._bytes)
        self._sizes[kind].clear()
        self._waiting(kind).clear()

    def give_up(self, path: Path) -> None:
        """Counts what remains as lost."""
        if len(self):
            message = f"plimsoll: {len(self)} records of {path} could not be written before it was closed."
            self._dropped.count("not written", len(self), message)

    def _waiting(self, kind: Kind) -> deque[Any]:
        return self._spectra if kind == "spectra" else self._rows[kind]


def _step(step: object) -> int:
    """A step as a number that a column can hold."""
    return int(np.int64(operator.index(step)))  # pyright: ignore[reportArgumentType]


def _in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By name and step; of two with one name and step the later one stays the later."""
    return sorted(rows, key=lambda row: (row["name"], row["step"]))
