"""One of two ranks, run by test_measure: ``_rank.py STORE RANK``. The spectra of a DTensor add up to the whole's."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from plimsoll.errors import UnsupportedTensorError
from plimsoll.spectrum import Spectrum, measure


def main(store: str, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        line, plane = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
        check_sums(line, plane)
        check_partial(line)
        x = torch.ones(3)
        assert measure(AsyncCollectiveTensor(x)) == measure(x)
    finally:
        dist.destroy_process_group()


def check_sums(line: DeviceMesh, plane: DeviceMesh) -> None:
    x = torch.arange(15.0).reshape(5, 3)
    row = x[:1].contiguous()
    tensors = {
        "shard": distribute_tensor(x, line, [Shard(0)]),
        "columns": distribute_tensor(x, line, [Shard(1)]),
        "parameter": torch.nn.Parameter(distribute_tensor(x, line, [Shard(0)])),
        "row": distribute_tensor(row, line, [Shard(0)]),
        "replica": distribute_tensor(x, line, [Replicate()]),
        "replicas of shards": distribute_tensor(x, plane, [Shard(0), Replicate()]),
        "shards of replicas": distribute_tensor(x, plane, [Replicate(), Shard(0)]),
    }
    everyone: list[dict[str, Spectrum]] = [{}, {}]
    dist.all_gather_object(everyone, measure(tensors, block=16))
    for name in tensors:
        whole = measure(row if name == "row" else x, block=16)
        total = sum((spectra[name] for spectra in everyone), Spectrum.empty())
        if name == "columns":  # whose blocks are those of the shards
            assert (total.count, total.sum) == (whole.count, whole.sum), (name, total, whole)
        else:
            assert total == whole, (name, total, whole)
    assert everyone[1]["replica"].count == 0 and everyone[1]["shard"].count == 6


def check_partial(line: DeviceMesh) -> None:
    x = torch.ones(3)
    message = r"a DTensor with a Partial placement.* at index 1 .*x\.redistribute\(placements=\[Replicate\(\)\]\)"
    with pytest.raises(UnsupportedTensorError, match=message):
        measure([x, DTensor.from_local(x, line, [Partial()])])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
