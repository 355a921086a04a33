"""`RunsList`: the runs below a folder with what their manifests say, found quickly and kept up to date.

A run is read from its manifests and the names of its parts; no Parquet file is opened. What was read is kept until one
of its folders or its manifest changes, so that a look at a thousand runs is a few thousand `stat` calls.

A run's *id* is its path below the folder ("." for the folder itself). Ids are looked up among the runs that were found,
and never made into paths: so no id leads out of the folder.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from plimsoll.errors import ArgumentError, RunError
from plimsoll.runs import Run, _manifest
from plimsoll.runs._catalog import Catalog
from plimsoll.runs._tables import KINDS

_LIVE_SECONDS = 300.0  # an open run that nothing was written to for so long is not called live
_SETTLED_SECONDS = 0.1  # times of files tick every few milliseconds: a change right after a look may bear its time
_LONGEST = 500  # characters of a problem

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One run of the list.

    `token` changes whenever something was written. `created` and `modified` are Unix seconds. `problem`: what is wrong
    with its manifest; None for nothing. `opens`: whether it can be read nevertheless.
    """

    id: str
    name: str
    path: Path
    token: str
    last_step: int = -1
    closed: bool = False
    created: float | None = None
    modified: float = 0.0
    tensors: int = 0
    ranks: int = 0
    problem: str | None = None
    opens: bool = True

    def is_live(self, now: float) -> bool:
        """Whether a training seems to be writing it."""
        return self.problem is None and not self.closed and now - self.modified < _LIVE_SECONDS


class RunsList:
    """The runs below a folder. Any thread may ask."""

    def __init__(self, folder: str | os.PathLike[str], clock: Callable[[], float] = time.time) -> None:
        self.folder = Path(folder).resolve()
        if not self.folder.is_dir():
            raise ArgumentError(
                f"serve: expected a folder that runs are written to; got {str(folder)!r}, which is none. Name it, or "
                "create it: runs that appear in it later are shown."
            )
        self.version = 0
        self._clock, self._lock = clock, threading.Lock()
        self._looked = float("-inf")
        self._found: dict[str, Listed] = {}
        self._stamps: dict[str, Stamp | None] = {}

    def runs(self, max_age_seconds: float = 0.0) -> list[Listed]:
        """All runs, those written to last first; as they were found at most so long ago."""
        with self._lock:
            now = self._clock()
            if not 0 <= now - self._looked < max_age_seconds:
                self._look()
                self._looked = now
            return sorted(self._found.values(), key=lambda run: (-run.modified, run.id))

    def run(self, run_id: str) -> Listed | None:
        """The run of that id as it is now; None where there is none."""
        with self._lock:
            known = self._found.get(run_id)
        if known is None:
            self.runs()
            return self._found.get(run_id)
        with self._lock:
            return self._update(known.id, known.path)

    def _look(self) -> None:
        paths = {self._id_of(path): path for path in reversed(Run.find(self.folder))}
        for gone in self._found.keys() - paths.keys():
            self._forget(gone)
        for run_id, path in paths.items():
            self._update(run_id, path)

    def _update(self, run_id: str, path: Path) -> Listed | None:
        """Reads a run anew if it has changed; None where it has gone."""
        stamp, now = stamp_of(path), self._clock()
        if stamp is None:
            self._forget(run_id)
            return None
        if run_id not in self._found or self._stamps.get(run_id) != stamp:
            found = listed(run_id, path, self.folder, stamp)
            if found != self._found.get(run_id):
                self._found[run_id] = found
                self.version += 1
            newest = max(entry[0] for entry in stamp) / 1e9
            self._stamps[run_id] = stamp if now - newest > _SETTLED_SECONDS else None
        return self._found[run_id]

    def _forget(self, run_id: str) -> None:
        if self._found.pop(run_id, None) is not None:
            self._stamps.pop(run_id, None)
            self.version += 1

    def _id_of(self, path: Path) -> str:
        """The id; what is no UTF-8 in a name is written as backslash, x and the byte."""
        return (
            path.relative_to(self.folder)
            .as_posix()
            .encode("utf-8", "surrogateescape")
            .decode("utf-8", "backslashreplace")
        )


def stamp_of(path: Path) -> Stamp | None:
    """What changes when something is written to a run: times and numbers of its folders and first manifest."""
    entries: list[tuple[int, int, int]] = []
    whole = os.fspath(path)
    for place in ("", *KINDS, "run.json"):
        try:
            found = os.stat(f"{whole}{os.sep}{place}")  # noqa: PTH116  (a thousand runs at a time: paths cost more)
        except OSError:
            if not place:
                return None
            entries.append((0, 0, 0))
        else:
            entries.append((found.st_mtime_ns, found.st_size, found.st_ino))
    return tuple(entries)


def listed(run_id: str, path: Path, root: Path, stamp: Stamp) -> Listed:
    """What manifests and names say of a run; whatever is wrong with it costs its own row."""
    modified = max(entry[0] for entry in stamp) / 1e9
    name = path.name or str(path)
    shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    try:
        refuse_links_out(path, root, within_folders=False)
        catalog = Catalog(path, warn=False)
        return _of_catalog(catalog, run_id, shown, modified)
    except Exception as error:  # noqa: BLE001  (a manifest may hold anything, and must not cost the other rows)
        why = (
            within(str(error), root)[:_LONGEST] if isinstance(error, RunError) else f"damaged ({type(error).__name__})"
        )
        token = f"none-{modified}"
        return Listed(id=run_id, name=shown, path=path, token=token, modified=modified, problem=why, opens=False)


def within(message: str, root: Path) -> str:
    """A message in which paths begin at the served folder: it says nothing of where that lies."""
    return message.replace(f"{root}{os.sep}", "").replace(str(root), ".")


def _of_catalog(catalog: Catalog, run_id: str, name: str, modified: float) -> Listed:
    manifests, head = catalog.manifests, catalog.head
    ends = [catalog.visible_end(part) for part in (*catalog.of("spectra"), *catalog.of("scalars"))]
    series = [manifest.get("tensors", {}).items() for manifest in manifests.values()]
    names = {(collection, name) for each in series for collection, entries in each for name in entries}
    unread = [] if head else catalog.problems
    return Listed(
        id=run_id,
        name=name,
        path=catalog.path,
        token=_token(catalog),
        last_step=max(ends, default=-1),
        closed=len(manifests) >= catalog.world_size and all(m.get("closed") for m in manifests.values()),
        created=seconds_of(head.get("created")),
        modified=modified,
        tensors=len(names),
        ranks=len(catalog.ranks),
        problem=unread[0][:_LONGEST] if unread else None,
    )


def _token(catalog: Catalog) -> str:
    """A digest of all parts' names and all manifests' times and sizes."""
    digest = hashlib.blake2s(digest_size=8)
    for part in sorted(part.name for part in catalog.parts):
        digest.update(part.encode())
    for rank in sorted(catalog.manifests):
        found = (catalog.path / _manifest.file_name(rank)).stat()
        digest.update(f"{rank} {found.st_mtime_ns} {found.st_size} {found.st_ino};".encode())
    return digest.hexdigest()


def refuse_links_out(path: Path, root: Path, within_folders: bool = True) -> None:
    """Raises `RunError` where a run's folder, or a file or folder in it, is a link that leaves the root."""
    folders = [path, *(path / kind for kind in KINDS if within_folders)]
    for place in [path, *(link for folder in folders for link in _links_in(folder))]:
        if not place.resolve().is_relative_to(root):
            raise RunError(
                f"serve: expected a run that lies in the served folder; got a link out of it at {place.name!r}. Serve "
                "the folder that it leads to."
            )


def _links_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [folder / entry.name for entry in entries if entry.is_symlink()]
    except FileNotFoundError:
        return []


def seconds_of(value: object) -> float | None:
    """A manifest's time in Unix seconds; None for what is no time."""
    try:
        return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else None
    except (ValueError, OverflowError, OSError):
        return None
