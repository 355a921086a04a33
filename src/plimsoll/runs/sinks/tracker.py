"""Base class of the sinks for trackers: their declarations, and optional packages."""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from plimsoll.checks import integer
from plimsoll.errors import ArgumentError, MissingExtraError
from plimsoll.extras import install_line
from plimsoll.row_layout import LOWEST_BINADE
from plimsoll.runs.records import StepRecord
from plimsoll.spectrum import Spectrum
from plimsoll.text import warn_user


class Tracker:
    """Declarations of a tracker's sink; `resolve.TRACKERS` lists the classes."""

    name: ClassVar[str]  # the name that `watch(sinks=[...])` takes
    extra: ClassVar[str]  # the extra of pyproject.toml that installs the tracker
    module: ClassVar[str]  # The tracker's top module. It is imported when the sink is opened, on the sink's thread.

    @classmethod
    def require(cls) -> None:
        """Check that the tracker is installed, without the seconds that an import takes."""
        try:
            spec = importlib.util.find_spec(cls.module)
        except ValueError as error:  # an entry of sys.modules without a specification
            raise cls._missing() from error
        # A folder ./wandb or ./mlflow in the working directory is a namespace package, which has no origin.
        if spec is None or spec.origin is None:
            raise cls._missing()

    @classmethod
    def _missing(cls) -> MissingExtraError:
        return MissingExtraError(
            f"{cls.__name__}: expected the package {cls.module}; got none. Install it: {install_line(cls.extra)}"
        )


def load(module: str) -> Any:
    """Return a tracker's module, untyped, since most trackers have no types."""
    return importlib.import_module(module)


# All properties and fields of a spectrum that are numbers.
STATISTICS = (
    "absmax", "absmean", "absmin", "abssum", "count", "finite", "kurtosis", "max", "mean", "min", "nans", "neg_infs",
    "nonfinite", "nonzero", "norm", "pos_infs", "rms", "std", "sum", "sumfourth", "sumsq", "zero_fraction", "zeros",
)  # fmt: skip
# The other statistics are of finite values only: without `nonfinite`, a tensor that is half NaN looks healthy.
DEFAULT_STATISTICS = ("absmax", "absmean", "mean", "std", "norm", "min", "max", "zero_fraction", "nonfinite")
MAX_HISTOGRAMS = 1000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Histogram:
    """Nonzero finite values by binade.

    ``counts[i]`` are those with abs(x) in [2^(lowest+i), 2^(lowest+i+1)).
    """

    lowest: int
    counts: NDArray[np.int64]

    @property
    def edges(self) -> NDArray[np.int64]:
        """The exponents at the ends of the bins, one more than there are bins."""
        return np.arange(self.lowest, self.lowest + len(self.counts) + 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepValues:
    """A step's numbers and histograms, by tag.

    Tags are "collection/name/statistic", "collection/name", or a scalar's name.
    """

    scalars: Mapping[str, float]
    histograms: Mapping[str, Histogram] = field(default_factory=dict[str, Histogram])


class Selection:
    """Selector of a step's values by the settings that all trackers share.

    Spectra are taken every so many steps at most, logged numbers always. Of more than `max_histograms` in a step the
    first are taken, by collection and name, with one warning.
    """

    def __init__(self, sink: str, statistics: Sequence[str], every: int, max_histograms: int) -> None:
        self._sink = sink
        self._statistics = _checked(sink, statistics)
        self._every = integer(sink, "every", every, low=1, remedy="Use 1 to take every step.")
        self._max_histograms = integer(sink, "max_histograms", max_histograms, low=0, remedy="Use 0 for no histograms.")
        self._last: int | None = None
        self._warned = False

    def of(self, record: StepRecord) -> StepValues:
        """Return the record's values. Spectra are decoded only where they are due."""
        if not self._due(record.step):
            return StepValues(scalars=dict(record.scalars))
        # A tensor without values (an empty shard) has no statistics.
        spectra = {key: spectrum for key, spectrum in sorted(record.spectra().items()) if spectrum.count}
        if spectra:
            self._last = record.step
        return StepValues(
            scalars={**dict(_numbers(spectra, self._statistics)), **record.scalars},
            histograms=self._histograms(spectra),
        )

    def _due(self, step: int) -> bool:
        # An earlier step comes from a run that went back to a checkpoint; the same step again, from a later part of it.
        return self._last is None or step <= self._last or step - self._last >= self._every

    def _histograms(self, spectra: Mapping[tuple[str, str], Spectrum]) -> dict[str, Histogram]:
        if not self._max_histograms:
            return {}
        histograms = {"/".join(key): histogram(spectrum) for key, spectrum in spectra.items() if spectrum.nonzero}
        if len(histograms) > self._max_histograms and not self._warned:
            self._warned = True
            warn_user(
                f"{self._sink}: a step has {len(histograms):,} histograms; the first {self._max_histograms:,} are "
                "written. Give a larger max_histograms for the others, or collect fewer tensors."
            )
        return dict(list(histograms.items())[: self._max_histograms])


def histogram(spectrum: Spectrum) -> Histogram:
    """Return the binades from the lowest to the highest with values."""
    filled = np.flatnonzero(spectrum.binades)
    first, last = int(filled[0]), int(filled[-1])
    return Histogram(lowest=first + LOWEST_BINADE, counts=spectrum.binades[first : last + 1])


def _numbers(spectra: Mapping[tuple[str, str], Spectrum], statistics: Sequence[str]) -> Iterator[tuple[str, float]]:
    for (collection, name), spectrum in spectra.items():
        for statistic in statistics:
            yield f"{collection}/{name}/{statistic}", float(getattr(spectrum, statistic))


def _checked(sink: str, statistics: Sequence[str]) -> tuple[str, ...]:
    names = (statistics,) if isinstance(statistics, str) else tuple(statistics)
    unknown = [name for name in names if name not in STATISTICS]
    if unknown:
        raise ArgumentError(
            f"{sink}: expected statistics of a spectrum; got {', '.join(map(repr, unknown))}. "
            f"Choose from {', '.join(STATISTICS)}."
        )
    return names
