"""Checks of one optimizer's gradients, from the backward to the step.

- Gradients that are added to those of the step before, because nothing has set them to zero, or not at each step.
- Gradients of a scaled loss that reach the optimizer as the backward left them, or are added to unscaled ones.
- Gradients of micro-batches that are cleared before the next, or rounded away as they are added up in 16 bits.
- Gradients that are clipped before the last micro-batch of a step is added, and clipping that gets no gradient.
- Steps without a gradient.
"""

import weakref
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.kernels.device_value import DeviceValue, resolved
from plimsoll.kernels.dtypes import FORMATS, SIXTEEN_BIT
from plimsoll.watch.parameters.optimizer_tensors import has_gradients
from plimsoll.watch.steps.wiring.checks import (
    REPEATS,
    FollowedOptimizer,
    OptimizerCheck,
    Training,
    gradients_of,
    is_plain,
    living,
    some_values,
)

_SOME = 6  # steps in which gradients were carried over, among others in which they were not
_FIRST = 8  # steps in which clipping is looked at
_EARLY = (3, 4)  # backwards of a step that show how many values one changes
_MANY = 64  # micro-batches, from which on a 16-bit sum may be too coarse for one of them
_LAST = 4  # backwards up to a power of two that show how many it changes still
_CHANGED = 16  # values that an early micro-batch changes: fewer show nothing


class CarriedGradients(OptimizerCheck):
    """Gradients that are added to those of the step before."""

    def __init__(self, training: Training, followed: FollowedOptimizer) -> None:
        super().__init__(training, followed)
        self._steps = 0  # that were looked at
        self._carried = 0  # those with all gradients carried over
        self._is_decided = False

    def step_begins(self, optimizer: Any) -> None:
        """The optimizer's step begins."""
        gradients = self.followed.gradients
        carried = bool(gradients) and all(gradient.carried for gradient in gradients)
        self._steps += 1
        if carried:
            self._carried += 1
        if self.repeats(carried):
            self._record("carried over", "", "nothing sets them to zero")
        elif carried and self._carried == _SOME:
            at = f" at {_SOME} of {self._steps} steps that were looked at"
            self._record("carried at some steps", at, "zero_grad() is not called at each step")
        is_near = self.in_a_row >= REPEATS - 1 or self._carried >= _SOME - 1
        self.followed.measures = is_near and not self._is_decided

    def _record(self, fact: str, at: str, why: str) -> None:
        if self._is_decided:
            return
        self._is_decided = True
        name = self.followed.name
        sizes = [gradient.size for gradient in self.followed.gradients if gradient.size is not None]
        self.facts.record_if(
            fact,
            f"gradients of {name} are added to those of the step before{at}: {why}. Call optimizer.zero_grad() once a "
            "step.",
            lambda: any((resolved(size) or 0.0) > 0 for size in sizes),
            optimizer=name,
            carried=self._carried,
            of=self._steps,
        )


class ScaledSteps(OptimizerCheck):
    """Steps on the gradients of a scaled loss as the backward left them."""

    looks_at_every_step = True

    def __init__(self, training: Training, followed: FollowedOptimizer) -> None:
        super().__init__(training, followed)
        self._reached = False  # the backward of a scaled loss has reached the parameters since the last step
        self._stepped = False  # the last step was on such gradients; a scaler's step that comes after it takes it back

    def backward_begins(self, optimizer: Any) -> None:
        """A backward begins."""
        if not self._stepped:
            return
        self._stepped = False
        if self.repeats(True):
            name = self.followed.name
            self.facts.record_if(
                "not unscaled",
                f"{name} is given the gradients of a scaled loss as they are: call scaler.step(optimizer) in place of "
                "optimizer.step(), or scaler.unscale_(optimizer) before it.",
                self.training.loss_is_scaled(),
                optimizer=name,
            )

    def backward_ends(self) -> None:
        """A backward has ended."""
        self._reached |= self.training.is_of_scaled_loss and self.followed.reached

    # GradScaler's unscaling leaves a gradient's version as it is, so the scaler is asked.
    def step_begins(self, optimizer: Any) -> None:
        """The optimizer's step begins."""
        if not self.followed.is_followed:
            return
        by_itself = getattr(optimizer, "grad_scale", None) is not None or self.training.has_unscaled(optimizer)
        untouched = all(gradient.is_as_backward_left_it() for gradient in self.followed.gradients)
        self._stepped = self._reached and untouched and not by_itself
        self._reached = False
        if not self._stepped:
            self.repeats(False)

    def scaler_step_ends(self) -> None:
        """A scaler's step of the optimizer has returned."""
        self._stepped = False
        self.repeats(False)


class AddedToUnscaled(OptimizerCheck):
    """Gradients of a scaled loss that are added to those that the scaler has unscaled."""

    def __init__(self, training: Training, followed: FollowedOptimizer) -> None:
        super().__init__(training, followed)
        self._adds = False  # this backward may add to unscaled gradients
        self._changed = False  # something else has changed them since they were unscaled
        self._times = 0

    # Whatever changes unscaled gradients, such as a closure that sets them to zero and tries the step again, makes the
    # rest of the step one that is not judged.
    def backward_begins(self, optimizer: Any) -> None:
        """A backward begins."""
        unscaled = self.training.is_of_scaled_loss and self.training.has_unscaled(optimizer)
        same = unscaled and all(gradient.is_as_backward_left_it() for gradient in self.followed.gradients)
        self._changed = unscaled and (self._changed or not same)
        self._adds = unscaled and not self._changed

    def backward_ends(self) -> None:
        """A backward has ended."""
        if not (self._adds and self.followed.reached):
            return
        self._times += 1
        if self._times == REPEATS:
            name = self.followed.name
            self.facts.record_if(
                "added after unscaling",
                f"gradients of a scaled loss are added to those of {name} that the scaler has unscaled already: call "
                "scaler.unscale_(optimizer) once a step, after the last backward.",
                self.training.loss_is_scaled(),
                optimizer=name,
            )


class ClearedMicroBatches(OptimizerCheck):
    """Gradients that are set to None or zero between the backwards of one step."""

    def __init__(self, training: Training, followed: FollowedOptimizer) -> None:
        super().__init__(training, followed)
        self._versions: list[int] = []  # of the weights, when the last backward had ended
        self._backwards = self._cleared = 0

    # Between the two passes of SAM weights move. An adversarial step has one backward more than the loss is divided by,
    # so it does not count.
    def backward_begins(self, optimizer: Any) -> None:
        """A backward begins: gradients that were cleared since the last one count."""
        if self._backwards and self._weight_versions() == self._versions:
            self._cleared += all(gradient.was_cleared() for gradient in self.followed.gradients)

    def backward_ends(self) -> None:
        """A backward has ended."""
        if self.followed.reached:
            self._backwards += 1
            self._versions = self._weight_versions()

    def step_begins(self, optimizer: Any) -> None:
        """The optimizer's step begins."""
        many, cleared = self._backwards, self._cleared
        self._backwards = self._cleared = 0
        if self.repeats(many > 1 and cleared == many - 1 and many in self.training.divisors):
            message = f"gradients are cleared before each of {many} micro-batches: the step is of the last one alone"
            self.facts.record("cleared between", message, optimizer=self.followed.name, backwards=many)

    def _weight_versions(self) -> list[int]:
        weights = [gradient.param() for gradient in self.followed.gradients]
        return [-1 if p is None or p.is_inference() else p._version for p in weights]  # noqa: SLF001


class RoundedSums(OptimizerCheck):
    """Micro-batches that are rounded away as their gradients are added up in 16 bits."""

    def __init__(self, training: Training, followed: FollowedOptimizer) -> None:
        super().__init__(training, followed)
        chosen = [p for p in living(followed.weights) if p.dtype in SIXTEEN_BIT and is_plain(p)]
        self._weights = [weakref.ref(p) for p in chosen]
        self._format = FORMATS[chosen[0].dtype].name if chosen else ""
        self._looks = 0  # steps at which it was looked whether micro-batches are rounded away
        self._start_step()

    def _start_step(self) -> None:
        self._backwards = 0
        self._before: Tensor | None = None  # gradients before this backward
        self._early: list[Tensor] = []  # how many values each early backward has changed
        self._late: list[Tensor] = []  # and each of the last ones before `_power`
        self._power = 0

    # A gradient that is zero changes nothing early either. Sums of random signs grow by the root of their number: one
    # of 1,024 is far from too small there.
    @torch.no_grad()
    def backward_begins(self, optimizer: Any) -> None:
        """A backward begins, which may add to the gradients."""
        if not self._weights:
            return
        self._backwards += 1
        power = 1 << (self._backwards - 1).bit_length()  # the next one, or this number itself
        is_late = power >= _MANY and self._backwards > power - _LAST
        if is_late and power != self._power:
            self._late, self._power = [], power
        looks = is_late or self._backwards in _EARLY
        self._before = some_values(gradients_of(self._weights)) if looks else None

    @torch.no_grad()
    def backward_ends(self) -> None:
        """A backward has ended."""
        before, self._before = self._before, None
        now = None if before is None else some_values(gradients_of(self._weights))
        if before is not None and now is not None and now.shape == before.shape:
            changed = self._early if self._backwards in _EARLY else self._late
            changed.append((now != before).sum())

    def step_begins(self, optimizer: Any) -> None:
        """The optimizer's step begins."""
        if self._early and self._late and self._looks < REPEATS:
            self._looks += 1
            many = self._backwards
            means = [torch.stack(changed).float().mean() for changed in (self._early, self._late)]
            counts = DeviceValue(torch.stack(means))
            self.facts.record_if(
                "sum rounded",
                f"gradients of {many:,} micro-batches are added up in {self._format}, and rounded away",
                lambda: _is_rounded_away(counts),
                key=f"sum rounded {self.followed.name} {self._looks}",
                optimizer=self.followed.name,
                backwards=many,
                format=self._format,
            )
        self._start_step()


def _is_rounded_away(counts: DeviceValue) -> bool:
    """Return True if a late backward changes under half the values an early one does."""
    early, late = cast("list[float]", counts.tensor().tolist())
    return early >= _CHANGED and late < early / 2


class EarlyClipping(OptimizerCheck):
    """Gradients that are clipped before the last micro-batch of a step is added."""

    looks_at_every_step = True

    def __init__(self, training: Training, followed: FollowedOptimizer) -> None:
        super().__init__(training, followed)
        self._weights = [weakref.ref(p) for p in living(followed.weights) if is_plain(p)]
        self._steps = 0
        self._before: Tensor | None = None  # gradients when their norm was taken
        self._changed: Tensor | None = None  # how many values changed from then to the next backward
        self._counts: list[DeviceValue] = []  # those numbers, of steps on end

    def norm_taken(self) -> None:
        """The norm of gradients was taken: clipping multiplies them next."""
        if self._steps < _FIRST and len(self._counts) < REPEATS:
            self._before = some_values(gradients_of(self._weights))

    # Gradients that were set to None or zero since begin a new sum: it is clipped as a whole.
    def backward_begins(self, optimizer: Any) -> None:
        """A backward begins, which may add to the gradients."""
        before, self._before = self._before, None
        now = None if before is None else some_values(gradients_of(self._weights))
        if before is not None and now is not None and now.shape == before.shape:
            self._changed = ((now != before) & (now != 0)).sum()

    def step_ends(self, optimizer: Any) -> None:
        """The optimizer's step has returned."""
        self._steps += 1
        changed, self._before, self._changed = self._changed, None, None
        if len(self._counts) == REPEATS:
            return
        self._counts = [] if changed is None else [*self._counts, DeviceValue(changed)]
        if len(self._counts) == REPEATS:
            counts, name = self._counts, self.followed.name
            message = f"gradients of {name} are clipped before the last micro-batch of a step is added"
            self.facts.record_if(
                "clipped early", message, lambda: all((resolved(count) or 0) > 0 for count in counts), optimizer=name
            )


# Norms are not taken of an optimizer: they count for the first that steps after them.
class EmptyClipping(OptimizerCheck):
    """Clipping by a norm of no gradient."""

    looks_at_every_step = True

    def step_ends(self, optimizer: Any) -> None:
        """The optimizer's step has returned."""
        norms = self.training.norms
        if self.repeats(bool(norms) and not any(norms) and self.followed.had_gradients):
            name = self.followed.name
            message = f"the norm for clipping the gradients of {name} is of no gradient: nothing is clipped"
            self.facts.record("clipped nothing", message, optimizer=name)


# Of optimizers that step after the same backward only the first is judged: the others may have parts of the model that
# are trained later.
class MissingGradients(OptimizerCheck):
    """Steps after a backward at which no parameter has a gradient."""

    looks_at_every_step = True

    def step_ends(self, optimizer: Any) -> None:
        """The optimizer's step has returned."""
        has = self.followed.had_gradients or has_gradients(optimizer)  # a closure makes them inside the step
        if self.repeats(not has and self.training.backwards_since_step > 0):
            name = self.followed.name
            self.facts.record(
                "no gradients",
                f"{name} steps, and none of its parameters has a gradient: they are set to None or zero between the "
                "backward and the step, or the loss does not depend on them.",
                key=f"no gradients: {name}",
                optimizer=name,
            )
