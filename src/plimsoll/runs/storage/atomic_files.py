"""Files that appear whole or not at all. All files of a run and of an answer are written here."""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import BinaryIO

from plimsoll.checks import regular_file
from plimsoll.errors import ArgumentError, RunError
from plimsoll.runs.storage.limits import DamageError

HIDDEN = ".writing-"


# A file is written under a hidden name in its own folder, flushed to the disk, and renamed. A reader sees the old file
# or the new one, never a part of one, even if the machine loses power. The hidden name is random: in a folder that
# others may write to, a link placed under a known name would redirect the writing.
@contextlib.contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """Open a file that replaces `path` at the block's end, unless the block raises.

    What is there and is no regular file stays: an administrator who writes to /dev/null would lose the device.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "expected a regular file or none", str(path))
    temporary = path.with_name(f"{HIDDEN}{secrets.token_hex(8)}-{path.name}.tmp")
    opened = open_for_writing(temporary)
    try:
        with opened as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def read(path: Path, limit_bytes: int) -> bytes:
    """Return a file's content, at most so many bytes, or raise a `DamageError`."""
    # A pipe that nobody writes to would otherwise block for ever.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        _check_file(status)
        if status.st_size > limit_bytes:
            raise DamageError(f"{status.st_size:,} bytes, of at most {limit_bytes:,} that are read")
        return file.read(limit_bytes)


def check(path: Path) -> None:
    """Check that a path is a file, which opening cannot block on.

    Raises:
        DamageError: It is a folder, a pipe, a device or a dead link.
        OSError: It cannot be reached.
    """
    try:
        _check_file(path.stat())
    except FileNotFoundError as error:
        if path.is_symlink():
            raise DamageError("a link that leads nowhere") from error
        raise


def _check_file(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise DamageError(f"{_KINDS.get(stat.S_IFMT(found.st_mode), 'something else')} in place of a file")


_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"} | dict.fromkeys(
    (stat.S_IFCHR, stat.S_IFBLK), "a device"
)


def open_for_writing(path: Path) -> BinaryIO:
    """Open a new file. All files of a run are opened here, and never an existing one."""
    return path.open("xb")


def rename(source: Path, target: Path) -> None:
    """Make a written file visible, at once and in place of an older one."""
    source.replace(target)


def remove(path: Path) -> None:
    """Remove a file, if it is still there."""
    path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the file system can (not on Windows)."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sweep(folder: Path, name_pattern: str) -> None:
    """Remove killed writers' unfinished files. Only their lock's holder may call it."""
    for path in folder.glob(f"{HIDDEN}*-{name_pattern}.tmp"):
        with contextlib.suppress(OSError):
            remove(path)


# -- files of an answer (receipt, verdict, certificate), by the ending of their names ----------------------------------


def check_place(operation: str, path: str | os.PathLike[str], endings: Iterable[str]) -> Path:
    """Return the path of a file to write, before the work that the answer takes.

    Raises an `ArgumentError` if its ending is none of `endings` (in small letters), or if the path is a folder or in
    one that does not exist.
    """
    place = regular_file(operation, path)
    if place.suffix.lower() not in (known := [*endings]):
        raise ArgumentError(
            f"{operation}: expected a file that ends in {', '.join(known)}; got {os.fspath(place)!r}. Choose one of "
            "these."
        )
    if not place.parent.is_dir():
        raise ArgumentError(
            f"{operation}: expected a file in a folder that exists; got {os.fspath(place)!r}. Make its folder first."
        )
    return place


def write_text(operation: str, file: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    regular_file(operation, file)
    try:
        with replacing(file) as stream:
            stream.write(text.encode("utf-8", "replace"))
    except OSError as error:
        raise RunError(
            f"{operation}: expected a file that can be written; got {file} ({error}). Choose another."
        ) from error
