"""What goes into a run: measured rows, scalars, events; and what sinks are given of it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from plimsoll.spectrum import Spectrum

# What a spectrum's entry may carry beside it, each a column of the run; merged by addition but for `weight_norm`.
EXTRAS = ("pushed", "unmoved", "weight_norm", "underflowed", "structural")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Measured rows of one step, the writer's own from now on.

    - `rows`: int64[n, 288], rows of a bank (`plimsoll.kernels.row_layout`); int64[n, 848] if `blocks` is given.
    - `index` and `series`, one per entry: which row, and the number that `RunWriter.series` gave. Several entries may
      name one row (a tensor that two taps see); several of one series are merged into one spectrum.
    - `scales`: per entry, the factor that the stored values carry beyond the true ones; None where all are 1.
    - `extras`: numbers per entry, NaN for none, under names of `EXTRAS`.
    - `blocks`: per entry, the block length that its wide row was measured with, 0 where it was without; None for narrow
      rows.
    - `last`: whether this is the step's last batch; a step's batches are merged before they are stored.
    """

    step: int
    rows: NDArray[np.int64]
    index: NDArray[np.int64]
    series: NDArray[np.int64]
    scales: NDArray[np.float64] | None = None
    extras: Mapping[str, NDArray[np.float64]] = field(default_factory=dict[str, NDArray[np.float64]])
    blocks: NDArray[np.int64] | None = None
    last: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalars:
    """Named numbers of one step; of two with one name and step, the later one counts."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened at a step. `details` is JSON-able, `time` in Unix seconds; readers fill in `rank`."""

    step: int
    kind: str
    message: str
    details: Mapping[str, object] = field(default_factory=dict[str, object])
    time: float = field(default_factory=time.time)
    rank: int = 0


Record = Batch | Scalars | Event


def _nothing() -> Mapping[tuple[str, str], Spectrum]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRecord:
    """What a sink is given of one step: its spectra by (collection, name), decoded when asked for, and the rest.

    Spectra are of the true values: the scale is undone where it is a power of two, as `Run.spectrum` does.
    """

    step: int
    spectra: Callable[[], Mapping[tuple[str, str], Spectrum]] = _nothing
    scalars: Mapping[str, float] = field(default_factory=dict[str, float])
    events: Sequence[Event] = ()


class Sink(Protocol):
    """Somewhere else that a run goes while it is written: a tracker, a dashboard, a function."""

    def open(self, run_path: Path, settings: Mapping[str, object]) -> None:
        """Called once, before anything else."""
        ...

    def put(self, record: StepRecord) -> None:
        """Takes one step's record."""
        ...

    def flush(self) -> None:
        """Hands on what it holds."""
        ...

    def close(self) -> None:
        """Called once, after everything else."""
        ...


def size_bytes(record: Record) -> int:
    """About how much memory a record holds while it waits."""
    if isinstance(record, Batch):
        return record.rows.nbytes + 40 * len(record.index) + 400
    return 200 + 100 * len(record.values) if isinstance(record, Scalars) else 1000
