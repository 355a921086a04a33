"""Activations and their gradients: whatever a module takes and gives, once each, and exactly."""

import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plimsoll as pl
from plimsoll.runs import Run
from tests.support.models import Halves
from tests.support.patience import HANG_SECONDS
from tests.support.watch.recording import batches, mlp, only_run, same, train


def watched_step(model: nn.Module, path: Path, *args: object, loss: object = None, **options: object) -> Run:
    """One watched training step of a model; the run that it leaves."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with pl.watch(model, optimizer, run=path, every=1, **options):
        result = model(*args)
        (loss(result) if callable(loss) else result.sum()).backward()
        optimizer.step()
    return only_run(path)


def test_inputs_outputs_and_gradients_are_exact(tmp_path: Path) -> None:
    model, (x,) = mlp(), batches(1, 4, 8)
    hidden = model[0](x).detach().requires_grad_()
    active = model[1](hidden)
    active.retain_grad()
    out = model[2](active)
    out.retain_grad()
    out.sum().backward()
    model.zero_grad()
    run = watched_step(model, tmp_path / "run", x)
    expected = {"model:input": x, "0:input": x, "0:output": hidden, "1:input": hidden, "1:output": active,
                "2:input": active, "2:output": out, "model:output": out}  # fmt: skip
    assert set(run.tensors["activations"]) == set(expected)
    for name, tensor in expected.items():
        assert same(run.spectrum("activations", name, 0), tensor), name
    gradients = {"0:output": hidden, "1:input": hidden, "1:output": active, "2:input": active, "2:output": out,
                 "model:output": out}  # fmt: skip
    assert set(run.tensors["activation_gradients"]) == set(gradients)
    for name, tensor in gradients.items():
        assert same(run.spectrum("activation_gradients", name, 0), tensor.grad), name


@dataclass
class Pair:
    logits: Tensor
    hidden: Tensor


class Structured(nn.Module):
    """Gives whatever it is set to."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.head, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor, *, scale: Tensor | None = None, mask: Tensor | None = None) -> object:
        a = self.head(x if scale is None else x * scale)
        both = {"tuple": (a, a * 2), "dict": {"logits": a, "hidden": a * 2}, "dataclass": Pair(a, a * 2),
                "nested": (a, [a * 2, {"deep": a * 3}]), "single": (a,), "with none": (None, a, 3, a * 2)}  # fmt: skip
        return both[self.kind]


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x, scale=torch.ones(4), mask=torch.ones(4, dtype=torch.bool))
        return self.inner.head(x)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("tuple", {"output.0", "output.1"}),
        ("dict", {"output.logits", "output.hidden"}),
        ("dataclass", {"output.logits", "output.hidden"}),
        ("nested", {"output.0", "output.1.0", "output.1.1.deep"}),
        ("single", {"output"}),
        ("with none", {"output.1", "output.3"}),
    ],
)
def test_tensors_of_any_structure_have_names(kind: str, names: set[str], tmp_path: Path) -> None:
    run = watched_step(Around(Structured(kind)), tmp_path / "run", torch.randn(2, 4))
    inner = {name.removeprefix("inner:") for name in run.tensors["activations"] if name.startswith("inner:")}
    assert inner == {*names, "input.0", "input.scale"}


def test_a_module_that_returns_nothing_and_one_that_is_never_called(tmp_path: Path) -> None:
    class Silent(nn.Module):
        def forward(self, x: Tensor) -> None:
            return None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.silent, self.used, self.unused = Silent(), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.silent(x)
            return self.used(x)

    run = watched_step(Model(), tmp_path / "run", torch.randn(2, 4))
    assert "silent:input" in run.tensors["activations"]
    assert not any("unused" in name for name in run.tensors["activations"])
    assert "unused.weight" in run.tensors["weights"]
    assert "unused.weight" not in run.tensors["gradients"]


def test_a_shared_module_called_twice_adds_up(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.again = self.layer

        def forward(self, x: Tensor) -> Tensor:
            return self.again(self.layer(x))

    torch.manual_seed(3)
    model, x = Model(), torch.randn(2, 4)
    first = model.layer(x)
    second = model.layer(first)
    run = watched_step(model, tmp_path / "run", x)
    assert same(run.spectrum("activations", "layer:output", 0), torch.cat([first, second]))
    assert same(run.spectrum("activations", "model:output", 0), second)


def test_in_place_operations_are_seen_before_and_after(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)), torch.randn(4, 8)
    before = model[0](x)
    run = watched_step(model, tmp_path / "run", x)
    assert same(run.spectrum("activations", "1:input", 0), before)
    assert same(run.spectrum("activations", "1:output", 0), before.relu())
    assert run.spectrum("activation_gradients", "0:output", 0).zeros == int((before <= 0).sum())
    assert run.spectrum("activation_gradients", "1:output", 0).count == 32


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_is_not_counted_twice(reentrant: bool, tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = mlp(), nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.block, x, use_reentrant=reentrant))

    plain = Model()
    x = torch.randn(4, 8, requires_grad=True)
    run = watched_step(plain, tmp_path / "run", x)
    assert run.spectrum("activations", "block.0:output", 0).count == 64
    assert run.spectrum("activation_gradients", "block.0:output", 0).count == 64
    assert run.spectrum("activation_gradients", "block.2:output", 0).count == 8


class Residual(nn.Module):
    """Blocks that may be checkpointed, on a stream that other modules take and give too; the last runs twice."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.how = nn.Linear(8, 8), how
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + (block(x) if self.how == "plain" else checkpoint(block, x, use_reentrant=self.how == "re-entrant"))
        return x + self.blocks[1](x)


def test_gradients_of_a_checkpoint_are_counted_once(tmp_path: Path) -> None:
    (x,) = batches(1, 4, 8)
    plain = watched_step(Residual("plain"), tmp_path / "plain", x)
    for how in ("plain graph", "re-entrant"):
        run = watched_step(Residual(how), tmp_path / how, x)
        assert set(run.tensors["activation_gradients"]) == set(plain.tensors["activation_gradients"]), how
        for name in plain.tensors["activation_gradients"]:
            found, wanted = (each.spectrum("activation_gradients", name, 0) for each in (run, plain))
            assert (found.count, found.absmax) == (wanted.count, wanted.absmax), (how, name)


class Evaluated(nn.Module):
    """In the middle of its training forward, a thread of its own evaluates it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)

    def evaluate(self) -> None:
        with torch.no_grad():
            self(torch.full((4, 8), 1e6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if torch.is_grad_enabled():
            thread = threading.Thread(target=self.evaluate)
            thread.start()
            thread.join(HANG_SECONDS)
        return self.second(x)


def test_an_evaluation_on_another_thread_is_not_recorded(tmp_path: Path) -> None:
    run = watched_step(Evaluated(), tmp_path / "run", torch.randn(4, 8))
    for name in ("first:input", "first:output", "second:input", "second:output", "model:output"):
        spectrum = run.spectrum("activations", name, 0)
        assert spectrum.count == (8 if name in ("second:output", "model:output") else 32) and spectrum.absmax < 1e3


def test_a_tensor_that_two_taps_see_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    measurer = pl.kernels.measurer
    monkeypatch.setattr(
        "plimsoll.kernels.measurer", lambda bank: lambda x, *a: (measured.append(x.numel()), measurer(bank)(x, *a))
    )
    watched_step(mlp(), tmp_path / "run", torch.randn(4, 8), collect=("activations",))
    assert measured == [32, 64, 64, 8]


def test_frozen_parts_and_parts_without_gradient(tmp_path: Path) -> None:
    model = mlp()
    model[0].requires_grad_(requires_grad=False)
    run = watched_step(model, tmp_path / "run", torch.randn(4, 8))
    assert run.spectrum("activations", "0:output", 0).count == 64
    assert "0:output" not in run.tensors["activation_gradients"]
    assert "0.weight" not in run.tensors["gradients"] and "0.weight" in run.tensors["weights"]


def test_evaluation_is_not_recorded(tmp_path: Path) -> None:
    model, (x,) = mlp(), batches(1, 4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        train(model, optimizer, [x])
        with torch.no_grad():
            model(torch.randn(40, 8))
        model.eval()
        model(torch.randn(400, 8))
        model.train()
        train(model, optimizer, [x])
    run = only_run(tmp_path / "run")
    assert [run.spectrum("activations", "0:input", step).count for step in run.steps] == [32, 32]


def test_a_model_trained_in_eval_mode_is_noticed(tmp_path: Path) -> None:
    model = mlp().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        train(model, optimizer, batches(3, 4, 8))
    run = only_run(tmp_path / "run")
    assert [step for step, *_ in run.spectra("activations", "0:input")] == [1, 2]
    assert "eval mode" in [event.kind for event in run.events()]


def test_an_exception_in_forward_leaves_the_next_step_right(tmp_path: Path) -> None:
    class Fails(nn.Module):
        fail = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fail:
                raise RuntimeError("boom")
            return x

    model = nn.Sequential(nn.Linear(8, 8), Fails(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        data = batches(3, 4, 8)
        train(model, optimizer, data[:1])
        model[1].fail = True
        with pytest.raises(RuntimeError, match="boom"):
            model(data[1])
        model[1].fail = False
        with torch.no_grad():
            model(torch.randn(99, 8))  # not taken for a part of training
        train(model, optimizer, data[2:])
    run = only_run(tmp_path / "run")
    assert run.spectrum("activations", "2:output", 1).count == 8
    assert run.steps == [0, 1] if isinstance(run.steps, list) else list(run.steps) == [0, 1]


def test_parts_of_the_model_called_by_themselves_are_recorded(tmp_path: Path) -> None:
    model = nn.ModuleDict({"encoder": nn.Linear(8, 4), "decoder": nn.Linear(4, 8)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=2):
        for x in batches(3, 4, 8):
            model["decoder"](model["encoder"](x)).sum().backward()
            optimizer.step()
    run = only_run(tmp_path / "run")
    assert [(s, sp.count) for s, _, _, sp in run.spectra("activations", "encoder:output")] == [(0, 16), (2, 16)]


def test_include_and_exclude(tmp_path: Path) -> None:
    run = watched_step(mlp(), tmp_path / "a", torch.randn(4, 8), include=[nn.Linear], exclude=["2"])
    assert set(run.tensors["activations"]) == {"0:input", "0:output"}
    assert set(run.tensors["weights"]) == {"0.weight", "0.bias"}
    with pytest.raises(pl.ArgumentError, match=r"each pattern of include to match a module or parameter; 'blocks.*' m"):
        watched_step(mlp(), tmp_path / "b", torch.randn(4, 8), include=["blocks.*"])


def test_the_place_among_other_hooks_is_kept_between_samples(tmp_path: Path) -> None:
    """Hooks of before and after the watch change the output: what is recorded lies between them at every step."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model[0].register_forward_hook(lambda _m, _x, y: y * 2)
    with pl.watch(model, torch.optim.SGD(model.parameters(), lr=0.0), run=tmp_path / "run", every=3) as watching:
        for step in range(10):
            if step == 4:  # while nothing is due
                model[0].register_forward_hook(lambda _m, _x, y: y * 1024)
            model(torch.ones(2, 4)).sum().backward()
            watching.step()
    with torch.no_grad():
        expected = float((torch.nn.functional.linear(torch.ones(2, 4), model[0].weight, model[0].bias) * 2).max())
    run = Run(tmp_path / "run")
    assert run.steps == [0, 3, 6, 9]
    assert [run.spectrum("activations", "0:output", step).max for step in run.steps] == pytest.approx([expected] * 4)


def test_an_output_that_nothing_uses_has_no_gradient_and_no_event(tmp_path: Path) -> None:
    run = watched_step(
        Halves(), tmp_path / "run", torch.randn(4, 8), loss=lambda halves: halves[0].square().sum(), shadow_every=1
    )
    assert set(run.tensors["activation_gradients"]) == {"model:output.0", "linear:output"}
    assert "model:output.1" in run.tensors["activations"] and run.events() == []
