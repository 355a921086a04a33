"""A model's losses, gradients and alarms are its own where a script trains several models, or fails in a backward."""

import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plimsoll as pl
from plimsoll.runs import Run
from tests.support.watch.recording import batches, only_run

STEPS = 6
Losses = dict[str, list[float]]


def models() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    first, second = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
    return first, second


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


class Failing(torch.autograd.Function):
    """The identity, whose backward raises where it is to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise ArithmeticError("in the middle of a backward")
        return grads[0], None


def halfway(model: nn.Sequential, x: Tensor, *, fails: bool) -> Tensor:
    """The loss of a model whose backward may fail when the last layer has its gradients, and the first has none."""
    return model[2](Failing.apply(model[1](model[0](x)), fails)).square().mean()


# Each trains two models with an optimizer each, and returns the losses that it steps on.
Loop = Callable[[nn.Sequential, nn.Sequential, torch.optim.Optimizer, torch.optim.Optimizer], Losses]


def interleaved(a: nn.Sequential, b: nn.Sequential, of_a: Any, of_b: Any) -> Losses:
    """Both forwards, the other's backward, both steps."""
    printed: Losses = {"a": [], "b": []}
    for x in batches(STEPS, 4, 8):
        of_a.zero_grad()
        of_b.zero_grad()
        mine, other = a(x).square().mean(), b(x).abs().mean()
        other.backward()
        mine.backward()
        of_a.step()
        of_b.step()
        printed["a"].append(mine.item())
        printed["b"].append(other.item())
    return printed


def through(a: nn.Sequential, b: nn.Sequential, of_a: Any, of_b: Any) -> Losses:
    """A generator and its critic, whose gradients of the generator's loss are dropped; with a penalty."""
    printed: Losses = {"a": [], "b": []}
    for x in batches(STEPS, 4, 8):
        seen = x.clone().requires_grad_()
        of_b.zero_grad()
        score = b(seen)
        (slope,) = torch.autograd.grad(score.sum(), seen, create_graph=True)
        critic = score.mean() - b(a(x)).mean() + (slope.norm(dim=1) - 1).square().mean()
        critic.backward()
        of_b.step()
        of_a.zero_grad()
        generator = -b(a(x)).mean()
        generator.backward()
        of_a.step()
        printed["a"].append(generator.item())
        printed["b"].append(critic.item())
    return printed


def shared_graph(a: nn.Sequential, b: nn.Sequential, of_a: Any, of_b: Any) -> Losses:
    """Two backwards through one graph: the first is both models' loss, the second is one's."""
    printed: Losses = {"a": [], "b": []}
    for x in batches(STEPS, 4, 8):
        of_a.zero_grad()
        of_b.zero_grad()
        inner = a(x)
        both, mine = b(inner).square().mean(), inner.square().mean()
        both.backward(retain_graph=True)
        mine.backward()
        of_a.step()
        of_b.step()
        printed["a"].append(both.item() + mine.item())
        printed["b"].append(both.item())
    return printed


def accumulated(a: nn.Sequential, b: nn.Sequential, of_a: Any, of_b: Any) -> Losses:
    """One takes a step for every three of the other, and sets its gradients to zero in place."""
    printed: Losses = {"a": [], "b": []}
    part = 0.0
    for index, x in enumerate(batches(3 * STEPS, 4, 8)):
        mine = a(x).square().mean() / 3
        mine.backward()
        part += mine.item()
        if index % 3 == 2:
            of_a.step()
            of_a.zero_grad(set_to_none=False)
            printed["a"].append(part)
            part = 0.0
        of_b.zero_grad()
        other = b(x).abs().mean()
        other.backward()
        of_b.step()
        printed["b"].append(other.item())
    return printed


def recomputed(a: nn.Sequential, b: nn.Sequential, of_a: Any, of_b: Any) -> Losses:
    """Whole models in re-entrant checkpoints, whose graph shows no parameter."""
    printed: Losses = {"a": [], "b": []}
    for x in batches(STEPS, 4, 8):
        of_a.zero_grad()
        of_b.zero_grad()
        inputs = x.clone().requires_grad_()
        mine, other = (checkpoint(m, inputs, use_reentrant=True).square().mean() for m in (a, b))
        mine.backward()
        other.backward()
        of_a.step()
        of_b.step()
        printed["a"].append(mine.item())
        printed["b"].append(other.item())
    return printed


def failing(a: nn.Sequential, b: nn.Sequential, of_a: Any, of_b: Any) -> Losses:
    """Some backwards of one model raise, and its step is left out."""
    printed: Losses = {"a": [], "b": []}
    for index, x in enumerate(batches(STEPS, 4, 8)):
        of_a.zero_grad()
        of_b.zero_grad()
        mine, other = a(x).square().mean(), halfway(b, x, fails=index % 3 == 1)
        if index % 3 == 1:
            with pytest.raises(ArithmeticError, match="in the middle of a backward"):
                other.backward()
        else:
            other.backward()
            of_b.step()
            printed["b"].append(other.item())
        mine.backward()
        of_a.step()
        printed["a"].append(mine.item())
    return printed


def failing_and_stepping(a: nn.Sequential, b: nn.Sequential, of_a: Any, of_b: Any) -> Losses:
    """The second micro-batch's backward raises, and the step is made with the first one's gradients and the rest."""
    printed: Losses = {"a": [], "b": []}
    for index, x in enumerate(batches(STEPS, 4, 8)):
        of_a.zero_grad()
        first = a(x).square().mean()
        first.backward()
        second = halfway(a, x, fails=index > 0)
        with pytest.raises(ArithmeticError, match="in the middle of a backward") if index else nullcontext():
            second.backward()
        second = second * (index == 0)
        of_a.step()
        printed["a"].append(first.item() + second.item())
    of_b.zero_grad()
    return printed


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    "loop", [interleaved, through, shared_graph, accumulated, recomputed, failing, failing_and_stepping]
)
def test_each_model_has_the_losses_that_its_optimizer_steps_on(loop: Loop, given: bool, tmp_path: Path) -> None:
    twins, pair = models(), models()
    optimizers = [sgd(model) for model in pair]
    with ExitStack() as stack:
        for name, model, optimizer in zip("ab", pair, optimizers, strict=True):
            stack.enter_context(pl.watch(model, optimizer if given else None, run=tmp_path / name, every=2))
        printed = loop(*pair, *optimizers)
    assert printed == loop(*twins, *(sgd(model) for model in twins))
    for model, twin in zip(pair, twins, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    for name in "ab":
        run = only_run(tmp_path / name)
        found = run.scalars("loss")[1].tolist() if "loss" in run.scalar_names else []
        assert found == pytest.approx(printed[name], rel=1e-6)
        assert not [event for event in run.events() if event.kind == "failure"]


def test_a_loss_that_no_backward_shows_is_not_an_unwatched_models(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = models()
    optimizer = sgd(model)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=2):
        for x in batches(STEPS, 4, 8):
            other(x).square().mean().backward()
            loss = model(x).square().mean()
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
                p.grad = g
            optimizer.step()
    run = only_run(tmp_path / "run")
    assert "loss" not in run.scalar_names and caplog.text.count("its loss is not recorded") == 1
    assert not [event for event in run.events() if event.kind == "wiring"]  # nor are gradients added to others


class Spied(nn.Parameter):
    """A parameter that notes which threads ask for its gradient."""

    readers: ClassVar[set[int]] = set()

    @property
    def grad(self) -> Tensor | None:
        self.readers.add(threading.get_ident())
        return torch.Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, value)


def test_another_threads_training_reads_no_gradient_of_the_model(tmp_path: Path) -> None:
    """A gradient that its backward is writing at that moment: who reads it may crash."""
    model, other = models()
    for layer in (model[0], model[2]):
        layer.weight = Spied(layer.weight.detach())
    optimizer = sgd(model)

    def train_other() -> None:
        of_other = sgd(other)
        for x in batches(STEPS, 4, 8):
            of_other.zero_grad()
            (other(x).square().mean() * float("nan")).backward()
            of_other.step()
            fails = halfway(other, x, fails=True)
            with pytest.raises(ArithmeticError):
                fails.backward()

    def train_model() -> list[float]:
        printed = []
        for x in batches(STEPS, 4, 8):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
        return printed

    with pl.watch(model, run=tmp_path / "run", every=2):
        printed = train_model()
        Spied.readers.clear()
        thread = threading.Thread(target=train_other)
        thread.start()
        thread.join()
        assert not Spied.readers
        printed += train_model()
    run = only_run(tmp_path / "run")
    assert run.scalars("loss")[1].tolist() == printed
    assert not [event for event in run.events() if event.kind in ("origin", "trigger", "failure")]


def test_a_model_goes_on_in_another_thread(tmp_path: Path) -> None:
    model, other = models()
    optimizer, of_other = sgd(model), sgd(other)
    printed: list[float] = []

    def fit() -> None:
        for x in batches(STEPS, 4, 8):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            printed.append(loss.item())

    with pl.watch(model, run=tmp_path / "run", every=2):
        fit()
        thread = threading.Thread(target=fit)
        thread.start()
        thread.join()
        other(torch.ones(2, 8)).sum().backward()
        of_other.step()
        fit()
    assert only_run(tmp_path / "run").scalars("loss")[1].tolist() == printed


@pytest.mark.parametrize("where", ["beside", "unwatched", "through"])
def test_a_neighbours_nan_is_no_alarm_of_the_model(where: str, tmp_path: Path) -> None:
    """Through the model it passes in a step that is not sampled: a sample would show what the model itself has seen."""
    neighbour, model = models()
    of_neighbour, optimizer = sgd(neighbour), sgd(model)
    with ExitStack() as stack:
        stack.enter_context(pl.watch(model, optimizer, run=tmp_path / "model", every=3))
        if where != "unwatched":
            stack.enter_context(pl.watch(neighbour, of_neighbour, run=tmp_path / "neighbour", every=3))
        for index, x in enumerate(batches(12, 4, 8)):
            broken = float("nan") if index == 7 else 1.0
            optimizer.zero_grad()
            mine = model(x)
            if where == "through":
                of_neighbour.zero_grad()
                (model(neighbour(x)).mean() * broken).backward()
                if index != 7:
                    of_neighbour.step()
                optimizer.zero_grad()
            else:
                of_neighbour.zero_grad()
                (neighbour(x).mean() * broken).backward()
                of_neighbour.step()
            mine.square().mean().backward()
            optimizer.step()
    assert not alarms(Run(tmp_path / "model"))
    if where == "beside":
        assert alarms(Run(tmp_path / "neighbour"))


def alarms(run: Run) -> list[str]:
    return [f"{found.rule}: {found.meaning}" for found in pl.diagnose(run) if found.severity == "alarm"]


def test_a_loss_through_another_model_that_its_own_optimizer_steps_on_is_traced(tmp_path: Path) -> None:
    first, model = models()
    with pl.watch(model, run=tmp_path / "run", every=100):
        optimizer = torch.optim.SGD([*first.parameters(), *model.parameters()], lr=0.05)
        for index, x in enumerate(batches(5, 4, 8)):
            optimizer.zero_grad()
            model(first(x) * (float("inf") if index == 3 else 1.0)).square().mean().backward()
            optimizer.step()
    (found, *_) = [event for event in only_run(tmp_path / "run").events() if event.kind == "origin"]
    assert found.step == 3 and found.details["where"] == "input"
