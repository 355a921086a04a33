"""Listener that sends a training's events to the checks of its wiring.

A wiring error leaves finite, plausible numbers, so the checks record facts and guess nothing from spectra. Each module
of this folder lists what its checks look for. Nothing here waits for a device.
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
    AddedToUnscaled,
    CarriedGradients,
    ClearedMicroBatches,
    EarlyClipping,
    EmptyClipping,
    MissingGradients,
    RoundedSums,
    ScaledSteps,
)
from plimsoll.watch.steps.wiring.kept_narrow import LostEpsilon, Moments, NarrowProducts, Roundings
from plimsoll.watch.steps.wiring.loss_graph import LossGraph
from plimsoll.watch.steps.wiring.modes import EvaluationMode, FrozenNorms, NarrowNorms, RowsAlike
from plimsoll.watch.steps.wiring.operations import Operations
from plimsoll.watch.steps.wiring.ownership import NeverStepped, OtherTensors, Ownership
from plimsoll.watch.steps.wiring.schedules import Schedules
from plimsoll.watch.steps.wiring.weights import ClearedStates, FirstDraws, FirstWeights, FrozenDraws, Overwrites
from plimsoll.watch.taps.compiled_taps import is_capturing

_FEWEST = 3  # backwards without which nothing is judged when the watch closes

# When a step begins, the checks of the training come first, at all other events those of the optimizers. So
# `LossGraph` has set the divisors of the loss before `ClearedMicroBatches` reads them.
_TRAINING_CHECKS: tuple[type[TrainingCheck], ...] = (
    LossGraph,
    FirstWeights,
    FirstDraws,
    FrozenDraws,
    Ownership,
    OtherTensors,
    NeverStepped,
    ClearedStates,
    EvaluationMode,
    FrozenNorms,
    NarrowNorms,
    Schedules,
    Averages,
    Operations,
)
_OPTIMIZER_CHECKS: tuple[type[OptimizerCheck], ...] = (
    CarriedGradients,
    ScaledSteps,
    AddedToUnscaled,
    ClearedMicroBatches,
    RoundedSums,
    EarlyClipping,
    EmptyClipping,
    MissingGradients,
    Overwrites,
    Roundings,
    Moments,
    LostEpsilon,
    NarrowProducts,
)


class Wiring(torch_hooks.TrainingEvents):
    """Listener that records how a training is wired."""

    def __init__(self, session: WatchSession, optimizers: Iterable[Any]) -> None:
        self.session = session
        self._training = Training(session)
        self._checks = [check(self._training) for check in _TRAINING_CHECKS]
        given = list(optimizers)
        followed = [self._follow(optimizer) for optimizer in given]
        model = session.model()
        is_trained = model is not None and any(p.requires_grad for p in model.parameters())
        if given and is_trained and not any(followed):
            names = ", ".join(type(optimizer).__name__ for optimizer in given)
            message = f"no parameter of {names} is one of the model's"
            self._training.facts.record("foreign optimizer", message, optimizer=names)
        self.rows = RowsAlike(self._training)  # the taps call it: outputs are no event of torch's
        session.at_close.append(self._close)

    @contained
    def backward_begins(self, tensors: Any) -> None:
        """A backward begins."""
        if self._is_idle():
            return
        self._training.backward_begins(tensors)
        for optimizer, followed in list(self._training.optimizers.items()):
            followed.backward_begins()
            for check in followed.active_checks():
                check.backward_begins(optimizer)
        for check in self._checks:
            check.backward_begins(tensors)

    @contained
    def norm_taken(self, norm: Any, tensors: int) -> None:
        """The norm of so many gradients was taken, to clip them."""
        if self._is_idle():
            return
        self._training.norms.append(tensors)
        if self._training.backwards_since_step:
            for followed in list(self._training.optimizers.values()):
                for check in followed.active_checks():
                    check.norm_taken()

    @contained
    def backward_ends(self) -> None:
        """A backward has ended."""
        if self._is_idle():
            return
        for followed in list(self._training.optimizers.values()):
            followed.backward_ends()
            for check in followed.active_checks():
                check.backward_ends()
        for check in self._checks:
            check.backward_ends()

    @contained
    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer's step is called."""
        followed = None if self._is_idle() else self._follow(optimizer)
        if followed is None:
            return
        followed.had_gradients = has_gradients(optimizer)
        for check in self._checks:
            check.step_begins(optimizer, followed)
        for check in followed.active_checks():
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
        others = [other for other in list(training.optimizers.values()) if other is not followed]
        for check in (check for other in others for check in other.checks):
            check.other_steps()
        for check in followed.active_checks():
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
            followed.steps = max(followed.steps, 1)  # it is in use, although the scaler may have skipped the step
            self._training.steps = max(self._training.steps, followed.steps)

    @contained
    def plateau_steps(self, scheduler: Any, metric: Any, lowered: bool) -> None:
        """A `ReduceLROnPlateau` has taken a metric."""
        followed = None if self._is_idle() else self._follow(innermost(scheduler.optimizer))
        if followed is None:
            return
        for check in self._checks:
            check.plateau_steps(scheduler, metric, followed, lowered=lowered)

    @contained
    def schedule_made(self, scheduler: Any) -> None:
        """A schedule of learning rates was made."""
        followed = None if self._is_idle() else self._follow(innermost(scheduler.optimizer))
        if followed is None:
            return
        for check in self._checks:
            check.schedule_made(scheduler, followed)

    @contained
    def _close(self) -> None:
        if self._training.backwards >= _FEWEST:
            for check in self._checks:
                check.closes()

    def _is_idle(self) -> bool:
        session = self.session
        return not session.open or session.muted or session.is_elsewhere() or WatchSession.repeating or is_capturing()

    def _follow(self, optimizer: Any) -> FollowedOptimizer | None:
        """Return the optimizer's state, made when it is seen first; None if it has none of the model's parameters."""
        training = self._training
        followed = training.optimizers.get(optimizer)
        if followed is None and training.foreign.get(optimizer, 0) >= REPEATS:
            return None
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if followed is not None and followed.size == size:
            return followed
        given: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        model = training.model()
        of_model = {id(p) for p in model.parameters()} if model is not None else set[int]()
        # Of masters `parameters_of` has the model's weights.
        pairs = [pair for pair in zip(given, parameters_of(optimizer), strict=True) if id(pair[1]) in of_model]
        if not pairs:
            training.foreign[optimizer] = training.foreign.get(optimizer, 0) + 1
            return None
        if followed is None:
            followed = FollowedOptimizer(optimizer, [p for p, _ in pairs if p.requires_grad])
            followed.checks = [check(training, followed) for check in _OPTIMIZER_CHECKS]
            training.optimizers[optimizer] = followed
        followed.size = size
        for check in self._checks:
            check.optimizer_met(followed, [weight for _, weight in pairs])
        return followed
