"""Pair of a 16-bit parameter and the float32 one that is stepped instead."""

import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from plimsoll.precision.weights.stores import Store


class Scratch:
    """CPU memory for open parameters, reused from step to step."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Size of the memory in bytes."""
        return self._memory.nbytes

    def start(self, size_bytes: int) -> None:
        """Free everything, and provide this size. Earlier tensors become invalid."""
        if self._memory.nbytes < size_bytes:
            self._memory = torch.empty(size_bytes // _FLOAT32_BYTES)
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
