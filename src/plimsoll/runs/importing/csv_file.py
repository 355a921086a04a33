"""Reader of CSV files: a column of steps, and columns of numbers."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path

from plimsoll.checks import nearest
from plimsoll.errors import ArgumentError, RunError
from plimsoll.runs.importing.scalar_table import ScalarTable

# Columns by what trackers call them when they export, in small letters.
_STEP_NAMES = ("step", "steps", "global_step", "trainer/global_step", "_step", "iteration", "iter", "epoch")
_UNIX_TIMES = ("wall time", "wall_time", "_timestamp", "timestamp")
_RUNTIMES = ("_runtime", "relative time (process)", "elapsed_seconds")


def read_csv(path: Path, *, step: str | None, delimiter: str | None) -> ScalarTable:
    """Return the numbers of a CSV file whose first line has the names of the columns.

    Columns that hold no number are left out. Empty cells are missing values.

    Args:
        path: The file.
        step: Name of the column of steps. Default: the one that trackers name so.
        delimiter: Character between cells. Default: a tab in a file that ends in .tsv, else a comma.

    Raises:
        ArgumentError: There is no such column.
        RunError: The file cannot be read, or is no table of numbers.
    """
    table = ScalarTable(str(path))
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            rows = csv.reader(
                file, delimiter=delimiter or ("\t" if path.suffix.lower() == ".tsv" else ","), strict=True
            )
            names = [name.strip() for name in next(rows, list[str]())]
            columns = _Columns(path, names, step)
            for cells in rows:
                if any(cells):
                    columns.add(table, rows.line_num, cells)
    except (OSError, csv.Error) as error:
        raise RunError(f"{path}: expected a CSV file that can be read; got {error}. Look at the file.") from error
    return table


class _Columns:
    """Contents of a file's columns: steps, seconds, numbers, or text so far."""

    def __init__(self, path: Path, names: Sequence[str], step: str | None) -> None:
        self.path, self.names = path, names
        self.step = _step_column(path, names, step)
        folded = [name.casefold() for name in names]
        self.runtime = next((folded.index(name) for name in _RUNTIMES if name in folded), None)
        self.time = next((folded.index(name) for name in _UNIX_TIMES if name in folded), None)
        self.numbers = [c for c in range(len(names)) if c not in (self.step, self.runtime, self.time)]
        self.seen: set[int] = set()  # columns that have had a number
        self.began: float | None = None

    def add(self, table: ScalarTable, line: int, cells: Sequence[str]) -> None:
        """Add the numbers of one line to a table."""
        if len(cells) != len(self.names):
            raise RunError(
                f"{self.path}: expected {len(self.names)} cells in line {line}; got {len(cells)}. "
                "The file is damaged, or its delimiter is another."
            )
        step = _number(cells[self.step])
        if step is None or not math.isfinite(step) or step != int(step):
            raise self._wrong("a whole number as the step", line, cells[self.step])
        seconds = self._seconds(cells)
        for column in self.numbers:
            value = _number(cells[column])
            if value is not None:
                self.seen.add(column)
                table.add(int(step), self.names[column], value, seconds)
            elif column in self.seen and cells[column].strip():
                raise self._wrong(f"a number under {self.names[column]!r}, as before,", line, cells[column])

    def _seconds(self, cells: Sequence[str]) -> float:
        if self.runtime is not None:
            seconds = _number(cells[self.runtime])
            return math.nan if seconds is None else seconds
        time = None if self.time is None else _number(cells[self.time])
        if time is None:
            return math.nan
        self.began = time if self.began is None else self.began
        return time - self.began

    def _wrong(self, expected: str, line: int, cell: str) -> RunError:
        return RunError(
            f"{self.path}: expected {expected} in line {line}; got {cell[:40]!r}. Correct the cell, or leave it empty "
            "where a value is missing."
        )


def _step_column(path: Path, names: Sequence[str], step: str | None) -> int:
    if step is not None:
        if step in names:
            return names.index(step)
        near = nearest(step, names)
        raise ArgumentError(
            f"{path}: expected a column of steps that the file has; got step={step!r}. "
            f"Its columns are {', '.join(near or names[:8])}."
        )
    folded = [name.casefold() for name in names]
    place = next((folded.index(known) for known in _STEP_NAMES if known in folded), None)
    if place is None:
        raise ArgumentError(
            f"{path}: expected a column of steps named {', '.join(_STEP_NAMES[:4])} or so; got the columns "
            f"{', '.join(map(repr, names[:8])) or 'none'}. Call that column 'step' in the "
            "first line, or name it: Run.from_csv(path, step=...)."
        )
    return place


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
