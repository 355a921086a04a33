"""The kernels that run in the place of torch's operations: each asks the thread's frame what to do.

Under one dispatch key only the operations are heard that some frame had on a list or a rule for; under another, all
are. A frame with a witness needs the second.
"""

import contextlib
import functools
import sys
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any, cast as typed

import torch

from plimsoll.emulate.casting.argument_casts import cast, promoted
from plimsoll.emulate.casting.operation_lists import Category, OperationLists
from plimsoll.emulate.dispatch.dispatch_key import Key
from plimsoll.emulate.dispatch.thread_frame import Frame, Rule, categories_of, local
from plimsoll.emulate.operation_counts import computes
from plimsoll.errors import ArgumentError
from plimsoll.watch.shadow.replay import active_casts


def key_of(frame: Frame) -> Key:
    """Return the dispatch key that the frame needs."""
    return hearing_some() if frame.witness is None else hearing_all()


@functools.cache
def hearing_some() -> Key:
    """Return the key under which only operations on a list or with a rule are heard."""
    return Key()


@functools.cache
def hearing_all() -> Key:
    """Return the key under which every operation is."""
    return Key(_everything)


def _everything(key: Key, keys: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return _below(local.frame, key, keys, op, args, kwargs)


@functools.lru_cache(maxsize=1024)
def hear(key: Key, lists: OperationLists, rules: tuple[str, ...]) -> None:
    """Make the key intercept the operations that are on a list or have a rule."""
    for name in {*categories_of(lists), *rules}:
        for op in overloads(name):
            key.hear(op, functools.partial(_kernel, key, name, op, _place_of_dtype(op)))


@functools.cache
def overloads(name: str) -> tuple[Any, ...]:
    """Return the overloads of an operation that take a tensor and have no ``out=``; or the one of the name "mm.out"."""
    name, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, name)
    if overload:
        return (getattr(packet, overload),)
    found = [getattr(packet, overload) for overload in packet.overloads()]
    return tuple(op for op in found if _takes_tensor(op) and not any(one.is_out for one in op._schema.arguments))  # noqa: SLF001


def _takes_tensor(op: Any) -> bool:
    return any("Tensor" in str(one.type) for one in op._schema.arguments)  # noqa: SLF001


def _place_of_dtype(op: Any) -> int | None:
    names = [one.name for one in op._schema.arguments]  # noqa: SLF001
    return names.index("dtype") if "dtype" in names else None


def _kernel(key: Key, name: str, op: Any, dtype_at: int | None, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the kernel that runs in place of an intercepted operation."""
    frame = local.frame
    if frame is None or local.silent or active_casts.reference is not None:
        return key.below(keys, op, args, kwargs)
    if not frame.eager:
        _refuse_compiling()
    category = frame.categories.get(name)
    rule = frame.rules.get(name)
    key.include(False)
    local.silent = True
    try:
        if category is not None and frame.casts_now():
            if category == "banned":
                _refuse(name, frame)
            args, kwargs = _cast(category, frame, dtype_at, args, kwargs)
            return _run(frame, key, keys, op, rule, args, kwargs, listed=True)
        return _run(frame, key, keys, op, rule, args, kwargs, listed=False)
    finally:
        local.silent = False
        key.include(True)


def _run(frame: Frame, key: Key, keys: Any, op: Any, rule: Rule | None, args: Any, kwargs: Any, *, listed: bool) -> Any:
    if rule is not None:
        result = rule(op, args, kwargs)
        if result is not NotImplemented:
            if frame.witness is not None:
                frame.witness.ruled(op)
            return result
    elif listed and not frame.rules:
        return op(*args, **kwargs)  # as under torch's autocast, the lists are for the outermost call alone
    key.include(True)
    local.frame, local.silent = frame.without_lists if listed else frame, False
    try:
        return _below(frame, key, keys, op, args, kwargs)
    finally:
        local.frame, local.silent = frame, True


def _below(frame: Frame | None, key: Key, keys: Any, op: Any, args: Any, kwargs: Any) -> Any:
    if (
        frame is None or frame.witness is None or local.silent or active_casts.reference is not None
    ):  # no frame: one of autograd's own threads
        return key.below(keys, op, args, kwargs)
    if not frame.eager:
        _refuse_compiling()
    if not computes(op):
        return key.below(keys, op, args, kwargs)
    result = key.below(keys, op, args, kwargs, whole=True)
    with unheard():
        return frame.witness.native(op, args, result)


def aloud(op: Any, args: Any, kwargs: Any, rules: Mapping[str, Rule] | None = None) -> Any:
    """From within a rule: the operation, heard in its turn; by other rules, if any are given."""
    frame = local.frame
    assert frame is not None
    inner = frame.without_lists or frame
    inner = inner if rules is None else replace(inner, rules=rules)
    key_of(frame).include(True)
    local.frame, local.silent = inner, False
    try:
        return op(*args, **kwargs)
    finally:
        local.frame, local.silent = frame, True
        key_of(frame).include(False)


@contextlib.contextmanager
def unheard() -> Generator[None]:
    """Nothing is heard, as within a rule."""
    frame, silent = local.frame, local.silent
    assert frame is not None
    key_of(frame).include(False)
    local.silent = True
    try:
        yield
    finally:
        local.silent = silent
        key_of(frame).include(not silent)


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
    args = tuple(cast(one, dtype, frame.cache) for one in args)
    return args, {name: cast(one, dtype, frame.cache) for name, one in kwargs.items()}


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
