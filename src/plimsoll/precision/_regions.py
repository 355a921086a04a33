"""Modules that run in another format than the rest of their model, where the weights stay FP32.

A module of a rule enters its format when it is called, and leaves it when it returns, raises, or is recomputed by a
checkpoint: FP32 switches autocast off and takes FP32 inputs; FP16 and BF16 are autocast with that dtype; any other
format is emulated at the inputs of matrix products, values by that format, gradients by the one that goes with it.
Where what is around it has no autocast, its outputs are FP32 again.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from plimsoll.precision._levels import DTYPES
from plimsoll.precision._placement import callers, cast_floating, named_modules
from plimsoll.watch._compiled import inlined_only

Context = contextlib.AbstractContextManager[Any]


class Switch:
    """Whether the loop's forward is under way."""

    on = False


class Regions:
    """The rules of a model, as hooks; they act while the switch is on."""

    def __init__(
        self, root: nn.Module, rules: Mapping[str, str], outside: str, enter: Callable[[str], Context]
    ) -> None:
        self.switch = Switch()
        self._handles: list[Any] = []
        inside = _effective(root, rules, outside)
        caller = callers(root)
        for name, module in named_modules(root, twice=False):
            around = inside[caller[name]] if name else outside
            if inside[name] != around:
                enter(inside[name])  # a format that cannot be is refused here, and not in the first step
                self._add(module, _Region(self.switch, inside[name], around, enter))

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _add(self, module: nn.Module, region: "_Region") -> None:
        self._handles.append(module.register_forward_pre_hook(region.enter, prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(region.leave, always_call=True))


class _Region:
    def __init__(self, switch: Switch, inside: str, around: str, enter: Callable[[str], Context]) -> None:
        self._switch, self._inside, self._around, self._enter = switch, inside, around, enter
        self._open: list[contextlib.ExitStack] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ARG002  (torch's to choose)
        stack = contextlib.ExitStack()
        self._open.append(stack)
        if not self._switch.on:
            return None
        stack.enter_context(self._enter(self._inside))
        if self._inside in DTYPES and self._inside != "fp32":
            return None
        return cast_floating(args, DTYPES["fp32"]), cast_floating(kwargs, DTYPES["fp32"])

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002  (torch's to choose)
        self._open.pop().close()
        if not self._switch.on or (self._around in DTYPES and self._around != "fp32"):
            return None
        return cast_floating(output, DTYPES["fp32"])


inlined_only(_Region.enter, _Region.leave)


def _effective(root: nn.Module, rules: Mapping[str, str], outside: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, _ in named_modules(root, twice=False):
        found[name] = rules.get(name) or (found[name.rpartition(".")[0]] if name else outside)
    return found
