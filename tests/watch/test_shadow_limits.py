"""What a shadow step leaves as it was, and what it says when it cannot be taken."""

import copy
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from tests.support.watch.recording import batches, mlp, only_run, train
from tests.support.watch.shadow import (
    SMALL,
    HalfLinear,
    counted_steps,
    counts,
    found,
    gradients_of,
    halves,
    messages,
    shadowed,
    spread,
    wide,
)


class Eventful(nn.Module):
    """Dropout, batch norm, randomness of every kind, attributes that change, and FP16 in the midst of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            HalfLinear(8, 32), nn.Dropout(0.5), nn.BatchNorm1d(32), nn.GELU(), HalfLinear(32, 32)
        )
        self.head, self.calls, self.last = nn.Linear(32, 2), 0, None
        self.register_buffer("average", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.layers(x * (1 + random.random()) + float(np.random.rand()))  # noqa: NPY002  (the generator that models use)
        y = self.head(x)
        self.last, self.average = y.detach(), 0.9 * self.average + 0.1 * y.detach().mean(0)
        return y


def trained(path: Path | None, *, accumulate: int = 1, **options: object) -> tuple[object, ...]:
    random.seed(3), torch.manual_seed(3), np.random.seed(3)  # noqa: NPY002
    model = Eventful()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    w = None if path is None else pl.watch(model, optimizer, run=path, every=3, **options)
    losses = []
    for index, x in enumerate(batches(20 * accumulate, 16, 8)):
        loss = model(x).square().mean() * SMALL * (1 + torch.rand(()))
        loss.backward()
        losses.append(loss.item())
        if index % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
    if w is not None:
        w.close()
    left = {"state": model.state_dict(), "last": model.last, "rng": torch.get_rng_state()}
    return losses, left, model.calls, random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_is_the_same_to_the_bit(accumulate: int, tmp_path: Path) -> None:
    bare = trained(None, accumulate=accumulate)
    shadow = trained(tmp_path / "run", accumulate=accumulate, shadow_every=5)
    assert bare[0] == shadow[0] and bare[2:] == shadow[2:]
    torch.testing.assert_close(bare[1], shadow[1], rtol=0, atol=0)
    run = only_run(tmp_path / "run")
    assert not messages(run)
    assert counted_steps(run, "gradients") == {name: [0, 5, 10, 15] for name in run.tensors["gradients"]}
    # Dropout's mask is the same again: what it drops is structural.
    dropped = found(run, "activations", "layers.1:output", 5)
    assert dropped[0] == 0 and dropped[1] > 100


def test_the_gradients_are_left_alone(tmp_path: Path) -> None:
    model, (x,) = halves(), batches(1, 8, 8)
    events: list[str] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda _: events.append("parameter"))
    model[2].register_full_backward_hook(lambda *_: events.append("module"))
    model[4].weight.register_hook(lambda g: events.append("hook") or g)
    twin = gradients_of(copy.deepcopy(model), [lambda m: spread(m(x))])
    events.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", shadow_every=1):
        spread(model(x)).backward()
        assert all(torch.equal(p.grad, twin[name]) for name, p in model.named_parameters() if p.grad is not None)
        optimizer.step()
    assert sorted(events) == ["hook", "module", "parameter"]
    run = only_run(tmp_path / "run")
    assert set(counted_steps(run, "gradients")) == {"0.weight", "2.weight"}
    assert messages(run) == ["the gradient of 4.weight is not compared: it has hooks of its own"]


def test_a_leaf_that_is_fed_in_keeps_no_hook(tmp_path: Path) -> None:
    model, x = halves(), batches(1, 8, 8)[0].requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", shadow_every=1):
        for _ in range(2):
            spread(model(x)).backward()
            optimizer.step()
        model(x)
        assert x._backward_hooks
    assert not x._backward_hooks
    assert counted_steps(only_run(tmp_path / "run"), "activation_gradients")["model:input"] == [0, 1]


def test_two_watches_on_one_model(tmp_path: Path) -> None:
    model = halves()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pl.watch(model, optimizer, run=tmp_path / "a", every=1, shadow_every=2),
        pl.watch(model, optimizer, run=tmp_path / "b", every=1),
    ):
        losses = train(model, optimizer, batches(3, 4, 8))
    a, b = only_run(tmp_path / "a"), only_run(tmp_path / "b")
    assert list(b.steps) == [0, 1, 2] and list(b.scalars("loss")[1]) == losses == list(a.scalars("loss")[1])
    for run in (a, b):
        assert [run.spectrum("activations", "1:output", step).count for step in (0, 1, 2)] == [64, 64, 64]
        assert [run.spectrum("activation_gradients", "1:output", step).count for step in (0, 1, 2)] == [64, 64, 64]
    assert counted_steps(a, "gradients")["0.weight"] == [0, 2] and not counted_steps(b, "gradients")


def test_hooks_that_change_arguments_and_outputs_run_once_more_not_twice(tmp_path: Path) -> None:
    model, (x,) = halves(), batches(1, 8, 8)
    model.register_forward_pre_hook(lambda _, args: (args[0] - 1,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    oracle, plain = wide(model), copy.deepcopy(model)
    with pl.watch(model, optimizer, run=tmp_path / "run", shadow_every=1):
        handle = model.register_forward_hook(lambda _, __, output: output * 2.0**-2)
        spread(model(x)).backward()
        handle.remove()
        optimizer.step()
    run = only_run(tmp_path / "run")
    real = gradients_of(plain, [lambda m: spread(m(x)) * 2.0**-2])
    shadow = gradients_of(oracle, [lambda m: spread(m(x)) * 2.0**-2])
    for name in real:
        assert found(run, "gradients", name) == counts(real[name], shadow[name])
    assert found(run, "activations", "1:output") == (0, int((plain[0](x - 1) <= 0).sum()))
    assert found(run, "activation_gradients", "1:output")[0] > 0


@pytest.mark.parametrize("where", ["in the model", "in the loop"])
def test_an_input_that_is_changed_in_place(where: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.ReLU(inplace=where == "in the model"), *halves())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", shadow_every=1):
        (x,) = batches(1, 8, 8)
        loss = spread(model(x))
        if where == "in the loop":
            x.add_(1)
        loss.backward()
        optimizer.step()
    run = only_run(tmp_path / "run")
    assert messages(run) == [
        "shadow step not taken: an input of the model was changed in place, in its forward or after it"
    ]
    assert not counted_steps(run, "gradients") and not counted_steps(run, "activations")


def test_a_model_that_is_put_to_evaluation_before_its_backward(tmp_path: Path) -> None:
    model = halves()
    run = shadowed(model, tmp_path / "run", lambda m: (spread(m(batches(1, 8, 8)[0])), m.eval())[0])
    assert "the model went from training to evaluation" in messages(run)[0]


def test_an_optimizer_that_steps_inside_the_backward(tmp_path: Path) -> None:
    model = halves()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    with pl.watch(model, run=tmp_path / "run", shadow_every=1):
        spread(model(batches(1, 8, 8)[0])).backward()
    assert "weights changed before the backward had ended" in messages(only_run(tmp_path / "run"))[0]


@pytest.mark.parametrize("again", [True, False])
def test_a_gradient_that_is_differentiated_itself(again: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(m: nn.Module) -> Tensor:
        x = torch.randn(16, 3).requires_grad_()
        y = m(x)
        if not again:
            return spread(y)
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0].square().mean()  # its own backward is another way

    run = shadowed(model, tmp_path / f"{again}", loss)
    assert bool(list(run.errors())) != again
    assert [("create_graph" in message) for message in messages(run)] == [True] * again


def test_parts_that_are_called_by_themselves_and_outputs_that_nothing_uses(tmp_path: Path) -> None:
    model = halves()
    run = shadowed(model, tmp_path / "a", lambda m: spread(m[0](batches(1, 8, 8)[0])))
    (message,) = messages(run)
    assert message.startswith(
        "shadow step not taken: no forward of the model was seen (it runs inside compiled code, or "
    )

    def aside(m: nn.Module) -> Tensor:
        m(batches(1, 8, 8)[0])
        return m[0].weight.sum()

    run = shadowed(model, tmp_path / "b", aside)
    assert messages(run) == ["shadow step not taken: no gradient came back to a tensor that the model returned"]


def test_a_forward_that_fails_in_the_shadow_is_contained(tmp_path: Path) -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype == torch.float32:
                torch.rand(3)
                raise RuntimeError("FP16 only")
            return x

    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), Picky()).half()
    twin, state = copy.deepcopy(model), torch.get_rng_state()
    for m, path in ((twin, None), (model, tmp_path / "run")):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        w = None if path is None else pl.watch(m, optimizer, run=path, shadow_every=1)
        train(m, optimizer, [x.half() for x in batches(3, 8, 8)])
        if w is not None:
            w.close()
        state = torch.get_rng_state() if path is None else state
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    run = only_run(tmp_path / "run")
    assert messages(run)[0] == "the shadow step failed and was left out (RuntimeError: FP16 only)"
    assert messages(run).count("shadow step not taken: it raised RuntimeError") == 3
    assert not counted_steps(run, "gradients") and run.spectrum("gradients", "1.weight", 2).count == 64


def test_copies_that_take_too_much_memory_are_left_out(tmp_path: Path) -> None:
    data = [batches(1, rows, 8)[0] for rows in (8, 2000)]
    small, large = (
        shadowed(halves(), tmp_path / str(len(x)), lambda m, x=x: spread(m(x)), max_bytes=400_000) for x in data
    )
    assert counted_steps(small, "activations")["4:output"] == [0]
    assert any(
        "a shadow step's activations take more than max_bytes=400,000" in event.message for event in large.events()
    )
    assert "4:output" not in counted_steps(large, "activations") and "0:output" in counted_steps(large, "activations")
    assert "0.weight" in counted_steps(large, "gradients")


def test_what_cannot_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(
        pl.ArgumentError, match=r"watch: expected collect to have some of gradients, activations, .*lea"
    ):
        pl.watch(mlp(), run=tmp_path / "run", collect=("weights",), shadow_every=5)
