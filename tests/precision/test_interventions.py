"""What others may do to a loop between steps: be notified, leave one out, change the level."""

from typing import Any

import pytest
import torch

from plimsoll.errors import ArgumentError, StateError
from plimsoll.formats import Plan
from plimsoll.precision import Policy, prepare
from plimsoll.scaling import LayerScaler
from tests.support.cases import each
from tests.support.precision.training import HERE, adamw, batches, contents, loss_of, net, run, run_closures


def test_each_step_is_told_at_its_end_and_not_each_micro_batch() -> None:
    model = net()
    loop = prepare(model, adamw(model), "fp32", accumulate=2)
    events: list[tuple[int, bool]] = []
    take_back = loop.after_each_step(
        lambda: events.append((loop.step_index, all(p.grad is None for p in model.parameters())))
    )
    run(loop, batches(5))
    assert events == [(1, True), (2, True)]
    take_back()
    take_back()
    run(loop, batches(1))
    assert len(events) == 2
    loop.close()


def test_what_a_listener_raises_comes_out_of_a_step_that_is_done() -> None:
    model = net()
    loop = prepare(model, adamw(model), "fp32")

    def stop() -> None:
        raise KeyError("enough")

    loop.after_each_step(stop)
    with pytest.raises(KeyError, match="enough"):
        run(loop, batches(1))
    assert loop.step_index == 1 and all(p.grad is None for p in model.parameters())
    loop.close()


@each("name", HERE)
def test_a_step_that_is_left_out_changes_no_weight_and_no_state(name: str) -> None:
    model = net()
    optimizer = adamw(model, name)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loop = prepare(model, optimizer, name, schedulers=schedule, clip_norm=1.0)
    run(loop, batches(3))
    before = contents([p.detach() for p in model.parameters()]), state_of(loop)
    steps = schedule.last_epoch
    loop.skip_next("a test")
    outcome = loop_step(loop)
    assert (outcome.stepped, outcome.reason) == (False, "a test")
    assert contents([p.detach() for p in model.parameters()]) == before[0]
    assert state_of(loop) == before[1]
    assert schedule.last_epoch == steps and loop.step_index == 4
    assert loop_step(loop).stepped
    assert contents([p.detach() for p in model.parameters()]) != before[0]
    loop.close()


def state_of(loop: Any) -> Any:
    """The optimizer's state, but for the count of calls that keys the noise of stochastic rounding."""
    return {name: value for name, value in contents(loop.optimizer.state_dict()).items() if name != "steps"}


def loop_step(loop: Any) -> Any:
    with loop.forward():
        loss = loss_of(loop.model, batches(1, seed=7)[0])
    return loop.step(loss)


def test_a_batch_that_is_left_out_is_not_repeated() -> None:
    model = net()
    loop = prepare(model, adamw(model), "amp-fp16", max_retries=3)
    loop.skip_next("a test")
    (outcome,) = run_closures(loop, batches(1))
    assert (outcome.stepped, outcome.retries, outcome.reason) == (False, 0, "a test")
    loop.close()


@pytest.mark.parametrize(("before", "after"), [("amp-fp16", "amp-bf16"), ("fp16-master", "bf16-master")])
def test_a_change_of_level_is_what_a_schedule_would_do(before: str, after: str) -> None:
    def trained(precision: Any, change: bool) -> Any:
        model = net()
        loop = prepare(model, adamw(model), precision)
        losses = run(loop, batches(3))
        if change:
            loop.change(after)
        losses += run(loop, batches(3, seed=5))
        assert loop.precision == after
        loop.close()
        return losses, contents(model.state_dict())

    assert trained(before, True) == trained([(0, before), (3, after)], False)


def test_a_change_outlasts_the_schedule_and_makes_a_scaler() -> None:
    model = net()
    loop = prepare(model, adamw(model), [(0, "fp32"), (2, "amp-bf16")])
    assert loop.scaler is None
    loop.change("amp-fp16")
    run(loop, batches(4))
    assert loop.precision == "amp-fp16" and loop.scaler is not None
    loop.close()


def test_a_change_of_policy_holds_from_the_next_step_on() -> None:
    model = net()
    loop = prepare(model, adamw(model), "amp-fp16")
    seen: list[torch.dtype] = []
    model.hidden.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    run(loop, batches(1))
    loop.change(policy=Policy().with_module("hidden", "bf16"))
    run(loop, batches(1))
    assert seen == [torch.float16, torch.bfloat16] and loop.precision == "amp-fp16"
    loop.close()


def test_a_change_that_cannot_be_leaves_all_as_it_was() -> None:
    model = net()
    loop = prepare(model, adamw(model), "amp-fp16")
    with pytest.raises(ArgumentError, match="expected each module of the policy to be in the model"):
        loop.change(policy=Policy().with_module("hid", "bf16"))
    with pytest.raises(ArgumentError, match="expected a level"):
        loop.change("bf16")
    assert loop.policy == Policy() and loop.precision == "amp-fp16"
    run(loop, batches(2))
    loop.close()
    loop = prepare(model, adamw(model), "fp32")
    LayerScaler(model)  # of which a model has one
    layered = Plan(target="fp16", formats={"head": "fp16"}, scale=8.0, scales={"head": {"gradients": 8.0}})
    with pytest.raises(ArgumentError, match="LayerScaler: expected a model without layer scales"):
        loop.change(layered)
    run(loop, batches(1))
    assert loop.precision == "fp32"
    loop.close()


def test_it_happens_between_steps() -> None:
    model = net()
    loop = prepare(model, adamw(model), "fp32", accumulate=2)
    with loop.forward(), pytest.raises(StateError, match="change: expected a call between two steps; got one inside"):
        loop.change("amp-bf16")
    run(loop, batches(1))
    with pytest.raises(StateError, match="skip_next: expected a call between two steps; got one after 1 micro-batches"):
        loop.skip_next("a test")
    loop.close()
    with pytest.raises(StateError, match="expected an open loop"):
        loop.skip_next("a test")
