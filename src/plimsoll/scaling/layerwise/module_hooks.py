"""Hooks on a model's modules: the start and end of a scaled forward, and of units."""

import threading
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from plimsoll.errors import StateError
from plimsoll.scaling.layerwise import scaled_forward
from plimsoll.scaling.layerwise.edge_marks import OUTSIDE, OutputShift, ScaleChange, Shift, mark, marked
from plimsoll.scaling.layerwise.forward_mode import ForwardMode, refuse_compiled, tensors_in
from plimsoll.scaling.layerwise.scaled_modules import Layers, refuse_sharded
from plimsoll.watch.hooks.autograd_graph import backward_running
from plimsoll.watch.taps.module_taps import ModuleHook

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
        layers, mode = self.layers, scaled_forward.present()
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
            scaled_forward.enter(mode)
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
        scaled_forward.leave(frame.mode)
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
