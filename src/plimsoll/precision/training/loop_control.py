"""Control of a loop between steps: callbacks, skipping, another precision.

`Loop` derives from the class here, and a guard is its main user.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.errors import StateError
from plimsoll.precision.levels.active_level import ActiveLevel
from plimsoll.precision.levels.catalogue import Precision, Schedule, schedule_of
from plimsoll.precision.levels.policy import Policy
from plimsoll.precision.training.optimizer_step import Stepped
from plimsoll.precision.training.plan_scaler import begin_at, scaler_of
from plimsoll.scaling.step import StepOutcome

Optimizer = torch.optim.Optimizer


class DropsGradients:
    """Optimizer hook that removes gradients, so that a step changes nothing."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        owned = {id(p) for optimizer in optimizers for p in _parameters(optimizer)}
        self._masked = [p for p in model.parameters() if id(p) not in owned]
        self._handles = [optimizer.register_step_pre_hook(self._drop) for optimizer in optimizers]

    def remove(self) -> None:
        """Remove the hooks: steps work as before."""
        while self._handles:
            self._handles.pop().remove()

    # Each optimizer drops only its own gradients, so a watch still sees those of the others. With master weights, the
    # gradients of the model's 16-bit weights are dropped too.
    def _drop(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        for parameter in (*_parameters(optimizer), *self._masked):
            parameter.grad = None


def _parameters(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class LoopControl(ABC):
    """Base class of `Loop`: the part that others use to control it."""

    _model: nn.Module
    _root: nn.Module
    _given: tuple[Optimizer, ...]
    _schedule: Schedule
    _policy: Policy
    _applied: ActiveLevel
    _made_scaler: Any
    _given_scaler: Any
    _step_index: int
    _micro: int
    _inside: str | None

    _after_steps: tuple[Callable[[], None], ...] = ()
    _skips: str | None = None

    def after_each_step(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call a function at the end of each step; return the function that stops this.

        An exception of the function leaves `step`, whose work is done by then.
        """
        self._after_steps = (*self._after_steps, call)
        loop = weakref.ref(self)  # a weak reference: the returned function must not keep the loop and its model alive

        def take_back() -> None:
            if (known := loop()) is not None:
                known._after_steps = tuple(other for other in known._after_steps if other is not call)  # noqa: SLF001

        return take_back

    def skip_next(self, reason: str) -> None:
        """Make the next step change nothing.

        Its gradients are dropped, and schedulers do not advance. Its outcome reports that it did not step, with the
        reason. The loss scale is updated as after any step.
        """
        self._check_between("skip_next")
        self._skips = reason

    def change(self, precision: Precision | None = None, *, policy: Policy | None = None) -> None:
        """Change the precision or policy from the next step on.

        This overrules the schedule. Values that both levels keep in FP32 pass exactly. The change is not part of
        `state_dict`: to resume, prepare with the new precision.

        Raises:
            ArgumentError: The precision or policy cannot be applied. Nothing has changed then.
        """
        self._check_between("change")
        before = self._schedule, self._policy
        self._schedule = self._schedule if precision is None else schedule_of(precision)
        self._policy = self._policy if policy is None else policy
        try:
            self._check_stages()
            if self._given_scaler is None and self._made_scaler is None:
                self._made_scaler = scaler_of(self._model, self._schedule)
        except Exception:
            self._schedule, self._policy = before
            raise
        self._apply_again(*before)
        if precision is not None:
            begin_at(self._made_scaler, self._root, self._applied.stage)

    def _apply_again(self, schedule: Schedule, policy: Policy) -> None:
        """Apply the new level or policy; restore the old one if that fails."""
        self._applied.take_back()
        try:
            self._applied = ActiveLevel(self._model, self._given, self._schedule.at(self._step_index), self._policy)
        except Exception:
            self._schedule, self._policy = schedule, policy
            self._applied = ActiveLevel(self._model, self._given, schedule.at(self._step_index), policy)
            raise

    @abstractmethod
    def _check_stages(self) -> None: ...

    @abstractmethod
    def _check_open(self, operation: str) -> None: ...

    @abstractmethod
    def _finish(self) -> Stepped: ...

    def _finish_skipping(self) -> Stepped:
        """Run the end of a step in which the optimizers find no gradients."""
        reason, self._skips = self._skips, None
        drops = DropsGradients(self._root, self._given)
        try:
            stepped = self._finish()
        finally:
            drops.remove()
        scale: float | Tensor = stepped.outcome.scale
        return Stepped(StepOutcome(stepped=False, scale=scale, reason=reason), stepped.norm)

    def _check_between(self, operation: str) -> None:
        self._check_open(operation)
        if self._inside is not None or self._micro:
            place = f"inside {self._inside}" if self._inside is not None else f"after {self._micro} micro-batches"
            raise StateError(f"{operation}: expected a call between two steps; got one {place}. Call it after step.")
