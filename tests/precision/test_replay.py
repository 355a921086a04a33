"""No batch lost: an overflowed batch runs again at a lower scale, and leaves what one run would have left."""

import copy
import functools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.precision import prepare
from plimsoll.precision.training.batch_replay import variables_of
from plimsoll.scaling.dynamic import DynamicScaler
from tests.support.cases import each
from tests.support.precision.training import (
    SCALED,
    adamw,
    batches,
    contents,
    counted,
    loss_of,
    net,
    overflowing,
    run_closures,
)


def scaler_at(scale: float, **kwargs: Any) -> DynamicScaler:
    return DynamicScaler("cpu", init_scale=scale, **kwargs)


def trained(name: str, scale: float, accumulate: int, retries: int) -> tuple[Any, nn.Module, list[Any]]:
    """A run with dropout and batch norm from that scale; the loop, the model, the outcomes of the steps."""
    model = net(0.3)
    loop = prepare(
        model,
        adamw(model, name),
        name,
        scaler=scaler_at(scale),
        accumulate=accumulate,
        max_retries=retries,
        clip_norm=1.0,
    )
    torch.manual_seed(5)
    outcomes = [loop.step(lambda b=b: overflowing(model, b, 64.0)) for b in batches(3 * accumulate)]
    return loop, model, outcomes[accumulate - 1 :: accumulate]


@each("name", SCALED)
@each("accumulate", [1, 3])
def test_a_repeated_batch_is_as_if_it_had_run_once_at_the_lower_scale(name: str, accumulate: int) -> None:
    high, low = 2.0**20, 2.0**4
    loop, model, outcomes = trained(name, high, accumulate, 30)
    assert outcomes[0].retries > 0 and all(o.stepped for o in outcomes)
    settled = outcomes[0].scale
    assert settled == high * 0.5 ** outcomes[0].retries and settled >= low
    generators = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    other, twin, expected = trained(name, settled, accumulate, 30)
    assert expected[0].retries == 0 and expected[1:] == outcomes[1:]
    assert contents(model.state_dict()) == contents(twin.state_dict())
    assert contents(loop.optimizer.state_dict()) == contents(other.optimizer.state_dict())
    assert model.batch_norm.num_batches_tracked == 3 * accumulate
    assert torch.get_rng_state().equal(generators[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == generators[1:]  # noqa: NPY002
    assert loop.loss is not None and other.loss is not None and loop.loss.equal(other.loss)
    assert loop.step_index == 3


def test_every_generator_draws_the_same_again() -> None:
    model = nn.Linear(8, 1)
    drawn: list[tuple[float, float, float]] = []

    def closure() -> Tensor:
        drawn.append((random.random(), float(np.random.rand()), torch.rand(()).item()))  # noqa: NPY002
        return overflowing(model, batches(1)[0], 1e4)

    loop = prepare(model, adamw(model), "fp16-master", max_retries=20)
    outcome = loop.step(closure)
    assert outcome.stepped and outcome.retries == len(drawn) - 1 > 0
    assert len(set(drawn)) == 1
    assert torch.rand(()).item() != drawn[0][2]


def test_the_number_of_repetitions_is_bounded() -> None:
    model = net()
    loop = prepare(model, adamw(model), "fp16-master", scaler=scaler_at(2.0**30), max_retries=2)
    closure, calls = counted(lambda: overflowing(model, batches(1)[0]))
    outcome = loop.step(closure)
    assert (outcome.stepped, outcome.retries, len(calls)) == (False, 2, 3)
    assert loop.scaler.get_scale() == 2.0**27 and loop.step_index == 1
    assert all(p.grad is None for p in model.parameters())


def test_a_loss_that_is_not_finite_is_not_repeated() -> None:
    model = net()
    loop = prepare(model, adamw(model), "fp16-master", max_retries=5)
    closure, calls = counted(lambda: loss_of(model, batches(1)[0]) * math.nan)
    outcome = loop.step(closure)
    assert (outcome.stepped, outcome.retries, len(calls)) == (False, 0, 1)


def test_at_the_scalers_floor_nothing_is_repeated() -> None:
    model = net()
    loop = prepare(model, adamw(model), "fp16-master", scaler=scaler_at(2.0**22, min_scale=2.0**20), max_retries=9)
    closure, calls = counted(lambda: overflowing(model, batches(1)[0], 1e6))
    outcome = loop.step(closure)
    assert (outcome.stepped, outcome.retries, len(calls)) == (False, 2, 3)
    assert loop.scaler.get_scale() == 2.0**20


def test_hysteresis_does_not_make_it_repeat_at_the_same_scale() -> None:
    model = net()
    loop = prepare(model, adamw(model), "fp16-master", scaler=scaler_at(2.0**22, hysteresis=4), max_retries=30)
    outcome = loop.step(lambda: overflowing(model, batches(1)[0], 16.0))
    assert outcome.stepped and outcome.retries > 0
    assert outcome.scale == 2.0**22 * 0.5**outcome.retries


def test_the_stock_scaler_repeats_too() -> None:
    model = net()
    loop = prepare(model, adamw(model), "amp-fp16", scaler=torch.amp.GradScaler("cpu"), max_retries=20)
    outcome = loop.step(lambda: overflowing(model, batches(1)[0]))
    assert outcome.stepped and outcome.retries > 0


def test_several_optimizers_repeat_together() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizers = [adamw(model[0]), adamw(model[1])]
    loop = prepare(model, optimizers, "amp-fp16", max_retries=20)
    outcome = loop.step(lambda: overflowing(model, batches(1)[0], 1e4))
    assert outcome.stepped and outcome.retries > 0
    assert {float(s["step"]) for o in optimizers for s in o.state.values()} == {1.0}


def test_buffers_that_a_forward_replaces_are_put_back() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 1)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + 1
            return self.linear(x)

    model = Counts()
    loop = prepare(model, adamw(model), "fp16-master", max_retries=20)
    outcome = loop.step(lambda: overflowing(model, batches(1)[0], 1e4))
    assert outcome.retries > 0 and model.seen == 1


def test_with_retries_a_loss_is_refused() -> None:
    model = net()
    loop = prepare(model, adamw(model), "fp16-master", max_retries=1)
    with loop.forward():
        loss = loss_of(model, batches(1)[0])
    with pytest.raises(pl.ArgumentError, match="a closure, which can be repeated, with max_retries=1; got a loss"):
        loop.step(loss)


def test_a_closure_over_a_loop_variable_is_refused_at_once_under_accumulation() -> None:
    model = net()
    loop = prepare(model, adamw(model), "fp16-master", max_retries=1, accumulate=2)
    data = iter(batches(2))
    batch = next(data)
    loop.step(lambda: loss_of(model, batch))
    batch = next(data)
    with pytest.raises(
        pl.ArgumentError, match=r"variable batch was assigned again.*Bind what it reads: loop.step\(lambda batch=batch"
    ):
        loop.step(lambda: loss_of(model, batch))


def test_bound_closures_are_taken_and_without_retries_any() -> None:
    model = net()
    loop = prepare(model, adamw(model), "fp16-master", max_retries=1, accumulate=2)
    for batch in batches(2):
        loop.step(functools.partial(loss_of, model, batch))
    for batch in batches(2):
        loop.step(lambda batch=batch: loss_of(model, batch))
    assert loop.step_index == 2
    loop.close()
    loop = prepare(model, adamw(model), "fp16-master", accumulate=2)
    for batch in batches(2):
        loop.step(lambda: loss_of(model, batch))  # noqa: B023  (runs at once, and once)
    assert loop.step_index == 1


def test_variables_are_those_that_the_function_reads() -> None:
    x = torch.ones(2)
    found = variables_of(lambda: (x.loss_of, net(), [x for _ in range(2)]))
    assert found["x"] is x and found["net"] is net
    assert "loss_of" not in found  # an attribute of that name is no read of the global
    assert variables_of(functools.partial(lambda: x)) == {"x": x}
    assert variables_of(3) == {}


def test_an_iteration_after_an_exception_starts_anew() -> None:
    model = net()
    loop = prepare(model, adamw(model), "fp16-master", max_retries=3, accumulate=2, scaler=scaler_at(8.0))
    with pytest.raises(ZeroDivisionError):
        loop.step(lambda: 1 / 0)
    loop.zero_grad()
    assert [o.stepped for o in run_closures(loop, batches(2))] == [False, True]


def test_retries_do_not_change_a_run_that_never_overflows() -> None:
    model, data = net(0.2), batches(4)
    twin = copy.deepcopy(model)
    for network, retries in ((model, 4), (twin, 0)):
        torch.manual_seed(1)
        run_closures(prepare(network, adamw(network), "fp16-master", scaler=scaler_at(8.0), max_retries=retries), data)
    assert contents(model.state_dict()) == contents(twin.state_dict())
