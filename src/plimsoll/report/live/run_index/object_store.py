"""`StoredRuns`: the runs below a folder of an object store, for a `RunsList`.

One listing of all that is below the folder tells which runs there are and what changed, a thousand files a request;
only the manifests of runs that changed are read. A run whose page is open is listed alone in between.
"""

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from plimsoll.errors import ArgumentError
from plimsoll.report.live.run_index.listed_run import Listed, Stamp, listing_of
from plimsoll.runs import Run
from plimsoll.runs.columns.schema import KINDS
from plimsoll.runs.reading.run_folder import RunFolder
from plimsoll.runs.storage import manifest
from plimsoll.runs.storage.location import Stored

_REQUESTS = 16  # manifests that are read at once
_RUN_SECONDS = 5.0  # how old the listing of one run may be

Files = Mapping[str, tuple[int, int]]  # sizes and times in ns, by path


class StoredRuns:
    """Runs below a folder of a store, listed every 10 seconds at most: listings cost."""

    poll_seconds = list_seconds = 10.0
    settled_seconds = 2.0  # their times are in seconds

    def __init__(self, place: Stored, clock: Callable[[], float]) -> None:
        self.folder, self.shown = place.path, str(place)
        self._place, self._clock = place.within(""), clock  # what the page says of it begins there
        self._lock = threading.Lock()
        self._runs: dict[str, tuple[float, Files]] = {}  # by path within the folder: when it was listed, its files
        self._modified: dict[str, float] = {}
        if not place.tree():
            raise ArgumentError(
                f"serve: expected a folder that runs were copied to; got {self.shown}, where nothing is. Correct the "
                "address, or copy a run there first."
            )

    # Raises `ArgumentError` where nothing at all is there: a store has no empty folders.
    def find(self) -> list[Path]:
        """The folders of all runs."""
        now, runs = self._clock(), _by_run(self._place.tree())
        with self._lock:
            self._runs = {name: (now, files) for name, files in runs.items()}
        return [self.folder / name if name else self.folder for name in sorted(runs)]

    def stamp(self, path: Path) -> Stamp | None:
        """The newest time, the size, and a digest of all names, times and sizes."""
        files = self._files(self._name(path))
        if not files:
            return None
        digest = hashlib.blake2s(repr(sorted(files.items())).encode(), digest_size=8).digest()
        newest, whole = max(time for _, time in files.values()), sum(size for size, _ in files.values())
        return ((newest, whole, int.from_bytes(digest)),)

    def rows(self, changed: Sequence[tuple[str, Path, Stamp]]) -> list[Listed]:
        """Return the runs' rows, several at a time, since requests are slow."""
        with ThreadPoolExecutor(_REQUESTS) as pool:
            return list(pool.map(self._row, changed))

    def check(self, path: Path) -> None:
        """There are no links in a store."""
        del path

    def opened(self, path: Path) -> Run:
        """The run."""
        return Run(path.as_posix(), filesystem=self._place.filesystem, warn=False)

    def _row(self, changed: tuple[str, Path, Stamp]) -> Listed:
        run_id, path, stamp = changed
        name, newest = self._name(path), stamp[0][0] / 1e9
        files = self._files(name)
        place = _AsListed(self._place.within(name), files)
        listed = listing_of(
            lambda: RunFolder(place, warn=False), run_id, path, self.folder, newest, lambda file: str(files.get(file))
        )
        return listed if newest else self._timed(listed)

    def _timed(self, found: Listed) -> Listed:
        """Return it with a time if the store has none: of its start, then of its change."""
        known = self._modified.get(found.id)
        self._modified[found.id] = (found.created or 0.0) if known is None else self._clock()
        return replace(found, modified=self._modified[found.id])

    def _files(self, name: str) -> Files:
        """A run's files, as they were at most a few seconds ago."""
        now = self._clock()
        with self._lock:
            listed, files = self._runs.get(name, (float("-inf"), {}))
        if not 0 <= now - listed < _RUN_SECONDS:
            files = _of_run(self._place.within(name).tree())
            with self._lock:
                self._runs[name] = now, files
        return files

    def _name(self, path: Path) -> str:
        name = path.relative_to(self.folder).as_posix()
        return "" if name == "." else name


class _AsListed(Stored):
    """A run's folder, with the names that a listing gave."""

    def __init__(self, place: Stored, files: Files) -> None:
        super().__init__(place.path.as_posix(), place.filesystem, str(place))
        self._files = files

    def names(self, kind: str = "") -> list[str]:
        """Return the entries of a folder."""
        if not kind:
            return sorted({file.partition("/")[0] for file in self._files})
        return sorted(file.removeprefix(f"{kind}/") for file in self._files if file.startswith(f"{kind}/"))


def _by_run(tree: Files) -> dict[str, Files]:
    """Return the files of each run, by the run's path.

    A run is a folder with a manifest. What is below it is its own, except for other runs.
    """
    folders = {folder for folder, _, name in map(_split, tree) if manifest.rank_of(name) is not None}
    by_run: dict[str, dict[str, tuple[int, int]]] = {}
    for path, facts in tree.items():
        above = [path[:i] for i, sign in enumerate(path) if sign == "/"]
        run = next((folder for folder in (*reversed(above), "") if folder in folders), None)
        if run is not None:
            by_run.setdefault(run, {})[path[len(run) + bool(run) :]] = facts
    return {run: _of_run(files) for run, files in by_run.items()}


def _of_run(tree: Files) -> Files:
    """Return the entries of a run's own folder and of those of its kinds."""
    return {path: facts for path, facts in tree.items() if "/" not in path or _split(path)[0] in KINDS}


def _split(path: str) -> Any:
    return path.rpartition("/")
