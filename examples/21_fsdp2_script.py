"""A script on FSDP2: sharded by blocks, BF16 over FP32 shards, recomputed, saved by shards, resumed, watched.

torchrun --nproc_per_node=8 21_fsdp2_script.py RUN [--compile]     under plain python, two processes on the CPU
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import plimsoll as pl

WIDTH, TOKENS, STEPS = 32, 64, 8
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ON_GPU = "LOCAL_RANK" in os.environ and torch.cuda.is_available()
DEVICE = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if ON_GPU else "cpu")


class Block(nn.TransformerEncoderLayer):
    """A layer whose activations are computed again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


def build(*, compiled: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Each block is a unit of its own: gathered before it is used, freed after."""
    torch.manual_seed(0)
    blocks = [Block(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(TOKENS, WIDTH), *blocks, nn.Linear(WIDTH, TOKENS, bias=False)).to(DEVICE)
    for block in blocks:
        if compiled:
            block.compile()
        fully_shard(block, mp_policy=POLICY)
    return fully_shard(model, mp_policy=POLICY), torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(run: str, first: int, last: int, *, compiled: bool = False) -> None:
    """Trains over these steps: from the checkpoint of the first one, if it is not 0; leaves one of the last."""
    model, optimizer = build(compiled=compiled)
    if first:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=f"{run}-at-{first}")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    with pl.watch(model, optimizer, run=run, every=2, start_step=first):
        for step in range(first, last):
            generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            tokens = (torch.randint(TOKENS, (4, 1), generator=generator) + torch.arange(17)).to(DEVICE) % TOKENS
            nn.functional.cross_entropy(model(tokens[:, :-1]).float().mT, tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{run}-at-{last}")


def one_rank(rank: int, folder: str) -> None:
    """Half of the steps, then the others from the checkpoint; for comparison all at once."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for run, first, last in (("resumed", 0, STEPS // 2), ("resumed", STEPS // 2, STEPS), ("whole", 0, STEPS)):
        train(f"{folder}/{run}", first, last)


if __name__ == "__main__" and "LOCAL_RANK" in os.environ:  # started by torchrun
    torch.cuda.set_device(DEVICE.index if ON_GPU else -1)  # a negative one changes nothing
    dist.init_process_group()
    train(sys.argv[1], 0, STEPS, compiled="--compile" in sys.argv)
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(one_rank, args=(folder,), nprocs=2)
        resumed, whole = pl.Run(f"{folder}/resumed"), pl.Run(f"{folder}/whole")
        print(resumed, *resumed.scalars("loss")[1].round(2))
        assert (resumed.scalars("loss")[1] == whole.scalars("loss")[1]).all()  # to the bit
        assert resumed.spectrum("weights", "1.linear1.weight", 4).count == 4 * WIDTH * WIDTH  # each rank has half
