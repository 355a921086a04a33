"""Browsers that wait: for an answer, made in a thread, or for news of a run.

Both are bounded: a slow answer or a browser that takes nothing leaves the others.
"""

import asyncio
import contextlib
import json
import logging
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from plimsoll.errors import StateError
from plimsoll.report.live.security import Receive, Scope, Send

# -- `Turns`: answers in threads, few a run, so that a slow one leaves the others --------------------------------------

# What is read of a run is checked and bounded before it is computed with, so an answer ends; storage that hangs is what
# remains, and from that no process could be ended either. So an answer has a time, a run has few threads, and who asks
# about a run that has used up both is refused at once. Threads share what was read; processes would each read it.
PATIENCE_SECONDS = 60.0  # from question to answer
MOST_OF_RUN = 64  # questions to one run that wait or are being answered
_THREADS_OF_RUN = 2  # a verdict that is being made keeps no figure waiting
_THREADS = 32  # of all runs, those aside that have had their time


class BusyError(StateError):
    """More is asked for at a time than there is room for."""


@dataclass(kw_only=True, eq=False)
class _Question:
    """Question about some runs. `overdue`: still being made, but nobody waits."""

    runs: tuple[str, ...]
    make: Callable[[], bytes]
    answer: "Future[bytes]" = field(default_factory=Future[bytes])
    overdue: bool = False


class Turns:
    """Questions that wait and that are being answered, each on a run or two."""

    def __init__(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.patience_seconds = patience_seconds
        self._lock = threading.Lock()
        self._waiting: list[_Question] = []
        self._under_way: list[_Question] = []

    async def answer(self, runs: tuple[str, ...], make: Callable[[], bytes]) -> bytes:
        """Return what `make` returns; `BusyError` if too many, `StateError` if too slow."""
        question = _Question(runs=tuple(dict.fromkeys(runs)), make=make)
        self._begin(question)
        answer = asyncio.wrap_future(question.answer)
        done, _ = await asyncio.wait({answer}, timeout=self.patience_seconds)
        if not done:
            self._give_up(question)
            answer.cancel()
            raise StateError(
                f"serve: expected an answer within {self.patience_seconds:.0f} s; got none: this run, or its storage, "
                "takes longer. Ask again."
            )
        return answer.result()

    def _begin(self, question: _Question) -> None:
        with self._lock:
            asked = Counter(run for other in (*self._waiting, *self._under_way) for run in other.runs)
            overdue = Counter(run for other in self._under_way if other.overdue for run in other.runs)
            for run in question.runs:
                if asked[run] >= MOST_OF_RUN:
                    raise BusyError(
                        f"serve: expected at most {MOST_OF_RUN} questions to a run at a time; got one more. Ask again."
                    )
                if overdue[run] >= _THREADS_OF_RUN:
                    raise BusyError(
                        f"serve: expected a run that is answered about within {self.patience_seconds:.0f} s; got one "
                        "of which earlier answers are still being made. Ask again later."
                    )
            self._waiting.append(question)
        self._start()

    def _give_up(self, question: _Question) -> None:
        with self._lock:
            question.overdue = True
            if question in self._waiting:
                self._waiting.remove(question)
        self._start()

    def _start(self) -> None:
        """Start the next answers: the oldest first, of runs with a thread left."""
        with self._lock:
            busy = Counter(run for running in self._under_way for run in running.runs)
            room = _THREADS - sum(not running.overdue for running in self._under_way)
            for question in list(self._waiting):
                if room > 0 and all(busy[run] < _THREADS_OF_RUN for run in question.runs):
                    self._waiting.remove(question)
                    self._under_way.append(question)
                    busy.update(question.runs)
                    room -= 1
                    threading.Thread(target=self._make, args=(question,), name="plimsoll-answer", daemon=True).start()

    def _make(self, question: _Question) -> None:
        if question.answer.set_running_or_notify_cancel():
            try:
                question.answer.set_result(question.make())
            except BaseException as error:  # noqa: BLE001  (it is the asker's)
                question.answer.set_exception(error)
        with self._lock:
            self._under_way.remove(question)
        self._start()


# -- `Streams`: server-sent events that tell the page news of a run or the list ----------------------------------------

# One task polls each run that anybody watches, and one the list, for any number of browsers: it compares tokens, which
# takes a few `stat` calls while nothing changes. A browser that leaves frees its stream at once, and the last one the
# task. News that a slow browser has not taken yet is replaced by newer news of the same run, so queues stay short.

MOST_STREAMS = 64
MOST_RUNS = (
    12  # of one stream; a browser opens six connections to a server, so a comparison cannot have one for each run
)
_KEEP_ALIVE_SECONDS = 15.0
_RUNS = ""  # the key of the list among those of runs

_LOG = logging.getLogger("plimsoll")

# Returns the state of a run, by its id, or of the list, by "": the data of the event. None: there is none.
Look = Callable[[str], "Mapping[str, object] | None"]


class _Stream:
    """Queue of one browser: unsent news, the newest of each run and of the list."""

    def __init__(self) -> None:
        self.waiting: dict[str, Mapping[str, object]] = {}
        self.woken = asyncio.Event()

    def put(self, key: str, data: Mapping[str, object]) -> None:
        self.waiting[key] = data
        self.woken.set()


class Streams:
    """All open streams, and the tasks that poll. For use within one event loop."""

    def __init__(self, look: Look, *, poll_seconds: float = 1.0) -> None:
        self._look, self._poll_seconds = look, poll_seconds
        self._watching: dict[str, set[_Stream]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._last: dict[str, Mapping[str, object]] = {}
        self._closed = False
        self.open = 0

    @contextlib.contextmanager
    def place(self) -> Generator[None]:
        """Take one of the few places for streams, from before the first byte is sent; BusyError if none is left."""
        if self.open >= MOST_STREAMS:
            raise BusyError(
                f"serve: expected at most {MOST_STREAMS} open streams; got one more. Close a page that follows a run."
            )
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    @property
    def tasks(self) -> int:
        """Number of tasks that watch something."""
        return len(self._tasks)

    def close(self) -> None:
        """End all streams, as the application ends."""
        self._closed = True
        for stream in {stream for streams in self._watching.values() for stream in streams}:
            stream.woken.set()

    async def events(self, run_ids: Sequence[str]) -> AsyncGenerator[bytes]:
        """Yield one browser's events of runs and list. Comments keep the line open."""
        stream = _Stream()
        keys = list(dict.fromkeys([_RUNS, *run_ids]))
        for key in keys:
            self._start(key, stream)
        try:
            yield b"retry: 2000\n\n"
            while not self._closed:
                news = await self._news(stream)
                if not self._closed:
                    yield news
        finally:
            for key in keys:
                self._stop(key, stream)

    async def _news(self, stream: _Stream) -> bytes:
        # Not `wait_for`: that of Python 3.11 forgets a cancellation that comes in the moment the event is set.
        try:
            async with asyncio.timeout(_KEEP_ALIVE_SECONDS):
                await stream.woken.wait()
        except TimeoutError:
            return b": still here\n\n"
        stream.woken.clear()
        waiting, stream.waiting = stream.waiting, {}
        return b"".join(f"event: {_event(key)}\ndata: {json.dumps(data)}\n\n".encode() for key, data in waiting.items())

    def _start(self, key: str, stream: _Stream) -> None:
        self._watching.setdefault(key, set()).add(stream)
        if key in self._last:
            stream.put(key, self._last[key])
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._watch(key))

    def _stop(self, key: str, stream: _Stream) -> None:
        self._watching[key].discard(stream)
        if not self._watching[key]:
            del self._watching[key]
            self._last.pop(key, None)
            self._tasks.pop(key).cancel()

    async def _watch(self, key: str) -> None:
        """Poll one run or the list, and send each state that differs from the last."""
        while True:
            try:
                state = await asyncio.to_thread(self._look, key)
            except Exception:  # noqa: BLE001  (the next poll may succeed, and no other task would poll this key)
                _LOG.exception("plimsoll serve: %a could not be looked at", key)
                state = None
            if state is not None and state != self._last.get(key):
                self._last[key] = state
                for stream in self._watching.get(key, ()):
                    stream.put(key, state)
            await asyncio.sleep(self._poll_seconds)


def _event(key: str) -> str:
    return "runs" if key == _RUNS else "run"


class EventStream:
    """ASGI answer of a stream's events, until the browser leaves, even between two."""

    def __init__(self, streams: Streams, run_ids: Sequence[str]) -> None:
        self._streams, self._run_ids = streams, run_ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        with self._streams.place():
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"),
                   (b"x-accel-buffering", b"no")]  # fmt: skip
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        events = self._streams.events(self._run_ids)
        try:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await events.aclose()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
