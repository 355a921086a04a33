"""Kernels that run in place of torch's operations, as the thread's frame requires.

One dispatch key intercepts only the operations that some frame had on a list or a rule for. Another intercepts all, as
a frame with a tracer needs.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import Any, cast as typed

import torch

from plimsoll.emulate.casting import Category, OperationLists, cast, promoted
from plimsoll.emulate.dispatch.thread_frame import Frame, Rule, categories_of, local
from plimsoll.emulate.operation_counts import computes
from plimsoll.errors import ArgumentError, BackendError
from plimsoll.watch.thread_casts import active_casts

# -- interception of operations per thread, by an unused dispatch key --------------------------------------------------

# A key intercepts the operations passed to `intercept`. A key made with `everything=` intercepts all others too.

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001

# Autocast keys of backends that torch itself has no kernels for. IPU: the backend is gone; HPU, PrivateUse1: plugins.
# torch selects the kernel of an operation by the highest dispatch key that is set for the call. Its own autocast is
# such a key, above autograd, and off for a thread until that thread turns it on. Each backend has one, including
# backends that torch no longer builds, and Plimsoll registers its kernels under one of those. While the key is off, as
# on every thread outside a context, the kernels are never reached and cost nothing. While it is on, they are reached
# from Python, from C++ (the inner calls of a composite operation), from methods and from operators, for tensors of any
# device, and autograd records their calls.
_UNUSED = {"AutocastIPU": "ipu", "AutocastHPU": "hpu", "AutocastPrivateUse1": "privateuseone"}

# Operations that even a key for everything leaves alone. They compute nothing, and are the most frequent calls. torch
# makes a Parameter of the result of `detach`, which must not have a Python object yet.
_NOT_INTERCEPTED = tuple(
    """
    _reshape_alias alias as_strided chunk contiguous detach detach_ diagonal expand expand_as flatten is_nonzero
    is_same_size item lift_fresh movedim narrow permute requires_grad_ reshape select size slice split
    split_with_sizes squeeze stride swapaxes swapdims t tensor_split transpose unbind unflatten unfold unsafe_chunk
    unsqueeze view view_as
""".split()
)

_lock = threading.Lock()
_taken: set[str] = set()


class Key:
    """One dispatch key with our kernels."""

    def __init__(self, everything: Callable[..., Any] | None = None) -> None:
        """Take a dispatch key that no backend uses.

        Operations that are not passed to `intercept` become `everything(key, keys, op, *args, **kwargs)`, or are
        torch's.
        """
        self.name = _free_name()
        self.device = _UNUSED[self.name]  # the backend of the key
        self._key = getattr(_C.DispatchKey, self.name)
        self._below = _C._dispatch_keyset_full_after(self._key)  # noqa: SLF001
        self._intercepted: set[str] = set()
        self._library = torch.library.Library("aten", "IMPL")
        self._fallback = torch.library.Library("_", "IMPL")
        if everything is None:
            self._fallback.fallback(torch.library.fallthrough_kernel, self.name)
        else:
            self._fallback.fallback(functools.partial(everything, self), self.name, with_keyset=True)
            for name in _NOT_INTERCEPTED:
                for op in filter(takes_tensor, all_overloads(name)):
                    self._library.impl(op, torch.library.fallthrough_kernel, self.name)

    def intercept(self, op: Any, kernel: Callable[..., Any]) -> None:
        """Run `kernel(keys, *args, **kwargs)` for calls of the overload `op`."""
        with _lock:
            if str(op) not in self._intercepted:
                self._intercepted.add(str(op))
                self._library.impl(op, kernel, self.name, with_keyset=True)

    def below(self, keys: Any, op: Any, args: Any, kwargs: Any, *, whole: bool = False) -> Any:
        """Return the result that an overload has without the key.

        If `whole`, the calls that the operation makes are left alone too. `keys` are the dispatch keys of the call.
        """
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
        """True while this thread's calls are intercepted."""
        return bool(_C._dispatch_tls_is_dispatch_key_included(self._key))  # noqa: SLF001

    def include(self, on: bool) -> None:
        """Turn the key on or off for this thread, within a context that has opened it."""
        _C._dispatch_tls_set_dispatch_key_included(self._key, on)  # noqa: SLF001

    def set(self, on: bool) -> None:
        """Open or close the key for this thread."""
        # Outside of a context, torch excludes autocast keys besides not including them.
        _C._dispatch_tls_set_dispatch_key_excluded(self._key, not on)  # noqa: SLF001
        _C._dispatch_tls_set_dispatch_key_included(self._key, on)  # noqa: SLF001


def all_overloads(name: str) -> list[Any]:
    """Return all overloads of an operation."""
    packet = getattr(torch.ops.aten, name)
    return [getattr(packet, overload) for overload in packet.overloads()]


def takes_tensor(op: Any) -> bool:
    """Return whether an argument of the overload is a tensor."""
    return any("Tensor" in str(argument.type) for argument in op._schema.arguments)  # noqa: SLF001


_places: dict[Any, tuple[int, ...]] = {}


def _has_number(op: Any, args: Any) -> bool:
    places = _places.get(op)
    if places is None:
        arguments = enumerate(op._schema.arguments)  # noqa: SLF001
        places = _places[op] = tuple(index for index, argument in arguments if str(argument.type) == "Tensor")
    return any(index < len(args) and isinstance(args[index], int | float | complex) for index in places)


def _with_numbers(op: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a call with a number for a tensor, as in ``x * 2``."""
    # Type promotion treats a tensor made of such a number as the number. The call from Python makes such a tensor
    # again, for the operations that users may call so. Other operations get numbers only from C++. They receive a 0-d
    # tensor, which does not promote tensors with dimensions either.
    try:
        return op(*args, **kwargs)
    except RuntimeError as error:
        if "Unable to cast" not in str(error):
            raise
    args = [_as_tensor(value) if index in _places[op] else value for index, value in enumerate(args)]
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


# -- kernels -----------------------------------------------------------------------------------------------------------


def key_of(frame: Frame) -> Key:
    """Return the dispatch key that the frame needs."""
    return intercept_some() if frame.tracer is None else intercept_all()


@functools.cache
def intercept_some() -> Key:
    """Return the key that intercepts only operations on a list or with a rule."""
    return Key()


@functools.cache
def intercept_all() -> Key:
    """Return the key that intercepts every operation."""
    return Key(_everything)


def _everything(key: Key, keys: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return _below(local.frame, key, keys, op, args, kwargs)


@functools.lru_cache(maxsize=1024)
def intercept(key: Key, lists: OperationLists, rules: tuple[str, ...]) -> None:
    """Make the key intercept the operations that are on a list or have a rule."""
    for name in {*categories_of(lists), *rules}:
        for op in overloads(name):
            key.intercept(op, functools.partial(_kernel, key, name, op, _place_of_dtype(op)))


@functools.cache
def overloads(name: str) -> tuple[Any, ...]:
    """Return overloads with a tensor and no ``out=`` of "mm", or only that of "mm.out"."""
    name, _, overload = name.partition(".")
    if overload:
        return (getattr(getattr(torch.ops.aten, name), overload),)
    return tuple(op for op in all_overloads(name) if takes_tensor(op) and not _has_out(op))


def _has_out(op: Any) -> bool:
    return any(argument.is_out for argument in op._schema.arguments)  # noqa: SLF001


def _place_of_dtype(op: Any) -> int | None:
    names = [argument.name for argument in op._schema.arguments]  # noqa: SLF001
    return names.index("dtype") if "dtype" in names else None


def _kernel(key: Key, name: str, op: Any, dtype_at: int | None, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an intercepted operation as the thread's frame requires."""
    frame = local.frame
    if frame is None or local.bypassed or active_casts.reference is not None:
        return key.below(keys, op, args, kwargs)
    if not frame.eager:
        _refuse_compiling()
    category = frame.categories.get(name)
    rule = frame.rules.get(name)
    key.include(False)
    local.bypassed = True
    try:
        if category is not None and frame.casts_now():
            if category == "banned":
                _refuse(name, frame)
            args, kwargs = _cast(category, frame, dtype_at, args, kwargs)
            return _run(frame, key, keys, op, rule, args, kwargs, listed=True)
        return _run(frame, key, keys, op, rule, args, kwargs, listed=False)
    finally:
        local.bypassed = False
        key.include(True)


def _run(frame: Frame, key: Key, keys: Any, op: Any, rule: Rule | None, args: Any, kwargs: Any, *, listed: bool) -> Any:
    if rule is not None:
        result = rule(op, args, kwargs)
        if result is not NotImplemented:
            if frame.tracer is not None:
                frame.tracer.ruled(op)
            return result
    elif listed and not frame.rules:
        return op(*args, **kwargs)  # lists apply only to the outermost call, as under torch's autocast
    key.include(True)
    local.frame, local.bypassed = frame.without_lists if listed else frame, False
    try:
        return _below(frame, key, keys, op, args, kwargs)
    finally:
        local.frame, local.bypassed = frame, True


def _below(frame: Frame | None, key: Key, keys: Any, op: Any, args: Any, kwargs: Any) -> Any:
    # Autograd's own threads have no frame.
    if frame is None or frame.tracer is None or local.bypassed or active_casts.reference is not None:
        return key.below(keys, op, args, kwargs)
    if not frame.eager:
        _refuse_compiling()
    if not computes(op):
        return key.below(keys, op, args, kwargs)
    result = key.below(keys, op, args, kwargs, whole=True)
    with bypass():
        return frame.tracer.native(op, (*args, *kwargs.values()), result)  # a result may be written into `out`


def run_intercepted(op: Any, args: Any, kwargs: Any, rules: Mapping[str, Rule] | None = None) -> Any:
    """Run an operation within a rule so that its own calls are intercepted.

    `rules` are for these calls. Default: those of the frame.
    """
    frame = local.frame
    assert frame is not None
    inner = frame.without_lists or frame
    inner = inner if rules is None else replace(inner, rules=rules)
    key_of(frame).include(True)
    local.frame, local.bypassed = inner, False
    try:
        return op(*args, **kwargs)
    finally:
        local.frame, local.bypassed = frame, True
        key_of(frame).include(False)


@contextlib.contextmanager
def bypass() -> Generator[None]:
    """Intercept nothing inside, as within a rule."""
    frame, bypassed = local.frame, local.bypassed
    assert frame is not None
    key_of(frame).include(False)
    local.bypassed = True
    try:
        yield
    finally:
        local.bypassed = bypassed
        key_of(frame).include(not bypassed)


def _guards() -> Any:
    return typed("Any", torch)._guards.TracingContext  # noqa: SLF001


def _refuse_compiling() -> None:
    if "torch._dynamo" in sys.modules and _guards().try_get() is not None:
        raise ArgumentError(
            "emulate: expected code that runs eagerly inside the context; got code that torch.compile is compiling, "
            "whose kernels would not be emulated. Call torch.compile before the context begins: inside, it then runs "
            "eagerly; or do not compile."
        )


def _cast(category: Category, frame: Frame, dtype_at: int | None, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if category == "high":
        if dtype_at is not None and (
            kwargs.get("dtype") is not None or args[dtype_at : dtype_at + 1] not in ((), (None,))
        ):
            return args, kwargs
        dtype = torch.float32
    else:
        dtype = frame.low if category == "low" else promoted(frame.low, (*args, *kwargs.values()))
    args = tuple(cast(value, dtype, frame.cache) for value in args)
    return args, {name: cast(value, dtype, frame.cache) for name, value in kwargs.items()}


def _refuse(name: str, frame: Frame) -> None:
    if name == "binary_cross_entropy":
        raise ArgumentError(
            f"binary_cross_entropy: expected logits where operations run in {frame.low}; got probabilities, whose "
            "logarithm is lost near 0 and 1 in 16 bits. Use torch.nn.functional.binary_cross_entropy_with_logits "
            "(BCEWithLogitsLoss), without the sigmoid before it."
        )
    raise ArgumentError(
        f"{name}: expected an operation that the lists do not ban; got one that is refused where operations run in "
        f"{frame.low}. Take it off with OperationLists.without({name!r}), or leave the context around it."
    )
