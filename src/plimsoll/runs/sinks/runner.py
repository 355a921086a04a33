"""Runner of a sink in a background thread, with a bounded queue."""

import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from plimsoll.errors import ArgumentError
from plimsoll.runs.records import Sink, StepRecord
from plimsoll.runs.user_messages import warn_user

# So many failures one after the other, and the sink is left alone.
MAX_FAILURES = 10

# A mark in the queue, for flushing: set once everything before it is done.
_Mark = threading.Event


class SinkRunner:
    """Runner of one sink. No method raises; `flush`, `close`, `has_ended` wait.

    In a forked child it does nothing: the thread stays with the parent.

    Args:
        sink: The sink.
        queue_steps: Number of records that may wait. Beyond it the oldest is dropped.

    Attributes:
        dropped: Number of records that the sink did not receive: the queue was full, or the sink was off or closed.
        failed: Number of records on which the sink raised.
        failure: Last failure, or None. The first failure of each kind is also a `RuntimeWarning`.
    """

    def __init__(self, sink: Sink, queue_steps: int = 256) -> None:
        if queue_steps < 1:
            raise ArgumentError(f"SinkRunner: expected queue_steps >= 1; got {queue_steps}. Give a positive number.")
        self.name = str(getattr(sink, "sink_name", type(sink).__name__))
        self.dropped = 0
        self.failed = 0
        self.failure: str | None = None
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
