"""Lock for a run and rank's only writer, and the writers that this process has open.

The system frees a lock if its holder dies.
"""

import contextlib
import errno
import json
import os
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

from plimsoll.errors import ArgumentError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_STALE_SECONDS = 60.0
_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


class Lock:
    """Lock on one rank of a run, held until `release`.

    If another writer, of this or another process, holds it, making it is an error.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f".lock-r{rank:05d}"
        self._exclusive = self.path.with_name(f"{self.path.name}.held")
        self._descriptor: int | None = None
        self._by_flock = True
        self._acquire()

    # The lock is `flock` on a hidden file that names its holder. On file systems without `flock` it is a file created
    # with `O_EXCL`, with a heartbeat. Its holder counts as dead if its process has ended (on this machine) or its last
    # heartbeat is `_STALE_SECONDS` old.
    def _acquire(self) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._by_flock = _flock(descriptor)
            if not self._by_flock:
                _create(self._exclusive, self.path.parent)
        except BlockingIOError:
            os.close(descriptor)
            raise _held(self.path if self._by_flock else self._exclusive) from None
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self._sign(descriptor)

    def _sign(self, descriptor: int) -> None:
        """Write the holder into the file. A full disk leaves it empty, but locked."""
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _holder(), 0)

    def renew(self) -> None:
        """Confirm the lock: take it again if its file was removed, and send a heartbeat.

        Raises an `ArgumentError` if another writer holds it by now, and an `OSError` if the folder is gone.
        """
        if self._descriptor is None:
            self._acquire()
            return
        if not _same_file(self._descriptor, self.path):
            self.abandon()
            self._acquire()
        elif not self._by_flock:
            os.utime(self._exclusive)

    def release(self) -> None:
        """Release the lock, but keep its file: two writers could lock two files otherwise."""
        if self._descriptor is not None:
            if not self._by_flock:
                with contextlib.suppress(OSError):
                    self._exclusive.unlink()
            elif fcntl is not None:
                with contextlib.suppress(OSError):
                    fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.abandon()

    def abandon(self) -> None:
        """Close the file but keep the lock: in a forked child, the parent holds it."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def _flock(descriptor: int) -> bool:
    """Acquire the lock. Return False if the file system has no `flock`.

    If another process holds it, that is a `BlockingIOError`.
    """
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True


def _create(path: Path, folder: Path) -> None:
    """Create the exclusive file, after removing that of a dead holder."""
    if _is_stale(path):
        # Renamed before it is removed: of two that find it stale, one renames it, and the other meets no file.
        moved_away = folder / f"{path.name}.stale-{os.getpid()}"
        with contextlib.suppress(OSError):
            path.rename(moved_away)
            moved_away.unlink()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        raise BlockingIOError from None
    with os.fdopen(descriptor, "wb") as file, contextlib.suppress(OSError):
        file.write(_holder())


def _is_stale(path: Path) -> bool:
    try:
        beat, holder = path.stat().st_mtime, _read(path)
    except OSError:
        return False
    here = holder.get("host") == socket.gethostname()
    if here and isinstance(pid := holder.get("pid"), int) and not is_alive(pid):
        return True
    return time.time() - beat > _STALE_SECONDS


def is_alive(pid: int) -> bool:
    """Return whether this machine runs such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _holder() -> bytes:
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": round(time.time())}).encode()


def _read(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return {}
    return cast("dict[str, object]", content) if isinstance(content, dict) else {}


def _held(path: Path) -> ArgumentError:
    try:
        holder = _read(path)
    except OSError:
        holder = {}
    who = f"process {holder['pid']} on {holder['host']}" if {"pid", "host"} <= set(holder) else "another process"
    if holder.get("pid") == os.getpid() and holder.get("host") == socket.gethostname():
        return ArgumentError(
            f"RunWriter: expected no other writer on this run and rank; got {path.parent}, which this process is "
            "writing already. Close the earlier watch or writer first: w.close()."
        )
    return ArgumentError(
        f"RunWriter: expected no other writer on this run and rank; got {path.parent}, which {who} is writing. "
        "Give this run a folder of its own, or end the other one first."
    )


# -- open writers of this process: a reader in it makes them write first -----------------------------------------------

_READ_SECONDS = 2.0  # that a reader waits for a slow disk; then it reads what is there


class OpenWriter(Protocol):
    """The part of a run writer that readers use."""

    before_read: Callable[[], object] | None

    @property
    def path(self) -> Path:
        """The run's folder."""
        ...

    def flush(self, timeout: float = ...) -> bool:
        """Write what is recorded; return whether that was done in time."""
        ...


_writers: "weakref.WeakSet[Any]" = weakref.WeakSet()


def add(writer: OpenWriter) -> None:
    """Register a writer until it is collected."""
    _writers.add(writer)


def writers() -> list[Any]:
    """Return the registered writers."""
    return list(_writers)


def forget() -> None:
    """Drop all writers: in a child process they belong to the parent."""
    _writers.clear()


def write_for_reader(folder: Path) -> None:
    """Write what this process has recorded of a run and not written yet."""
    for writer in writers():
        if writer.path == folder.absolute() or _leads_to(folder, writer.path):
            if writer.before_read is not None:
                writer.before_read()
            writer.flush(_READ_SECONDS)


def _leads_to(folder: Path, other: Path) -> bool:
    """Return whether a folder is another one, perhaps through a link or ``..``."""
    try:
        return folder.samefile(other)
    except (OSError, ValueError):  # one of them is not there, or is no path
        return False
