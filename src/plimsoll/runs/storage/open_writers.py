"""The process's open run writers. A reader in this process makes them write first."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

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
        if writer.path == folder.absolute():
            if writer.before_read is not None:
                writer.before_read()
            writer.flush(_READ_SECONDS)
