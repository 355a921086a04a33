"""Writer of buffered records to disk. On failure it warns and tries again at the next flush."""

import json
import operator
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plimsoll.errors import PlimsollError
from plimsoll.runs.columns.arrow import Table
from plimsoll.runs.columns.schema import KINDS, Kind, Series, rows_table
from plimsoll.runs.columns.spectrum_columns import spectra_table
from plimsoll.runs.records import Event, Scalars, size_bytes
from plimsoll.runs.storage import manifest
from plimsoll.runs.user_messages import warn_user
from plimsoll.runs.writing.rank_folder import RankFolder


class DroppedRecords:
    """Counts by reason. Safe from any thread; no method raises."""

    def __init__(self) -> None:
        self._guard = threading.RLock()
        self._counts: dict[str, int] = {}
        self._unreported: dict[str, int] = {}
        self._causes_warned: set[str] = set()

    @property
    def counts(self) -> Mapping[str, int]:
        """All records dropped so far, by reason."""
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
            found, self._unreported = self._unreported, {}
        return found

    def after_fork(self) -> None:
        """Replace the lock: one that another thread held at the fork is never released in the child."""
        self._guard = threading.RLock()


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


class PartFlusher:
    """Writes buffers into a rank's folder, and compacts it in a background thread."""

    def __init__(self, log: RankFolder, dropped: DroppedRecords) -> None:
        self._folder, self._dropped = log, dropped
        self._last_step = log.last_step or 0  # of this session, once it has one
        self._events: list[Event] = [self.event(*found) for found in self._taken()]
        self._failing: str | None = None
        self._started = False  # whether this session has recorded a step
        self._compacting: threading.Thread | None = None
        self._changed = False

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._folder.path

    def event(self, kind: str, message: str, details: dict[str, Any] | None = None) -> Event:
        """An event of the writer's own, at the last step known."""
        return Event(step=self._last_step, kind=kind, message=message, details=details or {})

    def events(self) -> list[Event]:
        """Events that came of writing since this was last asked."""
        found, self._events = self._events + [self.event(*found) for found in self._taken()], []
        return found

    def _taken(self) -> list[tuple[str, str, dict[str, object]]]:
        found, self._folder.found = self._folder.found, []
        return found

    def change(self, entries: dict[str, Any]) -> None:
        """Changes the manifest, from the next attempt to write on."""
        self._folder.manifest.update(entries)
        self._changed = True

    def store(self, buffer: Buffer, series: Sequence[Series]) -> bool:
        """Writes all that waits; False, with the rest still waiting, where that fails."""
        buffer.tried()
        try:
            if self._folder.renew():
                self._events.append(self.event("folder lost", "the run's folder was removed, and made anew"))
            if not len(buffer) and not self._changed:
                return True
            self._prepare(buffer, series)
            self._write(buffer, series)
        except (OSError, PlimsollError) as error:
            self._tell_failure(error)
            return False
        self._tell_recovery()
        self._compact()
        return True

    def _prepare(self, buffer: Buffer, series: Sequence[Series]) -> None:
        """Brings the manifest up to date before the parts that it speaks of."""
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
        """Once, when this session's first step is known: what earlier ones have there and after is replaced."""
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
        """The table of one kind. What cannot be made one is given up: it would stand in the way for ever."""
        try:
            return buffer.table(kind, series)
        except Exception as error:  # noqa: BLE001  (whatever it is, the other records are worth more)
            message = f"plimsoll: {kind} of {self.path} cannot be made a table and are lost: {error!r}"
            self._dropped.count("invalid record", 1, message)
            buffer.clear(kind)
            return None

    def _tell_failure(self, error: Exception) -> None:
        self._failing = f"{error}"
        name = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else type(error).__name__
        message = (
            f"plimsoll: {self.path} cannot be written ({error}); training goes on, and so do the attempts to write."
        )
        self._dropped.warn_once(f"write: {name}", message)

    def _tell_recovery(self) -> None:
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
        """Compacts what is left, at the end."""
        if self._compacting is not None:
            self._compacting.join()
        self._compact_now(closing=True)

    def close(self, series: Sequence[Series]) -> None:
        """Notes the end in the manifest, and gives the run back."""
        try:
            self._folder.add_series(series)
            self._folder.finish(dict(self._dropped.counts))
        finally:
            self._folder.close()

    def abandon(self) -> None:
        """Forgets the lock, in a forked child."""
        self._folder.abandon()
