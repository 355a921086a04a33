"""Where a step ends, what is recorded of a skipped one, and which steps are recorded at all."""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import plimsoll as pl
from tests.support.watch.recording import batches, mlp, only_run, same, train


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_is_recorded(fused: bool, tmp_path: Path) -> None:
    model, data = mlp(), batches(4, 4, 8)
    data[2][0, 0] = math.inf
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        expected = []
        for x in data:
            expected += train(model, optimizer, [x], scaler)
            if x is data[1]:
                twin, weights = copy.deepcopy(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    run = only_run(tmp_path / "run")
    assert list(run.steps) == [0, 1, 2, 3]
    assert run.spectrum("gradients", "0.weight", 2).nonfinite > 0
    assert same(run.spectrum("weights", "0.weight", 2), weights["0.weight"])
    assert [event.step for event in run.events() if event.kind == "skip"] == [2]
    assert list(run.scalars("scale")[1]) == [256.0, 256.0, 256.0, 128.0]
    twin.zero_grad()
    twin(data[3]).square().mean().backward()  # the skip left the weights: step 3 is that of the twin
    assert same(run.spectrum("gradients", "0.weight", 3), twin[0].weight.grad)
    losses = run.scalars("loss")[1]
    assert [repr(float(loss)) for loss in losses] == [repr(loss) for loss in expected]
    nonfinite = run.scalars("nonfinite")[1]
    assert nonfinite[1] == 0 and nonfinite[2] == sum(
        run.spectrum("gradients", name, 2).nonfinite for name in run.tensors["gradients"]
    )
    if not fused:
        assert 2 not in [step for step, *_ in run.spectra("updates")]


def test_steps_that_a_script_takes_or_skips_by_hand_have_the_scale(tmp_path: Path) -> None:
    model, data = mlp(), batches(4, 4, 8)
    data[2][0, 0] = math.inf
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.125) for m in (model, twin))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        for x in data:
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            if model[0].weight.grad.isfinite().all():
                optimizer.step()
            scaler.update()
    with pl.watch(twin, other, run=tmp_path / "plain", every=1):
        train(twin, other, [data[0], data[1]])
    run, plain = only_run(tmp_path / "run"), only_run(tmp_path / "plain")
    assert list(run.scalars("scale")[1]) == [256.0, 256.0, 256.0, 128.0]
    assert [event.step for event in run.events() if event.kind == "skip"] == [2]
    for step in range(2):
        ours, theirs = (each.spectrum("activation_gradients", "0:output", step) for each in (run, plain))
        assert ours.absmax == theirs.absmax


def test_a_loss_that_is_scaled_twice_is_recorded_without_both_scales(tmp_path: Path) -> None:
    model, data = mlp(), batches(3, 4, 8)
    optimizer = torch.optim.Adam(model.parameters())
    scaler, expected = torch.amp.GradScaler("cpu", init_scale=16.0), list[float]()
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        for x in data:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            expected.append(float(loss.detach()))
            scaler.scale(scaler.scale(loss)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert only_run(tmp_path / "run").scalars("loss")[1].tolist() == expected


def test_gradients_and_activation_gradients_have_their_true_magnitude(tmp_path: Path) -> None:
    model, data = mlp(), batches(2, 4, 8)
    twin = copy.deepcopy(model)
    hidden: list[torch.Tensor] = []
    twin[0].register_forward_hook(lambda *a: (a[2].retain_grad(), hidden.append(a[2]))[0])
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.125) for m in (model, twin))
    train(twin, other, data)
    for fused in (False, True):
        again = copy.deepcopy(model)
        optimizer = torch.optim.SGD(again.parameters(), lr=0.125, fused=fused)
        with pl.watch(again, optimizer, run=tmp_path / f"run{fused}", every=1):
            train(again, optimizer, data, torch.amp.GradScaler("cpu", init_scale=1024.0))
        run = only_run(tmp_path / f"run{fused}")
        assert same(run.spectrum("gradients", "0.weight", 0), twin_gradient(twin, model, data[0]))
        found = run.spectrum("activation_gradients", "0:output", 0)
        assert hidden[0].grad is not None and same(found, hidden[0].grad)
        assert found.source is not None and found.source.scale == 1024.0


def twin_gradient(twin: nn.Module, start: nn.Module, x: torch.Tensor) -> torch.Tensor:
    fresh = copy.deepcopy(start)
    fresh(x).square().mean().backward()
    return fresh[0].weight.grad


def test_unscaling_and_clipping_by_hand(tmp_path: Path) -> None:
    model, (x,) = mlp(), batches(1, 4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        given = model[0].weight.grad.clone()
        scaler.step(optimizer)
        scaler.update()
    run = only_run(tmp_path / "run")
    assert same(run.spectrum("gradients", "0.weight", 0), given)


def test_two_optimizers_of_one_backward_are_one_step(tmp_path: Path) -> None:
    model = mlp()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters())]
    with pl.watch(model, optimizers, run=tmp_path / "run", every=1) as w:
        for x in batches(3, 4, 8):
            model.zero_grad()
            model(x).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        assert w.step_index == 2  # which ends when the next one begins, or with the watch
    run = only_run(tmp_path / "run")
    assert list(run.steps) == [0, 1, 2]
    assert {name.split(".")[0] for name in run.tensors["optimizer"]} == {"2"}
    assert len(run.tensors["updates"]) == 4


def test_the_schedule(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collect = {"weights": 4, "gradients": 2, "activations": 3}
    with pl.watch(model, optimizer, run=tmp_path / "run", collect=collect, warmup=2) as w:
        for index, x in enumerate(batches(10, 4, 8)):
            if index == 7:
                w.request()
            train(model, optimizer, [x])
    run = only_run(tmp_path / "run")
    steps = {c: sorted({step for step, *_ in run.spectra(c)}) for c in collect}
    assert steps == {"weights": [0, 1, 4, 7, 8], "gradients": [0, 1, 2, 4, 6, 7, 8], "activations": [0, 1, 3, 6, 7, 9]}


def test_numbers_of_ones_own(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=10) as w:
        for index, x in enumerate(batches(3, 4, 8)):
            train(model, optimizer, [x])
            w.log(accuracy=index / 2, norm=torch.tensor(float(index)))
        with pytest.raises(pl.ArgumentError, match=r"Watch.log: expected numbers.*got norm=tensor"):
            w.log(norm=torch.ones(3))
        with pytest.raises(pl.ArgumentError, match=r"got text='good'"):
            w.log(text="good")
        with pytest.raises(pl.ArgumentError, match=r"expected each name once; got accuracy twice"):
            w.log({"accuracy": 1.0, "val/loss": 1.0}, accuracy=1.0)
        for wrong in ([("a", 1.0)], {1: 1.0}, 0.5):
            with pytest.raises(pl.ArgumentError, match=r"expected a mapping of names to numbers; got"):
                w.log(wrong)
        w.log({"val/loss": torch.tensor(0.25), "named": 2}, alone=3)
        w.log({})
    run = only_run(tmp_path / "run")
    steps, values = run.scalars("accuracy")
    assert list(steps) == [0, 1, 2] and list(values) == [0.0, 0.5, 1.0]
    assert list(run.scalars("norm")[1]) == [0.0, 1.0, 2.0]
    logged = {name: run.scalars(name)[1].tolist() for name in ("val/loss", "named", "alone")}
    assert logged == {"val/loss": [0.25], "named": [2.0], "alone": [3.0]}


def test_the_loss_of_every_step_is_recorded(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=50):
        losses = train(model, optimizer, batches(120, 4, 8))
    steps, values = only_run(tmp_path / "run").scalars("loss")
    assert list(steps) == list(range(120)) and list(values) == losses


def test_each_of_two_models_has_its_own_losses(tmp_path: Path) -> None:
    generator, critic = nn.Linear(4, 8), nn.Linear(8, 1)
    for_generator, for_critic = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, critic))
    with (
        pl.watch(generator, for_generator, run=tmp_path / "g", every=1),
        pl.watch(critic, for_critic, run=tmp_path / "c", every=1),
    ):
        losses = []
        for z, x in zip(batches(3, 2, 4), batches(3, 2, 8), strict=True):
            for_critic.zero_grad()
            loss = critic(x).mean()
            loss.backward()
            for_critic.step()
            losses.append(loss.item())
            for_generator.zero_grad()
            generator(z).mean().backward()
            for_generator.step()
    assert list(only_run(tmp_path / "c").scalars("loss")[1]) == losses
    assert list(only_run(tmp_path / "g").steps) == [0, 1, 2]


def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for options in ({}, {}, {"start_step": 4}):
        with pl.watch(model, optimizer, run=tmp_path / "run", every=1, collect=("weights",), **options):
            train(model, optimizer, batches(3, 4, 8))
    run = only_run(tmp_path / "run")
    assert list(run.steps) == [0, 1, 2, 3, 4, 5, 6]
    assert same(run.spectrum("weights", "0.weight", 6), model[0].weight) is False  # of before the last update
    assert list(run.scalars("loss")[0]) == list(range(7))


def assigned(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad = torch.randn_like(p)


def emptied_and_assigned(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The new gradients may lie where the old ones lay."""
    optimizer.zero_grad()
    assigned(model, optimizer)


def written(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad.normal_()


@pytest.mark.filterwarnings("ignore:.*no watched backward:RuntimeWarning")
@pytest.mark.parametrize("gradients", [assigned, emptied_and_assigned, written])
def test_each_step_on_gradients_that_the_script_makes_without_a_backward_counts(
    gradients: Callable[[nn.Module, torch.optim.Optimizer], None], tmp_path: Path
) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=2):
        for x in batches(9, 4, 8):
            with torch.no_grad():
                model(x)
                gradients(model, optimizer)
            expected = model[0].weight.grad.clone()
            optimizer.step()
    run = only_run(tmp_path / "run")
    assert list(run.steps) == [0, 2, 4, 6, 8]
    assert same(run.spectrum("gradients", "0.weight", 8), expected)


def test_a_second_step_on_the_same_gradients_is_part_of_the_first(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        for x in batches(4, 4, 8):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            for _ in range(3):
                optimizer.step()
    assert list(only_run(tmp_path / "run").steps) == [0, 1, 2, 3]
