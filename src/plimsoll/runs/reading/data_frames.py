"""pandas DataFrames of a run's scalars and of the statistics of its tensors."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.errors import MissingExtraError
from plimsoll.extras import install_line
from plimsoll.runs.columns import row_order, statistics
from plimsoll.runs.columns.arrow import Table
from plimsoll.runs.reading.row_selection import Steps

Scalars = Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]


def of_scalars(scalars: Scalars, wanted: Steps) -> Any:
    """Return a frame of scalars by step. NaN: not recorded at that step."""
    pandas = _pandas()
    frame = pandas.DataFrame({name: pandas.Series(values, index=steps) for name, (steps, values) in scalars.items()})
    frame.index.name = "step"
    return frame[wanted.mask(frame.index.to_numpy(np.int64))]


def of_tensors(table: Table) -> Any:
    """Return a frame with the statistics of each tensor and step.

    Its columns are step, collection, name and all statistics.

    Args:
        table: Rows of spectra, as `Run.table` returns them, without block records.
    """
    pandas = _pandas()
    choices = {**statistics.STATISTICS, **statistics.BESIDE}
    table = row_order.by(table.drop_columns(["binades"]), ("collection", "name"))
    keys = [row_order.codes(table[column]) for column in ("collection", "name")]
    frames: list[Any] = []
    for start, stop in itertools.pairwise([*row_order.starts(keys).tolist(), len(table)]):
        rows = table.slice(start, stop - start)
        steps, columns = statistics.merged(rows, raw=False)
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
