"""Effects of DistributedDataParallel and `fully_shard` on levels and steps."""

import contextlib
import sys
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from plimsoll.errors import ArgumentError
from plimsoll.precision.levels.catalogue import DTYPES, Level
from plimsoll.rounding.casting import is_sharded


def is_ddp(model: nn.Module) -> bool:
    """Return whether the model is wrapped in DistributedDataParallel."""
    return isinstance(_outermost(model), nn.parallel.DistributedDataParallel)


def is_fully_sharded(model: nn.Module) -> bool:
    """Return whether `fully_shard` was applied to the model or to a part of it."""
    return next(_sharded_modules(model), None) is not None


def is_sharded_itself(module: nn.Module) -> bool:
    """Return whether `fully_shard` was applied to this very module."""
    return module in list(_sharded_modules(module))


def process_group(model: nn.Module) -> Any:
    """Return the group that agrees on each step: DDP's, all for DTensors, or None."""
    if is_ddp(model):
        return cast("Any", _outermost(model)).process_group
    if any(is_sharded(p) for p in model.parameters()):
        return torch.distributed.group.WORLD
    return None


def any_rank(flag: bool, group: Any, device: torch.device) -> bool:
    """Return whether the flag is set on any rank of the group, if there is one."""
    if group is None:
        return flag
    on_any = torch.tensor(float(flag), device=device)
    torch.distributed.all_reduce(on_any, op=torch.distributed.ReduceOp.MAX, group=group)
    return bool(on_any.item())


@contextlib.contextmanager
def gradients_stay(model: nn.Module, stay: bool) -> Generator[None]:
    """Keep gradients on their ranks during forward and backward if `stay`."""
    if not stay:
        yield
    elif is_ddp(model):
        with cast("Any", _outermost(model)).no_sync():
            yield
    elif is_fully_sharded(model):
        _send(model, False)
        try:
            yield
        finally:
            _send(model, True)
    else:
        yield


# DistributedDataParallel averages gradients during backward, in the dtype that the parameters had when it was built. A
# level that casts weights must therefore be applied first. `fully_shard` keeps FP32 shards, which already are master
# weights, and its own policy casts what a module computes with. A level uses that policy instead of casting, and every
# other combination is refused.
def level_on(model: nn.Module, level: Level) -> Level:
    """Return the level as it applies to this model.

    Raises an `ArgumentError` if it contradicts the policy of `fully_shard`, or casts weights under
    DistributedDataParallel.
    """
    if is_ddp(model) and level.casts and any(p.dtype == torch.float32 for p in model.parameters()):
        raise ArgumentError(
            f"prepare: expected {level.name} to come before DistributedDataParallel, which was built for FP32 "
            "gradients; got a model that is wrapped. Prepare the module first, then set loop.model = "
            "DistributedDataParallel(loop.model)."
        )
    if not is_fully_sharded(model):
        return level
    # Under `fully_shard`, casting is left to its policy.
    policies = sharding_policies(model)
    dtypes = {policy.param_dtype or torch.float32 for policy in policies}
    return _level_on_shards(level, dtypes)


def _level_on_shards(level: Level, dtypes: set[torch.dtype]) -> Level:
    shown = ", ".join(sorted(str(dtype) for dtype in dtypes))
    if level.casts and level.update != "masters":
        raise ArgumentError(
            f"prepare: expected a level that keeps FP32 shards under fully_shard; got {level.name}. Use "
            f"{level.weights}-master with MixedPrecisionPolicy(param_dtype={level.dtype})."
        )
    if not level.casts:
        if dtypes != {torch.float32}:
            raise ArgumentError(
                f"prepare: expected fully_shard to leave the casting to {level.name}; got a MixedPrecisionPolicy with "
                f"param_dtype {shown}. Leave mp_policy out, or use fp16-master or bf16-master, which it applies."
            )
        return level
    if level.dtype not in dtypes or not dtypes <= {level.dtype, torch.float32}:
        raise ArgumentError(
            f"prepare: expected {level.name} under fully_shard to match its mp_policy; got param_dtype "
            f"{shown}. Shard with MixedPrecisionPolicy(param_dtype={DTYPES[level.weights]})."
        )
    return replace(level, weights="fp32", update="plain")


def _send(model: nn.Module, send: bool) -> None:
    for module in _sharded_modules(model):
        module.set_requires_gradient_sync(send, recurse=False)


def _sharded_modules(model: nn.Module) -> Iterator[Any]:
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return (module for module in model.modules() if kind is not None and isinstance(module, kind))


def sharding_policies(model: nn.Module) -> list[Any]:
    """Return the `MixedPrecisionPolicy` of each module that `fully_shard` wraps."""
    # torch has no public way to ask
    return [module._get_fsdp_state()._mp_policy for module in _sharded_modules(model)]  # noqa: SLF001


def _outermost(model: nn.Module) -> nn.Module:
    """Return the model without the wrapper of torch.compile."""
    inner = model.__dict__.get("_modules", {}).get("_orig_mod")
    return inner if isinstance(inner, nn.Module) else model
