"""`RunWriter`, which training calls: a queue of records for `worker`'s thread."""

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from plimsoll.checks import integer, items, number
from plimsoll.errors import ArgumentError, PlimsollError, RunError
from plimsoll.results import as_data
from plimsoll.runs.records import Record, Sink
from plimsoll.runs.storage import lock, manifest, parts
from plimsoll.runs.storage.location import Folder, folder_to_write
from plimsoll.runs.writing import compaction
from plimsoll.runs.writing.part_flusher import DroppedRecords, PartFlusher
from plimsoll.runs.writing.rank_folder import RankFolder, SeriesRegistry
from plimsoll.runs.writing.sink_feed import SinkFeed
from plimsoll.runs.writing.worker import Worker
from plimsoll.text import warn_user

_AS_COUNTED = "Pass rank and world_size as torch.distributed counts them."
_LEAVE_OUT = "Leave it out, unless there is a reason for another number."
_LAST_STEP = 1 << 62  # steps are 64-bit integers in the files
_SINK_METHODS = ("open", "put", "flush", "close")
_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()


class RunWriter:
    """Writer of a run folder in a background thread. It never stops a training.

    `write` and `submit` take microseconds and raise nothing. Later failures (a full disk, a removed folder, a `produce`
    that raises) are warned of once, counted in `dropped`, and recorded as an event as soon as writing works again.
    Records that are still in memory are written then.

    An existing run is continued: rows at steps that this session records again, from its first step on, replace
    earlier ones. Damaged files are set aside with a warning and an event. If that fails, the session is recorded in the
    folder PATH-beside.

    After a fork the child's copy does nothing.

    Args:
        path: The run's folder. It is created if necessary.
        settings: Settings to keep with the run.
        rank: This process's rank. Each rank writes its own parts to the same folder.
        world_size: Number of ranks.
        resume_from: Step from which on earlier rows are replaced at once. Default: the first recorded step.
        flush_seconds: Time between two flushes, which a killed process may lose.
        compact_above: Number of parts of one kind above which parts are merged.
        thin: Pairs of age_steps and keep_every: of older spectra only every keep_every-th step stays.
        queue_bytes: Bound on the spectra that wait to be written. Scalars and events have 64 MB of their own.
        sinks: Sinks that receive every step too.

    Raises:
        ArgumentError: An argument is invalid, the path is a URI, or another writer has this run and rank open.
        RunError: The folder has other content, has a run of a newer schema, or cannot be written to.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        settings: Mapping[str, object] | None = None,
        rank: int = 0,
        world_size: int = 1,
        resume_from: int | None = None,
        flush_seconds: float = 5.0,
        compact_above: int = 64,
        thin: Sequence[tuple[int, int]] = (),
        queue_bytes: int = 64 << 20,
        sinks: Sequence[Sink] = (),
    ) -> None:
        world_size = integer("RunWriter", "world_size", world_size, low=1, remedy=_AS_COUNTED)
        rank = integer("RunWriter", "rank", rank, low=0, high=world_size - 1, remedy=_AS_COUNTED)
        flush_seconds = number(
            "RunWriter", "flush_seconds", flush_seconds, above=0, at_most=threading.TIMEOUT_MAX, remedy="Leave it out."
        )
        compact_above = integer("RunWriter", "compact_above", compact_above, low=2, remedy=_LEAVE_OUT)
        queue_bytes = integer("RunWriter", "queue_bytes", queue_bytes, low=1, remedy=_LEAVE_OUT)
        if resume_from is not None:
            resume_from = checked_step("RunWriter", "resume_from", resume_from)
        settings, sinks = _checked_settings(settings), _checked_sinks(sinks)
        log = _log_of(
            folder_to_write("RunWriter", path).absolute(),
            rank=rank,
            world_size=world_size,
            settings=settings,
            resume_from=resume_from,
            compact_above=compact_above,
            thin=compaction.rules(thin),
        )
        self._path, self._dropped = log.path, DroppedRecords()
        self._next_step = _next_step(log, world_size)
        self._registry = SeriesRegistry(log.series)
        self._worker = Worker(
            PartFlusher(log, self._dropped),
            SinkFeed(sinks, log.path, settings),
            self._dropped,
            self._registry,
            flush_seconds=flush_seconds,
            queue_bytes=queue_bytes,
        )
        _workers.add(self._worker)
        lock.add(self)
        self.before_read: Callable[[], object] | None = None  # hands over what its owner holds back; on any thread
        # Closes when the writer is collected and when the interpreter ends, whichever is first.
        self._finalizer = weakref.finalize(self, self._worker.close, 60.0)

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._path

    @property
    def next_step(self) -> int:
        """Step after the last one of any rank when this writer opened the run, or 0."""
        return self._next_step

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of dropped records, by reason."""
        return self._dropped.counts

    def series(self, collection: str, name: str, *, format: str, shared: bool = True) -> int:  # noqa: A002
        """Return the number of a series. New series are registered.

        Args:
            collection: Name of the collection.
            name: Name of the tensor.
            format: Format of the dtype that the values were measured in.
            shared: Whether ranks hold parts of one tensor. If False, ranks with identical spectra hold replicas, which
                readers count once.
        """
        return self._registry.number(collection, name, format, shared)

    def write(self, record: Record) -> None:
        """Queue a record. Its arrays belong to the writer from now on."""
        self._worker.put(record)

    def submit(self, produce: Callable[[], Iterable[Record]], size_bytes: int, *, numbers: bool = False) -> bool:
        """Queue a function that creates records in the background thread.

        Args:
            produce: The function.
            size_bytes: Memory that the function keeps until it has run.
            numbers: Whether it creates only scalars and events, which have room of their own in the queue.

        Returns:
            False if there is no room. One record is then counted as dropped.
        """
        return self._worker.produce(produce, size_bytes, numbers=numbers)

    def write_manifest(self, **more: object) -> None:
        """Add entries to this rank's manifest at the next flush, as text if not JSON.

        Raises:
            ArgumentError: The manifest itself uses one of the names.
        """
        taken = sorted(manifest.RESERVED & set(more))
        if taken:
            raise ArgumentError(
                f"RunWriter.write_manifest: expected names that the manifest does not use itself; got {taken}. "
                "Choose other names."
            )
        self._worker.change({name: as_data(value, str) for name, value in more.items()})

    def flush(self, timeout: float | None = 60.0) -> bool:
        """Wait until all queued records are on disk or counted as dropped.

        A step whose last batch has not come is not written yet.

        Args:
            timeout: Longest time to wait in seconds. None: no limit.

        Returns:
            False if that was not so in time.
        """
        return self._worker.flush(timeout)

    def close(self, timeout: float | None = 60.0) -> None:
        """Write all queued records, compact, and release the run.

        A second call continues an interrupted one. A first SIGINT or SIGTERM waits for the writing, at most 5 seconds,
        and then has its usual effect.

        Args:
            timeout: Longest time to wait in seconds. None: no limit.
        """
        self._worker.close(timeout)
        self._finalizer.detach()  # after it: an interrupted close is taken up again at the latest when the process ends

    def after_fork(self) -> None:
        """Make the child's copy inert."""
        self.before_read = None
        self._finalizer.detach()

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RunWriter: {self._path}, {len(self._registry.series)} series>"


def checked_step(operation: str, name: str, value: object) -> int:
    """Return the number of a first step, if it is one."""
    remedy = "Give the number of the first step, as the restored checkpoint counts, or leave it out."
    return integer(operation, name, value, low=0, high=_LAST_STEP, remedy=remedy)


def _checked_settings(value: object) -> dict[str, object]:
    if value is not None and not isinstance(value, Mapping):
        raise ArgumentError(
            f"RunWriter: expected settings to be a mapping; got settings={value!r}. Give a dict of what to keep."
        )
    return dict(cast("Mapping[str, object]", value or {}))


def _checked_sinks(value: object) -> list[Any]:
    sinks = items("RunWriter", "sinks", value)
    for sink in sinks:
        if not all(callable(getattr(sink, method, None)) for method in _SINK_METHODS):
            raise ArgumentError(
                f"RunWriter: expected sinks with the methods {', '.join(_SINK_METHODS)}; got {sink!r}. "
                "plimsoll.runs.as_sink makes one of a name, a function or an object with put."
            )
    return sinks


def _log_of(path: Path, **options: Any) -> RankFolder:
    """Return the rank's folder, or one next to it if damage prevents a session there."""
    try:
        return RankFolder(path, **options)
    except RunError:
        raise
    except OSError as error:
        beside = path.with_name(f"{path.name}-beside")  # the same for all ranks
        message = f"{path} is damaged and cannot be continued ({error}); this session is recorded in {beside}"
        warn_user(f"plimsoll: {message}.")
        try:
            log = RankFolder(beside, **options)
        except PlimsollError:
            raise
        except OSError as further:
            raise RunError(
                f"RunWriter: expected a folder to write the run to; got {path}, where that fails ({error}), as in "
                f"{beside} ({further}). Give another path."
            ) from further
    log.found.append(("damaged", message, {"folder": str(path)}))
    return log


def _next_step(log: RankFolder, world_size: int) -> int:
    last = -1 if log.last_step is None else log.last_step
    if world_size > 1:  # ranks that were killed have not all got equally far, and must go on alike
        last = max([last, *(part.max_step for part in parts.listed(Folder(log.path))[0])])
    return last + 1


def _after_fork() -> None:
    for worker in list(_workers):
        worker.after_fork()
    for writer in lock.writers():
        writer.after_fork()
    lock.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
