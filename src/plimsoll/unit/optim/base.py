"""Base of the optimizers: the factors of learning rates in torch's own optimizers."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from plimsoll.errors import ArgumentError, StateError
from plimsoll.unit.optim.groups import Group, ParameterKinds, Parameters, groups_from, kinds_from, split


class UnitOptimizer(torch.optim.Optimizer):
    """Base of `SGD`, `Adam` and `AdamW`, placed before torch's optimizer."""

    def _prepared(
        self,
        params: Parameters,
        lr: Any,
        weight_decay: float,
        model: nn.Module | None,
        plain: bool | Sequence[str],
        independent: bool,
    ) -> list[Group]:
        """Return the groups for torch's constructor."""
        operation = type(self).__name__
        if isinstance(params, nn.Module):
            model = params if model is None else model
        kinds = kinds_from(operation, model, plain)
        groups = [part for group in groups_from(operation, params) for part in split(kinds, group)]
        for group in groups:
            _note(operation, group, {"lr": lr, "weight_decay": weight_decay}, independent)
        return groups

    def add_param_group(self, param_group: Group) -> None:
        """Add a group with the parameters' kind in "kind", or "plain" for none."""
        if "lr_factor" in param_group:
            super().add_param_group(param_group)
            return
        operation = type(self).__name__
        kinds = ParameterKinds(operation=operation, names={}, traits={}, plain=False)
        independent = bool(self.defaults.get("independent_weight_decay", False))
        for group in split(kinds, param_group):
            _note(operation, group, self.defaults, independent)
            super().add_param_group(group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run torch's step with each learning rate multiplied by its factor."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        saved = [(group["lr"], group["weight_decay"]) for group in self.param_groups]
        try:
            for group in self.param_groups:
                _scale(group)
            self._torch_step()
        finally:
            for group, (lr, decay) in zip(self.param_groups, saved, strict=True):
                group["lr"], group["weight_decay"] = lr, decay
        return loss

    @abstractmethod
    def _torch_step(self) -> None:
        """Run the step of torch's class, without its hooks."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an optimizer of the same model.

        Raises:
            StateError: The factors of the two optimizers differ.
        """
        own = [group["lr_factor"] for group in self.param_groups]
        saved = [group.get("lr_factor") for group in cast("list[Group]", state_dict["param_groups"])]
        if saved != own:
            raise StateError(
                f"{type(self).__name__}.load_state_dict: expected the factors of this model's groups, {own}; got "
                f"{saved}. Load the state of an optimizer of plimsoll.unit for a model of the same width and depth."
            )
        super().load_state_dict(state_dict)


def unhooked(optimizer: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return the class's step without its hooks."""
    # Torch wraps it in them when the first of its optimizers is made. They run around the outer step already.
    step: Any = optimizer.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


# A group's `lr` stays as the user or a scheduler wrote it. So any scheduler works, also one that writes absolute values
# (OneCycleLR, `group["lr"] = ...`) or has a floor. The factor is a separate entry, and the two are multiplied only
# while torch's own step runs.
def _scale(group: Group) -> None:
    """Set the values for torch's step, without torch's own factor of the decay."""
    factor = group["lr_factor"]
    group["lr"] = group["lr"] * factor
    if group["independent_weight_decay"] and group["weight_decay"]:
        group["weight_decay"] = group["weight_decay"] / (factor * group["reference_lr"])


def _note(operation: str, group: Group, defaults: Group, independent: bool) -> None:
    """Set the learning rate that independent decay is relative to."""
    lr, decay = (group.get(name, defaults[name]) for name in ("lr", "weight_decay"))
    group["reference_lr"], group["independent_weight_decay"] = float(lr), independent
    if independent and decay and not group["reference_lr"] > 0:
        raise ArgumentError(
            f"{operation}: expected lr above 0, which independent weight decay is relative to; got lr={lr}. Give the "
            "highest learning rate of the schedule, and let a scheduler begin lower."
        )
