"""Weights, gradients, optimizer state and updates, exactly, for every kind of optimizer and loop."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from tests.support.watch.recording import batches, mlp, only_run, same, train


def test_a_step_of_adamw_is_recorded_exactly(tmp_path: Path) -> None:
    model, data = mlp(), batches(3, 4, 8)
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin))
    train(twin, other, data[:2])
    weights = {name: p.detach().clone() for name, p in twin.named_parameters()}
    train(twin, other, data[2:])
    with pl.watch(model, optimizer, run=tmp_path / "run", every=2):
        train(model, optimizer, data)
    run = only_run(tmp_path / "run")
    assert list(run.steps) == [0, 2]
    for name, p in twin.named_parameters():
        assert same(run.spectrum("weights", name, 2), weights[name])
        assert p.grad is not None and same(run.spectrum("gradients", name, 2), p.grad)
        assert same(run.spectrum("updates", name, 2), p.detach() - weights[name])
        for key, value in other.state[p].items():
            assert same(run.spectrum("optimizer", f"{name}:{key}", 2), value)
        steps, ratios = run.series("updates", name, "ratio")
        expected = (p.detach() - weights[name]).norm() / weights[name].norm()
        assert list(steps) == [0, 2] and ratios[1] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "options", "states"),
    [
        (torch.optim.SGD, {"lr": 0.1}, set()),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"momentum_buffer"}),
        (torch.optim.Adafactor, {}, {"step", "row_var", "col_var"}),
        (torch.optim.Adam, {"fused": True}, {"step", "exp_avg", "exp_avg_sq"}),
        (torch.optim.Adam, {"foreach": True, "amsgrad": True}, {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    ],
)
def test_every_tensor_of_an_optimizers_state(kind: type, options: dict, states: set[str], tmp_path: Path) -> None:
    model = mlp()
    optimizer = kind(model.parameters(), **options)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        train(model, optimizer, batches(2, 4, 8))
    run = only_run(tmp_path / "run")
    found = {name.split(":")[1] for name in run.tensors.get("optimizer", ()) if name.startswith("0.weight:")}
    assert found == states


class Nested(torch.optim.SGD):
    """An optimizer of one's own, with state in lists and beside the parameters."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("history", []).append(p.grad.clone())
                p.sub_(0.1 * p.grad)
        self.state["overall"] = {"norm": torch.tensor(3.0)}


def test_a_custom_optimizer(tmp_path: Path) -> None:
    model = nn.Linear(4, 2, bias=False)
    optimizer = Nested(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        train(model, optimizer, batches(2, 3, 4))
    run = only_run(tmp_path / "run")
    assert set(run.tensors["optimizer"]) == {"weight:history.0", "weight:history.1", "overall:norm"}


class Around(torch.optim.Optimizer):
    """An optimizer that lets the one inside it step, and changes the weights after it, as Lookahead does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {"lr": 1.0})
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        for p in self.param_groups[0]["params"]:
            p.mul_(0.999)


@pytest.mark.parametrize("given", [True, False])
def test_of_an_optimizer_around_another_the_one_inside_is_read_once(given: bool, tmp_path: Path) -> None:
    model = mlp()
    optimizer = Around(torch.optim.AdamW(model.parameters()))
    with pl.watch(model, *([optimizer] if given else []), run=tmp_path / "run", every=1):
        train(model, optimizer, batches(3, 4, 8))
    run = only_run(tmp_path / "run")
    assert list(run.steps) == [0, 1, 2]
    for collection in ("weights", "gradients", "updates"):
        for name, p in model.named_parameters():
            assert [run.spectrum(collection, name, step).count for step in run.steps] == [p.numel()] * 3
    assert "0.weight:exp_avg" in run.tensors["optimizer"] and not run.events()


def test_an_optimizer_is_found_when_none_is_given(tmp_path: Path) -> None:
    model, other = mlp(), mlp()
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters())
    stranger = torch.optim.SGD(other.parameters(), lr=0.1)
    with pl.watch(model, run=tmp_path / "run", every=1):
        for x in batches(3, 4, 8):
            (model(x).sum() + other(x).sum()).backward()
            stranger.step()
            first.step()
            second.step()
            for optimizer in (first, second, stranger):
                optimizer.zero_grad()
    run = only_run(tmp_path / "run")
    assert list(run.steps) == [0, 1, 2]
    assert set(run.tensors["updates"]) == {name for name, _ in model.named_parameters()}
    assert run.spectrum("updates", "0.weight", 1).count == 128


def test_an_optimizer_is_found_though_no_parameter_is_selected(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, run=tmp_path / "run", every=1, include=["1"]):
        train(model, optimizer, batches(3, 4, 8))
    run = only_run(tmp_path / "run")
    assert list(run.steps) == [0, 1, 2] and set(run.tensors) == {"activations", "activation_gradients"}


def test_gradient_accumulation_is_one_step(tmp_path: Path) -> None:
    model, data = mlp(), batches(4, 4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        losses = []
        for index, x in enumerate(data):
            loss = model(x).square().mean() / 2
            losses.append(loss.item())
            loss.backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
    run = only_run(tmp_path / "run")
    assert list(run.steps) == [0, 1]
    assert run.spectrum("activations", "0:output", 0).count == 2 * 64
    assert [event.details["accumulated"] for event in run.events() if event.kind == "loss"] == [2]
    assert run.spectrum("activation_gradients", "0:output", 1).count == 2 * 64
    assert run.spectrum("gradients", "0.weight", 0).count == 128
    assert run.scalars("loss")[1] == pytest.approx([sum(losses[:2]), sum(losses[2:])])


def test_optimizers_that_step_inside_the_backward(tmp_path: Path) -> None:
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    with pl.watch(model, list(optimizers.values()), run=tmp_path / "run", every=1):
        for x in batches(3, 4, 8):
            model(x).sum().backward()
    run = only_run(tmp_path / "run")
    assert list(run.steps) == [0, 1, 2]
    for collection in ("gradients", "updates", "weights"):
        assert len(run.tensors[collection]) == 4
        assert run.spectrum(collection, "0.weight", 2).count == 128
    assert run.spectrum("activation_gradients", "0:output", 1).count == 64


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_closure_runs_the_step_inside_the_optimizer(kind: type, tmp_path: Path) -> None:
    model, data = mlp(), batches(3, 4, 8)
    twin = mlp()
    twin.load_state_dict(model.state_dict())

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x in data:

            def closure(x: Tensor = x) -> Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

    before = {name: p.detach().clone() for name, p in twin.named_parameters()}
    other = kind(twin.parameters(), lr=0.1)
    data, rest = data[:1], data[1:]
    loop(twin, other)
    data += rest
    optimizer = kind(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        loop(model, optimizer)
    run = only_run(tmp_path / "run")
    assert list(run.steps) == [0, 1, 2]
    for name, p in twin.named_parameters():
        assert same(run.spectrum("weights", name, 0), before[name])
        assert same(run.spectrum("weights", name, 1), p)
        assert same(run.spectrum("updates", name, 0), p.detach() - before[name])
        assert p.grad is not None and same(run.spectrum("gradients", name, 0), p.grad)
    assert run.spectrum("activations", "0:output", 1).count % 64 == 0


def test_tied_weights_are_one_tensor(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x))

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        model(torch.arange(5)).sum().backward()
        optimizer.step()
    run = only_run(tmp_path / "run")
    assert run.tensors["weights"] == ("embed.weight",)
    assert run.spectrum("gradients", "embed.weight", 0).count == 40


def test_sparse_gradients_count_as_their_dense_ones(tmp_path: Path) -> None:
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        model(torch.tensor([1, 1, 3])).square().sum().backward()
        dense = model.weight.grad.to_dense()
        optimizer.step()
    assert same(only_run(tmp_path / "run").spectrum("gradients", "weight", 0), dense)


def test_the_fraction_of_weights_that_an_update_left_unmoved(tmp_path: Path) -> None:
    model = nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 1.0, 1.0, 1.0]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        model.weight.grad.copy_(torch.tensor([[0.5, 2.0**-12, 0.0, 2.0**-12]]))
        optimizer.step()
    _, unmoved = only_run(tmp_path / "run").series("updates", "weight", "unmoved")
    assert unmoved == pytest.approx([2 / 3])


def test_a_watch_with_no_optimizer_steps_by_hand(tmp_path: Path) -> None:
    model = mlp()
    with pl.watch(model, run=tmp_path / "run", every=2, collect=("weights", "gradients", "activations")) as w:
        for x in batches(4, 4, 8):
            model.zero_grad()
            model(x).sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.1 * p.grad)
            w.step()
    run = only_run(tmp_path / "run")
    assert list(run.steps) == [0, 2]
    assert run.spectrum("gradients", "0.weight", 2).count == 128
    assert run.spectrum("activations", "0:output", 2).count == 64
