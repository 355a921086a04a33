"""An operation's arguments as `locate` writes them: tensors by name, and the rest."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

Named = list[tuple[str, Tensor]]  # tensors by the names that the operation has for them


def copied(x: Tensor) -> Tensor:
    """A copy of a floating tensor; others as they are."""
    return x.detach().clone() if x.is_floating_point() or x.is_complex() else x


def flat(given: Mapping[str, Any]) -> Named:
    """The tensors among arguments; those of lists by their number too."""
    tensors: Named = []
    for name, value in given.items():
        if isinstance(value, Tensor):
            tensors.append((name, value))
        elif isinstance(value, list | tuple):
            listed = cast("Sequence[Any]", value)
            tensors += [(f"{name}[{i}]", x) for i, x in enumerate(listed) if isinstance(x, Tensor)]
    return tensors


def is_odd(value: Any) -> bool:
    """Return True for a number that is not finite."""
    return isinstance(value, float) and not math.isfinite(value)


def scalars(given: Mapping[str, Any]) -> dict[str, float | int | str]:
    """The arguments that are no tensors, as numbers or short text."""
    numbers: dict[str, float | int | str] = {}
    for name, value in given.items():
        if isinstance(value, bool | int | float):
            numbers[name] = value
        elif isinstance(value, str | torch.dtype):
            numbers[name] = str(value).removeprefix("torch.")
        elif isinstance(value, list | tuple) and all(isinstance(v, int | float) for v in cast("Sequence[Any]", value)):
            numbers[name] = str(list(cast("Sequence[Any]", value)))
    return numbers


def values_at(inputs: Iterable[tuple[str, Tensor]], out: Tensor, index: tuple[int, ...]) -> dict[str, float]:
    """The inputs' values that the output's value at the index was made of."""
    values: dict[str, float] = {}
    for name, x in inputs:
        try:
            values[name] = float(x.broadcast_to(out.shape)[index].item())
        except (RuntimeError, TypeError):
            continue
    return values
