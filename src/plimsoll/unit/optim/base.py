"""How the learning rate's factors come into torch's own optimizers.

A group's `lr` stays what the user or a scheduler wrote there, whichever scheduler it is: also one that writes absolute
values (OneCycleLR, `group["lr"] = ...`) or has a floor. The factor stands beside it, and the two are multiplied only
while torch's own step runs.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from plimsoll.errors import ArgumentError, StateError
from plimsoll.unit.optim.groups import Group, Kinds, Parameters, groups_from, kinds_from, split


class UnitOptimizer(torch.optim.Optimizer):
    """What `SGD`, `Adam` and `AdamW` have in common; it stands before torch's optimizer among their bases."""

    def _prepared(
        self,
        params: Parameters,
        lr: Any,
        weight_decay: float,
        model: nn.Module | None,
        plain: bool | Sequence[str],
        independent: bool,
    ) -> list[Group]:
        """The groups for torch's constructor."""
        operation = type(self).__name__
        if isinstance(params, nn.Module):
            model = params if model is None else model
        kinds = kinds_from(operation, model, plain)
        found = [part for group in groups_from(operation, params) for part in split(kinds, group)]
        for group in found:
            _note(operation, group, {"lr": lr, "weight_decay": weight_decay}, independent)
        return found

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group; its parameters are of the kind that it states (kind="plain": of none)."""
        if "lr_factor" in param_group:
            super().add_param_group(param_group)
            return
        operation = type(self).__name__
        kinds = Kinds(operation=operation, names={}, traits={}, plain=False)
        independent = bool(self.defaults.get("independent_weight_decay", False))
        for group in split(kinds, param_group):
            _note(operation, group, self.defaults, independent)
            super().add_param_group(group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of torch's optimizer, each group's learning rate multiplied by its factor."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        kept = [(group["lr"], group["weight_decay"]) for group in self.param_groups]
        try:
            for group in self.param_groups:
                _scale(group)
            self._torch_step()
        finally:
            for group, (lr, decay) in zip(self.param_groups, kept, strict=True):
                group["lr"], group["weight_decay"] = lr, decay
        return loss

    @abstractmethod
    def _torch_step(self) -> None:
        """The step of torch's class, without its hooks."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what an optimizer of the same model saved; one whose factors differ is refused."""
        mine = [group["lr_factor"] for group in self.param_groups]
        saved = [group.get("lr_factor") for group in cast("list[Group]", state_dict["param_groups"])]
        if saved != mine:
            raise StateError(
                f"{type(self).__name__}.load_state_dict: expected the factors of this model's groups, {mine}; got "
                f"{saved}. Load the state of an optimizer of plimsoll.unit for a model of the same width and depth."
            )
        super().load_state_dict(state_dict)


def unhooked(optimizer: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The class's step without the hooks that torch wraps it in when the first of its optimizers is made.

    They run around our own step already, and would run twice.
    """
    step: Any = optimizer.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _scale(group: Group) -> None:
    """Sets what torch's step is to use; independent decay is divided by what torch multiplies it with."""
    factor = group["lr_factor"]
    group["lr"] = group["lr"] * factor
    if group["independent_weight_decay"] and group["weight_decay"]:
        group["weight_decay"] = group["weight_decay"] / (factor * group["reference_lr"])


def _note(operation: str, group: Group, defaults: Group, independent: bool) -> None:
    """Notes what independent decay is relative to."""
    lr, decay = (group.get(name, defaults[name]) for name in ("lr", "weight_decay"))
    group["reference_lr"], group["independent_weight_decay"] = float(lr), independent
    if independent and decay and not group["reference_lr"] > 0:
        raise ArgumentError(
            f"{operation}: expected lr above 0, which independent weight decay is relative to; got lr={lr}. Give the "
            "highest learning rate of the schedule, and let a scheduler begin lower."
        )
