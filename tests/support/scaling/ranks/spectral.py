"""What one rank does for test_spectral_ranks, and what it saw, as plain data; `worker.py` calls it."""

import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from plimsoll.scaling import SpectralScaler
from plimsoll.scaling.spectral.scale_windows import StepNumbers

STEPS = 60
BURST = range(30, 36)
BROKEN = 8  # a single overflow, on rank 2 alone
IDLE = 3  # the rank without gradients, where there is one


def levels(rank: int, step: int) -> float:
    """How large a rank's gradients are: 3 binades apart, so that each rank by itself would take another scale."""
    return 2.0 ** (3 * rank - 6) * (1 + 0.2 * math.sin(step + rank))


def gradient(rank: int, step: int, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """In the burst every second rank overflows in turn, so that each step of it is one rank's alone."""
    values = (torch.linspace(0.1, 1.0, 64) * levels(rank, step) * scale).to(dtype)
    if (step == BROKEN and rank == 2) or (step in BURST and rank == step % 3):
        values[0] = torch.inf
    return values


def train(
    scaler: SpectralScaler,
    dtype: torch.dtype = torch.float32,
    loss_dtype: torch.dtype = torch.float32,
    present: Callable[[int], bool] = lambda step: True,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Steps with made-up gradients; after each, this rank's decision, scale, and what it reports."""
    rank, seen = dist.get_rank(), []
    parameter = nn.Parameter(torch.ones(64, dtype=dtype))
    optimizer = torch.optim.SGD([parameter], lr=0.0, fused=scaler._sync_free)
    for step in range(steps):
        optimizer.zero_grad()
        scaler.scale(torch.ones((), dtype=loss_dtype))
        if present(step):
            parameter.grad = gradient(rank, step, scaler.get_scale(), dtype)
        scaler.step(optimizer)
        scaler.update()
        seen.append([scaler.outcome.stepped, scaler.get_scale().hex()])
    return {"seen": seen, "memory": scaler._memory.to_dict(), "report": reported(scaler)}


def reported(scaler: SpectralScaler) -> list[Any] | None:
    """The latest look at a rank's only tensor; None where there never was one."""
    if scaler._checks.latest(scaler._narrowest()) is None:
        return None
    found = scaler.report()
    return [found.scale, [[window.name, window.low, window.high] for window in found.tensors]]


def late(scaler: SpectralScaler, rank: int) -> SpectralScaler:
    """As on a GPU without synchronisation, where each rank's numbers come when they come."""
    scaler._late = True
    chance = random.Random(rank)
    StepNumbers.ready = lambda _: chance.random() < 0.75
    return scaler


def of_group(group: Any) -> dict[str, Any]:
    """Every scenario of four ranks with a process group."""
    rank = dist.get_rank()
    half = torch.float16 if rank == 0 else torch.float32
    found = {
        "alone": train(SpectralScaler("cpu")),
        "whole": train(SpectralScaler("cpu", process_group=group)),
        "idle": train(SpectralScaler("cpu", process_group=group), present=lambda step: rank != IDLE),
        "leaves": train(
            SpectralScaler("cpu", process_group=group, inspect_every=1),
            present=lambda step: rank != IDLE or step < STEPS - 10,
        ),
        "half": train(SpectralScaler("cpu", process_group=group, format="bf16", max_scale=2.0**20), dtype=half),
        "half loss": train(SpectralScaler("cpu", process_group=group, format="bf16"), loss_dtype=half),
    }
    ready = StepNumbers.ready
    found["late"] = train(late(SpectralScaler("cpu", process_group=group, sync_free=True), rank), steps=2 * STEPS)
    StepNumbers.ready = ready
    return found


def sharded(mesh: Any) -> dict[str, Any]:
    """Two ranks of `fully_shard`: the last layer's row and bias lie on one of them, the other's shard is empty."""
    torch.manual_seed(0)
    rank, seen = dist.get_rank(), []
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = SpectralScaler("cpu", inspect_every=1)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank)) * 2.0**rank
        scaler.scale(model(x).square().mean()).backward()
        local = next(model.parameters()).grad.to_local()
        if step == BROKEN or step in BURST:
            local[0, 0] = torch.inf if rank == step % 2 else local[0, 0]
        scaler.step(optimizer)
        scaler.update()
        seen.append([scaler.outcome.stepped, scaler.get_scale().hex(), scaler.outcome.grad_norm])
    return {"seen": seen, "memory": scaler._memory.to_dict(), "report": reported(scaler)}
