"""`prepare`: the entry point of training in low precision."""

import os
from typing import Any

from torch import nn

from plimsoll.errors import ArgumentError
from plimsoll.precision.arguments import (
    check_model,
    check_numbers,
    check_scaler,
    check_schedulers,
    check_unprepared,
    optimizers_of,
)
from plimsoll.precision.levels.policy import Policy
from plimsoll.precision.levels.schedule import Precision, Schedule, schedule_of
from plimsoll.precision.training.loop import PREPARED, Loop
from plimsoll.scaling.base import scaler_for
from plimsoll.watch import Watch
from plimsoll.watch.handle import watch as begin_watch


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
        watch: A `Watch` that records norms and repetitions too, or a folder to watch the model into.

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
    scaler = scaler_for("prepare", scaler, model)
    check_scaler(scaler, [stage.level for stage in schedule.stages], max_retries)
    _check_policy(policy, schedule)
    loop = Loop(
        model,
        optimizers,
        schedule,
        policy=Policy() if policy is None else policy,
        scaler=scaler,
        clip_norm=clip_norm,
        accumulate=accumulate,
        schedulers=check_schedulers(schedulers, optimizers),
        max_retries=max_retries,
    )
    if watch is not None:
        try:
            loop.attach(_watch(loop, watch), owned=not isinstance(watch, Watch))
        except Exception:
            loop.close()
            raise
    return loop


def _watch(loop: Loop, watch: "Watch | str | os.PathLike[str]") -> Watch:
    return watch if isinstance(watch, Watch) else begin_watch(loop.model, run=watch, scaler=loop.scaler)


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
