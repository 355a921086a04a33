"""Errors of a shadow step, against sums over the tensors of a step and of its twin that tests compute themselves."""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plimsoll as pl
from plimsoll.runs import Run
from plimsoll.watch.shadow.replay import free_bytes
from tests.support.cases import each
from tests.support.watch.recording import batches, only_run
from tests.support.watch.shadow import (
    SMALL,
    HalfLinear,
    gradients_of,
    halves,
    messages,
    shadowed,
    spread,
    tapped,
    wide,
)

STATISTICS = ("relative_error", "snr_db", "cosine", "along_reference", "largest_error")


def numbers(values: Tensor, reference: Tensor) -> dict[str, float]:
    """What a run should say of an error, in float64."""
    y, x = values.detach().double().flatten(), reference.detach().double().flatten()
    e, finite = y - x, (y - x).isfinite()
    y, x, e = y[finite], x[finite], e[finite]
    relative = float(e.norm() / x.norm()) if e.any() else 0.0
    return {
        "relative_error": relative,
        "snr_db": -20 * math.log10(relative) if relative else math.inf,
        "cosine": float(y @ x / y.norm() / x.norm()),
        "along_reference": float(e @ x / (x @ x)),
        "largest_error": float(e.abs().max()),
    }


def recorded(run: Run, collection: str, name: str, step: int = 0) -> dict[str, float]:
    found = {}
    for statistic in STATISTICS:
        steps, values = run.series(collection, name, statistic)
        found[statistic] = float(values[list(steps).index(step)])
    return found


def assert_close(run: Run, collection: str, name: str, values: Tensor, reference: Tensor, step: int = 0) -> None:
    """The twin in FP32 is as good as one in FP64, to 1 % of errors of 16 and 8 bits."""
    wanted, found = numbers(values, reference), recorded(run, collection, name, step)
    assert found["relative_error"] == pytest.approx(wanted["relative_error"], rel=1e-2, abs=1e-6), (collection, name)
    assert found["snr_db"] == pytest.approx(wanted["snr_db"], abs=0.1), (collection, name)
    assert found["cosine"] == pytest.approx(wanted["cosine"], abs=1e-4), (collection, name)
    tiny = 1e-2 * wanted["relative_error"] + 1e-6
    assert found["along_reference"] == pytest.approx(wanted["along_reference"], abs=tiny), (collection, name)
    assert found["largest_error"] == pytest.approx(wanted["largest_error"], rel=2e-2, abs=1e-7), (collection, name)


def test_errors_are_those_of_a_twin_in_fp64(tmp_path: Path) -> None:
    model, (x,) = halves(), batches(1, 8, 8)

    def loss(m: nn.Module) -> Tensor:
        return spread(m(x.to(next(m.parameters()).dtype)).float()) / SMALL

    real, twin = gradients_of(copy.deepcopy(model), [loss]), gradients_of(wide(model, torch.float64), [loss])
    reals, twins = tapped(copy.deepcopy(model), loss), tapped(wide(model, torch.float64), loss)
    run = shadowed(model, tmp_path / "run", loss)
    for name in real:
        assert_close(run, "gradients", name, real[name], twin[name])
    for name in reals:
        for collection, place in (("activations", 0), ("activation_gradients", 1)):
            assert_close(run, collection, f"{name}:output", reals[name][place], twins[name][place])
    assert recorded(run, "gradients", "0.weight")["relative_error"] > 1e-4
    ((*_, sums),) = run.errors("gradients", "0.weight")
    assert sums.compared == real["0.weight"].numel() and sums.made_nonfinite == 0
    assert math.sqrt(sums.referencesq) == pytest.approx(float(twin["0.weight"].norm()), rel=1e-4)


def steps_of(model: nn.Module, path: Path, train: Callable[[nn.Module, torch.optim.Optimizer], None]) -> Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pl.watch(model, optimizer, run=path, every=1, shadow_every=1):
        train(model, optimizer)
    return only_run(path)


@each("kept", ["None", "zero", "carried over"])
def test_gradients_that_were_there_before_are_taken_off(kept: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    model, data = halves(), batches(4, 8, 8)

    def train(m: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x in data:  # two micro-batches a step
            for part in x.chunk(2):
                (spread(m(part)) / SMALL).backward()
            optimizer.step()
            if kept != "carried over":
                optimizer.zero_grad(set_to_none=kept == "None")

    losses = [lambda m, part=part: spread(m(part)) / SMALL for part in data[2].chunk(2)]
    real, twin = gradients_of(copy.deepcopy(model), losses), gradients_of(wide(model), losses)
    run = steps_of(model, tmp_path_factory.mktemp("run"), train)
    for name in real:
        wanted = numbers(real[name], twin[name])["relative_error"]
        found = recorded(run, "gradients", name, 2)["relative_error"]
        # What was carried over is taken off in FP32, which costs a few of its last digits.
        assert found == pytest.approx(wanted, rel=2e-2), name


def test_unscaling_and_clipping_are_no_errors(tmp_path: Path) -> None:
    model, (x,) = halves(), batches(1, 8, 8)
    real = gradients_of(copy.deepcopy(model), [lambda m: spread(m(x)) / SMALL])
    twin = gradients_of(wide(model), [lambda m: spread(m(x)) / SMALL])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    with pl.watch(model, optimizer, run=tmp_path / "run", shadow_every=1, scaler=scaler):
        scaler.scale(spread(model(x)) / SMALL).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
    run = only_run(tmp_path / "run")
    for name in real:
        found = recorded(run, "gradients", name)
        assert found["relative_error"] == pytest.approx(numbers(real[name], twin[name])["relative_error"], rel=0.05)
        ((*_, sums),) = run.errors("gradients", name)
        assert math.sqrt(sums.referencesq) == pytest.approx(float(twin[name].norm()), rel=1e-3)  # not as scaled
    ((*_, sums),) = run.errors("activation_gradients", "4:output")
    arriving = tapped(wide(halves()), lambda m: spread(m(x)) / SMALL)["4"][1]
    assert math.sqrt(sums.referencesq) == pytest.approx(float(arriving.norm()), rel=1e-3)


class InPlace(nn.Module):
    """Outputs that are changed in place, by an activation and by a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.second = HalfLinear(8, 8), nn.ReLU(inplace=True), HalfLinear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.first(x))
        z = self.second(y)
        z += y
        return z


def test_outputs_that_are_changed_in_place(tmp_path: Path) -> None:
    model, (x,) = InPlace(), batches(1, 8, 8)
    twin = wide(model)
    real = model.first(x)
    run = shadowed(model, tmp_path / "run", lambda m: spread(m(x)))
    assert not messages(run)
    assert_close(run, "activations", "first:output", real, twin.first(x))
    assert_close(run, "activations", "relu:output", real.relu(), twin.first(x).relu())
    second = model.second(real.relu())
    assert_close(run, "activations", "second:output", second, twin.second(twin.first(x).relu()))


def test_outputs_that_are_changed_in_some_steps_only(tmp_path: Path) -> None:
    """From the second step on nothing is copied that was not changed before: what is changed then is left out, once."""
    model, (x,) = InPlace(), batches(1, 8, 8)
    twin = wide(model)
    real = model.first(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1, shadow_every=1):
        for inplace in (False, False, True, True, False):
            model.relu.inplace = inplace
            spread(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
    run = only_run(tmp_path / "run")
    assert not messages(run)
    steps, _ = run.series("activations", "first:output", "relative_error")
    assert list(steps) == [0, 1, 3, 4]
    for step in steps:
        assert_close(run, "activations", "first:output", real, twin.first(x), int(step))
        assert_close(run, "activations", "relu:output", real.relu(), twin.first(x).relu(), int(step))
    second = model.second(real.relu())
    for step in range(5):
        assert_close(run, "activations", "second:output", second, twin.second(twin.first(x).relu()), step)


class Partial(nn.Module):
    """A module called twice, a checkpointed part, dropout, batch norm, and frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.norm = HalfLinear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8)
        self.frozen, self.head = HalfLinear(8, 8), HalfLinear(8, 2)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.layer(self.layer(x)))
        y = checkpoint(lambda z: self.drop(self.frozen(z)), y, use_reentrant=False)
        return self.head(y)


def test_dropout_checkpoints_frozen_parts_and_buffers(tmp_path: Path) -> None:
    model, (x,) = Partial(), batches(1, 8, 8)
    twin, plain = wide(model), copy.deepcopy(model)

    def loss(m: nn.Module) -> Tensor:
        return spread(m(x)) / SMALL

    state = torch.get_rng_state()
    real = gradients_of(plain, [loss])
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    expected = gradients_of(twin, [loss])
    torch.set_rng_state(state)
    run = shadowed(model, tmp_path / "run", loss)
    assert not messages(run) and torch.equal(torch.get_rng_state(), after)
    for name in real:
        assert_close(run, "gradients", name, real[name], expected[name])
    assert "frozen.weight" not in {name for _, _, name, _ in run.errors("gradients")}
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, dict(model.named_buffers())[name]), name
    ((*_, sums),) = run.errors("activations", "layer:output")
    assert sums.compared == 2 * 64  # of both calls


def test_nan_in_one_twin_only(tmp_path: Path) -> None:
    class Overflowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x).half() * 2.0**14).float()

    model = Overflowing()
    nn.init.constant_(model.layer.weight, 1.0)
    nn.init.zeros_(model.layer.bias)
    x = torch.tensor([[1.0, 1, 1, 1], [0.1, 0.1, 0.1, 0.1]])
    run = shadowed(model, tmp_path / "run", lambda m: m(x).sum())
    ((*_, sums),) = run.errors("activations", "model:output")  # 4 * 2^14 is beyond FP16, 0.4 * 2^14 is not
    assert (sums.compared, sums.made_nonfinite, sums.reference_nonfinite) == (4, 4, 0)
    assert sums.relative_error < 1e-3
    assert run.series("activations", "model:output", "made_nonfinite")[1].tolist() == [4]
    broken = x.clone()
    broken[0, 0] = math.nan
    other = shadowed(Overflowing(), tmp_path / "other", lambda m: m(broken).sum())
    ((*_, sums),) = other.errors("activations", "model:output")
    assert (sums.compared, sums.made_nonfinite, sums.reference_nonfinite) == (4, 0, 4)


@each("kind", ["outside", "around the backward", "plan", "fp8-tensor", "amp-bf16", "bf16-stochastic"])
def test_emulation_and_fp8_layers_are_off_in_the_twin(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    (x,) = batches(1, 16, 16)
    twin, path = copy.deepcopy(model), tmp_path_factory.mktemp("run")
    with pl.watch(model, optimizer, run=path, shadow_every=1) as w:
        if kind in {"outside", "around the backward", "plan"}:
            plan = pl.Plan(target="fp8", formats={"0": "e4m3", "2": "e4m3"})
            formats = {"forward": "e4m3", "backward": "e5m2"}
            with pl.emulate(plan, model=model) if kind == "plan" else pl.emulate(**formats):
                loss = model(x).square().sum()
                if kind == "around the backward":
                    loss.backward()
            if kind != "around the backward":
                loss.backward()
            optimizer.step()
        else:
            with pl.prepare(model, optimizer, kind, watch=w) as loop:
                with loop.forward():
                    loss = model(x).float().square().sum()
                loop.step(loss)
    run = only_run(path)
    assert not messages(run)
    if kind.startswith("bf16"):
        twin.to(torch.bfloat16).float()  # the weights that the model has are the twin's too
    expected = x
    for place, module in enumerate(twin):
        expected = module(expected).detach()
        ((*_, sums),) = run.errors("activations", f"{place}:output")
        # A model in BF16 is given its batch in BF16, too.
        assert math.sqrt(sums.referencesq) == pytest.approx(float(expected.norm()), rel=1e-3), place
        assert 1e-4 < sums.relative_error < 0.2, place
    for _, _, name, sums in run.errors("gradients"):
        assert sums.relative_error < 0.3, name
    assert recorded(run, "gradients", "0.weight")["relative_error"] > 1e-3


def test_memory_is_below_twice_the_activations_of_a_step(tmp_path: Path) -> None:
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (x,) = batches(1, 4096, 64)
    activations = 12 * x.nbytes  # every output is kept by autograd: by the next linear layer, or by the GELU

    def peak(*, watched: bool) -> int:
        with torch.profiler.profile(profile_memory=True) as profile:
            model(x).square().sum().backward()
            if watched:
                optimizer.step()
        held = most = 0
        for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        optimizer.zero_grad()
        return most

    bare = peak(watched=False)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=100, shadow_every=2):
        first = peak(watched=True)
        between = peak(watched=True)
    assert recorded(only_run(tmp_path / "run"), "activations", "5:output")["relative_error"] == 0
    assert between < bare + 0.1 * activations
    assert activations < first < bare + 2 * activations


def test_a_twin_that_does_not_fit_is_left_out_with_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x,) = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).bfloat16(), batches(1, 4, 8)
    # 90 weights and biases, in FP32 and with gradients: 720 bytes.
    monkeypatch.setattr("plimsoll.watch.shadow.replay.free_bytes", lambda _: 719)
    run = shadowed(model, tmp_path / "run", lambda m: m(x.bfloat16()).float().sum())
    (message,) = messages(run)
    assert "its twin needs 720 bytes on cpu for weights and gradients, and 719 are free" in message
    monkeypatch.setattr("plimsoll.watch.shadow.replay.free_bytes", lambda _: 720)
    assert list(shadowed(model, tmp_path / "other", lambda m: m(x.bfloat16()).float().sum()).errors())


def test_what_is_free_is_told_in_bytes() -> None:
    free = free_bytes(torch.device("cpu"))
    assert free is None or 1 << 20 < free < 1 << 50
    assert free_bytes(torch.device("meta")) is None


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_inside_compiled_code(backend: str, tmp_path: Path) -> None:
    torch.compiler.reset()
    model, data = nn.Sequential(HalfLinear(8, 16), nn.ReLU(inplace=True), HalfLinear(16, 2)), batches(3, 8, 8)
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1, shadow_every=2):
        for x in data:
            (spread(compiled(x)) / SMALL).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.compiler.reset()
    run = only_run(tmp_path / "run")
    assert not messages(run)

    def loss(m: nn.Module) -> Tensor:
        return spread(m(data[2])) / SMALL

    real, twin = gradients_of(copy.deepcopy(plain), [loss]), gradients_of(wide(plain, torch.float32), [loss])
    first, second = plain[0](data[2]), wide(plain)[0](data[2])
    for name in real:
        wanted = numbers(real[name], twin[name])["relative_error"]
        assert recorded(run, "gradients", name, 2)["relative_error"] == pytest.approx(wanted, rel=0.1), name
    wanted = numbers(first, second)["relative_error"]
    assert recorded(run, "activations", "0:output", 2)["relative_error"] == pytest.approx(wanted, rel=0.1)
    found = {(collection, name) for step, collection, name, _ in run.errors() if step == 2}
    assert {("activations", "1:output"), ("activation_gradients", "1:output"), ("gradients", "0.weight")} <= found
    assert {step for step, *_ in run.errors()} == {0, 2}


def test_compiled_code_that_draws_other_numbers_is_not_compared(tmp_path: Path) -> None:
    torch.compiler.reset()
    model, (x,) = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), batches(1, 8, 8)
    compiled = torch.compile(model)
    run = shadowed(model, tmp_path / "run", lambda _: compiled(x).square().sum())
    torch.compiler.reset()
    (message,) = messages(run)
    assert "compiled code draws other random numbers" in message and "fallback_random = True" in message
    assert not list(run.errors())
