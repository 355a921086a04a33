"""One rank's share of a run folder, under its lock: manifest, parts, compaction."""

import errno
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.errors import RunError
from plimsoll.runs.columns.arrow import Table, pc
from plimsoll.runs.columns.schema import KINDS, Kind, Series
from plimsoll.runs.reading.spectra import merge_choices
from plimsoll.runs.storage import atomic_files, manifest, parquet, parts as _parts
from plimsoll.runs.storage.limits import stored_word
from plimsoll.runs.storage.location import Folder
from plimsoll.runs.storage.lock import Lock
from plimsoll.runs.storage.parts import Part
from plimsoll.runs.writing import compaction
from plimsoll.spectrum import Source
from plimsoll.text import warn_user


class SeriesRegistry:
    """Numbers of a writer's series, those of earlier sessions first."""

    def __init__(self, former: Sequence[Series]) -> None:
        self.series = list(former)
        self._guard = threading.RLock()
        self._numbers = {(s.collection, s.name, s.format, s.shared): i for i, s in enumerate(self.series)}

    # Any thread may register a series. Known ones are looked up without a lock.
    def number(self, collection: str, name: str, fmt: str, shared: bool) -> int:
        """Return the number of a series, registering a new one."""
        key = (collection, name, fmt, shared)
        known = self._numbers.get(key)
        return self._registered(key) if known is None else known

    def _registered(self, key: tuple[str, str, str, bool]) -> int:
        collection, name, fmt, shared = key
        stored = {"collection": stored_word(collection), "name": stored_word(name)}
        series = Series(**stored, format=Source(fmt).format, shared=shared)
        canonical = (series.collection, series.name, series.format, shared)
        with self._guard:
            if canonical not in self._numbers:
                self.series.append(series)
                self._numbers[canonical] = len(self.series) - 1
            self._numbers[key] = self._numbers[canonical]
            return self._numbers[key]

    def after_fork(self) -> None:
        """Replace the lock: one held at the fork is never released in the child."""
        self._guard = threading.RLock()


# What is merged into one part when the run is closed, some 3 seconds' work: a training that has ended is not kept long.
_CLOSING_BYTES = 32 << 20
# The list of parts is written after a flush where that takes this share of the time at most: of very many series the
# manifest is long.
_LISTING_SHARE = 0.05
# After these errors a folder next to this one could not be written to either.
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


class RankFolder:
    """Parts and manifest of one rank, open for writing."""

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        world_size: int,
        settings: Mapping[str, object],
        resume_from: int | None,
        compact_above: int,
        thin: compaction.Rules,
    ) -> None:
        self.path, self.rank = path, rank
        # Kind, message and details of events about the state of the folder, to be recorded first.
        self.found: list[tuple[str, str, dict[str, object]]] = []
        self._above, self._thin = compact_above, thin
        self._guard = threading.Lock()
        self._lost: list[Part] = []  # of this rank: listed or set aside, and not there any more
        self._written, self._took = 0.0, 0.0  # when the manifest was written last, and how long that took
        _prepare(path)
        try:
            self._lock = Lock(path, rank)
            try:
                self._open(world_size, settings, resume_from)
            except BaseException:
                self._lock.release()
                raise
        except RunError:
            raise
        except OSError as error:
            if error.errno not in _REFUSED:  # damage: what lies there is not what a run has there
                raise
            raise _not_to_be_written(path, error) from error

    def _open(self, world_size: int, settings: Mapping[str, object], resume_from: int | None) -> None:
        fresh = manifest.fresh(rank=self.rank, world_size=world_size, settings=settings)
        former = self._former_manifest()
        self._lost = manifest.lost_of(former)
        self._load_parts({part: part for part in manifest.parts_of(former)})
        self._sessions = manifest.sessions_of(former)
        self.series = manifest.series_of(former)
        self.manifest: dict[str, Any] = {**former, **fresh}
        if former:
            self.manifest["created"] = former.get("created", fresh["created"])
            self.manifest["dropped"] = former.get("dropped", {})
        self.manifest.pop("ranks_merged", None)
        self.manifest["thin"] = [list(rule) for rule in self._thin]
        self.last_step = self._last_step()  # of earlier sessions, as far as it is valid
        self._next = max([0, *(p.last for p in self._parts), *(s.first_flush for s in self._sessions)]) + 1
        self._sessions.append(manifest.new_session(self._sessions, self._next, resume_from))
        if resume_from is not None and self.last_step is not None:
            self.last_step = min(self.last_step, resume_from - 1) if resume_from > 0 else None
        if former:
            self._note_continued(resume_from)
        elif self._parts and not self.found:
            name = manifest.file_name(self.rank)
            message = f"{name}: was missing; what lay there and its settings are not known"
            self.found.append(("damaged", message, {"file": name}))
        self.write_manifest()
        self._remove_replaced()

    def _note_continued(self, resume_from: int | None) -> None:
        details: dict[str, object] = {"session": len(self._sessions), "last_step": self.last_step}
        replaced = "" if resume_from is None else f"; what lay at step {resume_from} and after is replaced"
        after = "before its first step" if self.last_step is None else f"after step {self.last_step}"
        message = f"continued by session {len(self._sessions)} {after}{replaced}"
        self.found.append(("continued", message, details | {"resume_from": resume_from}))

    def _former_manifest(self) -> dict[str, Any]:
        """Return the earlier sessions' manifest; set aside a damaged one and its settings."""
        path = self.path / manifest.file_name(self.rank)
        try:
            return manifest.read(path)
        except FileNotFoundError:
            return {}
        except RunError:
            raise
        except (OSError, ValueError) as error:
            self._set_aside(path, f"the manifest cannot be read ({error})")
            return {}

    def _load_parts(self, expected: Mapping[Part, Part]) -> None:
        """List the parts with the manifest's row counts; missing ones are listed as lost."""
        for kind in KINDS:
            self._make_folder(kind)
            atomic_files.sweep(self.path / kind, f"r{self.rank:05d}-*")
        atomic_files.sweep(self.path, manifest.file_name(self.rank))
        found = _parts.listed(Folder(self.path), self.rank)[0]
        self._parts, covered = _parts.split(expected.get(part, part) for part in found)
        there = {*found}
        for part in expected:
            if part not in there and not any(p.kind == part.kind and p.covers(part) for p in found):
                self._lost.append(part)
        for part in covered:
            atomic_files.remove(self.path / part.name)

    def _make_folder(self, kind: Kind) -> None:
        folder = self.path / kind
        try:
            folder.mkdir(exist_ok=True)
            next(folder.iterdir(), None)
        except OSError as error:
            self._set_aside(folder, f"no folder of parts ({error})")
            folder.mkdir()

    def _last_step(self) -> int | None:
        steps = [self._visible_end(p) for p in self._parts if p.kind != "events"]
        return max(steps, default=None)

    def _visible_end(self, part: Part) -> int:
        ends = [s.from_step - 1 for s in self._sessions if s.from_step is not None and s.replaces(part)]
        return min([part.max_step, *ends])

    def _remove_replaced(self) -> None:
        for part in [p for p in self._parts if self._visible_end(p) < p.min_step]:
            atomic_files.remove(self.path / part.name)
            self._parts.remove(part)

    # -- writing

    def replace_from(self, step: int) -> None:
        """Invalidate earlier sessions' rows from a step on, before anything is written."""
        with self._guard:
            self._sessions[-1] = replace(self._sessions[-1], from_step=step)
        self.write_manifest()

    def write_manifest(self) -> None:
        """Write the current state into the manifest."""
        self.manifest["sessions"] = manifest.session_entries(self._sessions)
        with self._guard:
            self.manifest["parts"] = manifest.listing_of(self._parts)
            self.manifest["lost"] = manifest.listing_of(self._lost)
        self.manifest.pop("tensors", None)  # the longest entry goes last
        self.manifest["tensors"] = manifest.listing(self.series)
        begun = time.monotonic()
        manifest.write(self.path / manifest.file_name(self.rank), self.manifest)
        self._written = time.monotonic()
        self._took = self._written - begun

    def list_parts(self) -> None:
        """Write the manifest for its list of parts, unless that is slow and was recent."""
        if (time.monotonic() - self._written) * _LISTING_SHARE >= self._took:
            self.write_manifest()

    def renew(self) -> bool:
        """Confirm folder and lock. Return True if a lost folder was created again."""
        left = [kind for kind in KINDS if (self.path / kind).is_dir()]
        missing = len(left) < len(KINDS)
        if missing:
            for kind in KINDS:
                (self.path / kind).mkdir(parents=True, exist_ok=True)
        self._lock.renew()
        if missing:
            with self._guard:
                found = _parts.split(_parts.listed(Folder(self.path), self.rank)[0])[0]
                known, names = {part.name: part for part in self._parts}, {part.name for part in found}
                gone = [part for part in self._parts if part.name not in names]
                # Without any of its folders the run begins again; else what was in those that have gone is lost.
                self._lost = [*self._lost, *gone] if left else []
                self._parts = [known.get(part.name, part) for part in found]  # with their numbers of rows
            self.write_manifest()
        return missing

    def next_flush(self) -> int:
        """Return the number of this flush. Every attempt has a number of its own."""
        self._next += 1
        return self._next - 1

    def append(self, kind: Kind, flush: int, table: Table) -> None:
        """Write one part."""
        low, high = pc.min_max(table["step"]).as_py().values()
        part = Part(
            kind=kind, rank=self.rank, first=flush, last=flush, generation=0, min_step=low, max_step=high,
            rows=len(table),
        )  # fmt: skip
        parquet.write(self.path / part.name, kind, [table])
        with self._guard:
            self._parts.append(part)

    # -- compacting

    def is_due(self) -> bool:
        """Return whether there are parts to compact."""
        return any(self._due(kind) for kind in KINDS)

    def compact(self, *, closing: bool = False) -> None:
        """Merge the parts that are due. On closing, also merge the newest small ones."""
        for kind in KINDS:
            while parts := self._due(kind):
                self._merge(parts)
            while closing and len(parts := self._small(kind)) > 1:
                self._merge(parts)

    def _due(self, kind: Kind) -> Sequence[Part]:
        parts = self._of(kind)
        return _parts.due(parts, self._above) or compaction.due(parts, self._thin)

    def _of(self, kind: Kind) -> list[Part]:
        with self._guard:
            return sorted((p for p in self._parts if p.kind == kind), key=lambda p: p.first)

    def _small(self, kind: Kind) -> list[Part]:
        """Return the newest parts that together stay below the limit."""
        chosen: list[Part] = []
        room = _CLOSING_BYTES
        for part in reversed(self._of(kind)):
            room -= (self.path / part.name).stat().st_size
            if room < 0:
                break
            chosen.insert(0, part)
        return chosen

    # No failure is handled here: OSError reaches the caller, which keeps the records and tries again. The thread that
    # writes and the thread that compacts share state under `_guard`, which is never held while a file is written.
    def _merge(self, parts: Sequence[Part]) -> None:
        target = self._target(parts)
        try:
            target = replace(target, rows=compaction.merge(self.path, parts, target, self._keep))
        except compaction.DamagedPartError as error:
            with self._guard:
                self._parts.remove(error.part)
                self._lost.append(error.part)
            self._set_aside(self.path / error.part.name, f"a damaged part ({error})")
            return
        with self._guard:
            self._parts = [p for p in self._parts if p not in parts] + [target]
        for part in parts:
            atomic_files.remove(self.path / part.name)

    def _target(self, parts: Sequence[Part]) -> Part:
        return Part(
            kind=parts[0].kind,
            rank=self.rank,
            first=parts[0].first,
            last=parts[-1].last,
            generation=compaction.generation(parts, self._thin, self._of(parts[0].kind)),
            min_step=min(p.min_step for p in parts),
            max_step=max(max(self._visible_end(p), p.min_step) for p in parts),
        )

    def _keep(self, part: Part, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows of an input stay: neither replaced later nor thinned out."""
        lasting = steps <= self._visible_end(part)
        if part.kind == "spectra" and self._thin:
            lasting &= compaction.kept(steps, self._thin, max(p.max_step for p in self._of("spectra")))
        return lasting

    def _set_aside(self, path: Path, why: str) -> None:
        target = path.with_name(f"{path.name}.damaged")
        number = 1
        while os.path.lexists(target):
            number += 1
            target = path.with_name(f"{path.name}.damaged-{number}")
        atomic_files.rename(path, target)
        message = f"{path.name}: {why}; set aside as {target.name}"
        warn_user(f"plimsoll: {self.path} is damaged. {message}. This session continues without it.")
        self.found.append(("damaged", message, {"file": str(path.relative_to(self.path))}))

    def finish(self, dropped: Mapping[str, int]) -> None:
        """Write into the manifest that the run was closed properly."""
        self.manifest["dropped"] = dict(dropped)
        if self.rank == 0 and self.manifest["world_size"] > 1:
            choices = merge_choices(self.path)
            if choices is not None:
                self.manifest["ranks_merged"] = choices
        self.manifest["closed"] = datetime.now(UTC).isoformat(timespec="seconds")
        self.write_manifest()

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def abandon(self) -> None:
        """Abandon the lock, in a forked child."""
        self._lock.abandon()

    def add_series(self, series: Sequence[Series]) -> None:
        """Set the registered series."""
        self.series = list(series)


def _prepare(path: Path) -> None:
    """Create the folder. Reject one that has content and nothing that looks like a run's."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        names = [p.name for p in path.iterdir() if not p.name.startswith(".")]
    except OSError as error:
        raise _not_to_be_written(path, error) from error
    is_run = any(name in KINDS or manifest.rank_of(name) is not None for name in names)
    if names and not is_run:
        raise RunError(
            f"RunWriter: expected an empty folder or one that holds a run; got {path} with {sorted(names)[:3]} in it. "
            "Give the run a folder of its own, for example one below this."
        )


def _not_to_be_written(path: Path, error: OSError) -> RunError:
    return RunError(
        f"RunWriter: expected a folder to write the run to; got {path}, where that fails: {error}. "
        "Give another path, or make room and rights there."
    )
