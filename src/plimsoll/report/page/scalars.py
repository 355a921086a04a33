"""Scalars as answers: at most 600 points each, with the values of their axes."""

from collections.abc import Iterable

import numpy as np

from plimsoll.diagnosis import View
from plimsoll.diagnosis.tables.cells import Floats, Ints
from plimsoll.report.drawing.aggregation import Columns
from plimsoll.report.verdicts.run_summary import started_at
from plimsoll.runs.reading.row_selection import unknown

POINTS = 600  # some 40 KB of JSON, and more than a figure has pixels on a small screen
_DIGITS = 6
_EPOCH = "epoch"  # the name under which a training logs its epochs
# Scalars that the watch records for every run come after those that say how the training goes.
_LAST = ("scale", "nonfinite")


def in_order(names: Iterable[str]) -> list[str]:
    """Return names in the page's order: losses, logged numbers, then the watch's own."""

    def place(name: str) -> tuple[int, str]:
        if name == "loss" or name.startswith("loss:"):
            return 0, name
        return (3 if name.startswith("cast:") else 2 if name in _LAST else 1), name

    return sorted(names, key=place)


def scalar_answer(view: View, name: str, most: int = POINTS) -> dict[str, object]:
    """Return a scalar as data.

    Points stand for equally many steps each. `mean`, `low` and `high` are of the finite values of a point and null
    where there is none. `low` and `high` are left out where each point is one step.

    Args:
        view: The run.
        name: Name of the scalar.
        most: Maximum number of points.

    Raises:
        NotRecordedError: The name was not recorded.
    """
    if name not in view.run.scalar_names:
        raise unknown("serve", "a scalar", name, view.run.scalar_names, closed=view.run.closed)
    steps, values = view.scalar(name)
    finite = np.where(np.isfinite(values), values, np.nan)
    columns = Columns.of(steps, most)
    with np.errstate(over="ignore"):  # the sum of two finite losses may be too large
        mean = columns.merged(finite, "mean")
    answer: dict[str, object] = {
        "name": name,
        "step": columns.at.tolist(),
        "each": columns.each,
        "mean": _listed(mean),
        "nonfinite": int(np.count_nonzero(~np.isfinite(values))),
    }
    if columns.each > 1:
        answer |= {"low": _listed(columns.merged(finite, "min")), "high": _listed(columns.merged(finite, "max"))}
    axes = {"epoch": None if name == _EPOCH else _epochs(view, columns.at), "time": _seconds(view, name, columns)}
    return answer | {axis: _listed(values) for axis, values in axes.items() if values is not None}


def _epochs(view: View, steps: Ints) -> Floats | None:
    """Return the epoch at each step, in proportion between logged ones, or None.

    None: no axis can be made of them. Before the first and after the last, epochs are as long as the nearest. A number
    that is logged at every step of its epoch counts where it is new.
    """
    known, values = view.scalar(_EPOCH)
    there = np.isfinite(values)
    there[there] = np.diff(values[there], prepend=np.nan) != 0
    known, values = known[there], values[there]
    if len(known) < 2 or (np.diff(values) < 0).any():
        return None
    rates = np.diff(values) / np.diff(known)
    outside = rates[0] * np.minimum(steps - known[0], 0) + rates[-1] * np.maximum(steps - known[-1], 0)
    return np.interp(steps, known, values) + outside


def _seconds(view: View, name: str, columns: Columns) -> Floats | None:
    """Return each point's seconds from the run's start. None: the run has no times."""
    started = started_at(view.run)
    times = view.run.scalar_times(name)[1][: len(columns.steps)]
    if started is None or not len(times) or np.isnan(times).any():
        return None
    return columns.merged(times - started, "mean")


def _listed(values: Floats) -> list[float | None]:
    return [float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else None for value in values.tolist()]
