"""`Live`: the runs of a folder for the live page, each opened once and followed.

An answer is made under the run's own lock and kept until the run has something new, so a slow question to one run
keeps nobody waiting who asks about another.
"""

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from plimsoll.diagnosis import View
from plimsoll.diagnosis.estimates.format_losses import FormatLosses
from plimsoll.diagnosis.tables.cells import Cells, before_step, from_table, joined, size_bytes
from plimsoll.diagnosis.what_if.answer import block_bytes, predictor_bytes
from plimsoll.errors import NotRecordedError, PlimsollError, RunError, StateError
from plimsoll.report.live.run_index import Listed, RunsList, Source, identity_of
from plimsoll.runs import Run
from plimsoll.runs.reading.run_folder import RunFolder
from plimsoll.runs.storage.parts import Part

# -- views that follow a run in progress, and read only what is added --------------------------------------------------

ALL = -(1 << 62)  # from this step on everything may have changed
_COMPUTED = [name for name, member in vars(View).items() if isinstance(member, cached_property)]


class LiveView(View):
    """A view of all of a run, brought up to date by `follow`."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._state = _state_of(self._catalog)

    @property
    def _catalog(self) -> RunFolder:
        return self.run._folder  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    @property
    def size_bytes(self) -> int:
        """The memory of what is kept."""
        narrow = list(self._narrow.values())
        beside = sum(getattr(value, "nbytes", 0) for each in narrow for value in vars(each).values())
        beside += sum(predictor_bytes(each) for each in narrow)
        beside += sum(block_bytes(each) for each in self._blocks.values() if each is not None)
        return beside + sum(size_bytes(cells) for cells in self._cells.values() if cells is not None)

    def copied(self) -> "LiveView":
        """Return another view of the run as it is now, with shared data that was read."""
        copy = LiveView(Run(self.run.path, filesystem=self._catalog.place.filesystem, warn=False))
        copy._cells = {name: cells for name, cells in self._cells.items() if cells is not None}
        copy._narrow = dict(self._narrow)
        return copy

    def adopt(self, other: "LiveView") -> None:
        """Takes over what another view of the same state has read."""
        cells, narrow = other._read  # noqa: SLF001  (its own class)
        self._cells |= {name: value for name, value in cells.items() if name not in self._cells}
        self._narrow |= {name: value for name, value in narrow.items() if name not in self._narrow}

    @property
    def _read(self) -> tuple[dict[str, Cells | None], dict[str, FormatLosses]]:
        return self._cells, self._narrow

    def follow(self) -> None:
        """Looks for what was added, and brings what was read before up to date."""
        known = self._state
        self.run.refresh()
        self._state = _state_of(self._catalog)
        if self._state == known:
            return
        self._narrow.clear()
        self._blocks.clear()
        self._scalars.clear()
        for name in _COMPUTED:
            self.__dict__.pop(name, None)
        since = _since(known, self._state, self._catalog)
        for collection in list(self._cells):
            self._extend(collection, since)

    def _extend(self, collection: str, since: int | None) -> None:
        cells = self._cells[collection]
        if cells is None or since == ALL:
            del self._cells[collection]  # read again when it is asked for
        elif since is not None:
            order = self.run.tensors[collection]
            table = self.run.table(collection, steps=slice(since, None), blocks=False)
            earlier = before_step(cells, since)
            added = self.as_emulated(collection, from_table(collection, table, order) if len(table) else None)
            self._cells[collection] = earlier if added is None else joined(earlier, added, order)


def _state_of(catalog: RunFolder) -> dict[Part, int]:
    """The parts that count, and the last step of each that does."""
    return {part: catalog.visible_end(part) for part in catalog.parts}


# Parts never change, they are added and merged. So what changed since the last look follows from the parts' names: the
# lowest step that a new part holds. Cells below it stay, those from it on are read again. Where that is unknown (a part
# has gone, sessions replaced steps and were merged, rows were thinned, replicas of several ranks), all is read again.
def _since(known: Mapping[Part, int], now: Mapping[Part, int], catalog: RunFolder) -> int | None:
    """Return the lowest step that may have changed; None for none, `ALL` if unknown."""
    gone = [part for part in known if part.kind == "spectra" and part not in now]
    new = [part for part in now if part.kind == "spectra" and part not in known]
    if _may_be_replicas(catalog) and (gone or new):
        return ALL
    if gone and _rewritten_with_loss(catalog):
        return ALL
    merged = {part: [old for old in gone if old.rank == part.rank and part.covers(old)] for part in new}
    if len(gone) != sum(len(parts) for parts in merged.values()):
        return ALL
    starts = [part.min_step for part, of in merged.items() if sum(old.flushes for old in of) != part.flushes]
    starts += [
        min(end, now[part]) + 1
        for part, end in known.items()
        if part.kind == "spectra" and part in now and now[part] != end
    ]
    return min(starts, default=None)


def _may_be_replicas(catalog: RunFolder) -> bool:
    """Return whether ranks hold series that only all steps show as replicas or not."""
    tensors = [m.get("tensors", {}) for m in catalog.manifests.values()] if len(catalog.ranks) > 1 else []
    return any(not entry.get("shared") for each in tensors for names in each.values() for entry in names.values())


def _rewritten_with_loss(catalog: RunFolder) -> bool:
    """Return whether merging may have left out rows, replaced or thinned by age."""
    manifests = catalog.manifests.values()
    return any(m.get("thin") or any(s.get("from_step") is not None for s in m.get("sessions", [])) for m in manifests)


# -- runs that are looked at -------------------------------------------------------------------------------------------

_T = TypeVar("_T")

_PATIENCE_SECONDS = 60.0  # for another question to the same run
_ANSWERS = 256  # answers kept of one run
_PAIRS = 32  # answers kept about two


class LiveRun:
    """One run that is being looked at. Raises as `Run` does."""

    def __init__(self, path: Path, source: Source) -> None:
        self._path, self._source = path, source
        self._lock = threading.RLock()
        self._token: str | None = None
        self._identity: object = None
        self._view: LiveView | None = None
        self._answers: OrderedDict[object, Any] = OrderedDict()
        self.size_bytes = 0

    def answer(self, listed: Listed, question: object, make: Callable[[LiveView], Any]) -> Any:
        """Return `make` of the run's view, cached by state and question (None: never)."""
        with self.held():
            view = self._followed(listed)
            if question is None:
                return make(view)
            if question not in self._answers:
                self._answers[question] = make(view)
                self.size_bytes = view.size_bytes + sum(_size(answer_kept) for answer_kept in self._answers.values())
                if len(self._answers) > _ANSWERS:
                    self._answers.popitem(last=False)
            self._answers.move_to_end(question)
            return self._answers[question]

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """Keep other threads from the run in the block; raise `StateError` after a while."""
        if not self._lock.acquire(timeout=_PATIENCE_SECONDS):
            raise StateError(
                f"serve: expected an answer within {_PATIENCE_SECONDS:.0f} s; got none, since other questions to this "
                "run are being answered. Ask again."
            )
        try:
            yield
        finally:
            self._lock.release()

    def take_if_free(self) -> bool:
        """Takes hold of the run unless another thread has; the caller then is to `let_go`."""
        return self._lock.acquire(blocking=False)

    def let_go(self) -> None:
        """Ends what `take_if_free` began."""
        self._lock.release()

    def judged(self, listed: Listed, make: Callable[[LiveView], _T]) -> _T:
        """Return `make` of a copy of the view. Others need not wait; read data is kept."""
        with self._lock:
            copy = self._followed(listed).copied()
        result = make(copy)
        with self._lock:
            if self._view is not None and self._token == listed.token:
                self._view.adopt(copy)
                self.size_bytes = self._view.size_bytes
        return result

    def _followed(self, listed: Listed) -> LiveView:
        if self._view is not None and self._token == listed.token:
            return self._view
        self._answers.clear()
        self._source.check(self._path)
        view = self._view
        if view is not None:
            view.follow()
        if view is None or self._identity != identity_of(view.run.manifest):
            view = LiveView(self._source.opened(self._path))  # another run may have been put in its place
            self._identity = identity_of(view.run.manifest)
        self._view, self._token = view, listed.token
        return view


class Live:
    """All runs below a folder."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        most_bytes: int = 2 << 30,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.list = RunsList(folder, clock)
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[str, Path], LiveRun] = OrderedDict()
        self._pairs: OrderedDict[object, bytes] = OrderedDict()

    def listed(self, run_id: str) -> Listed:
        """Return a run's row as it is now; raise `NotRecordedError` for an unknown id."""
        listed_run = self.list.run(run_id)
        if listed_run is None:
            raise NotRecordedError(
                "serve: expected the id of a run in the served folder; got one that none has. It may have been moved "
                "or deleted; the list has those that are there."
            )
        return listed_run

    def answer(self, run_id: str, question: object, make: Callable[[LiveView], Any]) -> tuple[Listed, Any]:
        """Return the run's row, and `make` of its view, cached under `question`."""
        listed = self.opened(run_id)
        run = self._opened(listed)
        try:
            result = run.answer(listed, question, make)
        except Exception as error:
            if isinstance(error, PlimsollError) and not isinstance(error, RunError):
                raise
            self.forget(listed)  # with what was read of it, and may be half of something
            now = self.listed(run_id)  # which says so if it has gone
            # A name or a row that was there before is missing where files changed meanwhile. Where none did, it is a
            # mistake in the program, and asking again would be of no use.
            changed = isinstance(error, OSError) or (isinstance(error, LookupError) and now.token != listed.token)
            if isinstance(error, RunError) or not changed:
                raise
            raise RunError(
                "serve: expected a run that stays as it is while it is read; got one whose files changed. Ask again."
            ) from error
        self._trim()
        return listed, result

    def judged(self, listed: Listed, make: Callable[[View], _T]) -> _T:
        """Return what `make` makes of a run for the list. The run is not kept open for it."""
        with self._lock:
            run = self._open.get((listed.id, listed.path))
        if run is not None:
            return run.judged(listed, make)
        self.list.source.check(listed.path)
        return make(View(self.list.source.opened(listed.path)))

    def opened(self, run_id: str) -> Listed:
        """Return a run's row and keep it open if it fits; `RunError` if unreadable."""
        listed = self.listed(run_id)
        if not listed.opens:
            raise RunError(_why(listed.problem or "damaged"))
        self._opened(listed)
        return listed

    def answer_of_two(
        self, first: str, second: str, question: object, make: Callable[[LiveView, LiveView], bytes]
    ) -> bytes:
        """Return what `make` makes of two runs' views, cached for the state of both."""
        key = (first, self.listed(first).token, second, self.listed(second).token, question)
        with self._lock:
            if key in self._pairs:
                return self._pairs[key]
        with _held(*(self._opened(self.listed(run_id)) for run_id in (first, second))):
            _, result = self.answer(
                first, None, lambda one: self.answer(second, None, lambda other: make(one, other))[1]
            )
        with self._lock:
            self._pairs[key] = result
            while len(self._pairs) > _PAIRS:
                self._pairs.popitem(last=False)
        return result

    def forget(self, listed: Listed) -> None:
        """Drops what is kept of a run."""
        with self._lock:
            self._open.pop((listed.id, listed.path), None)

    def _opened(self, listed: Listed) -> LiveRun:
        key = (listed.id, listed.path)
        with self._lock:
            if key not in self._open:
                self._open[key] = LiveRun(listed.path, self.list.source)
            self._open.move_to_end(key)
            return self._open[key]

    def _trim(self) -> None:
        """Drop the runs that were not requested for longest, until the rest fits."""
        with self._lock:
            while len(self._open) > 1 and sum(run.size_bytes for run in self._open.values()) > self._most_bytes:
                self._open.popitem(last=False)


@contextlib.contextmanager
def _held(first: LiveRun, second: LiveRun) -> Generator[None]:
    """Hold both runs at once. A thread that waits for one holds none meanwhile."""
    begun = time.monotonic()
    while time.monotonic() - begun < _PATIENCE_SECONDS:
        with first.held():
            if second.take_if_free():
                try:
                    yield
                finally:
                    second.let_go()
                return
        first, second = second, first
    raise StateError("serve: expected two runs that can be read at a time; got two in use. Ask again.")


def _why(problem: str) -> str:
    whole = ": expected " in problem
    return problem if whole else f"serve: expected a run that can be read; got one that is {problem}. See its run.json."


def _size(answer: object) -> int:
    return len(answer) if isinstance(answer, bytes) else 1024
