"""Training that was saved and resumed is training that went on, bit for bit, at every level."""

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import plimsoll as pl
from plimsoll.precision import LEVELS, prepare
from plimsoll.scaling.dynamic import DynamicScaler
from tests.support.cases import each
from tests.support.precision.training import HERE, adamw, batches, contents, loss_of, net, overflowing, run


def prepared(name: Any, seed: int = 0, **kwargs: Any) -> tuple[Any, nn.Module]:
    """A loop with all that has a state: dropout, batch norm, a scheduler, a scaler that moves."""
    model = net(0.3, seed)
    optimizer = adamw(model, "fp16-pure")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    level = LEVELS.get(name) if isinstance(name, str) else None
    scaler = DynamicScaler("cpu", growth_interval=3) if level is not None and level.scaled else None
    return prepare(model, optimizer, name, schedulers=[scheduler], clip_norm=1.0, scaler=scaler, **kwargs), model


def everything(loop: Any, model: nn.Module) -> Any:
    state = loop.state_dict()
    return contents({key: state[key] for key in state if key != "random"})


@pytest.mark.parametrize("name", HERE)
def test_resumed_equals_uninterrupted(name: str, tmp_path: Path) -> None:
    data = batches(12)
    loop, model = prepared(name)
    torch.manual_seed(7)
    run(loop, data[:5])
    torch.save(loop.state_dict(), tmp_path / "state.pt")
    losses = run(loop, data[5:])
    random.seed(99)
    np.random.seed(99)  # noqa: NPY002
    torch.manual_seed(99)
    other, twin = prepared(name, seed=1)
    run(other, batches(3, seed=5))  # it has a history of its own
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.step_index == 5
    assert run(other, data[5:]) == losses
    assert everything(other, twin) == everything(loop, model)


@pytest.mark.parametrize("name", ["amp-fp16", "fp16-master"])
def test_resumed_in_the_middle_of_a_burst(name: str) -> None:
    data = batches(30)

    def burst(loop: Any, model: nn.Module, steps: range) -> list[Any]:
        found = []
        for i in steps:
            with loop.forward():
                loss = overflowing(model, data[i], 1e9 if 5 <= i < 12 else 1.0)
            found.append(loop.step(loss))
        return found

    loop, model = prepared(name)
    burst(loop, model, range(9))
    state = copy.deepcopy(loop.state_dict())
    expected = burst(loop, model, range(9, 30))
    other, twin = prepared(name, seed=1)
    other.load_state_dict(state)
    assert repr(burst(other, twin, range(9, 30))) == repr(expected)  # the norm may be NaN
    assert not expected[0].stepped and expected[-1].stepped
    assert everything(other, twin) == everything(loop, model)


@each("saved", ["fp32", "fp16-master", "bf16-master"])
@each("loaded", ["fp32", "amp-bf16", "fp16-master", "bf16-master"])
def test_a_state_of_another_level_is_converted_exactly(saved: str, loaded: str) -> None:
    loop, model = prepared(saved)
    run(loop, batches(6))
    state = copy.deepcopy(loop.state_dict())
    other, twin = prepared(loaded, seed=1)
    other.load_state_dict(state)
    assert other.precision == loaded and other.step_index == 6
    loop.close()
    other.close()
    assert all(a.equal(b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    first, second = (x._given[0].state_dict()["state"] for x in (loop, other))
    assert contents(first) == contents(second)


def test_random_generators_can_be_left_out() -> None:
    loop, _ = prepared("fp32")
    state = loop.state_dict(random=False)
    assert state["random"] is None
    before = torch.get_rng_state()
    torch.rand(3)
    after = torch.get_rng_state()
    loop.load_state_dict(state)
    assert torch.get_rng_state().equal(after) and not after.equal(before)


def test_all_generators_come_back() -> None:
    loop, _ = prepared("fp32")
    random.gauss(0, 1)
    np.random.randn()  # noqa: NPY002
    state = copy.deepcopy(loop.state_dict())
    expected = (random.random(), random.gauss(0, 1), np.random.randn(), np.random.rand(), torch.rand(2).tolist())  # noqa: NPY002
    loop.load_state_dict(state)
    assert (
        random.random(),
        random.gauss(0, 1),
        np.random.randn(),  # noqa: NPY002
        np.random.rand(),  # noqa: NPY002
        torch.rand(2).tolist(),
    ) == expected


def test_states_that_are_none_are_refused_and_change_nothing() -> None:
    loop, model = prepared("bf16-master")
    run(loop, batches(2))
    before, state = everything(loop, model), loop.state_dict()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({**state, "schema": 2}, "expected a loop's state of schema 1; got schema 2, written by a newer"),
        (None, "got NoneType"),  # type: ignore[list-item]
        ({"model": state["model"]}, "got a mapping without schema, precision, step, optimizers"),
        ({**state, "schedulers": []}, "a loop with 1 schedulers; got one with 0"),
        ({**state, "optimizers": [1, 2]}, "a loop with 1 optimizers; got one with 2"),
    ]
    for given, message in wrong:
        with pytest.raises(pl.errors.StateError, match=message):
            loop.load_state_dict(given)
    assert everything(loop, model) == before


def test_generators_of_another_rank_are_refused() -> None:
    loop, _ = prepared("fp32")
    state = loop.state_dict()
    state["random"]["rank"] = 3
    with pytest.raises(pl.ArgumentError, match="random generators of rank 0; got those of rank 3"):
        loop.load_state_dict(state)


def test_between_micro_batches_there_is_no_state() -> None:
    loop, model = prepared("fp32", accumulate=3)
    run(loop, batches(2))
    with pytest.raises(pl.errors.StateError, match="got one after 2 of 3 micro-batches"):
        loop.state_dict()
    loop.zero_grad()
    assert loop.state_dict()["step"] == 0
    assert loss_of(model, batches(1)[0]).isfinite()
