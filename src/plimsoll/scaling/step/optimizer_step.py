"""Step of an optimizer under a scaler, and the checks before it."""

import inspect
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.errors import ArgumentError, StateError


def check_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, sync_free: bool) -> None:
    """Raise for a step with a closure, or one that cannot skip in sync-free mode."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise StateError(
            "step: expected an optimizer that steps once for each backward; got LBFGS, which evaluates the loss "
            "several times within one step, so that no gradient can be unscaled and checked before it is used. Train "
            "with LBFGS in float32, without a scaler."
        )
    if kwargs.get("closure") is not None or (args and callable(args[0])):
        raise StateError(
            f"step: expected no closure; got one for {type(optimizer).__name__}, whose gradients would be used before "
            "they are unscaled and checked. Call backward first, then step(optimizer) without a closure."
        )
    if sync_free and not steps_on_device(optimizer):
        raise ArgumentError(
            "step: expected an optimizer that skips a step on the device with sync_free=True; got "
            f"{type(optimizer).__name__}, which steps at every call, so that the host has to wait for the check. "
            "Create it with fused=True (Adam, AdamW, SGD, and Adagrad of a newer torch than 2.9), or leave sync_free "
            "out."
        )


def steps_on_device(optimizer: Any) -> bool:
    """Return whether the optimizer's step reads `found_inf`, as torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_scaler(optimizer: Any) -> bool:
    """Return whether the optimizer's step has torch's older argument `grad_scaler`."""
    return steps_on_device(optimizer) and "grad_scaler" in inspect.signature(optimizer.step).parameters


def step_fused(
    optimizer: Any, found_inf: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], *, skipped: bool | None
) -> float | None:
    """Run the step with `found_inf` and `grad_scale` set on a fused optimizer."""
    # Gradients are unscaled and checked before, because a fused kernel's own division is not checked. So `grad_scale`
    # is the user's, or else None for optimizers of torch and Plimsoll, which saves a pass, and 1 for others, which may
    # expect a tensor. `skipped` is None if only the device knows.
    grad_scale = getattr(optimizer, "grad_scale", None)
    if grad_scale is None and not _takes_none(optimizer):
        grad_scale = _unit_scale(found_inf)
    optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
    fresh = _without_momentum(optimizer)
    try:
        result = optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf
    _drop_if_skipped(optimizer, fresh, found_inf, skipped)
    return cast("float | None", result)


def _takes_none(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith(("torch.", "plimsoll."))


def _unit_scale(found_inf: Tensor) -> Tensor:
    scale: Any = torch.ones_like(found_inf)
    scale.plimsoll_unscaled = True  # read by a watch: these gradients are unscaled
    return scale


def _without_momentum(optimizer: Any) -> list[Tensor]:
    """Return the parameters whose momentum a fused SGD will create in this step."""
    if not isinstance(optimizer, torch.optim.SGD):
        return []
    moving = (group for group in optimizer.param_groups if group["momentum"])
    return [
        parameter
        for group in moving
        for parameter in group["params"]
        if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None
    ]


def _drop_if_skipped(optimizer: Any, parameters: list[Tensor], found_inf: Tensor, skipped: bool | None) -> None:
    """Drop the momentum that a skipped step created, which has no values."""
    for parameter in parameters:
        state = optimizer.state[parameter]
        if skipped:
            state.pop("momentum_buffer", None)
        # If only the device knows about the skip, it is set to zero there. The next step's momentum is then its
        # gradient times `1 - dampening`, as in a first step.
        elif skipped is None and (buffer := state.get("momentum_buffer")) is not None:
            buffer.copy_(torch.where(found_inf.to(buffer.device, non_blocking=True) > 0, 0.0, buffer))
