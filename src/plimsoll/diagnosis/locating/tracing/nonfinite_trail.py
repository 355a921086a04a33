"""Origins of values that are not finite, the memory they reached, and tensors' facts.

An *origin* is an operation whose output is not finite although nothing that it read was, or memory that was so before
the closure began. Whatever reads such memory and is not finite itself inherits its origins, so that the loss and the
gradients, in the end, name theirs.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from plimsoll import kernels
from plimsoll.diagnosis.locating.fault import Kind, Operand, Phase
from plimsoll.errors import PlimsollError
from plimsoll.formats import get_element
from plimsoll.spectrum import Spectrum, measure
from plimsoll.spectrum.measurement import plain
from plimsoll.tracing.operation_schema import Facts
from plimsoll.tracing.tensors import memory_of, parts_of
from plimsoll.watch.call_site import Place

# -- a check that all of a tensor is finite, and its record ------------------------------------------------------------

_PLAIN = (Tensor, nn.Parameter)


def readable(x: Tensor) -> Tensor | None:
    """Return the plain floating tensor that can be read; None without one."""
    if x.is_complex() and x.layout == torch.strided:
        return readable(torch.view_as_real(x.resolve_conj().detach()))
    if not x.is_floating_point() or x.is_nested:
        return None
    if type(x) in _PLAIN and x.layout == torch.strided and not x.is_meta and not x.is_neg():
        return x.detach()
    try:
        return plain(x._values() if x.is_sparse else x, "")  # noqa: SLF001  (values() refuses what is not coalesced)
    except PlimsollError:
        return None


def count_nonfinite(x: Tensor) -> int:
    """Return the number of NaN and Inf values; waits for the device."""
    counts = kernels.new_counts(1, x.device)
    kernels.count_nonfinite_into([x], counts, 0)
    return int(counts.item())


def spectrum_of(x: Tensor) -> Spectrum | None:
    """Return the tensor's spectrum; None where there is nothing to measure."""
    seen = readable(x)
    return None if seen is None else measure(seen)


def operand(name: str, x: Tensor, spectrum: Spectrum | None = None) -> Operand:
    """The record of a tensor."""
    shape = () if x.is_nested else tuple(x.shape)  # torch's nested tensors have none
    return Operand(name=name, dtype=dtype_name(x.dtype), shape=shape, spectrum=spectrum or spectrum_of(x))


def dtype_name(dtype: torch.dtype) -> str:
    """The format's name, or torch's where it is none: "fp16", "int64"."""
    if not dtype.is_floating_point:
        return str(dtype).removeprefix("torch.")
    return get_element(dtype, "locate").name


def first_bad(x: Tensor) -> tuple[int, ...]:
    """The index of the first value that is not finite."""
    return first_true(~torch.isfinite(x.float() if x.dtype.itemsize == 1 else x))


def first_true(mask: Tensor) -> tuple[int, ...]:
    """The index of the first true value."""
    flat = int(mask.reshape(-1).to(torch.uint8).argmax().item())
    index: list[int] = []
    for size in reversed(mask.shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return tuple(reversed(index))


# -- origins, and the memory that they have reached --------------------------------------------------------------------

What = Literal["made", "held", "uninitialised", "received"]


@dataclass(slots=True, kw_only=True, eq=False)
class Forward:
    """A forward operation, remembered for its backward."""

    name: str
    place: Place
    origin: "Origin | None" = None  # what it made itself


@dataclass(slots=True, kw_only=True, eq=False)
class Origin:
    """Operation that made or flushed values, or memory that held non-finite ones."""

    index: int  # the operation's number in the run
    what: What
    kind: Kind
    facts: Facts
    phase: Phase
    place: Place
    deliberate: bool = False
    forward: Forward | None = None
    node: str | None = None
    accumulates: Tensor | None = None  # the parameter whose gradient it adds to
    inputs: Sequence[Operand] = ()
    outputs: Sequence[Operand] = ()
    memory: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])  # of its operands
    scalars: Mapping[str, float | int | str] = field(default_factory=dict[str, "float | int | str"])
    worst: str = ""  # the output that is named
    count: int = 0
    total: int = 0
    first_index: tuple[int, ...] = ()
    at: Mapping[str, float] = field(default_factory=dict[str, float])
    value: float = 0.0  # the first of them
    expected: float | None = None
    scaling: bool = False
    given: "Sequence[Origin]" = ()  # of the values that are not finite in what it read


class MemoryProvenance:
    """Provenance and origins of memory, by its identity."""

    def __init__(self) -> None:
        self.origins: list[Origin] = []
        self.written: dict[int, Any] = {}
        self.collectives = False
        self.sent: set[Origin] = set()  # what other ranks were given of it
        self._alive: dict[int, Any] = {}  # keeps identities from being used again
        self._born: dict[int, str] = {}
        self._of: dict[int, frozenset[Origin]] = {}

    def bear(self, x: Tensor, how: str) -> None:
        """The tensor's memory was made by an operation, unless it was there before."""
        for memory in memory_of(x):
            if memory not in self._born:
                self._born[memory] = how
                self._keep(memory, x)

    def receive(self, x: Tensor) -> None:
        """The tensor goes to other ranks, or comes from them."""
        self.collectives = True
        self.sent |= {origin for origin in self.of(x) if not origin.deliberate}
        for memory in memory_of(x):
            self._born[memory] = "collective"
            self._keep(memory, x)

    def birth(self, memory: int) -> str | None:
        """Return how the memory was made; None if it is older than the closure's run."""
        return self._born.get(memory)

    def of(self, x: Tensor) -> frozenset[Origin]:
        """The origins of what is not finite in a tensor."""
        origins = [self._of[memory] for memory in memory_of(x) if memory in self._of]
        return frozenset[Origin]().union(*origins)

    def mark(self, x: Tensor, origins: Iterable[Origin], *, fresh: bool) -> None:
        """Mark a tensor as not finite by these origins; `fresh`: drops its memory's own."""
        for memory in memory_of(x):
            before = frozenset[Origin]() if fresh else self._of.get(memory, frozenset[Origin]())
            self._of[memory] = before | frozenset(origins)
            self._keep(memory, x)

    def clear(self, x: Tensor) -> None:
        """All of the tensor's memory is finite now."""
        for memory in memory_of(x):
            self._of.pop(memory, None)

    def _keep(self, memory: int, x: Tensor) -> None:
        if memory in self._alive:
            return
        from torch.multiprocessing.reductions import StorageWeakRef  # slow to import

        for part in parts_of(x):
            ref = cast("Any", StorageWeakRef)(part.untyped_storage())
            self._alive[int(ref.cdata)] = ref


# An Inf that was asked for (a mask filled with -Inf) is an origin too, a *deliberate* one: it is blamed only where
# nothing else can be. A NaN that an operation makes of deliberate Infs (the softmax of a row that is all -Inf) is an
# origin of its own.
def first_cause(candidates: Iterable[Origin], *, to_blame: Collection[Origin] = ()) -> Origin | None:
    """Return the first origin that reached something; deliberate ones come last, but for those `to_blame`."""
    ordered = sorted(candidates, key=lambda origin: (origin.deliberate and origin not in to_blame, origin.index))
    return ordered[0] if ordered else None


@dataclass(slots=True, kw_only=True, eq=False)
class NonfiniteResult:
    """Something of the training that is not finite."""

    what: str  # "the loss"
    rank: int  # how much it says: the loss before a gradient, a gradient before the rest
    origins: frozenset[Origin]
    tensor: Tensor
    owner: Tensor | None = None  # whose gradient it is
