"""What goes along with a watch: what it receives, and that it ends first."""

from pathlib import Path

import torch

import plimsoll as pl
from tests.support.watch.recording import batches, mlp, train


def test_it_knows_the_training(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(torch.compile(model, backend="eager"), optimizer, run=tmp_path / "run") as watch:
        beside = watch.beside
        assert beside.model is model and beside.optimizers == [optimizer]
        assert (beside.path, beside.rank, beside.world, beside.root) == (tmp_path / "run", 0, 1, "model")
        assert list(beside.modules()) == ["model", "0", "1", "2"] and beside.modules()["model"] is model


def test_a_step_that_has_ended_is_not_the_next(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run") as watch:
        beside = watch.beside
        assert (beside.step, beside.next_step) == (0, 0)
        train(model, optimizer, batches(2, 4, 8))
        assert (beside.step, beside.next_step) == (1, 2)  # it may go on, until something begins
        beside.settle()
        assert (beside.step, beside.next_step) == (2, 2)
        beside.settle()
        assert beside.step == 2


def test_what_was_handed_over_and_flushed_can_be_read(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=100) as watch:
        train(model, optimizer, batches(5, 4, 8))
        beside = watch.beside
        beside.settle()
        beside.hand_over()
        beside.record("guard", "something was done", {"action": "none"})
        assert beside.gather(30.0)
        run = pl.Run(tmp_path / "run")
        assert list(run.scalars("loss")[0]) == [0, 1, 2, 3, 4]
        (event,) = [event for event in run.events() if event.kind == "guard"]
        assert (event.step, event.message, event.details) == (5, "something was done", {"action": "none"})


def test_it_hears_first_that_the_watch_ends(tmp_path: Path) -> None:
    watch = pl.watch(model := mlp(), run=tmp_path / "run")
    events: list[str] = []
    take_back = watch.beside.at_close(lambda: events.append("never"))
    watch.beside.at_close(lambda: events.append("open" if model[0]._forward_hooks else "closed"))
    take_back()
    watch.close()
    watch.close()
    assert events == ["open"]
