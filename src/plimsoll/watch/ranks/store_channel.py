"""Messages from ranks to rank 0 through the process group's store, and the sender."""

import errno
import json
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from plimsoll.runs import RunWriter
from plimsoll.runs.columns.arrow import Table, pa, strings
from plimsoll.runs.columns.schema import Kind, Series
from plimsoll.runs.writing import writer
from plimsoll.runs.writing.part_flusher import DroppedRecords, PartFlusher
from plimsoll.runs.writing.rank_folder import RankFolder, SeriesRegistry
from plimsoll.runs.writing.sink_feed import SinkFeed
from plimsoll.runs.writing.worker import Worker

_SECONDS = 10.0  # limit of one question to the store
PATIENCE_SECONDS = 30.0  # without a sign of life from rank 0
_TAKEN_SECONDS = 10.0  # that a closing rank gives rank 0 to take what is left
_POLL_SECONDS = 0.05
_FLUSH_SECONDS = 1.0
_UNDERWAY_BYTES = 32 << 20  # sent, and not taken by rank 0
_opened: dict[str, int] = {}

R = TypeVar("R")


class StoreChannel:
    """One process's end of the channel. Failures of the store are OSErrors."""

    def __init__(self, run: str, rank: int) -> None:
        distributed: Any = torch.distributed.distributed_c10d
        store = distributed._get_default_store()  # noqa: SLF001  (torch offers it under no other name)
        _opened[run] = _opened.get(run, 0) + 1  # a run that is opened again has other keys
        self._server = store  # which ends with its last reference
        client = store.clone()
        client.set_timeout(timedelta(seconds=_SECONDS))
        self._store: Any = distributed.PrefixStore(f"plimsoll/{run}/{_opened[run]}", client)
        self.rank = rank

    def tell(self, key: str, value: bytes | str) -> None:
        """Sets a key."""
        _asked(lambda: self._store.set(key, value))

    def read(self, key: str) -> bytes | None:
        """Return the value of a key; None if it is not set."""
        return _asked(lambda: self._store.get(key) if self._store.check([key]) else None)

    def send(self, number: int, message: bytes) -> None:
        """Leaves a message, numbered by its sender, for rank 0."""
        self.tell(f"{self.rank}/{number}", message)
        _asked(lambda: self._store.add("sent", 1))

    def sent(self) -> int:
        """Return the number of messages that all ranks have sent so far."""
        return _asked(lambda: int(self._store.add("sent", 0)))

    def is_there(self, rank: int, number: int) -> bool:
        """Return True if the message is still in the store."""
        return _asked(lambda: bool(self._store.check([f"{rank}/{number}"])))

    def take(self, rank: int, number: int) -> bytes | None:
        """Take a message, now the caller's; None if there is none or another took it."""
        message = self.read(f"{rank}/{number}")
        return message if message is not None and self.claim(rank, number) else None

    # The store is a server (or a file) that all ranks reach. No rank waits for another, so a rank that dies or lags
    # does not delay the others. A collective cannot promise that. A message is a key that its sender sets. The process
    # that deletes the key owns the message: rank 0, or the sender itself if rank 0 is gone. So no message counts twice.
    def claim(self, rank: int, number: int) -> bool:
        """Takes a message away; False if it had gone."""
        return _asked(lambda: bool(self._store.delete_key(f"{rank}/{number}")))


def encoded(kind: str, table: Table) -> bytes:
    """A table as a message."""
    table = table.replace_schema_metadata({"kind": kind})
    sink = pa.BufferOutputStream()
    codec = "zstd" if pa.Codec.is_available("zstd") else None
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def decoded(message: bytes) -> tuple[str, Table]:
    """A message's kind and table."""
    table: Any = pa.ipc.open_stream(message).read_all()
    metadata: dict[bytes, bytes] = dict(table.schema.metadata or {})
    return metadata.get(b"kind", b"").decode(), table


def _asked(question: Callable[[], R]) -> R:
    try:
        return question()
    except RuntimeError as error:  # what all of torch's stores raise
        raise OSError(errno.EIO, f"the process group's store does not answer ({error})") from error


class Sender(RunWriter):
    """The writer of a rank other than 0."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        link: StoreChannel,
        *,
        world_size: int,
        settings: Mapping[str, object],
        resume_from: int | None,
        sinks: Sequence[Any] = (),
        queue_bytes: int = 64 << 20,
    ) -> None:
        self._path, self._losses, self._registry = Path(path).absolute(), DroppedRecords(), SeriesRegistry([])
        self._next_step = int(link.read("opened") or 0)
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
    """Folder of a `PartFlusher` that sends tables, or writes them once rank 0 is gone."""

    def __init__(self, path: Path, link: StoreChannel, own_log: Callable[[], RankFolder]) -> None:
        self.path, self._link, self._own_log = path, link, own_log
        self._own: RankFolder | None = None
        self.found: list[tuple[str, str, dict[str, object]]] = []
        self.manifest: dict[str, Any] = {"dropped": {}}
        self.series: list[Series] = []
        self.last_step: int | None = None
        self._underway: dict[int, tuple[Kind | None, Table, int]] = {}
        self._next = 0
        self._sign, self._last_sign = b"", time.monotonic()

    def renew(self) -> bool:
        """Looks what rank 0 has taken, and whether it is there."""
        if self._own is not None:
            return self._own.renew()
        try:
            for number in list(self._underway):
                if self._link.is_there(self._link.rank, number):
                    break
                del self._underway[number]
            closed, sign = self._link.read("closed"), self._link.read("alive") or b""
        except OSError as error:
            # Whether rank 0 has what is under way cannot be known: counted twice it would be wrong, so it is lost.
            self._take_over(f"the store is gone ({error})", [])
            return False
        if sign != self._sign:
            self._sign, self._last_sign = sign, time.monotonic()
        if closed is not None or time.monotonic() - self._last_sign > PATIENCE_SECONDS:
            back = [message for n, message in self._underway.items() if self._link.claim(self._link.rank, n)]
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
        """Return True if the rank's own folder is due to be flushed."""
        return self._own is not None and self._own.is_due()

    def compact(self, *, closing: bool = False) -> None:
        """Joins small parts of the rank's own folder."""
        if self._own is not None:
            self._own.compact(closing=closing)

    def finish(self, dropped: Mapping[str, int]) -> None:
        """Report this rank's end, and wait a little for rank 0 to take all messages."""
        if self._own is None:
            self._note("end", dict(dropped))
            deadline = time.monotonic() + _TAKEN_SECONDS
            while self._own is None and self._underway and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                self.renew()
            if self._own is None and self._underway:
                back = [message for n, message in self._underway.items() if self._link.claim(self._link.rank, n)]
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
