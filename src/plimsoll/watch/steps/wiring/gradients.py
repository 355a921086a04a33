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
    FollowedGradient,
    FollowedOptimizer,
    OptimizerCheck,
    Training,
    gradients_of,
    is_plain,
    living,
    some_values,
)

_SOME = 6  # steps in which gradients were carried over, among others in which they were not
_CLIPPED = 8  # steps in which it is looked for clipping
_MANY = 64  # micro-batches, from which on a 16-bit sum may be too coarse for one of them
_CHANGED = 16  # values that an early micro-batch changes: fewer show nothing


class CarriedGradients(OptimizerCheck):
    """Gradients that are added to those of the step before."""

    def __init__(self, training: Training, followed: FollowedOptimizer) -> None:
        super().__init__(training, followed)
        self._on_end = 0  # steps at which all were
        self._some = 0  # such steps, on end or not

    def step_begins(self, optimizer: Any) -> None:
        """The optimizer's step begins."""
        gradients = self.followed.gradients
        carried = [gradient for gradient in gradients if gradient.carried]
        are_carried = bool(gradients) and len(carried) == len(gradients)
        self._on_end = self._on_end + 1 if are_carried else 0
        self._some += are_carried
        recorded = self.facts.has("carried over") or self.facts.has("carried at some steps")
        if not recorded and (self._on_end == REPEATS or (are_carried and self._some == _SOME)):
            self._record(carried, some=self._on_end < REPEATS)
        self.followed.measures = not recorded and (self._on_end >= REPEATS - 1 or self._some >= _SOME - 1)

    def _record(self, carried: list[FollowedGradient], *, some: bool) -> None:
        sizes = [gradient.size for gradient in carried if gradient.size is not None]
        name, steps = self.followed.name, self.followed.steps + 1
        many = f" at {self._some} of the first {steps} steps" if some else ""
        why = "zero_grad() is not called at each step" if some else "nothing sets them to zero"
        self.facts.later(
            "carried at some steps" if some else "carried over",
            f"gradients of {name} are added to those of the step before{many}: {why}. Call optimizer.zero_grad() once "
            "a step.",
            lambda: any((resolved(size) or 0.0) > 0 for size in sizes),
            optimizer=name,
            carried=self._some,
            of=steps,
        )


class ScaledGradients(OptimizerCheck):
    """Gradients of a scaled loss that are not unscaled, or are added to those that are."""

    only_followed = False

    def __init__(self, training: Training, followed: FollowedOptimizer) -> None:
        super().__init__(training, followed)
        self._from_scaled = False  # the backward of a scaled loss has reached the parameters since the last step
        self._was_scaled = False  # and the optimizer stepped on what it left
        self._scaled = 0  # such steps on end
        self._was_unscaled = False  # the scaler has unscaled gradients to which this backward may add
        self._changed = False  # something else has changed those since
        self._mixed = 0  # backwards that added to unscaled gradients

    # GradScaler's unscaling leaves a tensor's version as it is. Whatever else changes gradients after it, such as a
    # closure that sets them to zero and tries the step again, makes the rest of the step one that is not judged.
    def backward_begins(self, optimizer: Any) -> None:
        """A backward begins."""
        if self._was_scaled:  # no scaler's step has come since
            self._was_scaled = False
            self._scaled += 1
            if self._scaled == REPEATS:
                self._record_scaled()
        unscaled = self.followed.follows and self.training.is_of_scaled and self.training.has_unscaled(optimizer)
        self._changed = unscaled and (self._changed or not self._are_as_left())
        self._was_unscaled = unscaled and not self._changed

    def backward_ends(self) -> None:
        """A backward has ended."""
        reached = self.followed.reached
        self._from_scaled |= self.training.is_of_scaled and reached
        self._mixed += self._was_unscaled and reached
        if self._mixed == REPEATS:
            self.facts.later(
                "added after unscaling",
                f"gradients of a scaled loss are added to those of {self.followed.name} that the scaler has unscaled "
                "already: call scaler.unscale_(optimizer) once a step, after the last backward.",
                self.training.scales(),
                optimizer=self.followed.name,
            )

    def step_begins(self, optimizer: Any) -> None:
        """The optimizer's step begins."""
        if not self.followed.follows:
            return
        was_scaled = self._from_scaled and getattr(optimizer, "grad_scale", None) is None and self._are_as_left()
        self._was_scaled = was_scaled and not self.training.has_unscaled(optimizer)  # which leaves their versions
        self._from_scaled = False
        if not self._was_scaled:
            self._scaled = 0

    def scaler_step_ends(self) -> None:
        """A scaler's step of the optimizer has returned."""
        self._was_scaled, self._scaled = False, 0

    def _are_as_left(self) -> bool:
        return all(gradient.is_as_backward_left_it() for gradient in self.followed.gradients)

    def _record_scaled(self) -> None:
        name = self.followed.name
        self.facts.later(
            "not unscaled",
            f"{name} is given the gradients of a scaled loss as they are: call scaler.step(optimizer) in place of "
            "optimizer.step(), or scaler.unscale_(optimizer) before it.",
            self.training.scales(),
            optimizer=name,
        )


class ClearedMicroBatches(OptimizerCheck):
    """Gradients that are set to None or zero between the backwards of one step."""

    def __init__(self, training: Training, followed: FollowedOptimizer) -> None:
        super().__init__(training, followed)
        self._versions: list[int] = []  # of the weights, when the last backward had ended
        self._backwards = self._cleared = 0
        self._lost = 0  # steps on end with cleared gradients between all backwards

    # Between the two passes of SAM weights move. A backward of an adversarial example is one more than the loss is
    # divided by.
    def backward_begins(self, optimizer: Any) -> None:
        """A backward begins: gradients that were cleared since the last one count."""
        if self._backwards:
            self._cleared += self._weights() == self._versions and all(
                gradient.gradient() is None or gradient.was_cleared() for gradient in self.followed.gradients
            )

    def backward_ends(self) -> None:
        """A backward has ended."""
        if self.followed.reached:
            self._backwards += 1
            self._versions = self._weights()

    def step_begins(self, optimizer: Any) -> None:
        """The optimizer's step begins."""
        many, cleared = self._backwards, self._cleared
        self._backwards = self._cleared = 0
        is_last_alone = many > 1 and cleared == many - 1 and many in self.training.divisors
        self._lost = self._lost + 1 if is_last_alone else 0
        if self._lost == REPEATS:
            message = f"gradients are cleared before each of {many} micro-batches: the step is of the last one alone"
            self.facts.say("cleared between", message, optimizer=self.followed.name, backwards=many)

    def _weights(self) -> list[int]:
        weights = [gradient.param() for gradient in self.followed.gradients]
        return [-1 if p is None or p.is_inference() else p._version for p in weights]  # noqa: SLF001


class RoundedSums(OptimizerCheck):
    """Micro-batches that are rounded away as their gradients are added up in 16 bits."""

    def __init__(self, training: Training, followed: FollowedOptimizer) -> None:
        super().__init__(training, followed)
        chosen = [p for p in living(followed.weights) if p.dtype in SIXTEEN_BIT and is_plain(p)]
        self._weights = [weakref.ref(p) for p in chosen]
        self._format = FORMATS[chosen[0].dtype].name if chosen else ""
        self._backwards = 0  # since the last step
        self._before: Tensor | None = None
        self._changed: dict[int, list[Tensor]] = {}  # values that a backward has changed, by groups of micro-batches
        self._looks = 0  # steps at which it was looked whether they are rounded away

    # The second to the fourth backward of a step show how many values one changes; the last four before each power of
    # two, from 64 on, how many it changes still. A gradient that is zero changes nothing early either, and sums of
    # random signs grow by the root of their number: one of 1,024 is far from too small there.
    @torch.no_grad()
    def backward_begins(self, optimizer: Any) -> None:
        """A backward begins, which may add to the gradients."""
        if self._weights:
            self._backwards += 1
            self._before = some_values(gradients_of(self._weights)) if self._group() else None

    @torch.no_grad()
    def backward_ends(self) -> None:
        """A backward has ended."""
        before, self._before = self._before, None
        now = None if before is None else some_values(gradients_of(self._weights))
        if before is not None and now is not None and now.shape == before.shape:
            self._changed.setdefault(self._group(), []).append((now != before).sum())

    def step_begins(self, optimizer: Any) -> None:
        """The optimizer's step begins."""
        counts, many = self._counts(), self._backwards
        if counts is not None and self._looks < REPEATS:
            self._looks += 1
            self.facts.later(
                "sum rounded",
                f"gradients of {many:,} micro-batches are added up in {self._format}, and rounded away",
                lambda: _is_rounded_away(counts),
                key=f"sum rounded: {self._looks}",
                optimizer=self.followed.name,
                backwards=many,
                format=self._format,
            )
        self._backwards, self._before = 0, None
        self._changed.clear()

    def _counts(self) -> DeviceValue | None:
        """Return the mean numbers of values that early and late backwards changed."""
        last = max(self._changed, default=0)
        if last < _MANY or 4 not in self._changed:
            return None
        means = [torch.stack(self._changed[group]).float().mean() for group in (4, last)]
        return DeviceValue(torch.stack(means))

    def _group(self) -> int:
        """Return the power of two that this backward is just before, or 0."""
        top = 1 << max(self._backwards - 1, 0).bit_length()
        return top if self._backwards > max(top - 4, 1) and (top == 4 or top >= _MANY) else 0


def _is_rounded_away(counts: DeviceValue) -> bool:
    """Return True if a late backward changes under half the values an early one does."""
    early, late = cast("list[float]", counts.tensor().tolist())
    return early >= _CHANGED and late < early / 2


class Clipping(OptimizerCheck):
    """Gradients that are clipped too early, and clipping without a gradient."""

    only_followed = False

    def __init__(self, training: Training, followed: FollowedOptimizer) -> None:
        super().__init__(training, followed)
        self._weights = [weakref.ref(p) for p in living(followed.weights) if is_plain(p)]
        self._steps = 0
        self._before: Tensor | None = None  # gradients when their norm was taken
        self._changed: Tensor | None = None  # values that changed from then to the next backward
        self._clipped: list[DeviceValue] = []  # those of steps on end
        self._empty = 0  # steps on end at which the norm was of no gradient

    def norm_taken(self) -> None:
        """The norm of gradients was taken: clipping multiplies them next."""
        if self._steps < _CLIPPED and len(self._clipped) < REPEATS:
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
        name = self.followed.name
        norms = self.training.norms
        self._empty = self._empty + 1 if norms and not any(norms) and self.followed.had_gradients else 0
        if self._empty == REPEATS:
            message = f"the norm for clipping the gradients of {name} is of no gradient: nothing is clipped"
            self.facts.say("clipped nothing", message, optimizer=name)
        self._steps += 1
        if self._changed is not None and len(self._clipped) < REPEATS:
            self._clipped.append(DeviceValue(self._changed))
        elif len(self._clipped) < REPEATS:
            self._clipped = []
        self._before = self._changed = None
        if len(clipped := tuple(self._clipped)) == REPEATS:
            message = f"gradients of {name} are clipped before the last micro-batch of a step is added"
            self.facts.later(
                "clipped early", message, lambda: all((resolved(changed) or 0) > 0 for changed in clipped),
                optimizer=name,
            )  # fmt: skip


class MissingGradients(OptimizerCheck):
    """Steps after a backward at which no parameter has a gradient."""

    only_followed = False

    def __init__(self, training: Training, followed: FollowedOptimizer) -> None:
        super().__init__(training, followed)
        self._empty = 0  # such steps on end

    def step_ends(self, optimizer: Any) -> None:
        """The optimizer's step has returned."""
        has = self.followed.had_gradients or has_gradients(optimizer)  # a closure makes them inside the step
        self._empty = 0 if has or not self.training.since_step else self._empty + 1
        if self._empty == REPEATS:
            name = self.followed.name
            self.facts.say(
                "no gradients",
                f"{name} steps, and none of its parameters has a gradient: they are set to None or zero between the "
                "backward and the step, or the loss does not depend on them.",
                key=f"no gradients: {name}",
                optimizer=name,
            )
