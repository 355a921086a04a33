"""Modules that compute in another format than the rest of their model, where the weights stay as they are.

A module of a rule enters its format when it is called, and leaves it when it returns, raises, or is recomputed by a
checkpoint: FP32 switches autocast off and takes FP32 inputs; FP16 and BF16 are autocast with that dtype; any other
format is emulated at the operands of matrix products, values by the forward format, gradients by the backward one.
Where what is around it has no autocast, its outputs are FP32 again.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plimsoll.formats import ModulePlan
from plimsoll.kernels.dtypes import TRAINING
from plimsoll.watch.taps.compiled_taps import inlined_only


def named_modules(root: nn.Module, *, twice: bool = True) -> list[tuple[str, nn.Module]]:
    """Return every module with its qualified name, the root's empty; one with several names each time, or once."""
    return cast("list[tuple[str, nn.Module]]", [*root.named_modules(remove_duplicate=not twice)])


def callers(root: nn.Module) -> dict[str, str]:
    """For every module but the root the name of the nearest one around it that has a forward."""
    found: dict[str, str] = {}
    callable_ones = {name: has_forward(module) for name, module in named_modules(root)}
    for name in callable_ones:
        if name:
            around = name.rpartition(".")[0]
            found[name] = around if not around or callable_ones[around] else found[around]
    return found


def has_forward(module: nn.Module) -> bool:
    """Return whether it can be called: lists of modules cannot."""
    return type(module).forward is not nn.Module.forward


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return the same structure with its floating tensors in that dtype."""

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != dtype else x

    return pytree.tree_map_only(Tensor, cast, value)


Context = contextlib.AbstractContextManager[Any]
NATIVE = tuple(TRAINING)  # what torch computes in by itself


class Switch:
    """Whether the regions act."""

    on = False


class Regions:
    """The rules of a model, as hooks; they act while the switch is on."""

    def __init__(
        self,
        root: nn.Module,
        rules: Mapping[str, ModulePlan],
        outside: ModulePlan,
        enter: Callable[[ModulePlan], Context],
        switch: Any = None,
    ) -> None:
        self.switch = Switch() if switch is None else switch
        self._handles: list[Any] = []
        self._regions: list[tuple[nn.Module, _Region]] = []
        inside = _effective(root, rules, outside)
        caller = callers(root)
        for name, module in named_modules(root, twice=False):
            around = inside[caller[name]] if name else outside
            if inside[name] != around:
                enter(inside[name])  # a format that cannot be is refused here, and not in the first step
                self._regions.append((module, _Region(self.switch, inside[name], around, enter)))

    def attach(self) -> "Regions":
        """Put the hooks on the modules."""
        for module, region in self._regions:
            self._handles.append(module.register_forward_pre_hook(region.enter, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(region.leave, always_call=True))
        return self

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Region:
    def __init__(
        self, switch: Any, inside: ModulePlan, around: ModulePlan, enter: Callable[[ModulePlan], Context]
    ) -> None:
        self._switch, self._inside, self._around, self._enter = switch, inside, around, enter
        self._open: list[contextlib.ExitStack] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ARG002  (torch's to choose)
        stack = contextlib.ExitStack()
        self._open.append(stack)
        if not self._switch.on:
            return None
        stack.enter_context(self._enter(self._inside))
        if _in_16_bits(self._inside):
            return None
        return cast_floating(args, torch.float32), cast_floating(kwargs, torch.float32)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002  (torch's to choose)
        self._open.pop().close()
        if not self._switch.on or _in_16_bits(self._around):
            return None
        return cast_floating(output, torch.float32)


inlined_only(_Region.enter, _Region.leave)


def is_native(said: ModulePlan) -> bool:
    """Return whether torch computes so by itself, in both directions."""
    return said.forward in NATIVE and said.backward == said.forward


def _in_16_bits(said: ModulePlan) -> bool:
    return is_native(said) and said.forward != "fp32"


def _effective(root: nn.Module, rules: Mapping[str, ModulePlan], outside: ModulePlan) -> dict[str, ModulePlan]:
    found: dict[str, ModulePlan] = {}
    for name, _ in named_modules(root, twice=False):
        found[name] = rules.get(name) or (found[name.rpartition(".")[0]] if name else outside)
    return found
