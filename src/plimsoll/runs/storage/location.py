"""Location of a run: a local folder, or one in pyarrow's or fsspec's file system.

A URI such as ``s3://bucket/exp1`` is opened by pyarrow, or by fsspec if pyarrow does not support the scheme. Messages
never contain the keys, passwords and options of a URI. In the folder of a script, ``script.json`` lists its runs.
"""

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from plimsoll import checks
from plimsoll.errors import ArgumentError, MissingExtraError, PlimsollError, RunError
from plimsoll.runs.columns.arrow import fs, pa
from plimsoll.runs.storage import atomic_files
from plimsoll.runs.storage.limits import MANIFEST_BYTES, DamageError, from_json

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_OF_FSSPEC = "fsspec+"
# Those of pyarrow: Arrow's C++ `FileSystemFromUri`.
_OF_ARROW = frozenset({"file", "mock", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs"})
# As it comes, pyarrow tries for 15 minutes to reach Google's storage.
_PATIENCE = {"gs": "retry_limit_seconds=15", "gcs": "retry_limit_seconds=15"}


def is_uri(path: str) -> bool:
    """Return whether a path starts with a scheme."""
    return _URI.match(path) is not None


def without_secrets(uri: str) -> str:
    """Return a URI without keys, passwords and the options behind ``?``.

    >>> without_secrets("s3://key:secret@bucket/exp1?region=eu-west-1")
    's3://bucket/exp1'
    """
    scheme, _, rest = uri.partition("://")
    whole, slash, path = rest.partition("?")[0].partition("#")[0].partition("/")
    credentials, at, host = whole.rpartition("@")
    # The user of S3 is the access key. Azure's is the container.
    user = "" if scheme == "s3" else credentials.partition(":")[0]
    return f"{scheme}://{user}{at if user else ''}{host}{slash}{path}"


def sentence(words: str) -> str:
    """Return a library's message on one line, with a full stop."""
    return f"{' '.join(words.split()).rstrip('.')}."


def filesystem_of(uri: str) -> tuple[Any, str]:
    """Return pyarrow's file system for a URI, and the path in it.

    Raises an `ArgumentError` for an unknown scheme or a malformed address, a `MissingExtraError`, or a `RunError` if
    the storage does not answer.
    """
    scheme = uri.partition("://")[0]
    if scheme.startswith(_OF_FSSPEC) or scheme not in _OF_ARROW:
        return _by_fsspec(uri.removeprefix(_OF_FSSPEC))
    try:
        return fs.FileSystem.from_uri(_with_patience(uri))
    except (pa.ArrowNotImplementedError, ImportError):  # a pyarrow without that storage
        return _by_fsspec(uri)
    except (pa.ArrowException, ValueError) as error:
        raise _unknown(uri, error) from error
    except OSError as error:
        raise _unreached(uri, error) from error


def _by_fsspec(uri: str) -> tuple[Any, str]:
    try:
        import fsspec  # pyright: ignore[reportMissingTypeStubs]

        filesystem, inside = fsspec.url_to_fs(uri)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    except ImportError as error:
        raise _missing(uri, error) from error
    except ValueError as error:
        raise _unknown(uri, error) from error
    except Exception as error:  # what the library behind it raises
        raise _unreached(uri, error) from error
    return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), str(inside)  # pyright: ignore[reportUnknownArgumentType]


def _with_patience(uri: str) -> str:
    wanted = _PATIENCE.get(uri.partition("://")[0])
    if wanted is None or "retry_limit_seconds" in urlsplit(uri).query:
        return uri
    return f"{uri}{'&' if '?' in uri else '?'}{wanted}"


def _missing(uri: str, error: ImportError) -> PlimsollError:
    package = (getattr(error.__cause__ or error, "name", None) or "fsspec").partition(".")[0]
    said = " ".join(f"{error}".split()).rstrip(".")
    return MissingExtraError(
        f"Run: expected the package that opens {uri.partition('://')[0]}://; got none ({said}). "
        f"Install it: pip install {package}"
    )


def _unknown(uri: str, error: Exception) -> PlimsollError:
    return ArgumentError(
        "Run: expected a URI that pyarrow knows (s3://, gs://, abfs://, hdfs://, file://) or fsspec does; got "
        f"{without_secrets(uri)}: {_said(uri, error)} Correct it. In Python, "
        "Run(path, filesystem=...) also takes one of fsspec's."
    )


def _unreached(uri: str, error: Exception) -> PlimsollError:
    return RunError(
        f"Run: expected storage that answers; got {type(error).__name__} for {without_secrets(uri)}: "
        f"{_said(uri, error)} Look at the address, the credentials and the network."
    )


def _said(uri: str, error: Exception) -> str:
    """Return the message of an error without the secrets of the URI."""
    return sentence(f"{error}".replace(uri, without_secrets(uri)))


# What the filesystems of fsspec call the time of the last change, those that tell it.
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")


class Entry(NamedTuple):
    """A file or folder."""

    path: str  # path in the file system
    is_file: bool  # whether it is a file
    size: int  # in bytes
    time_ns: int  # Time of the last change in ns. 0 if unknown.

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]


def entries(filesystem: Any, folder: str, *, below: bool = False) -> list[Entry]:
    """Return the entries of a folder, and of all below it if `below`.

    Missing folders are empty. Raises whatever the file system raises.
    """
    handler: Any = getattr(filesystem, "handler", None)
    try:
        if isinstance(handler, fs.FSSpecHandler):
            handler.fs.invalidate_cache()
            return list(_of_fsspec(handler.fs, folder, below))
        infos = filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True, recursive=below))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [Entry(i.path.strip("/"), i.type == fs.FileType.File, i.size or 0, i.mtime_ns or 0) for i in infos]


def _of_fsspec(asked: Any, folder: str, below: bool) -> Iterator[Entry]:
    for info in asked.ls(folder, detail=True):
        path = str(info["name"]).strip("/")
        if path == folder.strip("/"):  # a file, or what marks a folder
            continue
        is_file = info.get("type") == "file"
        yield Entry(path, is_file, int(info.get("size") or 0), _time_ns(info))
        if below and not is_file:
            yield from _of_fsspec(asked, info["name"], below)


def _time_ns(info: Mapping[str, Any]) -> int:
    for value in (info.get(key) for key in _TIMES):
        if isinstance(value, datetime):
            return int(value.timestamp() * 1e9)
        if isinstance(value, int | float):
            return int(value * 1e9)
    return 0


class StorageLocation(ABC):
    """A run's folder. Names within it are names of files, or ``kind/file``."""

    path: Path  # in its own filesystem
    filesystem: Any = None  # pyarrow's; none on this machine

    @abstractmethod
    def __str__(self) -> str:
        """Return the name for messages."""

    @abstractmethod
    def names(self, kind: str = "") -> list[str]:
        """Return the sorted names in the folder, or in a kind's. A missing one is empty."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the content of a manifest, which has a limit of size."""

    @abstractmethod
    def opened(self, name: str) -> Any:
        """Return a part as a file with random access. What is no file is a `DamageError`."""

    @abstractmethod
    def may_succeed(self, name: str) -> bool:
        """Return whether a second attempt to read a file may succeed.

        A file whose bytes do not arrive is a `RunError`.
        """


class Folder(StorageLocation):
    """A local folder."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    def __str__(self) -> str:
        return str(self.path)

    def names(self, kind: str = "") -> list[str]:
        """Return the sorted names in the folder."""
        try:
            return sorted(path.name for path in (self.path / kind).iterdir())
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            if kind and self.path.is_dir():
                raise
            return []
        except (OSError, ValueError) as error:  # of a NUL, or half a character
            if kind:
                raise
            raise RunError(
                f"Run: expected a folder that can be read; got {self.path}, where that fails: {error}. "
                "Look at its permissions and at the disk."
            ) from error

    def read(self, name: str) -> bytes:
        """Return the content of a manifest."""
        return atomic_files.read(self.path / name, MANIFEST_BYTES)

    def opened(self, name: str) -> Any:
        """Return a part as a file."""
        atomic_files.check(self.path / name)
        return pa.OSFile(str(self.path / name))

    def may_succeed(self, name: str) -> bool:
        """Return False: local files do not fail by chance."""
        del name
        return False


class Stored(StorageLocation):
    """A folder of another file system. Columns are fetched in few, large requests."""

    def __init__(self, path: str, filesystem: Any, shown: str) -> None:
        self.path, self._inside = Path(path), path.rstrip("/")
        self.filesystem, self._shown = filesystem, shown

    def __str__(self) -> str:
        return self._shown

    def names(self, kind: str = "") -> list[str]:
        """Return the sorted names in the folder."""
        return sorted(entry.name for entry in self._entries(self._at(kind) if kind else self._inside))

    def tree(self) -> dict[str, tuple[int, int]]:
        """Return all files below by path, with size and time of change in ns, or 0."""
        base = len(self._inside.strip("/"))
        # Object stores list a thousand files per request, whatever folders these are in.
        files = [entry for entry in self._entries(self._inside, below=True) if entry.is_file]
        return {entry.path[base:].strip("/"): (entry.size, entry.time_ns) for entry in files}

    def read(self, name: str) -> bytes:
        """Return the content of a manifest."""
        content = self._fetched(name, MANIFEST_BYTES + 1)
        if len(content) > MANIFEST_BYTES:
            raise DamageError(f"more than the {MANIFEST_BYTES:,} bytes that are read")
        return content

    def _fetched(self, name: str, most_bytes: int | None = None) -> bytes:
        try:
            with self.filesystem.open_input_stream(self._at(name)) as stream:
                return stream.read(most_bytes)
        except FileNotFoundError:
            raise
        except Exception as error:  # those of fsspec raise what the library behind them does
            raise self._unreached(name, error) from error

    def opened(self, name: str) -> Any:
        """Return a part as a file."""
        return self.filesystem.open_input_file(self._at(name))

    def may_succeed(self, name: str) -> bool:
        """Return True once the whole file has arrived: only one request may have failed."""
        self._fetched(name)
        return True

    def within(self, name: str) -> "Stored":
        """Return the location of a folder in it, shown by its name alone."""
        return Stored(self._at(name) if name else self._inside, self.filesystem, name or ".")

    def _entries(self, folder: str, below: bool = False) -> list[Entry]:
        try:
            return entries(self.filesystem, folder, below=below)
        except Exception as error:  # as above
            raise self._unreached("the folder", error) from error

    def _at(self, name: str) -> str:
        return f"{self._inside}/{name}"

    # Remote reading may fail because of the network. A part whose bytes all arrive and are wrong is damaged. A part
    # whose bytes do not arrive is unreached, which is an error: it must not be left out as if it were damaged.
    def _unreached(self, what: str, error: Exception) -> RunError:
        said = sentence(str(error))
        return RunError(
            f"Run: expected storage that answers; got {type(error).__name__} for {what} in {self}: {said} "
            "Look at the address, the credentials and the network, and try again; nothing of the run was left out."
        )


def place_of(path: str | os.PathLike[str], filesystem: Any = None) -> StorageLocation:
    """Return a path's location, in `filesystem` if given, by scheme if it is a URI."""
    uri = path if isinstance(path, str) and is_uri(path) else None
    if not isinstance(path, str | os.PathLike) or (path == "" and filesystem is None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"Run: expected the path of a run's folder, or a URI; got {path!r}. Name one.")
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
    """Return whether a path is a URI such as ``s3://bucket/exp1``."""
    return isinstance(path, str) and is_uri(path)


def folder_to_write(operation: str, path: str | os.PathLike[str]) -> Path:
    """Return the path of a folder to write a run to.

    A URI, which would become a local folder of that name, is an error.
    """
    local = checks.path(operation, "a folder", path, remedy='Give for instance "runs/exp1".')
    if is_elsewhere(path):
        raise ArgumentError(
            f"{operation}: expected a folder of this machine to write to; got the URI {without_secrets(str(path))}. "
            "Write to a folder here, and copy it there while it grows (docs/how-to/scale.md)."
        )
    return local


def _of_uri(uri: str) -> StorageLocation:
    made, inside = filesystem_of(uri)
    return Folder(Path(inside)) if isinstance(made, fs.LocalFileSystem) else Stored(inside, made, without_secrets(uri))


def _filesystem(given: Any) -> Any:
    """Return the file system as one of pyarrow's. Those of fsspec are wrapped."""
    if isinstance(given, fs.FileSystem):
        return given
    if all(hasattr(given, name) for name in ("protocol", "ls", "open", "info")):
        return fs.PyFileSystem(fs.FSSpecHandler(given))
    raise ArgumentError(
        f"Run: expected filesystem to be a pyarrow.fs.FileSystem or one of fsspec's; got {type(given).__name__}. "
        "For instance pyarrow.fs.S3FileSystem(region=...)."
    )


# -- runs of one script: ``script.json`` lists the runs of the models that it trains -----------------------------------

SCRIPT_FILE = "script.json"
_SCRIPT_SCHEMA = 1
ITSELF = "."  # the run that the folder itself is


def names_of_runs(place: StorageLocation) -> tuple[str, ...]:
    """Return the runs in ``script.json`` by folder name; none without the file."""
    if SCRIPT_FILE not in place.names():
        return ()
    try:
        names: Any = from_json(place.read(SCRIPT_FILE), MANIFEST_BYTES)["runs"]
        sound = isinstance(names, list) and all(_is_folder_name(name) for name in cast("list[object]", names))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(f"Run: expected a list of a script's runs in {place}: {SCRIPT_FILE}; got {error}.") from error
    if not sound:
        raise RunError(
            f"Run: expected the names of folders in {place}: {SCRIPT_FILE}; got {names!r}. Correct the file."
        )
    return tuple(cast("list[str]", names))


def is_one_of_several(run: Path) -> bool:
    """Return whether a run is one of several runs of a script."""
    below, itself = names_of_runs(Folder(run.parent)), names_of_runs(Folder(run))
    return (run.name in below and len(below) > 1) or (ITSELF in itself and len(itself) > 1)


def _is_folder_name(name: object) -> bool:
    """Return whether it names a folder directly below: no list may lead elsewhere."""
    return isinstance(name, str) and bool(name) and not {"/", "\\", os.sep} & set(name) and name != ".."


# `plimsoll run` writes the file when it finds a second model. It distinguishes the folder of one script from a folder
# with runs of several trainings. It may be in a run's own folder, if the first model was taken for the only one; the
# other models' folders are below it then.
def write_script(folder: Path, names: Sequence[str]) -> None:
    """Write the list of a script's runs into its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"plimsoll": "script", "schema": _SCRIPT_SCHEMA, "runs": list(names)}
    with atomic_files.replacing(folder / SCRIPT_FILE) as file:
        file.write((json.dumps(content) + "\n").encode())
