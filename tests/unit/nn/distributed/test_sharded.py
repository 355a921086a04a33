"""Two ranks under FSDP2 (gloo): kinds survive the parameters' replacement, and training is one process's."""

import pytest
import torch

from plimsoll.unit.optim import AdamW
from plimsoll.unit.optim.parameter_kinds import kinds_of
from tests.support import processes
from tests.support.unit.sharded_layers.problem import EPS, batch, loss_of, network

WORKER = processes.SUPPORT / "unit" / "sharded_layers" / "worker.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    processes.ranks(WORKER, [(folder,)] * 2)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


def test_kinds_and_factors_survive_sharding(found):
    model = network()
    groups = AdamW(model, lr=0.1).param_groups
    for rank in found:
        assert rank["sharded"]
        assert rank["kinds"] == kinds_of(model)
        assert rank["factors"] == [(g["kind"], g["lr_factor"], len(g["params"])) for g in groups]


def test_two_ranks_train_as_one_process_does(found):
    model = network()
    optimizer = AdamW(model, lr=0.1, weight_decay=0.001, eps=EPS)
    for step in range(3):
        optimizer.zero_grad()
        # Each rank scales for its own rows; so does one process by halves: the mean over ranks is that of the halves.
        for half in range(2):
            (loss_of(model, batch(step)[half::2]) * 0.5).backward()
        optimizer.step()
    start = network().state_dict()
    for name, weight in model.state_dict().items():
        for rank in found:
            torch.testing.assert_close(rank["weights"][name], weight, rtol=1e-3, atol=1e-3)
    moved = max(float((start[name] - weight).abs().max()) for name, weight in model.state_dict().items())
    assert moved > 0.1  # so that the comparison says something
