"""Python processes that cost little: each is forked from one that has imported what Plimsoll imports, and none of it.

Its environment holds, except for what torch and Numba read while they are imported. Torch has one thread in it. A test
about these, or about the start or the very end of Python itself, uses `subprocess`. The fork server of
`multiprocessing` would not do: its processes end without exit handlers and without `sys.excepthook`, which many tests
are about.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing
import os
import re
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from tests.support.patience import HANG_SECONDS

ROOT = Path(__file__).parents[2]
# What this process found its source by goes before an installed one.
PYTHONPATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
SUPPORT = ROOT / "tests" / "support"  # where the scripts lie that ranks run
_NEEDED = (
    "numba", "torch._dynamo", "torch.distributed.tensor", "scipy.linalg", "scipy.interpolate", "pyarrow.compute",
    "pyarrow.parquet", "pydantic.type_adapter", "typer.main", "rich.console", "rich.table", "plotly.graph_objects",
)  # fmt: skip
used = [0.0]  # CPU seconds of all such processes that have ended
_USED = "used"  # a file of the CPU seconds of other processes' processes
_ABOVE = 200  # the numbers of files that no process has
_LEAKS = re.compile(
    r"^(?:nanobind:.*|(?: -)? leaked .*| - \.\.\. skipped remainder|See https://nanobind.*)\n?", re.MULTILINE
)
_SHOWN = 15_000  # characters of what a rank that failed has said


def python(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, forks: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs `python` with these arguments (a script, `-m module` or `-c code`, after any `-W filter`) to its end.

    With `forks`, what it starts through `sys.executable`, as `multiprocessing` does, is forked likewise.
    """
    return Process(arguments, cwd, env, forks=forks).done()


def commands() -> Path:
    """The folder of a `python` and a `plimsoll` that are forked likewise, for shells."""
    return _server().folder if sys.platform == "linux" else Path(sys.executable).parent


def ranks(script: Path, arguments: Sequence[Sequence[object]]) -> list[str]:
    """Runs a script on as many ranks as there are lists of arguments, as under torchrun; returns what each has said."""
    done = as_ranks([(script, *own) for own in arguments], ROOT, os.environ)
    return [without_gloo(rank.stdout) for rank in done]


def without_gloo(output: str) -> str:
    """Takes the lines away in which torch 2.9 says which ranks are connected."""
    return "".join(line for line in output.splitlines(keepends=True) if not line.startswith("[Gloo]"))


def as_ranks(
    arguments: Sequence[Sequence[object]], cwd: Path, env: Mapping[str, str]
) -> list[subprocess.CompletedProcess[str]]:
    """Runs `python` with each of these lists of arguments, as the ranks that torchrun starts.

    One that fails ends the others and fails the test.
    """
    import torch.distributed as dist

    # The store is served from here, where nobody dies, and at a port that nobody else can have.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **env,
        "WORLD_SIZE": str(len(arguments)),
        "LOCAL_WORLD_SIZE": str(len(arguments)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "PYTHONPATH": PYTHONPATH,
        "PYTHONWARNINGS": "ignore",
    }
    started: list[Process] = []
    try:
        for rank, own in enumerate(arguments):
            numbered = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(Process(own, cwd, environment | numbered))
        waiting = list(started)
        while waiting:
            time.sleep(0.01)
            for process in [each for each in waiting if each.poll() is not None]:
                waiting.remove(process)
                if process.poll() != 0:
                    said = process.done()
                    text = (said.stdout + said.stderr)[-_SHOWN:]
                    raise AssertionError(f"rank {started.index(process)} ended with {process.poll()}:\n{text}")
    finally:
        for process in started:
            process.kill()
    return [process.done() for process in started]


class Process:
    """A running or ended process, whose output goes to files."""

    def __init__(
        self,
        arguments: Sequence[object],
        cwd: Path | None,
        env: Mapping[str, str] | None,
        *,
        forks: bool = False,
    ) -> None:
        self.arguments = [str(argument) for argument in arguments]
        self._output, self._errors = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        self._until = time.monotonic() + HANG_SECONDS
        self._code: int | None = None
        self._said = ["", ""]
        request = {
            "arguments": self.arguments,
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "places": [1, 2],
            "forks": _server().place if forks and sys.platform == "linux" else None,
        }
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        _server().start(request, [theirs.fileno(), self._output.fileno(), self._errors.fileno()])
        theirs.close()
        self._lines = b""
        while b"\n" not in self._lines:
            self._receive()
        number, _, self._lines = self._lines.partition(b"\n")
        self.pid = int(number)
        self._status.setblocking(False)

    def _receive(self) -> None:
        said = self._status.recv(64)
        if not said:
            raise RuntimeError("the process that starts the processes of the tests has ended")
        self._lines += said

    def poll(self) -> int | None:
        """The exit code; the negative number of the signal that ended it; None while it runs."""
        if self._code is None:
            with contextlib.suppress(BlockingIOError):
                self._receive()
            if b"\n" in self._lines:
                code, seconds = self._lines.split()
                self._code = int(code)
                used[0] += float(seconds) + _server().used_by_others()
                self._said = [self._read(file) for file in (self._output, self._errors)]
                self._status.close()
            if self._code is None and time.monotonic() > self._until:
                self._until = float("inf")
                self.kill()
                raise TimeoutError(f"{self.arguments} still ran after {HANG_SECONDS} s\n{self._said[1]}")
        return self._code

    def kill(self) -> None:
        """Ends it, if it runs."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.done()

    def done(self) -> subprocess.CompletedProcess[str]:
        """Waits for its end."""
        while self.poll() is None:
            time.sleep(0.005)
        return subprocess.CompletedProcess(self.arguments, self._code or 0, *self._said)

    @staticmethod
    def _read(file: BinaryIO) -> str:
        """All that is in a file, which is closed, but what Triton's bindings say of the modules that `_leave` left."""
        with file:
            file.seek(0)
            return _LEAKS.sub("", file.read().decode(errors="replace"))


# -- the process that forks


class _Server:
    """The process that forks, as the test process sees it."""

    def __init__(self) -> None:
        # A stream, in which each request is one byte: macOS has no packets that keep their order.
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH}
        environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONWARNINGS", "RANK"}}
        self.folder = Path(tempfile.mkdtemp(prefix="forks-"))
        self.place = str(self.folder / "socket")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.place)
        listener.listen()
        given = (theirs.fileno(), listener.fileno())
        command = [sys.executable, "-m", "tests.support.processes", *map(str, given)]
        self.process = subprocess.Popen(command, env=environment | own, pass_fds=given, cwd=ROOT)
        theirs.close()
        listener.close()
        for name, words in (("python", ""), ("plimsoll", "-m plimsoll ")):
            known = shlex.join([sys.executable, "-IS", str(SUPPORT / "forked_python.py"), self.place, sys.executable])
            (self.folder / name).write_text(f'#!/bin/sh\nexec {known} {words}"$@"\n')
            (self.folder / name).chmod(0o755)
        self._read = 0
        atexit.register(self._end)

    def _end(self) -> None:
        self.requests.close()
        self.process.wait()
        shutil.rmtree(self.folder)

    def used_by_others(self) -> float:
        """CPU seconds of processes that others than the tests asked for, and that ended since this was last called."""
        noted = self.folder / _USED
        lines = noted.read_text().splitlines() if noted.exists() else []
        self._read, new = len(lines), lines[self._read :]
        return sum(map(float, new))

    def start(self, request: Mapping[str, Any], files: Sequence[int]) -> None:
        """Asks for a process."""
        with tempfile.TemporaryFile() as long:
            long.write(json.dumps(request).encode())
            long.flush()
            socket.send_fds(self.requests, [b"+"], [long.fileno(), *files])


@functools.cache
def _server() -> _Server:
    return _Server()


def _serve(requests: socket.socket, others: socket.socket) -> tuple[dict[str, Any], Sequence[int]] | None:
    """Forks at each request; returns in the processes that are to carry one out, and None at the end.

    `others`: where processes ask that are not the tests'.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the keepers are nobody's to wait for
    used = Path(others.getsockname()).parent / _USED
    while True:
        ready, _, _ = select.select([requests, others], [], [])
        if requests in ready:
            said, files, _, _ = socket.recv_fds(requests, 1, 4)
            if not said:
                return None
        else:
            asking, _ = others.accept()
            said, files, _, _ = socket.recv_fds(asking, 1, 64)
            files.insert(1, asking.detach())
        if said and os.fork() == 0:
            requests.close()
            others.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _keep(files, None if requests in ready else used)
        for file in files:
            os.close(file)


def _keep(files: Sequence[int], used: Path | None) -> tuple[dict[str, Any], Sequence[int]]:
    """Forks the process, says its number, waits for it and says how it ended.

    `used`: where its CPU seconds are noted if not a test has asked for it; it ends with who has.
    """
    pid = os.fork()
    if pid == 0:
        os.close(files[1])
        return json.loads(os.pread(files[0], os.fstat(files[0]).st_size, 0)), files[2:]
    for file in files[2:]:
        os.close(file)
    os.write(files[1], b"%d\n" % pid)
    if used is not None:
        threading.Thread(target=_end_with, args=(files[1], pid), daemon=True).start()
    _, status, usage = os.wait4(pid, 0)
    seconds = usage.ru_utime + usage.ru_stime
    if used is not None:
        with used.open("a") as noted:
            noted.write(f"{seconds:f}\n")
    with contextlib.suppress(BrokenPipeError):
        os.write(files[1], b"%d %f\n" % (os.waitstatus_to_exitcode(status), seconds))
    os._exit(0)


def _end_with(asking: int, pid: int) -> None:
    """Ends the process when who has asked for it is gone."""
    os.read(asking, 1)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _become(request: Mapping[str, Any], files: Sequence[int]) -> tuple[str, list[str]]:
    """Makes of this process the one that was asked for; returns how its program is given, and its arguments."""
    given = (os.open(os.devnull, os.O_RDONLY), *files)
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for file in given]  # or one could take another's place
    for file, place in zip(moved, (0, *request["places"]), strict=True):
        os.dup2(file, place)
    for file in (*moved, *(file for file in given if file not in {0, *request["places"]})):
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    arguments = list(request["arguments"])
    filters = [name for name in os.environ.get("PYTHONWARNINGS", "").split(",") if name]
    if arguments[0] == "-u":
        del arguments[0]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    while arguments[0].startswith("-W"):
        filters.append(arguments[1] if arguments[0] == "-W" else arguments[0][2:])
        del arguments[: 2 if arguments[0] == "-W" else 1]
    sys.warnoptions[:] = filters  # processes that this one starts get them too
    for name in filters:
        warnings.simplefilter(name)  # type: ignore[arg-type]  (only actions are given)
    if request["forks"] is not None:
        sys.executable = str(Path(request["forks"]).parent / "python")
        multiprocessing.set_executable(sys.executable)
    kind = arguments.pop(0) if arguments[0] in {"-c", "-m"} else "script"
    first = str(Path(arguments[0]).resolve().parent) if kind == "script" else "" if kind == "-c" else str(Path.cwd())
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [first, *given, *(path for path in sys.path if path not in {"", str(ROOT)})]
    return kind, arguments


def _run(kind: str, arguments: Sequence[str]) -> None:
    sys.argv = ["-c" if kind == "-c" else arguments[0], *arguments[1:]]
    if kind == "-c":
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")


def _import() -> None:
    """Imports what nearly every test process needs; none of it may start a thread, which no fork would have."""
    os.fsync = os.fstat  # type: ignore[assignment]  (as in conftest.py)
    imported: dict[str, ModuleType] = {}
    atexit.register(_leave, imported)  # the first that is registered is the last that runs
    own = set(sys.modules)
    for name in _NEEDED:
        importlib.import_module(name)
    import numba

    numba.njit(lambda number: number)(0)  # what Numba loads when it first compiles takes half a second
    imported.update({name: sys.modules[name] for name in sys.modules.keys() - own - sys.stdlib_module_names})
    gc.collect()
    gc.freeze()  # or each process would look at, and copy, all of it once more as it ends
    if sys.platform == "linux":
        # Libraries loaded here are not unloaded by each process: with `_leave`, its end takes 0.07 s and not 0.25 s.
        library = ctypes.CDLL(None)
        library.on_exit(library._exit, None)


def _leave(imported: dict[str, ModuleType]) -> None:
    """Leaves the modules that the process found imported as they are; the interpreter takes apart all others."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(imported))  # for good
    for name, module in imported.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]


def _main(*places: str) -> None:
    requests, others = (socket.socket(fileno=int(place)) for place in places)
    with requests, others:
        _import()
        asked = _serve(requests, others)
    if asked is not None:
        _run(*_become(*asked))


if __name__ == "__main__":
    _main(*sys.argv[1:])
