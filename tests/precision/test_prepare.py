"""The training step: accumulation, clipping, schedulers, several optimizers, evaluation, and what is refused."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.precision import LEVELS, prepare
from plimsoll.scaling.dynamic import DynamicScaler
from plimsoll.scaling.static import StaticScaler
from tests.support.cases import each
from tests.support.precision.training import HERE, adamw, batches, loss_of, net, overflowing, run, run_closures


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 1)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def calm(name: str) -> DynamicScaler | None:
    """A scaler that does not overflow at first, for the levels that have one."""
    return DynamicScaler("cpu", init_scale=256.0) if LEVELS[name].scaled else None


@each("name", HERE)
def test_accumulated_micro_batches_are_their_mean(name: str) -> None:
    (x, y), *_ = batches(1, rows=16)
    model = linear()
    loop = prepare(model, sgd(model), name, accumulate=4, clip_norm=math.inf, scaler=calm(name))
    outcomes = run_closures(loop, [(x[i : i + 4], y[i : i + 4]) for i in range(0, 16, 4)])
    whole = linear()
    expected = prepare(whole, sgd(whole), name, clip_norm=math.inf, scaler=calm(name)).step(
        lambda: loss_of(whole, (x, y))
    )
    assert [o.stepped for o in outcomes] == [False, False, False, True]
    assert [o.reason for o in outcomes[:3]] == [f"accumulating: {i} of 4" for i in (1, 2, 3)]
    assert [float(o.scale) for o in outcomes] == [256.0 if LEVELS[name].scaled else 1.0] * 4
    assert outcomes[3].grad_norm == pytest.approx(expected.grad_norm, rel=2e-2)
    assert loop.step_index == 1 and loop.loss is not None
    assert loop.loss.item() == pytest.approx(loss_of(linear(), (x, y)).item(), rel=2e-2)
    assert model.weight.float().sub(whole.weight.float()).abs().max() < 4e-3


def test_accumulation_at_fp32_is_what_one_would_write_by_hand() -> None:
    model, data = net(), batches(6)
    twin = copy.deepcopy(model)
    run(prepare(model, adamw(model), "fp32", accumulate=3), data)
    optimizer = adamw(twin)
    for start in (0, 3):
        for batch in data[start : start + 3]:
            (loss_of(twin, batch) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(a.equal(b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@each("name", HERE)
@each("accumulate", [1, 2])
def test_clipping_is_of_the_true_gradients(name: str, accumulate: int) -> None:
    model = linear()
    truth = sum(torch.autograd.grad(loss_of(model, b), model.weight)[0] for b in batches(accumulate)) / accumulate
    bias = sum(torch.autograd.grad(loss_of(model, b), model.bias)[0] for b in batches(accumulate)) / accumulate
    norm = float(torch.cat([truth.flatten(), bias]).norm())
    loop = prepare(model, sgd(model, lr=1.0), name, clip_norm=norm / 4, accumulate=accumulate, scaler=calm(name))
    before = model.weight.detach().float().clone()
    *_, outcome = run_closures(loop, batches(accumulate))
    assert outcome.grad_norm == pytest.approx(norm, rel=5e-2 if name.startswith("fp8") else 2e-2)
    assert (before - model.weight.float()).sub(truth / 4).abs().max() < 0.02


def test_the_norm_of_fp16_gradients_may_exceed_fp16() -> None:
    model = nn.Linear(64, 1, bias=False)
    loop = prepare(model, sgd(model, lr=1e-6), "fp16-pure", scaler=StaticScaler(1.0, device="cpu"), clip_norm=1e4)
    with loop.forward():
        loss = model(torch.full((1, 64), 3e4)).sum()
    outcome = loop.step(loss)
    assert outcome.stepped and outcome.grad_norm == pytest.approx(3e4 * 8, rel=1e-3)


def test_without_clipping_no_norm_is_computed() -> None:
    model = linear()
    outcome = prepare(model, sgd(model), "fp32").step(lambda: loss_of(model, batches(1)[0]))
    assert outcome.grad_norm is None and outcome.scale == 1.0 and outcome.stepped and outcome.retries == 0


def test_schedulers_advance_only_with_steps_that_happen() -> None:
    model = net()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loop = prepare(model, optimizer, "fp16-master", schedulers=scheduler, accumulate=2)
    data = batches(8)
    rates, stepped = [], []
    for i, batch in enumerate(data):
        with loop.forward():
            loss = overflowing(model, batch, 1e6 if i < 4 else 1.0)
        outcome = loop.step(loss)
        if i % 2:
            rates.append(optimizer.param_groups[0]["lr"])
            stepped.append(outcome.stepped)
    assert stepped == [False, False, True, True]
    assert rates == [1e-2, 1e-2, 5e-3, 2.5e-3]
    assert loop.step_index == 4


def test_a_scaler_that_overflows_skips_and_says_so() -> None:
    model = net()
    loop = prepare(model, adamw(model), "amp-fp16")
    before = [p.detach().clone() for p in model.parameters()]
    outcome = loop.step(lambda: overflowing(model, batches(1)[0], 1e9))
    assert not outcome.stepped and outcome.scale == 65536.0 and outcome.reason is not None
    assert "non-finite gradients" in outcome.reason
    assert loop.scaler.get_scale() == 32768.0
    assert all(p.equal(b) and p.grad is None for p, b in zip(model.parameters(), before, strict=True))


@each("name", ["amp-fp16", "fp16-master"])
@each("bound", [None, 1.0])
def test_the_stock_scaler_serves_where_gradients_are_fp32(name: str, bound: float | None) -> None:
    model, twin = net(), net()
    loop = prepare(model, adamw(model), name, scaler=torch.amp.GradScaler("cpu"), clip_norm=bound)
    ours = prepare(twin, adamw(twin), name, clip_norm=bound)
    outcomes, expected = run_closures(loop, batches(6)), run_closures(ours, batches(6))
    assert [(o.stepped, o.scale, o.grad_norm) for o in outcomes] == [
        (o.stepped, o.scale, o.grad_norm) for o in expected
    ]
    assert all(a.equal(b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    outcome = loop.step(lambda: overflowing(model, batches(1)[0], 1e9))
    assert not outcome.stepped and outcome.reason == "non-finite gradients"


def test_a_scaler_that_is_given_is_used_at_any_level() -> None:
    model = net()
    scaler = StaticScaler(8.0, device="cpu")
    loop = prepare(model, adamw(model), "bf16-master", scaler=scaler)
    assert loop.scaler is scaler
    assert run_closures(loop, batches(1))[0].scale == 8.0
    outcome = loop.step(lambda: loss_of(model, batches(1)[0]) * math.inf)
    assert not outcome.stepped and all(p.isfinite().all() for p in model.parameters())


def test_several_optimizers_step_together_or_not_at_all() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    both = [sgd(model[0], 0.01), adamw(model[1])]
    loop = prepare(model, both, "fp16-master", clip_norm=1.0)
    assert len(loop.optimizers) == 2
    before = [p.detach().clone() for p in model.parameters()]

    def one_overflows() -> Tensor:
        hidden = model[0](loop.inputs(batches(1)[0][0]))
        return model[1](hidden.detach()).float().sum() * 1e9 + hidden.float().sum() * 1e-6

    assert not loop.step(one_overflows).stepped
    assert all(p.equal(b) for p, b in zip(model.parameters(), before, strict=True))
    for batch in batches(20):
        outcome = loop.step(lambda batch=batch: loss_of(model, batch))
    assert outcome.stepped and not any(p.equal(b) for p, b in zip(model.parameters(), before, strict=True))


def test_several_optimizers_at_fp32_are_the_plain_loop() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    twin = copy.deepcopy(model)
    run(prepare(model, [sgd(model[0]), adamw(model[1])], "fp32"), batches(3))
    both = [sgd(twin[0]), adamw(twin[1])]
    for batch in batches(3):
        loss_of(twin, batch).backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    assert all(a.equal(b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@each("name", HERE)
def test_an_evaluation_leaves_no_trace(name: str) -> None:
    model = net(0.5)
    loop = prepare(model, adamw(model, name), name)
    run(loop, batches(2))
    model.hidden.eval()
    kept = [name for name, _ in model.named_buffers() if "fp8_scales" not in name]  # the scale that a cast used last
    buffers = [model.get_buffer(name).clone() for name in kept]
    with loop.evaluate() as evaluated:
        assert evaluated is model and not model.training and not torch.is_grad_enabled()
        first, second = (loss_of(model, batches(1)[0]) for _ in range(2))
    assert first.equal(second) and not first.requires_grad
    assert model.training and model.drop.training and not model.hidden.training
    assert all(model.get_buffer(name).equal(b) for name, b in zip(kept, buffers, strict=True))
    assert loop.step_index == 2


@each("name", ["fp16-master", "bf16-master", "amp-fp16", "fp16-pure"])
def test_a_transformer_trains_and_evaluates(name: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(8, 1))
    loop = prepare(model, adamw(model, name), name)
    data = [(x.view(4, 4, 8), y.view(4, 4, 1)) for x, y in batches(30)]
    losses = run(loop, data)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    with loop.evaluate():
        assert loss_of(model, data[0]).isfinite()


def test_inputs_of_any_structure_are_cast() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 1)

        def forward(self, batch: dict[str, Any], *, extra: Tensor) -> dict[str, Any]:
            assert batch["ids"].dtype == torch.int64 and extra.dtype == batch["x"][0].dtype == torch.bfloat16
            return {"y": [self.linear(batch["x"][0] + extra)], "ids": batch["ids"]}

    model = Takes()
    loop = prepare(model, sgd(model), "bf16-master")
    x = torch.randn(4, 8, dtype=torch.float64)
    with loop.forward():
        out = model({"x": [x], "ids": torch.arange(4)}, extra=x.float())
        loss = out["y"][0].sum()
    assert loss.dtype == torch.float32 and out["ids"].dtype == torch.int64
    assert loop.step(loss).stepped
    assert loop.inputs({"x": x})["x"].dtype == torch.bfloat16


def test_a_module_list_in_another_format_still_has_borders() -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
            self.head = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    model = Lists()
    policy = pl.precision.Policy().with_module("layers", "fp32")
    loop = prepare(model, adamw(model), "bf16-master", policy=policy)
    run(loop, batches(2))
    assert model.layers[0].weight.dtype == torch.float32 and model.head.weight.dtype == torch.bfloat16


def test_a_compiled_model_takes_the_prepared_ones_place() -> None:
    model = net()
    loop = prepare(model, adamw(model), "bf16-master")
    loop.model = torch.compile(model, backend="eager")
    losses = run(loop, batches(20))
    assert losses[-1] < losses[0]
    with pytest.raises(pl.ArgumentError, match="expected the prepared module in a wrapper; got another Linear"):
        loop.model = linear()
    torch.compiler.reset()


def refused(match: str, *args: Any, error: type[Exception] = pl.ArgumentError, **kwargs: Any) -> None:
    with pytest.raises(error, match=match):
        prepare(*args, **kwargs)


def test_arguments_are_checked() -> None:
    model = linear()
    optimizer = sgd(model)
    refused("expected a torch.nn.Module; got int", 3, optimizer)
    refused("runs its hooks in this process; got DataParallel", nn.DataParallel(model), optimizer)
    refused("expected a torch.optim.Optimizer or a list of them; got str", model, "sgd")
    refused("expected an optimizer, or a list of them; got none", model, [])
    refused(r"got one with 2 others, the first of shape \(1, 8\)", model, sgd(linear()))
    refused("expected each parameter in one optimizer; got 2 in two", model, [optimizer, sgd(model)])
    refused("got LBFGS, which evaluates the loss several times", model, torch.optim.LBFGS(model.parameters()))
    refused("above 0, or None; got clip_norm=0", model, optimizer, clip_norm=0)
    refused("above 0, or None; got clip_norm=nan", model, optimizer, clip_norm=math.nan)
    refused("accumulate to be an integer of at least 1; got accumulate=0", model, optimizer, accumulate=0)
    refused("accumulate to be an integer of at least 1; got accumulate=True", model, optimizer, accumulate=True)
    refused("max_retries to be an integer of at least 0; got max_retries=-1", model, optimizer, max_retries=-1)
    refused("GradScaler's interface; got float", model, optimizer, scaler=2.0)
    refused("expected a Policy; got policy='fp16'", model, optimizer, policy="fp16")
    refused(
        "can lower its scale; got a StaticScaler",
        model,
        optimizer,
        scaler=StaticScaler(2.0, device="cpu"),
        max_retries=1,
    )
    refused(
        "max_retries=1 at bf16-master, where no scale can be lowered", model, optimizer, "bf16-master", max_retries=1
    )
    refused("takes FP16 gradients at fp16-pure", model, optimizer, "fp16-pure", scaler=torch.amp.GradScaler("cpu"))
    scheduler = torch.optim.lr_scheduler.StepLR(sgd(model), 1)
    refused("got a StepLR of another", model, optimizer, schedulers=[scheduler])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    refused("schedulers that step without a metric; got ReduceLROnPlateau", model, optimizer, schedulers=plateau)
    refused("expected learning-rate schedulers; got int", model, optimizer, schedulers=[3])
    half = copy.deepcopy(model).bfloat16()
    refused("got MasterWeights, which a level makes", half, pl.precision.MasterWeights(sgd(half)), "bf16-master")
    assert not model._forward_pre_hooks


def test_a_model_is_prepared_once() -> None:
    model = net()
    loop = prepare(model, adamw(model), "fp32")
    refused("got a Net that is prepared already", model, adamw(model))
    loop.close()
    cast = prepare(model, adamw(model), "bf16-master")
    refused("got a Net that is prepared already. Use that loop, or close it", copy.deepcopy(model), adamw(model))
    cast.close()
    prepare(model, adamw(model), "fp32").close()


def test_the_order_of_calls_is_checked() -> None:
    model, batch = net(), batches(1)[0]
    loop = prepare(model, adamw(model), "fp32")
    loss = loss_of(model, batch)
    with pytest.raises(pl.errors.StateError, match="expected a forward since the last step; got none"):
        loop.step(loss)
    with pytest.raises(pl.ArgumentError, match="expected a loss, or a closure that returns one; got float"):
        loop.step(0.5)
    with loop.forward():
        loss = loss_of(model, batch)
        with pytest.raises(pl.errors.StateError, match="expected the context of forward to have ended"):
            loop.step(loss)
        with (
            pytest.raises(pl.errors.StateError, match="evaluate: expected no context.*inside forward"),
            loop.evaluate(),
        ):
            pass
    with pytest.raises(pl.ArgumentError, match=r"a loss of one value; got torch.float32 of shape \(2,\)"):
        loop.step(loss.expand(2))
    with pytest.raises(pl.ArgumentError, match="a loss that requires gradients"):
        loop.step(loss.detach())
    loop.step(loss)
    with pytest.raises(pl.errors.StateError, match="got none"):
        loop.step(loss)
    with pytest.raises(pl.ArgumentError, match="a closure that returns the loss; got one that returns NoneType"):
        loop.step(lambda: None)
    loop.close()
    with pytest.raises(pl.errors.StateError, match="forward: expected an open loop"), loop.forward():
        pass
    with pytest.raises(pl.errors.StateError, match="step: expected an open loop"):
        loop.step(lambda: loss)


def test_a_forward_that_raises_leaves_the_loop_usable() -> None:
    model = net()
    loop = prepare(model, adamw(model), "amp-bf16")
    with pytest.raises(ZeroDivisionError), loop.forward():
        raise ZeroDivisionError
    assert run(loop, batches(1))


def test_it_is_a_context_that_closes() -> None:
    model = net()
    with prepare(model, adamw(model), "bf16-master") as loop:
        run(loop, batches(1))
        assert repr(loop) == "<Loop: Net at bf16-master, step 1>"
    assert loop.closed and repr(loop) == "<Loop: Net at bf16-master, closed>"
    assert model.head.weight.dtype == torch.float32


def test_the_loop_clears_gradients_and_forgets_micro_batches() -> None:
    model = net()
    loop = prepare(model, adamw(model), "fp32", accumulate=2)
    run(loop, batches(1))
    assert model.head.weight.grad is not None
    loop.zero_grad()
    assert model.head.weight.grad is None
    assert [o.stepped for o in run_closures(loop, batches(2))] == [False, True]
    assert all(p.grad is None for p in model.parameters())


def test_custom_scalers_keep_their_settings() -> None:
    model = net()
    scaler = DynamicScaler("cpu", init_scale=4.0)
    loop = prepare(model, adamw(model), "fp16-master", scaler=scaler)
    assert run_closures(loop, batches(1))[0].scale == 4.0


def test_a_closure_that_raises_is_not_among_those_that_are_repeated() -> None:
    model = net()
    loop = prepare(model, adamw(model), "fp16-master", max_retries=2)
    with pytest.raises(pl.errors.ArgumentError):
        loop.step(lambda: None)  # type: ignore[arg-type,return-value]
    assert [o.stepped for o in run_closures(loop, batches(2))] == [True, True]


def test_a_step_that_fails_leaves_no_micro_batch_behind() -> None:
    model = net()
    loop = prepare(model, adamw(model), "amp-fp16")
    with pytest.raises(pl.errors.StateError):
        loop.step(lambda: torch.ones((), requires_grad=True) * 1.0)  # reaches no parameter
    assert loop.state_dict()["step"] == 0
    run_closures(loop, batches(1))
    assert loop.state_dict()["step"] == 1


class Breaking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ZeroDivisionError


@each("closure", [False, True])
@each("retries", [0, 2])
def test_a_backward_that_raises_leaves_no_part_of_its_gradients(closure: bool, retries: int) -> None:
    if retries and not closure:
        return
    model = net()
    loop = prepare(model, adamw(model), "amp-fp16", accumulate=2, max_retries=retries)
    run_closures(loop, batches(1))

    def broken() -> Tensor:
        return model.head(Breaking.apply(model.embed(torch.ones(2, 8)))).sum()  # the head's gradients come first

    loss: Any = broken
    if not closure:
        with loop.forward():
            loss = broken()
    with pytest.raises(ZeroDivisionError):
        loop.step(loss)
    assert all(p.grad is None for p in model.parameters())
    assert [o.stepped for o in run_closures(loop, batches(2))] == [False, True]


def test_a_scheduler_that_raises_comes_after_a_step_that_is_done() -> None:
    model = net()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=1)
    loop = prepare(model, optimizer, "fp32", schedulers=schedule)
    run(loop, batches(1))
    for done in (2, 3):  # the schedule is at its end
        with pytest.raises(ValueError, match="Tried to step"):
            run(loop, batches(1))
        assert loop.step_index == done and all(p.grad is None for p in model.parameters())


def test_the_norm_of_complex_gradients_is_that_of_their_parts() -> None:
    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.tensor([3.0 + 4.0j]))

        def forward(self, x: Tensor) -> Tensor:
            return (self.turn * x).real

    model = Rotated()
    loop = prepare(model, sgd(model), "fp32", clip_norm=math.inf)
    with loop.forward():
        loss = model(torch.tensor([1.0 - 2.0j])).sum()
    assert loop.step(loss).grad_norm == pytest.approx(math.sqrt(5.0))


def test_a_scaler_that_is_given_by_its_name_goes_with_the_loop() -> None:
    model = net()
    with pytest.raises(pl.errors.ArgumentError, match="expected learning-rate schedulers"):
        prepare(model, adamw(model), "amp-fp16", scaler="layer", schedulers=[3])
    with pytest.raises(pl.errors.ArgumentError, match="expected no scaler at fp8-unit|unit-scaled"):
        prepare(model, adamw(model), "fp8-unit", scaler="layer")
    for _ in range(2):
        loop = prepare(model, adamw(model), "amp-fp16", scaler="layer")
        run(loop, batches(1))
        loop.close()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_a_wrapper_that_cannot_be_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    loop = prepare(model, adamw(model), "fp32")

    def refuse() -> None:
        raise pl.errors.ArgumentError("not this one")

    monkeypatch.setattr(loop, "_check_stages", refuse)
    with pytest.raises(pl.errors.ArgumentError, match="not this one"):
        loop.model = torch.compile(model)
    assert loop.model is model
