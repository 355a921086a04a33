"""`Autocast`: operation lists with any low dtype, on any device.

It casts where torch's own autocast does, in front of autograd, and for the same calls, including those that a composite
operation makes in C++. Three things differ: the caller chooses the lists. The cached cast of a weight is dropped when
the weight changes or its gradient is ready, so a context may stay open around a whole training loop. A backward inside
the context is not changed.
"""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch

from plimsoll.emulate.casting import CUDA, CastCache, OperationLists, check_lists
from plimsoll.emulate.dispatch import frame_entry, thread_frame
from plimsoll.emulate.dispatch.thread_frame import Frame
from plimsoll.emulate.module_regions import OpenContexts
from plimsoll.errors import ArgumentError
from plimsoll.kernels.dtypes import SIXTEEN_BIT


class Reentrant(contextlib.ContextDecorator, ABC):
    """Context that a thread may enter again inside, and a decorator too."""

    def __init__(self) -> None:
        self._open = OpenContexts()

    @abstractmethod
    def _context(self) -> contextlib.AbstractContextManager[object]:
        """Return a new context for one entry."""

    def __enter__(self) -> Self:
        context = self._context()
        context.__enter__()
        self._open.stack.append(context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.stack.pop().__exit__(kind, error, trace)


class Autocast(Reentrant):
    """Context in which this thread's operations run in the dtypes of the lists.

    It is re-entrant, and a decorator too.

    Args:
        lists: The operations to cast. Default: those of `torch.autocast("cuda")`.
        dtype: The low dtype, float16 or bfloat16. Default: float16.
        enabled: False makes a region without casts inside another context, as `torch.autocast(..., enabled=False)`
            does. Default: True.
        cache: Whether a weight that is used twice is cast once. Default: True.

    Raises:
        ArgumentError: `lists` or `dtype` is something else, or torch's own autocast is on too, so that two lists would
            cast one call.

    >>> with Autocast():
    ...     y = torch.randn(2, 3) @ torch.randn(3, 2)
    >>> y.dtype
    torch.float16
    """

    def __init__(
        self,
        lists: OperationLists = CUDA,
        dtype: torch.dtype = torch.float16,
        *,
        enabled: bool = True,
        cache: bool = True,
    ) -> None:
        super().__init__()
        if dtype not in SIXTEEN_BIT:
            raise ArgumentError(
                f"Autocast: expected dtype to be one of {', '.join(map(str, SIXTEEN_BIT))}; got {dtype}. For a format "
                "that torch has no arithmetic for, use plimsoll.emulate."
            )
        check_lists("Autocast", lists)
        self.lists, self.dtype, self.enabled, self.cache = lists, dtype, enabled, cache

    def _context(self) -> contextlib.AbstractContextManager[object]:
        return casting(self.lists if self.enabled else None, self.dtype, cache=self.cache)


@contextlib.contextmanager
def casting(lists: OperationLists | None, low: torch.dtype, *, cache: bool = True) -> Generator[Frame]:
    """Use these lists instead of those of outer contexts. None: use no lists."""
    around = thread_frame.current() or Frame()
    if lists is None:
        frame = replace(around, lists=OperationLists())
    else:
        thread_frame.refuse_torch_autocast("around")
        frame = replace(around, lists=lists, low=low, cache=(around.cache or CastCache()) if cache else None)
    with mha_in_python(), frame_entry.entered(frame):
        try:
            yield frame
        finally:
            if around.cache is None and frame.cache is not None:
                frame.cache.clear()


_lock = threading.Lock()
_without_fastpath = 0
_fastpath_before = True


@contextlib.contextmanager
def mha_in_python() -> Generator[None]:
    """Run `nn.MultiheadAttention` as separate operations, also in evaluation."""
    global _without_fastpath, _fastpath_before  # noqa: PLW0603  (the count of the process's one switch)
    with _lock:
        # In evaluation torch has one fused kernel, whose inner operations no list could cast. The switch belongs to the
        # process, so other threads take the same slower path while any context is open.
        if not _without_fastpath:
            _fastpath_before = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _without_fastpath += 1
    try:
        yield
    finally:
        with _lock:
            _without_fastpath -= 1
            if not _without_fastpath:
                torch.backends.mha.set_fastpath_enabled(_fastpath_before)
