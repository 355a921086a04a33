"""Sink for TensorBoard: scalars by tensor, histograms from spectra, event texts."""

import functools
import itertools
import json
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.runs.records import Event, StepRecord
from plimsoll.runs.sinks.tracker import (
    DEFAULT_STATISTICS,
    MAX_HISTOGRAMS,
    Histogram,
    Selection,
    StepValues,
    Tracker,
    load,
)

_COUNT = itertools.count()
_POLYNOMIAL = 0x82F63B78  # CRC-32C: RFC 3720, appendix B.4, with its bits reversed
_BLOCK = 256
_SHORT = 512  # bytes up to which a loop is faster: 0.1 us each, where NumPy takes some 60 us a call
_BATCH = 1 << 18  # bytes per lookup: the indices take eight times as much memory


class EventFile:
    """A new event file in `folder`, which is created if it is missing."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard finds its files by "tfevents" and reads them in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_COUNT)}"
        self.path = folder / name
        self._file = self.path.open("xb", buffering=0)
        self._length = 0

    # A record is its length, the length's checksum, the bytes, and their checksum, little-endian (TFRecord).
    def write(self, payload: bytes) -> None:
        """Append a record, whole or not at all."""
        head = struct.pack("<Q", len(payload))
        record = head + masked_crc(head) + payload + masked_crc(payload)
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


def opening_payloads(step: int) -> list[bytes]:
    """Return a file's first records; a session start drops earlier files' later steps."""
    events = load("tensorboard.compat.proto.event_pb2")
    start = events.SessionLog(status=events.SessionLog.START)
    return [
        _bytes(events.Event(wall_time=time.time(), file_version="brain.Event:2")),
        _bytes(events.Event(wall_time=time.time(), step=step, session_log=start)),
    ]


def values_payload(step: int, found: StepValues) -> bytes:
    """Return the record of a step's scalars and histograms."""
    value = load("tensorboard.compat.proto.summary_pb2").Summary.Value
    summary = [value(tag=tag, simple_value=number) for tag, number in found.scalars.items()]
    summary += [value(tag=tag, histo=_histogram(histogram)) for tag, histogram in found.histograms.items()]
    return _event(step, time.time(), summary)


def text_payload(event: Event) -> bytes:
    """Return the record of a run's event, as text under "events/kind"."""
    tensors = load("tensorboard.compat.proto.tensor_pb2")
    dtype = load("tensorboard.compat.proto.types_pb2").DT_STRING
    metadata = load("tensorboard.plugins.text.metadata").create_summary_metadata(display_name="", description="")
    details = json.dumps(dict(event.details), default=str)
    words = f"{event.message} (rank {event.rank})" + (f"\n\n`{details}`" if event.details else "")
    tensor = tensors.TensorProto(dtype=dtype, string_val=[words.encode(errors="replace")])
    value = load("tensorboard.compat.proto.summary_pb2").Summary.Value
    return _event(event.step, event.time, [value(tag=f"events/{event.kind}", metadata=metadata, tensor=tensor)])


# A spectrum counts magnitudes by binade and keeps no sign for each, so its histogram is that of log2(abs(x)): values in
# [2^e, 2^(e+1)) are shown at [e, e+1). Zeros and non-finite values have no place on that axis; they are the statistics
# `zero_fraction` and `nonfinite`.
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


def masked_crc(data: bytes) -> bytes:
    """Return the checksum as TFRecord stores it, rotated and offset.

    A file of checksums may get a checksum itself.
    """
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFF_FFFF)


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of bytes of any length."""
    if len(data) <= _SHORT:
        state, bytewise = 0xFFFF_FFFF, _bytewise()
        for byte in data:
            state = bytewise[(state ^ byte) & 255] ^ state >> 8
        return state ^ 0xFFFF_FFFF
    # TensorBoard's own takes 115 ns a byte in pure Python, 0.15 s of the GIL for a step of 1,400 tensors; this one
    # takes about 5. A CRC without its initial inversion is linear over GF(2): the CRC of a message is the XOR of what
    # each byte alone gives, which depends on the byte and on how many bytes follow it. A table of 256 x 256 therefore
    # does a block of 256 bytes by lookup, and zeros in front change nothing. A test compares it with TensorBoard's.
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
    states: list[int] = []
    for first in range(0, len(rows), step):
        states += np.bitwise_xor.reduce(flat[rows[first : first + step] + place], axis=1).tolist()
    return states


@functools.cache
def _bytewise() -> list[int]:
    return _table()[0].tolist()


@functools.cache
def _table() -> NDArray[np.uint32]:
    """Return the table [k, b] of CRCs of byte b and k zero bytes, without inversions."""
    table = np.zeros((_BLOCK, 256), dtype=np.uint32)
    row = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        row = np.where(row & 1, row >> 1 ^ _POLYNOMIAL, row >> 1).astype(np.uint32)
    table[0] = row
    for k in range(1, _BLOCK):
        table[k] = table[0][table[k - 1] & 255] ^ table[k - 1] >> 8
    return table


class TensorBoard(Tracker):
    """Sink for ``tensorboard --logdir RUN/tensorboard``.

    Where a run is continued, TensorBoard drops what it had from the session's first step on.

    Args:
        folder: Folder of the event files. Default: "tensorboard" in the run's folder.
        statistics: Statistics of a `Spectrum` to write, as "gradients/blocks.0.mlp.0.weight/norm".
        histograms: Whether to write histograms of log2 of the magnitudes, as "gradients/blocks.0.mlp.0.weight".
        every: Least number of steps between the spectra that are written. Logged numbers, under their names ("loss"),
            and events, as the text "events/kind", are always written. Default: 1.
        max_histograms: Most histograms per step. Default: 1,000.

    Raises:
        MissingExtraError: TensorBoard is not installed.
        ArgumentError: A statistic does not exist.
    """

    name = extra = module = "tensorboard"

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        statistics: Sequence[str] = DEFAULT_STATISTICS,
        histograms: bool = True,
        every: int = 1,
        max_histograms: int = MAX_HISTOGRAMS,
    ) -> None:
        self._selection = Selection("TensorBoard", statistics, every, max_histograms if histograms else 0)
        self.require()
        self._folder = None if folder is None else Path(folder)
        self._file: EventFile | None = None

    def open(self, run_path: Path, settings: Mapping[str, object]) -> None:  # noqa: ARG002  (a sink's signature)
        """Create the folder, so that TensorBoard can be started on it at once."""
        self._folder = self._folder or run_path / "tensorboard"
        self._folder.mkdir(parents=True, exist_ok=True)

    def put(self, record: StepRecord) -> None:
        """Write one step: one record for its values, one for each event."""
        file = self._current_file(record.step)
        values = self._selection.of(record)
        if values.scalars or values.histograms:
            file.write(values_payload(record.step, values))
        for event in record.events:
            file.write(text_payload(event))

    def flush(self) -> None:
        """Do nothing: event files have no buffer."""

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _current_file(self, step: int) -> EventFile:
        """Return the open file: a new one at first, and after the old one was removed."""
        if self._file is not None and self._file.path.exists():
            return self._file
        self.close()
        self._file = None
        assert self._folder is not None, "open comes first"
        self._file = _started(EventFile(self._folder), step)
        return self._file


def _started(file: EventFile, step: int) -> EventFile:
    try:
        for payload in opening_payloads(step):
            file.write(payload)
    except OSError:
        file.close()
        file.path.unlink(missing_ok=True)
        raise
    return file
