"""Attribution of losses to the optimizers that step on them.

A backward reaches a parameter if it changes the parameter's gradient. That is looked at before and after each backward
(identity and version of the gradient, no value), so it holds for whatever stands between loss and parameter. A loss
waits as long as its gradients are there: an optimizer that steps takes the losses in its gradients, and a gradient that
is dropped before that takes its losses along. So a generator's loss, which passes through the discriminator, is no loss
of the discriminator, and micro-batches add up.
"""

import itertools
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from plimsoll.kernels.device_value import DeviceValue, number
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.hooks.autograd_graph import backward_running, is_multiple_of_scaled, is_scaled_by
from plimsoll.watch.parameters.optimizer_tensors import Marks, Parameters, parameters_of
from plimsoll.watch.session import WatchSession

MAIN = "loss"
_COMPARED = 6  # gradients by which it is seen that a script has assigned others
_WAITING = 4096  # losses that wait for an optimizer; of parameters that nobody steps they would be ever more


class Loss:
    """A backpropagated loss, and the unstepped parameters whose gradients hold it."""

    __slots__ = ("holders", "stepped", "taken", "value")

    def __init__(self, value: float | DeviceValue | None, holders: set[int]) -> None:
        self.value, self.holders = value, holders
        self.stepped = False  # some optimizer has stepped since
        self.taken = False  # and one of ours has stepped on it


class _Running:
    """A backward that is under way."""

    __slots__ = ("before", "loss", "roots", "taken")

    def __init__(self, loss: Loss, before: Marks, roots: list[Tensor]) -> None:
        self.loss, self.before, self.roots = loss, before, roots
        self.taken: set[int] = set()  # parameters that were stepped within it


class Losses:
    """The losses of one watch's model."""

    def __init__(self, session: WatchSession, parameters: Parameters) -> None:
        self.session, self._parameters = session, parameters
        self._waiting: list[Loss] = []
        self._unplaced: list[Loss] = []  # that changed no gradient of ours
        self._after: Marks = {}  # the gradients when the last backward ended
        # By thread, the last one last: until this model's thread is known, another model's may begin and end meanwhile.
        self._running: dict[int, _Running] = {}
        self._placed = False  # an optimizer has stepped on gradients that hold a loss
        self._inside: dict[int, _Step] = {}  # by optimizer
        self._names: list[tuple[set[int], str]] = []  # of each optimizer that has stepped, what it has and is called
        self._taken: dict[str, list[Loss]] = {}  # in this step, by that name
        # In this step: parameters, their gradients that came by no backward, and these gradients' versions.
        self._assigned: list[tuple[weakref.ref[Tensor], weakref.ref[Tensor], int]] = []

    # -- backwards -----------------------------------------------------------------------------------------------------

    def backward_begins(self, value: float | DeviceValue | None, roots: list[Tensor]) -> None:
        """A backward begins from these tensors, with this loss."""
        now = self._parameters.gradient_marks()
        self._drop(now)
        self._running.pop(threading.get_ident(), None)  # of one that has raised
        self._running[threading.get_ident()] = _Running(Loss(value, set()), now, roots)

    def backward_ends(self) -> bool:
        """Return True if the backward left gradients that no optimizer has stepped on."""
        running = self._running.pop(threading.get_ident(), None)
        if running is None:
            return False
        now = self._parameters.gradient_marks()
        changed = {key for key, mark in now.items() if mark is not None and mark != running.before.get(key)}
        if not changed and not running.taken and not self._parameters.marks_all:
            # It may have reached others than the few that were looked at.
            self._parameters.marks_all = True
            now = self._parameters.gradient_marks()
            reached = self._parameters.reached(running.roots)
            changed = {key for key in reached if now.get(key) is not None}
        self._after, loss = now, running.loss
        changed -= running.taken
        loss.holders |= changed
        if changed:
            self._waiting.append(loss)
            del self._waiting[:-_WAITING]
        elif not running.taken and self._may_come_later(running.roots):
            self._unplaced.append(loss)
            del self._unplaced[:-_WAITING]
        return bool(changed)

    def _may_come_later(self, roots: list[Tensor]) -> bool:
        """Return True if a backward that changed no gradient may have been for ours."""
        # The graph is asked only until a loss was found in gradients: from then on it is another model's backward.
        # FSDP sets gradients after a pipeline's backwards, so a backward does not show which ones are its own.
        return self._parameters.are_sharded() or (not self._placed and self._parameters.reach(roots) != "others")

    @property
    def running(self) -> Loss | None:
        """The loss whose backward runs."""
        running = self._of_this_thread()
        return None if running is None else running.loss

    def _of_this_thread(self) -> _Running | None:
        """Return the backward that was asked for on this thread, else the last one: a device has threads of its own."""
        of_all = list(self._running.values())  # a copy: another thread's may end meanwhile
        return self._running.get(threading.get_ident()) or (of_all[-1] if of_all else None)

    def _drop(self, now: Marks) -> None:
        """Forgets the losses whose gradients are gone."""
        if not self._waiting and not self._inside:
            self._after = now
            return
        gone = {key for key, mark in self._after.items() if mark is not None and now.get(key) is None}
        written = {key for key, mark in self._after.items() if mark is not None and now.get(key) not in (mark, None)}
        self._after = now
        if not (gone or written) or self._parameters.are_sharded():  # FSDP takes gradients away itself
            return
        for step in self._inside.values():
            waiting = self._held(step.ids)
            if any(loss.holders & step.ids & (gone | written) for loss in waiting):
                step.evaluations += 1
                step.first = step.first or waiting
        for loss in self._waiting:
            # What was written to has been emptied, if a step or an evaluation has used it. Else it was clipped.
            loss.holders -= gone | written if loss.stepped or self._inside else gone
        self._waiting = [loss for loss in self._waiting if loss.holders]

    def _held(self, ids: set[int]) -> list[Loss]:
        return [loss for loss in self._waiting if loss.holders & ids]

    # -- optimizers ----------------------------------------------------------------------------------------------------

    def step_begins(self, optimizer: Any) -> None:
        """An optimizer of ours steps."""
        ids = self._parameters.ids_of(optimizer)
        if not any(ids & outer.ids for outer in self._inside.values()):  # else it is part of another's step
            self._inside[id(optimizer)] = _Step(ids)

    def step_ends(self, optimizer: Any) -> None:
        """It has stepped, or a scaler kept it from stepping."""
        step = self._inside.pop(id(optimizer), None)
        if step is None:
            return
        waiting = self._held(step.ids)
        running = self._of_this_thread()  # of a backward that has raised, if none runs now
        if running is not None and not step.evaluations and backward_running() != -1:  # it steps within the backward
            running.taken |= step.ids
            waiting.append(running.loss)
        self._placed |= bool(waiting)
        if self._parameters.are_sharded():  # gradients of micro-batches are kept elsewhere until the last one
            waiting = [loss for loss in self._unplaced if loss not in waiting] + waiting
        losses = step.first or waiting or self._guessed(optimizer, step.ids)
        if not losses:
            given = [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None][:_COMPARED]
            self._assigned = [(weakref.ref(p), weakref.ref(g), g._version) for p, g in given]  # noqa: SLF001
        for loss in losses:
            loss.taken = True
        taken = self._taken.setdefault(self._name(optimizer, step.ids), [])
        taken.extend(loss for loss in losses if loss not in taken)
        for loss in waiting:
            loss.holders -= step.ids
        if step.evaluations:
            self._say_evaluations(optimizer, step.evaluations + 1)
        self.others_step()

    def are_used(self) -> bool:
        """Return True if gradients that hold losses were dropped or changed.

        Compares with the gradients after the last backward.
        """
        now = self._parameters.gradient_marks()
        return any(now.get(key) != self._after.get(key) for loss in self._waiting for key in loss.holders)

    # Gradients that a script computes by itself, with torch.autograd.grad, by hand or from differences of losses, come
    # with no backward, and maybe with no forward, that would begin a step.
    def are_assigned_again(self) -> bool:
        """Return True if gradients of no backward that were stepped on in this step are others by now."""
        kept = ((weight(), gradient(), version) for weight, gradient, version in self._assigned)
        return any(p is not None and (g is None or p.grad is not g or g._version != v) for p, g, v in kept)  # noqa: SLF001

    def take_all(self) -> None:
        """A step has ended that no optimizer has made."""
        taken = self._taken.setdefault(MAIN, [])
        taken.extend(loss for loss in self._waiting if loss not in taken)
        self._waiting.clear()
        self._unplaced.clear()

    def others_step(self) -> None:
        """An optimizer has stepped, ours or not."""
        self._waiting = [loss for loss in self._waiting if loss.holders]
        for loss in self._waiting:
            loss.stepped = True
        self._unplaced.clear()

    def _guessed(self, optimizer: Any, ids: set[int]) -> list[Loss]:
        """Return the losses of a step whose gradients came by no backward that was seen."""
        if self._unplaced:
            return list(self._unplaced)
        if ids.isdisjoint(key for key, _ in self._parameters.members()):  # it learns inputs, through the model
            return [loss for loss in self._waiting if not loss.stepped]
        if not self._placed and any(p.grad is not None for p in parameters_of(optimizer)):
            who = type(optimizer).__name__
            message = f"{who} steps on gradients that no watched backward has left: its loss is not recorded"
            self.session.say("loss", f"{message}. Record it with Watch.log(loss=...).", once="no loss", warn=True)
        return []

    # Where a step evaluates its closure several times (LBFGS), its loss is that of the first evaluation: `step` returns
    # it.
    def _say_evaluations(self, optimizer: Any, count: int) -> None:
        who = type(optimizer).__name__
        message = (
            f"{who} evaluates its closure several times a step ({count} times here): activations and their gradients "
            "are added up over all evaluations; the loss is that of the first, the gradients are those of the last"
        )
        self.session.say("closure", message, once=f"closure {who}", optimizer=who, evaluations=count)

    # -- names ---------------------------------------------------------------------------------------------------------

    # The first optimizer's loss is `loss`. Another optimizer of the model has one of its own name where it steps on
    # other losses: `loss:discriminator`, by the module whose parameters it has. Optimizers of the same parameters share
    # a name.
    def _name(self, optimizer: Any, ids: set[int]) -> str:
        for known, name in self._names:
            if known & ids:
                known.update(ids)
                return name
        taken = {name for _, name in self._names}
        name = MAIN
        if taken:
            label = self._parameters.label_of(ids) or type(optimizer).__name__
            spare = (f"{MAIN}:{label}" + (f"-{number}" if number > 1 else "") for number in itertools.count(1))
            name = next(spare_name for spare_name in spare if spare_name not in taken)
        self._names.append((set(ids), name))
        return name

    def end_step(self, microbatches: int) -> dict[str, float | DeviceValue]:
        """Return the step's losses by name; a pipeline's are means over micro-batches."""
        taken = self._taken
        main = taken.get(MAIN)
        if main is not None and len(main) > 1:
            count = len(main)
            message = f"{count} backwards make up a step: the loss is the sum of theirs, as the gradients are"
            self.session.say("loss", message, once="accumulated", accumulated=count)
        totals: dict[str, float | DeviceValue] = {}
        for name, losses in taken.items():
            value = total([loss.value for loss in losses if loss.value is not None], microbatches)
            if value is None or (name != MAIN and losses == main):
                continue
            totals[name] = value
            if name != MAIN:
                whose = self._parameters.label_of(self._names[0][0]) or "the first optimizer"
                message = (
                    f"the model's optimizers step on losses of their own: loss is that of {whose}; {name} is another's"
                )
                self.session.say("loss", message, once=name, name=name)
        return totals

    def start_step(self) -> None:
        """The next step starts."""
        self._taken, self._assigned = {}, []


class ScaledLosses:
    """Losses that a scaler has scaled, to record what the script computed."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # losses by what the scaler made of them
        self._scaler: weakref.ref[Any] | None = None

    def scaler(self) -> Any:
        """Return the scaler that scaled last; None once it is gone."""
        return self._scaler and self._scaler()

    def add(self, scaler: Any, loss: Tensor, scaled: Tensor) -> None:
        """Note that a scaler has scaled a loss."""
        self._known = {key: known for key, known in self._known.items() if known[0]() is not None}
        scale = getattr(scaler, "_scale", None)
        twice = isinstance(scale, Tensor) and is_multiple_of_scaled(loss, scale)
        self._known[id(scaled)] = (weakref.ref(scaled), self._unscaled(loss) if twice else loss.detach())
        self._scaler = weakref.ref(scaler)

    def value_of(self, roots: list[Tensor]) -> float | DeviceValue | None:
        """Return the loss that the script goes back from: a number, or the sum of several, without the loss scale."""
        if not roots or any(root.numel() != 1 for root in roots):
            return None
        seeds = torch_hooks.seeds()
        if len(roots) == 1 and not seeds:
            return number(self._unscaled(roots[0]))
        parts = [self._unscaled(root).reshape(()) for root in roots]
        if len(seeds) == len(parts):  # a loss that is to rise: backward(-one)
            parts = [
                x if seed is None else x * seed.detach().reshape(()).sign()
                for x, seed in zip(parts, seeds, strict=True)
            ]
        return number(torch.stack([part.to(parts[0].device) for part in parts]).sum())

    def _unscaled(self, loss: Tensor) -> Tensor:
        known = self._known.get(id(loss))
        if known is not None and known[0]() is loss:
            return known[1]
        scale = getattr(self.scaler(), "_scale", None)
        if isinstance(scale, Tensor) and is_scaled_by(loss, scale):  # it was divided, or added up, after
            return loss.detach() / scale
        return loss.detach()


class _Step:
    """A step of an optimizer that runs."""

    __slots__ = ("evaluations", "first", "ids")

    def __init__(self, ids: set[int]) -> None:
        self.ids = ids
        self.first: list[Loss] = []  # the losses of the first evaluation, once there is another
        self.evaluations = 0  # that have been followed by another


class _Sum(DeviceValue):
    """Several numbers that are there later, added up and divided."""

    __slots__ = ("_divisor", "_parts")

    def __init__(self, parts: list[float | DeviceValue], divisor: int) -> None:
        self._parts, self._divisor = parts, divisor

    def ready(self) -> bool:
        return all(not isinstance(part, DeviceValue) or part.ready() for part in self._parts)

    def value(self) -> float:
        return sum(part.value() if isinstance(part, DeviceValue) else part for part in self._parts) / self._divisor


def total(losses: list[float | DeviceValue], divisor: int) -> float | DeviceValue | None:
    """Return the sum of the backpropagated losses, or a pipeline's mean."""
    if not losses:
        return None
    if len(losses) == 1 and divisor == 1:
        return losses[0]
    return _Sum(losses, divisor)
