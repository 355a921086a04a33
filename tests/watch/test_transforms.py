"""Calls of a model inside `torch.func` transforms are passed over, and everything around them is recorded as ever."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn import functional

import plimsoll as pl
from plimsoll.runs import Run
from tests.support.watch.recording import batches, mlp as unseeded, only_run, same

STEPS = 3


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return unseeded()


def loss_of(out: Tensor) -> Tensor:
    return out.square().mean()


def per_sample(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    def loss(params: dict[str, Tensor], sample: Tensor) -> Tensor:
        return loss_of(functional_call(model, params, (sample[None],)))

    return vmap(grad(loss), in_dims=(None, 0))(dict(model.named_parameters()), x)


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    return loss_of(model(x)) + 0.1 * vmap(jacrev(lambda z: model(z[None])[0]))(x).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    for x in batches(STEPS, 4, 8):
        optimizer.zero_grad()
        loss(model, x).backward()
        optimizer.step()


def watched(path: Path, loss: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, **options: object) -> Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=path, every=1, **options):
        train(model, optimizer, loss)
    return only_run(path)


def failures(run: Run) -> list[str]:
    return [event.message for event in run.events() if event.kind == "failure"]


def left_out(run: Run) -> list[str]:
    return [event.message for event in run.events() if event.kind == "not measured"]


def with_monitor(model: nn.Module, x: Tensor) -> Tensor:
    per_sample(model, x)
    return loss_of(model(x))


def with_derivative(model: nn.Module, x: Tensor) -> Tensor:
    jvp(model, (x,), (torch.ones_like(x),))
    return loss_of(model(x))


def after_the_forward(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    per_sample(model, x)
    return loss_of(out)


@pytest.mark.parametrize("loss", [with_monitor, with_derivative, after_the_forward])
def test_a_monitor_changes_nothing_of_what_is_recorded(
    tmp_path: Path, loss: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    plain = watched(tmp_path / "plain", lambda model, x: loss_of(model(x)), mlp())
    run = watched(tmp_path / "run", loss, mlp())
    assert failures(run) == []
    (message,) = left_out(run)
    assert "torch.func transform" in message
    assert dict(run.tensors) == dict(plain.tensors)
    assert set(run.tensors) == {"weights", "gradients", "activations", "activation_gradients", "updates"}
    for collection, names in plain.tensors.items():
        for name in names:
            for step in range(STEPS):
                expected = plain.spectrum(collection, name, step)
                assert same(run.spectrum(collection, name, step), expected), (collection, name, step)
    assert run.scalars("loss")[1].tolist() == plain.scalars("loss")[1].tolist()


def test_a_penalty_on_derivatives_is_in_the_gradients_that_are_recorded(tmp_path: Path) -> None:
    model, expected = mlp(), list[dict[str, Tensor]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        for x in batches(STEPS, 4, 8):
            optimizer.zero_grad()
            penalised(model, x).backward()
            expected.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
    run = only_run(tmp_path / "run")
    assert failures(run) == []
    for step, gradients in enumerate(expected):
        for name, g in gradients.items():
            assert same(run.spectrum("gradients", name, step), g), (name, step)


@pytest.mark.filterwarnings("ignore:plimsoll.*its loss is not recorded")
@pytest.mark.parametrize("whole", [True, False], ids=["the model", "a part of it"])
def test_a_training_whose_gradients_are_set_by_hand(tmp_path: Path, whole: bool) -> None:
    model = mlp()
    part = model if whole else model[2]
    optimizer, expected = torch.optim.SGD(part.parameters(), lr=0.1), list[Tensor]()
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        for x in batches(STEPS, 4, 8):
            gradients = per_sample(part, x if whole else model[:2](x).detach())
            for name, p in part.named_parameters():
                p.grad = gradients[name].mean(0).detach()
            expected.append(model[2].weight.grad.clone())
            optimizer.step()
    run = only_run(tmp_path / "run")
    assert failures(run) == []
    assert list(run.steps) == list(range(STEPS))
    for step, g in enumerate(expected):
        assert same(run.spectrum("gradients", "2.weight", step), g)
    assert "loss" not in run.scalar_names and any("Watch.log(loss=...)" in e.message for e in run.events())


class Mapped(nn.Module):
    """Maps a part of itself over the batch, in the midst of its forward, and attends within that."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = nn.Linear(8, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = vmap(self.inner)(self.first(x))
        tokens = hidden[:, None].expand(-1, 3, -1)
        seen = vmap(lambda t: functional.scaled_dot_product_attention(t[None], t[None], t[None])[0])(tokens)
        return self.last(seen[:, 0])


@pytest.mark.parametrize("shadow_every", [None, 1])
def test_a_transform_inside_the_forward(tmp_path: Path, shadow_every: int | None) -> None:
    run = watched(tmp_path / "run", lambda model, x: loss_of(model(x)), Mapped(), shadow_every=shadow_every)
    assert failures(run) == [] and len(left_out(run)) == 1
    assert not [event for event in run.events() if event.kind == "shadow"]
    outputs = {name for name in run.tensors["activations"] if name.endswith("output")}
    assert outputs == {"first:output", "last:output", "model:output"}
    assert set(run.tensors["gradients"]) == {name for name, _ in Mapped().named_parameters()}


def test_a_shadow_step_is_not_taken_where_the_loss_may_have_derivatives(tmp_path: Path) -> None:
    run = watched(tmp_path / "run", penalised, mlp(), shadow_every=1)
    assert failures(run) == []
    messages = [event.message for event in run.events() if event.kind == "shadow"]
    assert len(messages) == STEPS and all("torch.func transform" in message for message in messages)


def test_a_compiled_transform_does_not_end_the_training(tmp_path: Path) -> None:
    model = mlp()
    slopes = torch.compile(vmap(jacrev(lambda z: model(z[None])[0])), backend="aot_eager")
    run = watched(
        tmp_path / "run", lambda model, x: loss_of(model(x)) + slopes(x).square().mean(), model, collect=["activations"]
    )
    assert failures(run) == [] and len(left_out(run)) == 1
    assert list(run.steps) == list(range(STEPS))
