"""Complex parameters are left out by name, and all others are recorded."""

import math
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from tests.support.watch.recording import batches, only_run, same

STEPS = 3


class Spectral(nn.Module):
    """Has a complex weight, as layers that work on Fourier coefficients do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.modes = nn.Parameter(torch.randn(8, 4, dtype=torch.cfloat))
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (torch.fft.fft(x) @ self.modes).abs() + self.linear(x)


@pytest.fixture
def always_warned() -> Iterator[None]:
    """Torch warns of some things once in a process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.parametrize("options", [{}, {"every": 10}, {"shadow_every": 1}], ids=str)
def test_complex_weights_are_left_out_by_name(tmp_path: Path, options: dict[str, int]) -> None:
    model, kept = Spectral(), list[dict[str, Tensor]]()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pl.watch(model, optimizer, run=tmp_path / "run", **{"every": 1, **options}):
            for x in batches(STEPS, 4, 8):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                weights = {name: p.detach().clone() for name, p in model.named_parameters()}
                optimizer.step()
                now = {name: p.detach() - weights[name] for name, p in model.named_parameters()}
                kept.append({f"updates {name}": p for name, p in now.items()})
                kept[-1] |= {f"weights {name}": p for name, p in weights.items()}
                kept[-1] |= {f"gradients {name}": p.grad for name, p in model.named_parameters()}
                state = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
                kept[-1] |= {f"optimizer {name}:exp_avg": x for name, x in state.items()}
    run = only_run(tmp_path / "run")
    assert [event.message for event in run.events() if event.kind in ("failure", "shadow")] == []
    messages = [event.message for event in run.events() if event.kind == "not measured"]
    assert len(messages) == len(set(messages)) and all("complex" in message for message in messages)
    assert {message.partition(":")[0] for message in messages} >= {
        "weights modes", "gradients modes", "updates modes", "optimizer modes"
    }  # fmt: skip
    for step in run.steps:
        for what, x in kept[step].items():
            collection, name = what.split(" ")
            if x.is_complex():
                assert name not in run.tensors[collection]
            else:
                assert same(run.spectrum(collection, name, step), x), (what, step)


@pytest.mark.parametrize("every", [1, 10])
def test_nan_in_complex_gradients_is_counted(tmp_path: Path, every: int) -> None:
    model = Spectral()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=every):
        for x in batches(STEPS, 4, 8):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            model.modes.grad[0, 0] = complex(0.0, float("nan"))
            optimizer.step()
    run = only_run(tmp_path / "run")
    assert [event.message for event in run.events() if event.kind == "failure"] == []
    assert run.scalars("nonfinite")[1][:1].tolist() == [1.0]


class Wave(nn.Module):
    """Puts out complex values, and has a buffer of them."""

    def __init__(self) -> None:
        super().__init__()
        self.modes = nn.Parameter(torch.randn(8, 4, dtype=torch.cfloat))
        self.register_buffer("shift", torch.ones(4, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.modes * self.shift


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wave, self.linear = Wave(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.wave(x.cfloat()).abs() + self.linear(x)


@pytest.mark.parametrize("where", ["weights", "buffers"])
def test_complex_values_that_break_a_training_are_named(where: str, tmp_path: Path) -> None:
    model = Waves()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=2, quiet=True):
        for step, x in enumerate(batches(8, 4, 8)):
            if step == 5:
                with torch.no_grad():
                    (model.wave.modes if where == "weights" else model.wave.shift).view(-1)[0] = complex(math.inf, 0.0)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    run = only_run(tmp_path / "run")
    name = "wave.modes" if where == "weights" else "wave.shift"
    assert name in " ".join(event.message for event in run.events() if event.kind == "origin")
    if where == "weights":  # of a buffer it is known at the next sample
        (finding,) = pl.diagnose(run, rules=["nonfinite"])
        assert finding.where == (name,)


def test_complex_activations_are_left_out_by_name_and_no_disk_is_blamed(tmp_path: Path) -> None:
    model = Waves()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1, quiet=True):
        for x in batches(STEPS, 4, 8):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    run = only_run(tmp_path / "run")
    said = [event.message for event in run.events() if event.kind == "not measured"]
    for role in ("input", "output"):
        assert sum(message.startswith(f"activations wave:{role}: ") for message in said) == 1, said
    (finding,) = pl.diagnose(run, rules=["records-lost"])
    assert finding.severity == "info" and "disk" not in finding.advice


@pytest.mark.usefixtures("always_warned")
@pytest.mark.filterwarnings("error")
def test_complex_layers_lose_no_imaginary_part(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.cfloat), nn.Linear(8, 4, dtype=torch.cfloat))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        for x in batches(12, 4, 8):
            optimizer.zero_grad()
            model(torch.complex(x, x)).abs().square().mean().backward()
            optimizer.step()
    assert [event.message for event in only_run(tmp_path / "run").events() if event.kind == "failure"] == []
