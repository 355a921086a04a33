"""Loss curves from runs, folders, files, sequences: divergence and common steps."""

import operator
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from plimsoll.checks import nearest
from plimsoll.diagnosis.tables.cells import Floats, Ints
from plimsoll.errors import ArgumentError, NotRecordedError
from plimsoll.runs import Run
from plimsoll.runs.importing.scalar_table import ELAPSED, without_replaced
from plimsoll.text import counted

EACH_STEP = "step_seconds"  # scalar: how long a step took
_STREAK = 3  # values without a number at the end of a run that goes on, from which on it has diverged
_LASTING = 0.05  # share of the records for which a curve must be lost, if its values are ordinary ones
_FIRST = 5  # records that say where a curve begins
_CLEAR = 5.0  # standard deviations of a record: a smaller gain over a run is no gain
_FAR = 10.0  # ranges of the base's values: what lies farther out has diverged, whatever the base gained
_MEDIAN_OF_DIFFERENCES = 0.954  # of neighbours in normal noise, in its standard deviations


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """One run's scalar over its steps."""

    name: str  # what sentences call it
    steps: Ints  # distinct and ascending
    values: Floats  # one for each step; NaN and infinities are as recorded
    seconds: Floats  # seconds at each step, from any beginning; empty or NaN where they were not recorded
    ended: bool  # whether nothing will be added

    def at(self, kept: NDArray[np.bool_]) -> "Curve":
        """Return the curve at some of its records."""
        seconds = self.seconds[kept] if len(self.seconds) else self.seconds
        return replace(self, steps=self.steps[kept], values=self.values[kept], seconds=seconds)


def curves_of(given: object, which: str, scalar: str, until: int | None) -> list[Curve]:
    """Return the curves of one side up to `until`: one of a single run, several of a list of runs."""
    items = [given] if _is_one(given, which) else _listed(given, which)
    names = [which if len(items) == 1 else f"{which} {number}" for number in range(1, len(items) + 1)]
    curves = [_curve(source, name, which, scalar) for source, name in zip(items, names, strict=True)]
    if until is not None:
        curves = [curve.at(curve.steps <= until) for curve in curves]
    for curve in curves:
        if not len(curve.steps):
            limit = "" if until is None else f" up to step {until:,}"
            raise ArgumentError(
                f"parity: expected runs with values of {scalar!r}; got none in {curve.name}{limit}. "
                "Leave the run out, or wait for its first records."
            )
    return curves


def _is_one(given: object, which: str) -> bool:
    """Return whether it is one run, and no list of runs."""
    if isinstance(given, Run | str | os.PathLike | Mapping):
        return True
    first: Any = next(iter(_listed(given, which)), 0.0)
    return not isinstance(first, Run | str | os.PathLike | Mapping) and np.ndim(first) == 0


def _listed(given: object, which: str) -> list[object]:
    if isinstance(given, Collection):
        collection = cast("Collection[object]", given)
        if getattr(collection, "ndim", 1) > 0:  # arrays of no dimension have no items
            return list(collection)
    raise ArgumentError(
        f"parity: expected {which} to be a run, its path, a sequence of losses, or a list of these; got {given!r}. "
        "Pass plimsoll.Run(folder), for example."
    )


def _curve(source: Any, name: str, which: str, scalar: str) -> Curve:
    if isinstance(source, Run | str | os.PathLike):
        return _recorded(source if isinstance(source, Run) else Run.of(os.fspath(source)), scalar)
    kind, steps = type(source).__name__, None
    try:
        if isinstance(source, Mapping):
            pairs = sorted(cast("Mapping[Any, Any]", source).items())
            steps = np.array([operator.index(step) for step, _ in pairs], dtype=np.int64)
            source = [value for _, value in pairs]
        values = np.asarray(source, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # the last one: tensors of another device
        raise ArgumentError(
            f"parity: expected {which} to hold runs, paths or numbers; got {kind} ({error}). "
            "Pass plain floats, one for each step, with NaN where a step has none, or a mapping from steps to floats."
        ) from error
    if values.ndim != 1:
        raise ArgumentError(
            f"parity: expected the losses of a run to be a flat sequence; got the shape {values.shape} in {name}. "
            "Pass one sequence for each run."
        )
    steps = np.arange(len(values)) if steps is None else steps
    lasting = without_replaced(steps)
    return Curve(name=name, steps=steps[lasting], values=values[lasting], seconds=np.empty(0), ended=True)


def _recorded(run: Run, scalar: str) -> Curve:
    if scalar not in run.scalar_names:
        names = ", ".join(nearest(scalar, run.scalar_names) or run.scalar_names[:8]) or "no scalar"
        raise NotRecordedError(
            f"parity: expected runs with the scalar {scalar!r}; got {run.path.name}, which has {names}. Name one that "
            "all runs have."
        )
    steps, values = run.scalars(scalar)
    if ELAPSED in run.scalar_names:
        seconds = np.interp(steps, *run.scalars(ELAPSED))
    elif EACH_STEP in run.scalar_names:
        known, durations = run.scalars(EACH_STEP)
        gaps = np.diff(known, prepend=known[0] - 1)
        seconds = np.interp(steps, known, np.cumsum(np.where(np.isfinite(durations), durations, 0.0) * gaps))
    else:
        seconds = run.scalar_times(scalar)[1]  # NaN in runs of other trackers, and of versions without times
    ended = run.closed or run.was_abandoned
    return Curve(name=run.path.name, steps=steps, values=values, seconds=seconds, ended=ended)


# -- divergence


def diverged(curve: Curve, base: Sequence[Curve], sign: float) -> int | None:
    """Return the step from which a curve is lost to its end; None if it is not.

    Lost are NaN and infinities, and values that are worse than where the base began. The latter only where the base
    gained clearly, or where they are far beyond all that the base had. A few at the end of a run that goes on are not
    yet a divergence, and neither are missing values at the end of one that has had gaps as long. `sign` is 1 where
    lower values are better, -1 where higher ones are.
    """
    values = np.where(np.isfinite(curve.values), sign * curve.values, np.inf)
    limits = _Limits.of(base, sign)
    lasting = [
        (values == np.inf, max(_longest_gap(values == np.inf) + 1, 1 if curve.ended else _STREAK)),
        (values > limits.absurd, 2 * _FIRST),
        (values > limits.first, max(2 * _FIRST, _LASTING * len(values))),
    ]
    if float(np.sort(values)[len(values) // 10]) > limits.first - limits.clear:
        del lasting[-1]  # it had never learned anything: no gain is lost
    for lost, least in lasting:
        streak = len(lost) if lost.all() else int(np.argmin(lost[::-1]))
        if streak >= least:
            return int(curve.steps[-streak])
    return None


# Of simulated losses with a tenth of the steps missing, one in ten ends with a missing value. Taken for a divergence,
# that made 18 of 100 pairs of like runs better or worse.
def _longest_gap(lost: NDArray[np.bool_]) -> int:
    """Return the longest streak of lost values that ends again.

    >>> _longest_gap(np.array([True, False, True, True, False, True]))
    2
    """
    return int(np.diff(np.flatnonzero(~lost), prepend=-1).max(initial=1)) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """The base's first level, a clear gain over it, and an absurd value."""

    first: float
    clear: float
    absurd: float

    @classmethod
    def of(cls, base: Sequence[Curve], sign: float) -> "_Limits":
        known = [sign * curve.values[np.isfinite(curve.values)] for curve in base]
        known = [values for values in known if len(values) > 2 * _FIRST]
        if not known:
            return cls(first=np.inf, clear=0.0, absurd=np.inf)
        first = max(float(np.median(values[:_FIRST])) for values in known)
        # Quantiles: the base may have broken down itself, at its end.
        best, most = (max(float(np.quantile(values, part)) for values in known) for part in (0.1, 0.9))
        noise = max(float(np.median(np.abs(np.diff(values)))) for values in known) / _MEDIAN_OF_DIFFERENCES
        absurd = max(first, most) + _FAR * (max(first, most) - best)
        return cls(first=first if first - best > _CLEAR * noise else absurd, clear=_CLEAR * noise, absurd=absurd)


# -- alignment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Aligned:
    """Curves of both sides at common steps."""

    steps: Ints
    base: Floats  # values of the base's curves, one row each
    candidate: Floats  # values of the candidate's curves, one row each
    notes: tuple[str, ...]  # sentences on what was left out

    @property
    def differences(self) -> Floats:
        """Mean of the candidate's curves less that of the base's, at each step."""
        return self.candidate.mean(axis=0) - self.base.mean(axis=0)

    def first(self, records: int) -> "Aligned":
        """Return the first records alone."""
        return replace(
            self, steps=self.steps[:records], base=self.base[:, :records], candidate=self.candidate[:, :records]
        )


def aligned(base: Sequence[Curve], candidate: Sequence[Curve]) -> Aligned:
    """Return the curves at the steps at which all have a finite value; ArgumentError if there are none."""
    finite = [curve.at(np.isfinite(curve.values)) for curve in (*base, *candidate)]
    low, high = (pick(c.steps[end] for c in finite if len(c.steps)) for pick, end in ((max, 0), (min, -1)))
    inside = [curve.at((curve.steps >= low) & (curve.steps <= high)) for curve in finite]
    if not all(len(curve.steps) for curve in inside):
        shown = "; ".join(f"{c.name} has steps {c.steps[0]:,} to {c.steps[-1]:,}" for c in (*base, *candidate))
        raise ArgumentError(
            f"parity: expected runs with steps in common; got none: {shown}. Runs are paired by their step numbers."
        )
    steps = inside[0].steps
    for curve in inside[1:]:
        steps = np.intersect1d(steps, curve.steps, assume_unique=True)
    if 2 * len(steps) >= min(len(curve.steps) for curve in inside):
        rows = [curve.values[np.searchsorted(curve.steps, steps)] for curve in inside]
        notes = [*_shorter(finite, int(high)), *_gaps((*base, *candidate), steps)]
    else:
        # Curves that were logged at different steps are averaged over intervals of the longest distance between two
        # records.
        width = max(int(np.median(np.diff(curve.steps))) if len(curve.steps) > 1 else 1 for curve in inside)
        steps, rows = _means(inside, int(low), width)
        notes = [
            *_shorter(finite, int(high)),
            f"The runs were logged at different steps: means over {counted(width, 'step')} are compared.",
        ]
    values = np.stack(rows)
    return Aligned(steps=steps, base=values[: len(base)], candidate=values[len(base) :], notes=tuple(notes))


def _means(curves: Sequence[Curve], low: int, width: int) -> tuple[Ints, list[Floats]]:
    """Return the last step of each interval common to all curves, and the means there."""
    places = [(curve.steps - low) // width for curve in curves]
    common = np.unique(places[0])
    for place in places[1:]:
        common = np.intersect1d(common, place)
    rows: list[Floats] = []
    for curve, place in zip(curves, places, strict=True):
        in_common = np.isin(place, common)
        starts = np.flatnonzero(np.diff(place[in_common], prepend=-1))
        rows.append(
            np.add.reduceat(curve.values[in_common], starts) / np.diff(starts, append=np.count_nonzero(in_common))
        )
    return low + (common + 1) * width - 1, rows


def _shorter(curves: Sequence[Curve], last: int) -> list[str]:
    longest = max(int(curve.steps[-1]) for curve in curves)
    if longest == last:
        return []
    names = [curve.name for curve in curves if curve.steps[-1] == last]
    return [f"Compared up to step {last:,}, where {', '.join(names)} ends; the longest run has {longest:,}."]


def _gaps(curves: Sequence[Curve], steps: Ints) -> list[str]:
    """Return a note on steps at which a run has a value that is no number."""
    missing = np.unique(np.concatenate([curve.steps[~np.isfinite(curve.values)] for curve in curves]))
    left_out = int(np.count_nonzero((missing >= steps[0]) & (missing <= steps[-1])))
    return [f"{counted(left_out, 'step')} left out, where a value is NaN or infinite."] if left_out else []
