"""An optimizer from step to step: a few of its parameters, and what its backwards have done to their gradients."""

import weakref
from typing import Any

import torch
from torch import Tensor

from plimsoll.kernels.device_value import DeviceValue, number
from plimsoll.watch.steps.wiring.kept_narrow import Moments, Roundings
from plimsoll.watch.steps.wiring.schedules import Rates
from plimsoll.watch.steps.wiring.weights import Clipping, Overwrites, Sums

_FOLLOWED = 3  # parameters of each optimizer
_FIRST_STEPS, _PERIOD, _LOOK = 64, 64, 8  # in which they are followed: the first ones, then the first of each period


class FollowedGradient:
    """A parameter's gradient, from one step of its optimizer to the next."""

    __slots__ = (
        "after_backward",
        "after_step",
        "before",
        "before_backward",
        "carried",
        "kept",
        "left",
        "param",
        "size",
    )

    def __init__(self, p: Tensor) -> None:
        self.param = weakref.ref(p)
        self.kept: weakref.ref[Tensor] | None = None  # the gradient that the last step has left
        self.after_step = self.before_backward = self.after_backward = -1  # versions
        self.before: weakref.ref[Tensor] | None = None  # the gradient that the last backward has found
        self.left: weakref.ref[Tensor] | None = None  # and the one that it has left
        self.carried = False  # the last backward was added to it
        self.size: float | DeviceValue | None = None  # its largest magnitude before that

    def gradient(self) -> Tensor | None:
        """The gradient as it is now; None for one that has no versions."""
        p = self.param()
        g = None if p is None else p.grad
        return g if g is not None and g.layout == torch.strided and not g.is_inference() else None

    def step_ends(self) -> None:
        """Notes the gradient that the step has left."""
        g = self.gradient()
        self.kept = None if g is None else weakref.ref(g)
        self.after_step = -1 if g is None else g._version  # noqa: SLF001  (public in all but name)
        self.carried = False

    def backward_begins(self, measure: bool) -> None:
        """Notes the gradient that the backward finds, and asks for its size if `measure`."""
        g = self.gradient()
        self.before = None if g is None else weakref.ref(g)
        self.before_backward = -1 if g is None else g._version  # noqa: SLF001
        same = g is not None and self.kept is not None and self.kept() is g
        if g is None or not same or self.before_backward != self.after_step:  # set to None or zero, or changed
            # Set to None, so gradients that another model's backward adds later are not carried over.
            self.kept, self.carried = None, False
        elif measure and not self.carried:
            # `.data.zero_()` leaves no other trace: the value itself is asked for, and read when it is there.
            plain = g.detach()
            self.size = number(plain.abs().amax()) if plain.numel() and not hasattr(plain, "placements") else 0.0

    def backward_ends(self) -> bool:
        """Notes what the backward has done; whether it reached the parameter."""
        g = self.gradient()
        self.after_backward = -1 if g is None else g._version  # noqa: SLF001
        if g is None:
            return False
        reached = self.after_backward != self.before_backward or self.before is None or self.before() is not g
        if reached and self.kept is not None and self.kept() is g:
            self.carried, self.after_step = True, self.after_backward
        self.left = weakref.ref(g)
        return reached

    def was_cleared(self) -> bool:
        """Return True if the gradient was written since the last backward and is all zero on a CPU."""
        g = self.gradient()
        if g is None or g.device.type != "cpu" or g._version == self.after_backward:  # noqa: SLF001
            return g is None
        return not g.detach().any()

    def is_as_backward_left_it(self) -> bool:
        """Return True if nothing has changed the gradient since the last backward."""
        g = self.gradient()
        left = None if self.left is None else self.left()
        return g is not None and g is left and g._version == self.after_backward  # noqa: SLF001


class MicroBatches:
    """Backwards of one step, and whether gradients were cleared between them."""

    def __init__(self, followed: "list[FollowedGradient]") -> None:
        self._followed = followed
        self._weights: list[int] = []  # versions, when the last backward had ended
        self._backwards = self._cleared = 0
        self.lost = 0  # steps on end with cleared gradients between all backwards

    # Between the two passes of SAM weights move. A backward of an adversarial example is one more than the loss is
    # divided by.
    def backward_begins(self) -> None:
        """A backward begins: gradients that were set to None or zero since the last one count."""
        if self._backwards:
            gradients = [followed.gradient() for followed in self._followed]
            self._cleared += self._versions() == self._weights and all(
                g is None or followed.was_cleared() for g, followed in zip(gradients, self._followed, strict=True)
            )

    def backward_ends(self) -> None:
        """A backward has reached the parameters."""
        self._backwards += 1
        self._weights = self._versions()

    def step_begins(self, divisors: "list[int]") -> int:
        """The optimizer's step begins; return the number of backwards of which one is left, 0 if all count.

        Args:
            divisors: Whole numbers that the loss was divided by.
        """
        many, cleared = self._backwards, self._cleared
        self._backwards = self._cleared = 0
        alone = many > 1 and cleared == many - 1 and many in divisors
        self.lost = self.lost + 1 if alone else 0
        return many if alone else 0

    def _versions(self) -> list[int]:
        weights = [followed.param() for followed in self._followed]
        return [-1 if p is None or p.is_inference() else p._version for p in weights]  # noqa: SLF001


class FollowedOptimizer:
    """State of one optimizer that has parameters of the model."""

    def __init__(self, optimizer: Any) -> None:
        self.name = type(optimizer).__name__
        self.size = 0  # so many in its groups
        own: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        places = sorted({0, len(own) // 2, len(own) - 1}) if own else []
        self.followed = [FollowedGradient(own[place]) for place in places[:_FOLLOWED]]
        self.sums = Sums(own[place] for place in places[:_FOLLOWED])
        self.overwrites = Overwrites(own[place] for place in places[:_FOLLOWED])
        self.clipping = Clipping(own[place] for place in places[:_FOLLOWED])
        self.roundings = Roundings(own[place] for place in places[:_FOLLOWED])
        self.moments = Moments(own[place] for place in places[:_FOLLOWED])
        self.steps = 0
        self.follows = True  # in this step
        self.empty = self.carried = self.scaled = 0  # steps on end
        self.carried_some = 0  # steps, on end or not
        self.had_gradients = False
        self.from_scaled = False  # the backward of a scaled loss has reached the parameters since the last step
        self.was_scaled = False  # and they were stepped on as it left them
        self.was_unscaled = False  # the scaler has unscaled gradients to which this backward may add
        self.dropped = False  # something else has changed those since
        self.mixed = 0  # backwards that did
        self.micro = MicroBatches(self.followed)
        self.unclipped = 0  # steps on end at which the norm for clipping was of no gradient
        self.rounded = 0  # steps at which it was looked whether micro-batches are rounded away
        self.rates = Rates()

    def step_ends(self) -> None:
        """Prepare for the next step."""
        if self.follows:
            for followed in self.followed:
                followed.step_ends()
        before, self.follows = self.follows, self.steps < _FIRST_STEPS or self.steps % _PERIOD < _LOOK
        if self.follows and not before:
            self.followed = [FollowedGradient(p) for followed in self.followed if (p := followed.param()) is not None]
            self.micro = MicroBatches(self.followed)
