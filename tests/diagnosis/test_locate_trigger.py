"""`locate` by itself when a watched training breaks: once a reason, in the run, and without a trace in the training."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import locate_on_trigger
from plimsoll.errors import ArgumentError
from plimsoll.runs import Event, Run


class Breaking(nn.Module):
    """Takes the logarithm of the data after a layer: of zero, where a row is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4, bias=False), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return (self.drop(self.layer(x)).abs() + x.abs().sum()).log()


def train(
    folder: Path, *, locates: bool, bad: tuple[int, ...] = (3, 5), scaler: Any = None
) -> tuple[list[Tensor], list[Event], list[Any]]:
    """Some steps, of which some break."""
    torch.manual_seed(0)
    model = Breaking()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses: list[Tensor] = []
    faults: list[Any] = []
    with pl.watch(model, optimizer, run=folder, every=2, scaler=scaler) as watch:
        loss_of: Callable[[Tensor], Tensor] = lambda x: model(x).mean()  # noqa: E731
        step_loss = locate_on_trigger(watch, loss_of) if locates else loss_of
        for index in range(8):
            optimizer.zero_grad()
            loss = step_loss(torch.randn(2, 4) * (index not in bad))
            losses.append(loss.detach())
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        losses.extend(p.detach().clone() for p in model.parameters())
        if locates:
            faults = step_loss.faults
    return losses, [event for event in Run(folder).events() if event.kind in {"fault", "trigger"}], faults


def test_the_first_broken_step_is_located(tmp_path: Path):
    _, events, faults = train(tmp_path / "a", locates=True)
    found = [event for event in events if event.kind == "fault"]
    assert [(event.step, event.details["reason"]) for event in found] == [(3, "loss")]
    assert found[0].details["operation"] == "aten.log"
    assert found[0].details["source"]["text"].endswith(".log()")
    assert found[0].message == faults[0].sentence
    assert found[0].details["inputs"] == faults[0].to_dict()["inputs"]
    assert {event.step for event in events if event.details["reason"] == "loss" and event.kind == "trigger"} == {3}


def test_training_goes_on_to_the_bit(tmp_path: Path):
    located, events, _ = train(tmp_path / "a", locates=True, bad=(7,))
    plain, _, _ = train(tmp_path / "b", locates=False, bad=(7,))
    assert any(event.kind == "fault" for event in events)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(located, plain, strict=True))


def test_a_skipped_step_is_located_with_its_scale(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)

    def loss_of(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return model(x).float().sum()

    with pl.watch(model, optimizer, run=tmp_path / "run") as watch:
        step_loss = locate_on_trigger(watch, loss_of)
        for index in range(3):
            optimizer.zero_grad()
            scaler.scale(step_loss(torch.full((2, 4), 100.0 if index else 1.0))).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**12
    found = [event for event in Run(tmp_path / "run").events() if event.kind == "fault"]
    assert [(event.step, event.details["reason"], event.details["operation"]) for event in found] == [
        (1, "nonfinite", "aten.mm")
    ]
    assert (found[0].details["phase"], found[0].details["scale"]) == ("backward", 2.0**14)


def test_gradients_are_located_again_after_a_search_for_the_scale(tmp_path: Path):
    """The first skipped steps are the scaler's; a root of zero, whose loss is finite, comes later."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def loss_of(x: Tensor, rooted: bool) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            y = model(x).float()
        return (y * 0).sqrt().sum() if rooted else y.sum()

    with pl.watch(model, optimizer, run=tmp_path / "run") as watch:
        step_loss = locate_on_trigger(watch, loss_of)
        for index in range(30):
            optimizer.zero_grad()
            scaler.scale(step_loss(torch.full((2, 4), 4.0), index >= 8 and index % 2 == 0)).backward()
            scaler.step(optimizer)
            scaler.update()
    found = [
        (event.step, event.details["operation"]) for event in Run(tmp_path / "run").events() if event.kind == "fault"
    ]
    assert [step for step, _ in found] == [0, 8, 10, 12] and found[0][1] != found[1][1]
    assert "Sqrt" in found[1][1] or "div" in found[1][1]


def test_with_a_loop(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = pl.scaling.DynamicScaler("cpu", init_scale=2.0**14)
    with pl.prepare(model, optimizer, precision="amp-fp16", scaler=scaler) as loop:
        watch = pl.watch(model, optimizer, run=tmp_path / "run", scaler=scaler)
        step_loss = locate_on_trigger(watch, lambda x: model(x).float().sum(), around=loop.forward)
        outcomes = [loop.step(lambda scale=scale: step_loss(torch.full((2, 4), scale))) for scale in (1.0, 100.0, 1.0)]
        assert [outcome.stepped for outcome in outcomes] == [True, False, True]
        watch.close()
    fault = step_loss.faults[0]
    assert (fault.operation, fault.phase, fault.scale) == ("aten._to_copy", "backward", 2.0**14)


def test_a_failure_in_it_never_stops_training(tmp_path: Path):
    model = Breaking()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    calls: list[int] = []

    def loss_of(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise LookupError("only once")
        return model(x).mean()

    with pl.watch(model, optimizer, run=tmp_path / "run") as watch:
        step_loss = locate_on_trigger(watch, loss_of)
        step_loss(torch.zeros(2, 4)).backward()
        with pytest.warns(RuntimeWarning, match="failed and was left out .LookupError: only once."):
            optimizer.step()
    assert len(calls) == 2
    assert [event.kind for event in Run(tmp_path / "run").events()].count("failure") == 1


def test_it_ends_with_its_watch(tmp_path: Path):
    model = nn.Linear(4, 2)
    watch = pl.watch(model, run=tmp_path / "run")
    step_loss = locate_on_trigger(watch, lambda x: model(x).sum())
    watch.close()
    assert step_loss(torch.ones(1, 4)).isfinite()
    with pytest.raises(ArgumentError, match="an open watch of a single process; got one that is closed"):
        locate_on_trigger(watch, lambda: torch.zeros(1))


def test_bad_function(tmp_path: Path):
    model = nn.Linear(4, 2)
    with pl.watch(model, run=tmp_path / "run") as watch, pytest.raises(ArgumentError, match="the loss; got int"):
        locate_on_trigger(watch, 3)
    with pl.watch(model, run=tmp_path / "other") as watch:
        with pytest.raises(ArgumentError, match=r"^locate_on_trigger: expected flush_share .* got flush_share=5"):
            locate_on_trigger(watch, model, flush_share=5)
        with pytest.raises(ArgumentError, match="expected around as a function that returns a context; got bool"):
            locate_on_trigger(watch, model, around=True)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="expected a watch; got Linear"):
        locate_on_trigger(model, lambda: model)  # type: ignore[arg-type]


class DividedByZero(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] / 0


def test_gradients_of_the_optimizer_that_steps_last_are_looked_at_too(tmp_path: Path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    first, last = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (1, 0))
    with pl.watch(model, [first, last], run=tmp_path / "run") as watch:
        step_loss = locate_on_trigger(watch, lambda x: model[1](DividedByZero.apply(model[0](x))).sum())
        step_loss(torch.ones(1, 2)).backward()
        first.step()
        last.step()
        assert [fault.operation for fault in step_loss.faults] == ["aten.div"]


def test_the_recorder_says_how_to_locate(tmp_path: Path):
    _, events, _ = train(tmp_path / "a", locates=False)
    triggers = [event for event in events if event.kind == "trigger"]
    assert {event.details["reason"] for event in triggers} >= {"loss", "nonfinite"}
    assert all("plimsoll.locate(closure)" in event.details["advice"] for event in triggers)


def test_the_model_is_collected_with_it(tmp_path: Path):
    model = nn.Linear(4, 2)
    alive = weakref.ref(model)
    watch = pl.watch(model, run=tmp_path / "run")
    step_loss = locate_on_trigger(watch, lambda x, model=model: model(x).sum())
    del model, step_loss
    gc.collect()
    assert alive() is None
    assert watch.closed


def test_each_micro_batch_is_looked_at(tmp_path: Path):
    torch.manual_seed(0)
    model = Breaking()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.watch(model, optimizer, run=tmp_path / "run") as watch:
        step_loss = locate_on_trigger(watch, lambda x: model(x).mean())
        for x in (torch.ones(2, 4), torch.ones(2, 4) * float("nan"), torch.ones(2, 4)):
            step_loss(x).backward()
        optimizer.step()
    (fault,) = step_loss.faults
    assert fault.phase == "before"
    assert fault.sentence.startswith("the input inputs['x'] held 8 NaN before any operation")


def test_gradients_that_overflow_only_when_added_up(tmp_path: Path):
    model = nn.Linear(2, 1, bias=False).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.watch(model, optimizer, run=tmp_path / "run") as watch:
        step_loss = locate_on_trigger(watch, lambda x: model(x).float().sum())
        for _ in range(2):
            step_loss(torch.full((1, 2), 4e4, dtype=torch.float16)).backward()
        optimizer.step()
    (fault,) = step_loss.faults
    assert (fault.phase, fault.reached, fault.kind) == ("backward", "the gradient of weight", "inf")
    assert fault.expected == 8e4
    assert fault.module == "model"


def test_the_repetition_draws_the_same_numbers(tmp_path: Path):
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    drawn: list[float] = []

    def loss_of() -> Tensor:
        x = torch.rand(4)
        drawn.append(x.sum().item())
        return (model(x) * 0 + (x.sum() > 2.5) * float("inf")).mean()

    with pl.watch(model, optimizer, run=tmp_path / "run") as watch:
        step_loss = locate_on_trigger(watch, loss_of)
        while not step_loss.faults and len(drawn) < 50:
            optimizer.zero_grad()
            step_loss().backward()
            optimizer.step()
    assert drawn[-1] == drawn[-2]
