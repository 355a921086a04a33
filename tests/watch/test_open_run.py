"""A run that is read while it is recorded, and what models inside wrappers are called."""

from pathlib import Path

import pytest
import torch
from torch import nn

import plimsoll as pl
from plimsoll.watch.names import class_of, unwrapped
from tests.support.watch.recording import batches, mlp, train


def test_a_reader_in_the_same_process_sees_what_waits(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1000):
        losses = train(model, optimizer, batches(4, 4, 8))
        run = pl.Run(tmp_path / "run")
        assert run.scalars("loss")[1].tolist() == losses[:3]  # the fourth ends when the next begins
        train(model, optimizer, batches(1, 4, 8))
        run.refresh()
        assert run.scalars("loss")[1].tolist() == losses
        with pytest.raises(pl.NotRecordedError, match=r"The run is open: .* call Run.refresh\(\)"):
            run.scalars("accuracy")


def test_a_model_inside_a_trainer_s_wrapper_has_its_own_name() -> None:
    fabric = pytest.importorskip("lightning.fabric")
    model = nn.Linear(2, 2)
    wrapped = fabric.Fabric(accelerator="cpu", devices=1).setup_module(model)
    assert type(wrapped).__name__ == "_FabricModule"
    assert unwrapped(wrapped) is model and class_of(wrapped) is nn.Linear
