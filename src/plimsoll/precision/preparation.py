"""`prepare`: a model and its optimizer, made ready for training in some precision."""

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
    """The training step for a model and its optimizer, in any precision.

    ``with loop.forward(): loss = ...`` and ``loop.step(loss)`` are then a whole step: the level's arithmetic, loss
    scaling, accumulation, clipping, the optimizer, schedulers, `zero_grad`. `Loop` tells what else it does.

    - `model`: with FP32 weights; a level that casts them does so in place, and `Loop.close` gives FP32 back.
    - `optimizer`: of the model's parameters; several in a list step together or not at all.
    - `precision`: a level (`plimsoll.precision.levels_table` shows them), a plan file, or a schedule of
      (step, precision).
    - `scaler`: another than the level's own; one that is given is used at every level.
    - `clip_norm`: the bound of the norm of all unscaled gradients, computed in FP32; Inf only reports it.
    - `accumulate`: so many calls of `step` make one optimizer step, with the mean of their gradients.
    - `schedulers`: of the learning rate; they advance only with steps that happen.
    - `max_retries`: how often a batch that overflows is repeated at a lower scale; `step` then takes closures.
    - `policy`: operation lists and formats of modules other than the level's.
    - `watch`: a `Watch` to be told of norms and repetitions, or a folder to watch the model into.

    Raises `ArgumentError` for what contradicts itself, before anything is changed.

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


def _watch(loop: Loop, given: "Watch | str | os.PathLike[str]") -> Watch:
    return given if isinstance(given, Watch) else begin_watch(loop.model, run=given, scaler=loop.scaler)


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
