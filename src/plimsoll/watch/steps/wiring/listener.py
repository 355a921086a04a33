"""Listener to a training's events that hands them to the checks of its wiring.

What is wired wrongly leaves the numbers finite and plausible, so it is recorded as facts and not guessed from spectra.
The modules beside this one say what they look for. Nothing here waits for a device.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.parameters.optimizer_tensors import has_gradients, innermost, parameters_of
from plimsoll.watch.session import WatchSession, contained
from plimsoll.watch.steps.wiring.averages import Averages
from plimsoll.watch.steps.wiring.checks import REPEATS, FollowedOptimizer, OptimizerCheck, Training, TrainingCheck
from plimsoll.watch.steps.wiring.gradients import (
    CarriedGradients,
    ClearedMicroBatches,
    Clipping,
    MissingGradients,
    RoundedSums,
    ScaledGradients,
)
from plimsoll.watch.steps.wiring.kept_narrow import LostEpsilon, Moments, Roundings
from plimsoll.watch.steps.wiring.loss_graph import LossGraph
from plimsoll.watch.steps.wiring.modes import EvaluationMode, FrozenNorms, NarrowNorms
from plimsoll.watch.steps.wiring.ownership import NeverStepped, Ownership
from plimsoll.watch.steps.wiring.schedules import Schedules
from plimsoll.watch.steps.wiring.weights import ClearedStates, FirstWeights, Overwrites
from plimsoll.watch.taps.compiled_taps import is_capturing

_FEWEST = 3  # backwards by which a watch that closes may be judged

# In this order, at each event.
_TRAINING_CHECKS: tuple[type[TrainingCheck], ...] = (
    LossGraph,
    FirstWeights,
    Ownership,
    NeverStepped,
    ClearedStates,
    EvaluationMode,
    FrozenNorms,
    NarrowNorms,
    Schedules,
    Averages,
)
_OPTIMIZER_CHECKS: tuple[type[OptimizerCheck], ...] = (
    CarriedGradients,
    ScaledGradients,
    ClearedMicroBatches,
    RoundedSums,
    Clipping,
    MissingGradients,
    Overwrites,
    Roundings,
    Moments,
    LostEpsilon,
)


class Wiring(torch_hooks.TrainingEvents):
    """Listener that records how a training is wired."""

    def __init__(self, core: WatchSession, optimizers: Iterable[Any]) -> None:
        self.core = core
        self._training = Training(core)
        self._checks = [check(self._training) for check in _TRAINING_CHECKS]
        known = list(optimizers)
        if known and not [o for o in known if self._meet(o) is not None]:
            names = ", ".join(type(optimizer).__name__ for optimizer in known)
            message = f"no parameter of {names} is one of the model's"
            self._training.facts.say("foreign optimizer", message, optimizer=names)
        core.at_close.append(self._close)

    @contained
    def backward_begins(self, tensors: Any) -> None:
        """A backward begins."""
        if self._is_idle():
            return
        self._training.backward_begins(tensors)
        for optimizer, followed in list(self._training.optimizers.items()):
            followed.backward_begins()
            for check in followed.events():
                check.backward_begins(optimizer)
        for check in self._checks:
            check.backward_begins(tensors)

    @contained
    def norm_taken(self, norm: Any, tensors: int) -> None:
        """The norm of so many gradients was taken, to clip them."""
        if self._is_idle():
            return
        self._training.norms.append(tensors)
        if self._training.since_step:
            for followed in list(self._training.optimizers.values()):
                for check in followed.events():
                    check.norm_taken()

    @contained
    def backward_ends(self) -> None:
        """A backward has ended."""
        if self._is_idle():
            return
        for followed in list(self._training.optimizers.values()):
            followed.backward_ends()
            for check in followed.events():
                check.backward_ends()
        for check in self._checks:
            check.backward_ends()

    @contained
    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer's step is called."""
        followed = None if self._is_idle() else self._meet(optimizer)
        if followed is None:
            return
        followed.had_gradients = has_gradients(optimizer)
        for check in self._checks:
            check.step_begins(optimizer, followed)
        for check in followed.events():
            check.step_begins(optimizer)

    @contained
    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer's step has returned."""
        training = self._training
        followed = training.optimizers.get(optimizer)
        if followed is None or self._is_idle():
            return
        followed.steps += 1
        training.steps = max(training.steps, followed.steps)
        for other in list(training.optimizers.values()):
            for check in other.checks if other is not followed else ():
                check.other_steps()
        for check in followed.events():
            check.step_ends(optimizer)
        followed.step_ends()
        training.step_ends()
        for check in self._checks:
            check.step_ends(optimizer, followed)

    @contained
    def loss_scaled(self, scaler: Any, loss: Any, scaled: Any) -> None:
        """A scaler has scaled a loss."""
        enabled = getattr(scaler, "is_enabled", None)
        if callable(enabled) and not enabled():
            return
        self._training.loss_scaled(scaler, scaled)
        scale = self._training.scale()
        if isinstance(loss, Tensor) and scale is not None and not self._is_idle():
            for check in self._checks:
                check.loss_scaled(loss, scale)

    @contained
    def scaler_step_ends(self, scaler: Any, optimizer: Any) -> None:
        """A scaler's step has returned."""
        followed = self._training.optimizers.get(innermost(optimizer))
        if followed is not None:
            for check in followed.checks:
                check.scaler_step_ends()
            followed.steps += not followed.steps  # a step that a scaler skips is one
            self._training.steps = max(self._training.steps, followed.steps)

    @contained
    def plateau_steps(self, scheduler: Any, metric: Any, lowered: bool) -> None:
        """A `ReduceLROnPlateau` has taken a metric."""
        followed = None if self._is_idle() else self._meet(innermost(scheduler.optimizer))
        if followed is None:
            return
        for check in self._checks:
            check.plateau_steps(scheduler, metric, followed, lowered=lowered)

    @contained
    def schedule_made(self, scheduler: Any) -> None:
        """A schedule of learning rates was made."""
        followed = None if self._is_idle() else self._meet(innermost(scheduler.optimizer))
        if followed is None:
            return
        for check in self._checks:
            check.schedule_made(scheduler, followed)

    @contained
    def _close(self) -> None:
        for check in self._checks if self._training.backwards >= _FEWEST else ():
            check.closes()

    def _is_idle(self) -> bool:
        core = self.core
        return not core.open or core.muted or core.is_elsewhere() or WatchSession.repeating or is_capturing()

    def _meet(self, optimizer: Any) -> FollowedOptimizer | None:
        """Return the optimizer's state; None if it has none of the model's parameters."""
        training = self._training
        followed = training.optimizers.get(optimizer)
        if followed is None and training.foreign.get(optimizer, 0) >= REPEATS:
            return None
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if followed is not None and followed.size == size:
            return followed
        model = training.model()
        mine = {id(p) for p in model.parameters()} if model is not None else set[int]()
        params = [p for p in parameters_of(optimizer) if id(p) in mine]
        if not params:
            training.foreign[optimizer] = training.foreign.get(optimizer, 0) + 1
            return None
        if followed is None:
            followed = training.optimizers[optimizer] = FollowedOptimizer(optimizer)
            followed.checks = [check(training, followed) for check in _OPTIMIZER_CHECKS]
        followed.size = size
        for check in self._checks:
            check.optimizer_met(followed, params)
        return followed
