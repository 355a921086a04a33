"""What a request, a connection and a run can take of the live page: each has its limit, and the others go on."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the live page needs the extra serve: pip install '.[serve]'")

from starlette.testclient import TestClient

from plimsoll.errors import StateError
from plimsoll.report.live import live_runs, waiting_browsers
from plimsoll.report.live.live_runs import Live
from plimsoll.report.live.security import LONGEST_HEAD_BYTES
from plimsoll.report.live.server import answers, uvicorn_loop
from plimsoll.report.live.server.app import app
from plimsoll.report.live.waiting_browsers import MOST_STREAMS, BusyError, Turns
from tests.report.test_server_list import Judged, listed
from tests.support.diagnosis.stories import make_story
from tests.support.patience import HANG_SECONDS, wait_until
from tests.support.report.served import Served, served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("limits")
    make_story(samples=2).write(root / "good")
    make_story(samples=2).write(root / "bad")
    return root


@pytest.fixture
def site(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """The live page; what sets no limit itself reaches none, however long the machine takes between two lines."""
    for limit in ("_REQUEST_SECONDS", "_SENDING_SECONDS"):
        monkeypatch.setattr(uvicorn_loop, limit, HANG_SECONDS)
    with served(folder) as found:
        yield found


def connected(site: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", site.port), HANG_SECONDS)


def head(site: Served, path: str, *more: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{site.port}", *more, "", ""]).encode()


def until_closed(line: socket.socket) -> bytes:
    """What the server sends before it ends the connection, be it in order or not."""
    found = b""
    with contextlib.suppress(ConnectionResetError):  # not in order: what came before is the answer
        while more := line.recv(1 << 16):
            found += more
    return found


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


# -- connections


def test_of_three_hundred_streams_as_many_are_open_as_are_allowed(site: Served) -> None:
    with ExitStack() as lines:
        opened = [lines.enter_context(connected(site)) for _ in range(200)]
        for line in opened:  # all before any of them is answered
            line.sendall(head(site, "/api/stream?run=good"))
        firsts = [line.recv(1 << 12) for line in opened]
        counts = {found: [status(each) for each in firsts].count(found) for found in (200, 429)}
        assert counts == {200: MOST_STREAMS, 429: 200 - MOST_STREAMS}
        assert site.app.streams.open == MOST_STREAMS
    wait_until(lambda: site.app.streams.open == 0)


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET ", b"GET / HTTP/1.1\r\nHost: x", b"GET /api/runs HTTP/1.1\r\n" + b"A: b\r\n" * 20,
     b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\nhalf"],
    ids=["nothing", "a word", "a line", "headers", "half a body"],
)  # fmt: skip
def test_what_is_half_sent_is_cut_off(site: Served, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(uvicorn_loop, "_REQUEST_SECONDS", 0.05)
    with connected(site) as line:
        line.sendall(sent)
        until_closed(line)  # or hangs
    assert len(site.connections) == 0


def test_bytes_that_trickle_in_gain_no_time(site: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_loop, "_REQUEST_SECONDS", 0.2)
    ended = threading.Event()
    with connected(site) as line:

        def trickle() -> None:
            with contextlib.suppress(OSError):  # the server has cut the connection off, as it should
                while not ended.wait(0.01):
                    line.sendall(b"A")

        thread = threading.Thread(target=trickle)
        thread.start()
        until_closed(line)
        ended.set()
        thread.join()


def test_an_answer_under_way_is_not_cut_off(site: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def slow(columns: list[str]) -> bytes:
        asked.set()
        assert go_on.wait(HANG_SECONDS)
        return b"{}"

    monkeypatch.setattr(site.app.answers, "runs", slow)
    with connected(site) as line:
        line.sendall(head(site, "/api/runs", "Connection: close"))
        assert asked.wait(HANG_SECONDS)
        monkeypatch.setattr(uvicorn_loop, "_REQUEST_SECONDS", 0.05)
        with connected(site) as other:
            until_closed(other)  # which came later, and sends nothing
        go_on.set()
        assert until_closed(line).endswith(b"{}")


def test_who_does_not_read_is_cut_off(site: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.connect(("127.0.0.1", site.port))
    with line:
        wait_until(lambda: len(site.connections) == 1)
        monkeypatch.setattr(uvicorn_loop, "_SENDING_SECONDS", 0.05)
        line.sendall(4 * head(site, "/assets/plotly.min.js"))  # at once: the line may be cut off after the first
        wait_until(lambda: len(site.connections) == 0)


def test_there_are_only_so_many_connections(site: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_loop, "MOST_CONNECTIONS", 3)
    with ExitStack() as lines:
        for _ in range(3):
            lines.enter_context(connected(site))
        wait_until(lambda: len(site.connections) == 3)
        with connected(site) as fourth:
            refusal = until_closed(fourth)
        assert status(refusal) == 429 and refusal.endswith(b"ask again.\n")
    wait_until(lambda: len(site.connections) == 0)
    with connected(site) as again:
        again.sendall(head(site, "/", "Connection: close"))
        assert status(until_closed(again)) == 200


# -- requests


@pytest.mark.parametrize(
    ("path", "more", "method", "expected"),
    [
        ("/?" + "a" * LONGEST_HEAD_BYTES, (), "GET", {400, 431}),
        ("/" + "a" * LONGEST_HEAD_BYTES, (), "GET", {400, 431}),
        ("/", ("X: " + "a" * LONGEST_HEAD_BYTES,), "GET", {400, 431}),
        ("/", ("X: a",) * LONGEST_HEAD_BYTES, "GET", {400, 431}),
        ("/api/runs", ("Content-Length: 5",), "GET", {413}),
        ("/api/stream", ("Transfer-Encoding: chunked",), "GET", {413}),
        ("/api/runs", ("Content-Length: 999999999999",), "POST", {405}),
    ],
    ids=["query", "path", "header", "headers", "content", "chunks", "post"],
)
def test_a_request_too_large_is_refused_in_one_line(
    site: Served, path: str, more: tuple[str, ...], method: str, expected: set[int]
) -> None:
    with connected(site) as line:
        with suppress(OSError):  # it was refused before its end
            line.sendall(head(site, path, *more, method=method))
        answer = until_closed(line)
    assert status(answer) in expected
    assert len(answer.partition(b"\r\n\r\n")[2].splitlines()) == 1


# -- answers


class Held:
    """Answers that wait until they are let go."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Semaphore(0), threading.Event()

    def __call__(self) -> bytes:
        self.begun.release()
        assert self.go_on.wait(HANG_SECONDS)
        return b"late"


def test_a_run_that_hangs_leaves_the_others_answered() -> None:
    async def check() -> None:
        turns, held = Turns(), Held()
        stuck = [asyncio.create_task(turns.answer(("bad",), held)) for _ in range(20)]
        for _ in range(waiting_browsers._THREADS_OF_RUN):
            await asyncio.to_thread(held.begun.acquire)
        assert [await turns.answer((f"good {i}",), lambda: b"soon") for i in range(50)] == [b"soon"] * 50
        assert not held.begun.acquire(blocking=False)  # no more threads are at the bad one
        held.go_on.set()
        assert await asyncio.gather(*stuck) == [b"late"] * 20

    asyncio.run(check())


def test_an_answer_has_its_time_and_then_its_run_is_refused_at_once() -> None:
    async def check() -> None:
        turns, held = Turns(), Held()
        begin = turns._begin

        def begun(question: Any) -> None:
            """A question whose time is over before its thread has begun needs no thread."""
            begin(question)
            assert held.begun.acquire(timeout=HANG_SECONDS)

        turns.patience_seconds, turns._begin = 0.02, begun
        for _ in range(waiting_browsers._THREADS_OF_RUN):
            with pytest.raises(StateError, match="expected an answer within 0 s"):
                await turns.answer(("bad",), held)
        turns.patience_seconds, turns._begin = HANG_SECONDS, begin
        for runs in (("bad",), ("bad", "good"), ("good", "bad")):
            with pytest.raises(BusyError, match="earlier answers are still being made"):
                await turns.answer(runs, held)
        assert await turns.answer(("good",), lambda: b"soon") == b"soon"
        held.go_on.set()
        await asyncio.to_thread(wait_until, lambda: not turns._under_way)
        assert await turns.answer(("bad",), lambda: b"again") == b"again"

    asyncio.run(check())


def test_many_runs_that_hang_leave_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_browsers, "_THREADS", 4)

    async def check() -> None:
        turns, held = Turns(), Held()
        turns.patience_seconds = 0.05
        stuck = [asyncio.create_task(turns.answer((f"bad {i}",), held)) for i in range(20)]
        assert all(isinstance(each, StateError) for each in await asyncio.gather(*stuck, return_exceptions=True))
        turns.patience_seconds = HANG_SECONDS
        assert await turns.answer(("good",), lambda: b"soon") == b"soon"
        held.go_on.set()

    asyncio.run(check())


def test_questions_to_a_run_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_browsers, "MOST_OF_RUN", 5)

    async def check() -> None:
        turns, held = Turns(), Held()
        waiting = [asyncio.create_task(turns.answer(("bad",), held)) for _ in range(5)]
        await asyncio.to_thread(held.begun.acquire)
        with pytest.raises(BusyError, match="at most 5 questions"):
            await turns.answer(("bad",), held)
        held.go_on.set()
        await asyncio.gather(*waiting)

    asyncio.run(check())


@pytest.mark.parametrize("error", [MemoryError, RecursionError, OverflowError, ValueError, KeyError, AssertionError])
def test_a_run_that_fails_is_no_500_and_costs_itself_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    def fails(view: Any, *_: object) -> object:
        if view.run.path.name == "bad":
            raise error("in the depths\x1b[31m")
        return {"fine": True}

    monkeypatch.setattr("plimsoll.report.live.server.answers.whatif_answer", fails)
    made = app(folder)
    asked = TestClient(made, base_url="http://localhost", raise_server_exceptions=False)
    answer = asked.get("/api/runs/bad/whatif?format=fp16")
    assert answer.status_code == 409 and list(answer.json()) == ["error"] and "depths" not in answer.text
    assert asked.get("/api/runs/good/whatif?format=fp16").json()["fine"]
    made.close()


def test_who_compares_with_a_run_in_use_keeps_nobody_waiting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run is free while one is waited for, whichever of the two comes first."""
    live, held, compared = Live(folder), Held(), threading.Barrier(3)
    holder = threading.Thread(target=lambda: live.answer("bad", None, lambda _: held()))
    holder.start()
    held.begun.acquire()

    def compare(first: str, second: str) -> None:
        compared.wait()
        assert live.answer_of_two(first, second, "q", lambda a, b: f"{a.run.path.name} {b.run.path.name}".encode()) == (
            f"{first} {second}".encode()
        )

    threads = [threading.Thread(target=compare, args=pair) for pair in (("good", "bad"), ("bad", "good"))]
    for thread in threads:
        thread.start()
    compared.wait()
    for _ in range(20):
        assert live.answer("good", None, lambda _: b"soon")[1] == b"soon"
    held.go_on.set()
    for thread in (holder, *threads):
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()


def test_two_runs_that_are_not_to_be_had_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live, held = Live(folder), Held()
    holder = threading.Thread(target=lambda: live.answer("bad", None, lambda _: held()))
    holder.start()
    held.begun.acquire()
    monkeypatch.setattr(live_runs, "_PATIENCE_SECONDS", 0.01)
    with pytest.raises(StateError, match="Ask again"):
        live.answer_of_two("good", "bad", "q", lambda *_: b"")
    held.go_on.set()
    holder.join()


def test_a_verdict_that_hangs_leaves_the_others_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()

    class Judging(Judged):
        def _judge(self, run: Any) -> str:
            return held().decode() if run.id == "bad" else super()._judge(run)

    runs = Judging(listed("bad", modified=2.0), listed("good"))
    monkeypatch.setattr(answers, "_PATIENCE_SECONDS", 0.01)
    runs.verdicts.judge_next()
    monkeypatch.setattr(answers, "_PATIENCE_SECONDS", HANG_SECONDS)
    runs.verdicts.judge_next()
    assert runs.verdicts.judge_next() is None
    assert runs.verdicts.of(listed("good")) is not None and runs.verdicts.of(listed("bad")) is None
    held.go_on.set()
    wait_until(lambda: runs.verdicts.of(listed("bad")))


def test_the_page_itself_needs_no_thread(site: Served) -> None:
    held = Held()
    with ExitStack() as lines:
        site.app.answers.runs = lambda columns: held()
        for _ in range(60):
            line = lines.enter_context(connected(site))
            line.sendall(head(site, "/api/runs"))
        assert held.begun.acquire(timeout=HANG_SECONDS)
        with connected(site) as page:
            page.sendall(head(site, "/", "Connection: close"))
            assert status(until_closed(page)) == 200
        held.go_on.set()


def test_json_is_what_is_refused_in(site: Served) -> None:
    with connected(site) as line:
        line.sendall(head(site, "/api/runs", "Content-Length: 5"))
        assert json.loads(until_closed(line).partition(b"\r\n\r\n")[2]) == {
            "error": "plimsoll: the live page takes no content. Ask without a body."
        }
