"""Messages from ranks to rank 0, through the key-value store that the process group was made with.

The store is a server (or a file) that all ranks reach, used at their own time: nobody waits for anybody, so a rank that
dies or lags holds up none of the others, which no collective can promise. Each process has a client of its own, since
one client serves one caller at a time. A message is a key that its sender sets, and whoever deletes it has it: rank 0
as a rule, or the sender itself when rank 0 is gone, so that no message counts twice.
"""

import errno
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch

from plimsoll.runs.columns.arrow import Table, pa

_SECONDS = 10.0  # what one question to the store may take
_opened: dict[str, int] = {}

R = TypeVar("R")


class Link:
    """One process's end. Failures of the store are OSErrors."""

    def __init__(self, run: str, rank: int) -> None:
        distributed: Any = torch.distributed.distributed_c10d
        store = distributed._get_default_store()  # noqa: SLF001  (torch offers it under no other name)
        _opened[run] = _opened.get(run, 0) + 1  # a run that is opened again has other keys
        self._server = store  # which ends with its last reference
        client = store.clone()
        client.set_timeout(timedelta(seconds=_SECONDS))
        self._store: Any = distributed.PrefixStore(f"plimsoll/{run}/{_opened[run]}", client)
        self.rank = rank

    def tell(self, key: str, value: bytes | str) -> None:
        """Sets a key."""
        _asked(lambda: self._store.set(key, value))

    def told(self, key: str) -> bytes | None:
        """What a key holds; None if it is not set."""
        return _asked(lambda: self._store.get(key) if self._store.check([key]) else None)

    def send(self, number: int, message: bytes) -> None:
        """Leaves a message, numbered by its sender, for rank 0."""
        self.tell(f"{self.rank}/{number}", message)
        _asked(lambda: self._store.add("sent", 1))

    def sent(self) -> int:
        """How many messages all ranks have left so far."""
        return _asked(lambda: int(self._store.add("sent", 0)))

    def is_there(self, rank: int, number: int) -> bool:
        """Whether a message lies there still."""
        return _asked(lambda: bool(self._store.check([f"{rank}/{number}"])))

    def take(self, rank: int, number: int) -> bytes | None:
        """A message, which is the caller's from now on; None if there is none, or another has taken it."""
        message = self.told(f"{rank}/{number}")
        return message if message is not None and self.claim(rank, number) else None

    def claim(self, rank: int, number: int) -> bool:
        """Takes a message away; False if it had gone."""
        return _asked(lambda: bool(self._store.delete_key(f"{rank}/{number}")))


def encoded(kind: str, table: Table) -> bytes:
    """A table as a message."""
    table = table.replace_schema_metadata({"kind": kind})
    sink = pa.BufferOutputStream()
    codec = "zstd" if pa.Codec.is_available("zstd") else None
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def decoded(message: bytes) -> tuple[str, Table]:
    """A message's kind and table."""
    table: Any = pa.ipc.open_stream(message).read_all()
    metadata: dict[bytes, bytes] = dict(table.schema.metadata or {})
    return metadata.get(b"kind", b"").decode(), table


def _asked(question: Callable[[], R]) -> R:
    try:
        return question()
    except RuntimeError as error:  # what all of torch's stores raise
        raise OSError(errno.EIO, f"the process group's store does not answer ({error})") from error
