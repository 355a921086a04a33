"""The shadow step: underflow distinguished from structural zeros, exactly."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.checkpoint import checkpoint

from tests.support.watch.recording import batches, mlp
from tests.support.watch.shadow import (
    HalfLinear,
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


def test_counts_are_those_of_an_oracle(tmp_path: Path) -> None:
    model, (x,) = halves(), batches(1, 8, 8)

    def loss(m: nn.Module) -> Tensor:
        return spread(m(x))

    real, shadow = gradients_of(copy.deepcopy(model), [loss]), gradients_of(wide(model), [loss])
    reals, shadows = tapped(copy.deepcopy(model), loss), tapped(wide(model), loss)
    run = shadowed(model, tmp_path / "run", loss)
    assert not messages(run)
    for name in real:
        assert found(run, "gradients", name) == counts(real[name], shadow[name])
    for name in reals:
        for collection, place in (("activations", 0), ("activation_gradients", 1)):
            assert found(run, collection, f"{name}:output") == counts(reals[name][place], shadows[name][place])
    assert found(run, "gradients", "0.weight")[0] > 0 and found(run, "gradients", "0.weight")[1] > 0
    assert found(run, "activations", "1:output")[1] > 0
    assert found(run, "activation_gradients", "1:output")[0] > 0


def test_an_exact_case_by_hand(tmp_path: Path) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.0, 1.0, 1.0, 1.0]))

        def forward(self, x: Tensor) -> Tensor:
            return (x.half() * self.w.half()).float()

    # FP16's smallest subnormal is 2**-24, and 2**-25 rounds to zero: of the products, one is lost and one is zero.
    model, x = Gate(), torch.tensor([1.0, 2.0**-10, 2.0**-12, 0.0])
    run = shadowed(model, tmp_path / "run", lambda m: m(x).sum() * 2.0**-14)
    assert found(run, "gradients", "w") == (1, 1)
    assert found(run, "activations", "model:output") == (0, 1)


def test_cpu_autocast_in_fp16(tmp_path: Path) -> None:
    model, (x,) = (
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)),
        batches(1, 8, 8),
    )

    def loss(m: nn.Module, *, enabled: bool = True) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16, enabled=enabled):
            out = m(x)
        return spread(out.float())

    real = gradients_of(copy.deepcopy(model), [loss])
    run = shadowed(model, tmp_path / "run", loss)
    # The gradient comes back to the model's output in FP16: some of it is flushed before the model's own backward.
    oracle = copy.deepcopy(model)
    out = oracle(x)
    arriving = torch.autograd.grad(spread(half := out.half().float().detach().requires_grad_()), half)[0].half().float()
    out.backward(arriving)
    shadow = {name: p.grad for name, p in oracle.named_parameters()}
    for name in real:
        assert found(run, "gradients", name) == counts(real[name], shadow[name]), name
    assert found(run, "gradients", "0.weight")[0] > 0


def test_autocast_inside_the_model_is_off_in_the_shadow(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
            self.enabled = True

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.float16, enabled=self.enabled):
                y = self.layers(x)
            return y.float()

    model, (x,) = Model(), batches(1, 8, 8)
    oracle = copy.deepcopy(model)
    oracle.enabled = False
    real = gradients_of(copy.deepcopy(model), [lambda m: spread(m(x))])
    shadow = gradients_of(oracle, [lambda m: spread(m(x))])
    run = shadowed(model, tmp_path / "run", lambda m: spread(m(x)))
    for name in real:
        assert found(run, "gradients", name) == counts(real[name], shadow[name]), name
    assert found(run, "gradients", "layers.0.weight")[0] > 0
    assert torch.autocast.__enter__.__module__ == "torch.amp.autocast_mode"


def test_parameters_and_inputs_in_fp16(tmp_path: Path) -> None:
    model, x = mlp().half(), batches(1, 8, 8)[0].half()

    def loss(m: nn.Module) -> Tensor:
        return spread(m(x.to(next(m.parameters()).dtype)).float())

    real = gradients_of(copy.deepcopy(model), [loss])
    oracle = wide(model)
    arriving = torch.autograd.grad(spread(out := torch.zeros(8, 2, requires_grad=True)), out)[0].half().float()
    oracle(x.float()).backward(arriving)
    run = shadowed(model, tmp_path / "run", loss)
    assert not messages(run)
    for name, p in oracle.named_parameters():
        assert p.grad is not None
        assert found(run, "gradients", name) == counts(real[name], p.grad), name
    assert found(run, "gradients", "0.weight")[0] > 0
    assert model[0].weight.dtype == torch.float16 and type(model[0].weight) is nn.Parameter


def test_a_model_that_returns_its_loss_is_seen_whole(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = HalfLinear(8, 4)

        def forward(self, x: Tensor) -> dict[str, object]:
            y = self.layer(x)
            return {"logits": y, "loss": spread((y * 2).to(self.layer.dtype)), "steps": 3}

    model, (x,) = Model(), batches(1, 8, 8)
    real = gradients_of(copy.deepcopy(model), [lambda m: m(x)["loss"]])
    shadow = gradients_of(wide(model), [lambda m: m(x)["loss"]])
    run = shadowed(model, tmp_path / "run", lambda m: m(x)["loss"])
    assert not messages(run)
    assert found(run, "gradients", "layer.weight") == counts(real["layer.weight"], shadow["layer.weight"])
    assert found(run, "activation_gradients", "layer:output")[0] > 0


@pytest.mark.parametrize("sparse", [False, True])
def test_rows_of_an_embedding_that_were_not_used_are_structural(sparse: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=sparse), HalfLinear(4, 2))
    x = torch.tensor([1, 3, 3, 7])
    real = gradients_of(copy.deepcopy(model), [lambda m: spread(m(x))])["0.weight"].to_dense()
    shadow = gradients_of(wide(model), [lambda m: spread(m(x))])["0.weight"].to_dense()
    run = shadowed(model, tmp_path / "run", lambda m: spread(m(x)))
    assert found(run, "gradients", "0.weight") == counts(real, shadow)
    assert counts(real, shadow)[0] > 0 and counts(real, shadow)[1] >= 28


def dropout_as_on_a_gpu(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout whose mask depends on the dtype: FP16 draws once more before it."""
    if has_torch_function_unary(x):
        return handle_torch_function(dropout_as_on_a_gpu, (x,), x, p=p, training=training, inplace=inplace)
    if x.dtype == torch.float16:
        torch.rand(1)
    return torch.dropout_(x, p, training) if inplace else torch.dropout(x, p, training)


class Dropped(nn.Module):
    def __init__(self, *, inplace: bool, checkpointed: bool) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(8, 64), nn.Dropout(0.3, inplace=inplace), nn.Linear(64, 64)
        self.wide, self.inplace, self.checkpointed = nn.Dropout(0.3), inplace, checkpointed

    def block(self, x: Tensor) -> Tensor:
        y = self.a(x)
        dropped = self.drop(y)
        return y if self.inplace else dropped

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        if y.dtype == torch.float16:
            torch.rand(5)  # as fused attention, which has other kernels in FP32
        return self.wide(self.drop(self.b(y)).float())


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_whose_mask_depends_on_the_dtype(
    checkpointed: bool, inplace: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.functional, "dropout", dropout_as_on_a_gpu)
    monkeypatch.setattr("plimsoll.watch.shadow.replay.ALIKE", frozenset())
    model, (x,) = Dropped(inplace=inplace, checkpointed=checkpointed), batches(1, 8, 8)
    before = torch.get_rng_state()

    def loss(m: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return m(x).square().sum()

    expected = gradients_of(copy.deepcopy(model), [loss])
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    run = shadowed(model, tmp_path / "run", loss)
    assert not messages(run) and torch.equal(torch.get_rng_state(), after)
    for name in ("drop:output", "wide:output", "b:input"):
        underflowed, structural = found(run, "activations", name)
        assert underflowed == 0 and structural > 50, name
    for name in ("a.weight", "b.weight"):
        assert found(run, "gradients", name) == (0, int((expected[name] == 0).sum()))
    for name in ("a:output", "b:output"):
        assert found(run, "activation_gradients", name)[0] == 0


def test_recurrent_tied_and_checkpointed_parts(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.a, self.b = nn.GRU(8, 8, batch_first=True), HalfLinear(8, 8), HalfLinear(8, 8)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            x = self.rnn(x)[0]
            return self.b(checkpoint(lambda y: self.a(y).relu(), x, use_reentrant=False))

    model, (x,) = Model(), batches(1, 2, 5, 8)
    real = gradients_of(copy.deepcopy(model), [lambda m: spread(m(x))])
    shadow = gradients_of(wide(model), [lambda m: spread(m(x))])
    run = shadowed(model, tmp_path / "run", lambda m: spread(m(x)))
    assert not messages(run)
    assert set(counted_steps(run, "gradients")) == set(real)
    for name in real:
        assert found(run, "gradients", name) == counts(real[name], shadow[name])


def test_a_module_that_is_called_twice_adds_up(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.gate = HalfLinear(8, 8), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.gate(self.layer(self.gate(self.layer(x))))

    model, (x,) = Model(), batches(1, 8, 8)
    first = model.gate(model.layer(x))
    second = model.gate(model.layer(first))
    run = shadowed(model, tmp_path / "run", lambda m: spread(m(x)))
    zeros = int((first == 0).sum()) + int((second == 0).sum())
    assert found(run, "activations", "gate:output") == (0, zeros) and found(run, "activations", "model:output")[1] > 0
