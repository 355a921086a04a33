"""Modules that compute in another format than their model, with unchanged weights.

A module with a rule enters its format when it is called or recomputed by a checkpoint, and leaves it when it returns or
raises. FP32 switches autocast off and casts inputs to FP32. FP16 and BF16 are autocast with that dtype. Any other
format is emulated at the operands of matrix products, values in the forward format, gradients in the backward format.
If the modules around it run without autocast, its outputs are cast to FP32.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plimsoll.formats import ModulePlan
from plimsoll.kernels.dtypes import TRAINING
from plimsoll.watch.taps.compiled_taps import inlined_only


def named_modules(root: nn.Module, *, twice: bool = True) -> list[tuple[str, nn.Module]]:
    """Return every module with its qualified name, which is empty for the root.

    If `twice`, a module with several names appears once for each.
    """
    return cast("list[tuple[str, nn.Module]]", [*root.named_modules(remove_duplicate=not twice)])


def callers(root: nn.Module) -> dict[str, str]:
    """Return each module's nearest parent with a forward, by name, without the root."""
    around: dict[str, str] = {}
    can_be_called = {name: has_forward(module) for name, module in named_modules(root)}
    for name in can_be_called:
        if name:
            parent = name.rpartition(".")[0]
            around[name] = parent if not parent or can_be_called[parent] else around[parent]
    return around


def has_forward(module: nn.Module) -> bool:
    """Return whether the module can be called. A list of modules cannot."""
    return type(module).forward is not nn.Module.forward


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return the same structure with its floating tensors in the dtype."""

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != dtype else x

    return pytree.tree_map_only(Tensor, cast, value)


Context = contextlib.AbstractContextManager[Any]
NATIVE = tuple(TRAINING)  # formats that torch computes in


class OpenContexts(threading.local):
    """The entries of a re-entrant context that a thread has not left yet."""

    def __init__(self) -> None:
        self.stack: list[contextlib.AbstractContextManager[object]] = []

    @property
    def on(self) -> bool:
        """True while the thread has any open."""
        return bool(self.stack)


class Switch:
    """Switch of the regions of a model."""

    on = False


class Regions:
    """Hooks that apply a plan's rules to a model while the switch is on."""

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
                enter(inside[name])  # an impossible format raises here, before the first step
                self._regions.append((module, _Region(self.switch, inside[name], around, enter)))

    def attach(self) -> "Regions":
        """Put the hooks on the modules."""
        for module, region in self._regions:
            self._handles.append(module.register_forward_pre_hook(region.enter, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(region.leave, always_call=True))
        return self

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Region:
    def __init__(
        self, switch: Any, inside: ModulePlan, around: ModulePlan, enter: Callable[[ModulePlan], Context]
    ) -> None:
        self._switch, self._inside, self._around, self._enter = switch, inside, around, enter
        self._open = OpenContexts()  # of each thread: another one may run the model outside of the context

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ARG002  (signature of a hook)
        stack = contextlib.ExitStack()
        self._open.stack.append(stack)
        if not self._switch.on:
            return None
        stack.enter_context(self._enter(self._inside))
        if _in_16_bits(self._inside):
            return None
        return cast_floating(args, torch.float32), cast_floating(kwargs, torch.float32)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002  (signature of a hook)
        self._open.stack.pop().__exit__(None, None, None)
        if not self._switch.on or _in_16_bits(self._around):
            return None
        return cast_floating(output, torch.float32)


inlined_only(_Region.enter, _Region.leave)


def is_native(plan: ModulePlan) -> bool:
    """Return whether torch itself computes in the format, in both directions."""
    return plan.forward in NATIVE and plan.backward == plan.forward


def _in_16_bits(plan: ModulePlan) -> bool:
    return is_native(plan) and plan.forward != "fp32"


def _effective(root: nn.Module, rules: Mapping[str, ModulePlan], outside: ModulePlan) -> dict[str, ModulePlan]:
    effective: dict[str, ModulePlan] = {}
    for name, _ in named_modules(root, twice=False):
        effective[name] = rules.get(name) or (effective[name.rpartition(".")[0]] if name else outside)
    return effective
