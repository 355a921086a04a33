"""Scaled forward: its mode, the patch for autograd functions, and the hooks on modules."""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointFunction

from plimsoll.errors import StateError
from plimsoll.scaling.layerwise.forward_mode import (
    OUTSIDE,
    ForwardMode,
    OutputShift,
    ScaleChange,
    Shift,
    mark,
    marked,
    refuse_compiled,
    replaced,
    shifted,
    tensors_in,
)
from plimsoll.scaling.layerwise.scaled_modules import Layers, refuse_sharded
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.hooks.autograd_graph import backward_running
from plimsoll.watch.taps.module_taps import ModuleHook

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
    before = _function.__dict__["apply"]  # a classmethod, and of C from torch 2.15 on

    @functools.wraps(_function.apply)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        mode, run = present(), before.__get__(None, cls)
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


# -- hooks: the start and end of a scaled forward, and of units --------------------------------------------------------

_frames = threading.local()


@dataclass(slots=True)
class _Frame:
    """Call of a module that has started in this thread."""

    module: nn.Module
    mode: ForwardMode | None = None  # None: its operations are ignored
    begins: bool = False  # whether this call created the mode


class Before(ModuleHook):
    """Hook before a module's forward."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start a frame, and a scaled forward if this call is the outermost."""
        layers, mode = self.layers, present()
        _stack().append(frame := _Frame(module))  # first, so that `After` finds it if an error follows
        if not layers.on or (mode is not None and mode.layers is not layers):
            return
        refuse_compiled()
        refuse_sharded(module)
        if not torch.is_grad_enabled():
            if mode is not None:
                self._unrecorded(module, mode)
            return
        again = backward_running() != -1
        if mode is None:
            if again:
                _refuse_unknown_rerun(layers, module, args, kwargs)
            mode = ForwardMode(layers)
            enter(mode)
            frame.begins = True
        frame.mode = mode
        unit = layers.number.get(id(module), mode.units[-1])
        mode.units.append(unit)
        if not again and id(module) in layers.number:
            layers.called(unit)

    def _unrecorded(self, module: nn.Module, mode: ForwardMode) -> None:
        """Note a call without gradients, as of a checkpoint, in a forward with gradients."""
        if not mode.known_reruns:
            self.layers.quiet.add(id(module))
        elif id(module) in self.layers.number:
            self.layers.called(self.layers.number[id(module)])


class After(ModuleHook):
    """Hook after a module's forward, which also runs after an error."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:  # noqa: ARG002
        """End the frame. Return the output of the outermost call at the loss scale."""
        stack = _stack()
        if not stack or stack[-1].module is not module:
            return None  # another hook raised before ours ran
        frame = stack.pop()
        if frame.mode is None:
            return None
        frame.mode.units.pop()
        if self.layers.meter.measuring and id(module) in self.layers.number:
            self._measure(output, self.layers.number[id(module)])
        if not frame.begins:
            return None
        leave(frame.mode)
        return None if output is None or self.layers.plain else at_loss_scale(output, frame.mode)

    def _measure(self, output: Any, unit: int) -> None:
        tap = self.layers.meter.tap(unit, "outputs")
        for x in tensors_in(output):
            known = marked(x) if x.requires_grad and not x.is_leaf else None
            if known is not None and known.unit == unit:
                x.register_hook(tap)


# The outermost called module starts the forward, whichever it is. Outside of it every gradient has the loss scale
# alone, so its outputs are shifted to that. Copies and pickles of the model have no hooks.
def at_loss_scale(output: Any, mode: ForwardMode) -> Any:
    """Return the output of a model, shifted to the loss scale alone."""
    aliases: dict[int, Tensor] = {}
    outputs: list[Any] = list(tensors_in(output))
    views = any(x._is_view() for x in outputs)  # noqa: SLF001
    # A write into one output must not miss another that shares its memory.
    function: Any = Shift if views else OutputShift
    meter = mode.layers.meter
    tap = meter.tap(mode.layers.loss, "outputs") if meter.measuring else None

    def leave(x: Tensor) -> Tensor:
        if not x.requires_grad or x.is_leaf:
            return x
        if id(x) not in aliases:
            alias = function.apply(x, ScaleChange(0, mode.exponent_of(x), OUTSIDE, tap=tap))
            mark(alias, 0)
            aliases[id(x)] = alias
        return aliases[id(x)]

    return tree_map_only(Tensor, leave, output)


def _refuse_unknown_rerun(layers: Layers, module: nn.Module, args: Any, kwargs: Any) -> None:
    detached = any(x.requires_grad and x.is_leaf for x in tensors_in((args, kwargs)))
    if detached and id(module) in layers.quiet:
        raise StateError(
            f"LayerScaler: expected activation checkpointing by torch.utils.checkpoint; got a {type(module).__name__} "
            "that ran without gradients in the forward and runs again on detached inputs in the backward. Use "
            "torch.utils.checkpoint there, or run the forward under `with scaler.suspended():`."
        )


def _stack() -> list[_Frame]:
    if not hasattr(_frames, "stack"):
        _frames.stack = []
    return cast("list[_Frame]", _frames.stack)
