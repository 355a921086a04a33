"""A converted model under FSDP2, sharded by its blocks as the original would be, on two processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from plimsoll.unit._kinds import kinds_of
from tests.patience import HANG_SECONDS
from tests.unit.convert.distributed.problem import batch, converted

ROOT = Path(__file__).parents[4]


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_sharded_by_blocks(tmp_path: Path) -> None:
    one, two = _ranks(tmp_path)
    model = converted()
    assert one["sharded"] and one["kinds"] == kinds_of(model)
    assert all(torch.equal(x, two["weights"][name]) for name, x in one["weights"].items())
    # Forward factors are constants, so the mean of the halves' losses is the whole batch's.
    assert sum(r["losses"][0] for r in (one, two)) / 2 == pytest.approx(model(**batch())[0].item(), rel=1e-5)
    assert max(r["losses"][-1] for r in (one, two)) < 0.9 * one["losses"][0]
    assert all(torch.equal(x, two["again"][name]) for name, x in one["again"].items())
    # 64 x 32 values and more: five standard deviations of their own standard deviation
    assert abs(one["again"]["blocks.0.up.weight"].std().item() - 1) < 5 / (2 * 128 * 32) ** 0.5


def _ranks(folder: Path) -> list[dict[str, object]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    script = str(Path(__file__).with_name("worker.py"))
    ranks = [
        subprocess.Popen([sys.executable, script, str(folder)], env=environment | {"RANK": str(rank)}, cwd=ROOT)
        for rank in range(2)
    ]
    codes = [rank.wait(timeout=HANG_SECONDS) for rank in ranks]
    assert codes == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]
