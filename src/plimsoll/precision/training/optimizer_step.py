"""End of a training step: unscale, clip, and step all optimizers or none."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from plimsoll.errors import ArgumentError
from plimsoll.precision.weights.base import SixteenBitOptimizer
from plimsoll.rounding.casting import is_sharded
from plimsoll.scaling.base import LossScaler
from plimsoll.scaling.step import StepOutcome

_norm: Callable[..., Any] = cast("Any", torch.linalg).vector_norm  # torch leaves its type open
_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_: the result stays just below the bound


def gradients_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """Return the gradients that the optimizers will read."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [p.grad for group in groups for p in group["params"] if p.grad is not None]


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients in FP32, on the first one's device."""
    if not gradients:
        return torch.zeros(())
    place = gradients[0].device
    plain = [_summed(g) for g in gradients if not is_sharded(g)]
    sharded = [g for g in gradients if is_sharded(g)]
    norms: list[Tensor] = [_norm(g, dtype=torch.float32).to(place) for g in plain]
    norms += [_sharded_norm(group).to(place) for group in _by_mesh(sharded)]
    return _norm(torch.stack(norms))


def clip(gradients: Sequence[Tensor], norm: Tensor, bound: float) -> None:
    """Scale gradients in place to a norm of at most the bound. After a norm of NaN or Inf they are of no use."""
    coefficient = (bound / (norm + _TINY)).clamp(max=1.0)
    on = {g.device: coefficient.to(g.device) for g in gradients}
    for g in gradients:
        whole: Any = g
        values = whole.to_local() if is_sharded(g) else g._values() if g.is_sparse else g  # noqa: SLF001
        values.mul_(on[g.device])


def _summed(g: Tensor) -> Tensor:
    """Return the real values of a gradient, with equal indices of a sparse one added."""
    plain = g.coalesce()._values() if g.is_sparse else g  # noqa: SLF001
    return torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain


def _by_mesh(sharded: Sequence[Tensor]) -> list[list[Any]]:
    by_mesh: dict[Any, list[Any]] = {}
    for g in sharded:
        by_mesh.setdefault(cast("Any", g).device_mesh, []).append(g)
    return list(by_mesh.values())


def _sharded_norm(gradients: Sequence[Any]) -> Tensor:
    """Return the norm with one reduction for all gradients of a mesh."""
    norms = [_norm(g if g.dtype == torch.float32 else g.float()) for g in gradients]
    total = _norm(torch.stack(norms))
    return total.full_tensor()


Optimizer = torch.optim.Optimizer


class Stepped(NamedTuple):
    """Outcome of a step, and the gradients' norm if it was asked for."""

    outcome: StepOutcome
    norm: Tensor | None


def step_plainly(optimizers: Sequence[Optimizer], clip_norm: float | None) -> Stepped:
    """Step without a scaler, whatever the gradients are."""
    norm = None if clip_norm is None else _clip(optimizers, clip_norm)
    for optimizer in optimizers:
        optimizer.step()
    return Stepped(StepOutcome(stepped=True, scale=1.0, grad_norm=norm), norm)


def step_scaled(optimizers: Sequence[Optimizer], scaler: Any, clip_norm: float | None) -> Stepped:
    """Step through a scaler, and update its scale."""
    norm: Tensor | None = None
    _collect(optimizers)  # torch's own scaler does not check this
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
    """Return whether the scale is lower now, or lower it if hysteresis kept it."""
    if scaler.get_scale() < scale or getattr(scaler, "layers_lowered", False):
        return True
    lower = scale * scaler.get_backoff_factor()
    try:
        scaler.update(lower)
    except ArgumentError:  # the scaler's floor
        return False
    return True


def _clip(optimizers: Sequence[Optimizer], bound: float) -> Tensor:
    """Return the norm of all gradients, and clip them unless the bound is Inf."""
    _collect(optimizers)
    gradients = gradients_of(optimizers)
    norm = global_norm(gradients)
    if not math.isinf(bound):
        clip(gradients, norm, bound)
    return norm


def _collect(optimizers: Sequence[Optimizer]) -> None:
    """Give FP32 masters the gradients of the model's weights, unless they have them."""
    for optimizer in optimizers:
        if isinstance(optimizer, SixteenBitOptimizer):
            optimizer.collect_gradients()


# With several optimizers, a non-finite gradient of one skips the step of all: they train one model, and a batch counts
# for all of it or for nothing.
def _share_verdict(optimizers: Sequence[Optimizer], scaler: Any) -> None:
    """Apply a non-finite flag of any optimizer to all, without reading it."""
    states: Any = scaler._per_optimizer_states  # noqa: SLF001  (torch's own place for it)
    verdicts = [states[id(optimizer)]["found_inf_per_device"] for optimizer in optimizers]
    flags: list[Tensor] = [flag for verdict in verdicts for flag in verdict.values()]
    if len(optimizers) > 1 and flags:
        worst = torch.stack([x.to(flags[0].device).reshape(()) for x in flags]).max()
        for x in flags:
            x.copy_(worst)


def _outcome(scaler: Any) -> StepOutcome:
    """Return the outcome of the step, for torch's own scaler from its flag."""
    if isinstance(scaler, LossScaler):
        return scaler.outcome
    states: Any = scaler._per_optimizer_states  # noqa: SLF001  (likewise)
    verdicts = [flag for state in states.values() for flag in state["found_inf_per_device"].values()]
    flag = torch.stack([x.to(verdicts[0].device).reshape(()) for x in verdicts]).max()
    scale = cast("Tensor", scaler._scale)  # noqa: SLF001  (get_scale would wait for the device)
    return StepOutcome(stepped=flag == 0, scale=scale, reason="non-finite gradients")
