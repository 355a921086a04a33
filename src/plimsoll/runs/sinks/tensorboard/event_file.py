"""An event file of TensorBoard's, written synchronously: the sink has a thread of its own already.

TensorBoard's writer starts another thread, asks for TensorFlow, and checksums in pure Python. A record is its length,
the length's checksum, the bytes, and their checksum, little-endian (TFRecord). A reader stops at the first torn record,
so one that could not be written whole, on a full disk, is taken off again.
"""

import itertools
import os
import socket
import struct
import time
from pathlib import Path

from plimsoll.runs.sinks.tensorboard.crc32c import crc32c

_COUNT = itertools.count()


class EventFile:
    """A new event file in `folder`, which is made if it is missing."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard knows its files by "tfevents" and reads them in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_COUNT)}"
        self.path = folder / name
        self._file = self.path.open("xb", buffering=0)
        self._length = 0

    def write(self, payload: bytes) -> None:
        """Appends a record, whole or not at all."""
        head = struct.pack("<Q", len(payload))
        record = head + _masked(head) + payload + _masked(payload)
        try:
            self._write_all(record)
        except OSError:
            self._file.truncate(self._length)
            self._file.seek(self._length)
            raise
        self._length += len(record)

    def close(self) -> None:
        """Closes the file; nothing is held back before."""
        self._file.close()

    def _write_all(self, record: bytes) -> None:
        left = memoryview(record)
        while left:
            left = left[self._file.write(left) :]


def _masked(data: bytes) -> bytes:
    """The checksum as TFRecord stores it: rotated and offset, since a file of checksums may be checksummed again."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFF_FFFF)
