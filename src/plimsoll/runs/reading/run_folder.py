"""Folder of a run for readers: manifests, valid parts, problems, cached contents."""

import errno
import os
import re
import socket
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.errors import RunError
from plimsoll.runs.columns import row_order
from plimsoll.runs.columns.arrow import array, pc, values_of
from plimsoll.runs.columns.schema import KINDS, Kind
from plimsoll.runs.storage import location, lock, manifest, parquet, parts as _parts
from plimsoll.runs.storage.limits import MOST_NAMES, DamageError
from plimsoll.runs.storage.location import Folder, StorageLocation
from plimsoll.runs.storage.manifest import Session
from plimsoll.runs.storage.parts import Part
from plimsoll.text import printable

_ROUNDING_SECONDS = 2.0  # of a process's start, and of clocks


def gone_writers(manifests: Iterable[Mapping[str, Any]]) -> list[Session]:
    """Return the last sessions of open manifests whose processes on this machine ended."""
    open_ones = [manifest.sessions_of(content) for content in manifests if not content.get("closed")]
    return [sessions[-1] for sessions in open_ones if sessions and not _writes_still(sessions[-1])]


def is_here(content: Mapping[str, Any]) -> bool:
    """Return whether the manifest's last writer was a process of this machine."""
    sessions = manifest.sessions_of(content)
    return bool(sessions) and sessions[-1].host == socket.gethostname()


def _writes_still(session: Session) -> bool:
    if session.host != socket.gethostname() or session.pid <= 0:
        return True
    if not lock.is_alive(session.pid):
        return False
    started = process_start(session.pid)
    return started is None or started <= session.started + _ROUNDING_SECONDS  # else the number is another process's


def process_start(pid: int) -> float | None:
    """Return a process's start in Unix seconds; None where the system has no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
        # proc(5): the 22nd field, counted behind the command's name, which may hold anything.
        ticks = int(stat.rpartition(")")[2].split()[19])
        return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration):
        return None


_NAMED = 6  # runs below a folder that holds none itself, and missing ranks
_LONGEST = 300  # characters of what pyarrow says about a damaged part
_DAMAGED = re.compile(r"\.damaged(-\d+)?$")  # what a writer set aside
_SMALL_BYTES = 1 << 23
_ATTEMPTS = 20  # listings, where a live writer's compaction takes parts away between listing and reading


class NoRunError(RunError):
    """A folder that does not exist or has no run. `below` has the runs below it."""

    def __init__(self, place: StorageLocation, why: str, below: Sequence[str]) -> None:
        self.place, self.why, self.below, self.here = str(place), why, list(below), isinstance(place, Folder)
        super().__init__(f"Run: expected the folder of a run; got {place}, which {why}. {self.advice}")

    @property
    def advice(self) -> str:
        """The folders to name instead."""
        if not self.below:
            elsewhere = "" if self.here else "; plimsoll serve lists the runs of a store"
            return f"Name the folder that a run was recorded into{elsewhere}."
        return f"Runs below it: {named(self.below)}. Name one of them."


def named(runs: Sequence[str]) -> str:
    """Return the first runs by name, and the number of the others."""
    more = f" and {len(runs) - _NAMED} more" if len(runs) > _NAMED else ""
    return f"{', '.join(runs[:_NAMED])}{more}"


class _GoneError(Exception):
    """A listed part that is not there any more."""


class _DamagedError(Exception):
    """A part that cannot be read. It has been noted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncompleteRank:
    """A rank whose records end before those of others."""

    rank: int
    last_step: int  # -1 for none
    of: int  # last step of the other ranks
    lost: bool  # it was killed, rather than having ended

    def __str__(self) -> str:
        ended = "was lost" if self.lost else "ended"
        after = "before its first record" if self.last_step < 0 else f"after step {self.last_step}"
        return (
            f"rank {self.rank}: {ended} {after}, and other ranks continued to step {self.of}; from there on sums are "
            "of the others alone"
        )


class SmallTables:
    """Small tables that were read, since a small part has all collections in one row group, and each asks for it."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}
        self._bytes = 0

    def get(self, key: Hashable, read: Callable[[], Any]) -> Any:
        """Return the table that was read under this key, or read it; past 8 MB those of before are forgotten."""
        if (kept := self._kept.get(key)) is not None:  # in one look-up, since another thread may forget it
            return kept
        table = read()
        if table.nbytes <= _SMALL_BYTES // 4:
            if self._bytes + table.nbytes > _SMALL_BYTES:
                self.forget()
            self._kept[key] = table
            self._bytes += table.nbytes
        return table

    def forget(self) -> None:
        """Forget all tables."""
        self._kept.clear()
        self._bytes = 0


class RunFolder:
    """Listing of a run's folder: manifests by rank, valid parts, and problems.

    Making it raises a `RunError` if the folder has no run, or one of a newer schema.
    """

    def __init__(self, place: Path | StorageLocation, *, warn: bool = True) -> None:
        self.place = place if isinstance(place, StorageLocation) else Folder(place)
        self.path = self.place.path
        self.manifests: dict[int, dict[str, Any]] = {}
        self.parts: list[Part] = []
        self._sessions: dict[int, list[Session]] = {}
        self._damaged: dict[Part, str] = {}
        self._foreign: list[str] = []
        self._missing: list[str] = []
        self._left_out: dict[str, str] = {}
        self.short: list[IncompleteRank] = []
        self._warned: set[str] | None = set() if warn else None
        self.small_tables = SmallTables()
        self.refresh()

    def refresh(self) -> None:
        """List the folder again."""
        self.small_tables.forget()
        missing = self._list()
        for _ in range(_ATTEMPTS):
            # A writer removes what it has replaced; its manifest says so since, where that is why parts are missing.
            again = self._list() if missing else []
            if again == missing:
                break
            missing = again
        self._missing += [f"{part.name}: missing; read without it" for part in missing]
        noted = {problem.partition(":")[0] for problem in self._missing}
        for name in (manifest.file_name(rank) for rank in self.ranks if rank not in self.manifests):
            if name not in noted:
                self._missing.append(f"{name}: missing; the parts are read without it")
        self._find_missing_ranks()
        self.short = short_ranks(self)
        self._warn()

    def _list(self) -> list[Part]:
        """Read the manifests and list the parts; return listed parts that do not exist."""
        self._foreign, self._missing = [], []
        self._load_manifests()
        parts = self._listed_parts()
        self._damaged = {part: why for part, why in self._damaged.items() if part in parts}
        # A damaged part covers nothing: should what it was made of still be there, that is read.
        self.parts, _ = _parts.split(part for part in parts if part not in self._damaged)
        there = {(part.kind, part.rank): list[Part]() for part in parts}
        for part in parts:
            there[part.kind, part.rank].append(part)
        missing: list[Part] = []
        for _, content in sorted(self.manifests.items()):
            missing += manifest.lost_of(content)
            for part in manifest.parts_of(content):
                if not any(part == known or known.covers(part) for known in there.get((part.kind, part.rank), [])):
                    missing.append(part)
        return [part for part in missing if self.visible_end(part) >= part.min_step]

    def _listed_parts(self) -> list[Part]:
        """Return the existing parts, with their rows from the manifests."""
        parts, foreign, unlisted = _parts.listed(self.place)
        if not parts and not any(manifest.rank_of(name) is not None for name in self.place.names()):
            raise _no_run(self.place)
        for name in foreign:
            self._note_foreign(name, "a part")
        self._missing += [f"{kind}: cannot be listed ({why}); read without it" for kind, why in unlisted.items()]
        rows = {part: part.rows for content in self.manifests.values() for part in manifest.parts_of(content)}
        return [replace(part, rows=rows.get(part)) for part in parts]

    def _note_foreign(self, name: str, what: str) -> None:
        """Note a foreign file. One that a writer set aside as damaged counts as missing."""
        noted = self._missing if _DAMAGED.search(name) else self._foreign
        noted.append(f"{name}: not {what} of this run; left alone")

    def _load_manifests(self) -> None:
        manifests: dict[int, dict[str, Any]] = {}
        of_script = location.names_of_runs(self.place)
        for name in self.place.names():
            rank = manifest.rank_of(name)
            if rank is not None:
                self._load_manifest(rank, name, manifests)
            elif name not in (*KINDS, location.SCRIPT_FILE, *of_script) and not name.startswith("."):
                self._note_foreign(name, "a file")
        self.manifests = manifests
        self._sessions = {rank: manifest.sessions_of(content) for rank, content in manifests.items()}

    def _load_manifest(self, rank: int, name: str, found: dict[int, dict[str, Any]]) -> None:
        try:
            text = self.place.read(name)
            content = manifest.parsed(text, f"{self.place}: {name}")
            manifest.check_rank(content, rank)
        except RunError:
            raise
        except (OSError, DamageError) as error:
            self._missing.append(f"{name}: cannot be read ({_reason(error)}); the parts are read without it")
            if rank in self.manifests:
                found[rank] = self.manifests[rank]
        else:
            found[rank] = content
            if not manifest.is_as_written(text):
                self._missing.append(f"{name}: changed since it was written, its checksum differs; read as it is")

    # With a rank killed, each later step is the sum over a part of the ranks, and reads like the whole.
    def _find_missing_ranks(self) -> None:
        missing = sorted(set(range(self.world_size)) - set(self.ranks))
        if missing:
            named = ", ".join(str(rank) for rank in missing[:_NAMED])
            more = f" and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
            self._missing.append(
                f"rank {named}{more}: nothing found, of {self.world_size:,} ranks; "
                "steps are merged over those that are there"
            )

    def _warn(self) -> None:
        if self._warned is None:
            return
        new = [problem for problem in self.problems if problem not in self._warned]
        self._warned.update(new)
        if new:
            more = f" And {len(new) - 1} more; see Run.problems." if len(new) > 1 else ""
            text = printable(f"Run: {self.place}: {new[0]}.{more}", lines=False)
            warnings.warn(text, RuntimeWarning, stacklevel=4)

    @property
    def problems(self) -> list[str]:
        """Damaged, missing and foreign files with consequences, and ranks that end early."""
        return [*self._foreign, *map(str, self.short), *self.missing]

    @property
    def missing(self) -> list[str]:
        """The problems that cost records."""
        damaged = [f"{part.name}: damaged ({why}); read without it" for part, why in self._damaged.items()]
        return [*self._missing, *damaged, *self._left_out.values()]

    def leave_out(self, what: str, found: int, kept: int) -> None:
        """Note that only the first of so many names are read."""
        first = f"the first {kept:,} are read, {found - kept:,} are left out" if kept else "left out"
        self._left_out[what] = f"{found:,} {what}: {first}"
        self._warn()

    @property
    def ranks(self) -> list[int]:
        """Ranks with any file."""
        return sorted({*self.manifests, *(part.rank for part in self.parts)})

    @property
    def world_size(self) -> int:
        """Number of ranks of the training, by rank 0's manifest or else the lowest rank's."""
        sizes = [self.manifests[rank].get("world_size", 1) for rank in sorted(self.manifests)]
        return sizes[0] if sizes else 1

    @property
    def head(self) -> Mapping[str, Any]:
        """Rank 0's manifest, or else the lowest rank's."""
        return self.manifests[min(self.manifests)] if self.manifests else {}

    def of(self, kind: Kind) -> list[Part]:
        """Return the parts of one kind, the oldest first within each rank."""
        return [part for part in self.parts if part.kind == kind]

    def visible_end(self, part: Part) -> int:
        """Return the last step of a part that no later session replaced."""
        sessions = self._sessions.get(part.rank, [])
        ends = [s.from_step - 1 for s in sessions if s.from_step is not None and s.replaces(part)]
        return min([part.max_step, *ends, *self._ends_of_a_left_rank(part.rank)])

    def _ends_of_a_left_rank(self, rank: int) -> list[int]:
        """Return where rank 0 replaced rows after a restart without this rank."""
        if rank < self.world_size:
            return []
        left = max((s.started for s in self._sessions.get(rank, [])), default=0.0)
        later = [s for s in self._sessions.get(min(self.manifests, default=0), []) if s.started > left]
        return [s.from_step - 1 for s in later if s.from_step is not None]

    def read(
        self, parts: Callable[[], list[Part]], load: Callable[[StorageLocation, Part], Any]
    ) -> list[tuple[Part, Any]]:
        """Return the result of `load` for each part.

        If a part is damaged or gone, the folder is listed again and all parts are loaded again.
        """
        attempts = _ATTEMPTS
        while attempts > 0:
            known = len(self._damaged)
            try:
                return [(part, self._loaded(part, load)) for part in parts()]
            except _GoneError:
                attempts -= 1
            except _DamagedError:
                attempts -= len(self._damaged) == known  # each part that is newly found damaged is no attempt
            self.refresh()
        raise RunError(
            f"Run: expected parts that stay long enough to be read; got {_ATTEMPTS} listings of {self.place} whose "
            "parts had gone. Copy the run to a faster file system, or read it when its writer is done."
        )

    def _loaded(self, part: Part, load: Callable[[StorageLocation, Part], Any]) -> Any:
        try:
            return self._tried(part, load)
        except RunError:  # which is an OSError too, and says that the storage does not answer
            raise
        # pyarrow's errors are among these: a cast that it lacks, as from text to lists, is a NotImplementedError.
        except (OSError, ValueError, LookupError, TypeError, MemoryError, NotImplementedError) as error:
            if _has_gone(error):
                raise _GoneError from error
            self._damaged[part] = _reason(error)
            raise _DamagedError from error

    def _tried(self, part: Part, load: Callable[[StorageLocation, Part], Any]) -> Any:
        """Return the result of `load`, tried twice if the storage may have failed."""
        try:
            return load(self.place, part)
        except OSError as error:
            if _has_gone(error) or not self.place.may_succeed(part.name):
                raise
            return load(self.place, part)


def _has_gone(error: Exception) -> bool:
    # pyarrow's FileNotFoundError may come without a number.
    return isinstance(error, FileNotFoundError) or getattr(error, "errno", None) == errno.ESTALE


def _reason(error: Exception) -> str:
    """Return what failed in one line, without the absolute path that errors of a file system repeat."""
    text = error.strerror if isinstance(error, OSError) and error.filename is not None else f"{error}"
    return text.splitlines()[0][:_LONGEST] if text else type(error).__name__


def _no_run(place: StorageLocation) -> NoRunError:
    of_script = location.names_of_runs(place)
    if of_script:
        below, which = list(of_script), "the runs of one script"
    else:
        runs = runs_below(place.path) if isinstance(place, Folder) else []
        below, which = [path.relative_to(place.path).as_posix() for path in runs], "no run itself"
    if below:
        return NoRunError(place, f"holds {which}", below)
    there = not isinstance(place, Folder) or place.path.is_dir()
    return NoRunError(place, "holds no run" if there else "is no folder", below)


def holds_run(folder: Path) -> bool:
    """Return whether a folder itself has a run's manifest or a script's list of runs."""
    return folder.is_dir() and any(
        path.name == location.SCRIPT_FILE or manifest.rank_of(path.name) is not None for path in folder.iterdir()
    )


def runs_below(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the sorted folders of all runs in a folder and below it."""
    runs: list[Path] = []
    for place, below, files in os.walk(folder):
        if any(manifest.rank_of(name) is not None for name in files):
            runs.append(Path(place))
            below[:] = [name for name in below if name not in KINDS]  # a script's other models may lie in there
    return sorted(runs)


def short_ranks(folder: RunFolder) -> list[IncompleteRank]:
    """Return ranks whose records end early, except those that may still be writing."""
    if folder.world_size == 1:
        return []
    spectra, scalars = ({rank: _end(folder, kind, rank) for rank in folder.ranks} for kind in ("spectra", "scalars"))
    last = max(spectra.values(), default=-1)
    ranks: list[IncompleteRank] = []
    for rank, content in sorted(folder.manifests.items()):
        if rank >= folder.world_size:  # a restart with fewer ranks left it behind
            continue
        # Rank 0 writes spectra at each sampled step. Other ranks may have scalars only.
        end = spectra[rank] if rank == 0 else max(spectra[rank], scalars[rank])
        lost: int | None = content.get("lost_after")  # noted by rank 0
        if lost is not None:
            end = min(end, lost)
        settings: dict[str, Any] = content.get("settings") or {}
        numbers = settings.get("recorder", ("loss",))
        if end >= last or (end < 0 and rank and not numbers):
            continue
        is_lost = lost is not None or not content.get("closed")
        if content.get("closed") or (is_lost and _has_ended(folder, rank)):
            ranks.append(IncompleteRank(rank=rank, last_step=end, of=last, lost=is_lost))
    return ranks


def _end(folder: RunFolder, kind: Any, rank: int) -> int:
    return max((folder.visible_end(part) for part in folder.of(kind) if part.rank == rank), default=-1)


def _has_ended(folder: RunFolder, rank: int) -> bool:
    """Return whether a rank that has not closed writes no more.

    Its process is gone. Or it is on another machine, and other ranks have closed.
    """
    content = folder.manifests[rank]
    if gone_writers([content]):
        return True
    others = (other.get("closed") for number, other in folder.manifests.items() if number != rank)
    return not is_here(content) and any(others)


Names = frozenset[tuple[str, ...]]
_OWN = ("loss", "nonfinite", "scale")  # scalars that a watch records: they come first


class RunContents:
    """Contents of a run's parts: steps, names, and which plain series are replicas.

    Parts never change, so what is read of each is remembered.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._steps: dict[Part, NDArray[np.int64]] = {}
        self._words: dict[Part, Names] = {}
        self._lengths: dict[Part, frozenset[int]] = {}
        self._tensors: Mapping[str, tuple[str, ...]] | None = None
        self.is_whole = True  # whether `tensors` has all series
        self.replicas: dict[tuple[str, str], bool] = {}

    def refresh(self) -> None:
        """Forget the contents of removed parts, and what is derived from several parts."""
        counting = set(self.folder.parts)
        self._steps = {part: steps for part, steps in self._steps.items() if part in counting}
        self._words = {part: words for part, words in self._words.items() if part in counting}
        self._lengths = {part: lengths for part, lengths in self._lengths.items() if part in counting}
        self._tensors = None
        self.replicas = {}

    def steps(self, kind: Kind = "spectra") -> NDArray[np.int64]:
        """Return all steps with records of a kind, ascending."""
        by_part = self.folder.read(lambda: self.folder.of(kind), self._steps_in)
        visible = [steps[steps <= self.folder.visible_end(part)] for part, steps in by_part]
        return np.unique(np.concatenate([np.empty(0, dtype=np.int64), *visible]))

    def _steps_in(self, place: StorageLocation, part: Part) -> NDArray[np.int64]:
        if part not in self._steps:
            column = parquet.read(parquet.opened(place, part), part, ["step"])["step"]
            self._steps[part] = values_of(pc.unique(column))
        return self._steps[part]

    def tensors(self) -> Mapping[str, tuple[str, ...]]:
        """Return the names by collection, in the order of registration.

        Names of ranks without a readable manifest come from their parts.
        """
        if self._tensors is None:
            by_collection: dict[str, dict[str, None]] = {}
            for _, content in sorted(self.folder.manifests.items()):
                for series in manifest.series_of(content):
                    by_collection.setdefault(series.collection, {})[series.name] = None
            for collection, name in self._unlisted():
                by_collection.setdefault(collection, {})[name] = None
            self._tensors = {c: self._first(f"series of {c}", tuple(names)) for c, names in by_collection.items()}
            self.is_whole = all(len(names) == len(self._tensors[c]) for c, names in by_collection.items())
        return self._tensors

    def _unlisted(self) -> list[tuple[str, ...]]:
        """Return the names in parts of ranks whose manifest cannot be read."""

        def parts() -> list[Part]:
            return [p for p in self.folder.of("spectra") if p.rank not in self.folder.manifests]

        return sorted({key for _, keys in self.folder.read(parts, self._words_in) for key in keys})

    def scalar_names(self) -> tuple[str, ...]:
        """Return the names of scalars, sorted."""
        by_part = self.folder.read(lambda: self.folder.of("scalars"), self._words_in)
        names = {key[0] for _, keys in by_part for key in keys}
        return tuple(sorted(self._first("scalars", tuple(sorted(names, key=lambda n: (n not in _OWN, n))))))

    def _first(self, what: str, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return as many of the names as are read."""
        if len(names) > MOST_NAMES:
            self.folder.leave_out(what, len(names), MOST_NAMES)
            names = names[:MOST_NAMES]
        return names

    def block_lengths(self) -> tuple[int, ...]:
        """Return the lengths of the blocks of all records, ascending."""
        by_part = self.folder.read(lambda: self.folder.of("spectra"), self._lengths_in)
        return tuple(sorted({length for _, lengths in by_part for length in lengths}))

    def _lengths_in(self, place: StorageLocation, part: Part) -> frozenset[int]:
        if part not in self._lengths:
            file, lengths = parquet.opened(place, part), list[int | None]()
            if "block" in file.schema_arrow.names:
                lengths = pc.unique(parquet.read(file, part, ["block"])["block"]).to_pylist()
            self._lengths[part] = frozenset(length for length in lengths if length is not None)
        return self._lengths[part]

    def _words_in(self, place: StorageLocation, part: Part) -> Names:
        if part not in self._words:
            columns = ["collection", "name"] if part.kind == "spectra" else ["name"]
            file = parquet.opened(place, part, parquet.WORDS[part.kind])
            table = parquet.read(file, part, columns)
            # Table.group_by would import pyarrow.dataset, and with it pandas where that is installed: 0.4 s.
            words = [np.concatenate([values_of(chunk.indices) for chunk in table[c].chunks]) for c in columns]
            distinct = table.take(array(row_order.starts(words)))
            self._words[part] = frozenset(zip(*(distinct[c].to_pylist() for c in columns), strict=True))
        return self._words[part]
