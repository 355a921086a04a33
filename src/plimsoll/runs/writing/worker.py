"""Background thread of a writer: takes, merges and writes records from a queue."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll.runs.columns import step_table
from plimsoll.runs.columns.spectrum_columns import columns_of
from plimsoll.runs.columns.step_table import StepTable
from plimsoll.runs.records import Batch, Event, Record, Scalars, size_bytes
from plimsoll.runs.writing import signal_deferral
from plimsoll.runs.writing.part_flusher import Buffer, DroppedRecords, PartFlusher
from plimsoll.runs.writing.rank_folder import SeriesRegistry
from plimsoll.runs.writing.sink_feed import SinkFeed

_OPEN_STEPS = 8  # steps whose last batch has not come; beyond this the oldest is taken as it is
# A sample larger than the queue would otherwise push out the loss with it.
_NUMBERS_BYTES = 64 << 20  # of numbers and events that wait: room of their own, so that no spectra push them out
_IDLE_SECONDS = 15.0  # how often the lock is renewed while nothing is written
# For parts that are being merged when a signal has come. Else the folder would be given back meanwhile, and Python,
# which ends the thread with itself, could abort within pyarrow.
_HURRIED_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _Produce:
    produce: Callable[[], Iterable[Record]]


@dataclass(frozen=True, slots=True)
class _Change:
    entries: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Mark:
    """Request for a flush, and for the end if `closing`."""

    done: threading.Event  # set afterwards
    result: list[bool]  # whether all records are on disk
    closing: bool = False


_Item = Record | _Produce | _Change | _Mark


class _Room:
    """Bound of bytes in the queue, and the bytes in use."""

    def __init__(self, bound: int) -> None:
        self.bound, self.used = bound, 0

    def takes(self, size: int) -> bool:
        """Return whether there is room. An empty queue takes an item of any size."""
        return self.used == 0 or self.used + size <= self.bound


class Worker:
    """The thread and its queue: at most `queue_bytes` of spectra, and other records."""

    def __init__(
        self,
        flusher: PartFlusher,
        feed: SinkFeed,
        dropped: DroppedRecords,
        registry: SeriesRegistry,
        *,
        flush_seconds: float,
        queue_bytes: int,
    ) -> None:
        self._flusher, self._feed, self._dropped, self._registry = flusher, feed, dropped, registry
        self._buffer = Buffer(queue_bytes, dropped)
        self._flush_seconds = flush_seconds
        self._queue: queue.SimpleQueue[tuple[_Item, int, _Room]] = queue.SimpleQueue()
        self._guard = threading.RLock()
        self._spectra, self._numbers = _Room(queue_bytes), _Room(_NUMBERS_BYTES)
        self._steps: dict[int, StepTable] = {}
        self._deadline: float | None = None
        self._running = True
        self._closed = False
        self._last = _Mark(threading.Event(), [], closing=True)
        self._thread = threading.Thread(target=self._run, name="plimsoll-run-writer", daemon=True)
        self._thread.start()

    # -- called from training

    def put(self, record: Record) -> None:
        """Queue a record."""
        self._offer(record, size_bytes(record), self._spectra if isinstance(record, Batch) else self._numbers)

    def produce(self, produce: Callable[[], Iterable[Record]], size: int, *, numbers: bool) -> bool:
        """Queue a function that creates records. Return False if there is no room."""
        return self._offer(_Produce(produce), size, self._numbers if numbers else self._spectra)

    def change(self, entries: dict[str, Any]) -> None:
        """Queue a change of the manifest."""
        self._offer(_Change(entries), 1000, self._numbers)

    # Training only puts records into the queue. Failures are counted, warned of once, and recorded (`DroppedRecords`).
    # Records that could not be written stay in memory, within a bound, until writing works again.
    def _offer(self, item: _Item, size: int, room: _Room) -> bool:
        with self._guard:
            accepted = room.takes(size) and not self._closed
            if accepted:
                room.used += size
                self._queue.put((item, size, room))  # under the guard: nothing comes after the last mark
        if accepted:
            return True
        if self._closed:
            self._dropped.count(
                "closed", 1, f"plimsoll: the writer of {self._flusher.path} is closed; records are lost."
            )
        else:
            message = f"plimsoll: records for {self._flusher.path} come faster than they are written; some are dropped."
            self._dropped.count("queue full", 1, f"{message} Sample less often, or give more queue_bytes.")
        return False

    def flush(self, timeout: float | None) -> bool:
        """Wait until all records are on disk; return False if they are not, or too late."""
        if threading.current_thread() is self._thread:
            return self._closed and not len(self._buffer)
        mark = _Mark(threading.Event(), [])
        with self._guard:
            closed = self._closed
            if not closed:
                self._queue.put((mark, 0, self._numbers))  # under the guard: it comes before the last mark
        if closed:
            return signal_deferral.wait(self._last.done.wait, timeout) and not len(self._buffer)
        return signal_deferral.wait(mark.done.wait, timeout) and mark.result == [True]

    def close(self, timeout: float | None) -> None:
        """Flush and end the thread, in at most `timeout` seconds; can be called again."""
        with self._guard:
            self._closed = True
        if self._last.done.is_set() or not self._thread.is_alive():  # in a forked child there is no thread
            return
        with signal_deferral.deferred():
            self._queue.put((self._last, 0, self._numbers))  # a second one is never reached
            if threading.current_thread() is self._thread or signal_deferral.wait(self._last.done.wait, timeout):
                return
            within = f"{signal_deferral.SECONDS:g} s of a signal" if signal_deferral.is_hurried() else f"{timeout} s"
            message = (
                f"plimsoll: {self._flusher.path} could not be closed within {within}; its last records may be lost."
            )
            self._dropped.warn_once("close", message)

    def after_fork(self) -> None:
        """Make the child's copy inert: it has no thread, and the run is its parent's."""
        self._closed = True
        self._last.done.set()  # there is nothing to close
        self._guard = threading.RLock()
        self._dropped.after_fork()
        self._registry.after_fork()
        self._flusher.abandon()

    # -- the thread

    def _run(self) -> None:
        self._remember(self._flusher.events())
        while self._running:
            try:
                item, size, room = self._queue.get(timeout=self._patience())
            except queue.Empty:
                self._write_contained()
                continue
            self._contained(item)
            with self._guard:
                room.used -= size
            del item  # its arrays are not kept alive while the thread waits
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._write_contained()

    def _patience(self) -> float:
        return _IDLE_SECONDS if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _contained(self, item: _Item) -> None:
        """Handle one item. No exception leaves this function."""
        try:
            self._handle(item)
        except Exception as error:  # noqa: BLE001  (P2: nothing in here may stop training, or this thread)
            if isinstance(item, _Mark):
                self._warn_of_failed_write(error)
                item.done.set()
                if item.closing:
                    self._running = False
                return
            reason = "produce failed" if isinstance(item, _Produce) else "invalid record"
            message = f"plimsoll: a record for {self._flusher.path} is lost ({reason}: {error!r})."
            self._dropped.count(reason, 1, message)

    def _write_contained(self) -> None:
        """Write the buffer. No exception leaves this function."""
        try:
            self._write()
        except Exception as error:  # noqa: BLE001  (likewise)
            self._warn_of_failed_write(error)

    def _warn_of_failed_write(self, error: Exception) -> None:
        self._dropped.warn_once("write", f"plimsoll: {self._flusher.path} could not be written: {error!r}")

    def _handle(self, item: _Item) -> None:
        if isinstance(item, _Produce):
            for record in item.produce():
                self._take(record)
        elif isinstance(item, _Change):
            self._flusher.change(item.entries)
            self._expect_write()
        elif isinstance(item, _Mark):
            if item.closing:
                self._end(item)
            else:
                self._answer(item)
        else:
            self._take(item)

    def _take(self, record: Record) -> None:
        if isinstance(record, Batch):
            self._take_batch(record)
        elif isinstance(record, Scalars):
            self._buffer.add_scalars(record)  # first: it refuses what cannot be stored
            self._feed.scalars(record)
        else:
            self._remember([record])
        self._expect_write()
        if self._buffer.is_full:
            self._write()

    def _remember(self, events: Sequence[Event]) -> None:
        for event in events:
            self._buffer.add_event(event)
            self._feed.event(event)
            self._expect_write()

    def _take_batch(self, batch: Batch) -> None:
        entries = step_table.from_batch(batch, len(self._registry.series))
        if batch.step in self._steps:
            entries = step_table.merged(step_table.concatenated([self._steps.pop(batch.step), entries]))
        self._steps[batch.step] = entries
        if batch.last:
            self._complete(batch.step)
        while len(self._steps) > _OPEN_STEPS:
            self._complete(min(self._steps))

    def _complete(self, step: int) -> None:
        entries = self._steps.pop(step)
        if len(entries):
            self._buffer.add_spectra(step, columns_of(step, entries))
        self._feed.batch(step, entries, self._registry.series)

    def _expect_write(self) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + self._flush_seconds

    def _answer(self, mark: _Mark) -> None:
        mark.result.append(self._write_all())
        self._feed.flush()
        mark.done.set()

    def _write(self) -> bool:
        """Write the buffer. After a failure it is tried again in `flush_seconds`."""
        self._deadline = None
        self._feed.release()
        for failure in self._feed.failures():
            self._remember([self._flusher.event("sink failed", f"a sink failed: {failure}")])
        written = self._flusher.store(self._buffer, self._registry.series)
        self._buffer.trim()
        self._remember(self._flusher.events())
        if len(self._buffer):
            self._expect_write()
        return written

    def _write_all(self) -> bool:
        """Write the buffer, then the events that writing itself has caused; return True if nothing is left."""
        if not self._write():
            return False
        self._remember(self._flusher.events())
        return not len(self._buffer) or self._write()

    def _end(self, mark: _Mark) -> None:
        """Complete the open steps, write them, compact, and release the run."""
        self._running = False
        try:
            for step in sorted(self._steps):
                self._complete(step)
            self._write_all()  # before all that may take long
            self._feed.end()
            if signal_deferral.is_hurried():
                self._flusher.wait_for_compaction(_HURRIED_SECONDS)
            else:
                self._flusher.compact_all()
            self._feed.close()
            self._write_all()
            self._buffer.give_up(self._flusher.path)
            self._flusher.close(self._registry.series)
        except Exception as error:  # noqa: BLE001  (P2)
            self._dropped.warn_once("close", f"plimsoll: {self._flusher.path} could not be closed in order: {error}")
            self._flusher.release()
        finally:
            mark.done.set()
