"""A converted model under FSDP2, sharded by its blocks as the original would be, on two processes."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from plimsoll.unit.optim.parameter_kinds import kinds_of
from tests.support import processes
from tests.support.unit.sharded_conversion.problem import batch, converted


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_sharded_by_blocks(tmp_path: Path) -> None:
    processes.ranks(processes.SUPPORT / "unit" / "sharded_conversion" / "worker.py", [(tmp_path,)] * 2)
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    model = converted()
    assert one["sharded"] and one["kinds"] == kinds_of(model)
    assert all(torch.equal(x, two["weights"][name]) for name, x in one["weights"].items())
    # Forward factors are constants, so the mean of the halves' losses is the whole batch's.
    assert sum(r["losses"][0] for r in (one, two)) / 2 == pytest.approx(model(**batch())[0].item(), rel=1e-5)
    assert max(r["losses"][-1] for r in (one, two)) < 0.9 * one["losses"][0]
    assert all(torch.equal(x, two["again"][name]) for name, x in one["again"].items())
    # 64 x 32 values and more: five standard deviations of their own standard deviation
    assert abs(one["again"]["blocks.0.up.weight"].std().item() - 1) < 5 / (2 * 128 * 32) ** 0.5
