"""Trainings whose wiring changes on the way: frozen, replaced and cast weights, and states that are lost."""

import functools
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import Finding, diagnose
from tests.support.cases import each
from tests.support.diagnosis.trainings import adamw, seeded_mlp

# -- frozen weights that an optimizer steps on


def frozen_at(path: Path, *, to_none: bool, decay: float = 0.1, from_step: int = 6) -> list[Finding]:
    """What is said of a training whose first layers are frozen in the middle."""
    model = seeded_mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=decay, betas=(0.0, 0.999))
    with pl.watch(model, optimizer, run=path, every=2, quiet=True):
        for step in range(24):
            if step == from_step:
                for p in (*model[0].parameters(), *model[2].parameters()):  # type: ignore[index]
                    p.requires_grad_(False)
            optimizer.zero_grad(set_to_none=to_none)
            nn.functional.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,))).backward()
            optimizer.step()
    return [f for f in diagnose(path) if f.severity != "info"]


def test_frozen_weights_that_are_stepped_on_are_named_alone(tmp_path: Path) -> None:
    (found,) = frozen_at(tmp_path / "zeros", to_none=False)
    assert (found.rule, found.since_step) == ("gradients-mishandled", 6)
    assert "0.weight, 0.bias and 2 more are frozen" in found.meaning and "set_to_none=True" in found.advice
    for name, more in (("none", {"to_none": True}), ("nothing moves", {"to_none": False, "decay": 0.0})):
        assert frozen_at(tmp_path / name, **more) == [], name
    assert frozen_at(tmp_path / "from the start", to_none=False, from_step=0) == []


# -- casts that autocast keeps


def under_autocast(
    path: Path, *, whole: bool | None, cache: bool = True, train_it: bool = True, accumulate: int = 1
) -> set[str]:
    """The weights of which old casts are named, in a training with autocast around each forward, and around it all."""
    model, autocast = seeded_mlp(), functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=cache)
    optimizer = adamw(model)
    around = nullcontext() if whole is None else autocast(enabled=whole)
    with pl.watch(model, optimizer, run=path), around:
        for _ in range(6):
            for _ in range(accumulate):
                x = torch.randn(16, 8)
                with autocast():
                    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(dim=1))
                loss.backward()
            if train_it:
                optimizer.step()
            optimizer.zero_grad()
    return {name for finding in diagnose(path, rules=["casts-stale"]) for name in finding.where}


def test_casts_that_outlast_a_step_are_named(tmp_path: Path) -> None:
    weights = {name for name, _ in seeded_mlp().named_parameters()}
    assert under_autocast(tmp_path / "whole", whole=True) == weights
    assert under_autocast(tmp_path / "micro", whole=True, accumulate=2) == weights
    assert under_autocast(tmp_path / "disabled", whole=False) == weights  # it counts as outermost all the same


@each(
    "case",
    [
        {"whole": None},
        {"whole": None, "accumulate": 3},
        {"whole": True, "cache": False},
        {"whole": True, "train_it": False},  # no weight is written
    ],
)
def test_casts_of_the_present_weights_are_not(case: dict[str, bool], tmp_path: Path) -> None:
    assert under_autocast(Path(tempfile.mkdtemp(dir=tmp_path)), **case) == set()


def test_forwards_on_threads_of_their_own_are_not(tmp_path: Path) -> None:
    model, autocast = seeded_mlp(), functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    optimizer = adamw(model)

    def loss() -> Tensor:
        x = torch.randn(16, 8)
        with autocast():
            return nn.functional.cross_entropy(model(x), x[:, :4].argmax(dim=1))

    with pl.watch(model, optimizer, run=tmp_path / "run"):
        for _ in range(6):
            with ThreadPoolExecutor(1) as threads:  # whose operations are counted from 0
                threads.submit(loss).result().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert diagnose(tmp_path / "run", rules=["casts-stale"]) == []


# -- a state that is lost


def with_states(
    path: Path, lost_every: int, *, steps: int = 40, made_again: bool = False, **arguments: Any
) -> list[Finding]:
    """The findings on a training whose optimizer's state is cleared, or whose optimizer is made again."""
    model = seeded_mlp()
    optimizer = adamw(model, **arguments)
    with pl.watch(model, optimizer, run=path, every=4):
        for step in range(steps):
            if step and step % lost_every == 0:
                if made_again:
                    optimizer = adamw(model, **arguments)
                else:
                    optimizer.state.clear()
            x = torch.randn(16, 8)
            nn.functional.cross_entropy(model(x), x[:, :4].argmax(dim=1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(path, rules=["state-cleared"])


@each("made_again", [False, True])
def test_a_state_that_is_lost_every_few_steps_is_named(made_again: bool, tmp_path: Path) -> None:
    (finding,) = with_states(Path(tempfile.mkdtemp(dir=tmp_path)), 5, made_again=made_again)
    assert (finding.severity, finding.since_step) == ("warning", 15)
    assert finding.evidence == {"optimizer": "AdamW", "steps": 5}


@each(
    "case",
    [
        {"lost_every": 15},  # twice
        {"lost_every": 99},
        {"lost_every": 12, "betas": (0.8, 0.9), "steps": 64},  # longer than its means go back
    ],
)
def test_a_state_that_lasts_is_not(case: dict[str, Any], tmp_path: Path) -> None:
    assert with_states(Path(tempfile.mkdtemp(dir=tmp_path)), **case) == []


def test_an_optimizer_without_a_state_is_not(tmp_path: Path) -> None:
    class Signs(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.data.add_(p.grad.sign(), alpha=-1e-3)

    model = seeded_mlp()
    optimizer = Signs(model.parameters(), {"betas": (0.9, 0.999)})
    with pl.watch(model, optimizer, run=tmp_path / "run"):
        for _ in range(20):
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert diagnose(tmp_path / "run", rules=["state-cleared"]) == []


# -- layers that are replaced, or unfrozen, during the training


def with_a_change(path: Path, change: Callable[[nn.Sequential, torch.optim.Optimizer], object]) -> list[Finding]:
    """What is said of parameters without an optimizer, in a training that changes the model at step 20."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with pl.watch(model, optimizer, run=path, every=5):
        for step in range(50):
            if step == 20:
                change(model, optimizer)
            x = torch.randn(16, 8)
            nn.functional.cross_entropy(model(x), x[:, :4].argmax(dim=1)).backward()
            optimizer.step()
            model.zero_grad()
    return diagnose(path, rules=["untrained-parameters"])


def replaced(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[4] = nn.Linear(16, 4)


def replaced_and_added(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    replaced(model, optimizer)
    optimizer.add_param_group({"params": list(model[4].parameters())})


def unfrozen(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].requires_grad_(True)


@pytest.mark.filterwarnings("ignore:.*are in no optimizer.*")
def test_a_layer_that_is_new_and_in_no_optimizer_is_named(tmp_path: Path) -> None:
    (finding,) = with_a_change(tmp_path / "replaced", replaced)
    assert (finding.severity, set(finding.where)) == ("warning", {"4.weight", "4.bias"})
    assert 20 < finding.since_step < 45 and finding.evidence["cause"] == "in no optimizer"
    (finding,) = with_a_change(tmp_path / "unfrozen", unfrozen)
    assert set(finding.where) == {"0.weight", "0.bias"}


def test_a_layer_that_is_new_and_given_to_the_optimizer_is_not(tmp_path: Path) -> None:
    assert with_a_change(tmp_path / "run", replaced_and_added) == []
