"""The step's boundary, found without the training loop's help.

A step ends at the last optimizer step or scaler update before the next training forward or backward. Which one was the
last is known only then, so the end is provisional (`_ended`) until something begins; a flush or a close settles it too.

Optimizers that are given a closure run forward and backward inside their step: what begins there settles the step
before, and the optimizers that are in the middle of theirs enter the new one.
"""

import weakref
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.errors import ArgumentError
from plimsoll.watch import _seams
from plimsoll.watch._casting import Casts
from plimsoll.watch._compiled import is_capturing
from plimsoll.watch._core import Core, contained
from plimsoll.watch._later import Later, number
from plimsoll.watch._names import unwrapped
from plimsoll.watch._parameters import Parameters, innermost
from plimsoll.watch._recorder import Facts, Recorder
from plimsoll.watch._taps import Taps
from plimsoll.watch.origin import Origin
from plimsoll.watch.wiring import Wiring

_backward_running = cast("Any", torch)._C._current_graph_task_id  # noqa: SLF001  (see _taps)


class Steps:
    """Hears of what training does (`_seams.Listener`), and keeps one watch's step."""

    def __init__(self, core: Core, parameters: Parameters, recorder: Recorder, *, optimizers: bool) -> None:
        self.core, self.parameters, self.recorder = core, parameters, recorder
        self.taps: Taps | None = None
        self.casts: Casts | None = None
        self.wiring: Wiring | None = None
        self.origin: Origin | None = None
        self._given = optimizers  # the user has named the optimizers: others are not ours
        self._ended = False
        self._sealed = False
        self._inside: list[Any] = []  # optimizers whose step is running
        self._forwards = 0  # training forwards since the last optimizer step
        self._looks = 2  # forwards at whose beginning it is asked what distributes the model
        self._microbatches = 1
        self._root_seen = False  # its hook runs: it is not compiled
        self._others: list[float | Later | None] = []  # losses of backwards that seem to be another model's
        self._trained_forwards = 0  # of this step, with the model in training mode
        self._losses: list[float | Later] = []
        self._scale: float | Later | None = None
        self._skipped: float | Later | None = None
        self._scaler: weakref.ref[Any] | None = None
        self._scaled_loss: tuple[weakref.ref[Tensor], Tensor] | None = None
        self._stepped_by_scaler: set[int] = set()

    # -- forward and backward ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A training forward or backward begins; not while a CUDA graph is captured, which runs nothing."""
        if self._ended and not is_capturing():
            self.settle()
            for optimizer in self._inside:
                self.parameters.enter(optimizer)

    @contained
    def forward_begins(self, model: nn.Module) -> None:
        """The root module is called."""
        taps = self.taps
        if self.core.muted:
            return
        if taps is None or Core.repeating or not torch.is_grad_enabled() or _backward_running() != -1:
            return
        if not (model.training or taps.takes_eval_forward or self._trains_in_eval_mode(taps)):
            taps.saw_eval_forward = True
            return
        self.begin()
        self._root_seen = True
        self._others.clear()
        self._trained_forwards += model.training
        self._forwards += 1
        self.core.live = True
        if self._looks:
            self._looks -= 1
            self._look(model)

    def _look(self, model: nn.Module) -> None:
        """Finds what has come to distribute the model since the watch was made."""
        _seams.look_for_pipelines()
        try:
            new = self.core.ranks.look(model)
        except ArgumentError as error:
            self.core.failed("watch", error)
            self.core.shut()
            return
        if self.taps is not None and self.core.ranks.mesh is not None:
            self.taps.come_last()
        if new:
            self.core.writer.write_manifest(ranks=self.core.ranks.as_json())

    @contained
    def gradients_divided(self, stage: Any, microbatches: int) -> None:
        """A pipeline has run a step's micro-batches, and is about to divide the weights' gradients by their number."""
        if unwrapped(stage.submod) is self.core.model():
            self._microbatches = microbatches
            factor = self.core.ranks.take_microbatches(microbatches)
            if factor != 1 and self.core.sample is not None:
                self.core.sample.rescale(factor)

    @contained
    def trial(self, stage: Any, begins: bool) -> None:
        """A pipeline's stage runs on made-up values, or has done so."""
        if unwrapped(stage.submod) is self.core.model():
            self.core.mute(begins)

    def forward_ends(self) -> None:
        """The root module has returned, or raised."""
        self.core.live = False

    @contained
    def backward_begins(self, tensors: Any) -> None:
        """A backward was asked for, of these tensors."""
        if self.core.muted or _backward_running() != -1 or is_capturing():
            return
        loss = tensors if isinstance(tensors, Tensor) else _only(tensors)
        value = None
        if loss is not None and loss.numel() == 1:
            value = number(self._unscaled(loss))
        if self._is_ours():
            self.begin()
            self._take_backward(value)
        else:
            self._others.append(value)

    @contained
    def graph_replays(self) -> None:
        """A CUDA graph runs again: with taps in it, that is a forward or a backward."""
        if self.taps is not None and self.taps.compiled.captured:
            self.begin()
            self.parameters.backwards += 1

    def backward_ends(self) -> None:
        """A backward has ended."""
        if self.core.shadow is not None:
            self.core.shadow.backward_ends()

    def _take_backward(self, loss: float | Later | None) -> None:
        self.parameters.backwards += 1
        if loss is not None:
            self._losses.append(loss)

    def _is_ours(self) -> bool:
        """Whether a backward may be of this model: it has run forward, or its forwards cannot be seen (compiled)."""
        if self._forwards or not self._root_seen:
            return bool(self._forwards) or not any(
                getattr(other, "_forwards", 0) for other in _seams.listeners() if other is not self
            )
        return False

    def _claim_backwards(self) -> None:
        """The optimizer steps, and no forward was seen: the root is compiled by now, and the backwards were ours."""
        if not self._others:
            return
        self._root_seen = False
        if self._ended:
            self.settle()
        for loss in self._others:
            self._take_backward(loss)
        self._others.clear()

    def _unscaled(self, loss: Tensor) -> Tensor:
        if self._scaled_loss is not None and self._scaled_loss[0]() is loss:
            return self._scaled_loss[1]
        return loss.detach()

    # -- optimizers ----------------------------------------------------------------------------------------------------

    @contained
    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer's step is called."""
        if not is_capturing() and self._takes(optimizer):
            self.backward_ends()  # where torch.autograd.grad was called, nobody else has told
            if not self._forwards:
                self._claim_backwards()
            self._inside.append(optimizer)
            self.parameters.enter(optimizer)

    @contained
    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer's step has returned."""
        if optimizer not in self._inside:
            return
        self._inside.remove(optimizer)
        self._stepped_by_scaler.add(id(optimizer))
        found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer skips by itself
        if isinstance(found_inf, Tensor):
            self._note_skip(found_inf)
        self.parameters.leave(optimizer)
        self._candidate()

    def _takes(self, optimizer: Any) -> bool:
        if optimizer in self.parameters.optimizers:
            return True
        if self._given or not self.parameters.owns(optimizer):
            return False
        self.parameters.adopt(optimizer)
        return True

    # -- scalers -------------------------------------------------------------------------------------------------------

    @contained
    def loss_scaled(self, scaler: Any, loss: Any, scaled: Any) -> None:
        """A scaler has scaled a loss."""
        if isinstance(loss, Tensor) and isinstance(scaled, Tensor):
            self._scaled_loss = (weakref.ref(scaled), loss.detach())

    @contained
    def scaler_step_ends(self, scaler: Any, optimizer: Any) -> None:
        """A scaler's step has returned, whether or not the optimizer stepped."""
        optimizer = innermost(optimizer)
        if not self._takes(optimizer):
            return
        self._scaler = weakref.ref(scaler)
        if self._scale is None:
            self._scale = _scale_of(scaler)
        if id(optimizer) in self._stepped_by_scaler:
            self._stepped_by_scaler.discard(id(optimizer))
            return
        self.parameters.enter(optimizer)
        self.parameters.leave(optimizer, stepped=False)
        self._note_skip(True)
        self._candidate()

    @contained
    def scaler_update_begins(self, scaler: Any) -> None:
        """A scaler is about to change its scale."""
        if self._scaler is not None and self._scaler() is scaler:
            self._scale = _scale_of(scaler)

    @contained
    def scaler_update_ends(self, scaler: Any) -> None:
        """A scaler has changed its scale."""
        if self._scaler is not None and self._scaler() is scaler:
            self._stepped_by_scaler.clear()
            self._candidate()

    def _note_skip(self, found: Tensor | bool) -> None:
        if isinstance(found, Tensor):
            self._skipped = number(found.detach())
        else:
            self._skipped = 1.0

    # -- the boundary --------------------------------------------------------------------------------------------------

    @property
    def next_step(self) -> int:
        """The number of the first step that has not ended."""
        return self.core.step + (self._ended and not self._inside)

    def _candidate(self) -> None:
        """The step may have ended here."""
        self._ended = True
        self._forwards = 0
        self._others.clear()
        if self._sealed or _backward_running() != -1 or self._inside:
            return
        self._sealed = True
        if self.taps is not None:
            self.taps.compiled.seal()
        if self.casts is not None:
            self.casts.tell()
        self.core.plan_forward(self.core.step + 1)

    def settle(self) -> None:
        """The step has ended: what was measured goes to the log, and the next one is planned."""
        core = self.core
        self._hand_over()
        core.step += 1
        core.on_request = max(0, core.on_request - 1)
        core.plan(core.step)
        self.parameters.start_step()
        self._stepped_by_scaler.clear()
        self._ended = self._sealed = False
        self._trained_forwards = 0

    def request(self, steps: int) -> None:
        """Asks for so many steps after the present one to be sampled whole."""
        self.core.on_request = steps + 1
        if self._sealed:  # the next forward may be compiled, and looks at once
            self.core.plan_forward(self.core.step + 1)

    @contained
    def _hand_over(self) -> None:
        core, taps = self.core, self.taps
        sample = core.sample
        self.parameters.finish_step()
        if taps is not None:
            if not self._sealed:
                taps.compiled.seal()
            taps.forget()
            self._trains_in_eval_mode(taps)
            taps.saw_eval_forward = False
        if core.shadow is not None:
            core.shadow.end_step()
        self.recorder.end_step(self._facts(), sample)

    def settle_if_ended(self) -> None:
        """Settles a step whose end is provisional still."""
        if self._ended and not self._inside:
            self.settle()

    def end_by_hand(self) -> None:
        """The user says that the step ends here."""
        self._candidate()
        self.settle()

    def _facts(self) -> Facts:
        losses, self._losses = self._losses, []
        scale, self._scale = self._scale, None
        skipped, self._skipped = self._skipped, None
        count = self.parameters.count_nonfinite()
        nonfinite = None if count is None else number(count)
        microbatches, self._microbatches = self._microbatches, 1
        loss = _total(losses, microbatches)
        return Facts(step=self.core.step, loss=loss, scale=scale, nonfinite=nonfinite, skipped=skipped)

    def _trains_in_eval_mode(self, taps: Taps) -> bool:
        """Whether a step has come of forwards in eval mode alone, which looked like evaluation till then."""
        stepped = self._ended and taps.saw_eval_forward and self.parameters.backwards
        if stepped and not self._trained_forwards and not taps.takes_eval_forward:
            taps.takes_eval_forward = True
            self.core.say("eval mode", "the model is trained in eval mode: its activations are recorded from here on")
        return taps.takes_eval_forward

    @contained
    def process_ends(self, reason: str, message: str, seconds: float) -> None:
        """The process is about to end."""
        self.recorder.fire(reason, message)
        self.core.writer.flush(seconds)


def _only(tensors: Any) -> Tensor | None:
    listed = list(tensors)
    return listed[0] if len(listed) == 1 and isinstance(listed[0], Tensor) else None


def _total(losses: list[float | Later], divisor: int) -> float | Later | None:
    """The sum of the losses that were backpropagated (with accumulation, of all micro-batches); a pipeline's mean."""
    if not losses:
        return None
    if len(losses) == 1 and divisor == 1:
        return losses[0]
    return _Sum(losses, divisor)


class _Sum(Later):
    """Several numbers that are there later, added up and divided."""

    __slots__ = ("_divisor", "_parts")

    def __init__(self, parts: list[float | Later], divisor: int) -> None:
        self._parts, self._divisor = parts, divisor

    def ready(self) -> bool:
        return all(not isinstance(part, Later) or part.ready() for part in self._parts)

    def value(self) -> float:
        return sum(part.value() if isinstance(part, Later) else part for part in self._parts) / self._divisor


def _scale_of(scaler: Any) -> float | Later | None:
    """The scale as it is now, without waiting for a device."""
    scale = getattr(scaler, "_scale", None)
    if isinstance(scale, Tensor):
        return number(scale.detach())
    return float(scaler.get_scale()) if hasattr(scaler, "get_scale") else None
