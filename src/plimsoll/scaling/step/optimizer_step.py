"""What a scaler refuses of an optimizer before it touches a gradient."""

import inspect
from typing import Any

import torch

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
