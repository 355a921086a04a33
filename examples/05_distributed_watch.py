"""Two processes train one model, each on half of the batch; the run has what one process would have recorded.

Each rank writes its own records, and nothing is exchanged while training. Reading the run merges them.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import plimsoll as pl

RANKS, BATCH, STEPS = 2, 64, 5


def model() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))


def train(network: nn.Module, part: slice) -> None:
    """Trains on some rows of each batch."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x, y = torch.randn(BATCH, 32, generator=generator), torch.randn(BATCH, 8, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(network(x[part]), y[part]).backward()
        optimizer.step()


def one_rank(rank: int, folder: str) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=RANKS)
    network = DistributedDataParallel(model())
    rows = BATCH // RANKS
    with pl.watch(network, run=folder, every=1):
        train(network, slice(rank * rows, (rank + 1) * rows))
    dist.destroy_process_group()


def main() -> None:
    """Trains in two processes, then in one, and compares."""
    with tempfile.TemporaryDirectory() as folder:
        together, alone = str(Path(folder) / "together"), str(Path(folder) / "alone")
        mp.spawn(one_rank, args=(together,), nprocs=RANKS)
        network = model()
        with pl.watch(network, run=alone, every=1):
            train(network, slice(0, BATCH))

        ranks, single = pl.Run(together), pl.Run(alone)
        print(f"ranks that recorded: {ranks.ranks}")
        print("step  gradient norm of 0.weight: together, alone   output gradients counted")
        name = ("gradients", "0.weight", "norm")
        (steps, norms), (_, expected) = ranks.series(*name), single.series(*name)
        _, counts = ranks.series("activation_gradients", "model:output", "count")
        for step, norm, other, count in zip(steps, norms, expected, counts, strict=True):
            print(f"{step:>4}  {norm:>34.9f}, {other:.9f} {count:>17.0f}")

        assert all(abs(norm - other) <= 1e-5 * other for norm, other in zip(norms, expected, strict=True))
        assert (counts == BATCH * 8).all()
        output = ("activation_gradients", "model:output", "norm")
        assert abs(ranks.series(*output)[1] - single.series(*output)[1]).max() < 1e-5
        assert abs(ranks.scalars("loss")[1] - single.scalars("loss")[1]).max() < 1e-5


if __name__ == "__main__":
    main()
