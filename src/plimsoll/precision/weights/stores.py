"""Stores: data for each 16-bit weight, from which its float32 value follows.

A store opens the weight as float32 values, and after the step closes it with them. All rounding happens there. `entry`
and `load` are its part of a checkpoint. The keys of an entry identify how the value was kept, so that every store can
load the entries of every other: ``master`` (float32), ``weight`` and ``low`` (the float32's halves), ``weight`` and
``compensation`` (their sum), or ``weight`` alone.
"""

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plimsoll.rounding import cast

_HALF = 0x8000
_QUIET_NAN = 0x7FC0_0000
_SIGN = -0x8000_0000
_BLOCK = 1 << 17


def split(value: Tensor, weight: Tensor, low: Tensor) -> None:
    """Write float32 as bfloat16 `weight` and int16 `low`. Overwrites `value`."""
    for part, high, rest in in_blocks(value, weight.view(torch.int16), low):
        bits = _without_nan(part).view(torch.int32)
        rest.copy_(bits)  # the lower half of an int32: the conversion drops the upper one
        high.copy_(bits.add_(_HALF).bitwise_right_shift_(16))


def join(weight: Tensor, low: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the float32 number that `split` took.

    For a weight changed since, it is a number that still rounds to the weight.
    """
    out = torch.empty_like(low, dtype=torch.float32) if out is None else out
    for value, high, rest in in_blocks(out, weight, low):
        value.view(torch.int32).copy_(rest).add_(high.view(torch.int16), alpha=1 << 16)
        if not high.is_cpu or _may_have_nan(value):
            value.copy_(torch.where(value.isnan(), high.to(torch.float32), value))
    return out


def round_away(value: Tensor, weight: Tensor) -> None:
    """Write only the bfloat16 numbers: to nearest, ties away from zero."""
    for part, high in in_blocks(value, weight.view(torch.int16)):
        high.copy_(_without_nan(part).view(torch.int32).add(_HALF).bitwise_right_shift_(16))


def in_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield tensors of one shape in pieces for a CPU's caches, or whole elsewhere."""
    if tensors[0].numel() <= _BLOCK or not all(x.is_cpu and x.is_contiguous() for x in tensors):
        return iter([tensors])
    flattened: list[Any] = [x.view(-1) for x in tensors]  # Any: torch leaves the type of `split` open
    pieces: list[tuple[Tensor, ...]] = [flat.split(_BLOCK) for flat in flattened]
    return zip(*pieces, strict=True)


def _without_nan(value: Tensor) -> Tensor:
    """Return the value with quiet NaNs whose low bits are zero."""
    # Only a CPU is asked whether there are any: on a GPU the answer would cost a synchronization.
    if value.is_cpu and not _may_have_nan(value):
        return value
    bits = value.view(torch.int32)
    return torch.where(value.isnan(), (bits & _SIGN) | _QUIET_NAN, bits).view(torch.float32)


def _may_have_nan(value: Tensor) -> bool:
    """Return whether there may be a NaN, or an infinity of each sign."""
    # The sum takes a tenth of the time of `isnan`.
    return math.isnan(float(value.sum()))


Entry = dict[str, Tensor]


class Store(Protocol):
    """Data kept for one weight."""

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """Tensors that exist between steps."""
        ...

    @property
    def whole(self) -> bool:
        """True if the float32 values exist between steps, so that opening is free."""
        ...

    def open(self, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the float32 values to step, in `out` if they do not exist yet."""
        ...

    def close(self, weight: Tensor, value: Tensor, key: int) -> None:
        """Write stepped values to the weight, with noise by `key`. May overwrite `value`."""
        ...

    def peek(self, weight: Tensor) -> Tensor:
        """Return a copy of the float32 values; change nothing."""
        ...

    def restart(self, weight: Tensor) -> None:
        """Take the present weight as the value."""
        ...

    def entry(self, weight: Tensor) -> Entry:
        """Return the checkpoint entry: references, not copies."""
        ...

    def load(self, weight: Tensor, entry: Entry) -> None:
        """Set store and weight from a checkpoint entry."""
        ...


class Full:
    """Store of a float32 master, created at its first use."""

    whole = True

    def __init__(self) -> None:
        self._value: Tensor | None = None

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """Master, once it exists."""
        return () if self._value is None else (self._value,)

    def open(self, weight: Tensor, out: Tensor | None = None) -> Tensor:  # noqa: ARG002  (the interface's)
        """Return the master."""
        if self._value is None:
            self._value = weight.to(torch.float32)
            return self._value
        # Where the weight is not the rounded master, it was changed from outside and is used.
        rounded = round_to(self._value, torch.empty_like(weight)).view(torch.int16)
        if not (weight.is_cpu and _same(rounded, weight)):
            changed = rounded != weight.view(torch.int16)
            self._value.copy_(torch.where(changed, weight.to(torch.float32), self._value))
        return self._value

    def close(self, weight: Tensor, value: Tensor, key: int) -> None:  # noqa: ARG002  (the interface's)
        """Round the master to the weight."""
        self._value = value
        round_to(value, weight)

    def peek(self, weight: Tensor) -> Tensor:
        """Return a copy of the master."""
        return weight.to(torch.float32) if self._value is None else self.open(weight).clone()

    def restart(self, weight: Tensor) -> None:
        """Set the master to the weight."""
        if self._value is not None:
            self._value.copy_(weight)

    def entry(self, weight: Tensor) -> Entry:
        """Return the master, or the weight if it never had one."""
        return {"weight": weight.detach()} if self._value is None else {"master": self._value}

    def load(self, weight: Tensor, entry: Entry) -> None:
        """Set the master, and the weight to the rounded master."""
        if self._value is None and entry.keys() == {"weight"}:
            weight.copy_(entry["weight"])
            return
        self._value = value_of(entry, weight)
        round_to(self._value, weight)


class Compact:
    """Store of the low 16 bits of a float32 master, above the bfloat16 weight."""

    whole = False

    def __init__(self, weight: Tensor) -> None:
        self._low = torch.zeros_like(weight, dtype=torch.int16, requires_grad=False)

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """Low bits."""
        return (self._low,)

    def open(self, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the master."""
        return join(weight, self._low, out)

    def close(self, weight: Tensor, value: Tensor, key: int) -> None:  # noqa: ARG002  (the interface's)
        """Split the master into weight and low bits."""
        split(value, weight, self._low)

    def peek(self, weight: Tensor) -> Tensor:
        """Return the master."""
        return join(weight, self._low)

    def restart(self, weight: Tensor) -> None:  # noqa: ARG002  (the interface's)
        """Set the master to the weight: the low bits become zero."""
        self._low.zero_()

    def entry(self, weight: Tensor) -> Entry:
        """Return both halves."""
        return {"weight": weight.detach(), "low": self._low}

    def load(self, weight: Tensor, entry: Entry) -> None:
        """Set both halves."""
        split(value_of(entry, weight), weight, self._low)


def round_to(value: Tensor, weight: Tensor) -> Tensor:
    """Write float32 values to a 16-bit weight, to nearest.

    Ties go away from zero in bfloat16 (as in `split`), to even in float16.
    """
    if weight.dtype is not torch.bfloat16:
        return weight.copy_(value)
    if not weight.is_cpu:
        return cast(value, "bf16", rounding="nearest_away", out=weight)
    round_away(value, weight)
    return weight


def value_of(entry: Entry, like: Tensor) -> Tensor:
    """Return a copy of the float32 values of an entry, on the device of `like`."""
    here = {name: x.to(like.device) for name, x in entry.items()}
    if "master" in here:
        return here["master"].to(torch.float32, copy=True)
    if "low" in here:
        return join(here["weight"], here["low"])
    value = here["weight"].to(torch.float32, copy=True)
    return value.add_(here["compensation"].to(torch.float32)) if "compensation" in here else value


def _same(bits: Tensor, weight: Tensor) -> bool:
    """Return whether a 16-bit weight has these bits."""
    # This takes a third of the time of `torch.equal`.
    if not bits.numel():
        return True
    ranges = (a.bitwise_xor(b).aminmax() for a, b in in_blocks(bits, weight.view(torch.int16)))
    return all(int(least) == int(most) == 0 for least, most in ranges)


# -- pair of a 16-bit parameter and the float32 one that is stepped instead --------------------------------------------


class Scratch:
    """CPU memory for open parameters, reused from step to step."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, device="cpu")
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Size of the memory in bytes."""
        return self._memory.nbytes

    def start(self, size_bytes: int) -> None:
        """Free everything, and provide this size. Earlier tensors become invalid."""
        if self._memory.nbytes < size_bytes:
            self._memory = torch.empty(size_bytes // _FLOAT32_BYTES, device="cpu")
        self._used = 0

    # Fresh memory costs more than the step itself. On other devices torch's own allocator keeps freed memory.
    def take(self, like: Tensor) -> Tensor | None:
        """Return float32 memory of the tensor's shape, or None if it does not fit."""
        end = self._used + like.numel()
        if not like.is_cpu or like.is_sparse or not like.is_contiguous() or end > self._memory.numel():
            return None
        taken = self._memory[self._used : end].view(like.shape)
        self._used = end
        return taken


_FLOAT32_BYTES = 4


class Pair:
    """Parameter in both formats, with a store for the digits that 16 bits lack."""

    __slots__ = ("_collected", "_lent", "master", "store", "weight")

    def __init__(self, weight: Tensor, store: Store) -> None:
        self.weight, self.store = weight, store
        nothing = torch.full((), torch.nan, device=weight.device)
        self.master = nn.Parameter(nothing.expand(weight.shape), requires_grad=weight.requires_grad)
        self._collected: tuple[weakref.ref[Tensor], int] | None = None
        self._lent = False  # whether `open` made the gradient
        if store.whole and weight.requires_grad:
            self.master.data = store.open(weight.detach())

    def __getstate__(self) -> tuple[Tensor, Store, nn.Parameter]:
        return self.weight, self.store, self.master

    def __setstate__(self, state: tuple[Tensor, Store, nn.Parameter]) -> None:
        self.weight, self.store, self.master = state
        self._collected, self._lent = None, False

    # -- gradients -----------------------------------------------------------------------------------------------------

    def collect(self, factor: Tensor | None = None) -> None:
        """Set the master's gradient to the model's in float32, times the factor.

        Nothing is done if it is set already.
        """
        g = self.weight.grad
        if g is None:
            if self._collected is not None:  # the model's gradients were cleared since
                self.forget()
        elif not self._is_collected(g):
            self.master.grad = in_float32(g, factor)
            self._collected = weakref.ref(g), g._version  # noqa: SLF001  (the only count of changes in place)

    @property
    def changed(self) -> bool:
        """True if the model's gradient is not the collected one. None is unchanged."""
        g = self.weight.grad
        return self._collected is not None and g is not None and not self._is_collected(g)

    @property
    def gradient(self) -> Tensor | None:
        """Gradient of the next step: the master's, or else the model's."""
        collected = self.master.grad
        return self.weight.grad if collected is None else collected

    def forget(self) -> None:
        """Drop the master's gradient."""
        self.master.grad, self._collected, self._lent = None, None, False

    def _is_collected(self, g: Tensor) -> bool:
        if self._collected is None:
            return False
        collected, version = self._collected
        return collected() is g and version == g._version  # noqa: SLF001  (likewise)

    # -- values --------------------------------------------------------------------------------------------------------

    @property
    def open_bytes(self) -> int:
        """Bytes of values and gradients that `open` will allocate."""
        tensors = (not self.store.whole) + (self.master.grad is None)
        return tensors * _FLOAT32_BYTES * self.weight.numel()

    def open(self, factor: Tensor | None, scratch: Scratch | None = None) -> None:
        """Give the master its values, and the model's gradient times the factor."""
        scratch = scratch or Scratch()
        out = None if self.store.whole else scratch.take(self.weight)
        self.master.data = self.store.open(self.weight.detach(), out)
        g = self.weight.grad
        if self.master.grad is None and g is not None:
            self.master.grad = in_float32(g, factor, scratch.take(g))
            self._lent = True

    def close(self, key: int) -> None:
        """Write the values back, and drop the master's values and gradient."""
        self.store.close(self.weight.detach(), self.master.data, key)
        self.shut()
        self.forget()

    def settle(self) -> None:
        """Restore the master's values between steps, if the store keeps them."""
        if self.store.whole and self.store.kept:
            self.master.data = self.store.open(self.weight.detach())

    # Between steps the float32 parameter of a store that is not `whole` has no values. It is a single NaN, expanded to
    # the shape, so that reading it is obvious and writing to it raises. It can have a gradient: `collect` copies the
    # model's gradient and remembers its identity and version, so that collecting again is free and later changes are
    # detected.
    def shut(self) -> None:
        """Drop the values and the gradient that `open` made."""
        if self._lent:
            self.forget()
        if not self.store.whole:
            self.master.data = torch.full((), torch.nan, device=self.weight.device).expand(self.weight.shape)


def in_float32(g: Tensor, factor: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return a copy of a gradient in float32, times the factor, sparse or not."""
    wide = g.detach().to(torch.float32, copy=True) if out is None else out.copy_(g)
    return wide if factor is None else wide.mul_(factor.to(g.device))


def chunks(parameters: Sequence[Tensor], pairs: Mapping[int, Pair], room_bytes: int) -> Iterator[set[int]]:
    """Yield sets of parameter ids, each as large as the memory allows."""
    chunk: set[int] = set()
    room = room_bytes
    for p in parameters:
        pair = pairs.get(id(p))
        needed = 0 if pair is None else pair.open_bytes
        if chunk and needed > max(room, 0):
            yield chunk
            chunk, room = set[int](), room_bytes
        chunk.add(id(p))
        room -= needed
    if chunk:
        yield chunk
