"""Two ranks: FSDP2 gives what one process gives, weights may be cached, and histories agree where asked to."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from plimsoll import fp8
from tests.support import processes

RANKS = 2
KINDS = ({"scaling": "unit"}, {"scaling": "tensor"}, {"scaling": "tensor", "history": 2})


def model(kind: dict[str, object]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(fp8.Linear(64, 48, **kind), nn.ReLU(), fp8.Linear(48, 32, **kind))


def train(net: nn.Module, x: Tensor, cached: bool) -> None:
    with fp8.cached_weights(net) if cached else torch.enable_grad():
        for _ in range(2):
            net(x).square().mean().backward()


def work(folder: str) -> None:
    """A rank's part: this file is run as a script."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    mesh = torch.distributed.init_device_mesh("cpu", (RANKS,))
    results: list[list[Tensor]] = []
    for kind in KINDS:
        for cached in (False, True):
            net = model(kind)
            for layer in (net[0], net[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(net, mesh=mesh)
            train(net, torch.randn(16, 64, generator=torch.Generator().manual_seed(1)), cached)
            results.append([p.grad.full_tensor() for p in net.parameters()])
    layer = fp8.Linear(32, 16, scaling="tensor", history=2)
    for _ in range(2):
        layer(torch.ones(16, 32) * (rank + 1)).sum().backward()
    fp8.agree(layer)
    results.append([layer.get_buffer("fp8_history"), layer.get_buffer("fp8_absmax")])
    torch.save(results, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_two_ranks(tmp_path: Path) -> None:
    processes.ranks(Path(__file__), [(tmp_path,)] * RANKS)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS))
    for index, kind in enumerate(KINDS):
        alone = model(kind)
        train(alone, torch.randn(16, 64, generator=torch.Generator().manual_seed(1)), cached=False)
        for found in (*first[2 * index : 2 * index + 2], *second[2 * index : 2 * index + 2]):
            for mine, parameter in zip(found, alone.parameters(), strict=True):
                assert parameter.grad is not None
                torch.testing.assert_close(mine, parameter.grad, rtol=1e-6, atol=1e-7)
    for history, absmax in (first[-1], second[-1]):
        assert history[0].tolist() == [2.0, 0.0] and float(absmax[0]) == 2.0


if __name__ == "__main__":
    work(sys.argv[1])
