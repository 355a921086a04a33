"""Buffer of records, and the flusher that writes it as parts."""

import operator
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plimsoll.checks import number
from plimsoll.errors import PlimsollError
from plimsoll.results import as_data
from plimsoll.runs.columns.arrow import Table
from plimsoll.runs.columns.schema import KINDS, Kind, Series, rows_table
from plimsoll.runs.columns.spectrum_columns import spectra_table
from plimsoll.runs.records import Event, Scalars, size_bytes
from plimsoll.runs.storage.limits import RANGES, stored_details, stored_word
from plimsoll.runs.writing.rank_folder import RankFolder
from plimsoll.text import warn_user


class DroppedRecords:
    """Counter of dropped records by cause, safe from any thread. No method raises.

    It warns once per cause. The counts become an event of the run.
    """

    def __init__(self) -> None:
        self._guard = threading.RLock()
        self._counts: dict[str, int] = {}
        self._unreported: dict[str, int] = {}
        self._causes_warned: set[str] = set()

    @property
    def counts(self) -> Mapping[str, int]:
        """Records dropped so far, by reason."""
        with self._guard:
            return dict(self._counts)

    def count(self, reason: str, records: int, message: str) -> None:
        """Add dropped records, with a warning for the first of a reason."""
        with self._guard:
            self._counts[reason] = self._counts.get(reason, 0) + records
            self._unreported[reason] = self._unreported.get(reason, 0) + records
        self.warn_once(reason, message)

    def warn_once(self, cause: str, message: str) -> None:
        """Warn, once per cause."""
        with self._guard:
            new = cause not in self._causes_warned
            self._causes_warned.add(cause)
        if new:
            warn_user(message)

    def unreported(self) -> dict[str, int]:
        """Return the records dropped since the last call."""
        with self._guard:
            records, self._unreported = self._unreported, {}
        return records

    def after_fork(self) -> None:
        """Replace the lock: one held at the fork is never released in the child."""
        self._guard = threading.RLock()


# So much is written without waiting for the next flush, or half the bound where that is less.
_FULL_BYTES = 16 << 20


class Buffer:
    """Queue of spectra, scalars and events within a bound of bytes."""

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
        """True if it is time to write. After a failed attempt only newer records count."""
        return self._bytes - self._tried_bytes >= min(_FULL_BYTES, self._bound // 2)

    def add_spectra(self, step: int, columns: Table) -> None:
        """Add one step's spectra, as `spectrum_columns.columns_of` returns them."""
        self._spectra.append((step, columns))
        self._add("spectra", columns.nbytes)

    # Records are checked and converted to rows one by one, so that a record that cannot be stored costs only itself.
    def add_scalars(self, record: Scalars) -> None:
        """Add one step's scalars."""
        step, time = _step(record.step), _time(record.time)
        rows = [
            {"step": step, "name": stored_word(name), "value": float(value), "time": time}
            for name, value in record.values.items()
        ]
        if rows:
            self._rows["scalars"].append(rows)
            self._add("scalars", size_bytes(record))

    def add_event(self, event: Event) -> None:
        """Add an event."""
        row = {
            "step": _step(event.step),
            "kind": stored_word(event.kind),
            "message": str(event.message).encode("utf-8", "replace").decode(),  # of errors: file names of any bytes
            "details": stored_details(as_data(event.details, str)),
            "time": _time(event.time),
        }
        self._rows["events"].append([row])
        self._add("events", size_bytes(event))

    def _add(self, kind: Kind, size: int) -> None:
        self._sizes[kind].append(size)
        self._bytes += size

    def trim(self) -> None:
        """Drop the oldest records beyond the bound, spectra before scalars and events."""
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
        """Return the lowest and the highest step of the spectra and scalars."""
        steps = [step for step, _ in self._spectra]
        steps += [rows[0]["step"] for rows in self._rows["scalars"]]
        return (min(steps), max(steps)) if steps else None

    def tried(self) -> None:
        """Mark all records as tried, before an attempt to write that may fail."""
        self._tried_bytes = self._bytes

    def table(self, kind: Kind, series: Sequence[Series]) -> Table | None:
        """Return the table of one kind, or None if there are no such records."""
        if not self._sizes[kind]:
            return None
        if kind == "spectra":
            return spectra_table([columns for _, columns in self._spectra], series)
        rows = [row for rows in self._rows[kind] for row in rows]
        return rows_table(_in_order(rows) if kind == "scalars" else rows, kind)

    def clear(self, kind: Kind) -> None:
        """Remove the records of one kind, which are written."""
        self._bytes -= sum(self._sizes[kind])
        self._tried_bytes = min(self._tried_bytes, self._bytes)
        self._sizes[kind].clear()
        self._waiting(kind).clear()

    def give_up(self, path: Path) -> None:
        """Count the remaining records as dropped."""
        if len(self):
            message = f"plimsoll: {len(self)} records of {path} could not be written before it was closed."
            self._dropped.count("not written", len(self), message)

    def _waiting(self, kind: Kind) -> deque[Any]:
        return self._spectra if kind == "spectra" else self._rows[kind]


def _step(step: object) -> int:
    return int(np.int64(operator.index(step)))  # pyright: ignore[reportArgumentType]


def _time(seconds: object) -> float:
    low, high = RANGES["seconds"]
    return number(
        "RunWriter.write", "time", seconds, at_least=low, at_most=high, remedy="Give Unix seconds, or leave it out."
    )


def _in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows by name and step. A stable sort: the later of two equals stays last."""
    return sorted(rows, key=lambda row: (row["name"], row["step"]))


class PartFlusher:
    """Writer of a buffer into a rank's folder, which it compacts in the background."""

    def __init__(self, log: RankFolder, dropped: DroppedRecords) -> None:
        self._folder, self._dropped = log, dropped
        self._last_step = log.last_step or 0  # of this session, once it has one
        self._events: list[Event] = [self.event(*facts) for facts in self._folder_events()]
        self._failing: str | None = None
        self._started = False  # whether this session has recorded a step
        self._compacting: threading.Thread | None = None
        self._changed = False

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._folder.path

    def event(self, kind: str, message: str, details: dict[str, Any] | None = None) -> Event:
        """Return an event of the writer itself, at the last known step."""
        return Event(step=self._last_step, kind=kind, message=message, details=details or {})

    def events(self) -> list[Event]:
        """Return the events that writing has caused since the last call."""
        events, self._events = self._events + [self.event(*facts) for facts in self._folder_events()], []
        return events

    def _folder_events(self) -> list[tuple[str, str, dict[str, object]]]:
        events, self._folder.found = self._folder.found, []
        return events

    def change(self, entries: dict[str, Any]) -> None:
        """Change entries of the manifest. The next attempt to write writes them."""
        self._folder.manifest.update(entries)
        self._changed = True

    def store(self, buffer: Buffer, series: Sequence[Series]) -> bool:
        """Write all buffered records. Return False if that fails; the records stay then."""
        buffer.tried()
        try:
            if self._folder.renew():
                self._events.append(self.event("folder lost", "the run's folder was removed, and created again"))
            if not len(buffer) and not self._changed:
                return True
            self._prepare(buffer, series)
            self._write(buffer, series)
        except (OSError, PlimsollError) as error:
            self._report_failure(error)
            return False
        self._report_recovery()
        self._compact()
        return True

    def _prepare(self, buffer: Buffer, series: Sequence[Series]) -> None:
        """Update the manifest before the parts that it refers to are written."""
        counts = dict(self._dropped.counts)
        self._changed |= len(series) != len(self._folder.series) or counts != self._folder.manifest["dropped"]
        self._folder.add_series(series)
        self._folder.manifest["dropped"] = counts
        span = buffer.span()
        if span is not None:
            self._last_step = max(self._last_step, span[1]) if self._started else span[1]
            self._replace_former(span[0])
        if self._changed:
            self._folder.write_manifest()
            self._changed = False

    def _replace_former(self, first: int) -> None:
        """Replace earlier sessions' rows from this session's first step, once known."""
        last = self._folder.last_step
        if not self._started and last is not None and first <= last:
            self._folder.replace_from(first)
            message = f"this session begins at step {first}; what lay there and after, up to {last}, is replaced"
            self._events.append(Event(step=first, kind="replaced", message=message, details={"from_step": first}))
        self._started = True

    def _write(self, buffer: Buffer, series: Sequence[Series]) -> None:
        flush = self._folder.next_flush()
        for kind in KINDS:
            table = self._table(buffer, kind, series)
            if table is not None:
                self._folder.append(kind, flush, table)
                buffer.clear(kind)
        self._folder.list_parts()

    def _table(self, buffer: Buffer, kind: Kind, series: Sequence[Series]) -> Table | None:
        """Return a kind's table without invalid records, which would block later ones."""
        try:
            return buffer.table(kind, series)
        except Exception as error:  # noqa: BLE001  (whatever it is, the other records are worth more)
            message = f"plimsoll: {kind} of {self.path} cannot be converted to a table and are dropped: {error!r}"
            self._dropped.count("invalid record", 1, message)
            buffer.clear(kind)
            return None

    # When writing fails, the flusher warns, keeps the records, and tries again at the next flush.
    def _report_failure(self, error: Exception) -> None:
        self._failing = f"{error}"
        name = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else type(error).__name__
        message = f"plimsoll: {self.path} cannot be written ({error}); training continues, and writing is tried again."
        self._dropped.warn_once(f"write: {name}", message)

    def _report_recovery(self) -> None:
        lost = self._dropped.unreported()
        if self._failing is not None or lost:
            why = f"writing failed ({self._failing}) and works again" if self._failing else "records were dropped"
            self._events.append(self.event("dropped", f"{why}; lost: {lost or 'nothing'}", {"dropped": lost}))
        self._failing = None

    # -- compacting

    def _compact(self) -> None:
        if self._folder.is_due() and (self._compacting is None or not self._compacting.is_alive()):
            self._compacting = threading.Thread(target=self._compact_now, name="plimsoll-run-compaction", daemon=True)
            self._compacting.start()

    def _compact_now(self, *, closing: bool = False) -> None:
        try:
            self._folder.compact(closing=closing)
        except Exception as error:  # noqa: BLE001  (the parts stay as they are; the next flush tries again)
            message = f"plimsoll: {self.path} could not be compacted ({error!r}); its parts stay as they are."
            self._dropped.warn_once("compaction", message)

    def compact_all(self) -> None:
        """Compact the remaining parts at the end."""
        self.wait_for_compaction(None)
        self._compact_now(closing=True)

    def wait_for_compaction(self, seconds: float | None) -> None:
        """Wait for parts that are being merged, at most so many seconds. None: no limit."""
        if self._compacting is not None:
            self._compacting.join(seconds)

    def close(self, series: Sequence[Series]) -> None:
        """Write the end into the manifest, and release the folder."""
        try:
            self._folder.add_series(series)
            self._folder.finish(dict(self._dropped.counts))
        finally:
            self._folder.close()

    def release(self) -> None:
        """Release the folder without a word in the manifest that the run was closed."""
        self._folder.close()

    def abandon(self) -> None:
        """Abandon the folder in a forked child."""
        self._folder.abandon()
