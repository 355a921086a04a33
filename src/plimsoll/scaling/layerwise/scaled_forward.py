"""Scaled forward: its torch-function mode, and the patch for autograd functions."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from plimsoll.scaling.layerwise.edge_marks import OUTSIDE, OutputShift, ScaleChange, Shift, mark, shifted
from plimsoll.scaling.layerwise.forward_mode import ForwardMode, replaced, tensors_in
from plimsoll.watch.hooks import torch_hooks

_function: Any = torch.autograd.Function
_lock = threading.Lock()
_active = threading.local()
_undo: list[Callable[[], None]] = []
_forwards = 0


def present() -> ForwardMode | None:
    """Return the mode of the scaled forward that runs in this thread, or None."""
    return getattr(_active, "mode", None)


def layer_factor(x: Tensor) -> float:
    """Return the layer's factor of a tensor's gradient, for watches."""
    mode = present()
    return 1.0 if mode is None or not x.requires_grad else 2.0 ** mode.exponent_of(x)


torch_hooks.gradient_factor_providers.append(layer_factor)


def enter(mode: ForwardMode) -> None:
    """Start a scaled forward."""
    global _forwards  # noqa: PLW0603  (the process has one patch, and this is its count)
    with _lock:
        if not _forwards:
            _undo.append(_patch())
        _forwards += 1
    mode.outer = present()
    _active.mode = mode
    mode.__enter__()


def leave(mode: ForwardMode) -> None:
    """End a scaled forward. The last one restores torch."""
    global _forwards  # noqa: PLW0603
    mode.__exit__(None, None, None)
    _active.mode = mode.outer
    with _lock:
        _forwards -= 1
        while not _forwards and _undo:
            _undo.pop()()


# A TorchFunctionMode receives every operation but custom autograd functions. So while a scaled forward runs, the method
# `torch.autograd.Function.apply` is replaced, and each such function becomes one operation.
def _patch() -> Callable[[], None]:
    before = _function.__dict__["apply"]
    original = before.__func__

    @functools.wraps(original)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        mode, run = present(), functools.partial(original, cls)
        if mode is None or mode.busy or not torch.is_grad_enabled() or cls in (Shift, OutputShift):
            return run(*args, **kwargs)
        if cls is CheckpointFunction:
            return _checkpoint(mode, run, *args)
        return mode.run("apply", run, args, kwargs)

    ours = classmethod(apply)
    _function.apply = ours

    def undo() -> None:
        if _function.__dict__.get("apply") is ours:  # unless another library has wrapped ours since
            _function.apply = before

    return undo


# The reentrant `torch.utils.checkpoint` is such a function. It runs a function without gradients, and again in the
# backward on detached inputs, with a separate backward for it. It receives a function whose second run starts and ends
# at the exponent of the forward. The other kind of checkpoint recomputes only the tensors saved for the backward. A
# `Shift` saves none, so nothing is needed there.
def _checkpoint(mode: ForwardMode, run: Callable[..., Any], function: Any, preserve: Any, *args: Any) -> Any:
    inputs = [x for x in tensors_in(args) if x.requires_grad]
    exponent = min((mode.exponent_of(x) for x in inputs if not x.is_leaf), default=mode.last)
    shifted_args = replaced(args, lambda x: mode.bring(x, exponent) if x.requires_grad else x)
    result = run(_Rerun(function, mode, exponent), preserve, *shifted_args)
    for x in tensors_in(result):
        if x.requires_grad and not x.is_leaf:
            mark(x, exponent)
    return result


class _Rerun:
    """Checkpointed function, whose second run keeps the first one's exponent."""

    def __init__(self, function: Callable[..., Any], mode: ForwardMode, exponent: int) -> None:
        self.function, self.layers, self.exponent = function, mode.layers, exponent
        self.units = (*mode.units,)

    def __call__(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._unrecorded(args)
        inputs = replaced(args, lambda x: _at(x, self.exponent) if x.requires_grad else x)
        mode = ForwardMode(self.layers, self.units, self.exponent)
        enter(mode)
        try:
            result = self.function(*inputs)
        finally:
            leave(mode)
        return replaced(result, lambda x: mode.bring(x, self.exponent) if x.requires_grad and not x.is_leaf else x)

    def _unrecorded(self, args: Any) -> Any:
        mode = present()
        if mode is None:
            return self.function(*args)
        mode.known_reruns += 1
        try:
            return self.function(*args)
        finally:
            mode.known_reruns -= 1


def _at(x: Tensor, exponent: int) -> Tensor:
    """Return an alias of a detached input with an exponent. Leaves have none."""
    alias = shifted(x, ScaleChange(exponent, 0, OUTSIDE))
    mark(alias, exponent)
    return alias
