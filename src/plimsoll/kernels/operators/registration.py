"""Registration of operators: without a gradient, and with rules for `torch.func.vmap`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plimsoll.errors import UnsupportedTensorError


def without_autograd(library: torch.library.Library, name: str, implementation: Callable[..., Any]) -> None:
    """Register an operator's implementation, whose results require no gradient.

    Those of the arguments do not matter.
    """
    # Without a kernel for autograd, torch's fallback gives floating-point results a gradient function that only warns.
    # Falling through avoids that. Autograd is then still on inside the implementation, and would record what a backend
    # computes with torch's operators: `no_grad` keeps it from that.
    library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    library.impl(name, torch.no_grad()(implementation), "CompositeExplicitAutograd")


# -- rules for `torch.func.vmap`: the batch becomes a dimension, or rows, of a call ------------------------------------

# With stochastic rounding each example of a batch draws noise of its own, by its place in the batch.

_ops = torch.ops.plimsoll


def _front(info: Any, dims: tuple[Any, ...], arguments: tuple[Any, ...], operation: str) -> Tensor:
    """The batched tensor with the batch first; scales and keys may not be batched."""
    for dim, value in zip(dims[1:], arguments[1:], strict=True):
        if isinstance(value, Tensor) and dim is not None:
            raise UnsupportedTensorError(
                f"{operation}: expected one scale and one key for the whole batch under vmap; got one for each of "
                f"{info.batch_size} examples. Multiply before and divide after instead."
            )
    return arguments[0].movedim(dims[0], 0)


def _cast(info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
    return _ops.cast(_front(info, dims, arguments, "cast"), *arguments[1:]), 0


def _pack(info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
    x = _front(info, dims, arguments, "pack")
    return _ops.pack(x.flatten(0, 1), *arguments[1:]).unflatten(0, x.shape[:2]), 0


def _absmax(_: Any, dims: tuple[Any, ...], x: Tensor) -> tuple[Tensor, int]:
    return torch.stack([_ops.absmax(example) for example in x.unbind(dims[0])]), 0


def _over_blocks(operation: Callable[..., Any]) -> Callable[..., Any]:
    def rule(info: Any, dims: tuple[Any, ...], *arguments: Any) -> Any:
        x, spec, over, *rest = arguments
        if dims[2] is not None:  # each example has a tensor scale of its own
            examples = zip(x.unbind(dims[0]), over.unbind(dims[2]), strict=True)
            results = [operation(example, spec, scale, *rest) for example, scale in examples]
            if isinstance(results[0], Tensor):
                return torch.stack(results), 0
            return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0, 0)
        x = _front(info, dims, arguments, "cast")
        result = operation(x.flatten(0, 1), spec, over, *rest)
        if isinstance(result, Tensor):
            return result.unflatten(0, x.shape[:2]), 0
        return tuple(part.unflatten(0, x.shape[:2]) for part in result), (0, 0)

    return rule


def register_vmap(library: torch.library.Library) -> None:
    """Registers the rules with the operators' library."""
    rules = {
        "cast": _cast,
        "pack": _pack,
        "absmax": _absmax,
        "block_cast": _over_blocks(_ops.block_cast),
        "block_pack": _over_blocks(_ops.block_pack),
    }
    for name, rule in rules.items():
        torch.library.register_vmap(f"plimsoll::{name}", rule, lib=library)
