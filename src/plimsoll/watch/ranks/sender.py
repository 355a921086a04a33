"""What a rank other than 0 writes to under ``ranks="reduce"``: see `collector`.

`Sender` is a `RunWriter` whose log is an `Outbox`: tables go to rank 0 instead of files. All else (the bounded queue,
the attempts when something fails, the counting of losses) is the writer's own. When rank 0 is gone, what it has not
taken comes back, and a log of this rank's own takes over.
"""

import errno
import json
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from plimsoll.runs import RunWriter
from plimsoll.runs.columns.arrow import Table, pa, strings
from plimsoll.runs.columns.spectrum_table import Kind, Series
from plimsoll.runs.writing import writer
from plimsoll.runs.writing.dropped_records import DroppedRecords
from plimsoll.runs.writing.part_flusher import PartFlusher
from plimsoll.runs.writing.rank_folder import RankFolder
from plimsoll.runs.writing.series_registry import SeriesRegistry
from plimsoll.runs.writing.sink_feed import SinkFeed
from plimsoll.runs.writing.worker import Worker
from plimsoll.watch.ranks.store_channel import Link, encoded

PATIENCE_SECONDS = 30.0  # without a sign of life from rank 0
_TAKEN_SECONDS = 10.0  # that a closing rank gives rank 0 to take what is left
_POLL_SECONDS = 0.05
_FLUSH_SECONDS = 1.0
_UNDERWAY_BYTES = 32 << 20  # sent, and not taken by rank 0


class Sender(RunWriter):
    """The writer of a rank other than 0."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        link: Link,
        *,
        world_size: int,
        settings: Mapping[str, object],
        resume_from: int | None,
        sinks: Sequence[Any] = (),
        queue_bytes: int = 64 << 20,
    ) -> None:
        self._path, self._losses, self._registry = Path(path).absolute(), DroppedRecords(), SeriesRegistry([])
        self._next_step = int(link.told("opened") or 0)
        self.before_read = None

        def own_log() -> RankFolder:
            return RankFolder(
                self._path, rank=link.rank, world_size=world_size, settings=dict(settings), resume_from=None,
                compact_above=64, thin=(),
            )  # fmt: skip

        log: Any = Outbox(self._path, link, own_log)
        feed = SinkFeed(sinks, self._path, settings)
        keeper = PartFlusher(log, self._losses)
        bounds: dict[str, Any] = {"flush_seconds": _FLUSH_SECONDS, "queue_bytes": queue_bytes}
        self._worker = Worker(keeper, feed, self._losses, self._registry, **bounds)
        cast("Any", writer)._workers.add(self._worker)  # noqa: SLF001  (a fork makes all of them inert)
        self._finalizer = weakref.finalize(self, self._worker.close, 60.0)


class Outbox:
    """Folder of a `PartFlusher` that sends tables, until rank 0 is gone and a folder of this rank takes over."""

    def __init__(self, path: Path, link: Link, own_log: Callable[[], RankFolder]) -> None:
        self.path, self._link, self._own_log = path, link, own_log
        self._own: RankFolder | None = None
        self.found: list[tuple[str, str, dict[str, object]]] = []
        self.manifest: dict[str, Any] = {"dropped": {}}
        self.series: list[Series] = []
        self.last_step: int | None = None
        self._underway: dict[int, tuple[Kind | None, Table, int]] = {}
        self._next = 0
        self._sign, self._heard = b"", time.monotonic()

    def renew(self) -> bool:
        """Looks what rank 0 has taken, and whether it is there."""
        if self._own is not None:
            return self._own.renew()
        try:
            for number in list(self._underway):
                if self._link.is_there(self._link.rank, number):
                    break
                del self._underway[number]
            closed, sign = self._link.told("closed"), self._link.told("alive") or b""
        except OSError as error:
            # Whether rank 0 has what is under way cannot be known: counted twice it would be wrong, so it is lost.
            self._take_over(f"the store is gone ({error})", [])
            return False
        if sign != self._sign:
            self._sign, self._heard = sign, time.monotonic()
        if closed is not None or time.monotonic() - self._heard > PATIENCE_SECONDS:
            back = [held for n, held in self._underway.items() if self._link.claim(self._link.rank, n)]
            self._take_over("rank 0 has closed the run" if closed else "rank 0 gives no sign of life", back)
        return False

    def _take_over(self, why: str, back: Sequence[tuple[Kind | None, Table, int]]) -> None:
        own = self._own_log()
        own.manifest.update({name: value for name, value in self.manifest.items() if name != "dropped"})
        own.add_series(self.series)
        own.write_manifest()
        flush = own.next_flush()
        for kind, table, _ in back:
            if kind is not None:
                own.append(kind, flush, table)
                flush = own.next_flush()
        lost = len(self._underway) - len(back)
        details: dict[str, object] = {"lost_messages": lost}
        self.found.append(("own parts", f"this rank writes its own parts from here on: {why}", details))
        self._underway.clear()
        self._own, self.manifest = own, own.manifest

    def append(self, kind: Kind, flush: int, table: Table) -> None:
        """Sends a table."""
        if self._own is not None:
            self._own.append(kind, flush, table)
        else:
            self._send(kind, kind, table)

    def _send(self, name: str, kind: Kind | None, table: Table) -> None:
        message = encoded(name, table)
        if self._underway and sum(size for *_, size in self._underway.values()) + len(message) > _UNDERWAY_BYTES:
            raise OSError(errno.EAGAIN, "rank 0 has not taken what was sent before")
        self._link.send(self._next, message)
        self._underway[self._next] = (kind, table, len(message))
        self._next += 1

    def _note(self, name: str, content: object) -> None:
        self._send(name, None, pa.table({"json": strings([json.dumps(content)])}))

    def list_parts(self) -> None:
        """Writes the list of parts of the rank's own folder, if that is due."""
        if self._own is not None:
            self._own.list_parts()

    def next_flush(self) -> int:
        """The next flush of the rank's own folder; 0 without one."""
        return 0 if self._own is None else self._own.next_flush()

    def add_series(self, series: Sequence[Series]) -> None:
        """Makes more series known."""
        self.series = list(series)
        if self._own is not None:
            self._own.add_series(series)

    def write_manifest(self) -> None:
        """Writes the manifest, or sends it to the rank that writes."""
        if self._own is not None:
            self._own.write_manifest()
        else:
            self._note("manifest", {name: value for name, value in self.manifest.items() if name != "dropped"})

    def replace_from(self, step: int) -> None:
        """Replaces what was written from a step on."""
        if self._own is not None:
            self._own.replace_from(step)

    def is_due(self) -> bool:
        """Whether the rank's own folder is due to be flushed."""
        return self._own is not None and self._own.is_due()

    def compact(self, *, closing: bool = False) -> None:
        """Joins small parts of the rank's own folder."""
        if self._own is not None:
            self._own.compact(closing=closing)

    def finish(self, dropped: Mapping[str, int]) -> None:
        """Says that this rank has ended, and waits a little for rank 0 to take all."""
        if self._own is None:
            self._note("end", dict(dropped))
            deadline = time.monotonic() + _TAKEN_SECONDS
            while self._own is None and self._underway and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                self.renew()
            if self._own is None and self._underway:
                back = [held for n, held in self._underway.items() if self._link.claim(self._link.rank, n)]
                if any(kind is not None for kind, *_ in back):
                    self._take_over("rank 0 did not take its last records in time", back)
        if self._own is not None:
            self._own.finish(dropped)

    def close(self) -> None:
        """Closes the rank's own folder."""
        if self._own is not None:
            self._own.close()

    def abandon(self) -> None:
        """Leaves the rank's own folder as it is."""
        if self._own is not None:
            self._own.abandon()
