"""Steps are torch's, with each group's own learning rate; decay is independent; schedulers, states and copies hold."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

import plimsoll as pl
from plimsoll.errors import ArgumentError, StateError
from plimsoll.unit import nn as unn
from plimsoll.unit.optim import SGD, Adam, AdamW
from plimsoll.unit.optim.optimizers import unhooked
from tests.support.cases import each

TORCH = {SGD: torch.optim.SGD, Adam: torch.optim.Adam, AdamW: torch.optim.AdamW}
OPTIMIZERS = list(TORCH)


def model(width=16):
    torch.manual_seed(0)
    return nn.Sequential(
        unn.Linear(width, 4 * width), unn.GELU(), unn.Linear(4 * width, width), unn.LinearReadout(width, 3)
    )


def put_gradients(network, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for p in network.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def by_hand(network, optimizer, lr, decay=0.0, **settings):
    """torch's own optimizer with one group a parameter, the factors of width 16 written out."""
    factor = {"0.weight": 1 / 4, "2.weight": 1 / 8}
    groups = []
    for name, p in network.named_parameters():
        rate = lr * factor.get(name, 1.0)
        groups.append({"params": [p], "lr": rate, "weight_decay": decay / rate})
    return TORCH[optimizer](groups, **settings)


def weights(network):
    return torch.cat([p.detach().flatten() for p in network.parameters()])


@each("optimizer", OPTIMIZERS)
@each("mode", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_step_is_torchs_with_each_groups_own_rate(optimizer, mode):
    mine, theirs = model(), model()
    decay = 0.0 if optimizer is Adam else 0.02
    momentum = {"momentum": 0.9} if optimizer is SGD else {}
    ours = optimizer(mine, lr=0.5, weight_decay=decay, **mode, **momentum)
    reference = by_hand(theirs, optimizer, 0.5, decay, **mode, **momentum)
    for step in range(4):
        put_gradients(mine, step)
        put_gradients(theirs, step)
        ours.step()
        reference.step()
    torch.testing.assert_close(weights(mine), weights(theirs), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimizer", [SGD, AdamW])
def test_decay_takes_the_same_share_of_every_weight_at_any_rate(optimizer):
    for lr in (0.01, 3.0):
        network = model()
        before = weights(network)
        stepper = optimizer(network, lr=lr, weight_decay=0.125)
        for p in network.parameters():
            p.grad = torch.zeros_like(p)
        stepper.step()
        torch.testing.assert_close(weights(network), before * 0.875)
        stepper.param_groups[0]["lr"] *= 0.5  # a schedule: the decay follows it
        first = next(network.parameters())
        kept = first.detach().clone()
        stepper.step()
        torch.testing.assert_close(first.detach(), kept * (1 - 0.125 / 2))


def test_torchs_decay_follows_rate_and_factor():
    network = model()
    first = next(network.parameters())
    kept = first.detach().clone()
    stepper = AdamW(network, lr=0.5, weight_decay=0.1, independent_weight_decay=False)
    first.grad = torch.zeros_like(first)
    stepper.step()
    torch.testing.assert_close(first.detach(), kept * (1 - 0.5 / 4 * 0.1))


def test_adams_decay_is_torchs_penalty():
    mine, theirs = model(), model()
    ours = Adam(mine, lr=0.5, weight_decay=0.1)
    reference = by_hand(theirs, Adam, 0.5)
    for group in reference.param_groups:
        group["weight_decay"] = 0.1
    for network in (mine, theirs):
        put_gradients(network)
    ours.step()
    reference.step()
    torch.testing.assert_close(weights(mine), weights(theirs))


@each("optimizer", OPTIMIZERS)
@each(
    "schedule",
    [
        lambda o: LambdaLR(o, lambda step: 1 / (step + 1)),
        lambda o: CosineAnnealingLR(o, 5, eta_min=0.01),
        lambda o: OneCycleLR(o, max_lr=0.5, total_steps=6, cycle_momentum=False),
    ],
    ids=["lambda", "cosine", "one cycle"],
)
def test_any_scheduler_writes_the_plain_rate_and_the_factors_stay(optimizer, schedule):
    network, plain = model(), nn.Parameter(torch.zeros(1))
    ours, other = optimizer(network, lr=0.5), TORCH[optimizer]([plain], lr=0.5)
    mine, theirs = schedule(ours), schedule(other)
    for _ in range(5):
        put_gradients(network)
        plain.grad = torch.ones(1)
        ours.step()
        other.step()
        mine.step()
        theirs.step()
        assert {g["lr"] for g in ours.param_groups} == {other.param_groups[0]["lr"]}
    # The step of a group is the plain rate times its factor.
    before = [p.detach().clone() for p in network.parameters()]
    reference = copy.deepcopy(ours.state_dict())
    ours.param_groups[0]["lr_factor"] *= 0.5
    ours.step()
    half = (next(network.parameters()).detach() - before[0]).clone()
    for p, kept in zip(network.parameters(), before, strict=True):
        p.data.copy_(kept)
    ours.param_groups[0]["lr_factor"] *= 2
    ours.load_state_dict(reference)
    ours.step()
    torch.testing.assert_close(next(network.parameters()).detach() - before[0], half * 2, rtol=1e-4, atol=1e-6)


@each("optimizer", OPTIMIZERS)
def test_state_and_copies_go_on_as_before(optimizer):
    network = model()
    first = optimizer(network, lr=0.5, weight_decay=0.01)
    for step in range(3):
        put_gradients(network, step)
        first.step()
    saved = copy.deepcopy(first.state_dict())
    twin = copy.deepcopy(network)
    second = optimizer(twin, lr=9.0)
    second.load_state_dict(saved)
    assert [g["lr"] for g in second.param_groups] == [0.5] * len(first.param_groups)
    assert [g["reference_lr"] for g in second.param_groups] == [0.5] * len(first.param_groups)
    third_network, third = copy.deepcopy((network, first))
    fourth_network, fourth = pickle.loads(pickle.dumps((network, first)))
    for item, stepper in ((network, first), (twin, second), (third_network, third), (fourth_network, fourth)):
        put_gradients(item, 7)
        stepper.step()
    for item in (twin, third_network, fourth_network):
        assert torch.equal(weights(item), weights(network))


def test_a_state_of_other_factors_is_refused():
    wide, plain = AdamW(model(32), lr=1.0), torch.optim.AdamW(model().parameters())
    with pytest.raises(StateError, match=r"AdamW.load_state_dict: expected the factors of this model's groups, \[0.25"):
        AdamW(model(), lr=1.0).load_state_dict(wide.state_dict())
    with pytest.raises(StateError, match=r"got \[None\]"):
        AdamW(model(), lr=1.0).load_state_dict(plain.state_dict())


def test_hooks_run_once_and_see_the_plain_rate():
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # torch wraps its class's step when the first one is made
    network = model()
    optimizer = AdamW(network, lr=0.5)
    seen = []
    before = optimizer.register_step_pre_hook(lambda o, *_: seen.append(("pre", o.param_groups[0]["lr"])))
    after = optimizer.register_step_post_hook(lambda o, *_: seen.append(("post", o.param_groups[0]["lr"])))
    put_gradients(network)
    optimizer.step()
    assert seen == [("pre", 0.5), ("post", 0.5)]
    before.remove()
    after.remove()


def test_a_closure_sees_the_plain_rate_and_its_loss_comes_back():
    network = model()
    optimizer = AdamW(network, lr=0.5)

    def closure():
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert torch.is_grad_enabled()
        put_gradients(network)
        return 3.0

    before = weights(network)
    assert optimizer.step(closure) == 3.0
    assert not torch.equal(weights(network), before)


def test_rates_are_put_back_when_a_step_fails():
    network = model()
    optimizer = AdamW(network, lr=0.5, weight_decay=0.1)
    for p in network.parameters():
        p.grad = torch.sparse_coo_tensor(
            torch.zeros(p.dim(), 1, dtype=torch.long), torch.ones(1), p.shape, check_invariants=True
        )
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert {(g["lr"], g["weight_decay"]) for g in optimizer.param_groups} == {(0.5, 0.1)}


def test_the_rate_may_be_a_tensor():
    mine, theirs = model(), model()
    lr = torch.tensor(0.5)
    ours, reference = AdamW(mine, lr=lr, foreach=False), AdamW(theirs, lr=0.5, foreach=False)
    for network in (mine, theirs):
        put_gradients(network)
    ours.step()
    reference.step()
    assert all(group["lr"] is lr for group in ours.param_groups)
    torch.testing.assert_close(weights(mine), weights(theirs))


def test_a_compiled_step_is_the_eager_one():
    mine, theirs = model(), model()
    ours, reference = AdamW(mine, lr=0.5, weight_decay=0.01), AdamW(theirs, lr=0.5, weight_decay=0.01)
    compiled = torch.compile(ours.step, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for step in range(4):
        put_gradients(mine, step)
        put_gradients(theirs, step)
        compiled()
        reference.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # something was compiled
    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-4)


def test_independent_decay_needs_a_rate_to_be_relative_to():
    with pytest.raises(
        ArgumentError, match="AdamW: expected lr above 0, which independent weight decay is relative to"
    ):
        AdamW(model(), lr=0.0, weight_decay=0.1)
    assert AdamW(model(), lr=0.0, weight_decay=0.1, independent_weight_decay=False).param_groups
    assert Adam(model(), lr=0.0, weight_decay=0.1).param_groups


@each("precision", ["fp32", "amp-bf16", "bf16-master", "fp16-master", "bf16-kahan"])
def test_under_prepare(precision):
    network = model()
    start = weights(network)
    scaler = pl.scaling.StaticScaler(1.0, device="cpu") if "fp16" in precision else None  # gradients need no scale
    with pl.prepare(network, AdamW(network, lr=0.01), precision, scaler=scaler) as loop:
        x = torch.randn(32, 16)
        for _ in range(3):
            with loop.forward():
                loss = unn.CrossEntropyLoss()(network(x).float(), torch.arange(32) % 3)
            assert loop.step(loss).stepped
    moved = (weights(network).float() - start).abs()
    first, last = moved[: 64 * 16].mean(), moved[-3 - 48 : -3].mean()
    assert last / first == pytest.approx(4, rel=0.3)  # the readout's rate is four times the first layer's


def test_a_step_without_its_hooks_calls_none() -> None:
    weight, calls = nn.Parameter(torch.ones(1)), []
    optimizer = torch.optim.SGD([weight], lr=1.0)  # torch wraps the step of the first one's class
    weight.grad = torch.ones(1)
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append("hook"))
    try:
        unhooked(torch.optim.SGD)(optimizer)
        assert (weight.item(), calls) == (0.0, [])
        optimizer.step()
        assert calls == ["hook"]
    finally:
        handle.remove()
