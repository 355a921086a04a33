"""Accelerate, the real one: watched, with our scalers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

import plimsoll as pl
from plimsoll.integrations.accelerate import use_scaler, watch
from plimsoll.scaling import DynamicScaler


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch, accelerator: Accelerator) -> Accelerator:
    """One that says it trains in FP16, which Accelerate does on no CPU; its scaler is then ours to give."""
    monkeypatch.setattr(Accelerator, "mixed_precision", "fp16")
    return accelerator


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(accelerator: Any, model: Any, optimizer: Any, steps: int = 4, broken: int | None = None) -> None:
    torch.manual_seed(1)
    for step in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.randint(3, (4,)))
        accelerator.backward(loss * torch.inf if step == broken else loss)
        optimizer.step()


def test_what_is_prepared_is_watched_with_its_optimizer(accelerator: Accelerator, tmp_path: Path) -> None:
    model, optimizer = accelerator.prepare(*parts())
    with watch(accelerator, model, run=tmp_path / "run", every=2) as handle:
        train(accelerator, model, optimizer)
    run = pl.Run(tmp_path / "run")
    assert handle.closed and list(run.steps) == [0, 2]
    assert "0.weight:exp_avg" in run.tensors["optimizer"] and "2:output" in run.tensors["activations"]


def test_our_scaler_scales_and_its_skips_are_recorded(half: Any, tmp_path: Path) -> None:
    scaler = DynamicScaler("cpu")
    use_scaler(half, scaler)
    model, plain = parts()
    optimizer = half.prepare(plain)  # the model stays in FP32: autocast to FP16 is the GPU's
    with watch(half, model, run=tmp_path / "run", every=1):
        train(half, model, optimizer, broken=2)
    assert scaler.get_scale() == 2.0**15 and all(p.isfinite().all() for p in model.parameters())
    run = pl.Run(tmp_path / "run")
    assert [event.step for event in run.events() if event.kind == "skip"] == [2]
    assert run.scalars("scale")[1].tolist() == [2.0**16] * 3 + [2.0**15]


def test_a_scaler_that_comes_too_late_is_refused(half: Any) -> None:
    half.prepare(parts()[1])
    with pytest.raises(pl.StateError, match="Call use_scaler before accelerator.prepare"):
        use_scaler(half, DynamicScaler("cpu"))


def test_no_scaler_where_nothing_is_scaled(accelerator: Accelerator) -> None:
    with pytest.raises(pl.ArgumentError, match="got mixed_precision='no'"):
        use_scaler(accelerator, DynamicScaler("cpu"))


def test_what_is_no_scaler_is_refused(half: Any) -> None:
    with pytest.raises(pl.ArgumentError, match="expected a loss scaler.*got float"):
        use_scaler(half, 65536.0)
