"""`Run`: a run read from its folder, during or after its writing.

Each call reads only the rows that it needs. New records of an open run are visible after `refresh`.
"""

import itertools
import json
import math
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll import checks, display
from plimsoll.checks import integer
from plimsoll.errors import ArgumentError, NotRecordedError
from plimsoll.runs.columns import row_order
from plimsoll.runs.columns.arrow import Table, values_of
from plimsoll.runs.importing import tracker_files
from plimsoll.runs.reading import module_casts, spectra as _spectra, statistics
from plimsoll.runs.reading.row_selection import Steps, matching, select, unknown
from plimsoll.runs.reading.run_folder import RunContents, RunFolder, gone_writers, runs_below
from plimsoll.runs.records import ERRORS, Event
from plimsoll.runs.storage import limits
from plimsoll.runs.storage.location import Folder, folder_to_write, is_elsewhere, place_of
from plimsoll.runs.storage.lock import write_for_reader
from plimsoll.spectrum import ErrorSums, Spectrum
from plimsoll.tensor_collections import NAMES


class Run:
    """A run in a folder, for reading.

    Values are true values: a recorded scale (a loss scale) is undone. Ranks are merged: shards of a tensor are added
    up, replicas are counted once. A damaged part costs only its own rows. `problems` has it, and a warning is given.

    Args:
        path: The run's folder. Or a URI that pyarrow or fsspec supports, ``s3://bucket/exp1``. Or a path in
            `filesystem`.
        filesystem: A file system of `pyarrow.fs` or fsspec. Default: local, or by the URI.
        warn: Whether to warn of problems. Default: True.

    Raises:
        RunError: The folder has no run or a run of a newer schema, or the storage does not answer.
        ArgumentError: The URI is of an unknown kind.
        MissingExtraError: The package that opens the URI is missing.

    >>> import tempfile
    >>> from plimsoll.runs import RunWriter, Scalars
    >>> folder = tempfile.TemporaryDirectory()
    >>> with RunWriter(folder.name) as writer:
    ...     for step in range(3):
    ...         writer.write(Scalars(step=step, values={"loss": 1 / (step + 1)}))
    >>> steps, values = Run(folder.name).scalars("loss")
    >>> steps.tolist(), values.round(2).tolist()
    ([0, 1, 2], [1.0, 0.5, 0.33])
    >>> folder.cleanup()
    """

    def __init__(self, path: str | os.PathLike[str], *, filesystem: Any = None, warn: bool = True) -> None:
        place = place_of(path, filesystem)
        if isinstance(place, Folder):
            write_for_reader(place.path)
        self._folder = RunFolder(place, warn=warn)
        self._contents = RunContents(self._folder)

    @staticmethod
    def find(folder: str | os.PathLike[str]) -> list[Path]:
        """Return the sorted folders of all runs in a local folder and below it."""
        checks.path("Run.find", "a folder", folder, remedy='Give for instance "runs".')
        if is_elsewhere(folder):
            raise ArgumentError(
                f"Run.find: expected a local folder; got {folder}. List remote storage with its own tools."
            )
        return runs_below(folder)

    # -- runs of other trackers

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> "Run":
        """Return the run at a path, whoever recorded it.

        Args:
            path: A run's folder or URI; or event files of TensorBoard, an offline run of W&B, or a CSV file.

        Raises:
            RunError: There is none of these, or it is damaged.
            ArgumentError: A CSV file has no column of steps.
            MissingExtraError: The package of the tracker is missing.
        """
        checks.path("Run.of", "a run", path, remedy='Give for instance "runs/exp1".')
        kind = tracker_files.kind_of(path)
        return cls(path) if kind is None else cls._imported("Run.of", kind, path, None)

    @classmethod
    def from_csv(
        cls,
        path: str | os.PathLike[str],
        *,
        step: str | None = None,
        delimiter: str | None = None,
        to: str | os.PathLike[str] | None = None,
    ) -> "Run":
        """Return the run in a CSV file: its columns of numbers are scalars by name.

        Args:
            path: The file. Its first line names the columns.
            step: Name of the column of steps. Default: the one that trackers call so ("step", "global_step", ...).
            delimiter: Character between cells. Default: a tab in a file that ends in .tsv, else a comma.
            to: New folder to keep the run in. Default: a temporary one, removed when the run is collected.

        Raises:
            ArgumentError: There is no such column of steps.
            RunError: The file cannot be read, or is no table of numbers.
        """
        return cls._imported("Run.from_csv", "csv", path, to, step=step, delimiter=delimiter)

    @classmethod
    def from_tensorboard(cls, path: str | os.PathLike[str], *, to: str | os.PathLike[str] | None = None) -> "Run":
        """Return the run in event files of TensorBoard: its scalars are under their tags.

        Args:
            path: The folder of one run's event files, or one file.
            to: New folder to keep the run in. Default: a temporary one, removed when the run is collected.

        Raises:
            RunError: There is no event file, or one is damaged.
            MissingExtraError: tensorboard is not installed.
        """
        return cls._imported("Run.from_tensorboard", "tensorboard", path, to)

    @classmethod
    def from_wandb(
        cls,
        path: str | os.PathLike[str],
        *,
        step: str | None = None,
        to: str | os.PathLike[str] | None = None,
    ) -> "Run":
        """Return the run that W&B wrote offline: the numbers in its history are scalars.

        Nested keys are joined by dots.

        Args:
            path: The folder offline-run-..., or the .wandb file in it.
            step: Key of the steps, if the run logs them itself. Default: W&B's own.
            to: New folder to keep the run in. Default: a temporary one, removed when the run is collected.

        Raises:
            ArgumentError: The run has no such key.
            RunError: There is no .wandb file, or it is damaged.
            MissingExtraError: wandb is not installed.
        """
        return cls._imported("Run.from_wandb", "wandb", path, to, step=step)

    @classmethod
    def _imported(
        cls,
        operation: str,
        kind: tracker_files.Kind,
        path: str | os.PathLike[str],
        to: str | os.PathLike[str] | None,
        **options: str | None,
    ) -> "Run":
        given = checks.path(operation, "a tracker's file", path, remedy='Give for instance "export.csv".')
        table = tracker_files.read(given, kind, **options)
        if to is not None:
            table.write(folder_to_write(operation, to), kind)
            return cls(to)
        temporary = Path(tempfile.mkdtemp(prefix="plimsoll-"))
        try:
            source = given.resolve()
            name = source.stem if kind == "csv" else source.parent.name if source.is_file() else source.name
            folder = temporary / (name or "run")
            table.write(folder, kind)
            run = cls(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        weakref.finalize(run, shutil.rmtree, temporary, ignore_errors=True)
        return run

    # -- what there is

    @property
    def path(self) -> Path:
        """The run's folder, in its file system."""
        return self._folder.path

    @property
    def steps(self) -> list[int]:
        """Steps with spectra, on any rank."""
        return self._contents.steps().tolist()

    @property
    def tensors(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the series, by collection."""
        return self._contents.tensors()

    @property
    def block_lengths(self) -> tuple[int, ...]:
        """Block lengths of the spectra's block records (`plimsoll.watch` with `block`)."""
        return self._contents.block_lengths()

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """Names of the scalars."""
        return self._contents.scalar_names()

    @property
    def scalar_steps(self) -> list[int]:
        """Steps with scalars, on any rank."""
        return self._contents.steps("scalars").tolist()

    @property
    def ranks(self) -> list[int]:
        """Ranks with records. `problems` has the missing ones."""
        return self._folder.ranks

    @property
    def world_size(self) -> int:
        """Number of ranks of the training."""
        return self._folder.world_size

    @property
    def settings(self) -> Mapping[str, object]:
        """Settings that the writer was given."""
        return self._folder.head.get("settings", {})

    @property
    def manifest(self) -> Mapping[str, object]:
        """Rank 0's manifest (docs/reference/run-format.md)."""
        return self._folder.head

    @property
    def closed(self) -> bool:
        """True if every rank's writer has closed the run.

        False while one is alive, or after it was killed.
        """
        manifests = self._folder.manifests
        return len(manifests) >= self.world_size and all(m.get("closed") for m in manifests.values())

    @property
    def was_abandoned(self) -> bool:
        """True if a writer ended without closing the run.

        Its process was killed, or its machine failed.

        A writer on another machine counts as alive.
        """
        return bool(gone_writers(self._folder.manifests.values()))

    @property
    def incomplete(self) -> Mapping[int, int]:
        """Lost ranks, with their last steps. Later sums are without them."""
        return {short.rank: short.last_step for short in self._folder.short if short.lost}

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of records that writers dropped, by reason."""
        result: dict[str, int] = {}
        for manifest in self._folder.manifests.values():
            for reason, records in manifest.get("dropped", {}).items():
                result[reason] = result.get(reason, 0) + records
        return result

    @property
    def problems(self) -> list[str]:
        """Damaged, missing and foreign files and missing ranks, with their consequences."""
        return self._folder.problems

    @property
    def missing(self) -> list[str]:
        """The `problems` that cost records: lost or damaged parts, manifests and ranks.

        Findings in such a run are findings in what is left of it. A damaged part is noticed when it is read.
        """
        return self._folder.missing

    # -- spectra

    def spectrum(self, collection: str, name: str, step: int, *, raw: bool = False) -> Spectrum:
        """Return the spectrum of one series at one step.

        Its source has the scale under which it was recorded. A scale that is no power of two cannot be undone: the
        stored spectrum is returned then, without a source.

        Args:
            collection: Name of the collection.
            name: Name of the tensor.
            step: The step.
            raw: Whether to return stored values.

        Raises:
            NotRecordedError: The name or the step was not recorded.
        """
        self._check_series("Run.spectrum", collection, name)
        step = integer("Run.spectrum", "step", step, remedy="Run.steps has those that were recorded.")
        wanted = Steps(low=step, high=step + 1)
        for _, _, _, spectrum in _spectra.read(self._contents, collection, [name], wanted, raw=raw):
            return spectrum
        steps = self.series(collection, name, "count")[0]
        near = sorted(steps.tolist(), key=lambda s: (abs(s - step), s))[:3]
        raise NotRecordedError(
            f"Run.spectrum: expected a step at which {collection} {name!r} was recorded; got {step}. "
            f"The nearest are {', '.join(str(s) for s in sorted(near)) or 'none'}."
        )

    def spectra(
        self, collection: str | None = None, name: str | None = None, steps: slice | None = None, *, raw: bool = False
    ) -> Iterator[tuple[int, str, str, Spectrum]]:
        """Yield step, collection, name and spectrum, by series, in the order of steps.

        Args:
            collection: Name or glob. Default: all.
            name: Name or glob. An existing name is not used as a glob. Default: all.
            steps: Slice of step numbers, ``slice(100, 200)``. Its step counts from its start. Default: all.
            raw: Whether to return stored values.

        Raises:
            NotRecordedError: The collection is none that there is, and no glob.
        """
        wanted, chosen = Steps.of(steps, "Run.spectra"), self._chosen("Run.spectra", collection, name)
        return itertools.chain.from_iterable(
            _spectra.read(self._contents, each, names, wanted, raw=raw) for each, names in chosen
        )

    def series(
        self, collection: str, name: str, statistic: str, *, raw: bool = False
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the steps and a statistic at each.

        Args:
            collection: Name of the collection.
            name: Name of the tensor.
            statistic: A property of `Spectrum` that is a number, or one of these.
                "scale": factor of the stored values.
                "kurtosis", "sumfourth": as of `Spectrum`, where they were recorded.
                "ratio": norm divided by the weights' norm (of updates).
                "pushed": number of values that were to move (of updates).
                "unmoved": share of those that did not move (of updates).
                "weight_norm": norm of the weights (of updates).
                "underflowed", "structural": share of all values that are zero and were not, or were, in a shadow step.
                "last_bin": share of values that share the format's last bin with their block's largest (of weights,
                where blocks were recorded).
                "relative_error", "snr_db", "cosine", "along_reference", "constant", "largest_error": of the values
                against those of a shadow step, as in `ErrorSums`.
                "made_nonfinite": number of values that are NaN or infinite and were not in a shadow step.
            raw: Whether to return statistics of stored values. Otherwise any scale is undone.

        Raises:
            NotRecordedError: The name was not recorded.
            ArgumentError: There is no such statistic.
        """
        self._check_series("Run.series", collection, name)
        choices = {**statistics.STATISTICS, **statistics.BESIDE}
        if not isinstance(statistic, str) or statistic not in choices:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(
                f"Run.series: expected a statistic among {', '.join(sorted(choices))}; got {statistic!r}. Choose one."
            )
        table = _spectra.rows(self._contents, collection, name, statistics.COLUMNS)
        steps, columns = statistics.merged(table, raw=raw)
        with np.errstate(all="ignore"):
            values = np.asarray(choices[statistic](columns), dtype=np.float64)
        recorded = ~np.isnan(values) if statistic in statistics.BESIDE else np.ones(len(values), dtype=bool)
        return steps[recorded], values[recorded]

    def errors(
        self, collection: str | None = None, name: str | None = None, steps: slice | None = None
    ) -> Iterator[tuple[int, str, str, ErrorSums]]:
        """Yield step, collection, name and shadow errors, by series, in step order.

        Args:
            collection: Name or glob. Default: all.
            name: Name or glob. An existing name is not used as a glob. Default: all.
            steps: Slice of step numbers, as for `spectra`. Default: all.

        Raises:
            NotRecordedError: The collection is none that there is, and no glob.
        """
        wanted, chosen = Steps.of(steps, "Run.errors"), self._chosen("Run.errors", collection, name)
        return self._errors_of([(each, one) for each, names in chosen for one in names], wanted)

    def _errors_of(self, series: Sequence[tuple[str, str]], wanted: Steps) -> Iterator[tuple[int, str, str, ErrorSums]]:
        for each, one in series:
            table = _spectra.rows(self._contents, each, one, statistics.COLUMNS, wanted)
            found, columns = statistics.merged(table, raw=False)
            for row in np.flatnonzero(~np.isnan(columns["compared"])).tolist():
                sums = {field: float(columns[field][row]) for field in ERRORS}
                yield int(found[row]), each, one, ErrorSums(**sums)

    # -- the rest

    def scalars(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the steps and values of a scalar.

        Over several ranks it is the mean, as a loss is the mean over the whole batch. "nonfinite" is added up, "scale"
        is the same on all ranks.

        Raises:
            NotRecordedError: The name was not recorded.
        """
        if name not in self.scalar_names:
            raise unknown("Run.scalars", "a scalar", name, self.scalar_names, closed=self.closed)
        return self._scalars([name])[name]

    def scalar_times(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the steps of a scalar and when each was recorded, in Unix seconds.

        Over several ranks it is the mean. NaN for values that were recorded before runs had these times.

        Raises:
            NotRecordedError: The name was not recorded.
        """
        steps, _ = self.scalars(name)
        columns = ("step", "name", "time")
        table = select(self._folder, "scalars", equal={"name": [name]}, columns=columns)
        if "time" not in table.column_names:
            return steps, np.full(len(steps), np.nan)
        recorded, times = values_of(table["step"]), values_of(table["time"].fill_null(np.nan))
        return _spectra.merged_scalar("", recorded, times, values_of(table["rank"]))

    def _scalars(self, names: list[str]) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """Return the steps and values of scalars. All parts are read once for all of them."""
        table = select(self._folder, "scalars", equal={"name": names}) if names else None
        if table is None or not len(table):
            return {name: (np.empty(0, dtype=np.int64), np.empty(0)) for name in names}
        columns = [values_of(table[column]) for column in ("step", "value", "rank")]
        by_name = {
            each: _spectra.merged_scalar(each, *(column[here] for column in columns))
            for each, here in row_order.spans(table, "name")
        }
        return {name: by_name.get(name, (np.empty(0, dtype=np.int64), np.empty(0))) for name in names}

    def casts(self, module: str | None = None) -> list[module_casts.Cast]:
        """Return the modules' casts before products, for each module, role and step range.

        Runs without FP8 have none.

        Args:
            module: Name or glob. Default: all.
        """
        _check_pattern("Run.casts", "module", module)
        names = [name for name in self.scalar_names if name.startswith(module_casts.PREFIX)]
        found = module_casts.casts_of(self.events(), self._scalars(names))
        return [cast for cast in found if cast.module in matching(list({c.module for c in found}), module)]

    def events(self) -> list[Event]:
        """Return all events by step and time."""
        rows = select(self._folder, "events").to_pylist()
        read = [Event(**{**row, "details": json.loads(row["details"])}) for row in rows]
        events = [event for event in read if limits.details_fit(event.kind, event.details)]
        if len(events) < len(read):
            self._folder.leave_out("events whose details no watch writes", len(read) - len(events), 0)
        return sorted(events, key=lambda event: (event.step, event.time))

    def table(
        self,
        collection: str | None = None,
        name: str | None = None,
        steps: slice | None = None,
        *,
        blocks: bool = True,
    ) -> Table:
        """Return the recorded spectra as one Arrow table (docs/reference/run-format.md).

        Values are stored ones; the column "scale" has their factor. Ranks are merged, and replaced rows are left out.

        Args:
            collection: Name or glob. Default: all.
            name: Name or glob. Default: all.
            steps: Slice of step numbers. Default: all.
            blocks: Whether to include the columns of block records, if there are any.

        Raises:
            NotRecordedError: The collection is none that there is, and no glob.
        """
        chosen = self._chosen("Run.table", collection, name)
        return _spectra.table(self._contents, chosen, Steps.of(steps, "Run.table"), blocks=blocks)

    def to_pandas(self, collection: str | None = None, name: str | None = None, steps: slice | None = None) -> Any:
        """Return a pandas DataFrame of the scalars, or of the statistics of tensors.

        Args:
            collection: Name or glob. Default: none, for the scalars, a column each, with the step as index.
            name: Name or glob of tensors. With one and without a collection, tensors of all collections.
            steps: Slice of step numbers. Default: all.

        Returns:
            The scalars, NaN where one was not recorded. Or a row for each tensor and step, with the columns step,
            collection, name and the statistics of `series`.

        Raises:
            MissingExtraError: pandas is not installed.

        >>> import tempfile
        >>> from plimsoll.runs import RunWriter, Scalars
        >>> folder = tempfile.TemporaryDirectory()
        >>> with RunWriter(folder.name) as writer:
        ...     for step in range(3):
        ...         writer.write(Scalars(step=step, values={"loss": 1.0 / (step + 1), "lr": 0.1}))
        >>> Run(folder.name).to_pandas().loc[1].to_dict()
        {'loss': 0.5, 'lr': 0.1}
        >>> folder.cleanup()
        """
        if collection is None and name is None:
            return statistics.scalar_frame(self._scalars(list(self.scalar_names)), Steps.of(steps, "Run.to_pandas"))
        return statistics.tensor_frame(self.table(collection, name, steps, blocks=False))

    def plot(self, collection: str | None = None, name: str | None = None, **arguments: Any) -> Any:
        """Return a figure: loss and scale, a collection's heat map, or a spectrogram.

        The figure is Plotly's.

        Args:
            collection: Name of a collection. Default: none, for loss and loss scale.
            name: Name of a tensor of it. Default: none, for the heat map of the collection.
            arguments: Arguments of the figure (`plimsoll.report`), such as `formats` or `until`.

        Raises:
            ArgumentError: A name is given without its collection.
            NotRecordedError: The tensor or collection was not recorded.
            MissingExtraError: Plotly is not installed.
        """
        return display.function("plot")(self, collection, name, **arguments)

    def refresh(self) -> list[int]:
        """Read what was added, and return the new steps. Only new parts are read.

        Records of this process are written first.
        """
        if isinstance(self._folder.place, Folder):
            # A loss that still waits in this process's buffer would read as one that was never recorded.
            write_for_reader(self._folder.path)
        return self._look()

    def _look(self) -> list[int]:
        before = self._contents.steps()
        self._folder.refresh()
        self._contents.refresh()
        return np.setdiff1d(self._contents.steps(), before).tolist()

    def follow(self, *, poll_seconds: float = 1.0, timeout: float | None = None) -> Iterator[list[int]]:
        """Yield the steps with spectra that exist, then new ones, until the run is closed.

        Args:
            poll_seconds: Time between two looks at the folder. Default: 1.
            timeout: Seconds without new steps after which to end. A killed writer closes nothing. Default: no limit.

        Raises:
            ArgumentError: A time is no number, or is negative; or there is no time between two looks.
        """
        remedy = "Give seconds, for example 1.0."
        poll_seconds = checks.number("Run.follow", "poll_seconds", poll_seconds, above=0, remedy=remedy)
        if timeout is not None and timeout != math.inf:
            timeout = checks.number("Run.follow", "timeout", timeout, at_least=0, remedy=remedy)
        return self._follow(poll_seconds, math.inf if timeout is None else timeout)

    def _follow(self, poll_seconds: float, timeout: float) -> Iterator[list[int]]:
        new, last_news = self.steps, time.monotonic()
        while True:
            if new:
                yield new
                last_news = time.monotonic()
            closed = self.closed  # asked for first: what came before the end is then seen
            new = self._look()
            if new:
                continue
            remaining = timeout - (time.monotonic() - last_news)
            if closed or remaining <= 0:
                return
            time.sleep(min(poll_seconds, remaining))

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """Return a notebook's output: the verdict, and the loss figure if it can be drawn."""
        del include, exclude
        return {"text/plain": repr(self), **display.function("run")(self)}

    def __repr__(self) -> str:
        series = sum(len(names) for names in self.tensors.values())
        ends = [(p.min_step, self._folder.visible_end(p)) for p in self._folder.of("spectra")]
        span = f"steps {min(low for low, _ in ends)} to {max(high for _, high in ends)}" if ends else "no spectra"
        state = "closed" if self.closed else "open"
        ranks = f"{len(self.ranks)} of {self.world_size} ranks"
        return f"<Run: {self._folder.place}, {series} series, {span}, {ranks}, {state}>"

    def _chosen(self, operation: str, collection: str | None, name: str | None) -> list[tuple[str, list[str]]]:
        _check_pattern(operation, "collection", collection)
        _check_pattern(operation, "name", name)
        collections = matching(self.tensors, collection)
        is_glob = collection is not None and any(sign in collection for sign in "*?[")
        if collection is not None and not collections and not is_glob and collection not in NAMES:
            raise unknown(operation, "a collection", collection, list(self.tensors), closed=self.closed)
        return [(each, matching(self.tensors[each], name)) for each in collections]

    def _check_series(self, operation: str, collection: str, name: str) -> None:
        if not isinstance(collection, str) or collection not in self.tensors:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise unknown(operation, "a collection", collection, list(self.tensors), closed=self.closed)
        if name not in self.tensors[collection]:
            raise unknown(operation, f"a name in {collection!r}", name, self.tensors[collection], closed=self.closed)


def _check_pattern(operation: str, what: str, pattern: object) -> None:
    if pattern is not None and not isinstance(pattern, str):
        raise ArgumentError(
            f"{operation}: expected {what} to be a name or a glob; got {what}={pattern!r}. Leave it out for all."
        )
