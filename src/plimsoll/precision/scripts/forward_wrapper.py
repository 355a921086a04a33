"""Wrapper around a module's `forward` that copies and pickles of the module do not contain."""

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plimsoll.watch.taps.module_taps import ModuleHook

_HALF = (torch.float16, torch.bfloat16)


def module_to_wrap(model: nn.Module) -> nn.Module:
    """Return the module to wrap: the one inside DDP, but none inside compiled code."""
    inner = model.__dict__.get("_modules", {})
    if "_orig_mod" in inner:
        return model
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return module_to_wrap(inner["module"])
    return model


def patched(owner: Any, name: str, run: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of a class by one that calls `run`; return the function that undoes it."""
    original = owner.__dict__[name]

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(original, self, args, kwargs)

    setattr(owner, name, method)

    def restore() -> None:
        if owner.__dict__[name] is method:
            setattr(owner, name, original)

    return restore


class Forward:
    """Replacement of a module's `forward`. Copies and pickles of the module contain the plain method."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._module, self._call = weakref.ref(module), call
        self._own: Any = module.__dict__.get("forward")  # another library's wrapper
        module.__dict__["forward"] = self  # setattr of a compiled module would set it on the module inside

    @property
    def __wrapped__(self) -> Any:  # inspect.signature follows it
        module = self._module()
        return self._own if self._own is not None or module is None else _plain(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model under the level."""
        return self._call(self.__wrapped__, args, kwargs)

    def remove(self) -> None:
        """Restore the module's own method, unless another library has wrapped this one."""
        module = self._module()
        if module is not None and module.__dict__.get("forward") is self:
            if self._own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = self._module()
        return self._own if self._own is not None else _plain(memo.get(id(module), module))

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        module: Any = self._module()
        if self._own is not None:
            return getattr, (_Holder(self._own), "held")
        return getattr, (module, "forward")  # while the copy has no attributes yet, this is its class's


class _Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


def _plain(module: Any) -> Any:
    return types.MethodType(cast("Any", type(module)).forward, module)


class Widen(ModuleHook):
    """Hook that converts a module's 16-bit outputs to FP32."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002
        """Return the output with 16-bit tensors widened."""
        return pytree.tree_map_only(Tensor, widened, output)


def widened(x: Tensor) -> Tensor:
    """Return a 16-bit tensor in FP32, and any other unchanged."""
    return x.float() if x.dtype in _HALF else x
