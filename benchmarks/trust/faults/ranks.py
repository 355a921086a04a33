"""Faults of one rank among several: other data, other labels."""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import plimsoll as pl
from benchmarks.trust.registry import fault
from benchmarks.trust.toys import clusters, mlp
from benchmarks.trust.training import Training

RANKS, STEPS = 3, 160
RANK = r"ranks? (number )?\b1\b|\brank=1\b|\br00001\b"


def _labels(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, (y + 3) % 10


def _data(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * 20 + 5, y


def _as_they_are(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y


def _work(rank: int, path: Path, spoil: object, shared: bool) -> None:
    """One rank: data parallel by averaged gradients, first weights `shared` or not; rank 1's batches are spoiled."""
    torch.set_num_threads(1)
    meeting = path.with_name(f"{path.name}.meeting")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    inner = mlp(16, 64, 64, 10)
    x, y = clusters()
    if not shared:
        torch.manual_seed(100 + rank)
        inner = mlp(16, 64, 64, 10)
    model = nn.parallel.DistributedDataParallel(inner, init_sync=shared)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank + 1)
    with pl.watch(model, optimizer, run=path, every=10):
        for _ in range(STEPS):
            chosen = torch.randint(len(x), (32,))
            inputs, labels = x[chosen], y[chosen]
            if rank == 1:
                inputs, labels = spoil(inputs, labels)  # type: ignore[operator]
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    dist.destroy_process_group()
    if rank == 0:
        meeting.unlink(missing_ok=True)


def _spawn(run: Training, spoil: object, *, shared: bool = True) -> None:
    run.path.with_name(f"{run.path.name}.meeting").unlink(missing_ok=True)
    processes.spawn(partial(_work, path=run.path, spoil=spoil, shared=shared), nprocs=RANKS)


@fault("one-rank-with-other-labels", named=RANK)
def labels(run: Training) -> None:
    """Of three ranks one has labels that are three classes off: its loss does not fall."""
    _spawn(run, _labels)


@fault("one-rank-with-other-data", named=RANK, held_back=True)
def data(run: Training) -> None:
    """Of three ranks one has inputs that were not normalised, twenty times as large."""
    _spawn(run, _data)


@fault(
    "ranks-begin-apart",
    named=r"ranks?\b.*(differ|apart|disagree|unlike|not (the same|equal|in step)|out of (sync|step)|diverge)",
)
def apart(run: Training) -> None:
    """Each rank drew weights of its own, and averaged gradients fit none of the three models."""
    _spawn(run, _as_they_are, shared=False)
