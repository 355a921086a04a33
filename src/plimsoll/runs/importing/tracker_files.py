"""Readers of other trackers' files: CSV, TensorBoard's events, W&B's offline runs."""

import csv
import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from plimsoll.checks import nearest
from plimsoll.errors import ArgumentError, MissingExtraError, RunError
from plimsoll.extras import install_line
from plimsoll.runs.importing.scalar_table import ScalarTable
from plimsoll.runs.sinks.tensorboard import masked_crc
from plimsoll.runs.sinks.tracker import load
from plimsoll.runs.storage import location, manifest
from plimsoll.runs.storage.location import Folder, is_elsewhere

# Of a record or message. TensorBoard's longer ones hold pictures, not scalars; W&B itself sends at most 10 MB at once.
_MOST_BYTES = 64 << 20

# -- CSV: a column of steps, and columns of numbers --------------------------------------------------------------------

# Columns by what trackers call them when they export, in small letters.
_STEP_NAMES = ("step", "steps", "global_step", "trainer/global_step", "_step", "iteration", "iter", "epoch")
_UNIX_TIMES = ("wall time", "wall_time", "_timestamp", "timestamp")
_RUNTIMES = ("_runtime", "relative time (process)", "elapsed_seconds")


def read_csv(path: Path, *, step: str | None, delimiter: str | None) -> ScalarTable:
    """Return the numbers of a CSV file whose first line has the names of the columns.

    Columns that hold no number are left out. Empty cells are missing values. By default the column of steps is the one
    that trackers name so, and cells are separated by a tab in a file that ends in .tsv, else by a comma.
    """
    table = ScalarTable(str(path))
    if delimiter is not None and (not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in "\r\n"):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"{path}: expected delimiter to be one character; got delimiter={delimiter!r}. Use ';', for example."
        )
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
        if isinstance(error, RunError):  # which is an OSError too, and says what is wrong
            raise
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
        step = _cell_number(cells[self.step])
        if step is None or not math.isfinite(step) or step != int(step):
            raise self._wrong("a whole number as the step", line, cells[self.step])
        seconds = self._seconds(cells)
        for column in self.numbers:
            value = _cell_number(cells[column])
            if value is not None:
                self.seen.add(column)
                table.add(int(step), self.names[column], value, seconds)
            elif column in self.seen and cells[column].strip():
                raise self._wrong(f"a number under {self.names[column]!r}, as before,", line, cells[column])

    def _seconds(self, cells: Sequence[str]) -> float:
        if self.runtime is not None:
            seconds = _cell_number(cells[self.runtime])
            return math.nan if seconds is None else seconds
        time = None if self.time is None else _cell_number(cells[self.time])
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
        near = nearest(str(step), names)
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


def _cell_number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


# -- TensorBoard's event files: the scalars of one run -----------------------------------------------------------------

SIGN = "tfevents"  # in the name of every event file
_FLOATS = {1: np.float32, 2: np.float64}  # TensorFlow's numbers of dtypes


def event_files(path: Path) -> list[Path]:
    """Return the event files at a path, oldest first; none if there are none."""
    if path.is_file():
        return [path] if SIGN in path.name else []
    return sorted(file for file in path.iterdir() if SIGN in file.name) if path.is_dir() else []


def read_tensorboard(path: Path) -> ScalarTable:
    """Return the scalars of the event files of one run, under their tags."""
    files = event_files(path)
    if not files:
        below = sorted({file.parent for file in path.rglob(f"*{SIGN}*")})[:6] if path.is_dir() else []
        advice = f"Name one of {', '.join(map(str, below))}." if below else "Name the folder of one run."
        raise RunError(f"{path}: expected event files of TensorBoard; got none. {advice}")
    events = load("tensorboard.compat.proto.event_pb2")
    table, scalar_tags = ScalarTable(str(path)), set[str]()
    began: float | None = None
    for file in files:
        for payload in _payloads(file):
            try:
                event = events.Event.FromString(payload)
            except Exception as error:  # protobuf's own, of a module that depends on its version
                raise RunError(
                    f"{file}: expected events of TensorBoard; got another message ({error}). The file is damaged."
                ) from error
            if event.session_log.status == events.SessionLog.START:
                table.replace_from(event.step)
            began = event.wall_time if began is None else began
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    scalar_tags.add(value.tag)
                number = _number(value, value.tag in scalar_tags)
                if number is not None:
                    table.add(event.step, value.tag, number, event.wall_time - began)
    return table


def _number(value: Any, is_scalar: bool) -> float | None:
    """Return the scalar in a summary; None for histograms, texts and pictures."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not is_scalar or not value.HasField("tensor") or value.tensor.dtype not in _FLOATS:
        return None
    tensor = value.tensor
    numbers = [*tensor.float_val, *tensor.double_val]
    if not numbers and len(tensor.tensor_content) == np.dtype(_FLOATS[tensor.dtype]).itemsize:
        numbers = np.frombuffer(tensor.tensor_content, _FLOATS[tensor.dtype]).tolist()
    return float(numbers[0]) if len(numbers) == 1 else None


def _payloads(path: Path) -> Iterator[bytes]:
    """Yield the records of a file, up to one that is torn or not yet whole."""
    try:
        with path.open("rb") as file:
            while (payload := _next_payload(file, path)) is not None:
                yield payload
    except OSError as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{path}: expected an event file that can be read; got {error}. Look at the file.") from error


# A file is a sequence of records: a length, its checksum, the bytes, and their checksum (TFRecord). The messages in
# them are read with TensorBoard's own definitions. A torn record at the end is the state of a file that is being
# written.
def _next_payload(file: BinaryIO, path: Path) -> bytes | None:
    """Return the next record, b"" if too long for scalars; None at the end."""
    place = file.tell()
    head = file.read(12)
    if len(head) < 12:
        return None
    if masked_crc(head[:8]) != head[8:]:
        raise _damaged(path, place)
    (length,) = struct.unpack("<Q", head[:8])
    if length > _MOST_BYTES:
        end = file.seek(0, 2)
        if place + 16 + length > end:
            return None
        file.seek(place + 16 + length)
        return b""
    payload = file.read(length + 4)
    if len(payload) < length + 4:
        return None
    if masked_crc(payload[:length]) != payload[length:]:
        raise _damaged(path, place)
    return payload[:length]


def _damaged(path: Path, place: int) -> RunError:
    return RunError(
        f"{path}: expected records with their checksums; got another one at byte {place:,}. The file is damaged, or is "
        "no event file of TensorBoard."
    )


# -- W&B's offline runs: the history in a .wandb file ------------------------------------------------------------------

SUFFIX = ".wandb"
_BLOCK, _HEAD = 32 << 10, 7
_MAGIC = b":W&B" + struct.pack("<H", 0xBEE1)
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def wandb_files(path: Path) -> list[Path]:
    """Return the .wandb files at a path; none if there are none."""
    if path.is_file():
        return [path] if path.suffix == SUFFIX else []
    return sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else []


def read_wandb(path: Path, *, step: str | None) -> ScalarTable:
    """Return the numbers in the history of an offline run, nested keys joined by dots.

    The path is of the folder offline-run-..., or of the file in it. `step` is the key of the steps, if the run logs
    them itself.
    """
    files = wandb_files(path)
    if len(files) != 1:
        below = sorted({file.parent for file in path.rglob(f"*{SUFFIX}")})[:6] if path.is_dir() else []
        advice = f"Name one of {', '.join(map(str, below))}." if below else "Name the folder offline-run-... of a run."
        many = f"{len(files)} of them" if files else "none"
        raise RunError(f"{path}: expected the .wandb file of one offline run; got {many}. {advice}")
    records = load("wandb.proto.wandb_internal_pb2")
    table = ScalarTable(str(path))
    for message in _messages(files[0]):
        try:
            record = records.Record.FromString(message)
        except Exception as error:  # protobuf's own, of a module that depends on its version
            raise RunError(
                f"{files[0]}: expected records of W&B; got another message ({error}). The file is damaged."
            ) from error
        if record.WhichOneof("record_type") == "history":
            _add_row(table, dict(_items(record.history, files[0])), record.history.step.num, step)
    if step is not None and not len(table):
        raise ArgumentError(
            f"{path}: expected a key of steps that the run has logged; got step={step!r}. Leave it out."
        )
    return table


def _add_row(table: ScalarTable, row: dict[str, float], number: int, step: str | None) -> None:
    """Add the numbers of one row of the history, if it has a step."""
    at = row.get("_step", number) if step is None else row.get(step)
    if at is None or not math.isfinite(at) or at != int(at):
        return
    for name, value in row.items():
        if not name.startswith("_") and name != step:
            table.add(int(at), name, value, row.get("_runtime", math.nan))


def _items(history: Any, path: Path) -> Iterator[tuple[str, float]]:
    """Yield the keys and values of a row that are numbers."""
    for item in history.item:
        name = ".".join(item.nested_key) or item.key
        text = item.value_json
        try:
            value = json.loads(text) if text else getattr(item, item.WhichOneof("value") or "value_json")
        except (ValueError, RecursionError) as error:
            raise RunError(
                f"{path}: expected JSON in the history; got {text[:40]!r} ({error}). The file is damaged."
            ) from error
        if value in ("NaN", "Infinity", "-Infinity"):
            value = float(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                yield name, float(value)
            except OverflowError:  # a whole number of hundreds of digits
                yield name, float("inf") if value > 0 else float("-inf")


# The file is a log of 32 KiB blocks (LevelDB's format): each record has a checksum, a length and whether it is whole or
# the first, middle or last part of a message. The messages are read with W&B's own definitions. A torn record at the
# end is the state of a file that is being written.
def _messages(path: Path) -> Iterator[bytes]:
    """Yield the messages of a file, up to one that is torn or not yet whole."""
    try:
        with path.open("rb") as file:
            if file.read(_HEAD)[: len(_MAGIC)] != _MAGIC:
                raise RunError(
                    f"{path}: expected a file of W&B; got one that does not begin as these do. Name another."
                )
            place, message = _HEAD, bytearray()
            while True:
                left = _BLOCK - place % _BLOCK
                if left < _HEAD:  # padding
                    place += len(file.read(left))
                    continue
                head = file.read(_HEAD)
                if len(head) < _HEAD:
                    return
                checksum, length, kind = struct.unpack("<IHB", head)
                data = file.read(length)
                if len(data) < length:
                    return
                continued = bool(message)
                sound = zlib.crc32(data, zlib.crc32(head[6:])) == checksum
                fits = kind in (_MIDDLE, _LAST) if continued else kind in (_WHOLE, _FIRST)
                if not sound or not fits or len(message) + length > _MOST_BYTES:
                    raise RunError(f"{path}: expected records of W&B; got none at byte {place:,}. The file is damaged.")
                message += data
                place += _HEAD + length
                if kind in (_WHOLE, _LAST):
                    yield bytes(message)
                    message.clear()
    except OSError as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{path}: expected a file that can be read; got {error}. Look at the file.") from error


# -- which tracker wrote a path, and its reader ------------------------------------------------------------------------

Kind = Literal["csv", "tensorboard", "wandb"]


def kind_of(path: str | os.PathLike[str]) -> Kind | None:
    """Return the tracker whose files are at a path; None for Plimsoll's and others."""
    if is_elsewhere(path):
        return None
    place = Path(path)
    if place.suffix.lower() in (".csv", ".tsv") and place.is_file():
        return "csv"
    if place.is_dir():
        names = [entry.name for entry in place.iterdir()]
        if location.names_of_runs(Folder(place)) or any(manifest.rank_of(name) is not None for name in names):
            return None
    if wandb_files(place):
        return "wandb"
    return "tensorboard" if event_files(place) else None


def read(path: Path, kind: Kind, *, step: str | None = None, delimiter: str | None = None) -> ScalarTable:
    """Return a tracker's scalars at a path.

    `step` is the column or key of the steps, of CSV and W&B, and `delimiter` of CSV. None is for the usual ones.
    """
    try:
        if kind == "csv":
            return read_csv(path, step=step, delimiter=delimiter)
        return read_wandb(path, step=step) if kind == "wandb" else read_tensorboard(path)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{path}: expected the package {kind}, which reads it; got none. Install it: {install_line(kind)}"
        ) from error
