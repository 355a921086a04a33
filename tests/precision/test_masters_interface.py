"""What `MasterWeights` owes to everything around it: scalers, schedulers, closures, hooks, groups."""

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.precision import KahanWeights, MasterWeights, StochasticWeights
from plimsoll.scaling import DynamicScaler
from tests.support.cases import each
from tests.support.precision.masters import adamw, backward, formats, in_float32, network, same, train, weights

# -- gradients ---------------------------------------------------------------------------------------------------------


@formats
def test_collecting_gives_float32_gradients_once(dtype: torch.dtype, compact: bool) -> None:
    model = network(dtype)
    masters = MasterWeights(adamw(model), compact=compact)
    backward(model, 0)
    masters.collect_gradients()
    found = [p.grad for group in masters.param_groups for p in group["params"]]
    assert same(found, [p.grad.float() for p in model.parameters()])
    found[0].mul_(0.5)
    masters.collect_gradients()
    assert found[0] is masters.pairs[0].master.grad and torch.equal(found[0], model[0].weight.grad.float() * 0.5)


def test_a_gradient_that_has_changed_is_collected_anew() -> None:
    model = network()
    masters = MasterWeights(adamw(model))
    backward(model, 0)
    masters.collect_gradients()
    backward(model, 1)  # adds up in place
    masters.collect_gradients()
    assert same([pair.master.grad for pair in masters.pairs], [p.grad.float() for p in model.parameters()])
    model.zero_grad()
    masters.collect_gradients()
    assert [pair.master.grad for pair in masters.pairs] == [None] * 4
    backward(model, 2)
    masters.collect_gradients()
    assert same([pair.master.grad for pair in masters.pairs], [p.grad.float() for p in model.parameters()])


@formats
def test_a_step_refuses_gradients_that_changed_after_they_were_collected(dtype: torch.dtype, compact: bool) -> None:
    model = network(dtype)
    masters = MasterWeights(adamw(model), compact=compact)
    backward(model, 0)
    masters.collect_gradients()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(
        ArgumentError, match=r"MasterWeights\.step: expected the model's gradients as .*got 4 that chang"
    ):
        masters.step()
    masters.collect_gradients()
    masters.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    model = network()
    masters = MasterWeights(adamw(model))
    backward(model, 0)
    masters.collect_gradients()
    masters.zero_grad(set_to_none)
    assert all(pair.master.grad is None for pair in masters.pairs)
    for p in model.parameters():
        assert p.grad is None if set_to_none else not p.grad.any()
    before = in_float32(masters)
    masters.step()
    assert same(before, in_float32(masters)) is set_to_none  # with gradients of zero the weights decay


@formats
def test_clipping_is_torchs_of_the_masters(dtype: torch.dtype, compact: bool) -> None:
    found = []
    for own in (True, False):
        model = network(dtype)
        masters = MasterWeights(adamw(model), compact=compact)
        for step in range(4):
            masters.zero_grad()
            backward(model, step)
            if own:
                norm = masters.clip_gradients(0.05)
                assert all(pair.master.grad is None for pair in masters.pairs)
            else:
                masters.collect_gradients()
                norm = torch.nn.utils.clip_grad_norm_(masters.param_groups[0]["params"], 0.05)
            assert norm > 0.05
            masters.step()
        found.append([norm, *weights(model), *in_float32(masters)])
    assert same(*found)


def test_clipping_before_and_after_collecting_multiplies() -> None:
    model = network()
    masters = MasterWeights(adamw(model))
    backward(model, 0)
    first = masters.clip_gradients(0.1)
    second = masters.clip_gradients(0.05)
    masters.collect_gradients()
    third = masters.clip_gradients(0.025)
    assert first > 0.1
    assert second.item() == pytest.approx(0.1, rel=1e-3) and third.item() == pytest.approx(0.05, rel=1e-3)
    total = torch.nn.utils.get_total_norm([pair.master.grad for pair in masters.pairs])
    assert total.item() == pytest.approx(0.025, rel=1e-3)


def test_clipping_without_gradients_and_with_a_bad_bound() -> None:
    masters = MasterWeights(adamw(network()))
    assert masters.clip_gradients(1.0) == 0
    with pytest.raises(ArgumentError, match=r"clip_gradients: expected max_norm above zero; got max_norm=-1"):
        masters.clip_gradients(-1)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's own, of Adagrad
@formats
def test_sparse_gradients(dtype: torch.dtype, compact: bool) -> None:
    rows = torch.tensor([1, 3, 3, 3])
    for optimizer in (torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad):
        model = nn.Embedding(6, 4, sparse=True).to(dtype)
        reference = nn.Parameter(model.weight.detach().float())
        masters = MasterWeights(optimizer(model.parameters(), lr=0.1), compact=compact)
        by_definition = optimizer([reference], lr=0.1)
        for _ in range(3):
            masters.zero_grad()
            model(rows).float().pow(2).sum().backward()
            reference.grad = model.weight.grad.float()
            masters.clip_gradients(1e6)  # the norm of a sparse gradient, and no change
            masters.collect_gradients()
            assert masters.pairs[0].master.grad.is_sparse
            masters.step()
            by_definition.step()
        assert torch.equal(masters.master_of(model.weight), reference.detach())


# -- parameters of every kind ------------------------------------------------------------------------------------------


@formats
def test_frozen_tied_float32_and_unused_parameters(dtype: torch.dtype, compact: bool) -> None:
    torch.manual_seed(0)
    tied = nn.Parameter(torch.randn(4, 4).to(dtype))
    frozen = nn.Parameter(torch.randn(4).to(dtype), requires_grad=False)
    unused = nn.Parameter(torch.randn(4).to(dtype))
    norm = nn.Parameter(torch.ones(4))
    masters = MasterWeights(torch.optim.SGD([tied, frozen, unused, norm], lr=0.1, momentum=0.9), compact=compact)
    assert masters.param_groups[0]["params"][3] is norm
    before = [x.detach().clone() for x in (tied, frozen, unused, norm)]
    for _ in range(2):
        masters.zero_grad()
        x = torch.randn(3, 4).to(dtype)
        ((x @ tied @ tied + frozen).float() * norm).pow(2).sum().backward()
        masters.step()
    after = [x.detach() for x in (tied, frozen, unused, norm)]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [False, True, True, False]
    assert len(masters.state) == 2
    if not compact:
        assert masters.nbytes == 4 * (16 + 4)  # nothing for the frozen one
        frozen.requires_grad_(True)
        frozen.grad = torch.ones_like(frozen)
        masters.step()
        assert masters.nbytes == 4 * (16 + 4 + 4) and not torch.equal(frozen, before[1])


@formats
def test_groups_keep_their_own_settings_and_more_can_be_added(dtype: torch.dtype, compact: bool) -> None:
    model, late = network(dtype), nn.Linear(3, 3).to(dtype)
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": list(model[2].parameters()), "lr": 0.2}]
    masters = MasterWeights(torch.optim.SGD(groups), compact=compact)
    masters.add_param_group({"params": list(late.parameters()), "lr": 0.4})
    masters.add_param_group({"params": nn.Parameter(torch.ones(2)), "lr": 0.5})
    assert [group["lr"] for group in masters.param_groups] == [0.1, 0.2, 0.4, 0.5]
    before = weights(late)
    for p in (*model.parameters(), *late.parameters()):
        p.grad = torch.ones_like(p)
    first, second = model[0].weight.detach().float(), model[2].weight.detach().float()
    masters.step()
    assert torch.equal(masters.master_of(model[0].weight), first - 0.1)
    assert torch.equal(masters.master_of(model[2].weight), second - 0.2)
    assert torch.equal(masters.master_of(late.bias), before[1].float() - 0.4)
    with pytest.raises(ArgumentError, match="add_param_group: expected parameters that no group has"):
        masters.add_param_group({"params": [late.bias]})
    assert len(masters.param_groups) == 4


def test_state_from_before_becomes_float32() -> None:
    model = network()
    inner = adamw(model)
    train(model, inner, range(2))
    moments = [inner.state[p]["exp_avg"].clone() for p in model.parameters()]
    masters = MasterWeights(inner)
    assert same([inner.state[pair.master]["exp_avg"] for pair in masters.pairs], [x.float() for x in moments])
    train(model, masters, range(2, 4))
    assert {x.dtype for state in inner.state.values() for x in state.values()} == {torch.float32}


@formats
def test_weights_changed_from_outside_count(dtype: torch.dtype, compact: bool) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    masters = MasterWeights(torch.optim.SGD([weight], lr=1e-5), compact=compact)
    for change in (0.0, 3.0):
        weight.grad = torch.ones_like(weight)
        masters.step()
        kept = masters.master_of(weight)[1:]
        weight.data[0] = change  # no count of versions sees this
        weight.grad = torch.zeros_like(weight)
        masters.step()
        spacing = max(abs(change), 1e-30) * torch.finfo(dtype).eps
        assert weight[0] == change and abs(masters.master_of(weight)[0] - change) <= (spacing if compact else 0)
        assert torch.equal(masters.master_of(weight)[1:], kept)


def test_unwrapping_gives_the_inner_optimizer_back() -> None:
    model = network()
    inner = adamw(model)
    masters = MasterWeights(inner)
    train(model, masters, range(2))
    moments = [inner.state[pair.master]["exp_avg"] for pair in masters.pairs]
    assert masters.unwrap() is inner
    assert all(a is b for a, b in zip(inner.param_groups[0]["params"], model.parameters(), strict=True))
    assert all(inner.state[p]["exp_avg"] is x for p, x in zip(model.parameters(), moments, strict=True))


# -- what steps and schedules it ---------------------------------------------------------------------------------------


@formats
def test_torchs_scaler(dtype: torch.dtype, compact: bool) -> None:
    found = []
    for scaled in (False, True):
        model = network(dtype)
        masters = MasterWeights(adamw(model), compact=compact)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=10**6, enabled=scaled)
        for step in range(6):
            masters.zero_grad()
            backward(model, step, scaler)
            if scaled and step == 3:  # an overflow, which the unscaled run does not have
                model[0].weight.grad[0, 0] = torch.inf
            masters.collect_gradients()
            scaler.unscale_(masters)
            if step != 3 or scaled:
                scaler.step(masters)
            scaler.update()
        assert not scaled or scaler.get_scale() == 2.0**5
        assert all(p.isfinite().all() for p in model.parameters())
        found.append(weights(model))
    if dtype is torch.bfloat16:  # a power of two changes no bits but those of subnormal numbers
        assert same(*found)


@formats
@pytest.mark.parametrize("clip", [None, 0.05])
def test_our_scalers_collect_gradients_themselves(dtype: torch.dtype, compact: bool, clip: float | None) -> None:
    found = []
    for scaled in (False, True):
        model = network(dtype)
        masters = MasterWeights(adamw(model), compact=compact)
        scaler = DynamicScaler("cpu", init_scale=2.0**6, growth_interval=10**6, enabled=scaled)
        for step in range(6):
            masters.zero_grad()
            backward(model, step, scaler if scaled else None)
            if scaled and step == 3:
                model[0].weight.grad[0, 0] = torch.inf
            if scaled and clip:
                scaler.unscale_(masters)
            if clip:
                masters.clip_gradients(clip)
            if scaled:
                scaler.step(masters)
                scaler.update()
                assert scaler.outcome.stepped is (step != 3)
            elif step != 3:
                masters.step()
        found.append(in_float32(masters))
    if dtype is torch.bfloat16:  # a power of two changes no bits but those of subnormal numbers
        assert same(*found)
    assert all(x.isfinite().all() for x in found[1])


@formats
def test_schedulers_of_either_reach_the_step(dtype: torch.dtype, compact: bool) -> None:
    for outer in (True, False):
        weight = nn.Parameter(torch.zeros(1, dtype=dtype))
        inner = torch.optim.SGD([weight], lr=1.0)
        early = None if outer else torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
        masters = MasterWeights(inner, compact=compact)
        scheduler = early or torch.optim.lr_scheduler.StepLR(masters, 1, 0.5)
        for _ in range(3):
            weight.grad = -torch.ones_like(weight)
            masters.step()
            scheduler.step()
        assert weight.item() == 1.75
    assert isinstance(masters, torch.optim.Optimizer)
    cycling = torch.optim.lr_scheduler.OneCycleLR(masters, max_lr=0.1, total_steps=10, cycle_momentum=False)
    assert masters.param_groups[0]["lr"] == cycling.get_last_lr()[0] == inner.param_groups[0]["lr"]


@formats
def test_a_closure(dtype: torch.dtype, compact: bool) -> None:
    found = []
    for with_closure in (False, True):
        model = network(dtype)
        masters = MasterWeights(adamw(model), compact=compact)

        def closure() -> float:
            masters.zero_grad()  # noqa: B023  (called at once)
            backward(model, 0)  # noqa: B023
            return 7.0

        for _ in range(3):
            if with_closure:
                assert masters.step(closure) == 7.0
            else:
                closure()
                assert masters.step() is None
        found.append(weights(model))
    assert same(*found)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs(line_search: str | None) -> None:
    target = torch.tensor([0.25, -1.5, 3.0, 0.75])
    weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    masters = MasterWeights(torch.optim.LBFGS([weight], max_iter=10, line_search_fn=line_search))
    calls = []

    def closure() -> Tensor:
        masters.zero_grad()
        loss = (weight.float() - target).pow(2).mul(torch.tensor([1.0, 2.0, 3.0, 4.0])).sum()
        loss.backward()
        calls.append(loss.item())
        return loss.detach()

    for _ in range(3):
        masters.step(closure)
    assert len(calls) > 3
    assert calls[-1] < 1e-3 * calls[0]
    assert torch.equal(masters.master_of(weight).bfloat16(), weight)


@formats
def test_hooks_run_once_a_step(dtype: torch.dtype, compact: bool) -> None:
    model, events = network(dtype), []
    inner = adamw(model)
    inner.register_step_pre_hook(lambda *_: events.append("inner begins"))
    inner.register_step_post_hook(lambda *_: events.append("inner ends"))
    masters = MasterWeights(inner, compact=compact, chunk_bytes=1)
    masters.register_step_pre_hook(lambda *_: events.append("begins"))
    masters.register_step_post_hook(lambda *_: events.append("ends"))
    train(model, masters, range(1))
    assert events == ["begins", "inner begins", "inner ends", "ends"]


def test_it_can_be_copied_and_pickled() -> None:
    model = network()
    masters = MasterWeights(adamw(model))
    torch.optim.lr_scheduler.StepLR(masters, 1)  # puts a function of its own in the place of `step`
    train(model, masters, range(2))
    backward(model, 9)
    masters.collect_gradients()
    for other_model, other in (copy.deepcopy((model, masters)), pickle.loads(pickle.dumps((model, masters)))):
        train(other_model, other, range(2, 4))
        assert not same(weights(model), weights(other_model))
        again = network()
        reference = MasterWeights(adamw(again))
        train(again, reference, range(4))
        assert same(weights(again), weights(other_model))
        assert repr(other).startswith("MasterWeights of AdamW (")


# -- mistakes ----------------------------------------------------------------------------------------------------------


@each(
    ("make", "message"),
    [
        (lambda: MasterWeights("AdamW"), "MasterWeights: expected a torch.optim.Optimizer; got str"),
        (lambda: MasterWeights(adamw(network(torch.float32))), "got torch.float32. Cast the model first"),
        (
            lambda: MasterWeights(adamw(network()), chunk_bytes=0),
            "expected chunk_bytes to be an integer of at least 1; got chunk_bytes=0",
        ),
        (
            lambda: MasterWeights(torch.optim.SGD(network().parameters(), lr=0.1, differentiable=True)),
            "got differentiable=True",
        ),
        (
            lambda: KahanWeights(adamw(network(torch.float16))),
            "KahanWeights: expected 16-bit parameters to be bfloat16",
        ),
        (lambda: StochasticWeights(adamw(network(torch.float16))), "StochasticWeights: expected 16-bit parameters"),
        (lambda: MasterWeights(adamw(network())).master_of(torch.ones(3)), r"master_of: expected a 16-bit parameter"),
    ],
)
def test_mistakes(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_no_gradient_at_all_is_no_step() -> None:
    for compact in (True, False):
        model = network()
        masters = MasterWeights(adamw(model), compact=compact)
        before = weights(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            masters.step()
        assert same(before, weights(model))
        assert not masters.state


def test_sharded_parameters_are_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = nn.Parameter(DTensor.from_local(torch.ones(4, dtype=torch.bfloat16), mesh, [Shard(0)]))
        with pytest.raises(
            UnsupportedTensorError, match="whole on each rank; got a DTensor of torch.bfloat16. Keep the"
        ):
            MasterWeights(torch.optim.SGD([weight], lr=0.1))
        masters = MasterWeights(adamw(network()))
        with pytest.raises(UnsupportedTensorError, match="got a DTensor of torch.bfloat16"):
            masters.add_param_group({"params": [weight]})
    finally:
        dist.destroy_process_group()
