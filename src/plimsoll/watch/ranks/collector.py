"""``ranks="reduce"``: rank 0 adds up the ranks' data and alone writes the run.

A rank other than 0 has a writer like any (`Sender`), which hands finished tables to rank 0 (`_link`) where others write
files; what rank 0 does not take waits in bounded memory. Rank 0 (`Collector`) holds a step's spectra until all ranks
have got there, and adds up those that are parts of a whole. What must be compared over all steps before it is known
whether it is a replica (plain tensors of tensor-parallel ranks), what comes too late, scalars and events go into the
part set of the rank they came from, which rank 0 writes in its place: a reader finds what it would have found without.
"""

import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from plimsoll.errors import ArgumentError
from plimsoll.runs import Batch, Event, Record, RunWriter, Scalars
from plimsoll.runs.columns.arrow import Table, array, values_of
from plimsoll.runs.columns.spectrum_columns import blocks_of, numbers, rows_of
from plimsoll.runs.records import EXTRAS
from plimsoll.runs.writing import signal_deferral
from plimsoll.watch.ranks.store_channel import Sender, StoreChannel, decoded

_HELLO_SECONDS = 20.0  # for rank 0 to open the run
_END_SECONDS = 5.0  # that a closing rank gives the others
_DEFERRING_SECONDS = 2.0  # and where a signal waits
_POLL_SECONDS = 0.2
_OPEN_STEPS = 32  # that wait for the slowest rank
_OPEN_BYTES = 64 << 20
_OPEN_SECONDS = 5.0


def reducing_writer(path: str | os.PathLike[str], *, rank: int, world_size: int, **options: Any) -> RunWriter:
    """Return this rank's writer; a plain one where there is nobody to reduce with."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise ArgumentError(
            f'watch: expected a process group for ranks="reduce"; got none, on rank {rank} of {world_size}. '
            'Call torch.distributed.init_process_group before, or leave ranks="each".'
        )
    link = StoreChannel(os.fspath(path), rank)
    if rank == 0:
        return Collector(path, link, world_size=world_size, **options)
    opened = time.monotonic()
    while link.read("opened") is None:
        if time.monotonic() - opened > _HELLO_SECONDS:
            return RunWriter(path, rank=rank, world_size=world_size, **options)
        time.sleep(_POLL_SECONDS / 4)
    return Sender(path, link, world_size=world_size, **options)


class Collector(RunWriter):
    """Writer of rank 0, also for the others. Its thread merges, without locks."""

    def __init__(self, path: str | os.PathLike[str], link: StoreChannel, *, world_size: int, **options: Any) -> None:
        super().__init__(path, rank=0, world_size=world_size, **options)
        self._link, self._world = link, world_size
        self._options: dict[str, Any] = {"settings": options.get("settings"), "resume_from": options.get("resume_from")}
        self._steps: dict[int, tuple[float, list[Batch]]] = {}  # since when it waits, and what it has
        self._through = dict.fromkeys(range(world_size), -1)  # how far each rank has got
        self._written = -1  # the last step that was merged
        self._others: dict[int, RunWriter] = {}
        self._taken = dict.fromkeys(range(1, world_size), 0)
        self._waits = set(range(1, world_size))  # ranks that have not ended
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="plimsoll-collector", daemon=True)
        self._collecting, self._closed, self._deadline = True, False, 0.0
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, Collector.close, weakref.proxy(self))
        link.tell("opened", str(self.next_step))
        self._thread.start()

    # -- this rank's records

    def write(self, record: Record) -> None:
        """Queues a record; a batch waits for the other ranks'."""
        if isinstance(record, Batch):
            super().submit(lambda: self._hold(0, [record]), record.rows.nbytes)
        else:
            super().write(record)

    def submit(self, produce: Callable[[], Iterable[Record]], size_bytes: int, *, numbers: bool = False) -> bool:
        """Queues a call that makes records, the same way."""
        return super().submit(lambda: self._sorted(produce()), size_bytes, numbers=numbers)

    def _sorted(self, records: Iterable[Record]) -> Iterator[Record]:
        for record in records:
            if isinstance(record, Batch):
                yield from self._hold(0, [record])
            else:
                yield record

    def _hold(self, rank: int, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Takes batches of a rank; gives those of steps that are complete."""
        for batch in batches:
            if batch.step <= self._written and rank == 0:
                yield batch  # a step that the flight recorder brings up again
                continue
            self._steps.setdefault(batch.step, (time.monotonic(), []))[1].append(batch)
            if batch.last:
                self._through[rank] = max(self._through[rank], batch.step)
        yield from self._complete()

    def _complete(self, *, everything: bool = False) -> Iterator[Batch]:
        reached = min(self._through[rank] for rank in (0, *self._waits))
        while self._steps:
            step = min(self._steps)
            since, batches = self._steps[step]
            if not (everything or step <= reached or self._has_too_much() or time.monotonic() - since > _OPEN_SECONDS):
                return
            del self._steps[step]
            self._written = max(self._written, step)
            for place, batch in enumerate(batches):
                yield _as_part(batch, last=place == len(batches) - 1)

    # Rank 0 waits for no rank: a step is written when too many are open, or it is for too long. A rank that finds rank
    # 0 gone (closed, or no sign of life for `sender.PATIENCE_SECONDS`) opens its own part set, and goes on there.
    def _has_too_much(self) -> bool:
        size = sum(batch.rows.nbytes for _, batches in self._steps.values() for batch in batches)
        return len(self._steps) > _OPEN_STEPS or size > _OPEN_BYTES

    # -- the others' records

    def _poll(self) -> None:
        seen, beat = -1, 0
        while self._collecting or (self._waits and time.monotonic() < self._deadline):
            self._stop.wait(_POLL_SECONDS)
            if not self._collecting:
                time.sleep(_POLL_SECONDS / 10)
            beat += 1
            with contextlib.suppress(OSError):
                if not beat % 5:
                    self._link.tell("alive", str(beat))
                if (sent := self._link.sent()) != seen:
                    self._take_all()
                    seen = sent
            if self._steps and not beat % 5:
                super().submit(self._complete, 100)

    def _take_all(self) -> None:
        for rank in sorted(self._taken):
            while (message := self._link.take(rank, self._taken[rank])) is not None:
                self._taken[rank] += 1
                kind, table = decoded(message)
                super().submit(lambda r=rank, k=kind, t=table: self._receive(r, k, t), 4 * table.nbytes + 1000)

    def _receive(self, rank: int, kind: str, table: Table) -> Iterator[Record]:
        writer = self._writer_of(rank)
        if kind == "end":
            self._waits.discard(rank)
        elif kind == "manifest":
            writer.write_manifest(**_free(json.loads(table["json"][0].as_py())))
        elif kind == "spectra":
            steps = values_of(table["step"])
            added = np.array(table["shared"].to_pylist(), bool) & (steps > self._written)
            for batch in _batches(table.filter(array(~added)), writer):
                writer.write(batch)
            yield from self._hold(rank, list(_batches(table.filter(array(added)), self)))
            self._through[rank] = max(self._through[rank], int(steps.max(initial=-1)))
        elif kind == "scalars":
            for row in table.to_pylist():
                writer.write(Scalars(step=row["step"], values={row["name"]: row["value"]}, time=row["time"]))
            # Numbers of a step come before its spectra, and after those of the step before.
            self._through[rank] = max(self._through[rank], int(values_of(table["step"]).max(initial=0)) - 1)
        elif kind == "events":
            for row in table.to_pylist():
                writer.write(Event(**{**row, "details": json.loads(row["details"])}))
        yield from self._complete()

    def _writer_of(self, rank: int) -> RunWriter:
        if rank not in self._others:
            self._others[rank] = RunWriter(self.path, rank=rank, world_size=self._world, **self._options)
        return self._others[rank]

    def take_sent(self, timeout: float) -> bool:
        """Wait until all that other ranks have sent is taken; return True if in time."""
        deadline = time.monotonic() + timeout
        with contextlib.suppress(OSError):
            sent = self._link.sent()
            while sum(self._taken.values()) < sent and time.monotonic() < deadline:
                self._stop.wait(_POLL_SECONDS / 4)
            return sum(self._taken.values()) >= sent
        return False

    # -- the end

    def flush(self, timeout: float | None = 60.0) -> bool:
        """Wait until all data is on disk; late data of other ranks goes into their parts."""
        super().submit(lambda: self._complete(everything=True), 1000)
        return super().flush(timeout) and all(writer.flush(timeout) for writer in list(self._others.values()))

    def after_fork(self) -> None:
        """Make the child's copy inert: it has no thread, and must report no end."""
        super().after_fork()
        self._collecting = False

    def close(self, timeout: float | None = 60.0) -> None:
        """Give the other ranks seconds to end, write the rest, and give the run back."""
        if self._closed:
            return
        with signal_deferral.deferred():
            if self._collecting:
                self._deadline = time.monotonic() + _END_SECONDS
            self._collecting = False
            self._stop.set()
            signal_deferral.wait(self._has_stopped, 2 * _END_SECONDS, deferring=_DEFERRING_SECONDS)
            super().flush(timeout)  # of what the others have sent
            for rank in sorted(self._waits):
                step = self._through[rank]
                message = f"rank {rank} had not ended when rank 0 closed the run; its last spectra are of step {step}"
                super().write(Event(step=max(step, 0), kind="rank lost", message=message, details={"rank": rank}))
                self._writer_of(rank).write_manifest(lost_after=step)
                self._waits.discard(rank)
            super().submit(lambda: self._complete(everything=True), 1000)
            super().flush(timeout)
            for writer in self._others.values():
                writer.close(timeout)
            super().close(timeout)
            with contextlib.suppress(OSError):
                self._link.tell("closed", "1")
            self._closed = True

    def _has_stopped(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()


def _as_part(batch: Batch, *, last: bool) -> Batch:
    return Batch(
        step=batch.step, rows=batch.rows, index=batch.index, series=batch.series, scales=batch.scales,
        extras=batch.extras, blocks=batch.blocks, last=last,
    )  # fmt: skip


def _batches(table: Table, writer: RunWriter) -> Iterator[Batch]:
    """The rows of a table of spectra as a writer takes them, step after step."""
    if not len(table):
        return
    columns = (table[name].to_pylist() for name in ("collection", "name", "format", "shared"))
    series = np.array([writer.series(c, n, format=f, shared=s) for c, n, f, s in zip(*columns, strict=True)], np.int64)
    rows, scales, steps = rows_of(table), numbers(table, "scale"), values_of(table["step"])
    extras, blocks = {name: numbers(table, name) for name in EXTRAS}, blocks_of(table)
    for step in np.unique(steps):
        here = np.flatnonzero(steps == step)
        yield Batch(
            step=int(step), rows=rows[here], index=np.arange(len(here)), series=series[here], scales=scales[here],
            extras={name: values[here] for name, values in extras.items()},
            blocks=None if blocks is None else blocks[here], last=True,
        )  # fmt: skip


def _free(entries: Mapping[str, object]) -> dict[str, object]:
    from plimsoll.runs.storage.manifest import RESERVED

    return {name: value for name, value in entries.items() if name not in RESERVED}
