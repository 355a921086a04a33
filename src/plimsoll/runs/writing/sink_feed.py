"""Feeding of sinks: one `StepRecord` per step, to a thread of each sink.

A step is sent as soon as its batch is complete.
"""

import math
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from plimsoll.errors import ArgumentError
from plimsoll.runs.columns.schema import Series
from plimsoll.runs.columns.spectrum_columns import true_spectrum
from plimsoll.runs.columns.step_table import StepTable
from plimsoll.runs.records import Event, Scalars, Sink, StepRecord
from plimsoll.runs.writing import signal_deferral
from plimsoll.spectrum import Spectrum
from plimsoll.text import warn_user

# -- a sink in a background thread, with a bounded queue ---------------------------------------------------------------

# So many failures one after the other, and the sink is left alone.
MAX_FAILURES = 10

# A mark in the queue, for flushing: set once everything before it is done.
_Mark = threading.Event


class SinkRunner:
    """Runner of one sink. No method raises; `flush`, `close`, `has_ended` wait.

    In a forked child it does nothing: the thread stays with the parent. Of more than `queue_steps` records that wait
    the oldest is dropped.
    """

    def __init__(self, sink: Sink, queue_steps: int = 256) -> None:
        if queue_steps < 1:
            raise ArgumentError(f"SinkRunner: expected queue_steps >= 1; got {queue_steps}. Give a positive number.")
        self.name = str(getattr(sink, "sink_name", type(sink).__name__))
        self.dropped = 0  # records that the sink did not receive: the queue was full, or the sink was off or closed
        self.failed = 0  # records on which the sink raised
        self.failure: str | None = None  # the last one; the first of each kind is also a `RuntimeWarning`
        self._sink = sink
        self._queue: deque[StepRecord | _Mark] = deque()
        self._queue_steps = queue_steps
        # Reentrant, as conditions are by default: a signal handler may put a record while this thread is putting one.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._off = False
        self._failures_in_a_row = 0
        self._said: set[str] = set()
        self._pid = os.getpid()

    def open(self, run_path: Path, settings: Mapping[str, object]) -> None:
        """Start the thread, which opens the sink."""
        if self._absent() or self._thread is not None or self._closing:
            return
        self._thread = threading.Thread(
            target=self._work, args=(run_path, settings), name=f"plimsoll-sink-{self.name}", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread to be had, or the interpreter is about to end
            self._thread = None
            self._switch_off(f"{self.name}: could not start its thread ({error}); nothing is sent to it")

    def put(self, record: StepRecord) -> None:
        """Queue a record. If the queue is full, the oldest record is dropped."""
        # Before the lock, which may have been held by another thread at the time of the fork.
        if self._absent():
            return
        with self._changed:
            refused = self._off or self._closing
            full = not refused and len(self._queue) >= self._queue_steps and self._drop_oldest()
            self.dropped += refused
            if not refused:
                self._queue.append(record)
                self._changed.notify()
        if full:
            self._note("full", f"{self.name}: slower than training; the oldest waiting steps are dropped")

    def flush(self, timeout: float = 10.0) -> None:
        """Wait at most `timeout` seconds until all records are sent and the sink flushed."""
        mark = _Mark()
        with_thread = not self._absent() and self._thread not in {None, threading.current_thread()}
        if not with_thread or not self._leave(mark) or mark.wait(timeout):
            return
        with self._changed:
            if mark in self._queue:
                self._queue.remove(mark)
        self.give_up("flush", timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Let the sink take its queue, close it, and wait at most `timeout` seconds.

        A slow sink continues in the background while the process lives.
        """
        if not self._closing:
            self.end()
            if not self.has_ended(timeout):
                self.give_up("close", timeout)

    def end(self, *, flushing: bool = False) -> None:
        """Let the sink take its queue, flush it if `flushing`, and close it; do not wait."""
        if self._absent() or self._closing:
            return
        with self._changed:
            if flushing and not self._off:
                self._queue.append(_Mark())
            self._closing = True
            self._changed.notify()

    def has_ended(self, seconds: float) -> bool:
        """Wait for the thread, at most so many seconds. Return whether it has ended."""
        if self._absent() or self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _absent(self) -> bool:
        return os.getpid() != self._pid

    def _leave(self, mark: _Mark) -> bool:
        with self._changed:
            if self._off or self._closing:
                return False
            self._queue.append(mark)
            self._changed.notify()
        return True

    def _drop_oldest(self) -> bool:
        for index, waiting in enumerate(self._queue):
            if not isinstance(waiting, _Mark):
                del self._queue[index]
                self.dropped += 1
                return True
        return False

    # ------------------------------------------------------------------------------------------------ on the thread

    # The training loop only appends to the queue. A tracker is opened in the thread too, since that may ask a server.
    # The thread is a daemon. Only `flush` and `close` wait for it, for a bounded time, so that a sink that hangs delays
    # neither training nor the end of the process.
    def _work(self, run_path: Path, settings: Mapping[str, object]) -> None:
        if not self._contained("open", lambda: self._sink.open(run_path, settings)):
            self._switch_off(f"{self.failure}; it is switched off for this run")
            return
        while (waiting := self._next()) is not None:
            if isinstance(waiting, _Mark):
                self._contained("flush", self._sink.flush)
                waiting.set()
            else:
                self._give(waiting)
        self._contained("close", self._sink.close)

    def _next(self) -> StepRecord | _Mark | None:
        """Return the oldest item, or None if nothing more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing or self._off)
            return self._queue.popleft() if self._queue else None

    def _give(self, record: StepRecord) -> None:
        if self._contained("put", lambda: self._sink.put(record)):
            self._failures_in_a_row = 0
            return
        self.failed += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES:
            self._switch_off(f"{self.failure}; after {MAX_FAILURES} failures in a row it is switched off for this run")

    def _contained(self, operation: str, call: Callable[[], object]) -> bool:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  (a tracker that calls sys.exit must not end its thread unsaid)
            what = "".join(traceback.format_exception_only(error)).strip()
            # A failed opening is said when the sink is switched off for it.
            self._note("open" if operation == "open" else "error", f"{self.name}: {operation} failed: {what}")
            return False
        return True

    # ------------------------------------------------------------------------------------------------ what is said

    def _switch_off(self, message: str) -> None:
        with self._changed:
            self._off = True
            waiting = list(self._queue)
            self._queue.clear()
            self.dropped += sum(not isinstance(job, _Mark) for job in waiting)
        self._note("off", message)
        for job in waiting:
            if isinstance(job, _Mark):
                job.set()

    def give_up(self, operation: str, timeout: float) -> None:
        """Report that the sink has not done something in time."""
        with self._changed:
            records = sum(not isinstance(job, _Mark) for job in self._queue)
        self._note(
            "late",
            f"{self.name}: {operation} took more than {timeout:g} s and is no longer waited for; "
            f"{records} steps have not reached it",
        )

    def _note(self, kind: str, message: str) -> None:
        self.failure = message
        if kind in self._said:
            return
        self._said.add(kind)
        if kind != "open":
            warn_user(f"{message}. Training continues.")


# -- records of a step -------------------------------------------------------------------------------------------------

_SAY_SECONDS = 2.0  # after which it is said which sinks are waited for
_CLOSE_SECONDS = 10.0  # that all sinks together have to take what waits and to close
_DEFERRING_SECONDS = 2.0  # and where a signal waits

Spectra = Mapping[tuple[str, str], Spectrum]


class SinkFeed:
    """Feed of records to sinks. `SinkRunner` handles sinks that raise or hang."""

    def __init__(self, sinks: Sequence[Sink], path: Path, settings: Mapping[str, object]) -> None:
        self._runners: list[SinkRunner] = []
        self._waiting: dict[int, tuple[dict[str, float], list[Event]]] = {}
        self._told: set[int] = set()
        if sinks:
            self._runners = [SinkRunner(sink) for sink in sinks]
            for runner in self._runners:
                runner.open(path, settings)

    def scalars(self, record: Scalars) -> None:
        """Keep scalars until the batch of their step, or a later step, comes."""
        if self._runners:
            self._of(record.step)[0].update(record.values)

    def event(self, record: Event) -> None:
        """Keep an event until the batch of its step, or a later step, comes."""
        if self._runners:
            self._of(record.step)[1].append(record)

    def batch(self, step: int, entries: StepTable, series: Sequence[Series]) -> None:
        """Send a complete step, and before it the records kept for earlier steps."""
        if not self._runners:
            return
        self.release(before=step)
        scalars, events = self._waiting.pop(step, ({}, []))
        self._put(StepRecord(step=step, spectra=_lazily(entries, series), scalars=scalars, events=tuple(events)))

    def release(self, before: float = math.inf) -> None:
        """Send the scalars and events of earlier steps that have no batch."""
        for step in sorted(s for s in self._waiting if s < before):
            scalars, events = self._waiting.pop(step)
            self._put(StepRecord(step=step, scalars=scalars, events=tuple(events)))

    def flush(self) -> None:
        """Send all records and flush the sinks."""
        self.release()
        for runner in self._runners:
            runner.flush()

    def end(self) -> None:
        """Send all records and let the sinks close after them, without waiting."""
        self.release()
        for runner in self._runners:
            runner.end(flushing=True)

    def close(self) -> None:
        """Wait for all sinks to close at the same time, for at most 10 seconds."""
        self.end()
        late = list(self._runners)

        def have_ended(seconds: float) -> bool:
            late[:] = [runner for runner in late if not runner.has_ended(seconds / len(late))]
            return not late

        if signal_deferral.wait(have_ended, _SAY_SECONDS, deferring=_DEFERRING_SECONDS):
            return
        rest = _CLOSE_SECONDS - _SAY_SECONDS
        warn_user(
            f"plimsoll: waiting for {', '.join(runner.name for runner in late)} to close, {rest:g} s more at most."
        )
        if not signal_deferral.wait(have_ended, rest, deferring=_DEFERRING_SECONDS):
            for runner in late:
                runner.give_up("close", _CLOSE_SECONDS)

    def failures(self) -> list[str]:
        """Return the failures of sinks since the last call, each once."""
        new_failures = {
            i: r.failure for i, r in enumerate(self._runners) if r.failure is not None and i not in self._told
        }
        self._told.update(new_failures)
        return list(new_failures.values())

    def dropped(self) -> int:
        """Return how many records sinks did not receive."""
        return sum(runner.dropped for runner in self._runners)

    def _of(self, step: int) -> tuple[dict[str, float], list[Event]]:
        if step not in self._waiting:
            self.release(before=step)
        return self._waiting.setdefault(step, ({}, []))

    def _put(self, record: StepRecord) -> None:
        for runner in self._runners:
            runner.put(record)


def _lazily(entries: StepTable, series: Sequence[Series]) -> Callable[[], Spectra]:
    """Return a function that decodes a step's spectra when it is first called."""
    named: list[Series] = [series[int(i)] for i in entries.series]
    decoded: dict[tuple[str, str], Spectrum] = {}

    def spectra() -> Spectra:
        if not decoded:
            made: dict[tuple[str, str], Spectrum] = {}
            blocks = np.zeros(len(entries), dtype=np.int64) if entries.blocks is None else entries.blocks
            for s, scale, row, block in zip(named, entries.scales, entries.rows, blocks.tolist(), strict=True):
                spectrum, key = true_spectrum(row, s.format, float(scale), block), (s.collection, s.name)
                made[key] = made[key] + spectrum if key in made else spectrum
            decoded.update(made)
        return decoded

    return spectra
