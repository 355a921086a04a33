"""Step of an optimizer under a scaler: the checks before it, and optimizers that skip by themselves."""

import inspect
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.errors import ArgumentError, StateError


def check_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, sync_free: bool) -> None:
    """Raises for a step that calls a closure, and in sync-free mode for an optimizer that cannot skip by itself."""
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
            f"step: expected an optimizer that skips a step on the device, as sync_free=True asks; got "
            f"{type(optimizer).__name__}, which steps whenever it is called, so that the host has to wait for the "
            "check. Make it with fused=True (Adam, AdamW, SGD, and Adagrad of a newer torch than 2.9), or leave "
            "sync_free out."
        )


def steps_on_device(optimizer: Any) -> bool:
    """Whether the optimizer's step reads `found_inf` itself, as torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_scaler(optimizer: Any) -> bool:
    """Whether the optimizer's step has the argument `grad_scaler`: torch's older agreement with custom optimizers."""
    return steps_on_device(optimizer) and "grad_scaler" in inspect.signature(optimizer.step).parameters


def step_fused(
    optimizer: Any, found: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], *, skipped: bool | None
) -> float | None:
    """Calls the optimizer's step with `found_inf` and `grad_scale` set on it, as torch's fused optimizers read them.

    Gradients are unscaled already, where non-finite products are seen; a fused kernel's own division is not checked.
    `grad_scale` is therefore what the user has set, if anything; else None for torch's optimizers and Plimsoll's, which
    saves a pass, and 1 for others, which may expect a tensor. `skipped` is None where only the device knows.
    """
    given = getattr(optimizer, "grad_scale", None)
    if given is None and not _takes_none(optimizer):
        given = _one(found)
    optimizer.grad_scale, optimizer.found_inf = given, found
    unborn = _without_momentum(optimizer)
    try:
        result = optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf
    _forget_if_skipped(optimizer, unborn, found, skipped)
    return cast("float | None", result)


def _takes_none(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith(("torch.", "plimsoll."))


def _one(found: Tensor) -> Tensor:
    one: Any = torch.ones_like(found)
    one.plimsoll_unscaled = True  # a watch reads it: these gradients do not carry the scale
    return one


def _without_momentum(optimizer: Any) -> list[Tensor]:
    """The parameters whose momentum torch's fused SGD is about to make; without a value, if it then skips."""
    if not isinstance(optimizer, torch.optim.SGD):
        return []
    moving = (group for group in optimizer.param_groups if group["momentum"])
    return [
        parameter
        for group in moving
        for parameter in group["params"]
        if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None
    ]


def _forget_if_skipped(optimizer: Any, parameters: list[Tensor], found: Tensor, skipped: bool | None) -> None:
    """Forgets what was made in a step that was skipped; where that is not known, fills it with zeros on the device.

    The next step's momentum is then its gradient, as a first one's is, times ``1 - dampening``.
    """
    for parameter in parameters:
        state = optimizer.state[parameter]
        if skipped:
            state.pop("momentum_buffer", None)
        elif skipped is None and (buffer := state.get("momentum_buffer")) is not None:
            buffer.copy_(torch.where(found.to(buffer.device, non_blocking=True) > 0, 0.0, buffer))
