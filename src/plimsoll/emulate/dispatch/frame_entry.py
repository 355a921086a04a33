"""Entering and leaving a frame: setting and restoring the state of a thread."""

import contextlib
import functools
import threading
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, cast

import torch
from torch.utils import checkpoint as _torch_checkpoint

from plimsoll.emulate.casting import CastCache
from plimsoll.emulate.dispatch.operation_kernels import intercept, key_of
from plimsoll.emulate.dispatch.thread_frame import NO_LISTS, Frame, categories_of, graph_task, local, nesting
from plimsoll.emulate.operation_counts import Counts
from plimsoll.errors import ArgumentError
from plimsoll.watch.hooks.torch_hooks import replaced

_dispatch_modes: Callable[[], int] = cast("Any", torch)._C._len_torch_dispatch_stack  # noqa: SLF001


@contextlib.contextmanager
def entered(frame: Frame) -> Generator[Frame]:
    """Activate the frame on this thread until the end of the block."""
    before, bypassed = local.frame, local.bypassed
    if frame.tracer is not None and _dispatch_modes():
        frame = _without_tracer(frame)
    frame = replace(frame, task=graph_task(), nesting=nesting(), categories=categories_of(frame.lists))
    frame = replace(frame, without_lists=replace(frame, lists=NO_LISTS, categories={}, without_lists=None))
    key = key_of(frame)
    intercept(key, frame.lists, tuple(frame.rules))
    _patch_checkpoints()
    restore = _switch(before, frame)
    local.frame, local.bypassed = frame, False
    try:
        yield frame
    finally:
        local.frame, local.bypassed = before, bypassed
        restore()
        _unpatch_checkpoints()


def _without_tracer(frame: Frame) -> Frame:
    """Return the frame without its tracer, as inside a TorchDispatchMode."""
    # There torch calls the mode before it looks for a fallback kernel, so a key for everything has no effect.
    if not isinstance(frame.tracer, Counts):
        raise ArgumentError(
            "emulate: expected operations to be 'matmul' or names inside a TorchDispatchMode (plimsoll.locate, a FLOP "
            "counter), where not all operations can be intercepted; got operations='all'. Name those to round."
        )
    return replace(frame, tracer=None)  # a `Counts` only counts: without it the results are the same


def _switch(before: Frame | None, now: Frame) -> Callable[[], None]:
    """Open the key of a frame, close the other key, and return the undo function."""
    # torch.compile guards on the dtype of the key's backend, so another low dtype recompiles.
    dtype = torch.get_autocast_dtype(key_of(now).device)
    torch.set_autocast_dtype(key_of(now).device, now.low)
    was_on = key_of(before).on if before is not None else False
    if before is not None:
        key_of(before).set(False)
    key_of(now).set(True)

    def restore() -> None:
        key_of(now).set(False)
        torch.set_autocast_dtype(key_of(now).device, dtype)
        if before is not None:
            key_of(before).set(True)
            key_of(before).include(was_on)

    return restore


def _under_frame(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, run under this thread's frame wherever it is called."""
    frame = local.frame
    if frame is None:
        return function

    @functools.wraps(function, updated=())
    def remembered(*args: Any, **kwargs: Any) -> Any:
        if local.frame is frame and frame.task == graph_task():
            return function(*args, **kwargs)
        again = contextlib.nullcontext() if frame.again is None else frame.again
        with entered(replace(frame, cache=None if frame.cache is None else CastCache())), again:
            return function(*args, **kwargs)

    return remembered


# torch saves the state of its own autocast with an activation checkpoint, and no other state. So while any context is
# open, the two functions that `torch.utils.checkpoint.checkpoint` calls run the user's function under its frame. A
# checkpoint made inside recomputes correctly even if its backward runs after the patch is gone.
_module: Any = _torch_checkpoint
# From torch 2.15 on `checkpoint` calls another function than those that have imported the old one do, which calls it.
_OLD = "_checkpoint_without_reentrant_generator"
_GENERATOR = f"{_OLD}_impl" if hasattr(_module, f"{_OLD}_impl") else _OLD

_lock = threading.Lock()
_open = 0
_undo: list[Callable[[], None]] = []


def _patch_checkpoints() -> None:
    """Count one more open context. The first installs the patch."""
    global _open  # noqa: PLW0603  (the count of the process's one patch)
    with _lock:
        if not _open:
            _undo.append(replaced(_module, _GENERATOR, _generator(getattr(_module, _GENERATOR))))
            kind = _module.CheckpointFunction
            _undo.append(replaced(kind, "forward", staticmethod(_forward(kind.forward))))
        _open += 1


def _unpatch_checkpoints() -> None:
    """Count one open context less. The last removes the patch."""
    global _open  # noqa: PLW0603
    with _lock:
        _open -= 1
        while not _open and _undo:
            _undo.pop()()


def _generator(original: Any) -> Any:
    @functools.wraps(original)
    def generator(function: Any, *args: Any, **kwargs: Any) -> Any:
        return original(_under_frame(function), *args, **kwargs)

    return generator


def _forward(original: Any) -> Any:
    @functools.wraps(original)
    def forward(ctx: Any, run_function: Any, *args: Any) -> Any:
        return original(ctx, _under_frame(run_function), *args)

    return forward
