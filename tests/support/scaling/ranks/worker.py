"""One of the four ranks: ``worker.py STORE RANK WORLD RESULTS`` runs all scenarios and writes what it saw as JSON."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from plimsoll.scaling import DynamicScaler
from tests.support.scaling.ranks import spectral

STEPS = 12


def train(
    scaler: DynamicScaler, parameter: Any, *, fused: bool, bad_steps: dict[int, int], idle_rank: int = -1
) -> dict[str, Any]:
    """Steps in which one rank's gradient, or shard of it, overflows; each rank's own view of it."""
    rank, seen = dist.get_rank(), []
    optimizer = torch.optim.Adam([parameter, idle := nn.Parameter(torch.ones(2))], lr=0.1, fused=fused)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(torch.ones(()))
        if rank != idle_rank:
            parameter.grad = torch.ones_like(parameter) * scaler.get_scale()
            if bad_steps.get(step) == rank:
                local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
                local.view(-1)[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        seen.append([scaler.outcome.stepped, scaler.get_scale(), scaler.outcome.reason])
    local = parameter.detach().to_local() if hasattr(parameter, "to_local") else parameter.detach()
    assert idle.grad is None
    return {"seen": seen, "weights": local.flatten().tolist()}


def main(store: str, rank: int, world: int, results: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    pair = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (world,))
    halves = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
    whole = dist.group.WORLD

    def scaler(group: Any = None) -> DynamicScaler:
        return DynamicScaler("cpu", process_group=group, regrowth_interval=2)

    def plain() -> nn.Parameter:
        return nn.Parameter(torch.ones(3))

    def sharded() -> nn.Parameter:
        return nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Shard(0)]))

    one_of_four = {3: 2, 4: 0, 7: 3}
    found: dict[str, Any] = {
        "alone": train(scaler(), plain(), fused=False, bad_steps=one_of_four),
        "whole": train(scaler(whole), plain(), fused=False, bad_steps=one_of_four),
        "fused": train(scaler(whole), plain(), fused=True, bad_steps=one_of_four),
        "idle": train(scaler(whole), plain(), fused=False, bad_steps=one_of_four, idle_rank=1),
        "sharded": train(scaler(), sharded(), fused=False, bad_steps=one_of_four),
    }
    if rank < 2:
        found["pair"] = train(scaler(pair), plain(), fused=False, bad_steps={5: 1})
    found["spectral"] = spectral.of_group(whole)
    if rank < 2:
        found["spectral"]["sharded"] = spectral.sharded(halves["inner"])
    results.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
