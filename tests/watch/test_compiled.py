"""Compiled models: no graph break, both directions, exact counts; never silently unwatched."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plimsoll as pl
from plimsoll.runs import Run
from plimsoll.watch.hooks import torch_hooks
from tests.support.watch.recording import batches, mlp, only_run, same, train


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def eager_and_compiled(make: type[nn.Module], path: Path, data: list[Tensor], **options: object) -> tuple[Run, Run]:
    """The runs of the same training without and with compiling."""
    runs = []
    for name in ("eager", "compiled"):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.watch(model, optimizer, run=path / name, **options):
            train(torch.compile(model, fullgraph=True) if name == "compiled" else model, optimizer, data)
        runs.append(only_run(path / name))
    return runs[0], runs[1]


class Blocks(nn.Module):
    """In-place operations, a module called twice, a tuple, and a checkpointed part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.block, self.head = nn.Linear(8, 8), nn.ReLU(inplace=True), mlp(), nn.Linear(2, 2)
        self.split = Split()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.first(self.relu(self.first(x))))
        a, b = self.split(x)
        return self.head(checkpoint(self.block, a + b, use_reentrant=False))


class Split(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3


def test_compiled_records_what_eager_does(tmp_path: Path) -> None:
    eager, compiled = eager_and_compiled(Blocks, tmp_path, batches(5, 4, 8), every=2)
    assert list(compiled.steps) == list(eager.steps) == [0, 2, 4]
    for collection in ("activations", "weights", "gradients", "updates"):
        assert set(compiled.tensors[collection]) == set(eager.tensors[collection])
    # Not recorded in compiled code: gradients of inputs that no module gave out.
    missing = set(eager.tensors["activation_gradients"]) - set(compiled.tensors["activation_gradients"])
    assert missing == {"block:input", "block.0:input"}
    for step, collection, name, spectrum in compiled.spectra():
        other = eager.spectrum(collection, name, step)
        assert spectrum.count == other.count, (collection, name)
        assert spectrum.absmax == pytest.approx(other.absmax, rel=1e-4), (collection, name)


class ChangedBetween(nn.Module):
    """What a module gives out is changed in place before the next one takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h.mul_(3)
        return self.second(h)


def test_a_tensor_changed_in_place_since_is_another(tmp_path: Path) -> None:
    model, (x,) = ChangedBetween(), batches(1, 4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = model.first(x).detach()
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        train(torch.compile(model, backend="aot_eager", fullgraph=True), optimizer, [x])
    run = only_run(tmp_path / "run")
    assert same(run.spectrum("activations", "first:output", 0), given)
    assert same(run.spectrum("activations", "second:input", 0), given * 3)


def test_a_tensor_that_two_taps_see_is_measured_once(tmp_path: Path) -> None:
    model, counted = mlp(), []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        counted.append(sum("measure" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    call = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1, collect="activations"):
        train(call, optimizer, batches(1, 4, 8))
    assert {"0:input", "1:input", "2:input", "2:output"} < set(only_run(tmp_path / "run").tensors["activations"])
    assert counted == [4]  # what comes in, and what each of the three gives out


def test_gradient_accumulation_compiled(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pl.watch(model, optimizer, run=tmp_path / "run", every=2):
        for index, x in enumerate(batches(8, 4, 8)):
            call(x).sum().backward()
            if index % 2:
                optimizer.step()
    run = only_run(tmp_path / "run")
    assert [run.spectrum("activations", "0:output", s).count for s in run.steps] == [128, 128]
    assert [run.spectrum("activation_gradients", "0:output", s).count for s in run.steps] == [128, 128]


def test_whether_something_was_compiled_is_known() -> None:
    torch.compiler.reset()
    assert not torch_hooks.has_compiled()
    torch.compile(torch.neg, backend="eager")(torch.ones(2))
    assert torch_hooks.has_compiled()


@pytest.mark.parametrize("how", ["function", "method", "handed over"])
def test_a_model_compiled_and_called_before_is_compiled_again(how: str, tmp_path: Path) -> None:
    model, (x, y) = Blocks(), batches(2, 4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = model
    if how == "method":
        model.compile(fullgraph=True, backend="aot_eager")
    else:
        call = torch.compile(model, fullgraph=True, backend="aot_eager")
    train(call, optimizer, [x])
    with pl.watch(call if how == "handed over" else model, optimizer, run=tmp_path / "run", every=1):
        train(call, optimizer, [y, x])
    run = only_run(tmp_path / "run")
    assert list(run.steps) == [0, 1]
    assert same(run.spectrum("activations", "model:input", 0), y)
    assert run.spectrum("activation_gradients", "block.0:output", 1).count == 64
    assert "recompiled" in [event.kind for event in run.events()]


def test_a_graph_of_another_model_of_the_same_class_is_not_taken(tmp_path: Path) -> None:
    watched, other = Blocks(), Blocks()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (watched, other)]
    calls = [torch.compile(model, fullgraph=True, backend="aot_eager") for model in (watched, other)]
    with pl.watch(watched, optimizers[0], run=tmp_path / "run", every=1):
        for x in batches(2, 4, 8):
            train(calls[1], optimizers[1], [x])
            train(calls[0], optimizers[0], [x])
    run = only_run(tmp_path / "run")
    assert list(run.steps) == [0, 1]
    assert [run.spectrum("activations", "first:output", step).count for step in run.steps] == [64, 64]


def test_steps_that_are_not_due_run_a_graph_without_taps(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(sum("plimsoll" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    call = torch.compile(model, backend=backend, fullgraph=True)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=2):
        train(call, optimizer, batches(6, 4, 8))
    assert len(graphs) == 2 and graphs[0] > 0 and graphs[1] == 0


def test_evaluation_of_a_compiled_model_is_not_recorded(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        for x in batches(2, 4, 8):
            train(call, optimizer, [x])
            with torch.no_grad():
                call(x)
    run = only_run(tmp_path / "run")
    assert [run.spectrum("activations", "0:output", step).count for step in run.steps] == [64, 64]


def test_what_cannot_be_watched_is_refused_by_name(tmp_path: Path) -> None:
    compiled = mlp()
    compiled.compile()
    with pytest.raises(
        pl.ArgumentError, match=r"a Sequential compiled with its method compile.*torch.compile\(model\)"
    ):
        pl.watch(compiled, run=tmp_path / "run")
    with pytest.raises(pl.ArgumentError, match=r"torch.nn.DataParallel.*Use DistributedDataParallel"):
        pl.watch(nn.DataParallel(mlp()), run=tmp_path / "run")
    with pytest.raises(pl.ArgumentError, match=r"expected a torch.nn.Module; got function"):
        pl.watch(mlp, run=tmp_path / "run")  # type: ignore[arg-type]
