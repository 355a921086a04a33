"""`Streams`: server-sent events that tell the page news of a run or the list.

One task polls each run that anybody watches, and one the list, for any number of browsers: it compares tokens, which
takes a few `stat` calls while nothing changes. A browser that leaves frees its stream at once, and the last one the
task. News that a slow browser has not taken yet is replaced by newer news of the same run, so queues stay short.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence

from plimsoll.report.live.security import Receive, Scope, Send
from plimsoll.report.live.server.turns import BusyError

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
        """Take one of the few places for streams, from before the first byte is sent.

        Raises:
            BusyError: None is left.
        """
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
