"""Event files of TensorBoard: records with checksums, filled from TensorBoard's protocol buffers.

The files are written synchronously: a sink has its own thread. TensorBoard's writer starts another thread, looks for
TensorFlow, and computes checksums in pure Python. `tensorboard.compat.proto` is TensorBoard's copy of the messages,
which does not need TensorFlow.
"""

import functools
import itertools
import json
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.runs.records import Event
from plimsoll.runs.sinks.selection import Histogram, StepValues
from plimsoll.runs.sinks.tracker import load

_COUNT = itertools.count()
_POLYNOMIAL = 0x82F63B78  # CRC-32C: RFC 3720, appendix B.4, with its bits reversed
_BLOCK = 256
_BATCH = 1 << 18  # bytes per lookup: the indices take eight times as much memory


class EventFile:
    """A new event file in `folder`, which is created if it is missing.

    A record is its length, the length's checksum, the bytes, and their checksum, little-endian (TFRecord).
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard finds its files by "tfevents" and reads them in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_COUNT)}"
        self.path = folder / name
        self._file = self.path.open("xb", buffering=0)
        self._length = 0

    def write(self, payload: bytes) -> None:
        """Append a record, whole or not at all."""
        head = struct.pack("<Q", len(payload))
        record = head + _masked(head) + payload + _masked(payload)
        try:
            self._write_all(record)
        except OSError:
            # On a full disk. A reader stops at the first torn record, so that one must go.
            self._file.truncate(self._length)
            self._file.seek(self._length)
            raise
        self._length += len(record)

    def close(self) -> None:
        """Close the file. It has no buffer to flush."""
        self._file.close()

    def _write_all(self, record: bytes) -> None:
        left = memoryview(record)
        while left:
            left = left[self._file.write(left) :]


def opening(step: int) -> list[bytes]:
    """Return the first records of a file. The start of a session makes readers drop later steps of earlier files."""
    events = load("tensorboard.compat.proto.event_pb2")
    start = events.SessionLog(status=events.SessionLog.START)
    return [
        _bytes(events.Event(wall_time=time.time(), file_version="brain.Event:2")),
        _bytes(events.Event(wall_time=time.time(), step=step, session_log=start)),
    ]


def values(step: int, found: StepValues) -> bytes:
    """Return the record of a step's scalars and histograms."""
    value = load("tensorboard.compat.proto.summary_pb2").Summary.Value
    summary = [value(tag=tag, simple_value=number) for tag, number in found.scalars.items()]
    summary += [value(tag=tag, histo=_histogram(histogram)) for tag, histogram in found.histograms.items()]
    return _event(step, time.time(), summary)


def text(event: Event) -> bytes:
    """Return the record of a run's event, as text under "events/kind"."""
    tensors = load("tensorboard.compat.proto.tensor_pb2")
    dtype = load("tensorboard.compat.proto.types_pb2").DT_STRING
    metadata = load("tensorboard.plugins.text.metadata").create_summary_metadata(display_name="", description="")
    details = json.dumps(dict(event.details), default=str)
    words = f"{event.message} (rank {event.rank})" + (f"\n\n`{details}`" if event.details else "")
    tensor = tensors.TensorProto(dtype=dtype, string_val=[words.encode(errors="replace")])
    value = load("tensorboard.compat.proto.summary_pb2").Summary.Value
    return _event(event.step, event.time, [value(tag=f"events/{event.kind}", metadata=metadata, tensor=tensor)])


def _histogram(histogram: Histogram) -> Any:
    """Return the message. Sums assume that values lie in the middle of their binades."""
    edges = histogram.edges.astype(np.float64)
    counts = histogram.counts.astype(np.float64)
    middles = edges[:-1] + 0.5
    return load("tensorboard.compat.proto.summary_pb2").HistogramProto(
        # Newer readers take the first and the last edge from these two.
        min=edges[0],
        max=edges[-1],
        num=counts.sum(),
        sum=counts @ middles,
        sum_squares=counts @ middles**2,
        # Limits are right edges: the empty bucket in front has the left edge of the first one.
        bucket_limit=edges.tolist(),
        bucket=[0.0, *counts.tolist()],
    )


def _event(step: int, wall_time: float, summary: list[Any]) -> bytes:
    events = load("tensorboard.compat.proto.event_pb2")
    summaries = load("tensorboard.compat.proto.summary_pb2")
    return _bytes(events.Event(wall_time=wall_time, step=step, summary=summaries.Summary(value=summary)))


def _bytes(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def _masked(data: bytes) -> bytes:
    """Return the checksum as TFRecord stores it, rotated and offset: a file of checksums may get a checksum itself."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFF_FFFF)


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of bytes of any length.

    TensorBoard's own takes 115 ns a byte in pure Python, 0.15 s of the GIL for a step of 1,400 tensors; this one takes
    about 5. A CRC without its initial inversion is linear over GF(2): the CRC of a message is the XOR of what each byte
    alone gives, which depends on the byte and on how many bytes follow it. A table of 256 x 256 therefore does a block
    of 256 bytes by lookup, and zeros in front change nothing. A test compares it with TensorBoard's.
    """
    message = np.frombuffer(data, dtype=np.uint8).copy()
    # The inversion at the start is the same as inverting the first four bytes; of fewer, the rest stays in the state.
    message[:4] ^= 0xFF
    state = 0xFFFF_FFFF >> (8 * len(message)) if len(message) < 4 else 0
    padded = np.concatenate([np.zeros(-len(message) % _BLOCK, dtype=np.uint8), message])
    return _linear(padded) ^ state ^ 0xFFFF_FFFF


def _linear(message: NDArray[np.uint8]) -> int:
    table = _table()
    # The state is XORed into the next four bytes, which 255, 254, 253 and 252 others of the block follow.
    ahead = [table[_BLOCK - 1 - place].tolist() for place in range(4)]
    state = 0
    for block in _blocks(message):
        state = ahead[0][state & 255] ^ ahead[1][state >> 8 & 255] ^ ahead[2][state >> 16 & 255] ^ ahead[3][state >> 24]
        state ^= block
    return state


def _blocks(message: NDArray[np.uint8]) -> list[int]:
    flat = _table()[::-1].ravel()
    place = np.arange(_BLOCK, dtype=np.int64) * 256
    rows = message.reshape(-1, _BLOCK)
    step = _BATCH // _BLOCK
    found: list[int] = []
    for first in range(0, len(rows), step):
        found += np.bitwise_xor.reduce(flat[rows[first : first + step] + place], axis=1).tolist()
    return found


@functools.cache
def _table() -> NDArray[np.uint32]:
    """Return a table with the CRC of byte b followed by k zero bytes at [k, b], without inversions."""
    table = np.zeros((_BLOCK, 256), dtype=np.uint32)
    row = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        row = np.where(row & 1, row >> 1 ^ _POLYNOMIAL, row >> 1).astype(np.uint32)
    table[0] = row
    for k in range(1, _BLOCK):
        table[k] = table[0][table[k - 1] & 255] ^ table[k - 1] >> 8
    return table
