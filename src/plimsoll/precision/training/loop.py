"""Training loop that `prepare` returns.

Its parts are elsewhere: `levels.active_level` applies the level to the model, `optimizer_step` handles gradients and
optimizers, `batch_replay` repeats batches, and `checkpoint` saves.
"""

import contextlib
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.emulate.module_regions import cast_floating
from plimsoll.errors import ArgumentError, StateError
from plimsoll.precision.levels.active_level import ActiveLevel, check_stage
from plimsoll.precision.levels.arithmetic import device_of
from plimsoll.precision.levels.catalogue import Schedule, Stage, level_named
from plimsoll.precision.levels.distributed import any_rank, gradients_stay, level_on, process_group
from plimsoll.precision.levels.policy import Policy
from plimsoll.precision.training import checkpoint
from plimsoll.precision.training.batch_replay import Batch
from plimsoll.precision.training.loop_control import LoopControl
from plimsoll.precision.training.optimizer_step import Stepped, lowered, step_plainly, step_scaled
from plimsoll.precision.training.plan_scaler import begin_at, check_scaling, detach, scaler_of
from plimsoll.scaling.step import StepOutcome
from plimsoll.watch import Watch
from plimsoll.watch.names import unwrapped

Optimizer = torch.optim.Optimizer
PREPARED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # root modules that have a loop


class Loop(LoopControl):
    """Training step in one object, created by `plimsoll.prepare`.

    Run the model and the loss inside ``with loop.forward():``. Then ``loop.step(loss)`` runs backward, unscales and
    clips the gradients, steps the optimizer and the scheduler, and clears the gradients. The loop owns the gradients:
    it clears them after every step. ``with plimsoll.prepare(...) as loop:`` closes the loop at the end.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        schedule: Schedule,
        *,
        policy: Policy,
        scaler: Any,
        owns_scaler: bool,
        clip_norm: float | None,
        accumulate: int,
        schedulers: Sequence[Any],
        max_retries: int,
    ) -> None:
        self._model, self._root = model, unwrapped(model)
        self._given, self._schedule, self._policy = tuple(optimizers), schedule, policy
        self._clip_norm, self._accumulate, self._schedulers = clip_norm, accumulate, tuple(schedulers)
        self._max_retries = max_retries
        self._watch: Watch | None = None
        self._owns_watch = False
        self._step_index = self._micro = 0
        self._inside: str | None = None
        self._losses: list[Tensor] = []
        self._loss: Tensor | None = None
        self._forwards = 0
        self._closed = False
        self._given_scaler, self._made_scaler = scaler, cast("Any", None)
        self._owns_scaler = owns_scaler  # it was given by its name
        self._group = process_group(model)
        self._check_stages()
        for optimizer in self._given:
            optimizer.zero_grad()
        self._applied = ActiveLevel(model, self._given, schedule.at(0), policy)
        self._batch = Batch(self._root)
        if scaler is None:
            try:
                # After the level, since the scaler's hooks must run outside of the level's.
                self._made_scaler = scaler_of(model, schedule)
            except Exception:
                self._applied.take_back()
                raise
        PREPARED.add(self._root)

    # -- properties ----------------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """Model that is trained.

        Set it to the same module in a wrapper: DistributedDataParallel, torch.compile.
        """
        return self._model

    @model.setter
    def model(self, wrapper: nn.Module) -> None:
        if unwrapped(wrapper) is not self._root:
            raise ArgumentError(
                f"loop.model: expected the prepared module in a wrapper; got another {type(wrapper).__name__}. "
                "Write loop.model = DistributedDataParallel(loop.model)."
            )
        before = self._model, self._group
        self._model, self._group = wrapper, process_group(wrapper)
        try:
            self._check_stages()
        except ArgumentError:
            self._model, self._group = before
            raise

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer that steps: the user's own, or the level's wrapper around it.

        It is the first one of several.
        """
        return self._applied.optimizers[0]

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Optimizers that step."""
        return self._applied.optimizers

    @property
    def scaler(self) -> Any:
        """Loss scaler in use, or None if the loss is not scaled."""
        if self._given_scaler is not None:
            return self._given_scaler
        return self._made_scaler if self._applied.level.scaled else None

    @property
    def precision(self) -> str:
        """Name of the active level."""
        return self._applied.stage.level.name

    @property
    def policy(self) -> Policy:
        """Operation lists and module rules."""
        return self._policy

    @property
    def step_index(self) -> int:
        """Number of finished steps, with skipped ones.

        Micro-batches and repetitions do not count.
        """
        return self._step_index

    @property
    def loss(self) -> Tensor | None:
        """Mean loss of the last step's micro-batches, detached, or None before it."""
        return self._loss

    @property
    def watch(self) -> Watch | None:
        """Attached watch, or None."""
        return self._watch

    @property
    def formats(self) -> dict[str, str]:
        """Format of each module's weights, by module name. The root is "model"."""
        return {name or "model": fmt for name, fmt in self._applied.placement.formats.items()}

    @property
    def fp8_left(self) -> dict[str, str]:
        """Linear layers that do not run in FP8 at an FP8 level, with the reason."""
        return {} if self._applied.fp8 is None else {left.module: left.why for left in self._applied.fp8.left}

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    # -- the step ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def forward(self) -> Generator[None]:
        """Context of a training forward and its loss, with the level's arithmetic."""
        self._enter("forward")
        try:
            if self._accumulate > 1 and self._applied.fp8 is not None:
                self._applied.fp8.hold_weights()
            with self._applied.computing.forward(), gradients_stay(self._model, not self._last_micro):
                yield
        finally:
            self._inside = None
        self._forwards += 1

    @contextlib.contextmanager
    def evaluate(self) -> Generator[nn.Module]:
        """Context of an evaluation in the same arithmetic, without gradients.

        The model is in `eval` mode inside.
        """
        self._enter("evaluate")
        modes = [(module, module.training) for module in self._model.modules()]
        try:
            self._model.eval()
            with torch.no_grad(), self._applied.computing.forward():
                yield self._model
        finally:
            self._inside = None
            for module, training in modes:
                module.training = training

    def inputs(self, value: Any) -> Any:
        """Return a structure with floating-point tensors in the weights' dtype.

        A call of the model does this by itself. Use it for calls of a part: ``model.encode(loop.inputs(x))``.
        """
        return cast_floating(value, self._applied.level.dtype) if self._applied.level.casts else value

    def step(self, loss: Tensor | Callable[[], Tensor]) -> StepOutcome:
        """Run one training step, or one micro-batch of it, and return its outcome.

        It waits for the device if there are schedulers, with `max_retries`, and under a scaler if an optimizer is not
        fused. A step that raises drops its gradients. A closure runs the forward and returns the loss; the loop enters
        `forward` around it. With ``max_retries`` the closure is repeated at a lower scale if gradients overflow, with
        random generators and buffers restored. Everything that changes from batch to batch must therefore be bound to
        the closure.

        With ``accumulate=N`` the gradient is the mean over N micro-batches (each loss is divided by N), and every N-th
        call steps. The outcome of the other calls reports that the loop accumulates.
        """
        self._check_step(loss)
        if isinstance(loss, Tensor):
            self._backward(loss)
        else:
            self._first_run(loss)
        self._micro += 1
        if self._micro < self._accumulate:
            reason = f"accumulating: {self._micro} of {self._accumulate}"
            return StepOutcome(stepped=False, scale=self._scale(), reason=reason)
        try:
            stepped, retries = self._finish_or_repeat()
        except BaseException:
            self.zero_grad()  # or the micro-batches of a step that has failed would count for the next
            raise
        return self._end_of_step(stepped, retries)

    def zero_grad(self) -> None:
        """Drop all gradients and the micro-batches so far, as after every step."""
        self._drop_gradients()
        self._release_weights()
        self._micro = self._forwards = 0
        self._losses.clear()
        self._batch.clear()

    @property
    def _last_micro(self) -> bool:
        return self._micro + 1 >= self._accumulate

    def _first_run(self, closure: Callable[[], Tensor]) -> None:
        if not self._max_retries:
            self._run(closure)
            return
        self._batch.begin(closure)
        try:
            self._run(closure)
        except BaseException:
            self._batch.drop_last()
            raise
        self._batch.end()

    def _run(self, closure: Callable[[], Tensor]) -> None:
        with self.forward():
            loss = closure()
        _check_loss(loss)
        self._backward(loss)

    def _backward(self, loss: Tensor) -> None:
        self._forwards = 0
        self._losses.append(loss.detach())
        if self._accumulate > 1:
            loss = loss / self._accumulate
        scaler = self.scaler
        try:
            with self._applied.computing.backward(), gradients_stay(self._model, not self._last_micro):
                (loss if scaler is None else scaler.scale(loss)).backward()
        except BaseException:
            self.zero_grad()  # or the part of a gradient that is there would count for the next step
            raise

    def _finish_or_repeat(self) -> tuple[Stepped, int]:
        if self._skips is not None:
            return self._finish_skipping(), 0
        stepped, retries = self._finish(), 0
        while retries < self._max_retries and self._worth_repeating(stepped.outcome):
            self._drop_gradients()
            self._losses.clear()
            for number, closure in enumerate(self._batch.rewound()):
                self._micro = number
                self._run(closure)
            stepped, retries = self._finish(), retries + 1
        return stepped, retries

    def _finish(self) -> Stepped:
        self._release_weights()
        with self._applied.computing.backward():
            if self.scaler is None:
                return step_plainly(self.optimizers, self._clip_norm)
            return step_scaled(self.optimizers, self.scaler, self._clip_norm)

    def _worth_repeating(self, outcome: StepOutcome) -> bool:
        """Return whether a lower scale can save the step: its loss is finite."""
        device = device_of(self._root)
        if not any_rank(not outcome.stepped, self._group, device):
            return False
        if outcome.stepped:
            raise StateError(
                "step: expected all ranks to skip a batch that overflowed on one of them; got one that stepped. Give "
                "the scaler their process_group, so that they decide together."
            )
        broken = not bool(torch.stack([loss.float().reshape(()) for loss in self._losses]).isfinite().all())
        return not any_rank(broken, self._group, device) and lowered(self.scaler, outcome.scale)

    def _end_of_step(self, stepped: Stepped, retries: int) -> StepOutcome:
        outcome = stepped.outcome.after_retries(retries) if retries else stepped.outcome
        self._loss = torch.stack([loss.reshape(()) for loss in self._losses]).mean()
        self.zero_grad()
        self._step_index += 1  # before the calls of others' code, which may raise
        if self._watch is not None and not self._watch.closed:
            norms = {} if stepped.norm is None else {"grad_norm": stepped.norm}
            self._watch.log(**norms, **({"retries": retries} if self._max_retries else {}))
        if self._schedulers and outcome.stepped:
            for scheduler in self._schedulers:
                scheduler.step()
        self._follow(self._schedule.at(self._step_index))
        for call in self._after_steps:
            call()
        return outcome

    def _release_weights(self) -> None:
        if self._applied.fp8 is not None:
            self._applied.fp8.release_weights()

    def _drop_gradients(self) -> None:
        for optimizer in self._applied.optimizers:
            optimizer.zero_grad()
        self._root.zero_grad()

    def _enter(self, operation: str) -> None:
        self._check_open(operation)
        if self._inside is not None:
            raise StateError(
                f"{operation}: expected no context of the loop to be open; got one inside {self._inside}. Close that "
                "first; a closure for loop.step runs inside forward already."
            )
        self._inside = operation

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise StateError(f"{operation}: expected an open loop; got one that is closed. Prepare the model again.")

    def _check_step(self, loss: object) -> None:
        self._check_open("step")
        if self._inside is not None:
            raise StateError(
                f"step: expected the context of {self._inside} to have ended; got a call inside it. Move loop.step out "
                "of the with block."
            )
        if not isinstance(loss, Tensor):
            if not callable(loss):
                raise ArgumentError(
                    f"step: expected a loss, or a closure that returns one; got {type(loss).__name__}. "
                    "Write loop.step(loss)."
                )
            return
        if self._max_retries:
            raise ArgumentError(
                f"step: expected a closure, which can be repeated, with max_retries={self._max_retries}; got a loss. "
                "Write loop.step(lambda: loss_of(model(x), y))."
            )
        if not self._forwards:
            raise StateError(
                "step: expected a forward since the last step; got none. Compute the loss inside "
                "`with loop.forward():`, where the level's arithmetic is active."
            )
        _check_loss(loss)

    # -- levels --------------------------------------------------------------------------------------------------------

    def _check_stages(self) -> None:
        """Raise now for a stage that could not be applied at a later step."""
        stages = self._schedule.stages
        check_scaling(self._root, self._schedule, self._given_scaler, self._made_scaler)
        for stage in stages:
            check_stage(self._model, self._given, stage, self._policy)
        levels = [level_on(self._model, stage.level) for stage in stages]
        formats = {(level.weights, level.norms) for level in levels}
        if self._group is not None and len(formats) > 1:
            raise ArgumentError(
                f"prepare: expected a distributed model to keep the dtype of its weights; got a schedule of "
                f"{', '.join(level.name for level in levels)}. Change among the amp levels, or stop and resume."
            )
        if self._max_retries and self._given_scaler is None and not any(level.scaled for level in levels):
            raise ArgumentError(
                f"prepare: expected max_retries with a level that scales the loss, as amp-fp16; got "
                f"max_retries={self._max_retries} at {levels[0].name}, where no scale can be lowered. Leave it out."
            )

    def _follow(self, stage: Stage, *, fresh: bool = True) -> None:
        """Change to another level if the stage differs.

        A `fresh` stage starts at the scale of its plan.
        """
        if stage == self._applied.stage:
            return
        self._applied.take_back()
        self._applied = ActiveLevel(self._model, self._given, stage, self._policy)
        if fresh:
            begin_at(self._made_scaler, self._root, stage)

    def _scale(self) -> float | Tensor:
        scale = getattr(self.scaler, "_scale", None)
        return cast("Tensor", scale) if scale is not None else 1.0

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self, *, random: bool | None = None) -> dict[str, Any]:
        """Return everything that an exact resume needs.

        That is the state of model, optimizers, masters, scaler and schedulers, and the step. Tensors are references:
        save or copy them before the next step. The position of the data loader is not included.

        Args:
            random: Include the generators of Python, NumPy, the CPU and the model's device. Default: only in a run of
                one process, since each rank has its own.
        """
        if self._micro:
            raise StateError(
                f"state_dict: expected a call between steps; got one after {self._micro} of {self._accumulate} "
                "micro-batches, whose gradients it does not hold. Save after a step, or call zero_grad() before."
            )
        wants_random = checkpoint.world_size() == 1 if random is None else random
        return {
            "schema": checkpoint.SCHEMA,
            "precision": self.precision,
            "step": self._step_index,
            "model": self._root.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scaler": None if self._any_scaler is None else self._any_scaler.state_dict(),
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
            "random": checkpoint.random_state(self._root) if wants_random else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state, bit for bit as if training had not stopped.

        A state of another level is converted, as a schedule would: values that both levels keep in FP32 pass exactly.
        """
        self._check_open("load_state_dict")
        checkpoint.checked(state, optimizers=len(self._given), schedulers=len(self._schedulers))
        self.zero_grad()
        self._follow(self._stage_named(state["precision"]), fresh=False)
        self._root.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if self._any_scaler is not None and state["scaler"] is not None:
            self._any_scaler.load_state_dict(state["scaler"])
        for scheduler, saved in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        self._step_index = state["step"]
        self._follow(self._schedule.at(self._step_index), fresh=False)
        if state["random"] is not None:
            checkpoint.restore_random(state["random"], self._root)

    def _stage_named(self, name: str) -> Stage:
        """Return the stage of a checkpoint, from the schedule or by the level's name."""
        stage = next((stage for stage in self._schedule.stages if stage.level.name == name), None)
        if stage is not None:
            return stage
        return Stage(level=level_named("fp32" if name.startswith("plan (") else name))  # plans keep weights in FP32

    @property
    def _any_scaler(self) -> Any:
        return self._given_scaler if self._given_scaler is not None else self._made_scaler

    # -- the end -------------------------------------------------------------------------------------------------------

    def attach(self, watch: Watch, *, owned: bool) -> None:
        """Report each step to the watch. The loop closes an owned watch."""
        self._watch, self._owns_watch = watch, owned

    def close(self) -> None:
        """Restore the model in FP32 from the master weights, and the user's optimizer.

        Closing twice does nothing. All hooks of the loop are removed, and a watch that the loop started is closed. A
        loop that is dropped without `close` leaves the model at its level, casts included, so that it can still be
        used.
        """
        if self._closed:
            return
        self._closed = True
        self.zero_grad()
        if self._owns_watch and self._watch is not None:
            self._watch.close()
        detach(self._made_scaler)
        if self._owns_scaler:
            detach(self._given_scaler)
        self._applied.take_back()
        PREPARED.discard(self._root)

    def __enter__(self) -> "Loop":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owns_watch and self._watch is not None:
            self._watch.__exit__(kind, error, trace)  # records the exception
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"step {self._step_index}"
        return f"<Loop: {type(self._root).__name__} at {self.precision}, {state}>"


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor):
        raise ArgumentError(
            f"step: expected a closure that returns the loss; got one that returns {type(loss).__name__}. "
            "Return the tensor."
        )
    if loss.numel() != 1:
        raise ArgumentError(
            f"step: expected a loss of one value; got {loss.dtype} of shape {tuple(loss.shape)}. Take its mean()."
        )
    if not loss.requires_grad:
        raise ArgumentError(
            "step: expected a loss that requires gradients; got one that does not. Compute it from the model's output, "
            "without no_grad and detach."
        )
