"""Where a run lies: a folder of this machine, or one of a filesystem that pyarrow reads, such as an object store.

Readers ask a place for names and for parts and need no paths. Elsewhere than on this machine a failure to read may be
the network's: a part whose bytes all arrive is damaged, one whose bytes do not is unreached, which is an error and no
loss of a part.
"""

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, cast

from plimsoll.errors import ArgumentError, RunError
from plimsoll.runs.columns.arrow import fs, pa
from plimsoll.runs.storage import atomic_files
from plimsoll.runs.storage.limits import MANIFEST_BYTES, DamageError
from plimsoll.runs.storage.listing import Entry, entries
from plimsoll.runs.storage.uri import filesystem_of, is_uri, sentence, without_secrets


class StorageLocation(ABC):
    """A run's folder; names within it are those of files, or ``kind/file``."""

    path: Path  # in its own filesystem
    filesystem: Any = None  # pyarrow's; none on this machine

    @abstractmethod
    def __str__(self) -> str:
        """What messages call it."""

    @abstractmethod
    def names(self, kind: str = "") -> list[str]:
        """What lies in it, or in the folder of a kind, sorted; nothing where there is none.

        Raises OSError for a folder that is there and cannot be listed.
        """

    @abstractmethod
    def read(self, name: str) -> bytes:
        """A manifest's content; `DamageError` for one that is larger than a manifest can be."""

    @abstractmethod
    def opened(self, name: str) -> Any:
        """A part, open to be read anywhere in it; `DamageError` for what is no file."""

    @abstractmethod
    def may_succeed(self, name: str) -> bool:
        """Whether reading a file that failed may go better again; raises `RunError` where its bytes do not arrive."""


class Folder(StorageLocation):
    """A folder of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    def __str__(self) -> str:
        return str(self.path)

    def names(self, kind: str = "") -> list[str]:
        """What lies there."""
        try:
            return sorted(path.name for path in (self.path / kind).iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            if not self.path.is_dir():
                return []
            if kind:
                raise
            raise RunError(
                f"Run: expected a folder that can be read; got {self.path}, where that fails: {error}. "
                "Look at its permissions and at the disk."
            ) from error

    def read(self, name: str) -> bytes:
        """A manifest's content."""
        return atomic_files.read(self.path / name, MANIFEST_BYTES)

    def opened(self, name: str) -> Any:
        """A part."""
        atomic_files.check(self.path / name)
        return pa.OSFile(str(self.path / name))

    def may_succeed(self, name: str) -> bool:
        """Not on this machine."""
        del name
        return False


class Stored(StorageLocation):
    """A folder of another filesystem. Columns are fetched in few, large requests."""

    def __init__(self, path: str, filesystem: Any, shown: str) -> None:
        self.path, self._inside = Path(path), path.rstrip("/")
        self.filesystem, self._shown = filesystem, shown

    def __str__(self) -> str:
        return self._shown

    def names(self, kind: str = "") -> list[str]:
        """What lies there."""
        return sorted(entry.name for entry in self._entries(self._at(kind) if kind else self._inside))

    def tree(self) -> dict[str, tuple[int, int]]:
        """All files in it and below, by their path within it: size, and time of the last change in ns, 0 for none.

        Object stores list a thousand files a request, whatever folders these are in.
        """
        base = len(self._inside.strip("/"))
        found = [entry for entry in self._entries(self._inside, below=True) if entry.is_file]
        return {entry.path[base:].strip("/"): (entry.size, entry.time_ns) for entry in found}

    def read(self, name: str) -> bytes:
        """A manifest's content."""
        found = self._fetched(name, MANIFEST_BYTES + 1)
        if len(found) > MANIFEST_BYTES:
            raise DamageError(f"more than the {MANIFEST_BYTES:,} bytes that are read")
        return found

    def _fetched(self, name: str, most_bytes: int | None = None) -> bytes:
        try:
            with self.filesystem.open_input_stream(self._at(name)) as stream:
                return stream.read(most_bytes)
        except FileNotFoundError:
            raise
        except Exception as error:  # those of fsspec raise what the library behind them does
            raise self._unreached(name, error) from error

    def opened(self, name: str) -> Any:
        """A part."""
        return self.filesystem.open_input_file(self._at(name))

    def may_succeed(self, name: str) -> bool:
        """As its bytes arrive, all of which are fetched: a request may have failed."""
        self._fetched(name)
        return True

    def within(self, name: str) -> "Stored":
        """A folder in it, called by its name alone."""
        return Stored(self._at(name) if name else self._inside, self.filesystem, name or ".")

    def _entries(self, folder: str, below: bool = False) -> list[Entry]:
        try:
            return entries(self.filesystem, folder, below=below)
        except Exception as error:  # as above
            raise self._unreached("the folder", error) from error

    def _at(self, name: str) -> str:
        return f"{self._inside}/{name}"

    def _unreached(self, what: str, error: Exception) -> RunError:
        said = sentence(str(error))
        return RunError(
            f"Run: expected storage that answers; got {type(error).__name__} for {what} in {self}: {said} "
            "Look at the address, the credentials and the network, and try again; nothing of the run was left out."
        )


def place_of(path: str | os.PathLike[str], filesystem: Any = None) -> StorageLocation:
    """The place that a path means: in `filesystem` where one is given, by its scheme where it is a URI."""
    uri = path if isinstance(path, str) and is_uri(path) else None
    if filesystem is not None and uri is not None:
        raise ArgumentError(
            "Run: expected a path within the filesystem that is given; got the URI "
            f"{without_secrets(uri)}. Leave out one of the two."
        )
    if filesystem is not None:
        inside = os.fspath(path) if isinstance(path, str) else Path(path).as_posix()
        made = _filesystem(filesystem)
        return Stored(inside, made, f"{inside} ({made.type_name})")
    return Folder(Path(path)) if uri is None else _of_uri(uri)


def is_elsewhere(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URI, ``s3://bucket/exp1``, and none of this machine."""
    return isinstance(path, str) and is_uri(path)


def folder_to_write(operation: str, path: str | os.PathLike[str]) -> Path:
    """The path of a folder that a run is written to.

    Raises `ArgumentError` for a URI, which would become a folder of its name, and for what names no folder.
    """
    try:
        text = cast("Any", os.fspath(path))
        usable = isinstance(text, str) and bool(text) and b"\0" not in os.fsencode(text)
    except (TypeError, ValueError):  # no path; or not to be written in the file system's encoding
        usable = False
    if not usable:
        raise ArgumentError(
            f"{operation}: expected the path of a folder, as a str or pathlib.Path, that is not empty and holds no NUL "
            f'or half a surrogate pair; got {path!r}. Give for instance "runs/exp1".'
        )
    if is_elsewhere(path):
        raise ArgumentError(
            f"{operation}: expected a folder of this machine to write to; got the URI {without_secrets(str(path))}. "
            "Write to a folder here, and copy it there while it grows (docs/how-to/scale.md)."
        )
    return Path(path)


def _of_uri(uri: str) -> StorageLocation:
    made, inside = filesystem_of(uri)
    return Folder(Path(inside)) if isinstance(made, fs.LocalFileSystem) else Stored(inside, made, without_secrets(uri))


def _filesystem(given: Any) -> Any:
    """The filesystem as pyarrow's, which fsspec's become."""
    if isinstance(given, fs.FileSystem):
        return given
    if all(hasattr(given, name) for name in ("protocol", "ls", "open", "info")):
        return fs.PyFileSystem(fs.FSSpecHandler(given))
    raise ArgumentError(
        f"Run: expected filesystem to be a pyarrow.fs.FileSystem or one of fsspec's; got {type(given).__name__}. "
        "For instance pyarrow.fs.S3FileSystem(region=...)."
    )
