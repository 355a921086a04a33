"""Server-sent events: what is sent when, to browsers that leave, stay away, are slow, or are too many."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the live page needs the extra serve: pip install '.[serve]'")

from plimsoll.report.live import waiting_browsers
from plimsoll.report.live.server.app import App, app
from plimsoll.report.live.waiting_browsers import EventStream, Streams
from plimsoll.runs import RunWriter
from tests.support.cases import each
from tests.support.patience import HANG_SECONDS
from tests.support.runs import making


class Browser:
    """A browser that has a stream open: what it was sent, and a way to leave."""

    def __init__(self) -> None:
        self.messages: list[Mapping[str, Any]] = []
        self.received, self.left = asyncio.Event(), asyncio.Event()
        self.ready = asyncio.Event()  # takes what it is sent
        self.ready.set()
        self.task: asyncio.Task[None] | None = None

    def open(self, made: Callable[..., Awaitable[None]], query: bytes = b"", method: str = "GET") -> "Browser":
        scope = {"type": "http", "method": method, "path": "/api/stream", "raw_path": b"/api/stream",
                 "query_string": query, "headers": [(b"host", b"localhost:80")], "asgi": {"version": "3.0"},
                 "http_version": "1.1", "scheme": "http", "server": ("localhost", 80), "root_path": ""}  # fmt: skip
        self.task = asyncio.create_task(made(scope, self._receive, self._send))
        return self

    async def _receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.ready.wait()
        self.messages.append(message)
        self.received.set()

    @property
    def text(self) -> str:
        return b"".join(m.get("body", b"") for m in self.messages).decode()

    @property
    def events(self) -> list[tuple[str, Any]]:
        parts = [block.split("\n") for block in self.text.split("\n\n") if block.startswith("event: ")]
        return [(event.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for event, data in parts]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while not holds():
                self.received.clear()
                await self.received.wait()

    async def leave(self) -> None:
        self.left.set()
        async with asyncio.timeout(HANG_SECONDS):
            await self.task


def streamed(test: Callable[[App, Path], Awaitable[None]], folder: Path) -> None:
    """Runs a test in an event loop, with an application that looks often; nothing may be left in the loop."""

    async def run() -> None:
        made = app(folder, poll_seconds=0.01)
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await test(made, folder)
        finally:
            made.close()
        async with asyncio.timeout(HANG_SECONDS):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0)
        assert made.streams.open == made.streams.tasks == 0

    asyncio.run(run())


def test_a_page_hears_of_new_data_and_of_new_runs(tmp_path: Path) -> None:
    async def check(made: App, folder: Path) -> None:
        writer = RunWriter(folder / "a b", flush_seconds=600)
        making.write_steps(writer, [3])
        writer.flush()
        browser = Browser().open(made, b"run=a%20b")
        await browser.until(lambda: {event for event, _ in browser.events} == {"run", "runs"})
        first = next(data for event, data in browser.events if event == "run")
        assert (first["id"], first["last_step"]) == ("a b", 3)

        making.write_steps(writer, [4])
        writer.flush()
        await browser.until(lambda: ("run", 4) in [(e, d.get("last_step")) for e, d in browser.events])
        newest = [data for event, data in browser.events if event == "run"][-1]
        assert newest["token"] != first["token"]

        version = browser.events[-1][1].get("version")
        seen = len(browser.events)
        RunWriter(folder / "other").close()
        await browser.until(lambda: any(e == "runs" and d["version"] != version for e, d in browser.events[seen:]))
        writer.close()
        await browser.leave()

    streamed(check, tmp_path)


def test_the_answer_is_an_event_stream(tmp_path: Path) -> None:
    async def check(made: App, _: Path) -> None:
        browser = Browser().open(made)
        await browser.until(lambda: "runs" in browser.text)
        headers = dict(browser.messages[0]["headers"])
        assert headers[b"content-type"].startswith(b"text/event-stream")
        assert headers[b"cache-control"] == b"no-store" and b"content-security-policy" in headers
        await browser.leave()

    streamed(check, tmp_path)


def test_a_browser_that_leaves_frees_its_stream_and_the_last_one_the_watching(tmp_path: Path) -> None:
    async def check(made: App, folder: Path) -> None:
        making.written(folder / "a", [1])
        browsers = [Browser().open(made, b"run=a") for _ in range(3)]
        for browser in browsers:
            await browser.until(lambda browser=browser: len(browser.events) >= 2)
        assert (made.streams.open, made.streams.tasks) == (3, 2)  # one looks after the run, one after the list
        await browsers[0].leave()
        assert (made.streams.open, made.streams.tasks) == (2, 2)
        await browsers[1].leave()
        await browsers[2].leave()
        assert (made.streams.open, made.streams.tasks) == (0, 0)

    streamed(check, tmp_path)


@each("turns", range(-4, 9))
def test_a_browser_may_leave_in_the_moment_in_which_it_is_told_something(turns: int) -> None:
    async def check() -> None:
        streams = Streams(lambda key: {"n": 0}, poll_seconds=3600)
        browser = Browser().open(EventStream(streams, ()))
        await browser.until(lambda: len(browser.events) == 1)
        stream = next(iter(streams._watching[""]))

        async def tell() -> None:
            for _ in range(max(turns, 0)):
                await asyncio.sleep(0)
            stream.put("", {"n": 1})

        telling = asyncio.create_task(tell())
        for _ in range(max(-turns, 0)):
            await asyncio.sleep(0)
        await browser.leave()
        await telling
        assert streams.open == streams.tasks == 0

    asyncio.run(check())


def test_who_comes_later_is_told_the_state_at_once(tmp_path: Path) -> None:
    looks: list[str] = []

    async def check() -> None:
        streams = Streams(lambda key: (looks.append(key), {"key": key})[1], poll_seconds=3600)
        first, later = Browser().open(EventStream(streams, ("a",))), Browser()
        await first.until(lambda: len(first.events) == 2)
        later.open(EventStream(streams, ("a",)))
        await later.until(lambda: len(later.events) == 2)
        assert sorted(looks) == ["", "a"]
        await first.leave()
        await later.leave()

    asyncio.run(check())


def test_one_stream_follows_several_runs(tmp_path: Path) -> None:
    async def check(made: App, folder: Path) -> None:
        for name in ("a", "b", "c"):
            RunWriter(folder / name).close()
        browser = Browser().open(made, b"run=a&run=b&run=a")
        await browser.until(lambda: {d.get("id") for e, d in browser.events if e == "run"} == {"a", "b"})
        assert made.streams.tasks == 3
        await browser.leave()
        many = Browser().open(made, "&".join(f"run={n}" for n in range(13)).encode())
        await many.until(lambda: bool(many.text))
        assert many.messages[0]["status"] == 422 and "at most 12 runs" in json.loads(many.text)["error"]
        await many.leave()

    streamed(check, tmp_path)


def test_one_state_is_told_once(tmp_path: Path) -> None:
    looks: list[str] = []

    async def check() -> None:
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def look(key: str) -> Mapping[str, object]:
            looks.append(key)
            if len(looks) > 20:
                loop.call_soon_threadsafe(done.set)
            return {"state": "same"}

        streams = Streams(look, poll_seconds=0.0)
        browser = Browser().open(EventStream(streams, ()))
        async with asyncio.timeout(HANG_SECONDS):
            await done.wait()
        assert len(browser.events) == 1
        await browser.leave()

    asyncio.run(check())


def test_a_slow_browser_is_told_the_newest_and_nothing_piles_up(tmp_path: Path) -> None:
    async def check() -> None:
        state, reached = [0], asyncio.Event()
        loop = asyncio.get_running_loop()

        def look(_: str) -> Mapping[str, object]:
            state[0] += 1
            if state[0] == 50:
                loop.call_soon_threadsafe(reached.set)
            return {"n": min(state[0], 50)}

        streams = Streams(look, poll_seconds=0.0)
        slow = Browser().open(EventStream(streams, ()))
        await slow.until(lambda: len(slow.events) >= 1)
        slow.ready.clear()
        async with asyncio.timeout(HANG_SECONDS):
            await reached.wait()
        waiting = next(iter(streams._watching[""]))
        assert len(waiting.waiting) <= 1
        slow.ready.set()
        await slow.until(lambda: slow.events[-1][1] == {"n": 50})
        assert len(slow.events) < 50
        await slow.leave()

    asyncio.run(check())


def test_silence_is_filled_with_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_browsers, "_KEEP_ALIVE_SECONDS", 0.01)

    async def check(made: App, _: Path) -> None:
        browser = Browser().open(made)
        await browser.until(lambda: browser.text.count(": still here\n\n") >= 2)
        await browser.leave()

    streamed(check, tmp_path)


def test_a_run_that_is_not_there_is_told_as_gone(tmp_path: Path) -> None:
    async def check(made: App, _: Path) -> None:
        browser = Browser().open(made, b"run=..%2Fnone")
        await browser.until(lambda: any(event == "run" for event, _ in browser.events))
        assert ("run", {"id": "../none", "token": "", "last_step": -1}) in browser.events
        await browser.leave()

    streamed(check, tmp_path)


def test_there_are_only_so_many_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_browsers, "MOST_STREAMS", 2)

    async def check(made: App, _: Path) -> None:
        browsers = [Browser().open(made) for _ in range(2)]
        for browser in browsers:
            await browser.until(lambda browser=browser: "event" in browser.text)
        third = Browser().open(made)
        await third.until(lambda: len(third.messages) >= 2)
        assert third.messages[0]["status"] == 429 and "at most 2 open streams" in json.loads(third.text)["error"]
        await browsers[0].leave()
        fourth = Browser().open(made)
        await fourth.until(lambda: "event" in fourth.text)
        for browser in (browsers[1], fourth):
            await browser.leave()

    streamed(check, tmp_path)


def test_head_ends_at_once(tmp_path: Path) -> None:
    async def check(made: App, _: Path) -> None:
        browser = Browser().open(made, method="HEAD")
        async with asyncio.timeout(HANG_SECONDS):
            await browser.task
        assert browser.messages[0]["status"] == 200 and browser.text == ""

    streamed(check, tmp_path)


def test_the_end_of_the_server_ends_the_streams(tmp_path: Path) -> None:
    async def check(made: App, _: Path) -> None:
        browser = Browser().open(made)
        await browser.until(lambda: "event" in browser.text)
        made.close()
        async with asyncio.timeout(HANG_SECONDS):
            await browser.task
        assert browser.messages[-1] == {"type": "http.response.body", "body": b""}
        late = Browser().open(made)
        async with asyncio.timeout(HANG_SECONDS):
            await late.task

    streamed(check, tmp_path)


def test_a_look_that_fails_is_not_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        looks: list[str] = []

        def look(key: str) -> Mapping[str, object]:
            looks.append(key)
            if len(looks) < 3:
                raise RuntimeError("a run that is odd")
            return {"version": len(looks)}

        browser = Browser().open(EventStream(Streams(look, poll_seconds=0.001), ()))
        await browser.until(lambda: bool(browser.events))
        assert browser.events[0] == ("runs", {"version": 3})
        await browser.leave()

    asyncio.run(check())
    assert caplog.text.count("could not be looked at") == 2
