"""A model that changes while it is watched is recorded as it is: parameters and modules replaced, added, taken away."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.runs import Event, Run
from tests.support.watch.recording import batches, only_run, same, train

CHANGED_AT = 3
Change = Callable[[nn.Sequential, torch.optim.Optimizer], torch.optim.Optimizer]


def model_of_four() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def parameter(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A parameter in the middle of its group."""
    group = optimizer.param_groups[0]["params"]
    place = next(index for index, p in enumerate(group) if p is model[1].weight)
    model[1].weight = group[place] = nn.Parameter(torch.full((8, 8), 0.01))
    return optimizer


def module(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model[1] = nn.Linear(8, 8)
    optimizer.param_groups[0]["params"][2:4] = model[1].parameters()
    return optimizer


def added(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model.add_module("extra", nn.Linear(8, 8))
    optimizer.add_param_group({"params": list(model.extra.parameters())})
    return optimizer


def new_optimizer(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model[1] = nn.Linear(8, 8)
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Adapted(nn.Module):
    """A low-rank addition to a layer that is frozen."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.up = base.requires_grad_(False), nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model[1] = Adapted(model[1])
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def changed(run: Run) -> list[Event]:
    return [event for event in run.events() if event.kind == "model changed"]


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("change", [parameter, module, added, new_optimizer, adapted])
def test_what_is_new_is_recorded_and_said(change: Change, given: bool, tmp_path: Path) -> None:
    model, twin = model_of_four(), model_of_four()
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    data = batches(2 * CHANGED_AT, 4, 8)
    weights: dict[str, Tensor] = {}
    with pl.watch(model, optimizer if given else None, run=tmp_path / "run", every=1):
        printed = train(model, optimizer, data[:CHANGED_AT])
        torch.manual_seed(1)
        optimizer = change(model, optimizer)
        printed += train(model, optimizer, data[CHANGED_AT:-1])
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        printed += train(model, optimizer, data[-1:])
    bare = train(twin, other, data[:CHANGED_AT])
    torch.manual_seed(1)
    other = change(twin, other)
    assert printed == bare + train(twin, other, data[CHANGED_AT:])
    run, last = only_run(tmp_path / "run"), len(data) - 1
    assert run.steps == list(range(len(data))) and run.scalars("loss")[1].tolist() == printed
    for name, p in model.named_parameters():
        assert same(run.spectrum("weights", name, last), weights[name])
        if p.requires_grad:
            assert p.grad is not None and same(run.spectrum("gradients", name, last), p.grad)
            assert same(run.spectrum("updates", name, last), p.detach() - weights[name])
    for name in (name for name, m in model.named_modules() if name and isinstance(m, nn.Linear)):
        assert run.series("activations", f"{name}:output", "count")[0].tolist()[-1] == last
    (event,) = changed(run)
    assert event.step == CHANGED_AT
    assert not [
        event for event in run.events() if event.kind in ("failure", "wiring") and "as usual" not in event.message
    ]


def test_a_step_that_is_not_sampled_looks_for_nothing_and_the_next_that_is_finds_it(tmp_path: Path) -> None:
    model = model_of_four()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=4):
        train(model, optimizer, batches(2, 4, 8))
        parameter(model, optimizer)
        train(model, optimizer, batches(3, 4, 8))
    (event,) = changed(only_run(tmp_path / "run"))
    assert event.step == 4 and event.details == {"parameters replaced": ["1.weight"]}


def test_what_is_excluded_stays_so(tmp_path: Path) -> None:
    model = model_of_four()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1, exclude=["[1-3]*"]):
        train(model, optimizer, batches(1, 4, 8))
        model[1] = nn.Linear(8, 8)
        added(model, optimizer)
        train(model, optimizer, batches(1, 4, 8))
    run = only_run(tmp_path / "run")
    assert {name.partition(".")[0] for name in run.tensors["weights"]} == {"0", "extra"}
    assert {name.partition(":")[0] for name in run.tensors["activations"]} == {"model", "0", "extra"}


def test_what_was_replaced_is_let_go(tmp_path: Path) -> None:
    model = model_of_four()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        train(model, optimizer, batches(1, 4, 8))
        old = weakref.ref(model[1]), weakref.ref(model[1].weight)
        module(model, optimizer)
        train(model, optimizer, batches(2, 4, 8))
        gc.collect()
        assert [ref() for ref in old] == [None, None]


def test_tensors_lent_for_a_call_are_no_change(tmp_path: Path) -> None:
    model = model_of_four()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        for x in batches(3, 4, 8):
            fast = {name: p * 1.0 for name, p in model.named_parameters()}
            optimizer.zero_grad()
            torch.func.functional_call(model, fast, (x,)).square().mean().backward()
            optimizer.step()
    run = only_run(tmp_path / "run")
    assert not changed(run) and run.series("updates", "1.weight", "count")[0].tolist() == [0, 1, 2]
