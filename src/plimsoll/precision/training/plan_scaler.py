"""Scaler of a loop that follows a plan: initial scale, or layers' scales."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from plimsoll.emulate.module_regions import is_native
from plimsoll.emulate.plan_context import ROOT, rules_of
from plimsoll.errors import ArgumentError
from plimsoll.precision.levels.arithmetic import device_of
from plimsoll.precision.levels.catalogue import Schedule, Stage
from plimsoll.scaling.dynamic import DynamicScaler
from plimsoll.scaling.layerwise.scaler import LayerScaler
from plimsoll.watch.names import clean, unwrapped

_USUAL = 2.0**16


def layer_scales(root: nn.Module, stage: Stage) -> Mapping[str, float]:
    """Return the scales that a plan gives to layers' gradients, by module name."""
    if stage.plan is None:
        return {}
    rules = rules_of(stage.plan, root, "prepare")
    names = {name: clean(name) or ROOT for name in rules}
    return {names[n]: s.gradients for n, s in rules.items() if is_native(s) and s.gradients is not None}


def check_scaling(root: nn.Module, schedule: Schedule, scaler: Any, made: Any = None) -> None:
    """Raise for scales of a plan that this schedule or scaler cannot apply."""
    _check_fp8(schedule, made if scaler is None else scaler, custom=scaler is not None)
    layered = [stage for stage in schedule.stages if layer_scales(root, stage)]
    if layered and made is not None and not isinstance(made, LayerScaler):
        raise ArgumentError(
            f"prepare: expected a plan that has a scale for each layer from the start; got one for a loop that has a "
            f"{type(made).__name__}. Call prepare again with it, or make the plan with layer_scales=False."
        )
    if layered and scaler is not None:
        raise ArgumentError(
            f"prepare: expected no scaler with a plan that has a scale for each layer; got a {type(scaler).__name__}, "
            "which does not have them. Leave scaler out for a LayerScaler."
        )
    if layered and len(schedule.stages) > 1:
        raise ArgumentError(
            "prepare: expected a plan that has a scale for each layer to hold for the whole training; got a schedule "
            f"of {', '.join(stage.level.name for stage in schedule.stages)}. Make the plan with layer_scales=False."
        )
    own = [stage for stage in schedule.stages if stage.plan is not None and _casts_scaled(root, stage)]
    if own and scaler is not None:
        raise ArgumentError(
            f"prepare: expected no scaler with a plan whose scales are of true gradients; got a "
            f"{type(scaler).__name__}, which multiplies them again. Leave scaler out."
        )


def _check_fp8(schedule: Schedule, scaler: Any, *, custom: bool) -> None:
    """Raise for layer scales with FP8."""
    # Constant FP8 scales need true gradients, and delayed ones lag behind a change.
    eight = [stage.level for stage in schedule.stages if stage.level.fp8 is not None]
    unit = next((level.name for level in eight if level.fp8 == "unit"), None)
    if unit is not None and custom:
        raise ArgumentError(
            f"prepare: expected no scaler at {unit}, whose constant scales are of true gradients; got a "
            f"{type(scaler).__name__}, which multiplies them. Leave scaler out."
        )
    if eight and isinstance(scaler, LayerScaler):
        raise ArgumentError(
            f"prepare: expected no scale for each layer at {eight[0].name}, whose FP8 layers have scales of their own; "
            "got a LayerScaler. Leave scaler out."
        )


def scaler_of(model: nn.Module, schedule: Schedule) -> Any:
    """Return the scaler that the stages need, or None."""
    scaled = [stage for stage in schedule.stages if stage.level.scaled]
    if not scaled:
        return None
    root = unwrapped(model)
    begins = next((s.plan.scale for s in scaled if s.plan is not None and s.plan.scale is not None), None)
    layers = layer_scales(root, scaled[0])
    if not layers:
        return DynamicScaler(device_of(root).type, begins or _USUAL)
    scaler = LayerScaler(model, init_scale=begins or _USUAL, device=device_of(root).type)
    scaler.begin_with(layers)
    return scaler


def begin_at(scaler: Any, root: nn.Module, stage: Stage) -> None:
    """Set the loop's own scaler to the scales of a stage's plan."""
    if scaler is None or stage.plan is None:
        return
    if stage.plan.scale is not None:
        scaler.scale(torch.zeros((), device=device_of(root)))  # the device of its first use, if it had none yet
        scaler.update(stage.plan.scale)
    if isinstance(scaler, LayerScaler):
        scaler.begin_with(layer_scales(root, stage))


def detach(scaler: Any) -> None:
    """Remove the hooks that a scaler has on its model."""
    if isinstance(scaler, LayerScaler):
        scaler.close()


def _casts_scaled(root: nn.Module, stage: Stage) -> bool:
    plan = stage.plan
    return plan is not None and any(
        rule.gradients is not None and not is_native(rule) for rule in rules_of(plan, root, "prepare").values()
    )
