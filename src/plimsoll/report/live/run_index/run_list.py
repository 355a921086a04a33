"""`RunsList`: runs below a folder with facts of their manifests, kept up to date.

A run is read from its manifests and the names of its parts; no Parquet file is opened. What was read is kept until one
of its folders or its manifest changes, so that a look at a thousand runs is a few thousand `stat` calls. A folder of an
object store is listed instead, and less often (`object_store`).
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from plimsoll.errors import ArgumentError, RunError
from plimsoll.report.live.run_index.listed_run import Listed as Listed, Stamp as Stamp, listing_of
from plimsoll.report.live.run_index.object_store import StoredRuns
from plimsoll.runs import Run
from plimsoll.runs.columns.schema import KINDS
from plimsoll.runs.reading.run_folder import RunFolder
from plimsoll.runs.storage.location import Stored, place_of


class Source(Protocol):
    """Storage of runs: finds them, notices changes, and opens them.

    `poll_seconds`: how often to look whether something is new. `list_seconds`: how old the list may be in any case.
    `settled_seconds`: a change so soon after a look may bear the same time as the one before it.
    """

    folder: Path
    shown: str
    poll_seconds: float
    list_seconds: float
    settled_seconds: float

    def find(self) -> list[Path]:
        """Return the folders of all runs; raise `RunError` if storage does not answer."""
        ...

    def stamp(self, path: Path) -> Stamp | None:
        """Return a run's stamp, which changes with every write; times in ns first."""
        ...

    def rows(self, changed: Sequence[tuple[str, Path, Stamp]]) -> list[Listed]:
        """Return the rows of runs, each given by its id, path and stamp."""
        ...

    def check(self, path: Path) -> None:
        """Raises `RunError` for a run that must not be opened."""
        ...

    def opened(self, path: Path) -> Run:
        """The run."""
        ...


class RunsList:
    """Runs below a folder of this machine, or by URI of a store. For any thread."""

    def __init__(self, folder: str | os.PathLike[str], clock: Callable[[], float] = time.time) -> None:
        place = place_of(folder)
        self.source: Source = StoredRuns(place, clock) if isinstance(place, Stored) else _Here(folder, place.path)
        self.folder = self.source.folder
        self.version = 0
        self._clock, self._lock = clock, threading.Lock()
        self._looked, self._trouble = float("-inf"), ""
        self._found: dict[str, Listed] = {}
        self._stamps: dict[str, Stamp | None] = {}

    def runs(self, max_age_seconds: float = 0.0) -> list[Listed]:
        """All runs, those written to last first; as they were found at most so long ago.

        Raises `RunError` from when storage does not answer to when it does again.
        """
        with self._lock:
            now = self._clock()
            if not 0 <= now - self._looked < max(max_age_seconds, self.source.list_seconds):
                self._looked = now
                self._look()
            if self._trouble:
                raise RunError(self._trouble)
            return self._sorted()

    def known(self) -> list[Listed]:
        """All runs as they were found last."""
        with self._lock:
            return self._sorted()

    # A run's *id* is its path below the folder ("." for the folder itself). Ids are looked up among the runs that were
    # found, and never made into paths: so no id leads out of the folder.
    def run(self, run_id: str) -> Listed | None:
        """Return the run of that id, as storage last answered; None if there is none."""
        with self._lock:
            known = self._found.get(run_id)
        if known is None:
            self.runs()
            return self._found.get(run_id)
        with self._lock:
            if self._trouble:
                return known
            try:
                self._renew({known.id: known.path})
            except RunError as error:
                self._trouble = str(error)
            return self._found.get(run_id)

    def _sorted(self) -> list[Listed]:
        return sorted(self._found.values(), key=lambda run: (-run.modified, run.id))

    def _look(self) -> None:
        try:
            paths = {self._id_of(path): path for path in reversed(self.source.find())}
            for gone in self._found.keys() - paths.keys():
                self._forget(gone)
            self._renew(paths)
        except RunError as error:
            self._trouble = str(error)
        else:
            self._trouble = ""

    def _renew(self, paths: Mapping[str, Path]) -> None:
        """Reads those runs anew that have changed, and forgets those that have gone."""
        now, changed = self._clock(), list[tuple[str, Path, Stamp]]()
        for run_id, path in paths.items():
            stamp = self.source.stamp(path)
            if stamp is None:
                self._forget(run_id)
            elif run_id not in self._found or self._stamps.get(run_id) != stamp:
                changed.append((run_id, path, stamp))
        for (run_id, _, stamp), listed_run in zip(changed, self.source.rows(changed), strict=True):
            if listed_run != self._found.get(run_id):
                self._found[run_id] = listed_run
                self.version += 1
            newest = max(entry[0] for entry in stamp) / 1e9
            self._stamps[run_id] = stamp if now - newest > self.source.settled_seconds else None

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


class _Here:
    """A folder of this machine."""

    poll_seconds, list_seconds = 1.0, 0.0
    settled_seconds = 0.1  # times of files tick every few milliseconds

    def __init__(self, given: str | os.PathLike[str], path: Path) -> None:
        self.folder, self.shown = path.resolve(), str(path)
        if not self.folder.is_dir():
            raise ArgumentError(
                f"serve: expected a folder that runs are written to; got {str(given)!r}, which does not exist. Name "
                "it, or create it: runs that appear in it later are shown."
            )

    def find(self) -> list[Path]:
        return Run.find(self.folder)

    def stamp(self, path: Path) -> Stamp | None:
        return stamp_of(path)

    def rows(self, changed: Sequence[tuple[str, Path, Stamp]]) -> list[Listed]:
        return [listed(run_id, path, self.folder, stamp) for run_id, path, stamp in changed]

    def check(self, path: Path) -> None:
        refuse_links_out(path, self.folder)

    def opened(self, path: Path) -> Run:
        return Run(path, warn=False)


def stamp_of(path: Path) -> Stamp | None:
    """Return the stamp of a run: times and numbers of its folders and first manifest."""
    entries: list[tuple[int, int, int]] = []
    whole = os.fspath(path)
    for place in ("", *KINDS, "run.json"):
        try:
            status = os.stat(f"{whole}{os.sep}{place}")  # noqa: PTH116  (a thousand runs at a time: paths cost more)
        except OSError:
            if not place:
                return None
            entries.append((0, 0, 0))
        else:
            entries.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(entries)


def listed(run_id: str, path: Path, root: Path, stamp: Stamp) -> Listed:
    """Return the row of a run. A defect of the run costs only its own row."""

    def catalog() -> RunFolder:
        refuse_links_out(path, root, within_folders=False)
        return RunFolder(path, warn=False)

    def mark(name: str) -> str:
        status = (path / name).stat()
        return f"{status.st_mtime_ns} {status.st_size} {status.st_ino}"

    return listing_of(catalog, run_id, path, root, max(entry[0] for entry in stamp) / 1e9, mark)


def refuse_links_out(path: Path, root: Path, within_folders: bool = True) -> None:
    """Raise `RunError` if a run's folder, or a path in it, links out of the root."""
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
