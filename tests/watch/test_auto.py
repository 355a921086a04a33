"""What is trained is found at its first training step, whatever it is made of, and torch is left as it was."""

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

import plimsoll.watch
from plimsoll.runs import Run
from plimsoll.watch.model_finder import Finder, Found

CALL = nn.Module.__call__


class Session:
    """A finder that receives optimizers made in the test, and what it said."""

    def __init__(self, folder: Path, **arguments: object) -> None:
        self.folder = folder
        self.found: list[Found] = []
        self.said: list[str] = []
        arguments.setdefault("every", 1)
        self.finder = Finder(lambda: folder, arguments, on_found=self.found.append, say=self.said.append)

    def noted(self, optimizer: Optimizer) -> Optimizer:
        self.finder.note(optimizer)
        return optimizer

    def runs(self) -> dict[str, Run]:
        """The runs, by their folder's place; what they are of is gone by now, and so they are closed."""
        gc.collect()
        return {str(found.path.relative_to(self.folder.parent)): Run(found.path) for found in self.found}


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    yield Session(tmp_path / "run")
    gc.collect()
    assert nn.Module.__call__ is CALL


def mlp(*widths: int) -> nn.Sequential:
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*[layer for pair in pairs for layer in (nn.Linear(*pair), nn.ReLU())][:-1])


def sgd(*modules: nn.Module) -> Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)


def step(forward: Callable[[], torch.Tensor], *optimizers: Optimizer) -> None:
    forward().square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def test_the_first_training_call_is_recorded_whole_and_torch_is_as_it_was(session: Session) -> None:
    def train() -> None:
        model = mlp(4, 8, 2)
        optimizer = session.noted(sgd(model))
        assert nn.Module.__call__ is not CALL
        with torch.no_grad():
            model(torch.ones(1, 4))
        assert session.found == []
        for _ in range(3):
            step(lambda: model(torch.ones(3, 4)), optimizer)
            assert nn.Module.__call__ is CALL
        assert optimizer._optimizer_step_post_hooks == {}

    train()
    runs = session.runs()
    assert session.said == [] and session.finder.verdict() is None
    (found,) = session.found
    assert found == Found(
        model="Sequential", parameters=58, optimizers=("SGD",), path=session.folder, missed_steps=0, recompiled=False
    )
    assert runs["run"].closed and runs["run"].steps == [0, 1, 2]
    assert runs["run"].spectrum("activations", "model:input", 0).count == 12
    assert runs["run"].spectrum("activation_gradients", "2:output", 0).count == 6


def test_two_models_with_an_optimizer_each_have_a_run_each(session: Session) -> None:
    class Generator(nn.Sequential):
        pass

    def train() -> None:
        generator, critic = Generator(nn.Linear(2, 4)), mlp(4, 3, 1)
        one, two = session.noted(sgd(generator)), session.noted(sgd(critic))
        for _ in range(2):
            fake = generator(torch.ones(3, 2))
            step(lambda fake=fake: critic(fake.detach()), two)
            step(lambda fake=fake: critic(fake), one)

    train()
    runs = session.runs()
    assert sorted(runs) == ["run/Generator", "run/Sequential"] and session.said == []
    assert all(run.steps == [0, 1] for run in runs.values())
    assert runs["run/Sequential"].spectrum("weights", "2.weight", 1).count == 3


def test_two_optimizers_of_one_model_are_one_run(session: Session) -> None:
    def train() -> None:
        model = mlp(4, 8, 2)
        one, two = session.noted(sgd(model[0])), session.noted(torch.optim.AdamW(model[2].parameters()))
        for _ in range(2):
            step(lambda: model(torch.ones(3, 4)), one, two)

    train()
    assert session.found[0].optimizers == ("SGD", "AdamW")
    run = session.runs()["run"]
    assert run.steps == [0, 1] and set(run.tensors["updates"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_parts_under_one_optimizer_have_a_run_each(session: Session) -> None:
    class Encoder(nn.Linear):
        pass

    class Decoder(nn.Linear):
        pass

    def train() -> None:
        encoder, decoder = Encoder(4, 2), Decoder(2, 4)
        optimizer = session.noted(sgd(encoder, decoder))
        for _ in range(2):
            step(lambda: decoder(encoder(torch.ones(3, 4))), optimizer)
        assert nn.Module.__call__ is CALL

    train()
    assert {path: run.steps for path, run in session.runs().items()} == {"run/Encoder": [0, 1], "run/Decoder": [0, 1]}


def test_a_module_whose_parts_are_called_is_the_model(session: Session) -> None:
    class System(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.teacher = nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(4, 2)

        def training_step(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x))

    def train() -> None:
        system = System()
        around = nn.ModuleList([system, nn.Linear(1, 1)])
        optimizer = session.noted(sgd(system.body, system.head))
        for _ in range(2):
            step(lambda: system.training_step(torch.ones(3, 4)), optimizer)
        assert len(around) == 2

    train()
    assert session.found[0].model == "System"
    run = session.runs()["run"]
    assert run.steps == [0, 1] and run.spectrum("activations", "head:output", 0).count == 6


def test_an_optimizer_made_after_the_forward_loses_the_first_step_and_says_so(session: Session) -> None:
    def train() -> None:
        model = mlp(4, 2)
        loss = model(torch.ones(3, 4)).sum()
        optimizer = session.noted(sgd(model))
        loss.backward()
        optimizer.step()
        for _ in range(2):
            step(lambda: model(torch.ones(3, 4)), optimizer)

    train()
    assert session.found[0].missed_steps == 1
    assert session.runs()["run"].steps == [0, 1]


def test_a_lazy_model_is_watched_once_it_has_its_parameters(session: Session) -> None:
    def train() -> None:
        model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2))
        optimizer = session.noted(sgd(model))
        for _ in range(3):
            step(lambda: model(torch.ones(3, 4)), optimizer)

    train()
    assert session.said == [] and [found.missed_steps for found in session.found] == [1]
    assert list(session.runs()["run"].steps) == [0, 1]


def test_an_optimizer_made_later_for_a_watched_model_is_recorded(session: Session) -> None:
    def train() -> None:
        model = mlp(4, 2)
        step(lambda: model(torch.ones(3, 4)), session.noted(sgd(model)))
        second = session.noted(torch.optim.Adam(model.parameters()))
        assert nn.Module.__call__ is CALL
        step(lambda: model(torch.ones(3, 4)), second)

    train()
    run = session.runs()["run"]
    assert run.steps == [0, 1] and "0.weight:exp_avg" in run.tensors["optimizer"]


def test_a_model_trained_after_another_has_a_run_below_it(session: Session) -> None:
    def train() -> None:
        for _ in range(3):
            model = mlp(4, 2)
            step(lambda model=model: model(torch.ones(3, 4)), session.noted(sgd(model)))

    train()
    runs = session.runs()
    assert sorted(runs) == ["run", "run/Sequential-2", "run/Sequential-3"]
    assert all(run.steps == [0] for run in runs.values())


def test_a_forward_inside_the_optimizer_s_step_is_recorded(session: Session) -> None:
    def train() -> None:
        model = mlp(4, 2)
        optimizer = session.noted(torch.optim.LBFGS(model.parameters(), max_iter=1))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(3, 4)).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    train()
    run = session.runs()["run"]
    assert run.steps == run.scalars("loss")[0].tolist() == [0, 1]
    assert run.spectrum("updates", "0.weight", 0).count == 8


def test_a_compiled_model_is_watched_before_it_is_traced(session: Session) -> None:
    def train(*, found: bool) -> list[float]:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model = mlp(4, 8, 2)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        optimizer = sgd(model)
        if found:
            session.finder.note(optimizer)
        losses: list[float] = []
        for _ in range(3):
            loss = compiled(torch.randn(3, 4)).square().mean()
            step(lambda loss=loss: loss, optimizer)
            losses.append(loss.item())
        assert torch._dynamo.utils.counters["graph_break"] == {}
        return losses

    assert train(found=True) == train(found=False)
    run = session.runs()["run"]
    assert run.steps == [0, 1, 2] and run.spectrum("activations", "2:output", 0).count == 6


def test_a_model_that_no_call_shows_is_found_by_its_parameters(session: Session) -> None:
    def train() -> None:
        model = mlp(4, 2)
        optimizer = session.noted(sgd(model))
        for _ in range(4):
            step(lambda: nn.functional.linear(torch.ones(3, 4), model[0].weight, model[0].bias), optimizer)
        assert nn.Module.__call__ is CALL

    train()
    assert session.found[0].missed_steps == 2
    assert session.runs()["run"].spectrum("gradients", "0.weight", 0).count == 8


class Function(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(4, 8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class OneCall(nn.Module):
    """What a solver puts around a function for a call."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def test_a_module_that_is_made_for_a_call_is_not_the_model(session: Session) -> None:
    def train() -> None:
        function = Function()
        optimizer = session.noted(sgd(function))
        for _ in range(5):
            step(lambda: OneCall(function)(torch.ones(3, 4)), optimizer)
            gc.collect()

    train()
    assert [found.model for found in session.found] == ["OneCall", "Function"] and session.said == []
    assert session.found[1].missed_steps == 1 and session.found[1].path == session.folder
    run = session.runs()["run"]
    assert len(run.steps) == 4 and "inner.0.weight" in run.tensors["updates"]
    assert session.finder.verdict() is None


class Reverse(nn.Module):
    """What a solver puts around the function of its backward, which has no parameters."""

    def __init__(self, function: Callable[[], tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.function = function

    def forward(self) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            return self.function()


class Adjoint(torch.autograd.Function):
    """Calls a module without a graph, and once more in the backward."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.module, ctx.weights, ctx.x = module, weights, x
        return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return None, None, *Reverse(lambda: torch.autograd.grad(ctx.module(ctx.x), ctx.weights, gradient))()


def test_a_module_that_is_made_for_a_call_without_a_graph_is_not_the_model(session: Session) -> None:
    def train() -> None:
        function = Function()
        optimizer = session.noted(sgd(function))
        for _ in range(8):
            out = Adjoint.apply(OneCall(function), torch.ones(3, 4), *function.parameters())
            step(lambda out=out: out, optimizer)

    train()
    assert [found.model for found in session.found] == ["OneCall", "Function"] and session.said == []
    run = session.runs()["run"]
    assert len(run.steps) >= 4 and "inner.0.weight" in run.tensors["updates"]


def test_parameters_of_no_module_are_said_not_to_be_watched(session: Session) -> None:
    model, alone = mlp(4, 2), nn.Parameter(torch.ones(3))
    one, two = session.noted(sgd(model)), session.noted(torch.optim.Adam([alone]))
    for _ in range(3):
        step(lambda: model(torch.ones(3, 4)), one)
        step(lambda: alone, two)
    assert session.said == ["Adam steps parameters of no module: they are not watched"]
    assert [found.path for found in session.found] == [session.folder]
    assert nn.Module.__call__ is CALL


def test_a_model_that_the_script_watches_itself_is_left_to_it(session: Session, tmp_path: Path) -> None:
    model = mlp(4, 2)
    optimizer = session.noted(sgd(model))
    with plimsoll.watch.watch(model, optimizer, run=tmp_path / "own"):
        step(lambda: model(torch.ones(3, 4)), optimizer)
    assert session.found == [] and session.said == ["the script watches Sequential itself: it is left to that"]
    assert session.finder.verdict() is None


def test_what_cannot_be_watched_is_said_once_and_training_goes_on(tmp_path: Path) -> None:
    session = Session(tmp_path / "run", include=["no.such.*"])
    model = mlp(4, 2)
    optimizer = session.noted(sgd(model))
    for _ in range(3):
        step(lambda: model(torch.ones(3, 4)), optimizer)
    (line,) = session.said
    assert line.startswith("Sequential cannot be watched; the script continues unwatched (ArgumentError: ")
    assert nn.Module.__call__ is CALL and session.finder.verdict() is None


def test_a_folder_that_cannot_be_chosen_is_said(tmp_path: Path) -> None:
    said: list[str] = []

    def folder() -> Path:
        raise OSError("nowhere to write")

    finder = Finder(folder, {}, on_found=print, say=said.append)
    model = mlp(4, 2)
    optimizer = sgd(model)
    finder.note(optimizer)
    step(lambda: model(torch.ones(3, 4)), optimizer)
    assert said == ["Sequential cannot be watched; the script continues unwatched (OSError: nowhere to write)"]


def test_the_end_says_what_was_looked_for(session: Session) -> None:
    model = mlp(4, 2)
    optimizer = session.noted(sgd(model))
    assert session.finder.verdict() == (
        "SGD was made, but no module with its parameters was called with gradients enabled"
    )
    model(torch.ones(3, 4))
    assert session.finder.verdict() == "Sequential was called, but no optimizer has stepped"
    optimizer.step()
    assert session.finder.verdict() is None


def test_a_part_that_cannot_be_watched_is_said_once(tmp_path: Path) -> None:
    session = Session(tmp_path / "run", include=["no.such.*"])
    encoder, decoder = nn.Linear(4, 2), nn.Linear(2, 4)
    optimizer = session.noted(sgd(encoder, decoder))
    for _ in range(3):
        step(lambda: decoder(encoder(torch.ones(3, 4))), optimizer)
    assert len(session.said) == 1 and nn.Module.__call__ is CALL


class Curious(nn.Linear):
    """Tells what called it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.called_by_torch = nn.Module.__call__ is CALL
        return nn.functional.linear(x, self.weight)


def test_a_traced_model_is_left_alone(session: Session) -> None:
    model = nn.Sequential(Curious(4, 2))
    optimizer = session.noted(sgd(model))
    torch.fx.symbolic_trace(nn.Sequential(model))
    assert session.found == []
    step(lambda: model(torch.ones(3, 4)), optimizer)
    assert len(session.found) == 1


def test_a_wrapper_around_ours_hinders_nothing(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp(4, 2)
    optimizer = session.noted(sgd(model))
    ours = nn.Module.__call__

    def around(module: nn.Module, *args: torch.Tensor) -> torch.Tensor:
        return ours(module, *args)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__call__", around)
        step(lambda: model(torch.ones(3, 4)), optimizer)
        assert len(session.found) == 1
        patch.setattr(session.finder._calls, "_heed", None)  # asked no more
        step(lambda: model(torch.ones(3, 4)), optimizer)
    assert nn.Module.__call__ is ours
    step(lambda: model(torch.ones(3, 4)), optimizer)
    assert nn.Module.__call__ is CALL


def test_inner_calls_are_torch_s_own_while_a_model_is_still_sought(session: Session) -> None:
    model, other = nn.Sequential(Curious(4, 2)), mlp(4, 2)
    one, two = session.noted(sgd(model)), session.noted(sgd(other))
    step(lambda: model(torch.ones(3, 4)), one)
    assert model[0].called_by_torch and nn.Module.__call__ is not CALL
    step(lambda: other(torch.ones(3, 4)), two)
    assert nn.Module.__call__ is CALL


def test_optimizers_and_models_that_are_gone_are_forgotten(session: Session) -> None:
    def make() -> weakref.ref[nn.Module]:
        model = mlp(4, 2)
        session.noted(sgd(model))
        return weakref.ref(model)

    gone = make()
    gc.collect()
    assert gone() is None
    mlp(4, 2)(torch.ones(3, 4))
    assert nn.Module.__call__ is CALL
