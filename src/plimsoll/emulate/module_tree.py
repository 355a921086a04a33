"""A model's modules by their names, who calls whom, and structures of tensors in another dtype."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


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
