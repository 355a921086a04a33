"""`Run`: a run read from its folder, while it is written or after.

Every question reads the rows it needs and no others; what a live writer adds is seen after `refresh`.
"""

import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll import display
from plimsoll.errors import ArgumentError, NotRecordedError
from plimsoll.runs.columns import row_order, statistics
from plimsoll.runs.columns.arrow import Table, values_of
from plimsoll.runs.reading import module_casts, rank_merge, spectra as _spectra
from plimsoll.runs.reading.row_selection import Steps, matching, select, unknown
from plimsoll.runs.reading.run_folder import RunContents, RunFolder, gone_writers, runs_below
from plimsoll.runs.records import Event
from plimsoll.runs.storage import limits
from plimsoll.runs.storage.location import Folder, is_elsewhere, place_of
from plimsoll.runs.storage.open_writers import write_for_reader
from plimsoll.spectrum import Spectrum


class Run:
    """A run in a folder, read only.

    Values are the true ones: what was recorded under a scale (a loss scale) is brought back by it. Ranks are merged:
    parts of a tensor are added, replicas counted once. A damaged part costs its own rows: `problems` names it, and a
    warning does unless ``warn=False``.

    `path` may be a URI that pyarrow or fsspec knows, ``s3://bucket/exp1``, or a path within `filesystem`: one of
    `pyarrow.fs`, or of fsspec. Storage that does not answer is an error, and no damage.

    Raises `RunError` for a folder that holds no run, or one of a newer schema, or storage that does not answer;
    `ArgumentError` for a URI of an unknown kind; `MissingExtraError` where the package that opens it is missing.

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
        """The folders of all runs in a folder and below it, sorted; of this machine only."""
        if is_elsewhere(folder):
            raise ArgumentError(
                f"Run.find: expected a folder of this machine; got {folder}. List the storage by its own means."
            )
        return runs_below(folder)

    # -- what there is

    @property
    def path(self) -> Path:
        """The run's folder, in the filesystem that it lies in."""
        return self._folder.path

    @property
    def steps(self) -> list[int]:
        """The steps that spectra were recorded at, on any rank."""
        return self._contents.steps().tolist()

    @property
    def tensors(self) -> Mapping[str, tuple[str, ...]]:
        """The names of the series, by collection."""
        return self._contents.tensors()

    @property
    def block_lengths(self) -> tuple[int, ...]:
        """The lengths of the blocks that spectra have records of (`plimsoll.watch` with `block`); none without."""
        return self._contents.block_lengths()

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """The names of the scalars."""
        return self._contents.scalar_names()

    @property
    def scalar_steps(self) -> list[int]:
        """The steps that scalars were recorded at, on any rank."""
        return self._contents.steps("scalars").tolist()

    @property
    def ranks(self) -> list[int]:
        """The ranks that recorded something; `problems` names those that are missing."""
        return self._folder.ranks

    @property
    def world_size(self) -> int:
        """How many ranks there should be."""
        return self._folder.world_size

    @property
    def settings(self) -> Mapping[str, object]:
        """What the writer was given as settings."""
        return self._folder.head.get("settings", {})

    @property
    def manifest(self) -> Mapping[str, object]:
        """All of rank 0's manifest (docs/reference/run-format.md)."""
        return self._folder.head

    @property
    def closed(self) -> bool:
        """Whether every rank's writer ended in order, rather than being alive or killed."""
        manifests = self._folder.manifests
        return len(manifests) >= self.world_size and all(m.get("closed") for m in manifests.values())

    @property
    def was_abandoned(self) -> bool:
        """Whether a writer of it ended without closing it: its process was killed, or its machine went down.

        A writer on another machine cannot be asked and counts as alive.
        """
        return bool(gone_writers(self._folder.manifests.values()))

    @property
    def incomplete(self) -> Mapping[int, int]:
        """Ranks that were lost while others went on, each with its last step: later sums are of the others alone."""
        return {short.rank: short.last_step for short in self._folder.short if short.lost}

    @property
    def dropped(self) -> Mapping[str, int]:
        """How many records the writers say they lost, by reason."""
        result: dict[str, int] = {}
        for manifest in self._folder.manifests.values():
            for reason, records in manifest.get("dropped", {}).items():
                result[reason] = result.get(reason, 0) + records
        return result

    @property
    def problems(self) -> list[str]:
        """Each file that is damaged, missing or foreign, and each missing rank, with what was done about it."""
        return self._folder.problems

    @property
    def missing(self) -> list[str]:
        """Those of `problems` that cost records: damaged and missing parts, manifests and ranks.

        What is found in such a run is found in what is left of it. Damaged parts are found when they are read.
        """
        return self._folder.missing

    # -- spectra

    def spectrum(self, collection: str, name: str, step: int, *, raw: bool = False) -> Spectrum:
        """The spectrum of one series at one step.

        Its source tells the scale that it was recorded under. Where that is no power of two it cannot be undone: the
        stored spectrum comes back, without a source. `raw` gives the stored values always.

        Raises `NotRecordedError` for a name or a step that was not recorded.
        """
        self._check_series("Run.spectrum", collection, name)
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
        """Step, collection, name and spectrum of all that match, one series after the other, steps ascending.

        `collection` and `name` are names or globs; a name that is there is taken for itself. `steps` is a slice of step
        numbers, ``slice(100, 200)``; its step counts from its start. `raw` as for `spectrum`.
        """
        wanted = Steps.of(_checked(steps))
        for each in matching(self.tensors, collection):
            names = matching(self.tensors[each], name)
            yield from _spectra.read(self._contents, each, names, wanted, raw=raw)

    def series(
        self, collection: str, name: str, statistic: str, *, raw: bool = False
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The steps and a statistic at each.

        It is any property of `Spectrum` that is a number, or

        - "scale": what the stored values were multiplied by;
        - "ratio": the norm over the weights' norm; "unmoved": of the values that were to move, the part that did not;
          "pushed": how many were to; "weight_norm" (of updates);
        - "underflowed", "structural": of all values, those that are zero and were not, or were, in a shadow step.

        Scales are undone, of whatever kind they are, unless `raw`.
        """
        self._check_series("Run.series", collection, name)
        choices = {**statistics.STATISTICS, **statistics.BESIDE}
        if statistic not in choices:
            raise ArgumentError(
                f"Run.series: expected a statistic among {', '.join(sorted(choices))}; got {statistic!r}. Choose one."
            )
        table = _spectra.rows(self._contents, collection, name, statistics.COLUMNS)
        steps, columns = statistics.merged(table, raw=raw)
        with np.errstate(all="ignore"):
            values = np.asarray(choices[statistic](columns), dtype=np.float64)
        recorded = ~np.isnan(values) if statistic in statistics.BESIDE else np.ones(len(values), dtype=bool)
        return steps[recorded], values[recorded]

    # -- the rest

    def scalars(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The steps and values of a scalar.

        Of several ranks: the mean, as a loss is the mean over the whole batch; "nonfinite" is added up, "scale" is one.
        """
        if name not in self.scalar_names:
            raise unknown("Run.scalars", "a scalar", name, self.scalar_names, closed=self.closed)
        return self._scalars([name])[name]

    def _scalars(self, names: list[str]) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """The steps and values of scalars, which all parts are read for once."""
        table = select(self._folder, "scalars", equal={"name": names}) if names else None
        if table is None or not len(table):
            return {name: (np.empty(0, dtype=np.int64), np.empty(0)) for name in names}
        table = row_order.by(table, ("name",))
        columns = [values_of(table[column]) for column in ("step", "value", "rank")]
        bounds = [*row_order.starts([row_order.codes(table["name"])]).tolist(), len(table)]
        found = {
            table["name"][start].as_py(): rank_merge.one_of_scalars(
                table["name"][start].as_py(), *(column[start:stop] for column in columns)
            )
            for start, stop in itertools.pairwise(bounds)
        }
        return {name: found.get(name, (np.empty(0, dtype=np.int64), np.empty(0))) for name in names}

    def casts(self, module: str | None = None) -> list[module_casts.Cast]:
        """What modules cast before they multiply: one record for each module, role and stretch of steps.

        `module` is a name or a glob. Without FP8 there are none.
        """
        names = [name for name in self.scalar_names if name.startswith(module_casts.PREFIX)]
        found = module_casts.casts_of(self.events(), self._scalars(names))
        return [each for each in found if each.module in matching(list({c.module for c in found}), module)]

    def events(self) -> list[Event]:
        """All events, by step and time."""
        rows = select(self._folder, "events").to_pylist()
        told = [Event(**{**row, "details": json.loads(row["details"])}) for row in rows]
        events = [event for event in told if limits.details_fit(event.kind, event.details)]
        if len(events) < len(told):
            self._folder.leave_out("events whose details no watch writes", len(told) - len(events), 0)
        return sorted(events, key=lambda event: (event.step, event.time))

    def table(
        self,
        collection: str | None = None,
        name: str | None = None,
        steps: slice | None = None,
        *,
        blocks: bool = True,
    ) -> Table:
        """The recorded spectra as one table (docs/reference/run-format.md), ranks merged, replaced rows left out.

        Values are as stored: the column "scale" says what they carry. Block records are columns too, where
        spectra have them and `blocks` is true.
        """
        chosen = self._chosen(collection, name)
        return _spectra.table(self._contents, chosen, Steps.of(_checked(steps)), blocks=blocks)

    def refresh(self) -> list[int]:
        """Looks for what was added; returns the steps that are new. Reads only parts that are.

        What this process itself records is written first.
        """
        if isinstance(self._folder.place, Folder):
            write_for_reader(self._folder.path)
        return self._look()

    def _look(self) -> list[int]:
        before = self._contents.steps()
        self._folder.refresh()
        self._contents.refresh()
        return np.setdiff1d(self._contents.steps(), before).tolist()

    def follow(self, *, poll_seconds: float = 1.0, timeout: float | None = None) -> Iterator[list[int]]:
        """The steps that there are, then those that are added, each time there are new ones, until the run is closed.

        With a timeout, also ends after so many seconds without anything new: a killed writer closes nothing.
        """
        new, heard = self.steps, time.monotonic()
        while True:
            if new:
                yield new
                heard = time.monotonic()
            closed = self.closed  # asked for first: what came before the end is then seen
            new = self._look()
            if not new and (closed or (timeout is not None and time.monotonic() - heard >= timeout)):
                return
            if not new:
                time.sleep(poll_seconds)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """Return what a notebook shows: the verdict, and the figure of loss and scale if it can draw that."""
        del include, exclude
        return {"text/plain": repr(self), **display.function("run")(self)}

    def __repr__(self) -> str:
        series = sum(len(names) for names in self.tensors.values())
        ends = [(p.min_step, self._folder.visible_end(p)) for p in self._folder.of("spectra")]
        span = f"steps {min(low for low, _ in ends)} to {max(high for _, high in ends)}" if ends else "no spectra"
        state = "closed" if self.closed else "open"
        ranks = f"{len(self.ranks)} of {self.world_size} ranks"
        return f"<Run: {self._folder.place}, {series} series, {span}, {ranks}, {state}>"

    def _chosen(self, collection: str | None, name: str | None) -> list[tuple[str, list[str]]]:
        collections = matching(self.tensors, collection)
        return [(each, matching(self.tensors[each], name)) for each in collections]

    def _check_series(self, operation: str, collection: str, name: str) -> None:
        if collection not in self.tensors:
            raise unknown(operation, "a collection", collection, list(self.tensors), closed=self.closed)
        if name not in self.tensors[collection]:
            raise unknown(operation, f"a name in {collection!r}", name, self.tensors[collection], closed=self.closed)


def _checked(steps: slice | None) -> slice | None:
    """The slice, with whole numbers and a positive step."""
    if steps is None:
        return None
    fields = (steps.start, steps.stop, steps.step)
    if not all(f is None or isinstance(f, int) for f in fields) or (steps.step is not None and steps.step < 1):
        raise ArgumentError(
            f"Run.spectra: expected steps to be a slice of step numbers, ascending; got {steps}. "
            "slice(100, 200) is from step 100 up to and not including 200."
        )
    return steps
