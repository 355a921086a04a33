"""One rank of test_layers_ranks: ``layers_worker.py STORE RANK WORLD RESULTS`` writes what it saw as JSON."""

import copy
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from plimsoll.errors import UnsupportedTensorError
from plimsoll.scaling import LayerScaler
from tests.support.scaling.layer_models import D, made


def gradients(model: nn.Module) -> list[list[float]]:
    return [p.grad.flatten().tolist() for p in model.parameters()]


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(6, D, generator=torch.Generator().manual_seed(rank))


def exact(rank: int) -> dict[str, Any]:
    """Each rank has exponents of its own; gradients are averaged without them."""
    plain = DistributedDataParallel(made("residual"))
    plain(inputs(rank)).square().mean().backward()
    model = DistributedDataParallel(made("residual"))
    scaler = LayerScaler(model)
    scaler._layers.exponents = [5 + 3 * rank, -4, 11 - rank]
    scaler.scale(model(inputs(rank)).square().mean()).backward()
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.0))
    return {"expected": gradients(plain), "got": gradients(model), "names": list(scaler.scales)}


def steps(rank: int) -> dict[str, Any]:
    """One rank's gradients break in two steps."""
    model = DistributedDataParallel(made("residual"))
    scaler = LayerScaler(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(8):
        optimizer.zero_grad()
        x = inputs(rank) * (math.nan if rank == 1 and step in (2, 3) else 1.0)
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append([scaler.outcome.stepped, scaler.get_scale()])
    return {"seen": seen, "weights": [p.flatten().tolist() for p in model.parameters()]}


def refused(_: int) -> dict[str, str]:
    """What is said to models that cannot have layer scales."""
    said: dict[str, str] = {}
    for name, make in {
        "half": lambda: LayerScaler(DistributedDataParallel(made("residual").half())),
        "sharded": lambda: LayerScaler(fully_shard(made("residual"))),
        "sharded later": lambda: later(made("residual")),
    }.items():
        try:
            make()
        except UnsupportedTensorError as error:
            said[name] = str(error)
    return said


def later(model: nn.Module) -> None:
    scaler = LayerScaler(model)
    scaler._layers.exponents = [1, 2, 3]
    fully_shard(model)
    model(inputs(0))


def main(store: str, rank: int, world: int, results: str) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*FSDP will not all-gather.*|.*barrier.*|.*device_id.*")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        seen = {scenario.__name__: copy.deepcopy(scenario(rank)) for scenario in (exact, steps, refused)}
        Path(results).write_text(json.dumps(seen), encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
