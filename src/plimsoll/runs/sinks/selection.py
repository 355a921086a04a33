"""What a tracker is given of a step: one number per tensor and statistic, and one histogram per tensor."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from plimsoll.errors import ArgumentError
from plimsoll.kernels.row_layout import LOWEST_BINADE
from plimsoll.runs.records import StepRecord
from plimsoll.runs.user_messages import say
from plimsoll.spectrum import Spectrum

# Every property and field of a spectrum that is one number.
STATISTICS = (
    "absmax", "absmean", "absmin", "abssum", "count", "finite", "max", "mean", "min", "nans", "neg_infs", "nonfinite",
    "nonzero", "norm", "pos_infs", "rms", "std", "sum", "sumsq", "zero_fraction", "zeros",
)  # fmt: skip
# `nonfinite` is among them because the others speak of finite values only: a tensor half NaN would look healthy.
DEFAULT_STATISTICS = ("absmax", "absmean", "mean", "std", "norm", "min", "max", "zero_fraction", "nonfinite")
MAX_HISTOGRAMS = 1000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Histogram:
    """Nonzero finite values by floor(log2(abs(x))): ``counts[i]`` lie in [2^(lowest+i), 2^(lowest+i+1))."""

    lowest: int
    counts: NDArray[np.int64]

    @property
    def edges(self) -> NDArray[np.int64]:
        """The exponents between which the counts lie: one more than there are counts."""
        return np.arange(self.lowest, self.lowest + len(self.counts) + 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepValues:
    """A step's numbers and histograms by tag: "collection/name/statistic", "collection/name", or a scalar's name."""

    scalars: Mapping[str, float]
    histograms: Mapping[str, Histogram] = field(default_factory=dict[str, Histogram])


class Selection:
    """Picks a step's values by the settings that all trackers share.

    - `statistics`: of `STATISTICS`.
    - `every`: spectra are taken when at least so many steps lie between; numbers that were logged always are.
    - `max_histograms`: per step; 0 for none. Of more, the first by collection and name are taken, which is said once.
    """

    def __init__(self, sink: str, statistics: Sequence[str], every: int, max_histograms: int) -> None:
        self._sink = sink
        self._statistics = _checked(sink, statistics)
        self._every = _at_least(sink, "every", every, 1)
        self._max_histograms = _at_least(sink, "max_histograms", max_histograms, 0)
        self._last: int | None = None
        self._told = False

    def of(self, record: StepRecord) -> StepValues:
        """The record's values; its spectra are decoded only where they are due."""
        if not self._due(record.step):
            return StepValues(scalars=dict(record.scalars))
        # Tensors without values (an empty shard) have no statistic to show.
        spectra = {key: spectrum for key, spectrum in sorted(record.spectra().items()) if spectrum.count}
        if spectra:
            self._last = record.step
        return StepValues(
            scalars={**dict(_numbers(spectra, self._statistics)), **record.scalars},
            histograms=self._histograms(spectra),
        )

    def _due(self, step: int) -> bool:
        # A step before the last one is a run that was taken back to a checkpoint; the same one, more of that step.
        return self._last is None or step <= self._last or step - self._last >= self._every

    def _histograms(self, spectra: Mapping[tuple[str, str], Spectrum]) -> dict[str, Histogram]:
        if not self._max_histograms:
            return {}
        found = {"/".join(key): histogram(spectrum) for key, spectrum in spectra.items() if spectrum.nonzero}
        if len(found) > self._max_histograms and not self._told:
            self._told = True
            say(
                f"{self._sink}: a step has {len(found):,} histograms; the first {self._max_histograms:,} are written. "
                "Give a larger max_histograms for the others, or collect fewer tensors."
            )
        return dict(list(found.items())[: self._max_histograms])


def histogram(spectrum: Spectrum) -> Histogram:
    """The binades from the lowest to the highest that hold anything."""
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


def _at_least(sink: str, name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or math.floor(value) != value or value < least:
        raise ArgumentError(f"{sink}: expected {name} to be a whole number >= {least}; got {name}={value!r}. Give one.")
    return int(value)
