"""What ranks do under torchrun: one way of distributing the model of `models` each, watched into a run of its own."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import plimsoll as pl
from plimsoll.watch.session import WatchSession
from plimsoll.watch.shadow import data_parallel
from tests.support.patience import HANG_SECONDS
from tests.support.watch.ranks.models import BATCH, Back, Experts, Front, Net, Rounded, data, loss_of, sgd, train

# What the scenarios give `watch`; a scenario "..._reduced" is the same with ranks="reduce".
OPTIONS: dict[str, object] = {"every": 1}


def run(name: str, folder: Path) -> None:
    reduced = name.endswith("_reduced")
    OPTIONS["ranks"] = "reduce" if reduced else "each"
    globals()[name.removesuffix("_reduced")](folder)


def place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def ddp(folder: Path) -> None:
    rank, world = place()
    model = DistributedDataParallel(Net())
    optimizer = sgd(model)
    with pl.watch(model, optimizer, run=folder, **OPTIONS):
        train(model, optimizer, data(), rank, world)


def ddp_watched_first(folder: Path) -> None:
    rank, world = place()
    model = Net()
    optimizer = sgd(model)
    with pl.watch(model, run=folder, **OPTIONS):
        train(DistributedDataParallel(model), optimizer, data(), rank, world)


def fsdp(folder: Path) -> None:
    rank, world = place()
    model = Net()
    fully_shard(model.inner)
    fully_shard(model)
    optimizer = sgd(model)
    with pl.watch(model, optimizer, run=folder, **OPTIONS):
        train(model, optimizer, data(), rank, world)


def fsdp_watched_first(folder: Path) -> None:
    rank, world = place()
    model = Net()
    with pl.watch(model, run=folder, **OPTIONS):
        fully_shard(model.inner)
        fully_shard(model)
        train(model, sgd(model), data(), rank, world)


PLAN = {"inner.fc1": ColwiseParallel(), "inner.fc2": RowwiseParallel()}


def tensor_parallel(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = parallelize_module(Net(), mesh, PLAN)
    optimizer = sgd(model)
    with pl.watch(model, optimizer, run=folder, **OPTIONS):
        train(model, optimizer, data())


def tensor_parallel_watched_first(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = Net()
    with pl.watch(model, run=folder, **OPTIONS):
        parallelize_module(model, mesh, PLAN)
        train(model, sgd(model), data())


def tensor_parallel_twins(folder: Path) -> None:
    """Both ranks' shards of a layer are the same, and so are its outputs: spectra alone look like replicas."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = Net()
    with torch.no_grad():
        for p in model.inner.fc1.parameters():
            p[4:] = p[:4]
    model = parallelize_module(model, mesh, PLAN)
    with pl.watch(model, run=folder, **OPTIONS):
        train(model, sgd(model), data(1))


def fsdp_and_tensor_parallel(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Net(), mesh["tp"], PLAN)
    fully_shard(model.inner, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = sgd(model)
    with pl.watch(model, optimizer, run=folder, **OPTIONS):
        train(model, optimizer, data(), mesh["dp"].get_local_rank(), 2)


def hybrid_fsdp(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = Net()
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = sgd(model)
    with pl.watch(model, optimizer, run=folder, **OPTIONS):
        train(model, optimizer, data(), dist.get_rank(), 4)


def shadow_ddp(folder: Path) -> None:
    rank, world = place()
    model = DistributedDataParallel(Rounded())
    optimizer = sgd(model)
    with pl.watch(model, optimizer, run=folder, shadow_every=1, **OPTIONS):
        train(model, optimizer, data(broken=False), rank, world)


def shadow_ddp_micro_batches(folder: Path) -> None:
    """Two micro-batches, of which the first averages no gradients."""
    rank, world = place()
    model = DistributedDataParallel(Rounded())
    optimizer = sgd(model)
    with pl.watch(model, optimizer, run=folder, shadow_every=1, **OPTIONS):
        for x, y in data(broken=False):
            optimizer.zero_grad()
            parts = [t.chunk(2 * world)[2 * rank : 2 * rank + 2] for t in (x, y)]
            with model.no_sync():
                (loss_of(model(parts[0][0]), parts[1][0]) / 2).backward()
            (loss_of(model(parts[0][1]), parts[1][1]) / 2).backward()
            optimizer.step()


def shadow_fsdp(folder: Path) -> None:
    rank, world = place()
    model = Rounded()
    fully_shard(model.inner)
    fully_shard(model)
    optimizer = sgd(model)
    with pl.watch(model, optimizer, run=folder, shadow_every=1, **OPTIONS):
        train(model, optimizer, data(broken=False), rank, world)


def shadow_hybrid_fsdp(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = Rounded()
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = sgd(model)
    with pl.watch(model, optimizer, run=folder, shadow_every=1, **OPTIONS):
        train(model, optimizer, data(broken=False), dist.get_rank(), 4)


def shadow_tensor_parallel(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = parallelize_module(Net(), mesh, PLAN)
    optimizer = sgd(model)
    with pl.watch(model, optimizer, run=folder, shadow_every=1, **OPTIONS):
        train(model, optimizer, data(broken=False))


def shadow_on_one_rank(folder: Path) -> None:
    """A rank that fails in its repetition, and one that does not watch: the others must not wait for it."""
    rank, world = place()
    data_parallel.MEETING_SECONDS = 1.0
    model = DistributedDataParallel(Rounded())
    optimizer = sgd(model)
    w = pl.watch(model, optimizer, run=folder, shadow_every=1, **OPTIONS) if rank == 0 else None
    train(model, optimizer, data(1, broken=False), rank, world)
    if w is not None:
        w.close()
    data_parallel.MEETING_SECONDS = HANG_SECONDS
    other = DistributedDataParallel(Rounded())
    optimizer = sgd(other)
    with pl.watch(other, optimizer, run=folder / "failing", shadow_every=1, **OPTIONS):
        if rank == 1:
            other.module.register_forward_pre_hook(_failing)
        train(other, optimizer, data(1, broken=False), rank, world)


def _failing(module: nn.Module, args: object) -> None:
    if WatchSession.repeating:
        raise ValueError("not twice")


class Sum(torch.autograd.Function):
    """Adds up over ranks on the way there, or on the way back."""

    @staticmethod
    def forward(ctx, x, group, forward):
        ctx.group, ctx.forward_sums = group, forward
        x = x.clone()
        if forward:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        if not ctx.forward_sums:
            dist.all_reduce(g, group=ctx.group)
        return g, None, None


class Columns(nn.Module):
    """Some of a linear layer's outputs, as plain tensors."""

    def __init__(self, whole: nn.Linear, part: int, parts: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(parts)[part].clone())
        self.bias = nn.Parameter(whole.bias.detach().chunk(parts)[part].clone())
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(Sum.apply(x, self.group, False), self.weight, self.bias)


class Rows(nn.Module):
    """A linear layer from some of its inputs, as plain tensors; its bias is a replica on every rank."""

    def __init__(self, whole: nn.Linear, part: int, parts: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(parts, 1)[part].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return Sum.apply(nn.functional.linear(x, self.weight), self.group, True) + self.bias


def by_hand(part: int, parts: int, group: dist.ProcessGroup) -> Net:
    model = Net()
    model.inner.fc1 = Columns(model.inner.fc1, part, parts, group)
    model.inner.fc2 = Rows(model.inner.fc2, part, parts, group)
    return model


def plain_tensor_parallel(folder: Path) -> None:
    rank, world = place()
    model = by_hand(rank, world, dist.group.WORLD)
    optimizer = sgd(model)
    with pl.watch(model, optimizer, run=folder, **OPTIONS):
        train(model, optimizer, data(broken=False))


def ddp_and_plain_tensor_parallel(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = by_hand(mesh["tp"].get_local_rank(), 2, mesh["tp"].get_group())
    model = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    optimizer = sgd(model)
    with pl.watch(model, optimizer, run=folder, **OPTIONS):
        train(model, optimizer, data(broken=False), mesh["dp"].get_local_rank(), 2)


def pipelined(folder: Path, schedule: type, mesh: DeviceMesh, microbatches: int, watch_first: bool) -> None:
    data_parallel = "dp" in mesh.mesh_dim_names
    part, parts = (mesh["dp"].get_local_rank(), 2) if data_parallel else (0, 1)
    index = mesh["pp"].get_local_rank()
    module = (Front, Back)[index](Net())
    w = pl.watch(module, run=folder, **OPTIONS) if watch_first else None
    if data_parallel:
        fully_shard(module, mesh=mesh["dp"])
    stage = PipelineStage(module, index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    runner = schedule(stage, microbatches, loss_fn=loss_of)
    optimizer = sgd(module)
    w = w or pl.watch(module, optimizer, run=folder, **OPTIONS)
    rows = BATCH // parts
    for x, y in data():
        optimizer.zero_grad()
        if index == 0:
            runner.step(x[part * rows : (part + 1) * rows])
        else:
            runner.step(target=y[part * rows : (part + 1) * rows])
        optimizer.step()
    w.close()


def pipeline(folder: Path) -> None:
    pipelined(folder, ScheduleGPipe, init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), 4, False)


def pipeline_1f1b(folder: Path) -> None:
    pipelined(folder, Schedule1F1B, init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), 2, True)


def pipeline_and_fsdp(folder: Path) -> None:
    pipelined(folder, ScheduleGPipe, init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")), 2, True)


class OneExpert(nn.Module):
    """`Experts` on two ranks, each with one expert; samples go to the rank that has theirs."""

    def __init__(self) -> None:
        super().__init__()
        whole, mine = Experts(), f"e{dist.get_rank()}"
        self.dense = whole.dense
        self.experts = nn.ModuleDict({mine: whole.experts[mine]})

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.dense(x))
        (expert,) = self.experts.values()
        there = torch.cat([x[0::2], x[1::2]])
        back = exchanged(expert(exchanged(there)))
        return torch.stack(back.chunk(2), 1).flatten(0, 1)


def exchanged(x: Tensor) -> Tensor:
    return all_to_all_single_autograd(x.contiguous(), None, None, dist.group.WORLD)


def expert_parallel(folder: Path) -> None:
    rank, world = place()
    module = OneExpert()
    mine = [name for name, _ in module.named_parameters() if name.startswith("experts")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, mine)
    model = DistributedDataParallel(module)
    optimizer = sgd(model)

    def divide() -> None:
        for p in module.experts.parameters():
            p.grad /= world

    with pl.watch(model, optimizer, run=folder, **OPTIONS):
        train(model, optimizer, data(), rank, world, divide)


def watching_changes_nothing(folder: Path) -> None:
    rank, _ = place()
    generator = torch.Generator().manual_seed(3 + rank)
    batches = [(torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 3, generator=generator))] * 5
    for kind in ("ddp", "fsdp"):
        results = []
        for watched in (False, True):
            torch.manual_seed(5)
            model = nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.5), nn.GELU(), nn.Linear(7, 3))
            model = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            w = pl.watch(model, optimizer, run=folder / kind, **OPTIONS) if watched else None
            losses = train(model, optimizer, batches)
            state = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
            results.append((losses, state))
            if w is not None:
                w.close()
        (bare, weights), (watched, found) = results
        assert bare == watched
        assert all(torch.equal(p, q) for p, q in zip(weights, found, strict=True))


def one_rank_alone_watches(folder: Path) -> None:
    """A collective in the watching would wait for ever for the other rank."""
    rank, world = place()
    model = fully_shard(Net())
    optimizer = sgd(model)
    w = pl.watch(model, optimizer, run=folder, **OPTIONS) if rank == 0 else None
    train(model, optimizer, data(), rank, world)
    if w is not None:
        w.log(mine=1.0)
        assert w.flush()
        w.close()
