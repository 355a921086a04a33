"""`Streams`: server-sent events, which tell the page that a run, or the list, has something new.

One task looks after each run that anybody watches, and one after the list, however many watch: it compares tokens,
which takes a few `stat` calls while nothing changes. A browser that leaves frees its stream at once, and the last one
the task. What a slow browser has not taken yet is replaced by what is newer, so nothing piles up.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Mapping

from plimsoll.report.live.security import Receive, Scope, Send
from plimsoll.report.live.server.turns import BusyError

MOST_STREAMS = 64
_KEEP_ALIVE_SECONDS = 15.0
_RUNS = ""  # the key of the list among those of runs

_LOG = logging.getLogger("plimsoll")

# The state of a run (by id) or of the list (by ""): the event's data, None where there is none.
Look = Callable[[str], "Mapping[str, object] | None"]


class _Stream:
    """Queue of one browser: news that it has not received, the newest of each kind."""

    def __init__(self) -> None:
        self.waiting: dict[str, Mapping[str, object]] = {}
        self.woken = asyncio.Event()

    def tell(self, event: str, data: Mapping[str, object]) -> None:
        self.waiting[event] = data
        self.woken.set()


class Streams:
    """All open streams, and the tasks that look. For use within one event loop."""

    def __init__(self, look: Look, *, poll_seconds: float = 1.0) -> None:
        self._look, self._poll_seconds = look, poll_seconds
        self._watching: dict[str, set[_Stream]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._last: dict[str, Mapping[str, object]] = {}
        self._closed = False
        self.open = 0

    @contextlib.contextmanager
    def place(self) -> Generator[None]:
        """One of the few places for streams, from before the first byte is sent. Raises `BusyError` if none is left."""
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
        """Ends all streams; the application ends, too."""
        self._closed = True
        for stream in {each for streams in self._watching.values() for each in streams}:
            stream.woken.set()

    async def events(self, run_id: str | None) -> AsyncGenerator[bytes]:
        """The events for one browser, which may watch a run beside the list; comments keep the line open."""
        stream = _Stream()
        keys = [_RUNS] if run_id is None else [_RUNS, run_id]
        for key in keys:
            self._begin(key, stream)
        try:
            yield b"retry: 2000\n\n"
            while not self._closed:
                told = await self._told(stream)
                if not self._closed:
                    yield told
        finally:
            for key in keys:
                self._end(key, stream)

    async def _told(self, stream: _Stream) -> bytes:
        try:  # not `wait_for`: Python 3.11's forgets a cancellation that comes in the moment something is told
            async with asyncio.timeout(_KEEP_ALIVE_SECONDS):
                await stream.woken.wait()
        except TimeoutError:
            return b": still here\n\n"
        stream.woken.clear()
        waiting, stream.waiting = stream.waiting, {}
        return b"".join(f"event: {event}\ndata: {json.dumps(data)}\n\n".encode() for event, data in waiting.items())

    def _begin(self, key: str, stream: _Stream) -> None:
        self._watching.setdefault(key, set()).add(stream)
        if key in self._last:
            stream.tell(_event(key), self._last[key])
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._watch(key))

    def _end(self, key: str, stream: _Stream) -> None:
        self._watching[key].discard(stream)
        if not self._watching[key]:
            del self._watching[key]
            self._last.pop(key, None)
            self._tasks.pop(key).cancel()

    async def _watch(self, key: str) -> None:
        """Looks again and again; tells the state that it finds first, and each that differs from the one before."""
        while True:
            try:
                found = await asyncio.to_thread(self._look, key)
            except Exception:  # noqa: BLE001  (the next look may go well, and the task is not begun again while anybody watches)
                _LOG.exception("plimsoll serve: %a could not be looked at", key)
                found = None
            if found is not None and found != self._last.get(key):
                self._last[key] = found
                for stream in self._watching.get(key, ()):
                    stream.tell(_event(key), found)
            await asyncio.sleep(self._poll_seconds)


def _event(key: str) -> str:
    return "runs" if key == _RUNS else "run"


class EventStream:
    """The ASGI answer with a stream's events. It ends when the browser leaves, also between two events."""

    def __init__(self, streams: Streams, run_id: str | None) -> None:
        self._streams, self._run_id = streams, run_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
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
        events = self._streams.events(self._run_id)
        try:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await events.aclose()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
