"""Base classes of the checks of a training's wiring, and the state that they share.

A check overrides the methods of the events that it needs. Once it is sure, it records a fact: an event of kind
"wiring", which the rules read. `listener` calls the checks, and lists them.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from plimsoll.kernels.device_value import number, resolved
from plimsoll.runs import Event, Record
from plimsoll.watch.names import clean
from plimsoll.watch.parameters.optimizer_tensors import has_unscaled, parameters_of
from plimsoll.watch.session import WatchSession
from plimsoll.watch.steps.wiring.followed import FollowedGradient

REPEATS = 3  # steps or looks on end: what holds at all of these is no chance

_FIRST_STEPS, _PERIOD, _LOOK = 64, 64, 8  # in which they are followed: the first ones, then the first of each period


class Fact(NamedTuple):
    """A fact on a training."""

    name: str
    message: str
    details: Mapping[str, object]


class Facts:
    """Recorder of the facts on one training."""

    def __init__(self, core: WatchSession) -> None:
        self._core = core
        self._recorded: set[str] = set()

    def has(self, fact: str) -> bool:
        """Return True if a fact was recorded."""
        return fact in self._recorded

    def say(self, fact: str, message: str, *, warn: bool = False, key: str = "", **details: object) -> None:
        """Record a fact, once for each key. Default: the key is the fact itself."""
        if (key or fact) not in self._recorded:
            self._recorded.add(key or fact)
            self._core.say("wiring", message, once=None, warn=warn, fact=fact, **details)

    def later(
        self, fact: str, message: str, holds: Callable[[], bool], key: str = "", *, optimizer: str = "",
        **details: object,
    ) -> None:  # fmt: skip
        """Record a fact on the background thread if `holds` returns True there. It is called once for each key."""
        if (key or fact) not in self._recorded:
            self._recorded.add(key or fact)
            found = Fact(fact, message, {"optimizer": optimizer, **details})
            self.read(lambda: [found] if holds() else [])

    def read(
        self, read: Callable[[], Iterable[Fact]], *, once: bool = False, size_bytes: int = 400, numbers: bool = False
    ) -> None:
        """Record the facts that `read` returns on the background thread, where it may wait for a device.

        Args:
            read: Called there.
            once: Leave out facts that were recorded before.
            size_bytes: Memory that `read` keeps until it has run.
            numbers: Whether it is queued with the scalars, which have room of their own.
        """
        step = self._core.step

        def produce() -> list[Record]:
            facts = [fact for fact in read() if not (once and fact.name in self._recorded)]
            self._recorded.update(fact.name for fact in facts)
            return [
                Event(step=step, kind="wiring", message=message, details={"fact": name, **details})
                for name, message, details in facts
            ]

        self._core.writer.submit(produce, size_bytes, numbers=numbers)


class FollowedOptimizer:
    """One optimizer that has parameters of the model, from step to step.

    Gradients are followed by identity and version: torch raises a tensor's version with every change in place. Only a
    few parameters are followed, in the first steps and then in some of every 64, since errors last.
    """

    def __init__(self, optimizer: Any) -> None:
        self.name = type(optimizer).__name__
        self.size = 0  # parameters in its groups
        self.steps = 0
        self.had_gradients = False  # when the step began
        own: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        places = sorted({0, len(own) // 2, len(own) - 1}) if own else []
        self.weights = [weakref.ref(own[place]) for place in places]
        self.gradients = [FollowedGradient(own[place]) for place in places]
        self.follows = True  # in this step
        self.measures = False  # sizes of the gradients that a backward finds
        self.reached = False  # by the last backward, in a step in which it is followed
        self.checks: list[OptimizerCheck] = []

    def backward_begins(self) -> None:
        """A backward begins."""
        for gradient in self.gradients if self.follows else ():
            gradient.backward_begins(self.measures)

    def backward_ends(self) -> None:
        """A backward has ended."""
        reached = [gradient.backward_ends() for gradient in self.gradients if self.follows]
        self.reached = any(reached)

    def step_ends(self) -> None:
        """Prepare for the next step."""
        if self.follows:
            for gradient in self.gradients:
                gradient.step_ends()
        before, self.follows = self.follows, self.steps < _FIRST_STEPS or self.steps % _PERIOD < _LOOK
        if self.follows and not before:
            self.gradients = [FollowedGradient(p) for old in self.gradients if (p := old.param()) is not None]

    def events(self) -> "list[OptimizerCheck]":
        """Return the checks that this step's events concern."""
        return [check for check in self.checks if self.follows or not check.only_followed]


class Training:
    """State of a watched training that its checks share."""

    def __init__(self, core: WatchSession) -> None:
        self.core = core
        self.facts = Facts(core)
        self.optimizers: weakref.WeakKeyDictionary[Any, FollowedOptimizer] = weakref.WeakKeyDictionary()
        self.foreign: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # how often looked at
        self.backwards = 0
        self.since_step = 0  # backwards since any optimizer has stepped
        self.steps = 0  # the most of any optimizer, which may be gone when the watch closes
        self.is_of_scaled = False  # the backward that runs is of a loss that a scaler has scaled
        self.divisors: list[int] = []  # whole numbers that the loss was divided by
        self.norms: list[int] = []  # of how many gradients each norm since the last step was taken
        self._scaler: weakref.ref[Any] | None = None
        self._scaled: weakref.ref[Tensor] | None = None  # the loss that was scaled last

    def backward_begins(self, tensors: Any) -> None:
        """A backward begins, of these tensors."""
        self.backwards += 1
        self.since_step += 1
        loss = None if self._scaled is None else self._scaled()
        self.is_of_scaled = loss is not None and tensors is loss

    def step_ends(self) -> None:
        """An optimizer's step has returned."""
        self.since_step = 0
        self.norms = []

    def loss_scaled(self, scaler: Any, scaled: Any) -> None:
        """A scaler has scaled a loss."""
        self._scaler = weakref.ref(scaler)
        self._scaled = weakref.ref(scaled) if isinstance(scaled, Tensor) else None

    def scale(self) -> Tensor | None:
        """Return the loss scale of the scaler that scaled last."""
        scale = getattr(self._scaler and self._scaler(), "_scale", None)
        return scale if isinstance(scale, Tensor) else None

    def scales(self) -> Callable[[], bool]:
        """Return a function that tests the loss scale against 1 once it is known."""
        scale = self.scale()
        value = None if scale is None else number(scale.detach())
        return lambda: value is None or resolved(value) != 1.0

    def has_unscaled(self, optimizer: Any) -> bool:
        """Return True if the scaler has unscaled the optimizer's gradients, and has not stepped it since."""
        return has_unscaled(self._scaler and self._scaler(), optimizer)

    def model(self) -> nn.Module | None:
        """Return the model; None once it is gone."""
        return self.core.model()

    def names(self) -> dict[int, str]:
        """Return the names of the model's parameters, by identity."""
        model = self.core.model()
        return {} if model is None else {id(p): clean(name) for name, p in model.named_parameters()}

    def owned(self) -> set[int]:
        """Return the parameters of all optimizers, by identity."""
        return {id(p) for optimizer in [*self.optimizers, *self.foreign] for p in parameters_of(optimizer)}


class TrainingCheck:
    """Check of a training as a whole. Each method is an event, and does nothing by default."""

    def __init__(self, training: Training) -> None:
        self.training, self.facts, self.core = training, training.facts, training.core

    def backward_begins(self, tensors: Any) -> None:
        """A backward begins, of these tensors."""

    def backward_ends(self) -> None:
        """A backward has ended."""

    def loss_scaled(self, loss: Tensor, scale: Tensor) -> None:
        """A loss was scaled."""

    def optimizer_met(self, followed: FollowedOptimizer, params: list[Tensor]) -> None:
        """An optimizer is seen for the first time, or has other parameters, these of the model."""

    def step_begins(self, optimizer: Any, followed: FollowedOptimizer) -> None:
        """An optimizer's step is called."""

    def step_ends(self, optimizer: Any, followed: FollowedOptimizer) -> None:
        """An optimizer's step has returned."""

    def schedule_made(self, scheduler: Any, followed: FollowedOptimizer) -> None:
        """A schedule of learning rates was made."""

    def plateau_steps(self, scheduler: Any, metric: object, followed: FollowedOptimizer, *, lowered: bool) -> None:
        """A `ReduceLROnPlateau` has taken a metric."""

    def closes(self) -> None:
        """The watch closes: what was to be judged later is judged by what there is."""


class OptimizerCheck:
    """Check of one optimizer's steps. Each method is an event, and does nothing by default."""

    only_followed: ClassVar[bool] = True  # events of steps in which the optimizer is not followed are left out

    def __init__(self, training: Training, followed: FollowedOptimizer) -> None:
        self.training, self.facts, self.followed = training, training.facts, followed

    def backward_begins(self, optimizer: Any) -> None:
        """A backward begins."""

    def norm_taken(self) -> None:
        """A norm of gradients was taken, to clip them, after a backward."""

    def backward_ends(self) -> None:
        """A backward has ended."""

    def step_begins(self, optimizer: Any) -> None:
        """The optimizer's step begins."""

    def step_ends(self, optimizer: Any) -> None:
        """The optimizer's step has returned."""

    def scaler_step_ends(self) -> None:
        """A scaler's step of the optimizer has returned."""

    def other_steps(self) -> None:
        """Another optimizer has stepped."""


def listed(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
