"""`prepare`: the entry point of training in low precision."""

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from plimsoll.checks import initialized, integer
from plimsoll.errors import ArgumentError
from plimsoll.precision.levels.catalogue import Level, Precision, Schedule, schedule_of
from plimsoll.precision.levels.placement import has_borders
from plimsoll.precision.levels.policy import Policy
from plimsoll.precision.training.loop import PREPARED, Loop
from plimsoll.precision.training.plan_scaler import detach
from plimsoll.precision.weights.base import SixteenBitOptimizer
from plimsoll.scaling.base import LossScaler, scaler_for
from plimsoll.watch import Watch
from plimsoll.watch.handle import watch as begin_watch
from plimsoll.watch.names import unwrapped

# -- checks of the arguments, made before anything changes -------------------------------------------------------------

Optimizer = torch.optim.Optimizer


def check_model(model: object) -> nn.Module:
    """Return the user's module without its wrappers; raise if it cannot be prepared."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"prepare: expected a torch.nn.Module; got {type(model).__name__}. Give the model first.")
    if isinstance(model, (torch.jit.ScriptModule, nn.DataParallel)):
        name = type(cast("object", model)).__name__
        raise ArgumentError(
            f"prepare: expected a module that runs its hooks in this process; got {name}. Prepare the "
            "module inside it, or use DistributedDataParallel."
        )
    initialized("prepare", model)
    return unwrapped(model)


def check_unprepared(root: nn.Module, prepared: Any) -> None:
    """Raise if a loop already has the model or a part of it."""
    for module in root.modules():
        if module in prepared or has_borders(module):
            raise ArgumentError(
                f"prepare: expected a model that no loop has; got a {type(root).__name__} that is prepared already. "
                "Use that loop, or close it first: loop.close()."
            )


def optimizers_of(optimizer: Any, root: nn.Module) -> tuple[Optimizer, ...]:
    """Return the optimizers as a tuple. Each must step parameters of the model."""
    several = _as_tuple(optimizer)
    if not several:
        raise ArgumentError("prepare: expected an optimizer, or a list of them; got none. Give at least one.")
    own = {id(p) for p in root.parameters()}
    seen: set[int] = set()
    for stepper in several:
        _check_optimizer(stepper)
        parameters = [p for group in stepper.param_groups for p in group["params"]]
        foreign = [p for p in parameters if id(p) not in own]
        if foreign:
            raise ArgumentError(
                f"prepare: expected an optimizer of the model's parameters; got one with {len(foreign)} others, the "
                f"first of shape {tuple(foreign[0].shape)}. Put all that is trained into one module and prepare that."
            )
        twice = [p for p in parameters if id(p) in seen]
        if twice:
            raise ArgumentError(
                f"prepare: expected each parameter in one optimizer; got {len(twice)} in two. Divide them."
            )
        seen.update(id(p) for p in parameters)
    return several


def _check_optimizer(optimizer: object) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, SixteenBitOptimizer):
        raise ArgumentError(
            f"prepare: expected the optimizer itself; got {name}, which a level makes where it needs it. "
            "Give what is inside."
        )
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"prepare: expected a torch.optim.Optimizer or a list of them; got {name}. Make one first.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentError(
            "prepare: expected an optimizer that steps once for each backward; got LBFGS, which evaluates the loss "
            "several times in a step. Train with it in FP32, in a custom loop."
        )


def check_schedulers(schedulers: Any, optimizers: Sequence[Optimizer]) -> tuple[Any, ...]:
    """Return the schedulers, which must step these optimizers and need no metric."""
    several = _as_tuple(schedulers)
    for scheduler in several:
        name = type(scheduler).__name__
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ArgumentError(
                "prepare: expected schedulers that step without a metric; got ReduceLROnPlateau. Leave it out, and "
                "call its step(metric) yourself after an evaluation."
            )
        if not callable(getattr(scheduler, "step", None)) or not hasattr(scheduler, "state_dict"):
            raise ArgumentError(f"prepare: expected learning-rate schedulers; got {name}. Give a list of them.")
        if not any(getattr(scheduler, "optimizer", None) is optimizer for optimizer in optimizers):
            raise ArgumentError(
                f"prepare: expected schedulers of the optimizer that is prepared; got a {name} of another. Make it of "
                "the same optimizer, before prepare."
            )
    return several


def check_numbers(clip_norm: object, accumulate: object, max_retries: object) -> None:
    """Raise unless the numbers among the arguments are in range."""
    if clip_norm is not None and not (_is_number(clip_norm) and cast("float", clip_norm) > 0):
        raise ArgumentError(
            f"prepare: expected clip_norm above 0, or None; got clip_norm={clip_norm!r}. Use math.inf to have the norm "
            "reported and nothing clipped."
        )
    integer("prepare", "accumulate", accumulate, low=1, remedy="Leave it out to step with each batch.")
    integer("prepare", "max_retries", max_retries, low=0, remedy="Leave it out to repeat no batch.")


def check_scaler(scaler: object, levels: Iterable[Level], max_retries: int) -> None:
    """Raise unless the user's scaler can do what the levels need."""
    if scaler is None:
        return
    if not isinstance(scaler, torch.amp.GradScaler):
        raise ArgumentError(
            f"prepare: expected a scaler with torch.amp.GradScaler's interface; got {type(scaler).__name__}. Use one "
            "of plimsoll.scaling."
        )
    if max_retries and not getattr(scaler, "lowers_scale", True):  # torch's scaler declares nothing, and does
        raise ArgumentError(
            f"prepare: expected max_retries with a scaler that can lower its scale; got a {type(scaler).__name__}. "
            "Use DynamicScaler."
        )
    pure = [level.name for level in levels if level.weights == "fp16" and level.update == "plain"]
    if pure and not isinstance(scaler, LossScaler):
        raise ArgumentError(
            f"prepare: expected a scaler that takes FP16 gradients at {pure[0]}; got torch.amp.GradScaler, which "
            "refuses them. Use plimsoll.scaling.DynamicScaler, or leave scaler out."
        )


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(cast("Iterable[Any]", value)) if isinstance(value, list | tuple) else (value,)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


# -- preparation -------------------------------------------------------------------------------------------------------


def prepare(
    model: nn.Module,
    optimizer: Any,
    precision: Precision = "amp-fp16",
    *,
    scaler: Any = None,
    clip_norm: float | None = None,
    accumulate: int = 1,
    schedulers: Any = (),
    max_retries: int = 0,
    policy: Policy | None = None,
    watch: "Watch | str | os.PathLike[str] | None" = None,
) -> Loop:
    """Return the training step for a model and its optimizer, in any precision.

    ``with loop.forward(): loss = ...`` and ``loop.step(loss)`` are then a whole training step: the level's arithmetic,
    loss scaling, accumulation, clipping, the optimizer, schedulers, `zero_grad`. `Loop` documents its other methods.

    Args:
        model: A model with FP32 weights. A level that casts them does so in place, and `Loop.close` restores FP32.
        optimizer: An optimizer of the model's parameters. Several in a list step together or not at all.
        precision: A level (`plimsoll.precision.levels_table` shows them), a plan file, or a schedule of (step,
            precision).
        scaler: A loss scaler in place of the level's own, used at every level. Or a name in
            `plimsoll.scaling.SCALERS`, for a scaler with its defaults. Default: the level's own.
        clip_norm: Largest norm of all unscaled gradients, computed in FP32. With `inf` the norm is reported but not
            clipped. Default: no norm.
        accumulate: Number of `step` calls that make one optimizer step, with the mean of their gradients. Default: 1.
        schedulers: Learning-rate schedulers. They advance only with steps that are not skipped.
        max_retries: Number of times that a batch with an overflow is repeated at a lower scale. Above 0, `step` takes
            closures. Default: 0.
        policy: Operation lists and formats of modules other than the level's.
        watch: A `Watch` that records norms and repetitions too, or a folder to watch the model into. Each try of a
            batch is a step of the run; the scalar `retries` has a value at the last try of each step of the loop.

    Raises:
        ArgumentError: Arguments contradict each other. Nothing has changed then.

    >>> import torch, plimsoll as pl
    >>> model = torch.nn.Linear(4, 1)
    >>> loop = pl.precision.prepare(model, torch.optim.AdamW(model.parameters()), "bf16-master")
    >>> with loop.forward():
    ...     loss = model(torch.ones(2, 4)).square().mean()
    >>> loop.step(loss).stepped, model.weight.dtype
    (True, torch.bfloat16)
    >>> loop.close()
    >>> model.weight.dtype
    torch.float32
    """
    root = check_model(model)
    check_unprepared(root, PREPARED)
    schedule = schedule_of(precision)
    optimizers = optimizers_of(optimizer, root)
    check_numbers(clip_norm, accumulate, max_retries)
    _check_policy(policy, schedule)
    _check_watch(watch, root)
    followed = check_schedulers(schedulers, optimizers)
    made = scaler_for("prepare", scaler, model)
    try:
        check_scaler(made, [stage.level for stage in schedule.stages], max_retries)
        loop = Loop(
            model,
            optimizers,
            schedule,
            policy=Policy() if policy is None else policy,
            scaler=made,
            owns_scaler=made is not scaler,
            clip_norm=clip_norm,
            accumulate=accumulate,
            schedulers=followed,
            max_retries=max_retries,
        )
    except Exception:
        if made is not scaler:
            detach(made)
        raise
    if watch is not None:
        try:
            owned = not isinstance(watch, Watch)
            loop.attach(begin_watch(loop.model, run=watch, scaler=loop.scaler) if owned else watch, owned=owned)
        except Exception:
            loop.close()
            raise
    return loop


def _check_watch(watch: object, root: nn.Module) -> None:
    if not isinstance(watch, Watch):
        return
    if watch.closed:
        raise ArgumentError("prepare: expected an open watch; got one that is closed. Call plimsoll.watch again.")
    watched = watch.beside.model
    if watched is not None and watched not in root.modules() and root not in watched.modules():
        raise ArgumentError(
            f"prepare: expected a watch of the model or a part of it; got one of another {type(watched).__name__}. "
            "Watch the model that is prepared."
        )


def _check_policy(policy: object, schedule: Schedule) -> None:
    if policy is not None and not isinstance(policy, Policy):
        raise ArgumentError(
            f'prepare: expected a Policy; got policy={policy!r}. Write Policy().with_module("head", "fp32").'
        )
    by_data = any(stage.level.fp8 == "tensor" for stage in schedule.stages)
    if isinstance(policy, Policy) and (policy.fp8_history or policy.fp8_margin) and not by_data:
        raise ArgumentError(
            "prepare: expected fp8_history and fp8_margin with fp8-tensor, whose scales follow the data; got a policy "
            f"with them at {', '.join(stage.level.name for stage in schedule.stages)}. Take with_fp8(...) out."
        )
