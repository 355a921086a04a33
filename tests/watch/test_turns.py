"""Optimizers that take turns are each sampled at their own steps."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.runs import Run
from tests.support.watch.recording import batches, only_run

PARTS = ("first", "second")


class Both(nn.Module):
    """Two networks in one module, trained in turns on losses of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def loss(self, part: str, x: Tensor) -> Tensor:
        return self.second(self.first(x) if part == "first" else self.first(x).detach()).square().mean()


def trained(run: Path | None, order: list[str], **settings: object) -> tuple[dict[str, list[float]], nn.Module]:
    model = Both()
    optimizers = {part: torch.optim.Adam(getattr(model, part).parameters(), lr=0.01) for part in PARTS}
    w = None if run is None else pl.watch(model, list(optimizers.values()), run=run, **settings)
    printed: dict[str, list[float]] = {part: [] for part in PARTS}
    for part, x in zip(order, batches(len(order), 3, 4), strict=True):
        optimizers[part].zero_grad()
        loss = model.loss(part, x)
        loss.backward()
        optimizers[part].step()
        printed[part].append(loss.item())
    if w is not None:
        w.close()
    return printed, model


def sampled(run: Run, collection: str, name: str) -> list[int]:
    return [step for step, *_ in run.spectra(collection, name)]


def test_both_of_two_that_alternate_are_sampled(tmp_path: Path) -> None:
    order = [*PARTS] * 30
    bare, watched = trained(None, order), trained(tmp_path / "run", order, every=10)
    assert bare[0] == watched[0]
    assert all(torch.equal(a, b) for a, b in zip(bare[1].parameters(), watched[1].parameters(), strict=True))
    run = only_run(tmp_path / "run")
    for collection in ("gradients", "updates", "weights"):
        own = [step for step in sampled(run, collection, "second.weight") if step % 2]
        assert own == [1, 3, 23, 43], collection
    assert [step for step in sampled(run, "gradients", "first.weight") if step % 2 == 0] == [0, 20, 40]
    assert sampled(run, "optimizer", "second.weight:exp_avg") == [1, 3, 23, 43]
    assert [step for step in sampled(run, "activations", "second:input") if step % 2] == [3, 23, 43]
    assert run.scalars("loss")[1].tolist() == bare[0]["first"]
    assert run.scalars("loss:second")[1].tolist() == bare[0]["second"]
    assert run.scalars("loss:second")[0].tolist() == list(range(1, 60, 2))


@pytest.mark.parametrize(
    "pattern", [["first"] * 4 + ["second"], ["first"] * 9 + ["second"], ["second"] + ["first"] * 2]
)
def test_one_that_steps_more_seldom_is_sampled_too(pattern: list[str], tmp_path: Path) -> None:
    order = pattern * (240 // len(pattern))
    trained(tmp_path / "run", order, every=10)
    run = only_run(tmp_path / "run")
    for part in PARTS:
        own = [step for step, which in enumerate(order) if which == part]
        found = sampled(run, "updates", f"{part}.weight")
        assert set(found) <= set(own)
        assert len(own) // 10 <= len(found) <= len(own) // 10 + 3, (part, found)


def test_turns_without_an_order_leave_none_out(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    order = [PARTS[int(torch.randint(2, (), generator=generator))] for _ in range(120)]
    trained(tmp_path / "run", order, every=10)
    run = only_run(tmp_path / "run")
    for part in PARTS:
        own = [step for step, which in enumerate(order) if which == part]
        places = [own.index(step) for step in sampled(run, "gradients", f"{part}.weight") if step in own]
        gaps = [b - a for a, b in zip([0, *places], [*places, len(own) - 1], strict=True)]
        assert max(gaps) <= 11, (part, places)


def test_what_steps_together_keeps_the_schedule(tmp_path: Path) -> None:
    model = Both()
    optimizers = [torch.optim.SGD(getattr(model, part).parameters(), lr=0.1) for part in PARTS]
    with pl.watch(model, optimizers, run=tmp_path / "run", every=5):
        for x in batches(12, 3, 4):
            model.loss("first", x).backward()
            for optimizer in optimizers:
                optimizer.step()
    assert only_run(tmp_path / "run").steps == [0, 5, 10]
