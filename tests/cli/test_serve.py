"""``plimsoll serve``: what it prints, what it refuses, and how it ends."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

pytest.importorskip("fastapi", reason="the live page needs the extra serve: pip install '.[serve]'")

from typer.testing import CliRunner, Result

from plimsoll.cli import app
from plimsoll.errors import ArgumentError, MissingExtraError
from plimsoll.report.live.server import launch
from plimsoll.runs import RunWriter, Scalars
from tests.support import processes
from tests.support.patience import HANG_SECONDS, wait_until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with RunWriter(tmp_path / "runs" / "a") as writer:
        writer.write(Scalars(step=0, values={"loss": 1.0}))
    return tmp_path / "runs"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """The applications that were to run, and their ports; none does."""
    from plimsoll.report.live.server import uvicorn_loop

    made: list[tuple[Any, int]] = []
    monkeypatch.setattr(
        uvicorn_loop, "run", lambda page, listener: made.append((page, listener.getsockname()[1])) or page.close()
    )
    monkeypatch.delenv("PLIMSOLL_TOKEN", raising=False)
    return made


def serve(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["serve", *(str(a) for a in arguments)])


def test_it_says_what_it_serves_and_where(folder: Path, ran: list[tuple[Any, int]]) -> None:
    result = serve(folder, "--port", 0)
    assert result.exit_code == 0, result.stderr
    port = ran[0][1]
    lines = result.stdout.splitlines()
    assert lines[:2] == [f"Runs in {folder}", f"Live page: http://127.0.0.1:{port}/"]
    assert f"ssh -L {port}:localhost:{port}" in result.stdout and "token" not in result.stdout


def test_a_store_is_named_with_how_often_it_is_listed(folder: Path, ran: list[tuple[Any, int]]) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(f"{folder}/", "/bucket/runs/", recursive=True)
    result = serve("memory://bucket/runs", "--port", 0)
    memory.rm("/bucket", recursive=True)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "Runs in memory://bucket/runs"
    assert lines[2] == "The store is listed every 10 s while a page is open."
    assert ran[0][0].streams._poll_seconds == 10.0


def test_another_address_asks_for_a_token_which_is_made(folder: Path, ran: list[tuple[Any, int]]) -> None:
    tokens = set()
    for _ in range(2):
        result = serve(folder, "--host", "0.0.0.0", "--port", 0)
        assert result.exit_code == 0, result.stderr
        found = re.search(r"http://\S+:(\d+)/\?token=(\S{32,})", result.stdout)
        assert found is not None and int(found[1]) == ran[-1][1]
        assert ran[-1][0]._gate._token == found[2]
        assert "Anyone with this URL can read the runs" in result.stdout
        tokens.add(found[2])
    assert len(tokens) == 2


@pytest.mark.parametrize("how", ["option", "environment"])
def test_a_token_may_be_given(
    folder: Path, ran: list[tuple[Any, int]], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "environment":
        monkeypatch.setenv("PLIMSOLL_TOKEN", "short")
    result = serve(folder, "--port", 0, *(["--token", "short"] if how == "option" else []))
    assert "?token=short" in result.stdout and ran[0][0]._gate._token == "short"


def test_the_page_goes_by_its_address_and_the_names_allowed(folder: Path, ran: list[tuple[Any, int]]) -> None:
    serve(folder, "--port", 0, "--allow-host", "box.example:80", "--allow-host", "proxy")
    page, port = ran[0]
    assert page._gate._hosts == {
        f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "box.example:80", "proxy"
    }  # fmt: skip


def test_a_browser_is_opened_when_asked(
    folder: Path, ran: list[tuple[Any, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    serve(folder, "--port", 0)
    assert opened == []
    serve(folder, "--port", 0, "--open")
    assert opened == [f"http://127.0.0.1:{ran[1][1]}/"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "65536"], "expected a port from 0 to 65535; got 65536"),
        (["--host", "no.such.host.invalid"], "got --host 'no.such.host.invalid', which is not known"),
        (["--host", "192.0.2.1", "--port", "0"], "expected an address of this machine; got --host '192.0.2.1'"),
        (["--host", "0.0.0.0", "--port", "0", "--token", "short"], "a token of at least 16 characters"),
        (["--port", "0", "--token", "tökén"], "a token of printable ASCII"),
    ],
)
def test_what_cannot_be_served_is_an_error(
    folder: Path, ran: list[tuple[Any, int]], arguments: list[str], message: str
) -> None:
    result = serve(folder, *arguments)
    assert result.exit_code == 2 and message in result.stderr and not ran
    assert len(result.stderr.splitlines()) == 1


def test_a_folder_that_is_none_is_an_error(tmp_path: Path, ran: list[tuple[Any, int]]) -> None:
    result = serve(tmp_path / "none", "--port", 0)
    assert result.exit_code == 2 and "serve: expected a folder that runs are written to" in result.stderr and not ran


def test_a_port_in_use_is_named(folder: Path, ran: list[tuple[Any, int]]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = serve(folder, "--port", port)
    assert result.exit_code == 2 and f"got port {port}, which another program" in result.stderr
    assert "--port 0" in result.stderr and not ran


def test_the_port_is_free_again_after_a_refusal(
    tmp_path: Path, ran: list[tuple[Any, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked of the socket: another program may have taken the port in the next moment."""
    listened, listening = list[socket.socket](), launch._listening

    def noted(host: str, port: int) -> Any:
        place = listening(host, port)
        listened.append(place.listener)
        return place

    monkeypatch.setattr(launch, "_listening", noted)
    assert "expected a folder" in serve(tmp_path / "none", "--port", 0).stderr
    assert [listener.fileno() for listener in listened] == [-1]


def test_its_threads_end_before_it_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would end those that are within a function of C++ by aborting the process."""
    from plimsoll.report.live.server import uvicorn_loop

    others, listeners, loaded = set(threading.enumerate()), list[socket.socket](), list[str]()

    def looked_at(page: Any, listener: socket.socket) -> None:
        listeners.append(listener)
        page.answers.verdicts.looked_at()
        page.close()

    def load() -> None:
        wait_until(lambda: listeners and listeners[0].fileno() == -1)
        loaded.append("all")

    monkeypatch.setattr(uvicorn_loop, "run", looked_at)
    monkeypatch.setattr(launch, "_load_slow_packages", load)
    monkeypatch.setattr(launch, "_PARTING_SECONDS", HANG_SECONDS)
    launch.serve(folder, port=0)
    assert loaded == ["all"] and not [t for t in set(threading.enumerate()) - others if t.name.startswith("plimsoll")]


def test_an_interrupt_while_a_thread_is_started_is_an_interrupt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "plimsoll-packages":
            threading._limbo[thread] = thread  # type: ignore[attr-defined]  # as while it is being started
            raise KeyboardInterrupt
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(threading, "_limbo", {})
    with pytest.raises(KeyboardInterrupt):
        launch.serve(folder, port=0)


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "plotly"])
def test_without_the_extra_the_install_line_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    whole = launch.importlib.util.find_spec
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None if name == package else whole(name))
    with pytest.raises(MissingExtraError, match=rf"expected the package {package}; got none.*'uvicorn>=0.29'$"):
        launch.serve(folder)


def test_hosts_that_are_no_names_are_refused(folder: Path, ran: list[tuple[Any, int]]) -> None:
    with pytest.raises(ArgumentError, match="serve: expected allow_hosts to be a list; got allow_hosts='box.local'"):
        launch.serve(folder, port=0, allow_hosts="box.local")
    for wrong in ({"token": 3}, {"allow_hosts": [3]}):
        with pytest.raises(ArgumentError, match=f"serve: expected {next(iter(wrong))} as text; got 3"):
            launch.serve(folder, port=0, **wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="serve: expected the name or address of this machine; got host=None"):
        launch.serve(folder, port=0, host=None)  # pyright: ignore[reportArgumentType]
    assert not ran


def test_importing_the_room_loads_no_server() -> None:
    code = (
        "import sys, plimsoll.report as r; r.serve; from plimsoll.cli import app; "
        "print(*{'fastapi', 'uvicorn', 'starlette', 'plotly'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


# -- a real server

COMMAND = [sys.executable, "-m", "plimsoll", "serve"]


@pytest.fixture
def servers(folder: Path) -> Iterator[list[tuple["subprocess.Popen[str]", str]]]:
    """Two servers of one folder, each with its address."""
    found = []
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    for _ in range(2):
        process = subprocess.Popen([*COMMAND, str(folder), "--port", "0"], stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True, env=environment)  # fmt: skip
        found.append(process)
    reported = []
    for process in found:
        lines = [process.stdout.readline() for _ in range(4)]
        reported.append((process, re.search(r"http://\S+", lines[1])[0]))
    yield reported
    for process in found:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C reaches another process on POSIX systems only")
def test_two_servers_of_one_folder_answer_and_end_quietly_at_ctrl_c(
    servers: list[tuple["subprocess.Popen[str]", str]],
) -> None:
    for process, address in servers:
        with urllib.request.urlopen(f"{address}api/runs", timeout=HANG_SECONDS) as answer:
            assert b'"id": "a"' in answer.read()
        stream = urllib.request.urlopen(f"{address}api/stream?run=a", timeout=HANG_SECONDS)
        assert stream.readline() == b"retry: 2000\n"
        process.send_signal(signal.SIGINT)
        stream.read()  # ended by the server
        stream.close()
        assert (process.wait(HANG_SECONDS), process.stdout.read()) == (0, "")


_INTERRUPTS = {
    "as the server starts": (
        "from plimsoll.report.live.server.uvicorn_loop import PageServer\n"
        "start = PageServer.startup\n"
        "async def interrupted(server, sockets=None):\n"
        "    await start(server, sockets)\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "PageServer.startup = interrupted\n"
    ),
    # On a busy machine it comes between the line that shows the address and uvicorn's own handler.
    "as the event loop is made": (
        "import asyncio\n"
        "made = asyncio.SelectorEventLoop.__init__\n"
        "def interrupted(loop, *arguments, **keywords):\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    made(loop, *arguments, **keywords)\n"
        "asyncio.SelectorEventLoop.__init__ = interrupted\n"
    ),
}


@pytest.mark.parametrize("when", _INTERRUPTS)
def test_an_interrupt_at_the_start_leaves_no_traceback(when: str, tmp_path: Path) -> None:
    code = f"import signal\nfrom plimsoll import report\n{_INTERRUPTS[when]}report.serve('.', port=0)\n"
    done = processes.python("-c", code, cwd=tmp_path)
    assert done.returncode == 0 and "Live page: http" in done.stdout and not done.stderr, done.stderr
