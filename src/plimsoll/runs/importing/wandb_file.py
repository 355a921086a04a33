"""Reader of W&B's offline runs: the history in a .wandb file."""

import json
import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plimsoll.errors import ArgumentError, RunError
from plimsoll.runs.importing.scalar_table import ScalarTable
from plimsoll.runs.sinks.tracker import load

SUFFIX = ".wandb"
_BLOCK, _HEAD = 32 << 10, 7
_MAGIC = b":W&B" + struct.pack("<H", 0xBEE1)
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_MOST_BYTES = 64 << 20  # of a message; W&B itself sends at most 10 MB of history at once


def wandb_files(path: Path) -> list[Path]:
    """Return the .wandb files at a path; none if there are none."""
    if path.is_file():
        return [path] if path.suffix == SUFFIX else []
    return sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else []


def read_wandb(path: Path, *, step: str | None) -> ScalarTable:
    """Return the numbers in the history of an offline run, nested keys joined by dots.

    Args:
        path: The folder offline-run-..., or the file in it.
        step: Key of the steps, if the run logs them itself. Default: W&B's own.

    Raises:
        ArgumentError: No row has that key.
        RunError: There is no file, or it is damaged.
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
        raise RunError(f"{path}: expected a file that can be read; got {error}. Look at the file.") from error
