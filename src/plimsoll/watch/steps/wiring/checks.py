"""Base classes of the checks of a training's wiring, and the state that they share.

A check overrides the methods of the events that it needs. Once it is sure, it records a fact: an event of kind
"wiring", which the rules read. `listener` calls the checks, and lists them.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from plimsoll.kernels.device_value import DeviceValue, number, resolved
from plimsoll.runs import Event, Record
from plimsoll.watch.names import clean
from plimsoll.watch.parameters.optimizer_tensors import has_unscaled, parameters_of
from plimsoll.watch.session import WatchSession

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NORMS = (
    *BATCH_NORMS, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
REPEATS = 3  # steps or looks on end: what holds at all of these is no chance

_VALUES = 256  # of a weight or a gradient that is followed
_FIRST_STEPS, _PERIOD, _LOOK = 64, 64, 8  # in which they are followed: the first ones, then the first of each period


class Fact(NamedTuple):
    """A fact on a training."""

    name: str
    message: str
    details: Mapping[str, object]


class Facts:
    """Recorder of the facts on one training, each once."""

    def __init__(self, session: WatchSession) -> None:
        self._session = session
        self._keys: set[str] = set()  # of what was recorded, or is being decided

    def has(self, key: str) -> bool:
        """Return True if a fact was recorded under this key, or is being decided."""
        return key in self._keys

    def record(self, fact: str, message: str, *, warn: bool = False, key: str = "", **details: object) -> None:
        """Record a fact, once for each key. Default: the key is the fact itself."""
        if (key or fact) not in self._keys:
            self._keys.add(key or fact)
            self._session.say("wiring", message, once=None, warn=warn, fact=fact, **details)

    def record_if(
        self, fact: str, message: str, holds: Callable[[], bool], key: str = "", *, optimizer: str = "",
        **details: object,
    ) -> None:  # fmt: skip
        """Record a fact on the background thread if `holds` returns True there. It is called once for each key.

        Default: the key is the fact with the optimizer's name. What does not hold at first is not looked at again.
        """
        key = key or f"{fact} {optimizer}".rstrip()
        if key not in self._keys:
            self._keys.add(key)
            found = Fact(fact, message, {"optimizer": optimizer, **details})
            self.record_from(lambda: [found] if holds() else [])

    def record_from(
        self, read: Callable[[], Iterable[Fact]], *, once: bool = False, size_bytes: int = 400, numbers: bool = False
    ) -> None:
        """Record the facts that `read` returns on the background thread, where it may wait for a device.

        Args:
            read: Called there.
            once: Leave out facts that were recorded before.
            size_bytes: Memory that `read` keeps until it has run.
            numbers: Whether it is queued with the scalars, which have room of their own.
        """
        step = self._session.step

        def produce() -> list[Record]:
            facts = [fact for fact in read() if not (once and fact.name in self._keys)]
            self._keys.update(fact.name for fact in facts)
            return [
                Event(step=step, kind="wiring", message=message, details={"fact": name, **details})
                for name, message, details in facts
            ]

        self._session.writer.submit(produce, size_bytes, numbers=numbers)


class FollowedGradient:
    """A parameter's gradient, from one step of its optimizer to the next."""

    __slots__ = (
        "carried",
        "found",
        "found_version",
        "kept",
        "kept_version",
        "left",
        "left_version",
        "param",
        "size",
    )

    # Tensors and versions: -1 where there is no gradient.
    def __init__(self, p: Tensor) -> None:
        self.param = weakref.ref(p)
        self.kept: weakref.ref[Tensor] | None = None  # kept from the last step, and only added to since
        self.found: weakref.ref[Tensor] | None = None  # found by the last backward when it began
        self.left: weakref.ref[Tensor] | None = None  # left by it when it ended
        self.kept_version = self.found_version = self.left_version = -1
        self.carried = False  # the last backward added to the gradient that was kept
        self.size: float | DeviceValue | None = None  # largest magnitude of the kept gradient before it did

    def gradient(self) -> Tensor | None:
        """Return the gradient as it is now; None for one that has no versions."""
        p = self.param()
        g = None if p is None else p.grad
        return g if g is not None and g.layout == torch.strided and not g.is_inference() else None

    def step_ends(self) -> None:
        """Note the gradient that the step has left."""
        g = self.gradient()
        self.kept = None if g is None else weakref.ref(g)
        self.kept_version = _version(g)
        self.carried = False

    def backward_begins(self, measure: bool) -> None:
        """Note the gradient that the backward finds, and its size if `measure`."""
        g = self.gradient()
        self.found = None if g is None else weakref.ref(g)
        self.found_version = _version(g)
        same = g is not None and self.kept is not None and self.kept() is g
        if g is None or not same or self.found_version != self.kept_version:  # set to None or zero, or changed
            # Set to None, so gradients that another model's backward adds later are not carried over.
            self.kept, self.carried = None, False
        elif measure and not self.carried:
            # `.data.zero_()` leaves no other trace: the value itself is asked for, and read when it is there.
            plain = g.detach()
            self.size = number(plain.abs().amax()) if plain.numel() and not hasattr(plain, "placements") else 0.0

    def backward_ends(self) -> bool:
        """Note the gradient that the backward leaves; return True if it reached the parameter."""
        g = self.gradient()
        self.left_version = _version(g)
        if g is None:
            return False
        reached = self.left_version != self.found_version or self.found is None or self.found() is not g
        if reached and self.kept is not None and self.kept() is g:
            self.carried, self.kept_version = True, self.left_version
        self.left = weakref.ref(g)
        return reached

    def was_cleared(self) -> bool:
        """Return True if the gradient was set to None since the last backward, or to zero on a CPU."""
        g = self.gradient()
        if g is None:
            return True
        if g.device.type != "cpu" or g._version == self.left_version:  # noqa: SLF001
            return False  # looking at values on another device would wait for it
        return not g.detach().any()

    def is_as_backward_left_it(self) -> bool:
        """Return True if nothing has changed the gradient since the last backward."""
        g = self.gradient()
        left = None if self.left is None else self.left()
        return g is not None and g is left and g._version == self.left_version  # noqa: SLF001


# A tensor's version rises with every change in place. It is public in all but name.
def _version(g: Tensor | None) -> int:
    return -1 if g is None else g._version  # noqa: SLF001


class FollowedOptimizer:
    """One optimizer that has parameters of the model, from step to step.

    Gradients are followed by identity and version. Only a few parameters are followed, in the first steps and then in
    some of every 64, since errors last.

    Args:
        optimizer: The optimizer.
        params: Its parameters that are the model's, or masters of those.
    """

    def __init__(self, optimizer: Any, params: Sequence[Tensor]) -> None:
        self.name = type(optimizer).__name__
        self.size = 0  # parameters in its groups
        self.steps = 0
        self.had_gradients = False  # when the step began
        places = sorted({0, len(params) // 2, len(params) - 1}) if params else []
        self.weights = [weakref.ref(params[place]) for place in places]
        self.gradients = [FollowedGradient(params[place]) for place in places]
        self.is_followed = True  # in this step
        self.measures = False  # sizes of the gradients that a backward finds; `CarriedGradients` asks for them
        self.reached = False  # by the last backward, in a step in which it is followed
        self.checks: list[OptimizerCheck] = []

    def backward_begins(self) -> None:
        """A backward begins."""
        if self.is_followed:
            for gradient in self.gradients:
                gradient.backward_begins(self.measures)

    def backward_ends(self) -> None:
        """A backward has ended."""
        reached = [gradient.backward_ends() for gradient in self.gradients if self.is_followed]
        self.reached = any(reached)

    def step_ends(self) -> None:
        """Prepare for the next step."""
        was_followed = self.is_followed
        self.is_followed = self.steps < _FIRST_STEPS or self.steps % _PERIOD < _LOOK
        if was_followed:
            for gradient in self.gradients:
                gradient.step_ends()
        elif self.is_followed:
            self.gradients = [FollowedGradient(p) for old in self.gradients if (p := old.param()) is not None]

    def active_checks(self) -> "list[OptimizerCheck]":
        """Return the checks that look at this step."""
        return [check for check in self.checks if self.is_followed or check.looks_at_every_step]


class Training:
    """State of a watched training that its checks share."""

    def __init__(self, session: WatchSession) -> None:
        self.session = session
        self.facts = Facts(session)
        self.optimizers: weakref.WeakKeyDictionary[Any, FollowedOptimizer] = weakref.WeakKeyDictionary()
        self.foreign: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # how often looked at
        self.backwards = 0
        self.backwards_since_step = 0  # of any optimizer
        self.steps = 0  # the most of any optimizer, which may be gone when the watch closes
        self.is_of_scaled_loss = False  # the backward that runs is of a loss that a scaler has scaled
        self.divisors: list[int] = []  # whole numbers that the loss was divided by
        self.norms: list[int] = []  # of how many gradients each norm since the last step was taken
        self._scaler: weakref.ref[Any] | None = None
        self._scaled: weakref.ref[Tensor] | None = None  # the loss that was scaled last

    def backward_begins(self, tensors: Any) -> None:
        """A backward begins, of these tensors."""
        self.backwards += 1
        self.backwards_since_step += 1
        loss = None if self._scaled is None else self._scaled()
        self.is_of_scaled_loss = loss is not None and tensors is loss

    def step_ends(self) -> None:
        """An optimizer's step has returned."""
        self.backwards_since_step = 0
        self.norms = []

    def loss_scaled(self, scaler: Any, scaled: Any) -> None:
        """A scaler has scaled a loss."""
        self._scaler = weakref.ref(scaler)
        self._scaled = weakref.ref(scaled) if isinstance(scaled, Tensor) else None

    def scale(self) -> Tensor | None:
        """Return the loss scale of the scaler that scaled last."""
        scale = getattr(self._scaler and self._scaler(), "_scale", None)
        return scale if isinstance(scale, Tensor) else None

    def loss_is_scaled(self) -> Callable[[], bool]:
        """Return a function that tests the loss scale against 1 once it is known."""
        scale = self.scale()
        value = None if scale is None else number(scale.detach())
        return lambda: value is None or resolved(value) != 1.0

    def has_unscaled(self, optimizer: Any) -> bool:
        """Return True if the scaler has unscaled the optimizer's gradients, and has not stepped it since."""
        return has_unscaled(self._scaler and self._scaler(), optimizer)

    def model(self) -> nn.Module | None:
        """Return the model; None once it is gone."""
        return self.session.model()

    def names(self) -> dict[int, str]:
        """Return the names of the model's parameters, by identity."""
        model = self.session.model()
        return {} if model is None else {id(p): clean(name) for name, p in model.named_parameters()}

    def owned(self) -> set[int]:
        """Return the parameters of all optimizers, by identity."""
        return {id(p) for optimizer in [*self.optimizers, *self.foreign] for p in parameters_of(optimizer)}


class TrainingCheck:
    """Check of a training as a whole. Each method is an event, and does nothing by default."""

    def __init__(self, training: Training) -> None:
        self.training, self.facts, self.session = training, training.facts, training.session

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

    looks_at_every_step: ClassVar[bool] = False  # default: at those in which its optimizer is followed

    def __init__(self, training: Training, followed: FollowedOptimizer) -> None:
        self.training, self.facts, self.followed = training, training.facts, followed
        self.in_a_row = 0  # steps for which `repeats` got True

    def repeats(self, holds: bool) -> bool:
        """Take whether something holds at a step; return True if it does at `REPEATS` steps on end by now."""
        self.in_a_row = self.in_a_row + 1 if holds else 0
        return self.in_a_row == REPEATS

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


def living(weights: Iterable[weakref.ref[Tensor]]) -> list[Tensor]:
    """Return the weights that are still there."""
    return [p for ref in weights if (p := ref()) is not None]


def gradients_of(weights: Iterable[weakref.ref[Tensor]]) -> list[Tensor]:
    """Return the gradients of the weights that have one that can be read."""
    return [p.grad for p in living(weights) if p.grad is not None and is_plain(p.grad)]


def is_plain(x: Tensor) -> bool:
    """Return True for a tensor of real numbers that can be read as it lies in memory."""
    plain = type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided and not x.is_meta and not x.is_inference()
    if not plain or not x.numel() or not x.is_contiguous() or x.is_complex():
        return False
    return x.untyped_storage().nbytes() >= (x.storage_offset() + x.numel()) * x.element_size()  # FSDP frees some


def some_values(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return first values of tensors, or None if not readable on one device."""
    if not tensors or len({x.device for x in tensors}) > 1 or not all(map(is_plain, tensors)):
        return None
    return torch.cat([x.detach().reshape(-1)[:_VALUES].float() for x in tensors])
