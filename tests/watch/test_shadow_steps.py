"""Shadow steps of every kind of step: micro-batches, closures, skips, the schedule."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from tests.support.watch.recording import batches, only_run, train
from tests.support.watch.shadow import (
    counted_steps,
    counts,
    found,
    gradients_of,
    halves,
    messages,
    shadowed,
    spread,
    tapped,
    wide,
)


def test_micro_batches_are_added_up(tmp_path: Path) -> None:
    model, data = halves(), batches(2, 8, 8)
    start = copy.deepcopy(model)
    losses = [lambda m, x=x: spread(m(x)) for x in data]
    real, shadow = gradients_of(copy.deepcopy(model), losses), gradients_of(wide(model), losses)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", shadow_every=1):
        for loss in losses:
            loss(model).backward()
        optimizer.step()
    run = only_run(tmp_path / "run")
    for name in real:
        assert found(run, "gradients", name) == counts(real[name], shadow[name])
    for collection, place in (("activations", 0), ("activation_gradients", 1)):
        each = [counts(*(tapped(make(start), loss)["1"][place] for make in (copy.deepcopy, wide))) for loss in losses]
        assert found(run, collection, "1:output") == tuple(map(sum, zip(*each, strict=True)))


def test_two_forwards_of_one_backward_and_two_backwards_of_one_forward(tmp_path: Path) -> None:
    model, (x, y) = halves(), batches(2, 8, 8)

    def both(m: nn.Module) -> Tensor:
        return spread(m(x)) + spread(m(y))

    real, shadow = gradients_of(copy.deepcopy(model), [both]), gradients_of(wide(model), [both])
    run = shadowed(copy.deepcopy(model), tmp_path / "a", both)
    for name in real:
        assert found(run, "gradients", name) == counts(real[name], shadow[name])
    assert counted_steps(run, "activations")["1:output"] == [0]

    def twice(m: nn.Module) -> Tensor:
        out = m(x)
        spread(out).backward(retain_graph=True)
        return spread(out) * 3

    real, shadow = gradients_of(copy.deepcopy(model), [twice]), gradients_of(wide(model), [twice])
    run = shadowed(model, tmp_path / "b", twice)
    for name in real:
        assert found(run, "gradients", name) == counts(real[name], shadow[name])
    assert found(run, "activations", "1:output")[1] > 0


def test_a_step_that_the_scaler_skips(tmp_path: Path) -> None:
    model, (x,) = halves(), batches(1, 8, 8)
    oracle, plain = wide(model), copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)

    def loss(m: nn.Module) -> Tensor:
        return spread(m(x)) * torch.where(torch.arange(2) == 0, 1.0, 1e9)  # the second column overflows

    with pl.watch(model, optimizer, run=tmp_path / "run", shadow_every=1):
        scaler.scale(loss(model).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    real = gradients_of(plain, [lambda m: loss(m).sum() * 2.0**24])
    shadow = gradients_of(oracle, [lambda m: loss(m).sum() * 2.0**24])
    run = only_run(tmp_path / "run")
    assert [event.step for event in run.events() if event.kind == "skip"] == [0]
    for name in real:
        assert found(run, "gradients", name) == counts(real[name], shadow[name])
    assert found(run, "gradients", "2.weight")[1] > 0


def test_an_optimizer_with_a_closure(tmp_path: Path) -> None:
    model, (x,) = halves(), batches(1, 8, 8)
    start = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = spread(model(x))
        loss.backward()
        return loss.item()

    with pl.watch(model, optimizer, run=tmp_path / "run", shadow_every=2):
        for _ in range(3):
            optimizer.step(closure)
    run = only_run(tmp_path / "run")
    assert not messages(run)
    real = gradients_of(copy.deepcopy(start), [lambda m: spread(m(x))])
    shadow = gradients_of(wide(start), [lambda m: spread(m(x))])
    for name in real:
        assert found(run, "gradients", name) == counts(real[name], shadow[name])
    assert counted_steps(run, "gradients") == {name: [0, 2] for name in real}


def test_a_closure_that_is_called_twice_counts_for_its_last_time(tmp_path: Path) -> None:
    model, (x,) = halves(), batches(1, 2, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e6, max_iter=2, tolerance_grad=0.0, tolerance_change=0.0)
    states: list[nn.Module] = []

    def closure() -> float:
        states.append(copy.deepcopy(model))
        optimizer.zero_grad()
        loss = spread(model(x))
        loss.backward()
        return loss.item()

    with pl.watch(model, optimizer, run=tmp_path / "run", shadow_every=1):
        optimizer.step(closure)
    run = only_run(tmp_path / "run")
    pairs = []
    for start in states:
        real = gradients_of(copy.deepcopy(start), [lambda m: spread(m(x))])
        pairs.append((real, gradients_of(wide(start), [lambda m: spread(m(x))])))
    for name in pairs[1][0]:
        assert found(run, "gradients", name) == counts(pairs[1][0][name], pairs[1][1][name])
    summed = pairs[0][1]["0.weight"] + pairs[1][1]["0.weight"]
    assert len(states) == 2 and counts(pairs[1][0]["0.weight"], summed) != found(run, "gradients", "0.weight")


def test_a_series_that_was_compared_in_part_only_is_left_out(tmp_path: Path) -> None:
    model, (x, y) = halves(), batches(2, 8, 8)

    def loss(m: nn.Module) -> Tensor:
        m(x)  # a forward that nothing uses
        return spread(m(y))

    real, shadow = gradients_of(copy.deepcopy(model), [loss]), gradients_of(wide(model), [loss])
    run = shadowed(model, tmp_path / "run", loss)
    assert not messages(run) and not counted_steps(run, "activations")
    assert found(run, "gradients", "0.weight") == counts(real["0.weight"], shadow["0.weight"])
    assert counted_steps(run, "activation_gradients")["1:output"] == [0]


def test_torch_autograd_grad_in_the_loop(tmp_path: Path) -> None:
    model, (x,) = halves(), batches(1, 8, 8)
    real = gradients_of(copy.deepcopy(model), [lambda m: spread(m(x))])
    shadow = gradients_of(wide(model), [lambda m: spread(m(x))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", shadow_every=1) as w:
        params = list(model.parameters())
        for p, g in zip(params, torch.autograd.grad(spread(model(x)), params), strict=True):
            p.grad = g
        w.request()
        optimizer.step()
    run = only_run(tmp_path / "run")
    for name in real:
        assert found(run, "gradients", name) == counts(real[name], shadow[name])


def test_the_schedule_and_what_is_due(tmp_path: Path) -> None:
    model = halves()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collect = {"gradients": 2, "activations": 100, "weights": 100}
    with pl.watch(model, optimizer, run=tmp_path / "run", collect=collect, shadow_every=3):
        train(model, optimizer, batches(8, 4, 8))
    run = only_run(tmp_path / "run")
    steps = {c: sorted({step for step, *_ in run.spectra(c)}) for c in collect}
    assert steps == {"gradients": [0, 2, 3, 4, 6], "activations": [0, 3, 6], "weights": [0]}
    assert counted_steps(run, "gradients")["0.weight"] == counted_steps(run, "activations")["1:output"] == [0, 3, 6]
    assert "activation_gradients" not in run.tensors


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = halves()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def compiled(model: nn.Module, how: str, runs: list[str]) -> Callable[[Tensor], Tensor]:
    """The model compiled in one of several ways; `runs` grows whenever compiled code runs."""

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        return lambda *args: (runs.append("ran"), graph.forward(*args))[1]

    if how == "in place":
        model.compile(backend=backend)
    elif how == "a part":
        model[0].forward = torch.compile(model[0].forward, backend=backend)
    return torch.compile(model, backend=backend, fullgraph=True) if "function" in how else model


@pytest.mark.parametrize("how", ["function", "function, hooks outside", "in place", "a part"])
def test_compiled_models_are_repeated_eagerly(how: str, tmp_path: Path) -> None:
    model, data, runs = (
        Inner() if how in {"in place", "function, hooks outside"} else halves(),
        batches(3, 8, 8),
        list[str](),
    )
    plain = [copy.deepcopy(model) for _ in data]
    call, door = compiled(model, how, runs), torch._dynamo.eval_frame.OptimizedModule.__call__
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=10, shadow_every=2):
        for twin, x in zip(plain, data, strict=True):
            twin.load_state_dict(model.state_dict())
            optimizer.zero_grad()
            spread(call(x)).backward()
            optimizer.step()
    torch.compiler.reset()
    run = only_run(tmp_path / "run")
    assert not messages(run) and len(runs) == 3
    for step in (0, 2):
        loss = lambda m, x=data[step]: spread(m(x))  # noqa: E731
        real, shadow = gradients_of(copy.deepcopy(plain[step]), [loss]), gradients_of(wide(plain[step]), [loss])
        for name in real:
            assert found(run, "gradients", name, step) == counts(real[name], shadow[name]), (name, step)
    assert torch._dynamo.eval_frame.OptimizedModule.__call__ is door
