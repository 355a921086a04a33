"""Interception of torch's operations by a dispatch key that no backend uses, per thread.

torch runs an operation by the highest dispatch key that is set for the call. Its own autocast is such a key, above
autograd, and off for a thread until that thread turns it on; each backend has one, also backends that no build of torch
holds any more. Kernels of ours are registered under one of those. While the key is off, which it is for every thread
outside a context, they are never reached and cost nothing; while it is on, they are reached from Python, from C++ (the
inner calls of a composite operation), from methods, from operators, all the same, for tensors of any device, and what
they call is recorded by autograd.

A key hears the operations that it was told of (`hear`); one made with `everything=` hears all others too.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from plimsoll.errors import BackendError

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001

# Autocast keys of backends that torch itself has no kernels for. IPU: the backend is gone; HPU, PrivateUse1: plugins.
_UNUSED = {"AutocastIPU": "ipu", "AutocastHPU": "hpu", "AutocastPrivateUse1": "privateuseone"}

# Not even a key that hears everything hears these: they compute nothing, and are called most. `detach` must not be
# heard: a Parameter is made of its result, which may not have been seen by Python before.
_UNHEARD = (
    "_reshape_alias", "alias", "as_strided", "chunk", "contiguous", "detach", "detach_", "diagonal", "expand",
    "expand_as", "flatten", "is_nonzero", "is_same_size", "item", "lift_fresh", "movedim", "narrow", "permute",
    "requires_grad_", "reshape", "select", "size", "slice", "split", "split_with_sizes", "squeeze", "stride",
    "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsafe_chunk",
    "unsqueeze", "view", "view_as",
)  # fmt: skip

_lock = threading.Lock()
_taken: set[str] = set()


class Key:
    """One dispatch key with our kernels."""

    def __init__(self, everything: Callable[..., Any] | None = None) -> None:
        """`everything(key, keys, op, *args, **kwargs)` is called for the operations that `hear` does not name."""
        self.name = _free_name()
        self.device = _UNUSED[self.name]  # the backend whose key it is
        self._key = getattr(_C.DispatchKey, self.name)
        self._below = _C._dispatch_keyset_full_after(self._key)  # noqa: SLF001
        self._heard: set[str] = set()
        self._library = torch.library.Library("aten", "IMPL")
        self._fallback = torch.library.Library("_", "IMPL")
        if everything is None:
            self._fallback.fallback(torch.library.fallthrough_kernel, self.name)
        else:
            self._fallback.fallback(functools.partial(everything, self), self.name, with_keyset=True)
            self._leave_unheard()

    def _leave_unheard(self) -> None:
        for name in _UNHEARD:
            packet = getattr(torch.ops.aten, name)
            for op in (getattr(packet, overload) for overload in packet.overloads()):
                if any("Tensor" in str(one.type) for one in op._schema.arguments):  # noqa: SLF001
                    self._library.impl(op, torch.library.fallthrough_kernel, self.name)

    def hear(self, op: Any, kernel: Callable[..., Any]) -> None:
        """Send calls of the overload `op` to ``kernel(keys, *args, **kwargs)`` wherever the key is on."""
        with _lock:
            if str(op) not in self._heard:
                self._heard.add(str(op))
                self._library.impl(op, kernel, self.name, with_keyset=True)

    def below(self, keys: Any, op: Any, args: Any, kwargs: Any, *, whole: bool = False) -> Any:
        """Return the operation as without the key. Its inner calls are intercepted again, unless it is `whole`."""
        numbers = _has_number(op, args)
        if not (whole or numbers):
            return op.redispatch(keys & self._below, *args, **kwargs)
        on = self.on
        self.include(False)
        try:
            return _with_numbers(op, args, kwargs) if numbers else op.redispatch(keys & self._below, *args, **kwargs)
        finally:
            self.include(on)

    @property
    def on(self) -> bool:
        """Whether this thread's calls are heard."""
        return bool(_C._dispatch_tls_is_dispatch_key_included(self._key))  # noqa: SLF001

    def include(self, on: bool) -> None:
        """Turn the key on or off for this thread, within a context that has opened it."""
        _C._dispatch_tls_set_dispatch_key_included(self._key, on)  # noqa: SLF001

    def set(self, on: bool) -> None:
        """Open or closes the key for this thread: autocast keys are also excluded where no context is."""
        _C._dispatch_tls_set_dispatch_key_excluded(self._key, not on)  # noqa: SLF001
        _C._dispatch_tls_set_dispatch_key_included(self._key, on)  # noqa: SLF001


_places: dict[Any, tuple[int, ...]] = {}


def _has_number(op: Any, args: Any) -> bool:
    places = _places.get(op)
    if places is None:
        arguments = enumerate(op._schema.arguments)  # noqa: SLF001
        places = _places[op] = tuple(index for index, one in arguments if str(one.type) == "Tensor")
    return any(index < len(args) and isinstance(args[index], int | float | complex) for index in places)


def _with_numbers(op: Any, args: Any, kwargs: Any) -> Any:
    """Return a call with a number in place of a tensor (``x * 2``): promotion treats such a tensor as a number.

    A call from Python creates such a tensor again, for those operations that users may call so. Others get it only from
    C++: they receive a 0-d tensor, which does not promote tensors with dimensions either.
    """
    try:
        return op(*args, **kwargs)
    except RuntimeError as error:
        if "Unable to cast" not in str(error):
            raise
    args = [_as_tensor(one) if index in _places[op] else one for index, one in enumerate(args)]
    return op(*args, **kwargs)


def _as_tensor(x: Any) -> Any:
    dtype = torch.float64 if isinstance(x, float) else None  # None: bool, int64, complex
    return torch.tensor(x, dtype=dtype) if isinstance(x, int | float | complex) else x


def _free_name() -> str:
    with _lock:
        for name in _UNUSED:
            key = getattr(_C.DispatchKey, name, None)
            if name not in _taken and key is not None and not _C._dispatch_has_backend_fallback(key):  # noqa: SLF001
                _taken.add(name)
                return name
    raise BackendError(
        f"emulate: expected one of torch's dispatch keys {', '.join(_UNUSED)} to be free; got a torch (with its "
        "plugins) that uses them all. Run without the plugins of other backends."
    )
