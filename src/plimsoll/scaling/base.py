"""Base class of all loss scalers, and the registry of their names."""

import warnings
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from plimsoll import checks, kernels
from plimsoll.errors import ArgumentError, NotRecordedError, StateError
from plimsoll.scaling import arguments
from plimsoll.scaling.state import LOSSES, SavedScaler, fresh_state
from plimsoll.scaling.step import (
    Gradient,
    Gradients,
    StepOutcome,
    agree,
    blame,
    check_step,
    combined,
    gather,
    step_fused,
    steps_on_device,
    takes_scaler,
)
from plimsoll.text import power
from plimsoll.watch.hooks import torch_hooks

FLOOR = 2.0**-14  # where gradients of 1 are still normal numbers of float16

_by_name: "dict[str, type[LossScaler]]" = {}
SCALERS: "Mapping[str, type[LossScaler]]" = MappingProxyType(_by_name)
"""Classes of scalers by name: those of Plimsoll, and of other packages once imported."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _eager(method: _Method) -> _Method:
    """Exclude a method from torch's compiler, as torch does with GradScaler's."""
    # The compiler is imported when the method is first called, not before.
    return cast("Any", torch)._disable_dynamo(method)  # noqa: SLF001


class LossScaler(SavedScaler, ABC):
    """Base class of all loss scalers, with the interface of `torch.amp.GradScaler`.

    A scaler passes ``isinstance(scaler, torch.amp.GradScaler)``. The class keyword `name` registers a subclass in
    `SCALERS`, so that ``prepare(scaler="name")`` creates it. A subclass defines `_next_scale`, and may define other
    hooks:

    - `_next_scale(found_inf)`: Return the scale after a step, as a float or a one-element tensor. `found_inf` is a 0-d
      float32 tensor on the scale's device, above 0 if a gradient of any optimizer on any rank was not finite. The base
      class clamps the result to the bounds.
    - `_start(device)`: Create further state tensors. Called when the tensor of the scale is created.
    - `_scale_set()`: A caller has set the scale, with `update(new_scale)` or `set_scale`.
    - `_bank(optimizer, gradients)`: Return the bank and the row of each gradient, which the unscale pass fills with
      spectra of the scaled gradients. Called once for each device that has gradients.
    - `_observe(optimizer, found_inf)`: The optimizer's gradients are unscaled, and the ranks agree.
    - `_grad_norm(optimizer)`: Return the norm of the unscaled gradients if it costs nothing. The outcome has it.
    - `_save()` and `_load(extra)`: State beyond the entries of GradScaler.
    - `for_model(model)`: Create the scaler with its defaults.

    Three attributes declare what others need to know: `lowers_scale`, `scales_layers` and `set_scale_refusal`.

    Guarantees: The scale is never 0, Inf or NaN, and its reciprocal is finite. No optimizer receives a gradient that
    is not finite, before or after unscaling. Every step has an `outcome`. Ranks of `process_group`, and ranks that hold
    shards of a DTensor gradient, take the same decision.
    """

    lowers_scale: ClassVar[bool] = True
    """Whether an overflow lowers the scale, so that a repeated batch may succeed."""

    scales_layers: ClassVar[bool] = False
    """Whether layers have separate scales. The scaler then has `scales` and `look_again` like `LayerScaler`."""

    set_scale_refusal: ClassVar[str | None] = None
    """Reason why a scale that a caller sets has no lasting effect, or None."""

    def __init_subclass__(cls, *, name: str | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if name is None:
            return
        known = _by_name.get(name)
        # A notebook cell that runs again defines the same class again, which replaces the first.
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ArgumentError(
                f"LossScaler: expected a name that no other scaler has; got name={name!r}, the name of "
                f"{known.__module__}.{known.__qualname__}. Choose another."
            )
        _by_name[name] = cls

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

    @classmethod
    def for_model(cls, model: nn.Module) -> Self:
        """Create a scaler with its defaults, on the device of the model's first parameter."""
        first = next(model.parameters(), None)
        return cls("cpu" if first is None else first.device.type)

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
        """Outcome of the latest `step`. Reading its values may wait for the device."""
        if self._outcome is None:
            raise NotRecordedError("outcome: expected a step before; got none yet. Call step(optimizer) first.")
        return self._outcome

    def outcome_of(self, optimizer: torch.optim.Optimizer) -> StepOutcome:
        """Return the outcome of one of several optimizers in this iteration.

        It is kept until the first step of the next iteration.

        Raises:
            NotRecordedError: The optimizer has not stepped in this iteration.
        """
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
        """Return the class and the scale. Waits for the device."""
        state = f"scale {power(self.get_scale())}" if self.is_enabled() else "disabled"
        return f"<{type(self).__name__}: {state}>"

    # -- scale ---------------------------------------------------------------------------------------------------------

    @_eager
    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or each tensor of an iterable, by the scale.

        The product has the dtype that torch's promotion with a 0-d float32 gives: a float16 loss stays float16.

        Args:
            outputs: The loss, or an iterable of losses. Lists and tuples keep their type.

        Raises:
            ArgumentError: `outputs` is neither, or is a mapping.
        """
        return self._scaled(outputs, {}) if self._enabled else outputs

    def _scaled(self, outputs: Any, copies: dict[torch.device, Tensor]) -> Any:
        if isinstance(outputs, Tensor):
            if outputs.numel() == 1:
                self._losses.append(outputs.detach())
            return outputs * self._scale_on(outputs.device, copies)
        if isinstance(outputs, (list, tuple)):
            kind = cast("Any", type(cast("Any", outputs)))
            scaled = [self._scaled(x, copies) for x in cast("list[Any]", outputs)]
            return kind(*scaled) if hasattr(kind, "_fields") else kind(scaled)
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, Mapping)):
            return (self._scaled(x, copies) for x in cast("Iterable[Any]", outputs))
        name = type(cast("object", outputs)).__name__
        raise ArgumentError(f"scale: expected a tensor or an iterable of tensors; got {name}. Give it the loss.")

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
        """Divide the optimizer's gradients by the scale, in place.

        This is possible once between two updates. Call it before code that needs true gradients, such as clipping.
        `step` calls it if you have not. Changes of the gradients after it are not checked again. It does not wait for
        the device, but for a `LayerScaler`. The method `collect_gradients` of an optimizer (`plimsoll.MasterWeights`)
        is called first.

        Numerics: the product is computed in float32 or wider, and rounded once to the gradient's dtype. It is exact if
        the scale is a power of two and nothing leaves the dtype's range. If a gradient is not finite before or after,
        the step will be skipped.

        Args:
            optimizer: The optimizer whose gradients are unscaled.

        Raises:
            StateError: It is the second call since the last update, or the optimizer has stepped already.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        state = self._state_of(optimizer, "unscale_")
        if hasattr(optimizer, "collect_gradients"):
            cast("Any", optimizer).collect_gradients()
        gradients = gather(optimizer)
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        per_device = self._unscale(optimizer, gradients, _inverse(scale), found_inf)
        state["found_inf_per_device"] = agree(per_device, found_inf, gradients.groups, self._process_group)
        state["stage"] = OptState.UNSCALED
        if per_device:
            self._observe(optimizer, combined(per_device.values(), scale.device))

    def _state_of(self, optimizer: Any, operation: str) -> dict[str, Any]:
        state = self._per_optimizer_states[id(optimizer)]
        name = type(optimizer).__name__
        if state["stage"] is OptState.STEPPED:
            raise StateError(
                f"{operation}: expected a call before the step of {name}; got one after it, as step() has already "
                "been called since the last update(). Call update() at the end of every iteration."
            )
        if operation == "unscale_" and state["stage"] is OptState.UNSCALED:
            raise StateError(
                f"unscale_: expected one call for {name} between two updates; got a second, as unscale_() has already "
                "been called on this optimizer since the last update(). Unscale once, after all backwards."
            )
        return state

    def _unscale(
        self, optimizer: Any, gradients: Gradients, inverse: Tensor, found_inf: Tensor
    ) -> dict[torch.device, Tensor]:
        """Multiply all gradients. Return flags of non-finite ones by device."""
        per_device: dict[torch.device, Tensor] = {}
        for device, these in gradients.by_device.items():
            bank, rows = self._bank(optimizer, these)
            per_device[device] = found_inf.to(device, copy=True, non_blocking=True)
            factor = inverse.to(device, non_blocking=True)
            with torch.no_grad():  # gradients with a graph are written to as well
                kernels.unscale_into([gradient.values for gradient in these], factor, per_device[device], bank, rows)
        return per_device

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return self._unscale(optimizer, gather(optimizer, half=allow_fp16), inv_scale, found_inf)

    # -- stepping ------------------------------------------------------------------------------------------------------

    @_eager
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer if every gradient is finite.

        Gradients are unscaled first if needed. Optimizers that skip by themselves (torch's with ``fused=True``) are
        always called, with the result of the check, and the host does not wait. For other optimizers the host waits for
        the check, as with GradScaler. Sync-free mode refuses them.

        Args:
            optimizer: The optimizer.
            args: Arguments of its step.
            kwargs: Keyword arguments of its step.

        Returns:
            The result of ``optimizer.step(*args, **kwargs)``; None for a skipped step.

        Raises:
            StateError: There is no gradient, or the optimizer has stepped since the last update.
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
            found_inf = combined(state["found_inf_per_device"].values(), scale.device)
            skipped = bool(found_inf.item()) if found_inf.device.type == "cpu" and not self._sync_free else None
            result = step_fused(optimizer, found_inf, args, kwargs, skipped=skipped)
            self._record(optimizer, found_inf == 0 if skipped is None else not skipped)
        else:
            result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        """Wait for the check, then step or skip."""
        skipped = any(flag.item() for flag in optimizer_state["found_inf_per_device"].values())
        result = None if skipped else cast("Any", optimizer).step(*args, **kwargs)
        self._record(optimizer, not skipped)
        return cast("float | None", result)

    def _step_with_scaler(self, optimizer: Any, state: dict[str, Any], args: Any, kwargs: Any) -> float | None:
        warnings.warn(
            f"step: {type(optimizer).__name__}.step takes the scaler as its argument `grad_scaler`, which torch has "
            "deprecated: read the attributes `grad_scale` and `found_inf` that a scaler sets instead.",
            FutureWarning,
            stacklevel=3,
        )
        result = optimizer.step(*args, **kwargs, grad_scaler=self)
        flags = state["found_inf_per_device"].values()
        self._record(optimizer, combined(flags, cast("Tensor", self._scale).device) == 0 if flags else True)
        state["stage"] = OptState.STEPPED
        return result

    def _record(self, optimizer: Any, stepped: bool | Tensor) -> None:
        scale = cast("Tensor", self._scale)
        reason = f"non-finite gradients in {type(optimizer).__name__}"
        if stepped is False:  # the host has waited already, so it may read the gradients
            reason = blame(optimizer, self._losses) + self._at_floor(scale.item())
        norm = self._grad_norm(optimizer)
        self._note(optimizer, StepOutcome(stepped=stepped, scale=scale, reason=reason, grad_norm=norm))

    def _at_floor(self, scale: float) -> str:
        moves = self._min_scale < self._max_scale
        return f"; the scale is at its floor, {scale:g}" if moves and scale <= self._min_scale else ""

    # -- updating ------------------------------------------------------------------------------------------------------

    @_eager
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the iteration with the next scale, or with `new_scale`.

        It does not wait for the device. A `LayerScaler` does, and on a GPU a `SpectralScaler` waits for the step
        before.

        Args:
            new_scale: A number within the scaler's bounds. Or a one-element tensor on the scaler's device, which is
                clamped to the bounds without being read. Default: the scaler's rule decides.

        Raises:
            ArgumentError: `new_scale` is out of bounds, or a tensor of another shape or device.
            StateError: No optimizer's gradients were unscaled since the last update.
        """
        self._begins = True
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("update")
        if new_scale is not None:
            self._write(self._checked_scale("update", new_scale))
            self._scale_set()
        else:
            flags = [f for state in self._per_optimizer_states.values() for f in state["found_inf_per_device"].values()]
            if not flags:
                raise StateError(
                    "update: expected a step of some optimizer before it, or unscale_; got none since the last update. "
                    "Call scaler.step(optimizer) first, or give update(new_scale)."
                )
            self._write(self._next_scale(combined(flags, scale.device)))
        self._end_iteration()

    @property
    def scale_bounds(self) -> tuple[float, float]:
        """Smallest and largest scale that the scaler may have."""
        return self._min_scale, self._max_scale

    def set_scale(self, scale: float) -> None:
        """Set the scale between two iterations from outside, as a guard does.

        The effect is that of `update(scale)`, but a watch does not record the end of a step. `set_scale_refusal` gives
        the reason if the scaler's rule replaces the scale at once.

        Args:
            scale: A number within `scale_bounds`.

        Raises:
            ArgumentError: `scale` is no number, or is out of bounds.
            StateError: No loss was scaled yet, or one was since the last `update`.
        """
        if self._enabled:
            self._check_scale_growth_tracker("set_scale")
            if self._losses or self._per_optimizer_states:  # whose gradients have the scale of before
                raise StateError(
                    "set_scale: expected a call between two iterations; got one after a loss was scaled and before "
                    "update(), so that its gradients would be divided by another scale. Call it after update()."
                )
            self._write(self._checked_scale("set_scale", scale))
            self._scale_set()
            self._begins = True
            self._end_iteration()

    def _end_iteration(self) -> None:
        self._per_optimizer_states = defaultdict(fresh_state)
        self._losses.clear()

    def _checked_scale(self, operation: str, scale: float | Tensor) -> float | Tensor:
        if not isinstance(scale, Tensor):
            number = arguments.check_scale(operation, "new_scale", scale)
            arguments.check_within(operation, self._min_scale, number, self._max_scale)
            return number
        if scale.device.type != self._device or scale.numel() != 1 or scale.requires_grad:
            raise ArgumentError(
                f"{operation}: expected new_scale as a number, or a one-element tensor on {self._device} without "
                f"gradient; got one of shape {tuple(scale.shape)} on {scale.device}, requires_grad="
                f"{scale.requires_grad}. Give a float."
            )
        return scale.reshape(())

    def _write(self, value: float | Tensor) -> None:
        """Set the scale, clamped to its bounds; NaN becomes the lower bound."""
        scale = cast("Tensor", self._scale)
        if isinstance(value, Tensor):
            scale.copy_(value.nan_to_num(nan=self._min_scale).clamp(self._min_scale, self._max_scale))
        else:
            scale.fill_(min(max(self._min_scale, value), self._max_scale))  # in this order NaN becomes the lower one


def _inverse(scale: Tensor) -> Tensor:
    # By way of float64 if the device has it: float32 division may be approximate on a GPU.
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()


def scaler_for(operation: str, scaler: object, model: nn.Module) -> Any:
    """Return `scaler`, or a new scaler for the model if it is a name in `SCALERS`.

    Anything but a name is returned as it is. Raises an `ArgumentError` if no scaler has this name. `for_model` of a
    scaler without defaults raises one, too.
    """
    if not isinstance(scaler, str):
        return scaler
    return SCALERS[checks.one_of(operation, "scaler", scaler, tuple(SCALERS))].for_model(model)


# Plimsoll's scalers define `scale`, `step` and `update` themselves, so the patches of GradScaler do not reach them.
torch_hooks.add_scaler_class(LossScaler)
