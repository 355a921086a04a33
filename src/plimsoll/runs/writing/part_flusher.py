"""Writer of buffered records to disk. On failure it warns and tries again at the next flush."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plimsoll.errors import PlimsollError
from plimsoll.runs.columns.arrow import Table
from plimsoll.runs.columns.schema import KINDS, Kind, Series
from plimsoll.runs.records import Event
from plimsoll.runs.writing.buffer import Buffer
from plimsoll.runs.writing.dropped_records import DroppedRecords
from plimsoll.runs.writing.rank_folder import RankFolder


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
