"""Entries of a recording: one for all equal operations, with the number of calls."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from plimsoll.receipts.recording.operations import Kind
from plimsoll.tracing.call_site import Place

Phase = Literal["forward", "recomputation", "backward", "optimizer"]
Where = Literal["eager", "compiled", "emulated"]
# Who asked for a cast: the script, torch's autocast (or Plimsoll's), code of torch such as `fully_shard`, a level or
# layer of Plimsoll, an emulation, the backward of another cast, or the operation that needed it.
Cause = Literal["script", "autocast", "torch", "level", "emulation", "backward", "operation"]


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """An operation as it ran at one place, on tensors of the same dtypes."""

    kind: Kind
    operation: str
    base: str
    phase: Phase
    place: Place
    operands: tuple[str, ...] = ()  # dtypes
    values: tuple[str, ...] = ()  # formats that the operands' values have, or are rounded to
    output: str = ""
    accumulate: str | None = None
    partial: str | None = None
    cause: Cause | None = None
    where: Where = "eager"
    device: str = "cpu"
    module: nn.Module | None = None
    path: str | None = None  # of a compiled operation's module, below the module whose code was compiled
    node: str | None = None  # of autograd
    part_of: str = ""  # the function of torch that was called, which may run several operations
    autocast: bool = False  # whether torch's autocast was on
    scripted: bool = False  # whether an operand was narrowed by code of the script
    weight: bool = False  # a cast of a weight by autocast
    mixed: bool = False  # whether operands of several dtypes were promoted
    of_parameters: bool = False  # a collective that reduces gradients of parameters
    rounded: bool = True  # False: compiled code keeps the result wide
    after_cast: bool = False  # of a cast: whether its operand comes straight from a cast of the script
    calls: int = 0
    bytes: int = 0
    cache_hits: int = 0  # operands that autocast had cast before

    @property
    def key(self) -> tuple[Any, ...]:
        """The fields that make two operations alike.

        An emulated operation's output is settled later.
        """
        place = self.place
        return (
            self.kind, self.operation, self.phase, place.file, place.line, self.path,
            id(self.module), self.operands, self.values, "" if self.where == "emulated" else self.output,
            self.accumulate, self.partial, self.cause, self.where, self.autocast, self.scripted, self.of_parameters,
            self.rounded, self.after_cast, self.weight,
        )  # fmt: skip


class Entries:
    """The entries of a step."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[Any, ...], Entry] = {}
        self.total = 0  # calls

    def add(self, entry: Entry, *, calls: int = 1, bytes: int = 0) -> Entry:  # noqa: A002
        """Count an operation; return the entry that it belongs to."""
        self.total += calls
        known = self._by_key.setdefault(entry.key, entry)
        known.calls += calls
        known.bytes += bytes
        return known

    def clear(self) -> None:
        """Forget all."""
        self._by_key.clear()

    def listed(self) -> list[Entry]:
        """Return the entries in the order in which they first ran."""
        return list(self._by_key.values())
