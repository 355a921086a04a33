"""Scalars that a reader collects, and the run folder that is made of them."""

import math
import warnings
from array import array
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plimsoll.errors import RunError
from plimsoll.runs.columns.arrow import Table, array as arrow_array, pa, strings
from plimsoll.runs.columns.schema import SCHEMAS
from plimsoll.runs.storage import manifest, parquet
from plimsoll.runs.storage.limits import MOST_NAMES, WORD_BYTES, shown, stored_word
from plimsoll.runs.storage.parts import Part
from plimsoll.version import __version__

ELAPSED = "elapsed_seconds"  # scalar: seconds since the run began, where the tracker has them
_MOST_VALUES = 50_000_000  # of all scalars together: 24 bytes each
_STEPS = np.iinfo(np.int64)

Column = tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]  # steps, values, seconds


def without_replaced(steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which records count, in the order in which they were written.

    >>> without_replaced(np.array([0, 1, 2, 3, 2, 3])).tolist()
    [True, True, False, False, True, True]
    """
    if not len(steps):
        return np.empty(0, dtype=bool)
    # A run that is restarted from an earlier step replaces what it had recorded from there on.
    later = np.minimum.accumulate(steps[::-1])[::-1]
    return np.append(steps[:-1] < later[1:], True)


class ScalarTable:
    """Values by name, in the order in which they are added. `source` is for messages."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._steps: dict[str, array[int]] = {}
        self._values: dict[str, array[float]] = {}
        self._seconds: dict[str, array[float]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, step: int, name: str, value: float, seconds: float = math.nan) -> None:
        """Add a value, with the seconds since the run began if the tracker has them.

        Raises a `RunError` if there are more values or names than a run has, or the step is no step.
        """
        if name not in self._values:
            if stored_word(name) != name:
                raise RunError(f"{self.source}: expected names of at most {WORD_BYTES:,} bytes; got {shown(name)}.")
            if len(self._values) == MOST_NAMES:
                raise RunError(f"{self.source}: expected at most {MOST_NAMES:,} scalars; got more. Leave some out.")
            self._steps[name], self._values[name], self._seconds[name] = array("q"), array("d"), array("d")
        if self._count == _MOST_VALUES:
            raise RunError(f"{self.source}: expected at most {_MOST_VALUES:,} values; got more. Thin the file out.")
        if not _STEPS.min < step < _STEPS.max:
            raise RunError(f"{self.source}: expected steps of 64 bits; got step={step}. The file is damaged.")
        self._steps[name].append(step)
        self._values[name].append(value)
        self._seconds[name].append(seconds)
        self._count += 1

    def replace_from(self, step: int) -> None:
        """Remove a step's values and later ones: the tracker's run began again there."""
        for name in self._steps:
            earlier = np.array(self._steps[name]) < step
            self._steps[name] = array("q", np.array(self._steps[name])[earlier].tobytes())
            for column in (self._values, self._seconds):
                column[name] = array("d", np.array(column[name])[earlier].tobytes())

    def write(self, folder: Path, kind: str) -> None:
        """Write a run folder that holds these scalars, of which there must be any."""
        columns = {name: column for name in self._steps if len((column := self._column(name, kind))[0])}
        if not columns:
            raise RunError(f"{self.source}: expected scalars; got none. Name the file or folder of one run.")
        if kind == "csv":
            self._warn_of_replaced(columns)
        part = Part(
            kind="scalars",
            rank=0,
            first=1,
            last=1,
            generation=0,
            min_step=min(int(steps[0]) for steps, _, _ in columns.values()),
            max_step=max(int(steps[-1]) for steps, _, _ in columns.values()),
        )
        settings = {"imported_from": self.source, "tracker": kind}
        content = manifest.fresh(rank=0, world_size=1, settings=settings)
        content |= {"versions": {"plimsoll": __version__}, "closed": datetime.now(UTC).isoformat(timespec="seconds")}
        if folder.exists() and (folder.is_file() or any(folder.iterdir())):
            raise RunError(f"{self.source}: expected an empty folder to write to; got {folder}. Name a new one.")
        try:
            (folder / part.kind).mkdir(parents=True, exist_ok=True)
            rows = parquet.write(folder / part.name, part.kind, _tables(columns))
            manifest.write(folder / manifest.file_name(0), content | {"parts": {part.name: rows}})
        except OSError as error:
            raise RunError(
                f"{self.source}: expected a folder to write the run to; got {folder} ({error}). Name another one."
            ) from error

    def _warn_of_replaced(self, columns: Mapping[str, Column]) -> None:
        replaced = {name: len(self._steps[name]) - len(steps) for name, (steps, _, _) in columns.items()}
        name = max(replaced, key=lambda each: replaced[each])
        if replaced[name]:
            warnings.warn(
                f"{self.source}: {replaced[name]:,} of {len(self._steps[name]):,} values of {name!r} are left out, "
                "since a later row has the same step or an earlier one, as in a restarted run. If these are rows of "
                "several runs, give each run a file, and if they are rows of one epoch, a column of steps.",
                RuntimeWarning,
                stacklevel=5,
            )

    def _column(self, name: str, kind: str) -> Column:
        steps, values = np.array(self._steps[name], dtype=np.int64), np.array(self._values[name])
        seconds = np.array(self._seconds[name])
        order = np.argsort(steps, kind="stable")
        # A table may have its rows in any order, as the newest first. Only a restarted run repeats steps.
        if kind == "csv" and (np.diff(steps) < 0).any() and (np.diff(steps[order]) > 0).all():
            steps, values, seconds = steps[order], values[order], seconds[order] - seconds[order[0]]
        lasting = without_replaced(steps)
        return steps[lasting], values[lasting], seconds[lasting]


def _tables(columns: dict[str, Column]) -> Iterator[Table]:
    """Yield each scalar's rows as row groups of their own, which other readers skip."""
    # The seconds become a scalar of their own: those of the scalar that was recorded most often.
    steps, _, seconds = max(columns.values(), key=lambda column: len(column[0]))
    known = np.isfinite(seconds)
    if known.any() and ELAPSED not in columns:
        columns = {**columns, ELAPSED: (steps[known], seconds[known], seconds[known])}
    for name, (steps, values, _) in sorted(columns.items()):
        rows = [arrow_array(steps), strings([name] * len(steps)), arrow_array(values)]
        yield pa.Table.from_arrays(rows, schema=SCHEMAS["scalars"])
