"""The end of a training step: gradients unscaled once, clipped together, optimizers stepped or none of them.

With several optimizers a non-finite gradient of one skips all: they train one model, and the batch counts for all of
it or for nothing.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from plimsoll.errors import ArgumentError
from plimsoll.precision.training.gradient_norm import clip, global_norm, gradients_of
from plimsoll.precision.weights.base import SixteenBitOptimizer
from plimsoll.scaling.base import LossScaler
from plimsoll.scaling.step_outcome import StepOutcome

Optimizer = torch.optim.Optimizer


class Stepped(NamedTuple):
    """What a step did, and the gradients' norm, where it was asked for."""

    outcome: StepOutcome
    norm: Tensor | None


def step_plainly(optimizers: Sequence[Optimizer], clip_norm: float | None) -> Stepped:
    """Steps without a scaler: whatever the gradients are."""
    norm = None if clip_norm is None else _clip(optimizers, clip_norm)
    for optimizer in optimizers:
        optimizer.step()
    return Stepped(StepOutcome(stepped=True, scale=1.0, grad_norm=norm), norm)


def step_scaled(optimizers: Sequence[Optimizer], scaler: Any, clip_norm: float | None) -> Stepped:
    """Steps through a scaler, and lets it take its next scale."""
    norm: Tensor | None = None
    _collect(optimizers)  # torch's own scaler does not ask for it
    if clip_norm is not None or len(optimizers) > 1:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        _share_verdict(optimizers, scaler)
        norm = None if clip_norm is None else _clip(optimizers, clip_norm)
    for optimizer in optimizers:
        scaler.step(optimizer)
    outcome = _outcome(scaler)
    scaler.update()
    return Stepped(outcome if norm is None else outcome.with_grad_norm(norm), norm)


def lowered(scaler: Any, scale: float) -> bool:
    """Whether the scaler's scale, or that of layers, is lower now; hysteresis that has kept it is passed over."""
    if scaler.get_scale() < scale or getattr(scaler, "layers_lowered", False):
        return True
    lower = scale * scaler.get_backoff_factor()
    try:
        scaler.update(lower)
    except ArgumentError:  # the scaler's floor
        return False
    return True


def _clip(optimizers: Sequence[Optimizer], bound: float) -> Tensor:
    """The norm of all gradients; clips them to the bound, of which Inf asks for the norm alone."""
    _collect(optimizers)
    gradients = gradients_of(optimizers)
    norm = global_norm(gradients)
    if not math.isinf(bound):
        clip(gradients, norm, bound)
    return norm


def _collect(optimizers: Sequence[Optimizer]) -> None:
    """Gives FP32 masters the gradients of the model's weights, where they have not got them."""
    for optimizer in optimizers:
        if isinstance(optimizer, SixteenBitOptimizer):
            optimizer.collect_gradients()


def _share_verdict(optimizers: Sequence[Optimizer], scaler: Any) -> None:
    """What one optimizer's gradients have shown counts for all; nothing is read."""
    states: Any = scaler._per_optimizer_states  # noqa: SLF001  (torch's own place for it)
    verdicts = [states[id(optimizer)]["found_inf_per_device"] for optimizer in optimizers]
    found: list[Tensor] = [found for verdict in verdicts for found in verdict.values()]
    if len(optimizers) > 1 and found:
        worst = torch.stack([x.to(found[0].device).reshape(()) for x in found]).max()
        for x in found:
            x.copy_(worst)


def _outcome(scaler: Any) -> StepOutcome:
    """What the scaler says of the step; of one that says nothing, what its verdict was."""
    if isinstance(scaler, LossScaler):
        return scaler.outcome
    states: Any = scaler._per_optimizer_states  # noqa: SLF001  (likewise)
    verdicts = [found for state in states.values() for found in state["found_inf_per_device"].values()]
    found = torch.stack([x.to(verdicts[0].device).reshape(()) for x in verdicts]).max()
    scale = cast("Tensor", scaler._scale)  # noqa: SLF001  (get_scale would wait for the device)
    return StepOutcome(stepped=found == 0, scale=scale, reason="non-finite gradients")
