"""Records of a run: measured rows, scalars, events, and the step records of sinks."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from plimsoll.spectrum import Spectrum
from plimsoll.spectrum.error_sums import NAMES as ERRORS

# Further numbers of a spectrum's entry, each a column of the run. They add up, except for `weight_norm`, whose squares
# do, and `largest_error`. The last ones are columns only where some were recorded: of blocks, and the errors
# (`ErrorSums`) of a shadow step.
EXTRAS = ("pushed", "unmoved", "weight_norm", "underflowed", "structural", "last_bin", *ERRORS)
OPTIONAL_EXTRAS = (("last_bin",), ERRORS)
# Prefixes of scalars of shadow steps, before a module's name: shares of decisions that are flipped and tied, and the
# median distance of the scores over its error.
FLIPS, TIES, MARGIN = "flips:", "ties:", "margin:"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Measured rows of one step. The arrays belong to the writer afterwards.

    Attributes:
        step: The step.
        rows: int64[n, 289], rows of a bank (`plimsoll.row_layout`). int64[n, 848] with `blocks`.
        index: Row of each entry. Several entries may have one row (a tensor that is recorded twice).
        series: Series of each entry, as `RunWriter.series` returns it. Entries of one series are merged.
        scales: Factor of the stored values over the true ones, per entry. None: all 1.
        extras: Numbers per entry, NaN for none, under names of `EXTRAS`.
        blocks: Block length of each entry's wide row, 0 for none. None: narrow rows.
        last: Whether this is the step's last batch. A step's batches are merged before they are stored.
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
    """Named numbers of one step. Of two with one name and step, the later one counts.

    Attributes:
        step: The step.
        values: Numbers by name.
        time: Unix seconds.
    """

    step: int
    values: Mapping[str, float]
    time: float = field(default_factory=time.time, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened at a step.

    Attributes:
        step: The step.
        kind: Kind of event.
        message: Text for the user.
        details: JSON-able data.
        time: Unix seconds.
        rank: The rank, which readers fill in.
    """

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
    """Records of one step for a sink. Spectra are decoded when they are asked for.

    Spectra are by (collection, name) and of true values: a scale that is a power of two is undone, as in
    `Run.spectrum`.
    """

    step: int
    spectra: Callable[[], Mapping[tuple[str, str], Spectrum]] = _nothing
    scalars: Mapping[str, float] = field(default_factory=dict[str, float])
    events: Sequence[Event] = ()


class Sink(Protocol):
    """Receiver of a run while it is written: a tracker, a dashboard, a function."""

    def open(self, run_path: Path, settings: Mapping[str, object]) -> None:
        """Called once, before anything else."""
        ...

    def put(self, record: StepRecord) -> None:
        """Take one step's record."""
        ...

    def flush(self) -> None:
        """Send what is buffered."""
        ...

    def close(self) -> None:
        """Called once, after everything else."""
        ...


def size_bytes(record: Record) -> int:
    """Return about how much memory a record takes while it waits."""
    if isinstance(record, Batch):
        return record.rows.nbytes + 40 * len(record.index) + 400
    return 200 + 100 * len(record.values) if isinstance(record, Scalars) else 1000
