"""One of the ranks of test_locate_ranks.py: ``locate_rank.py FOLDER RANK RANKS``. It asserts."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from plimsoll.diagnosis import Fault, locate


class Root(nn.Module):
    """A linear layer whose outputs' square roots are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).abs().sqrt()


def model() -> Root:
    torch.manual_seed(0)
    made = Root()
    nn.init.zeros_(made.inner.bias)
    return made


def batch(rank: int, *, broken: bool) -> Tensor:
    """The data of a rank; that of the last is zero, if broken, so that sqrt has no slope."""
    torch.manual_seed(rank)
    return torch.randn(3, 4) * (0.0 if broken and rank else 1.0)


def blamed(fault: Fault | None, rank: int, prefix: str) -> None:
    """Rank 1 made it; rank 0 can only say that its gradients came so."""
    assert fault is not None
    assert fault.reached is not None
    if rank:
        assert (fault.operation, fault.phase, fault.forward) == ("aten.div", "backward", "aten.sqrt"), fault
        assert fault.module == "model"
        assert fault.source is not None
        assert fault.source.text == "return self.inner(x).abs().sqrt()"
    else:
        assert "another rank" in fault.sentence, fault
        assert prefix in fault.reached


def check_ddp(rank: int) -> None:
    inner = model()
    ddp = DistributedDataParallel(inner)
    for broken in (False, True, False):
        before = [p.detach().clone() for p in ddp.parameters()]
        x = batch(rank, broken=broken)
        fault = locate(lambda x=x: ddp(x).sum(), model=ddp)
        assert all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
        if broken:
            blamed(fault, rank, "the gradient of inner.")
        else:
            assert fault is None, fault
    ddp(batch(rank, broken=False)).sum().backward()  # and training goes on


def check_sharded(rank: int) -> None:
    made = model()
    fully_shard(made)
    optimizer = torch.optim.AdamW(made.parameters())
    for broken in (False, True):
        x = batch(rank, broken=broken)

        def step(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = made(x).sum()
            loss.backward()
            optimizer.step()
            return loss

        before = [p.to_local().detach().clone() for p in made.parameters()]
        fault = locate(step, model=made)
        assert all(torch.equal(a, p.to_local()) for a, p in zip(before, made.parameters(), strict=True))
        assert not optimizer.state
        if broken:
            blamed(fault, rank, "inner.")
        else:
            assert fault is None, fault


if __name__ == "__main__":
    folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    check_ddp(rank)
    check_sharded(rank)
    print("located")  # noqa: T201  (the test reads it)
    dist.barrier()
    dist.destroy_process_group()
