"""Where a level sits on a model: around the `forward` of one module, which copies and pickles do not have."""

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plimsoll.watch.hooks.module_taps import ModuleHook

_HALF = (torch.float16, torch.bfloat16)


def seat_of(model: nn.Module) -> nn.Module:
    """Which module is wrapped: the one inside of DDP, but no module inside of compiled code."""
    inner = model.__dict__.get("_modules", {})
    if "_orig_mod" in inner:
        return model
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return seat_of(inner["module"])
    return model


def patched(owner: Any, name: str, run: Callable[..., Any]) -> Callable[[], None]:
    """Replaces a method of a class by one that `run` carries out; returns what undoes it."""
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
    """A module's `forward`, as an attribute of its own; copies and pickles of the module have the plain one."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._module, self._call = weakref.ref(module), call
        self._own: Any = module.__dict__.get("forward")  # some other wrapper's
        module.__dict__["forward"] = self  # not by setattr, which a compiled module hands on to the one inside

    @property
    def __wrapped__(self) -> Any:  # signatures are read from it
        module = self._module()
        return self._own if self._own is not None or module is None else _plain(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model as the level wants it."""
        return self._call(self.__wrapped__, args, kwargs)

    def remove(self) -> None:
        """Gives the module its own again, unless another has wrapped this one."""
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
        return getattr, (module, "forward")  # before the copy has its attributes, this is its class's


class _Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


def _plain(module: Any) -> Any:
    return types.MethodType(cast("Any", type(module)).forward, module)


class Widen(ModuleHook):
    """16-bit outputs leave in FP32."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002
        """The output, with 16-bit tensors widened."""
        return pytree.tree_map_only(Tensor, widened, output)


def widened(x: Tensor) -> Tensor:
    """A 16-bit tensor in FP32; any other as it is."""
    return x.float() if x.dtype in _HALF else x
