"""Statistics of many spectra at once, by the formulas of `Spectrum`; data frames."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.errors import MissingExtraError
from plimsoll.extras import install_line
from plimsoll.runs.columns import row_order
from plimsoll.runs.columns.arrow import Table, values_of
from plimsoll.runs.columns.schema import ADDED
from plimsoll.runs.columns.spectrum_columns import numbers
from plimsoll.runs.reading.row_selection import Steps
from plimsoll.runs.records import EXTRAS
from plimsoll.spectrum import error_sums
from plimsoll.spectrum.record import COUNTS, EXTREMES, SUMS

Columns = dict[str, NDArray[np.float64]]

COLUMNS = (*COUNTS, *EXTREMES, *SUMS, "scale", *EXTRAS)
# The power of the scale that a column carries.
_POWERS = {**dict.fromkeys((*EXTREMES, "sum", "abssum"), 1), "sumsq": 2, "sumfourth": 4, **error_sums.POWERS}
_LOWEST, _HIGHEST = ("min", "absmin"), ("max", "absmax", "largest_error")


def merged(table: Table, *, raw: bool) -> tuple[NDArray[np.int64], Columns]:
    """Return the steps, and columns of a number a step. Undoes scales unless `raw`."""
    order = np.argsort(values_of(table["step"]), kind="stable")
    steps = values_of(table["step"])[order]
    starts = row_order.starts([steps])
    columns = {name: numbers(table, name)[order] for name in COLUMNS}
    with np.errstate(all="ignore"):
        if not raw:
            for name, power in _POWERS.items():
                columns[name] = columns[name] / columns["scale"] ** power
        if len(starts) < len(steps):
            columns = {name: _joined(name, column, starts) for name, column in columns.items()}
    return steps[starts], columns


def _joined(name: str, column: NDArray[np.float64], starts: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return one number for each group of rows of one step."""
    if name in _LOWEST:
        return np.fmin.reduceat(column, starts)
    if name in _HIGHEST:
        return np.fmax.reduceat(column, starts)
    if name == "scale":
        return column[starts]
    if name not in EXTRAS:
        return np.add.reduceat(column, starts)
    there = ~np.isnan(column)
    known = np.where(there, column, 0.0)
    total = np.sqrt(np.add.reduceat(known * known, starts)) if name == "weight_norm" else np.add.reduceat(known, starts)
    return np.where(np.logical_or.reduceat(there, starts), total, np.nan)


def _nonfinite(c: Columns) -> NDArray[np.float64]:
    return c["nans"] + c["pos_infs"] + c["neg_infs"]


def _finite(c: Columns) -> NDArray[np.float64]:
    return c["count"] - _nonfinite(c)


def _std(c: Columns) -> NDArray[np.float64]:
    finite = _finite(c)
    mean = c["sum"] / finite
    # As in Spectrum.std: no deviation exceeds half the range, which also takes the rounding off equal values.
    return np.minimum(np.sqrt(np.maximum(c["sumsq"] / finite - mean * mean, 0.0)), c["max"] / 2 - c["min"] / 2)


def _directions(c: Columns) -> NDArray[np.float64]:
    names = ("compared", "error", "reference", "referencesq", "error_reference")
    return error_sums.directions(*(c[name] for name in names))


def _kurtosis(c: Columns) -> NDArray[np.float64]:
    """As in `Spectrum.kurtosis`."""
    fourths = c["sumfourth"]
    known = (fourths >= np.finfo(np.float64).tiny) & (fourths < np.inf)
    return np.where(known, np.maximum(fourths / c["sumsq"] / (c["sumsq"] / _finite(c)), 1.0), np.nan)


STATISTICS: Mapping[str, Callable[[Columns], NDArray[np.float64]]] = {
    **{name: (lambda c, name=name: c[name]) for name in (*COUNTS, *EXTREMES, *SUMS, "scale") if name not in ADDED},
    "nonfinite": _nonfinite,
    "finite": _finite,
    "nonzero": lambda c: _finite(c) - c["zeros"],
    "zero_fraction": lambda c: c["zeros"] / c["count"],
    "mean": lambda c: c["sum"] / _finite(c),
    "absmean": lambda c: c["abssum"] / _finite(c),
    "rms": lambda c: np.sqrt(c["sumsq"] / _finite(c)),
    "norm": lambda c: np.sqrt(c["sumsq"]),
    "std": _std,
}
# Those that only some series have; steps without one are left out.
BESIDE: Mapping[str, Callable[[Columns], NDArray[np.float64]]] = {
    "sumfourth": lambda c: c["sumfourth"],
    "kurtosis": _kurtosis,
    "ratio": lambda c: np.sqrt(c["sumsq"]) / c["weight_norm"],
    "weight_norm": lambda c: c["weight_norm"],
    "pushed": lambda c: c["pushed"],
    "unmoved": lambda c: c["unmoved"] / c["pushed"],
    "underflowed": lambda c: c["underflowed"] / c["count"],
    "structural": lambda c: c["structural"] / c["count"],
    "last_bin": lambda c: c["last_bin"] / c["count"],
    "relative_error": lambda c: error_sums.relative_error(c["errorsq"], c["referencesq"]),
    "snr_db": lambda c: error_sums.snr_db(c["errorsq"], c["referencesq"]),
    "cosine": lambda c: error_sums.cosine(c["errorsq"], c["referencesq"], c["error_reference"]),
    "along_reference": lambda c: _directions(c)[:, 0],
    "constant": lambda c: _directions(c)[:, 1],
    "largest_error": lambda c: c["largest_error"],
    "made_nonfinite": lambda c: c["made_nonfinite"],
}

# -- pandas DataFrames of the statistics and of scalars ----------------------------------------------------------------

Scalars = Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]


def scalar_frame(scalars: Scalars, wanted: Steps) -> Any:
    """Return a frame of scalars by step. NaN: not recorded at that step."""
    pandas = _pandas()
    frame = pandas.DataFrame({name: pandas.Series(values, index=steps) for name, (steps, values) in scalars.items()})
    frame.index.name = "step"
    return frame[wanted.mask(frame.index.to_numpy(np.int64))]


def tensor_frame(table: Table) -> Any:
    """Return a frame with the statistics of each tensor and step.

    Its columns are step, collection, name and all statistics. Rows are those of `Run.table`, without block records.
    """
    pandas = _pandas()
    choices = {**STATISTICS, **BESIDE}
    table = row_order.by(table.drop_columns(["binades"]), ("collection", "name"))
    keys = [row_order.codes(table[column]) for column in ("collection", "name")]
    frames: list[Any] = []
    for start, stop in itertools.pairwise([*row_order.starts(keys).tolist(), len(table)]):
        rows = table.slice(start, stop - start)
        steps, columns = merged(rows, raw=False)
        with np.errstate(all="ignore"):
            values = {name: np.asarray(choice(columns), dtype=np.float64) for name, choice in choices.items()}
        names = {column: rows[column][0].as_py() for column in ("collection", "name")}
        frames.append(pandas.DataFrame({"step": steps, **names, **values}))
    empty = pandas.DataFrame(columns=["step", "collection", "name", *choices])
    # Statistics that no tensor of the frame has would be columns of NaN only.
    return pandas.concat(frames, ignore_index=True).dropna(axis="columns", how="all") if frames else empty


def _pandas() -> Any:
    try:
        import pandas as pd  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise MissingExtraError(
            f"Run.to_pandas: expected the package pandas; got none. Install it: {install_line('pandas')}"
        ) from error
    return pd
