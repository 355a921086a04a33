"""Kernels are compiled once: of processes that need one at the same time, all but the first load what that saved.

In a fresh checkout nothing is compiled, and all workers, and what they start, begin with the same kernels.
"""

import contextlib
import fcntl
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PATIENCE_SECONDS = 120  # then a process compiles for itself
_held: set[Path] = set()


def install() -> None:
    """Make Numba wait, if it is there and does not yet."""
    dispatcher = sys.modules.get("numba.core.dispatcher")
    if dispatcher is None or hasattr(dispatcher.Dispatcher.compile, "waits"):
        return
    alone = dispatcher.Dispatcher.compile

    def compile_once(self: Any, signature: Any) -> Any:
        saved = getattr(self._cache, "_cache_file", None)
        if saved is None:
            return alone(self, signature)
        # Numba's own lock first, as where one kernel compiles another: threads would wait for each other.
        with dispatcher.global_compiler_lock, _locked(Path(saved._index_path + ".lock")):
            return alone(self, signature)

    compile_once.waits = True  # type: ignore[attr-defined]
    dispatcher.Dispatcher.compile = compile_once


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    if path in _held or not path.parent.is_dir():
        yield
        return
    _held.add(path)
    until = time.monotonic() + _PATIENCE_SECONDS
    try:
        with path.open("w") as file:
            while time.monotonic() < until:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # closing the file ends it, as does the process
                    break
                time.sleep(0.02)
            yield
    finally:
        _held.discard(path)
