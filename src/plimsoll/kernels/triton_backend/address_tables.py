"""Tables of addresses on the device, made once and kept.

One launch that reads many tensors needs their addresses in device memory. In steady state training the same tensors
come back at the same addresses, so tables are kept by their content: a hit costs a look-up, no copy, no allocation.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_MOST_TABLES = 256  # each some tens of KB: a model has a few lists (weights, gradients), each at few sets of addresses

Key = tuple[object, ...]


class _Table:
    __slots__ = ("captured", "copied", "streams", "words")

    def __init__(self, words: Tensor, copied: torch.cuda.Event | None, stream: int) -> None:
        self.words = words
        self.copied = copied
        self.streams = {stream}
        self.captured = False


class Tables:
    """A bounded cache of int64 device tensors by content, least recently used out."""

    def __init__(self, most: int = _MOST_TABLES) -> None:
        self._most = most
        self._tables: OrderedDict[Key, _Table] = OrderedDict()
        self._lock = threading.Lock()  # backward hooks run in autograd's threads

    def __len__(self) -> int:
        return len(self._tables)

    # A table found in the cache may be captured: its address never changes, and once captured it is never evicted,
    # since the graph reads it at every replay. (`torch.cuda.graph` synchronizes before it captures, so the copy is done
    # by then.) A table that is not in the cache cannot be made during capture: its copy would only run at replay, from
    # memory that must then stay alive, and its memory would come from the graph's own pool. `find` answers None, and
    # the caller launches once per tensor instead, with the addresses as arguments, which the graph keeps.
    def find(self, key: Key, device: torch.device, make: Callable[[], np.ndarray]) -> Tensor | None:
        """Return a key's table on `device`; a missing one is made, but not in capture."""
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with self._lock:
            full_key = (device, *key)
            table = self._tables.get(full_key)
            if table is None:
                if capturing:
                    return None
                table = self._tables[full_key] = _move(make(), device)
                self._evict()
            else:
                self._tables.move_to_end(full_key)
                _join_stream(table, device, capturing)
            table.captured |= capturing
            return table.words

    def _evict(self) -> None:
        excess = len(self._tables) - self._most
        if excess > 0:
            for key in [key for key, table in self._tables.items() if not table.captured][:excess]:
                del self._tables[key]


def _move(words: np.ndarray, device: torch.device) -> _Table:
    host = torch.from_numpy(words)
    if device.type != "cuda":
        return _Table(host, None, 0)
    # The allocator of pinned memory keeps this buffer until the copy has run.
    moved = host.pin_memory().to(device, non_blocking=True)
    stream = torch.cuda.current_stream(device)
    return _Table(moved, stream.record_event(), stream.cuda_stream)


# The copy is asynchronous, from pinned memory, on the stream of the first use. Another stream waits for it by an event
# before its first launch.
def _join_stream(table: _Table, device: torch.device, capturing: bool) -> None:
    if table.copied is None:
        return
    stream = torch.cuda.current_stream(device)
    if stream.cuda_stream not in table.streams and not capturing:
        stream.wait_event(table.copied)
        table.words.record_stream(stream)
        table.streams.add(stream.cuda_stream)
