"""Receipts of steps that are spread over ranks: DDP in a group of one, the others with a process group that is fake.

Prints one JSON object: for each case its deviations and its collectives.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import plimsoll as pl

CASES: dict[str, Callable[[], dict[str, Any]]] = {}


def case(make: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    CASES[make.__name__] = make
    return make


class Block(nn.Module):
    """A norm between two layers, on a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def taken(model: nn.Module, declared: str, *, autocast: bool = False) -> dict[str, Any]:
    """What a receipt of one step of the model has."""
    x = torch.randn(2, 8, 16)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x)
        F.mse_loss(y.float(), torch.zeros(2, 8, 16)).backward()
        optimizer.step()

    receipt = pl.receipt(model, step=step, declared=declared)
    reduced = [row for row in receipt.rows if row.kind == "collective" and "reduce" in row.operation]
    calls = {"forward": 0, "backward": 0}
    for row in receipt.rows:
        if row.kind == "product":
            calls[row.phase] += row.calls
    return {
        "deviations": [[d.kind, d.module, d.actual] for d in receipt.deviations],
        "reductions": sorted({(row.phase, row.module or "", row.output) for row in reduced}),
        "products": calls,
        "weights": receipt.memory.weights,
        "notes": receipt.notes,
        "advice": [d.advice for d in receipt.deviations],
    }  # fmt: skip


def grouped(world: int, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    if world == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        return run()
    finally:
        dist.destroy_process_group()


@case
def ddp() -> dict[str, Any]:
    return grouped(1, lambda: taken(nn.parallel.DistributedDataParallel(Block()), "amp-bf16", autocast=True))


@case
def ddp_with_a_hook_in_bf16() -> dict[str, Any]:
    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        narrow = bucket.buffer().bfloat16()
        future = dist.all_reduce(narrow, async_op=True).get_future()
        return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    def run() -> dict[str, Any]:
        model = nn.parallel.DistributedDataParallel(Block())
        model.register_comm_hook(None, hook)
        return taken(model, "amp-bf16", autocast=True)

    return grouped(1, run)


@case
def ddp_with_torchs_own_hook_in_fp16() -> dict[str, Any]:
    def run() -> dict[str, Any]:
        model = nn.parallel.DistributedDataParallel(Block())
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        return taken(model, "amp-bf16", autocast=True)

    return grouped(1, run)


def _sharded(reduce_dtype: torch.dtype | None) -> nn.Module:
    mesh, model = init_device_mesh("cpu", (2,)), nn.Sequential(Block(), Block())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


@case
def fully_sharded() -> dict[str, Any]:
    return grouped(2, lambda: taken(_sharded(None), "bf16-master"))


@case
def fully_sharded_and_reduced_in_fp32() -> dict[str, Any]:
    return grouped(2, lambda: taken(_sharded(torch.float32), "bf16-master"))


@case
def tensor_parallel() -> dict[str, Any]:
    def run() -> dict[str, Any]:
        mesh, block = init_device_mesh("cpu", (2,)), Block()
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return taken(block, "amp-bf16", autocast=True)

    return grouped(2, run)


@case
def sharded_and_tensor_parallel() -> dict[str, Any]:
    """pytorch issue 190626: before 2.15, reduce_dtype does not reach the reduction over the tensor-parallel mesh."""

    def run() -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(Block(), Block(), nn.Linear(16, 16, bias=False))
        for block in model[:2]:
            plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)),
                    "down": RowwiseParallel(output_layouts=Shard(1))}  # fmt: skip
            parallelize_module(block, mesh["tp"], plan)
        inside = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
        outside = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(model, mesh["tp"], {"0": inside, "2": outside})
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model[:2]:
            fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
        return taken(fully_shard(model, mesh=mesh["dp"], mp_policy=policy), "bf16-master")

    return grouped(4, run)


@case
def tensor_parallel_with_a_round_trip() -> dict[str, Any]:
    class Trip(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).bfloat16().float() * 1.5  # all of them DTensors

    def run() -> dict[str, Any]:
        model = nn.Sequential(Trip(16, 16, bias=False))
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(output_layouts=Replicate())})
        return taken(model, "fp32")

    return grouped(2, run)


if __name__ == "__main__":
    print(json.dumps({name: CASES[name]() for name in sys.argv[1:] or CASES}))  # noqa: T201
