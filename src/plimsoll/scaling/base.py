"""What all loss scalers share: the interface of `torch.amp.GradScaler`, and the promises that it does not make.

One class, whose every method is the interface's or a hook of it, so more than 300 lines; what a method does beyond
keeping order lies in the modules beside this one.
"""

import sys
import warnings
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from plimsoll import kernels
from plimsoll.errors import ArgumentError, NotRecordedError, StateError
from plimsoll.scaling import arguments
from plimsoll.scaling.state.persistence import LOSSES, SavedScaler, fresh_state
from plimsoll.scaling.step.fused_step import step_fused
from plimsoll.scaling.step.gradients import Gradient, Gradients, gather
from plimsoll.scaling.step.optimizer_checks import check_step, steps_on_device, takes_scaler
from plimsoll.scaling.step.rank_agreement import agree, combined
from plimsoll.scaling.step.skip_reason import blame
from plimsoll.scaling.step_outcome import StepOutcome
from plimsoll.text import power

FLOOR = 2.0**-14  # where gradients of 1 are still normal numbers of float16


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _eager(method: _Method) -> _Method:
    """Leaves a method to Python where torch's compiler traces the loop around it, as it does with GradScaler's.

    The compiler is imported when the method is first called, not before.
    """
    return cast("Any", torch)._disable_dynamo(method)  # noqa: SLF001


class LossScaler(SavedScaler, ABC):
    """The base of all scalers: a `torch.amp.GradScaler` to every ``isinstance``, with each method of its own.

    Only this class defines `scale`, `unscale_`, `step` and `update`, so that a watch hears of each call once. What
    scalers differ in are a few hooks:

    - `_next_scale(found_inf)`: the scale after a step, as a float or a one-element tensor; `found_inf` is a float32
      tensor of no dimension on the scale's device, above 0 where a gradient of any optimizer, on any rank, was not
      finite. The base keeps it within the bounds, whatever is returned. The one hook that every scaler defines.
    - `_start(device)`: makes further tensors of state; called when the scale's tensor is made.
    - `_scale_set()`: the scale was set by hand, with ``update(new_scale)``.
    - `_bank(optimizer, gradients)`: the bank and the row for each gradient that the unscale pass fills, before it
      multiplies, with their spectra. Called once for each device that holds gradients.
    - `_observe(optimizer, found_inf)`: the optimizer's gradients are unscaled, and the ranks agree.
    - `_grad_norm(optimizer)`: the norm of the unscaled gradients, where it is known for nothing; goes to the outcome.
    - `_save()` and `_load(extra)`: what the state has beside GradScaler's entries.

    The promises: the scale is never 0, Inf or NaN, and has a finite reciprocal; a non-finite gradient is never given to
    an optimizer, nor one that would be non-finite after unscaling; every step leaves an `outcome`; ranks of
    `process_group`, and those that hold shards of a DTensor gradient, take the same decision.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        *,
        enabled: bool = True,
        min_scale: float = FLOOR,
        max_scale: float = arguments.LARGEST,
        process_group: Any = None,
        sync_free: bool = False,
    ) -> None:
        name = type(self).__name__
        init_scale, low, high = (
            arguments.check_scale(name, word, value)
            for word, value in (("init_scale", init_scale), ("min_scale", min_scale), ("max_scale", max_scale))
        )
        arguments.check_bounds(name, low, init_scale, high)
        if enabled and torch.device(device).type == "cuda" and not torch.cuda.is_available():
            warnings.warn(
                f"{name}: CUDA is not available, so that nothing is scaled: the scale is 1, not {power(init_scale)}. "
                "Use device='cpu' to scale on the CPU.",
                stacklevel=3,
            )
            enabled = False
        super().__init__(torch.device(device).type, init_scale, enabled=enabled)
        self._init_scale = init_scale
        self._min_scale, self._max_scale = low, high
        self._process_group = process_group
        self._sync_free = sync_free
        self._outcome = None
        self._outcomes = {}
        self._begins = True  # the next step is the first of an iteration
        self._losses = deque(maxlen=LOSSES)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _next_scale(self, found_inf: Tensor) -> float | Tensor: ...

    def _start(self, device: torch.device) -> None: ...

    def _scale_set(self) -> None: ...

    def _bank(self, optimizer: Any, gradients: Sequence[Gradient]) -> tuple[Tensor | None, Sequence[int]]:  # noqa: ARG002
        return None, ()

    def _observe(self, optimizer: Any, found_inf: Tensor) -> None: ...

    def _grad_norm(self, optimizer: Any) -> Tensor | None:  # noqa: ARG002
        return None

    # -- outcomes ------------------------------------------------------------------------------------------------------

    @property
    def outcome(self) -> StepOutcome:
        """What the latest `step` did; making it waits for nothing, reading it may."""
        if self._outcome is None:
            raise NotRecordedError("outcome: expected a step before; got none yet. Call step(optimizer) first.")
        return self._outcome

    def outcome_of(self, optimizer: torch.optim.Optimizer) -> StepOutcome:
        """What this iteration's `step` of one of several optimizers did; kept until the next iteration's first step."""
        if id(optimizer) not in self._outcomes:
            raise NotRecordedError(
                f"outcome_of: expected an optimizer that has stepped in this iteration; got "
                f"{type(optimizer).__name__}, which has not. Call step(optimizer) first."
            )
        return self._outcomes[id(optimizer)]

    def _note(self, optimizer: Any, outcome: StepOutcome) -> None:
        if self._begins:
            self._outcomes.clear()
            self._begins = False
        self._outcomes[id(optimizer)] = self._outcome = outcome

    def __repr__(self) -> str:
        """The class and the scale; reading the scale waits for its device."""
        state = f"scale {power(self.get_scale())}" if self.is_enabled() else "disabled"
        return f"<{type(self).__name__}: {state}>"

    # -- scale ---------------------------------------------------------------------------------------------------------

    @_eager
    def scale(self, outputs: Any) -> Any:
        """Multiplies a tensor, or each tensor of an iterable, by the scale.

        The product has its input's dtype promoted with float32's 0-d rules, as torch's: a float16 loss stays float16.
        Lists and tuples keep their type. Raises `ArgumentError` for what is neither.
        """
        return self._scaled(outputs, {}) if self._enabled else outputs

    def _scaled(self, outputs: Any, copies: dict[torch.device, Tensor]) -> Any:
        if isinstance(outputs, Tensor):
            if outputs.numel() == 1:
                self._losses.append(outputs.detach())
            return outputs * self._scale_on(outputs.device, copies)
        if isinstance(outputs, (list, tuple)):
            return type(cast("Any", outputs))(self._scaled(x, copies) for x in cast("Iterable[Any]", outputs))
        if isinstance(outputs, Iterable):
            return (self._scaled(x, copies) for x in cast("Iterable[Any]", outputs))
        raise ArgumentError(
            f"scale: expected a tensor or an iterable of tensors; got {type(outputs).__name__}. Give it the loss."
        )

    def _scale_on(self, device: torch.device, copies: dict[torch.device, Tensor]) -> Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        if device not in copies:
            copies[device] = cast("Tensor", self._scale).to(device, non_blocking=True)
        return copies[device]

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        dev = torch.device(dev)  # accelerate gives a name
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        self._growth_tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=dev)
        self._start(dev)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if self._scale is None or self._growth_tracker is None:
            raise StateError(
                f"{funcname}: expected a scaled loss before it; got none, as scale() was not called. Call "
                "scaler.scale(loss).backward() first."
            )
        return self._scale, self._growth_tracker

    # -- unscaling -----------------------------------------------------------------------------------------------------

    @_eager
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the optimizer's gradients by the scale, in place, once between two updates.

        For what must see true gradients before the step, as clipping does; `step` calls it where you have not. Whatever
        is done to the gradients after it is not checked again. The product is computed in float32 at least and rounded
        once to the gradient's dtype, exactly where the scale is a power of two and nothing leaves the dtype's range;
        where a gradient was not finite, or is not afterwards, the step will be skipped. Waits for nothing. An optimizer
        with a method `collect_gradients` (`plimsoll.MasterWeights`) is asked to collect them first.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        state = self._state_of(optimizer, "unscale_")
        if hasattr(optimizer, "collect_gradients"):
            cast("Any", optimizer).collect_gradients()
        gradients = gather(optimizer)
        found = torch.zeros((), dtype=torch.float32, device=scale.device)
        per_device = self._unscale(optimizer, gradients, _inverse(scale), found)
        state["found_inf_per_device"] = agree(per_device, found, gradients.groups, self._process_group)
        state["stage"] = OptState.UNSCALED
        if per_device:
            self._observe(optimizer, combined(per_device.values(), scale.device))

    def _state_of(self, optimizer: Any, operation: str) -> dict[str, Any]:
        state = self._per_optimizer_states[id(optimizer)]
        name = type(optimizer).__name__
        if state["stage"] is OptState.STEPPED:
            raise StateError(
                f"{operation}: expected to come before the step of {name}; got a second call, as step() has already "
                "been called since the last update(). Call update() at the end of every iteration."
            )
        if operation == "unscale_" and state["stage"] is OptState.UNSCALED:
            raise StateError(
                f"unscale_: expected one call for {name} between two updates; got a second, as unscale_() has already "
                "been called on this optimizer since the last update(). Unscale once, after all backwards."
            )
        return state

    def _unscale(
        self, optimizer: Any, gradients: Gradients, inverse: Tensor, found: Tensor
    ) -> dict[torch.device, Tensor]:
        """Multiplies all gradients, and returns for each device whether one was or became non-finite."""
        per_device: dict[torch.device, Tensor] = {}
        for device, these in gradients.by_device.items():
            bank, rows = self._bank(optimizer, these)
            per_device[device] = found.to(device, copy=True, non_blocking=True)
            factor = inverse.to(device, non_blocking=True)
            with torch.no_grad():  # gradients that a graph was made of are written to all the same
                kernels.unscale_into([gradient.values for gradient in these], factor, per_device[device], bank, rows)
        return per_device

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return self._unscale(optimizer, gather(optimizer, half=allow_fp16), inv_scale, found_inf)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        one, found = torch.ones_like(scale), torch.zeros_like(scale)
        found_infs = self._unscale_grads_(optimizer, one, found, True)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found_infs
        return cast("dict[str, Any]", found_infs)

    # -- stepping ------------------------------------------------------------------------------------------------------

    @_eager
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps the optimizer if every gradient is finite, after unscaling them where that is still to do.

        Returns what ``optimizer.step(*args, **kwargs)`` returns, None for a skipped step. Optimizers that skip by
        themselves (torch's with ``fused=True``) are called in any case and told, and the host waits for nothing; for
        others it waits for the check, as with GradScaler. In sync-free mode those are refused.
        """
        if not self._enabled:
            result = cast("Any", optimizer).step(*args, **kwargs)
            self._note(optimizer, StepOutcome(stepped=True, scale=1.0))
            return cast("float | None", result)
        check_step(optimizer, args, kwargs, sync_free=self._sync_free)
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._state_of(optimizer, "step")
        if takes_scaler(optimizer):
            return self._step_with_scaler(optimizer, state, args, kwargs)
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        if not state["found_inf_per_device"]:
            del self._per_optimizer_states[id(optimizer)]  # nothing was unscaled: the step may be tried again
            raise StateError(
                f"step: expected a gradient on at least one parameter; got none on any of {type(optimizer).__name__}. "
                "Call scaler.scale(loss).backward() before it."
            )
        if steps_on_device(optimizer):
            found = combined(state["found_inf_per_device"].values(), scale.device)
            known = bool(found.item()) if found.device.type == "cpu" and not self._sync_free else None
            result = step_fused(optimizer, found, args, kwargs, skipped=known)
            self._record(optimizer, found == 0 if known is None else not known)
        else:
            result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        """Waits for the check, then steps or skips."""
        found = any(found.item() for found in optimizer_state["found_inf_per_device"].values())
        result = None if found else cast("Any", optimizer).step(*args, **kwargs)
        self._record(optimizer, not found)
        return cast("float | None", result)

    def _step_with_scaler(self, optimizer: Any, state: dict[str, Any], args: Any, kwargs: Any) -> float | None:
        warnings.warn(
            f"step: {type(optimizer).__name__}.step takes the scaler as its argument `grad_scaler`, an agreement that "
            "torch is giving up: read the attributes `grad_scale` and `found_inf` that a scaler sets instead.",
            FutureWarning,
            stacklevel=3,
        )
        result = optimizer.step(*args, **kwargs, grad_scaler=self)
        founds = state["found_inf_per_device"].values()
        self._record(optimizer, combined(founds, cast("Tensor", self._scale).device) == 0 if founds else True)
        state["stage"] = OptState.STEPPED
        return result

    def _record(self, optimizer: Any, stepped: bool | Tensor) -> None:
        scale = cast("Tensor", self._scale)
        reason = f"non-finite gradients in {type(optimizer).__name__}"
        if stepped is False:  # the host has waited already: it may look closer
            reason = blame(optimizer, self._losses) + self._at_floor(scale.item())
        norm = self._grad_norm(optimizer)
        self._note(optimizer, StepOutcome(stepped=stepped, scale=scale, reason=reason, grad_norm=norm))

    def _at_floor(self, scale: float) -> str:
        moves = self._min_scale < self._max_scale
        return f"; the scale is at its floor, {scale:g}" if moves and scale <= self._min_scale else ""

    # -- updating ------------------------------------------------------------------------------------------------------

    @_eager
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Ends the iteration: the scale follows from what was found in it, or is set to `new_scale`.

        `new_scale` is a number within the scaler's bounds, else `ArgumentError`; or a one-element tensor on the
        scaler's device, which is brought within them without being read. Waits for nothing.
        """
        self._begins = True
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("update")
        if new_scale is not None:
            self._write(self._given(new_scale))
            self._scale_set()
        else:
            founds = [
                f for state in self._per_optimizer_states.values() for f in state["found_inf_per_device"].values()
            ]
            if not founds:
                raise StateError(
                    "update: expected a step of some optimizer before it; got none since the last update. Call "
                    "scaler.step(optimizer) first, or give update(new_scale)."
                )
            self._write(self._next_scale(combined(founds, scale.device)))
        self._per_optimizer_states = defaultdict(fresh_state)
        self._losses.clear()

    def _given(self, new_scale: float | Tensor) -> float | Tensor:
        if not isinstance(new_scale, Tensor):
            number = arguments.check_scale("update", "new_scale", new_scale)
            arguments.check_within("update", self._min_scale, number, self._max_scale)
            return number
        if new_scale.device.type != self._device or new_scale.numel() != 1 or new_scale.requires_grad:
            raise ArgumentError(
                f"update: expected new_scale as a number, or a one-element tensor on {self._device} without gradient; "
                f"got one of shape {tuple(new_scale.shape)} on {new_scale.device}, requires_grad="
                f"{new_scale.requires_grad}. Give a float."
            )
        return new_scale.reshape(())

    def _write(self, value: float | Tensor) -> None:
        """Sets the scale, within its bounds whatever comes; NaN becomes the lower one."""
        scale = cast("Tensor", self._scale)
        if isinstance(value, Tensor):
            scale.copy_(value.nan_to_num(nan=self._min_scale).clamp(self._min_scale, self._max_scale))
        else:
            scale.fill_(min(max(self._min_scale, value), self._max_scale))  # in this order NaN becomes the lower one


def _inverse(scale: Tensor) -> Tensor:
    """The scale's reciprocal, by way of float64 where the device has it: float32 division may be approximate."""
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()


# A watch that is open already hears of these methods from here on; one that opens later finds the class by itself.
if _seams := sys.modules.get("plimsoll.watch.hooks.torch_hooks"):
    _seams.look_for_scalers()
