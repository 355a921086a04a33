"""Calls of a model's modules, each handed to a function that makes the call."""

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

_backward_running: Callable[[], int] = cast("Any", torch)._C._current_graph_task_id  # noqa: SLF001

Call = Callable[..., Any]


class Around(Protocol):
    """Wrapper around a module's call, its hooks included."""

    def __call__(
        self, name: str, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> Any:
        """Return the call's result."""
        ...


def named(root: nn.Module, top: str) -> dict[int, str]:
    """Return the name of each module, by identity. Of several names the first counts."""
    found: dict[int, str] = {}
    for name, module in cast("Iterable[tuple[str, nn.Module]]", root.named_modules()):
        found.setdefault(id(module), name or top)
    return found


def in_backward() -> bool:
    """Return True if a backward runs on this thread.

    A forward that is called then is a checkpoint's recomputation.
    """
    return _backward_running() != -1


@contextlib.contextmanager
def intercepted(names: Mapping[int, str], around: Around) -> Generator[None]:
    """Context in which this thread's calls of these modules go through `around`."""
    kind, thread = cast("Any", nn.Module), threading.get_ident()
    original = kind.__call__

    @functools.wraps(original)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        name = names.get(id(self))
        if name is None or threading.get_ident() != thread:
            return original(self, *args, **kwargs)
        return around(name, self, functools.partial(original, self), args, kwargs)

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = original


def is_float(x: object) -> bool:
    """Return True for a floating tensor of values."""
    return isinstance(x, Tensor) and x.is_floating_point() and not x.is_meta
