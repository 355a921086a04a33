"""Checkpoints of optimizers over 16-bit weights: exact, small, and of use to every other kind."""

import io
from typing import Any

import pytest
import torch
from torch import nn

from plimsoll.errors import ArgumentError
from plimsoll.precision import KahanWeights, MasterWeights, StochasticWeights
from tests.support.cases import each
from tests.support.precision.masters import adamw, in_float32, network, same, train, weights

KINDS: dict[str, Any] = {
    "full": lambda inner: MasterWeights(inner, compact=False),
    "compact": lambda inner: MasterWeights(inner, compact=True),
    "Kahan": KahanWeights,
    "stochastic": lambda inner: StochasticWeights(inner, seed=5),
}


def saved(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@each("kind", KINDS)
@each("other_model", [False, True])
def test_a_resumed_training_is_the_same_bit_for_bit(kind: str, other_model: bool) -> None:
    model = network()
    optimizer = KINDS[kind](adamw(model))
    train(model, optimizer, range(5))
    checkpoint, model_checkpoint = saved(optimizer.state_dict()), saved(model.state_dict())
    train(model, optimizer, range(5, 10))

    resumed = network(seed=2)
    if not other_model:
        resumed.load_state_dict(model_checkpoint)
    again = (StochasticWeights if kind == "stochastic" else KINDS[kind])(adamw(resumed))  # the seed comes with it
    again.load_state_dict(checkpoint)
    assert same(weights(resumed), list(model_checkpoint.values()))
    train(resumed, again, range(5, 10))
    assert same(weights(model), weights(resumed))
    assert same(in_float32(optimizer), in_float32(again))
    assert again.steps == 10


def test_a_checkpoint_takes_no_memory_and_with_the_model_four_bytes() -> None:
    model = nn.Linear(256, 256).bfloat16()
    masters = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    entry = masters.state_dict()["masters"][0]
    assert entry["weight"].data_ptr() == model.weight.data_ptr()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": masters.state_dict()}, file)
    assert file.tell() < 4.2 * sum(p.numel() for p in model.parameters())


@each("source", KINDS)
@each("target", KINDS)
def test_every_kind_loads_every_others_checkpoint(source: str, target: str) -> None:
    model = network()
    optimizer = KINDS[source](adamw(model))
    train(model, optimizer, range(3))
    other = network(seed=2)
    loaded = KINDS[target](adamw(other))
    loaded.load_state_dict(saved(optimizer.state_dict()))
    assert same(weights(other), weights(model))
    # What a bfloat16 compensation, or nothing beside the weight, cannot hold is rounded.
    allowed = {"stochastic": 2.0**-8, "Kahan": 0 if source in ("Kahan", "stochastic") else 2.0**-16}.get(target, 0)
    for a, b in zip(in_float32(optimizer), in_float32(loaded), strict=True):
        assert (((a - b) / a).abs() <= allowed).all()
    train(other, loaded, range(3, 5))


def test_masters_of_fp16_load_into_bfloat16() -> None:
    model = network(torch.float16)
    masters = MasterWeights(adamw(model))
    train(model, masters, range(3))
    other = network(torch.bfloat16)
    loaded = MasterWeights(adamw(other))
    loaded.load_state_dict(masters.state_dict())
    assert same(in_float32(masters), in_float32(loaded))


def test_other_weights_are_taken_on_request() -> None:
    for compact in (True, False):
        model = network()
        masters = MasterWeights(adamw(model), compact=compact)
        train(model, masters, range(3))
        model.load_state_dict(network(seed=2).state_dict())
        masters.take_model_weights()
        assert same(in_float32(masters), [p.float() for p in weights(network(seed=2))])


def test_state_dicts_that_do_not_fit_are_refused() -> None:
    model = network()
    masters = MasterWeights(adamw(model))
    with pytest.raises(
        ArgumentError, match=r"load_state_dict: expected a state dict with masters; got the keys state, "
    ):
        masters.load_state_dict(adamw(model).state_dict())
    masters.optimizer.load_state_dict(adamw(network(torch.float32)).state_dict())
    other = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5)).bfloat16()
    before = weights(model)
    with pytest.raises(
        ArgumentError, match=r"got others for the parameters \[2, 3\], the first of shape \(5, 16\) where"
    ):
        masters.load_state_dict(MasterWeights(adamw(other)).state_dict())
    assert same(before, weights(model))


def test_hooks_of_state_dicts() -> None:
    model, events = network(), []
    masters = MasterWeights(adamw(model))
    masters.register_state_dict_pre_hook(lambda _: events.append("before"))
    masters.register_state_dict_post_hook(lambda _, state: state | {"note": 1})
    masters.register_load_state_dict_pre_hook(lambda _, state: {k: v for k, v in state.items() if k != "note"})
    masters.register_load_state_dict_post_hook(lambda _: events.append("loaded"))
    state = masters.state_dict()
    assert state["note"] == 1
    masters.load_state_dict(state)
    assert events == ["before", "loaded"]
