"""One of the ranks of test_communication.py: ``communication_rank.py FOLDER RANK RANKS``. It asserts."""

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.precision.training.gradient_compression import Carrier, GradientCompression, compress_gradients

SIZE = 4096
UNIT = {"fp16": 2.0**-11, "bf16": 2.0**-8}
FLUSHED = {"fp16": 2.0**-39, "bf16": 0.0}


class Given(nn.Module):
    """A model whose gradients are what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))
        self.other = nn.Parameter(torch.zeros(SIZE))

    def forward(self, gradients: Tensor) -> Tensor:
        return (self.weight * gradients[0] + self.other * gradients[1]).sum()


def wrapped(fmt: Carrier, **options: object) -> tuple[Given, DistributedDataParallel, GradientCompression]:
    model = Given()
    # A bucket for each parameter.
    ddp = DistributedDataParallel(model, bucket_cap_mb=SIZE * 4 / 2**20, **options)
    return model, ddp, compress_gradients(ddp, fmt)


def everyones(x: Tensor) -> list[Tensor]:
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x)
    return found


def gradients_of(rank: int, magnitude: float) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    spread = torch.exp2(torch.empty(2, SIZE).uniform_(-30, 0, generator=generator))
    return torch.randn(2, SIZE, generator=generator) * spread * magnitude


def check_means(fmt: Carrier, rank: int, ranks: int) -> None:
    for view in (False, True):
        model, ddp, compression = wrapped(fmt, gradient_as_bucket_view=view)
        # From what FP16 would flush whole to what it would overflow at; the first step's buckets are not yet split.
        for step, magnitude in enumerate((1e-12, 1e-3, 1.0, 1e6, 1e30)):
            model.zero_grad()
            own = gradients_of(rank, magnitude)
            ddp(own).backward()
            all_of = torch.stack(everyones(own)).double()
            for index, p in enumerate((model.weight, model.other)):
                exact, sizes = all_of[:, index].mean(0), all_of[:, index].abs().sum(0)
                largest = all_of.abs().max()
                allowed = sizes * UNIT[fmt] + largest * FLUSHED[fmt] * 2 ** math.ceil(math.log2(ranks))
                assert ((p.grad.double() - exact).abs() <= allowed).all(), (fmt, magnitude)
                assert all(torch.equal(x, p.grad) for x in everyones(p.grad))
            assert compression.traffic.steps == step + 1
        traffic = compression.traffic
        assert traffic.nonfinite_buckets == 0
        assert len(traffic.scales) == 2 and all(math.log2(scale).is_integer() for scale in traffic.scales)
        assert traffic.bytes == 5 * 2 * SIZE * 2
        counts = torch.tensor([traffic.steps, traffic.buckets, traffic.bytes, *traffic.scales])
        assert all(torch.equal(x, counts) for x in everyones(counts))


def check_extremes(rank: int, ranks: int) -> None:
    model, ddp, compression = wrapped("fp16")
    for value in (2.0**127, 2.0**-149, 0.0, 65504.0):
        model.zero_grad()
        ddp(torch.full((2, SIZE), value)).backward()  # all ranks the same: the sum is the worst that it can be
        assert torch.allclose(model.weight.grad, torch.full((SIZE,), value), rtol=2.0**-10, atol=0), value
    assert compression.traffic.nonfinite_buckets == 0


def check_nonfinite(rank: int, ranks: int) -> None:
    """One rank's NaN and Inf reach all, and nothing else is lost."""
    model, ddp, compression = wrapped("fp16")
    small = 3 * 2.0**-60  # lost, unless the scale is that of the finite values
    own = torch.full((2, SIZE), small)
    ddp(own).backward()
    buckets = compression.traffic.buckets
    model.zero_grad()
    if rank == 1:
        own[0, 5], own[1, 5] = math.inf, math.nan
    ddp(own).backward()
    g, other = model.weight.grad, model.other.grad
    assert g[5] == math.inf and other[5].isnan()
    assert (g[6:] == small).all() and (other[6:] == small).all()
    assert compression.traffic.nonfinite_buckets == 2
    assert compression.traffic.buckets == buckets + 2
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert not model.weight.any()


def check_refusals(rank: int, ranks: int) -> None:
    ddp = DistributedDataParallel(Given())
    compress_gradients(ddp)
    with pytest.raises(RuntimeError, match="can only be called once"):
        compress_gradients(ddp)
    with pytest.raises(ArgumentError, match="expected fmt to be 'fp16' or 'bf16'; got fmt='fp8'"):
        compress_gradients(DistributedDataParallel(Given()), "fp8")
    with pytest.raises(UnsupportedTensorError, match="expected dense gradients; got a module with sparse=True"):
        compress_gradients(DistributedDataParallel(nn.Embedding(4, 2, sparse=True)))


def main(folder: Path, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    check_means("fp16", rank, ranks)
    check_extremes(rank, ranks)
    if ranks == 2:
        check_means("bf16", rank, ranks)
        check_nonfinite(rank, ranks)
        check_refusals(rank, ranks)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
