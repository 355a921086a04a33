"""Python processes that cost little: each is forked from one that has imported what Plimsoll imports, and none of it.

Its environment holds, except for what torch and Numba read while they are imported. Torch has one thread in it. A test
about these, or about the start or the very end of Python itself, uses `subprocess`. The fork server of
`multiprocessing` would not do: its processes end without exit handlers and without `sys.excepthook`, which many tests
are about.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
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
    "numba", "torch._dynamo", "torch.distributed.tensor", "scipy.linalg", "pyarrow.parquet", "pydantic", "typer.main",
    "rich.console", "rich.table", "plotly.graph_objects",
)  # fmt: skip
used = [0.0]  # CPU seconds of all such processes that have ended
_SHOWN = 15_000  # characters of what a rank that failed has said


def python(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `python` with these arguments (a script, `-m module` or `-c code`, after any `-W filter`) to its end."""
    return Process(arguments, cwd, env).done()


def ranks(script: Path, arguments: Sequence[Sequence[object]]) -> list[str]:
    """Runs a script on as many ranks as there are lists of arguments, as under torchrun; returns what each has said."""
    return [done.stdout for done in as_ranks([(script, *own) for own in arguments], ROOT, os.environ)]


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

    def __init__(self, arguments: Sequence[object], cwd: Path | None, env: Mapping[str, str] | None) -> None:
        self.arguments = [str(argument) for argument in arguments]
        self._output, self._errors = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        self._until = time.monotonic() + HANG_SECONDS
        self._code: int | None = None
        self._said = ["", ""]
        request = {
            "arguments": self.arguments,
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
        }
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        _server().start(request, [self._output.fileno(), self._errors.fileno(), theirs.fileno()])
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
                used[0] += float(seconds)
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
        """All that is in a file, which is closed."""
        with file:
            file.seek(0)
            return file.read().decode(errors="replace")


# -- the process that forks


class _Server:
    """The process that forks, as the test process sees it."""

    def __init__(self) -> None:
        # A stream, in which each request is one byte: macOS has no packets that keep their order.
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH}
        environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONWARNINGS", "RANK"}}
        command = [sys.executable, "-m", "tests.support.processes", str(theirs.fileno())]
        self.process = subprocess.Popen(command, env=environment | own, pass_fds=[theirs.fileno()], cwd=ROOT)
        theirs.close()
        atexit.register(self._end)

    def _end(self) -> None:
        self.requests.close()
        self.process.wait()

    def start(self, request: Mapping[str, Any], files: Sequence[int]) -> None:
        """Asks for a process."""
        with tempfile.TemporaryFile() as long:
            long.write(json.dumps(request).encode())
            long.flush()
            socket.send_fds(self.requests, [b"+"], [long.fileno(), *files])


@functools.cache
def _server() -> _Server:
    return _Server()


def _serve(requests: socket.socket) -> tuple[dict[str, Any], Sequence[int]] | None:
    """Forks at each request; returns in the processes that are to carry one out, and None at the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the keepers are nobody's to wait for
    while True:
        said, files, _, _ = socket.recv_fds(requests, 1, 4)
        if not said:
            return None
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _keep(files)
        for file in files:
            os.close(file)


def _keep(files: Sequence[int]) -> tuple[dict[str, Any], Sequence[int]]:
    """Forks the process, says its number, waits for it and says how it ended."""
    pid = os.fork()
    if pid == 0:
        os.close(files[3])
        return json.loads(os.pread(files[0], os.fstat(files[0]).st_size, 0)), files[1:3]
    os.write(files[3], b"%d\n" % pid)
    _, status, usage = os.wait4(pid, 0)
    os.write(files[3], b"%d %f\n" % (os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime))
    os._exit(0)


def _become(request: Mapping[str, Any], files: Sequence[int]) -> tuple[str, list[str]]:
    """Makes of this process the one that was asked for; returns how its program is given, and its arguments."""
    null = os.open(os.devnull, os.O_RDONLY)
    for file, place in zip((null, *files), (0, 1, 2), strict=True):
        os.dup2(file, place)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    arguments = list(request["arguments"])
    filters = [name for name in os.environ.get("PYTHONWARNINGS", "").split(",") if name]
    while arguments[0] == "-W":
        filters.append(arguments[1])
        del arguments[:2]
    sys.warnoptions[:] = filters  # processes that this one starts get them too
    for name in filters:
        warnings.simplefilter(name)  # type: ignore[arg-type]  (only actions are given)
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


def _main(place: str) -> None:
    with socket.socket(fileno=int(place)) as requests:
        _import()
        asked = _serve(requests)
    if asked is not None:
        _run(*_become(*asked))


if __name__ == "__main__":
    _main(sys.argv[1])
