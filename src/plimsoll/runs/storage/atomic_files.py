"""Files that appear whole or not at all. Everything that a run writes goes through here.

A file is written under a hidden name in its own folder, flushed to the disk and renamed; a reader, or a machine that
loses power, sees the old one or the new one and never a part of it. The hidden name is new and not to be guessed: in a
folder that others write to, a link that lies in wait under it would lead the writing elsewhere.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

from plimsoll.runs.storage.limits import DamageError

HIDDEN = ".writing-"


@contextlib.contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """A file to write to, which takes the place of `path` at the end of the block, unless that raises."""
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
    """A file's content; `DamageError` for what is no file, or larger than a file of its kind can be."""
    # A pipe that nobody writes to would otherwise block for ever.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        _check_file(found)
        if found.st_size > limit_bytes:
            raise DamageError(f"{found.st_size:,} bytes, of at most {limit_bytes:,} that are read")
        return file.read(limit_bytes)


def check(path: Path) -> None:
    """Raises `DamageError` for what is no file and would block or never end, OSError for what cannot be reached."""
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
    """The one place where a file of a run is opened to be written: a new one, never one that is there, nor a link's."""
    return path.open("xb")


def rename(source: Path, target: Path) -> None:
    """Makes a written file visible, at once and in place of an older one."""
    source.replace(target)


def remove(path: Path) -> None:
    """Removes a file, if it is still there."""
    path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder last, where the file system lets a folder be synchronised (Windows does not)."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sweep(folder: Path, name_pattern: str) -> None:
    """Removes what writers that were killed left half written of such files. Only for one who holds their lock."""
    for path in folder.glob(f"{HIDDEN}*-{name_pattern}.tmp"):
        with contextlib.suppress(OSError):
            remove(path)
