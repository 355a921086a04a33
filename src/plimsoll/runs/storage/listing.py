"""What lies in a folder of pyarrow's filesystem, as it is now; nothing where there is no such folder.

Filesystems of fsspec are asked themselves: pyarrow would first ask whether there is the folder, to which fsspec says no
when its storage does not answer, and would take listings that fsspec has kept from before.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from plimsoll.runs.columns.arrow import fs

# What the filesystems of fsspec call the time of the last change, those that tell it.
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")


class Entry(NamedTuple):
    """A file, or a folder, by its path in the filesystem; the time of its last change in ns, 0 for none."""

    path: str
    is_file: bool
    size: int
    time_ns: int

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]


def entries(filesystem: Any, folder: str, *, below: bool = False) -> list[Entry]:
    """What lies in a folder, and with `below` in its folders too. Raises what the filesystem does."""
    handler: Any = getattr(filesystem, "handler", None)
    try:
        if isinstance(handler, fs.FSSpecHandler):
            handler.fs.invalidate_cache()
            return list(_of_fsspec(handler.fs, folder, below))
        found = filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True, recursive=below))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [Entry(i.path.strip("/"), i.type == fs.FileType.File, i.size or 0, i.mtime_ns or 0) for i in found]


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
