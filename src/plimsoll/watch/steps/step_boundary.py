"""Boundary between two steps, found without help of the training loop.

A step ends at the last optimizer step or scaler update before the next training forward or backward. Which one was the
last is known only then, so the end is provisional (`_ended`) until something begins; a flush or a close settles it too.
"""

import math
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.errors import ArgumentError
from plimsoll.kernels.device_value import DeviceValue, number
from plimsoll.kernels.operators.checks import is_transformed
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.hooks.autograd_graph import backward_running
from plimsoll.watch.hooks.torch_hooks import outside_transforms
from plimsoll.watch.names import unwrapped
from plimsoll.watch.parameters.optimizer_tensors import Parameters, has_unscaled, innermost
from plimsoll.watch.parameters.updates import Probe
from plimsoll.watch.session import WatchSession, contained, contained_reader
from plimsoll.watch.settings import COLLECTIONS
from plimsoll.watch.steps.flight_recorder import Recorder, StepScalars
from plimsoll.watch.steps.losses import MAIN, Losses, ScaledLosses, total
from plimsoll.watch.steps.model_structure import Structure
from plimsoll.watch.steps.nonfinite_origin import Origin
from plimsoll.watch.steps.turns import Turns
from plimsoll.watch.steps.wiring.listener import Wiring
from plimsoll.watch.taps.cast_counts import Casts
from plimsoll.watch.taps.compiled_taps import is_capturing
from plimsoll.watch.taps.module_taps import Taps

_EMULATIONS = 16  # changes that are recorded: a script may emulate every other batch


class Steps(torch_hooks.TrainingEvents):
    """Listener of the training's events that starts and ends the steps of one watch."""

    def __init__(self, session: WatchSession, parameters: Parameters, recorder: Recorder, *, optimizers: bool) -> None:
        self.session, self.parameters, self.recorder = session, parameters, recorder
        self.taps: Taps | None = None
        self.casts: Casts | None = None
        self.wiring: Wiring | None = None
        self.origin: Origin | None = None
        self.structure: Structure | None = None
        self._given = optimizers  # the user has named the optimizers: others are not ours
        self._ended = False  # the step may have ended
        self._sealed = False  # and the next forward is planned
        self._inside: list[Any] = []  # optimizers whose step is running
        self._thread: int | None = None  # that trains the model
        self._has_stepped = False  # an optimizer of ours has stepped on that thread
        self._looks = 2  # forwards that still look for what distributes the model
        self._emulated: dict[str, str] = {}  # formats that results were rounded to in the last forward
        self._emulations = 0  # how often that has changed
        self._microbatches = 1
        self._trained_forwards = 0  # of this step, with the model in training mode
        self.losses = Losses(session, parameters)
        self._scaled_losses = ScaledLosses()
        self._broken = False  # the loss of the last backward is not finite
        self._micro_losses: list[float | DeviceValue] = []  # of this step's backwards, for a pipeline
        self._turns = Turns(session)
        self._without_optimizer = not optimizers  # as long as no optimizer steps, and nobody says where a step ends
        self._probe: Probe | None = None
        self._scale: float | DeviceValue | None = None
        self._skipped: float | DeviceValue | None = None
        self._scaler: weakref.ref[Any] | None = None
        self._stepped: set[int] = set()  # optimizers, by identity, since the scaler's last update
        self._awaits_update = False  # a scaler has stepped one of ours in this step

    # -- forward and backward ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a training forward or backward; not while a CUDA graph is captured."""
        # A checkpoint's second forward begins one too, unless optimizers that step within this backward have ended it.
        if self._ended and not is_capturing() and (self._sealed or backward_running() == -1):
            self.settle()
            for optimizer in self._inside:
                self.parameters.enter(optimizer)

    @contained
    def forward_begins(self, model: nn.Module) -> None:
        """The root module is called."""
        taps = self.taps
        if self.session.muted:
            return
        if taps is None or WatchSession.repeating or not torch.is_grad_enabled() or backward_running() != -1:
            return
        self._follow_eval_mode(taps)
        if not (model.training or taps.takes_eval_forward):
            taps.saw_eval_forward = True
            return
        if is_transformed():
            self.begin_transformed()
            return
        if not self._has_stepped:
            self._thread = threading.get_ident()
        self.session.flush()  # what a backward that raised has left
        self._end_without_optimizer()
        self.begin()
        self._trained_forwards += model.training
        self.session.live, self.session.live_thread = True, threading.get_ident()
        if self._looks:
            self._looks -= 1
            self._look_for_parallelism(model)
        if self.structure is not None:
            self.structure.follow()
        self._record_emulation()

    @contained
    def begin_transformed(self) -> None:
        """The model, or a part of it, is called inside a `torch.func` transform: a step begins, unmeasured."""
        self.session.say_transformed()
        # Inside the model's own forward the step has begun, and a repetition of that forward runs the transform too.
        if self.session.live or backward_running() != -1:
            return
        with outside_transforms():
            self._end_without_optimizer()
            self.begin()
        if self.session.shadow is not None:
            self.session.shadow.begin_transformed()

    def _record_emulation(self) -> None:
        """Record the formats in which the forward is emulated, since its tensors are FP32."""
        by_key = {key: name for formats in torch_hooks.emulated for key, name in formats().items()}
        if by_key != self._emulated and self._emulations < _EMULATIONS:
            self._emulated, self._emulations = by_key, self._emulations + 1
            named = ", ".join(f"{key.replace('_', ' ')} in {name}" for key, name in by_key.items())
            message = (
                f"results are rounded by an emulation: {named}" if by_key else "no emulation rounds results any more"
            )
            self.session.say("emulation", message, formats=by_key)

    def _look_for_parallelism(self, model: nn.Module) -> None:
        """Find what distributes the model and was set up after the watch was made."""
        torch_hooks.look_for_pipelines()
        try:
            new = self.session.ranks.look(model)
        except ArgumentError as error:
            self.session.failed("watch", error)
            self.session.shut()
            return
        if self.taps is not None and self.session.ranks.mesh is not None:
            self.taps.come_last()
        if new:
            self.session.writer.write_manifest(ranks=self.session.ranks.as_json())

    @contained
    def gradients_divided(self, stage: Any, microbatches: int) -> None:
        """Note a pipeline's micro-batches, before it divides the weights' gradients."""
        if unwrapped(stage.submod) is self.session.model():
            self._microbatches = microbatches
            factor = self.session.ranks.take_microbatches(microbatches)
            if factor != 1 and self.session.sample is not None:
                self.session.sample.rescale(factor)

    @contained
    def trial(self, stage: Any, begins: bool) -> None:
        """A pipeline's stage runs on made-up values, or has done so."""
        if unwrapped(stage.submod) is self.session.model():
            if begins:
                self.session.mute()
            else:
                self.session.unmute()

    def forward_ends(self) -> None:
        """The root module has returned, or raised."""
        if (
            self.session.live and self.session.live_thread != threading.get_ident()
        ):  # an evaluation on a thread of its own
            return
        self.session.live = False
        self.session.flush()

    @contained
    def backward_begins(self, tensors: Any) -> None:
        """A backward was asked for, of these tensors."""
        if self.session.muted or WatchSession.repeating or backward_running() != -1 or is_capturing():
            return
        listed: list[Any] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        roots = [root for root in listed if isinstance(root, Tensor)]
        thread = threading.get_ident()
        ours = self._thread
        if ours not in (None, thread) and self.parameters.reach(roots) not in ("ours", "both"):
            self.session.elsewhere.add(thread)
            return
        # Before the model's first forward nobody knows its thread. Another's backward may last until gradients of ours
        # have come, and would be taken for theirs.
        if ours is None and thread != threading.main_thread().ident and self.parameters.reach(roots) == "others":
            return
        self.session.elsewhere.discard(thread)
        self.session.flush()  # parts of the model may have been called by themselves
        self._end_without_optimizer()
        if self.session.shadow is not None:
            self.session.shadow.backward_begins()
        value = self._scaled_losses.value_of(roots) if len(roots) == len(listed) else None
        if value is not None and self.session.ranks.world > 1:
            self._micro_losses.append(value)
        self.losses.backward_begins(value, roots)
        self._broken = isinstance(value, float) and not math.isfinite(value)

    @contained
    def norm_taken(self, norm: Any, tensors: int) -> None:
        """The norm of some gradients was taken, to clip them: if it is not finite, all gradients are counted."""
        if isinstance(norm, Tensor) and norm.device.type == "cpu" and norm.numel() == 1 and not norm.is_meta:
            self.parameters.suspect |= not math.isfinite(float(norm.detach()))

    @contained
    def graph_replays(self) -> None:
        """A CUDA graph runs again: with taps in it, that is a forward or a backward."""
        if self.taps is not None and self.taps.compiled.captured:
            self.begin()
            self.parameters.backwards += 1

    @contained
    def backward_ends(self) -> None:
        """A backward has ended."""
        if self.session.is_elsewhere():
            return
        within = backward_running() != -1
        if not within:
            self.session.flush()
        if not within and self.losses.backward_ends():
            self.begin()
            self.parameters.backwards += 1
            self.parameters.suspect |= self._broken
            if self._without_optimizer and self.session.ranks.world == 1:
                self.parameters.read_early()
                self._probe = Probe(p for _, p in self.parameters.members() if p.grad is not None)
        self._shadow_follows()

    def _end_without_optimizer(self, *, closing: bool = False) -> None:
        """End a step without an optimizer: the script itself has changed the weights."""
        if not self._without_optimizer or self._probe is None or self._inside:
            return
        # Gradients are dropped, too, that another model's loss has left here: where weights can be seen, they decide.
        if self._probe.is_moved(unknown=closing or self.losses.are_used()):
            self.losses.take_all()
            self.parameters.leave_early()
            self._probe = None
            self._mark_possible_end()
            self.settle()

    def _shadow_follows(self) -> None:
        if self.session.shadow is not None:
            self.session.shadow.backward_ends()

    # -- optimizers ----------------------------------------------------------------------------------------------------

    # Optimizers that are given a closure run forward and backward inside their step: what begins there settles the step
    # before, and the optimizers that are in the middle of theirs enter the new one. Of an optimizer and the one that it
    # has inside, such as Lookahead's, only the latter is read: it has the gradients and the state.
    @contained
    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer's step is called."""
        if is_capturing() or innermost(optimizer) is not optimizer:
            return
        if self._takes(optimizer):
            # Of a call of torch.autograd.grad nothing else reports the end.
            if backward_running() == -1:
                self.session.flush()
            if self._turns.has(optimizer) and self.losses.are_assigned_again():
                self.begin()
            self._shadow_follows()
            self.losses.step_begins(optimizer)
            self._inside.append(optimizer)
            self._turns.enter(optimizer)
            if self.structure is not None:  # no hook has seen a model that is compiled, or called in parts
                self.structure.follow()
            self.parameters.enter(optimizer)

    @contained
    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer's step has returned."""
        if optimizer not in self._inside:
            if self._thread in (None, threading.get_ident()):
                self.losses.others_step()
            return
        self._inside.remove(optimizer)
        self._stepped.add(id(optimizer))
        found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer skips by itself
        if isinstance(found_inf, Tensor):
            self._skipped = number(found_inf.detach())
        scaler = self._scaled_losses.scaler()
        if has_unscaled(scaler, optimizer):  # a script that looks at the gradients itself may call no scaler's step
            self._awaits(scaler)
        self.losses.step_ends(optimizer)
        self.parameters.leave(optimizer)
        self._mark_possible_end()

    def _takes(self, optimizer: Any) -> bool:
        if optimizer not in self.parameters.optimizers:
            if not self.parameters.owns(optimizer):
                return False
            if self._given and not self.parameters.takes_over(optimizer):
                return False
            self.parameters.adopt(optimizer)
            if self._given:
                who = type(optimizer).__name__
                message = f"{who} updates parameters of the model too, and is recorded from here on"
                self.session.say("optimizer", message, optimizer=who)
        self._without_optimizer, self._probe = False, None
        if backward_running() == -1:  # else it may be a device's thread
            self._thread, self._has_stepped = threading.get_ident(), True
        return True

    # -- scalers -------------------------------------------------------------------------------------------------------

    @contained
    def loss_scaled(self, scaler: Any, loss: Any, scaled: Any) -> None:
        """A scaler has scaled a loss."""
        if isinstance(loss, Tensor) and isinstance(scaled, Tensor):
            if (
                scaled is not loss and self._scaled_losses.scaler() is None
            ):  # diagnosis advises no scaler that the run has already
                self.session.writer.write_manifest(scaler=type(scaler).__name__)
            self._scaled_losses.add(scaler, loss, scaled)

    @contained
    def scaler_step_ends(self, scaler: Any, optimizer: Any) -> None:
        """A scaler's step has returned, whether or not the optimizer stepped."""
        optimizer = innermost(optimizer)
        if not self._takes(optimizer):
            return
        self._awaits(scaler)
        if id(optimizer) in self._stepped:
            self._stepped.discard(id(optimizer))
            if isinstance(scaler, torch.amp.GradScaler):
                known_skip = isinstance(self._skipped, float) and self._skipped > 0
                self.parameters.judge(optimizer, finite=not known_skip)
            return
        self.losses.step_begins(optimizer)
        self._turns.enter(optimizer)
        # The few gradients that are looked at may be finite although the scaler has met one that is not: all are
        # counted.
        self.parameters.suspect = True
        self.parameters.enter(optimizer)
        self.losses.step_ends(optimizer)
        self.parameters.leave(optimizer, stepped=False)
        self._skipped = 1.0
        self._mark_possible_end()

    def _awaits(self, scaler: Any) -> None:
        """Take the step's scale from a scaler, whose update ends the step."""
        self._scaler, self._awaits_update = weakref.ref(scaler), True
        if self._scale is None:
            self._scale = _scale_of(scaler)

    @contained
    def scaler_update_begins(self, scaler: Any) -> None:
        """A scaler is about to change its scale."""
        for optimizer in list(self.parameters.optimizers):
            # Unscaled and not stepped: the script has skipped the step by itself.
            if id(optimizer) not in self._stepped and has_unscaled(scaler, optimizer):
                self.scaler_step_ends(scaler, optimizer)
        if self._awaits_update and self._scaler is not None and self._scaler() is scaler:
            self._scale = _scale_of(scaler)

    @contained
    def scaler_update_ends(self, scaler: Any) -> None:
        """A scaler has changed its scale."""
        if self._awaits_update and self._scaler is not None and self._scaler() is scaler:
            self._awaits_update = False
            self._stepped.clear()
            self._mark_possible_end()

    # -- the boundary --------------------------------------------------------------------------------------------------

    @property
    def next_step(self) -> int:
        """The number of the first step that has not ended; one that an optimizer is making has not."""
        has_ended = self._ended and not self._inside
        return self.session.step + 1 if has_ended else self.session.step

    # No hook has seen the forward of a compiled model, so that the step before may not be settled yet.
    @property
    def step_of_backward(self) -> int:
        """The number of the step that a backward which begins now belongs to."""
        return self.session.step + 1 if self._ended else self.session.step

    def _mark_possible_end(self) -> None:
        """The step may have ended here."""
        self._ended = True
        if self._sealed or backward_running() != -1 or self._inside:
            return
        self._sealed = True
        if self.taps is not None:
            self.taps.compiled.seal()
        if self.casts is not None:
            self.casts.tell()
        self._plan_forward()

    def _plan_forward(self) -> None:
        step = self.session.step + 1
        self.session.plan_forward(step, self._turns.number(step))
        self._attach_taps()

    def _attach_taps(self) -> None:
        """Attach the taps if the planned forward is due, and remove them otherwise."""
        if self.taps is not None:
            self.taps.attach(self.session.due.forward)

    def settle(self) -> None:
        """End the step: hand its measurements to the recorder, and plan the next one."""
        session = self.session
        self._hand_over()
        self._turns.end()
        session.step, self._ended = (
            session.step + 1,
            False,
        )  # in one statement: an interrupt must not leave one of both done
        session.on_request = max(0, session.on_request - 1)
        session.plan(session.step, self._turns.number(session.step))
        self._attach_taps()
        self.parameters.start_step()
        self.losses.start_step()
        self._stepped.clear()
        self._sealed = self._awaits_update = False
        self._scale = self._skipped = None
        self._microbatches, self._micro_losses = 1, []
        self._trained_forwards = 0

    def request(self, steps: int) -> None:
        """Asks for so many steps after the present one to be sampled whole."""
        self.session.on_request = steps + 1
        if self._sealed:  # the next forward may be compiled, and looks at once
            self._plan_forward()

    @contained_reader(*COLLECTIONS)
    def _hand_over(self) -> None:
        session, taps = self.session, self.taps
        sample = session.sample
        session.flush()
        self.parameters.finish_step()
        if taps is not None:
            if not self._sealed:
                taps.compiled.seal()
            taps.forget()
            self._follow_eval_mode(taps)
            taps.saw_eval_forward = False
        if session.shadow is not None:
            session.shadow.end_step()
        self.recorder.end_step(self._scalars_of_step(), sample)

    def settle_if_ended(self, *, closing: bool = False) -> None:
        """Settles a step whose end is provisional still."""
        self._end_without_optimizer(closing=closing)
        if self._ended and not self._inside:
            self.settle()

    def end_by_hand(self) -> None:
        """The user says that the step ends here."""
        self._without_optimizer, self._probe = False, None
        self.losses.take_all()
        self._mark_possible_end()
        self.settle()

    def _scalars_of_step(self) -> StepScalars:
        count = self.parameters.count_nonfinite()
        losses = self.losses.end_step(self._microbatches)
        if self._microbatches > 1 and self._micro_losses:  # a pipeline; with FSDP gradients come after its backwards
            losses[MAIN] = total(self._micro_losses, self._microbatches) or 0.0
        return StepScalars(
            step=self.session.step,
            loss=losses.pop(MAIN, None),
            other_losses=losses,
            scale=self._scale,
            nonfinite=None if count is None else number(count),
            skipped=self._skipped,
        )

    # Forwards in eval mode look like evaluation until a step has come of them alone.
    def _follow_eval_mode(self, taps: Taps) -> None:
        """Take forwards in eval mode as training from now on if the step was made of nothing else."""
        stepped = self._ended and taps.saw_eval_forward and self.parameters.backwards
        if stepped and not self._trained_forwards and not taps.takes_eval_forward:
            taps.takes_eval_forward = True
            self.session.say(
                "eval mode", "the model is trained in eval mode: its activations are recorded from here on"
            )

    @contained
    def process_ends(self, reason: str, message: str, seconds: float) -> None:
        """The process is about to end."""
        self.recorder.fire(reason, message)
        self.session.writer.flush(seconds)


def _scale_of(scaler: Any) -> float | DeviceValue | None:
    """The scale as it is now, without waiting for a device."""
    scale = getattr(scaler, "_scale", None)
    if isinstance(scale, Tensor):
        return number(scale.detach())
    return float(scaler.get_scale()) if hasattr(scaler, "get_scale") else None
