"""`RunsList`: the runs below a folder or in an object store, kept up to date.

A run is read from its manifests and the names of its parts; no Parquet file is opened. What was read is kept until one
of its folders or its manifest changes, so that a look at a thousand runs is a few thousand `stat` calls. A folder of an
object store is listed instead, and less often: one listing of all that is below the folder tells which runs there are
and what changed, a thousand files a request, and only the manifests of runs that changed are read. A run whose page is
open is listed alone in between.
"""

import hashlib
import itertools
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

from plimsoll.errors import ArgumentError, RunError
from plimsoll.report.page.answers import within
from plimsoll.report.verdicts.run_summary import unix_seconds
from plimsoll.runs import Run
from plimsoll.runs.columns.schema import KINDS
from plimsoll.runs.reading.run_folder import RunFolder
from plimsoll.runs.storage import manifest, manifest as _manifest
from plimsoll.runs.storage.location import Stored, place_of

# -- a run of the list -------------------------------------------------------------------------------------------------

_LIVE_SECONDS = 300.0  # an open run that nothing was written to for so long is not called live
_LONGEST = 500  # characters of a problem
# A list of a thousand runs is kept in memory, and a manifest may hold 32 MB.
_MOST_SETTINGS, _LONGEST_SETTING = 64, 100
_LARGEST = 2**53  # integers beyond it are no numbers of JavaScript

Stamp = tuple[
    tuple[int, int, int], ...
]  # changes when something is written to a run; each entry begins with a time in ns
Setting = str | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One run of the list."""

    id: str  # path below the served folder
    name: str
    path: Path
    token: str  # a text that changes whenever something was written
    identity: tuple[object, ...] = ()  # what another run in its place has otherwise, by its manifest
    last_step: int = -1  # the last step with records; -1: none
    closed: bool = False
    created: float | None = None  # Unix seconds
    modified: float = 0.0  # Unix seconds
    tensors: int = 0
    ranks: int = 0
    problem: str | None = None  # the defect of its manifest; None: there is none
    opens: bool = True  # whether it can be read nevertheless
    # Settings of the writer, nested ones by names with dots, and the facts on the model.
    settings: Mapping[str, Setting] = field(default_factory=dict[str, Setting], hash=False)

    def is_live(self, now: float) -> bool:
        """Return whether a training seems to be writing the run."""
        return self.problem is None and not self.closed and now - self.modified < _LIVE_SECONDS


def listing_of(
    catalog: Callable[[], RunFolder], run_id: str, path: Path, root: Path, modified: float, mark: Callable[[str], str]
) -> Listed:
    """The row of a run, broken or not. `mark` says of a file in it what changes when that is replaced."""
    name = (path.name or str(path)).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    try:
        return _of_catalog(catalog(), run_id, name, path, root, modified, mark)
    except Exception as error:  # noqa: BLE001  (a manifest may hold anything, and must not cost the other rows)
        why = (
            within(str(error), root)[:_LONGEST] if isinstance(error, RunError) else f"damaged ({type(error).__name__})"
        )
        token = f"none-{modified}"
        return Listed(id=run_id, name=name, path=path, token=token, modified=modified, problem=why, opens=False)


def _of_catalog(
    catalog: RunFolder, run_id: str, name: str, path: Path, root: Path, modified: float, mark: Callable[[str], str]
) -> Listed:
    manifests, head = catalog.manifests, catalog.head
    ends = [catalog.visible_end(part) for part in (*catalog.of("spectra"), *catalog.of("scalars"))]
    series = [manifest.get("tensors", {}).items() for manifest in manifests.values()]
    names = {(collection, name) for of_rank in series for collection, entries in of_rank for name in entries}
    unread = [] if head else catalog.problems
    return Listed(
        id=run_id,
        name=name,
        path=path,
        token=_token(catalog, mark),
        identity=identity_of(head),
        last_step=max(ends, default=-1),
        closed=len(manifests) >= catalog.world_size and all(m.get("closed") for m in manifests.values()),
        created=unix_seconds(head.get("created")),
        modified=modified,
        tensors=len(names),
        ranks=len(catalog.ranks),
        problem=within(unread[0], root)[:_LONGEST] if unread else None,
        settings=settings_of(head),
    )


def identity_of(manifest: Mapping[str, object]) -> tuple[object, ...]:
    """Return when the run was created, and when and by which process its first session began."""
    sessions = cast("Sequence[Mapping[str, object]]", manifest.get("sessions") or [{}])
    return manifest.get("created"), sessions[0].get("started"), sessions[0].get("pid")


def settings_of(manifest: Mapping[str, object]) -> dict[str, Setting]:
    """Return a manifest's settings: numbers, truth values, short texts or None.

    >>> settings_of({"settings": {"optimizer": {"lr": 0.1}, "layers": [1, 2]}, "parameters": 10})
    {'optimizer.lr': 0.1, 'layers': '[1, 2]', 'parameters': 10}
    """
    settings = cast("Mapping[str, object]", manifest.get("settings") or {})
    facts = {name: manifest[name] for name in ("model", "parameters") if name in manifest}
    most = _MOST_SETTINGS - len(facts)
    entries = [*itertools.islice(_flat(settings, "", 2), most), *facts.items()]
    return {name[:_LONGEST_SETTING]: _setting(value) for name, value in entries}


def _flat(settings: Mapping[str, object], prefix: str, depth: int) -> Iterator[tuple[str, object]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and depth:
            yield from _flat(cast("Mapping[str, object]", value), f"{prefix}{name}.", depth - 1)
        else:
            yield f"{prefix}{name}", value


def _setting(value: object) -> Setting:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) <= _LARGEST:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_SETTING else f"{text[:_LONGEST_SETTING]}\N{HORIZONTAL ELLIPSIS}"


def _token(catalog: RunFolder, mark: Callable[[str], str]) -> str:
    """A digest of all parts' names and all manifests' marks."""
    digest = hashlib.blake2s(digest_size=8)
    for part in sorted(part.name for part in catalog.parts):
        digest.update(part.encode())
    for rank in sorted(catalog.manifests):
        digest.update(f"{rank} {mark(_manifest.file_name(rank))};".encode())
    return digest.hexdigest()


# -- runs in an object store -------------------------------------------------------------------------------------------

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
        if not place.tree():  # a store has no empty folders
            raise ArgumentError(
                f"serve: expected a folder that runs were copied to; got {self.shown}, where nothing is. Correct the "
                "address, or copy a run there first."
            )

    def find(self) -> list[Path]:
        """The folders of all runs."""
        runs = _by_run(self._place.tree())
        now = self._clock()  # after the listing, which may take long
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
        if not kind:
            return sorted({file.partition("/")[0] for file in self._files})
        return sorted(file.removeprefix(f"{kind}/") for file in self._files if file.startswith(f"{kind}/"))


def _by_run(tree: Files) -> dict[str, Files]:
    """Files of each run by its path: of a folder with a manifest, and below it but for other runs."""
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


# -- the list ----------------------------------------------------------------------------------------------------------


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
        """Reads those runs again that have changed, and forgets those that have gone."""
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
        if not Path(os.path.realpath(place)).is_relative_to(root):  # unlike resolve(), it takes loops of links
            raise RunError(
                f"serve: expected a run that lies in the served folder; got a link out of it at {place.name!r}. Serve "
                "the folder that it leads to."
            )


def _links_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [folder / entry.name for entry in entries if entry.is_symlink()]
    except OSError:  # not there, no folder, or not to be listed: what is read of the run says so
        return []
