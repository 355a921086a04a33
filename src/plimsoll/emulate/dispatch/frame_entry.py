"""Entering and leaving a frame: setting and restoring the state of a thread."""

import contextlib
import functools
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, cast

import torch

from plimsoll.emulate.casting.argument_casts import CastCache
from plimsoll.emulate.dispatch import activation_checkpoints
from plimsoll.emulate.dispatch.operation_kernels import hear, key_of
from plimsoll.emulate.dispatch.thread_frame import NO_LISTS, Frame, categories_of, graph_task, local, nesting
from plimsoll.emulate.operation_counts import Counts
from plimsoll.errors import ArgumentError

_dispatch_modes: Callable[[], int] = cast("Any", torch)._C._len_torch_dispatch_stack  # noqa: SLF001


@contextlib.contextmanager
def entered(frame: Frame) -> Generator[Frame]:
    """Activate the frame on this thread until the end of the block."""
    before, silent = local.frame, local.silent
    if frame.witness is not None and _dispatch_modes():
        frame = _without_witness(frame)
    frame = replace(frame, task=graph_task(), nesting=nesting(), categories=categories_of(frame.lists))
    frame = replace(frame, without_lists=replace(frame, lists=NO_LISTS, categories={}, without_lists=None))
    key = key_of(frame)
    hear(key, frame.lists, tuple(frame.rules))
    activation_checkpoints.patch(_remembering)
    restore = _switch(before, frame)
    local.frame, local.silent = frame, False
    try:
        yield frame
    finally:
        local.frame, local.silent = before, silent
        restore()
        activation_checkpoints.unpatch()


def _without_witness(frame: Frame) -> Frame:
    """Return the frame as it can be inside a TorchDispatchMode, where torch finds no kernel that hears everything."""
    if not isinstance(frame.witness, Counts):
        raise ArgumentError(
            "emulate: expected operations to be 'matmul' or names inside a TorchDispatchMode (plimsoll.locate, a FLOP "
            "counter), where torch lets nobody hear all operations; got operations='all'. Name those to round."
        )
    return replace(frame, witness=None)  # it only counts


def _switch(before: Frame | None, now: Frame) -> Callable[[], None]:
    """Open the key of the frame, and closes the other one; what it returns takes that back."""
    # The dtype of the key's backend is what torch.compile guards upon: another low dtype recompiles.
    dtype = torch.get_autocast_dtype(key_of(now).device)
    torch.set_autocast_dtype(key_of(now).device, now.low)
    heard = key_of(before).on if before is not None else False
    if before is not None:
        key_of(before).set(False)
    key_of(now).set(True)

    def restore() -> None:
        key_of(now).set(False)
        torch.set_autocast_dtype(key_of(now).device, dtype)
        if before is not None:
            key_of(before).set(True)
            key_of(before).include(heard)

    return restore


def _remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, under this thread's frame wherever it is called."""
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
