"""Casting an operation's arguments as a list demands, and keeping the casts of weights."""

import weakref
from collections.abc import Callable
from typing import Any, cast as typed

import torch
from torch import Tensor, nn

from plimsoll.kernels.dtypes import TRAINING

# FP64 is left alone, as torch's autocast leaves it; 8-bit dtypes only hold codes.
_CASTABLE = frozenset(TRAINING.values())


class CastCache:
    """The casts of the weights that a forward used, so that one used twice is cast once.

    Only of leaves that a gradient is wanted for, and only while one is recorded. An entry ends when its weight changes,
    or when a gradient has come back to it: what comes after is another forward.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, torch.dtype], tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`x` in the dtype: the one that is held, where it still stands for x."""
        key = (id(x), dtype)
        found = self._held.get(key)
        if found is not None and found[0]() is x and found[1] == x._version:  # noqa: SLF001
            return found[2]
        result = x.to(dtype)
        self._held[key] = (weakref.ref(x), x._version, result)  # noqa: SLF001
        if result.requires_grad:
            result.register_hook(_forgetting(weakref.ref(self), key))
        return result

    def clear(self) -> None:
        """Hold nothing any more."""
        self._held.clear()

    def forget(self, key: tuple[int, torch.dtype]) -> None:
        """The entry's forward is over."""
        self._held.pop(key, None)

    def __len__(self) -> int:
        return len(self._held)


def _forgetting(cache: "weakref.ref[CastCache]", key: tuple[int, torch.dtype]) -> Callable[[Tensor], None]:
    def forget(_: Tensor) -> None:
        held = cache()
        if held is not None:
            held.forget(key)

    return forget


def castable(x: object) -> bool:
    """Return whether lists apply to it: a floating tensor of 16 or 32 bits."""
    return isinstance(x, Tensor) and x.dtype in _CASTABLE


def cast(x: Any, dtype: torch.dtype, cache: CastCache | None) -> Any:
    """Return an argument with every castable tensor in it in the dtype."""
    if isinstance(x, Tensor):
        if x.dtype is dtype or x.dtype not in _CASTABLE:
            return x
        return cache.cast(x, dtype) if cache is not None and _may_keep(x) else x.to(dtype)
    if isinstance(x, list | tuple):
        return [cast(one, dtype, cache) for one in typed("list[Any]", x)]
    return x


def _may_keep(x: Tensor) -> bool:
    return type(x) in (nn.Parameter, Tensor) and x.is_leaf and x.requires_grad and torch.is_grad_enabled()


def promoted(low: torch.dtype, arguments: Any) -> torch.dtype:
    """Return the dtype of a promoting operation: the low dtype if all arguments are of it, else FP32."""
    return torch.float32 if any(x.dtype is not low for x in tensors(arguments)) else low


def tensors(arguments: Any) -> list[Tensor]:
    """Return the castable tensors among the arguments."""
    found = list[Tensor]()
    for x in arguments:
        if isinstance(x, list | tuple):
            found.extend(one for one in typed("list[Any]", x) if castable(one))
        elif castable(x):
            found.append(x)
    return found
