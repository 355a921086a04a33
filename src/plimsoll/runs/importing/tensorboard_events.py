"""Reader of TensorBoard's event files: the scalars of one run."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from plimsoll.errors import RunError
from plimsoll.runs.importing.scalar_table import ScalarTable
from plimsoll.runs.sinks.tensorboard import masked_crc
from plimsoll.runs.sinks.tracker import load

SIGN = "tfevents"  # in the name of every event file
_MOST_BYTES = 64 << 20  # of a record; longer ones hold pictures, not scalars
_FLOATS = {1: np.float32, 2: np.float64}  # TensorFlow's numbers of dtypes


def event_files(path: Path) -> list[Path]:
    """Return the event files at a path, oldest first; none if there are none."""
    if path.is_file():
        return [path] if SIGN in path.name else []
    return sorted(file for file in path.iterdir() if SIGN in file.name) if path.is_dir() else []


def read_tensorboard(path: Path) -> ScalarTable:
    """Return the scalars of the event files of one run, under their tags.

    Raises:
        RunError: There is no event file, or one is damaged.
    """
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
            while (payload := _next(file, path)) is not None:
                yield payload
    except OSError as error:
        raise RunError(f"{path}: expected an event file that can be read; got {error}. Look at the file.") from error


# A file is a sequence of records: a length, its checksum, the bytes, and their checksum (TFRecord). The messages in
# them are read with TensorBoard's own definitions. A torn record at the end is the state of a file that is being
# written.
def _next(file: BinaryIO, path: Path) -> bytes | None:
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
