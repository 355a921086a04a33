"""A schedule of precisions: changes come at their step, and lose nothing that both levels keep."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import plimsoll as pl
from plimsoll.precision import prepare
from tests.support.cases import each
from tests.support.precision.training import HERE, adamw, batches, contents, net, run

FULL = torch.float32
EXACT = ["fp32", "amp-fp16", "amp-bf16", "fp16-master", "bf16-master"]


def test_the_levels_change_at_their_steps() -> None:
    model = net()
    loop = prepare(model, adamw(model), [(0, "bf16-master"), (3, "amp-fp16"), (5, "fp32")])
    found = []
    for batch in batches(7):
        found.append((loop.step_index, loop.precision, model.head.weight.dtype, loop.scaler is not None))
        run(loop, [batch])
    bf16 = torch.bfloat16
    assert found == [
        *((i, "bf16-master", bf16, False) for i in range(3)),
        *((i, "amp-fp16", FULL, True) for i in (3, 4)),
        *((i, "fp32", FULL, False) for i in (5, 6)),
    ]


@each(("one", "other"), list(itertools.permutations(EXACT, 2)))
def test_weights_and_state_pass_exactly(one: str, other: str) -> None:
    """Going to the other level and back, with no step there, changes nothing that training depends on."""
    model = net()
    optimizer = adamw(model)
    loop = prepare(model, optimizer, [(0, one), (4, other)])
    run(loop, batches(3))
    twin_model = net()
    twin_optimizer = adamw(twin_model)
    twin = prepare(twin_model, twin_optimizer, one)
    run(twin, batches(3))
    loop._follow(loop._schedule.at(4))
    assert loop.precision == other
    for item in (loop, twin):
        item.close()
    assert contents(model.state_dict()) == contents(twin_model.state_dict())
    assert contents(optimizer.state_dict()) == contents(twin_optimizer.state_dict())


@each("name", HERE)
def test_training_goes_on_through_every_level(name: str) -> None:
    model = net()
    loop = prepare(model, adamw(model, "fp16-pure"), [(0, "amp-bf16"), (10, name), (30, "fp32")])
    losses = run(loop, batches(40))
    assert loop.precision == "fp32" and {p.dtype for p in model.parameters()} == {FULL}
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert all(p.isfinite().all() for p in model.parameters())


def test_the_scaler_waits_while_nothing_is_scaled() -> None:
    model = net()
    loop = prepare(model, adamw(model), [(0, "amp-fp16"), (3, "amp-bf16"), (5, "fp16-master")])
    run(loop, batches(3))
    assert loop.scaler is None
    kept = loop.state_dict()["scaler"]["scale"]
    run(loop, batches(2))
    assert loop.scaler.get_scale() == kept < 65536.0


@each("stop", [2, 3, 4, 6])
def test_resumed_equals_uninterrupted_across_changes(stop: int) -> None:
    schedule = [(0, "bf16-master"), (3, "fp16-master"), (6, "bf16-kahan")]
    data = batches(9)

    def begin(seed: int) -> tuple[Any, nn.Module]:
        model = net(0.2, seed)
        return prepare(model, adamw(model), schedule), model

    loop, model = begin(0)
    run(loop, data[:stop])
    state = copy.deepcopy(loop.state_dict())
    losses = run(loop, data[stop:])
    other, twin = begin(1)
    other.load_state_dict(state)
    assert other.precision == loop._schedule.at(stop).level.name
    assert run(other, data[stop:]) == losses
    assert contents(model.state_dict()) == contents(twin.state_dict())
    assert contents(other.optimizer.state_dict()) == contents(loop.optimizer.state_dict())


def test_the_users_scheduler_reaches_the_optimizer_at_every_level() -> None:
    model = net()
    optimizer = adamw(model)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    loop = prepare(model, optimizer, [(0, "bf16-master"), (2, "amp-bf16"), (4, "bf16-stochastic")], schedulers=[rates])
    found = []
    for batch in batches(6):
        found.append(loop.optimizer.param_groups[0]["lr"])
        run(loop, [batch])
    assert found == [1e-2 * 0.5**i for i in range(6)]


@each("given", [[], [(1, "fp32")], [(0, "fp32"), (0, "tf32")], [(0, "fp32"), (5, "tf32"), (3, "fp32")]])
def test_steps_must_rise_from_0(given: Any) -> None:
    model = net()
    with pytest.raises(pl.ArgumentError, match="expected a (schedule|level)"):
        prepare(model, adamw(model), given)


@each("given", [[(0.0, "fp32")], [("fp32", 0)], ["fp32"], [(0, "fp32", 1)], [(True, "fp32")], {0: "fp32"}])
def test_what_is_no_schedule_is_refused(given: Any) -> None:
    model = net()
    with pytest.raises(pl.ArgumentError, match="a plan file or a schedule of"):
        prepare(model, adamw(model), given)


def test_a_level_that_comes_later_is_checked_now() -> None:
    model = net()
    with pytest.raises(pl.ArgumentError, match="eps=1e-08, which is 0 in FP16"):
        prepare(model, adamw(model), [(0, "fp32"), (1000, "fp16-pure")])
    with pytest.raises(pl.ArgumentError, match="got precision='bf61-master'"):
        prepare(model, adamw(model), [(0, "fp32"), (1000, "bf61-master")])
    with pytest.raises(pl.ArgumentError, match="expected a level or a plan file at each step; got 3"):
        prepare(model, adamw(model), [(0, "fp32"), (1000, 3)])
    with pytest.raises(pl.ArgumentError, match="got 'haed', which matches none"):
        prepare(model, adamw(model), "fp32", policy=pl.precision.Policy().with_module("haed", "fp32"))
    assert not model._forward_pre_hooks
