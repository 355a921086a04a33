"""Casts of an operation's arguments to the dtype of its list, and their cache."""

import weakref
from collections.abc import Callable
from typing import Any, cast as typed

import torch
from torch import Tensor, nn

from plimsoll.kernels.dtypes import TRAINING

# FP64 is left alone, as torch's autocast leaves it; 8-bit dtypes only hold codes.
_CASTABLE = frozenset(TRAINING.values())


class CastCache:
    """Cache of the casts of weights, so that a weight used twice is cast once."""

    def __init__(self) -> None:
        self._casts: dict[tuple[int, torch.dtype], tuple[weakref.ref[Tensor], int, Tensor]] = {}

    # The cache holds only casts of leaves that require a gradient, and only while autograd records. An entry is dropped
    # when its weight changes or a gradient reaches it, since the next use belongs to another forward.
    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `x` in the dtype, from the cache if `x` is unchanged."""
        key = (id(x), dtype)
        entry = self._casts.get(key)
        if entry is not None and entry[0]() is x and entry[1] == x._version:  # noqa: SLF001
            return entry[2]
        result = x.to(dtype)
        self._casts[key] = (weakref.ref(x), x._version, result)  # noqa: SLF001
        if result.requires_grad:
            result.register_hook(_forgetting(weakref.ref(self), key))
        return result

    def clear(self) -> None:
        """Drop all entries."""
        self._casts.clear()

    def forget(self, key: tuple[int, torch.dtype]) -> None:
        """Drop an entry, if it exists."""
        self._casts.pop(key, None)

    def __len__(self) -> int:
        return len(self._casts)


def _forgetting(cache: "weakref.ref[CastCache]", key: tuple[int, torch.dtype]) -> Callable[[Tensor], None]:
    # A weak reference: the hook stays on the graph, which may outlive the context and its cache.
    def forget(_: Tensor) -> None:
        owner = cache()
        if owner is not None:
            owner.forget(key)

    return forget


def castable(x: object) -> bool:
    """Return whether `x` is a floating tensor of 16 or 32 bits, as lists cast."""
    return isinstance(x, Tensor) and x.dtype in _CASTABLE


def cast(x: Any, dtype: torch.dtype, cache: CastCache | None) -> Any:
    """Return an argument with every castable tensor in it in the dtype."""
    if isinstance(x, Tensor):
        if x.dtype is dtype or x.dtype not in _CASTABLE:
            return x
        return cache.cast(x, dtype) if cache is not None and _may_keep(x) else x.to(dtype)
    if isinstance(x, list | tuple):
        return [cast(item, dtype, cache) for item in typed("list[Any]", x)]
    return x


def _may_keep(x: Tensor) -> bool:
    return type(x) in (nn.Parameter, Tensor) and x.is_leaf and x.requires_grad and torch.is_grad_enabled()


def promoted(low: torch.dtype, arguments: Any) -> torch.dtype:
    """Return the low dtype if all castable arguments have it, else FP32."""
    return torch.float32 if any(x.dtype is not low for x in tensors(arguments)) else low


def tensors(arguments: Any) -> list[Tensor]:
    """Return the castable tensors among the arguments."""
    castables = list[Tensor]()
    for x in arguments:
        if isinstance(x, list | tuple):
            castables.extend(item for item in typed("list[Any]", x) if castable(item))
        elif castable(x):
            castables.append(x)
    return castables
