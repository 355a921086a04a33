"""Entering and leaving a frame: setting and restoring the state of a thread."""

import contextlib
import functools
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, cast

import torch

from plimsoll.emulate.casting.argument_casts import CastCache
from plimsoll.emulate.dispatch import activation_checkpoints
from plimsoll.emulate.dispatch.operation_kernels import intercept, key_of
from plimsoll.emulate.dispatch.thread_frame import NO_LISTS, Frame, categories_of, graph_task, local, nesting
from plimsoll.emulate.operation_counts import Counts
from plimsoll.errors import ArgumentError

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
    activation_checkpoints.patch(_under_frame)
    restore = _switch(before, frame)
    local.frame, local.bypassed = frame, False
    try:
        yield frame
    finally:
        local.frame, local.bypassed = before, bypassed
        restore()
        activation_checkpoints.unpatch()


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
