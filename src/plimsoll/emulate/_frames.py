"""What holds on a thread now: the innermost context's `Frame`, and the kernel that asks it about each operation.

A frame has lists (what to cast before an operation) and rules (what to run in the operation's place). Lists belong to
the forward: in a backward they do nothing, unless the frame itself was entered in that backward, as a checkpoint's
recomputation does. Rules hold in both.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

import torch

from plimsoll.emulate import _checkpoints
from plimsoll.emulate._casts import CastCache, cast, promoted
from plimsoll.emulate._keys import Key
from plimsoll.emulate._lists import Category, OperationLists
from plimsoll.errors import ArgumentError

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
_graph_task: Callable[[], int] = _C._current_graph_task_id  # noqa: SLF001

Rule = Callable[[Any, Any, Any], Any]  # (operation, arguments, keyword arguments) -> result

_NO_LISTS = OperationLists()


class Witness(Protocol):
    """What is told of operations that no rule stands in for."""

    def native(self, op: Any, arguments: Any, keywords: Any, call: Callable[[], Any]) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """What one context, with those around it, asks for."""

    lists: OperationLists = _NO_LISTS
    low: torch.dtype = torch.float16
    cache: CastCache | None = None
    rules: Mapping[str, Rule] = field(default_factory=dict[str, Rule])
    witness: Witness | None = None  # hears of every operation
    task: int = -1  # the backward that it was entered in, or none
    nesting: int = 0  # of torch's autocast contexts, when it was entered
    categories: Mapping[str, Category] = field(default_factory=dict[str, "Category"])
    without_lists: "Frame | None" = None

    @property
    def key(self) -> Key:
        """The dispatch key that this frame needs."""
        return hearing_some() if self.witness is None else hearing_all()

    def casts_now(self) -> bool:
        """Whether the lists hold for the call at hand."""
        if _graph_task() != self.task:
            return False
        torch.autocast_increment_nesting()
        if torch.autocast_decrement_nesting() == self.nesting:
            return True
        refuse_torch_autocast("inside")
        return False  # torch.autocast(enabled=False) asks for no casts here


class _Local(threading.local):
    frame: Frame | None = None


_local = _Local()


def current() -> Frame | None:
    """The innermost frame of this thread."""
    return _local.frame


@contextlib.contextmanager
def entered(frame: Frame) -> Generator[Frame]:
    """The frame holds on this thread, until the end, however that comes."""
    before = _local.frame
    frame = replace(frame, task=_graph_task(), nesting=_nesting(), categories=_categories(frame.lists))
    frame = replace(frame, without_lists=replace(frame, lists=_NO_LISTS, categories={}, without_lists=None))
    key = frame.key
    _hear(key, frame.lists, tuple(frame.rules))
    _checkpoints.patch(_remembering)
    restore = _switch(before, frame)
    _local.frame = frame
    try:
        yield frame
    finally:
        _local.frame = before
        restore()
        _checkpoints.unpatch()


def _switch(before: Frame | None, now: Frame) -> Callable[[], None]:
    """Opens the key of the frame, and closes the other one; what it returns takes that back."""
    # The dtype of the key's backend is what torch.compile guards upon: another low dtype recompiles.
    dtype = torch.get_autocast_dtype(now.key.device)
    torch.set_autocast_dtype(now.key.device, now.low)
    heard = before.key.on if before is not None else False
    if before is not None:
        before.key.set(False)
    now.key.set(True)

    def restore() -> None:
        now.key.set(False)
        torch.set_autocast_dtype(now.key.device, dtype)
        if before is not None:
            before.key.set(True)
            before.key.include(heard)

    return restore


def _remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, under this thread's frame wherever it is called."""
    frame = _local.frame
    if frame is None:
        return function

    @functools.wraps(function, updated=())
    def remembered(*args: Any, **kwargs: Any) -> Any:
        if _local.frame is frame and frame.task == _graph_task():
            return function(*args, **kwargs)
        with entered(replace(frame, cache=None if frame.cache is None else CastCache())):
            return function(*args, **kwargs)

    return remembered


@functools.lru_cache(maxsize=64)
def _categories(lists: OperationLists) -> Mapping[str, Category]:
    return MappingProxyType(dict(lists.rows()))


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def refuse_torch_autocast(where: str) -> None:
    """Raises if torch's own autocast is on: two lists would cast one call."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            raise ArgumentError(
                f"autocast: expected torch.autocast to be off {where} a context that casts by its own lists; got "
                f"torch.autocast({device!r}) on. Take one of the two away."
            )


# -- the kernels ------------------------------------------------------------------------------------------------------


@functools.cache
def hearing_some() -> Key:
    """The key under which only operations on a list or with a rule are heard."""
    return Key()


@functools.cache
def hearing_all() -> Key:
    """The key under which every operation is."""
    return Key(_everything)


def _everything(key: Key, keys: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return _below(_local.frame, key, keys, op, args, kwargs)


@functools.lru_cache(maxsize=1024)
def _hear(key: Key, lists: OperationLists, rules: tuple[str, ...]) -> None:
    for name in {*_categories(lists), *rules}:
        for op in overloads(name):
            key.hear(op, functools.partial(_kernel, key, name, op, _place_of_dtype(op)))


@functools.cache
def overloads(name: str) -> tuple[Any, ...]:
    """The overloads of an operation that take a tensor and write into none but, by its name, the first."""
    packet = getattr(torch.ops.aten, name)
    found = [getattr(packet, overload) for overload in packet.overloads()]
    return tuple(op for op in found if _takes_tensor(op) and not any(one.is_out for one in op._schema.arguments))  # noqa: SLF001


def _takes_tensor(op: Any) -> bool:
    return any("Tensor" in str(one.type) for one in op._schema.arguments)  # noqa: SLF001


def _place_of_dtype(op: Any) -> int | None:
    names = [one.name for one in op._schema.arguments]  # noqa: SLF001
    return names.index("dtype") if "dtype" in names else None


def _kernel(key: Key, name: str, op: Any, dtype_at: int | None, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """What runs in the place of a heard operation."""
    frame = _local.frame
    if frame is None:
        return key.below(keys, op, args, kwargs)
    category = frame.categories.get(name)
    rule = frame.rules.get(name)
    key.include(False)
    try:
        if category is not None and frame.casts_now():
            if category == "banned":
                _refuse(name, frame)
            args, kwargs = _cast(category, frame, dtype_at, args, kwargs)
            return _run(frame, key, keys, op, rule, args, kwargs, listed=True)
        return _run(frame, key, keys, op, rule, args, kwargs, listed=False)
    finally:
        key.include(True)


def _run(frame: Frame, key: Key, keys: Any, op: Any, rule: Rule | None, args: Any, kwargs: Any, *, listed: bool) -> Any:
    if rule is not None:
        result = rule(op, args, kwargs)
        if result is not NotImplemented:
            return result
    elif listed and not frame.rules:
        return op(*args, **kwargs)  # as under torch's autocast, the lists are for the outermost call alone
    key.include(True)
    _local.frame = frame.without_lists if listed else frame
    try:
        return _below(frame, key, keys, op, args, kwargs)
    finally:
        _local.frame = frame


def _below(frame: Frame | None, key: Key, keys: Any, op: Any, args: Any, kwargs: Any) -> Any:
    if frame is None or frame.witness is None:  # no frame: one of autograd's own threads
        return key.below(keys, op, args, kwargs)
    return frame.witness.native(op, args, kwargs, functools.partial(key.below, keys, op, args, kwargs))


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
