"""Kernels that run in place of torch's operations, as the thread's frame requires.

One dispatch key intercepts only the operations that some frame had on a list or a rule for. Another intercepts all, as
a frame with a tracer needs.
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
from plimsoll.emulate.dispatch.dispatch_key import Key, all_overloads, takes_tensor
from plimsoll.emulate.dispatch.thread_frame import Frame, Rule, categories_of, local
from plimsoll.emulate.operation_counts import computes
from plimsoll.errors import ArgumentError
from plimsoll.watch.thread_casts import active_casts


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
    """Return an operation's overloads with a tensor and no ``out=``, or one overload.

    Args:
        name: An operation ("mm") for those overloads, or one overload ("mm.out").
    """
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
        return frame.tracer.native(op, args, result)


def run_intercepted(op: Any, args: Any, kwargs: Any, rules: Mapping[str, Rule] | None = None) -> Any:
    """Run an operation within a rule so that its own calls are intercepted.

    Args:
        op: The operation.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        rules: The rules for its calls. Default: those of the frame.
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
