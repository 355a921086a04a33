"""Compilation of the kernels that a watch needs first, in other processes while the script begins.

Compiled kernels are kept on disk. Where they are not there yet, the first sample of a training would wait for them for
seconds, one after the other.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import plimsoll
from plimsoll.tracing.late_patches import when_imported

_MOST_SECONDS = 60  # then a child that still compiles is ended: so long the training waits for it at most
_FIRST = ("measure_floats", "update_float32")  # nearly all of the time


def compile_when_torch_is_there() -> None:
    """Have the kernels compiled once the script has imported torch, unless they are on disk."""
    # Forked with torch in it, a child begins at once; before torch, it would have to import it for longer than it
    # compiles. On macOS a forked child may not do much, and on Windows there is none.
    alone = int(os.environ.get("LOCAL_RANK") or 0) != 0 or (os.cpu_count() or 1) < 2
    if sys.platform == "linux" and not alone and not _are_kept():
        when_imported("torch", lambda _: _compile_apart())


def _are_kept() -> bool:
    """Return whether kernels newer than their source are where Numba keeps them, as far as is seen from here."""
    own = Path(plimsoll.__file__).parent
    newest = max(file.stat().st_mtime for file in [own / "row_layout.py", *own.glob("kernels/**/*.py")])
    cache = Path(os.environ.get("NUMBA_CACHE_DIR") or own / "kernels")
    version = f"py{sys.version_info.major}{sys.version_info.minor}"
    return all(
        any(file.stat().st_mtime >= newest for file in cache.rglob(f"*.{name}-*.{version}*.nbi")) for name in _FIRST
    )


def _compile_apart() -> None:
    if threading.active_count() > 1:  # a forked child has none of the threads, and may wait for ever for what they hold
        return
    try:
        import torch

        from plimsoll import kernels

        bank, moves, one = kernels.new_bank(1), kernels.new_moves(1), [torch.ones(1)]
    except Exception:  # noqa: BLE001  (the watch finds it again, and says it)
        return
    _apart(lambda: kernels.measure_into(one, bank, [0]))
    _apart(lambda: kernels.update_into(one, one, one, bank, [0], moves))


def _apart(compile_it: Callable[[], object]) -> None:
    """Compile in a process that is nobody's child, so that a script which waits for its own does not meet it."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        if os.fork():
            os._exit(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_MOST_SECONDS)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # whoever reads what the script prints need not wait for this
            os.dup2(nothing, stream)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        compile_it()
    finally:
        os._exit(0)
