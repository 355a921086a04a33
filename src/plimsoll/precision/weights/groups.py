"""Edits of a torch optimizer's groups and state: replace parameters, or restrict a step to some of them."""

from collections.abc import Generator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plimsoll.errors import ArgumentError


def put_state(optimizer: Optimizer, old: Tensor, new: Tensor, dtype: torch.dtype | None = torch.float32) -> None:
    """Replace `old` by `new` in its group and in the state; state in old's dtype is cast to `dtype`."""
    for group in optimizer.param_groups:
        group["params"][:] = [new if p is old else p for p in group["params"]]  # LBFGS keeps a reference to the list
    if old not in optimizer.state:
        return
    state: dict[str, Any] = optimizer.state.pop(old)
    narrow = {name for name, x in state.items() if isinstance(x, Tensor) and x.dtype == old.dtype}
    for name in narrow if dtype is not None else ():
        state[name] = state[name].to(dtype)
    if isinstance(optimizer, torch.optim.Adagrad) and float(state["step"]) == 0:
        # Adagrad creates its state with the optimizer, where it was rounded to 16 bits: set it again.
        start = next(g for g in optimizer.param_groups if any(p is new for p in g["params"]))
        state["sum"].fill_(start["initial_accumulator_value"])
    optimizer.state[new] = state


@contextmanager
def swapped(optimizer: Optimizer, others: Mapping[int, Tensor]) -> Generator[None]:
    """Inside, the groups contain other parameters in place of those with the given ids."""
    lists: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
    for group, params in zip(optimizer.param_groups, lists, strict=True):
        group["params"] = [others.get(id(p), p) for p in params]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = params


@contextmanager
def only(operation: str, optimizer: Optimizer, chosen: Set[int]) -> Generator[None]:
    """Inside, the optimizer has only the parameters with these ids; its groups must not change meanwhile."""
    groups = optimizer.param_groups
    lists: list[list[Tensor]] = [group["params"] for group in groups]
    before = [_settings(group) for group in groups]
    for group, params in zip(groups, lists, strict=True):
        group["params"] = [p for p in params if id(p) in chosen]
    try:
        optimizer.param_groups = [group for group in groups if group["params"]]
        yield
    finally:
        optimizer.param_groups = groups
        for group, params in zip(groups, lists, strict=True):
            group["params"] = params
    for old, group in zip(before, groups, strict=True):
        _refuse_counting(operation, optimizer, old, _settings(group))


def bare_step(optimizer: Optimizer, *args: Any) -> Any:
    """Run the optimizer's step without its hooks, and return the result."""
    step: Any = type(optimizer).step
    return (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer, *args)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a group except its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def _refuse_counting(operation: str, optimizer: Optimizer, old: dict[str, Any], new: dict[str, Any]) -> None:
    # A tensor (a learning rate) is compared by identity: comparing its value would synchronize with the device.
    other = [name for name in {*old, *new} if old.get(name) is not new.get(name)]
    changed = sorted(name for name in other if isinstance(new.get(name), Tensor) or old.get(name) != new.get(name))
    if changed:
        raise ArgumentError(
            f"{operation}.step: expected an optimizer whose groups do not change in its step, since it steps some "
            f"parameters at a time; got {type(optimizer).__name__}, which changed {', '.join(changed)}. Use "
            "MasterWeights(optimizer, compact=False)."
        )
