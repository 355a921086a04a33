"""That a watch sees our scalers as it does torch's, once each, without being handed them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import plimsoll as pl
from plimsoll.scaling import DynamicScaler, LossScaler, StaticScaler
from plimsoll.watch.hooks import torch_hooks
from tests.support import processes
from tests.support.watch.recording import batches, mlp, only_run, train


def record(make: Callable[[], Any], folder: Path, *, fused: bool) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model, data = mlp(), batches(6, 4, 8)
    data[2], data[4] = data[2] * 1e30, data[4] * torch.nan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    with pl.watch(model, optimizer, run=folder, every=1):
        losses = train(model, optimizer, data, make())
    run = only_run(folder)
    scalars = {name: run.scalars(name)[1].tolist() for name in ("loss", "scale", "nonfinite")}
    spectra = {tuple(key): spectrum.to_dict() for *key, spectrum in run.spectra()}
    if fused:  # torch gives such an optimizer scaled gradients, ours unscaled ones: of what they are is recorded too
        for (_, collection, _), spectrum in spectra.items():
            if collection == "gradients":
                del spectrum["source"], spectrum["grid"]
    events = [(event.kind, event.step) for event in run.events()]
    return losses, scalars, events, list(run.steps), spectra


@pytest.mark.parametrize("fused", [False, True])
def test_a_watched_run_is_the_same_as_with_gradscaler(fused: bool, tmp_path: Path) -> None:
    stock = repr(record(lambda: torch.amp.GradScaler("cpu"), tmp_path / "stock", fused=fused))
    own = repr(record(lambda: DynamicScaler("cpu", regrowth_interval=None), tmp_path / "own", fused=fused))
    assert own == stock
    assert "'scale': [65536.0, 65536.0, 65536.0, 32768.0, 32768.0, 16384.0]" in own
    assert "('skip', 2)" in own and "('skip', 4)" in own


def test_each_call_is_seen_once_and_the_class_is_as_it_was_afterwards(tmp_path: Path) -> None:
    class Listener:
        def __init__(self) -> None:
            self.events: list[str] = []

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: self.events.append(name)

    before = [LossScaler.__dict__[name] for name in ("scale", "step", "update")]
    listener, parameter = Listener(), torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), StaticScaler(8.0, device="cpu")
    torch_hooks.subscribe(listener)  # type: ignore[arg-type]
    try:
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    finally:
        torch_hooks.unsubscribe(listener)  # type: ignore[arg-type]
    own = [name for name in listener.events if name.startswith(("loss_scaled", "scaler_", "optimizer_"))]
    assert own == [
        "loss_scaled", "optimizer_begins", "optimizer_ends", "scaler_step_ends", "scaler_update_begins",
        "scaler_update_ends",
    ]  # fmt: skip
    assert [LossScaler.__dict__[name] for name in ("scale", "step", "update")] == before


LATE = """
import torch, plimsoll as pl, sys
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with pl.watch(model, optimizer, run=sys.argv[1], every=1) as watch:
    assert "plimsoll.scaling" not in sys.modules
    scaler = pl.scaling.DynamicScaler("cpu", 256.0)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 2), factor)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
"""


def test_scalers_that_are_imported_while_a_watch_is_open_are_seen(tmp_path: Path) -> None:
    done = processes.python("-c", LATE, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path / "run")
    assert run.scalars("scale")[1].tolist() == [256.0, 256.0, 128.0]
    assert [event.step for event in run.events() if event.kind == "skip"] == [1]


class _Custom(torch.optim.Optimizer):
    """An optimizer that skips by itself, by torch's agreement, and is not torch's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self._step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            update = parameter.grad / self.grad_scale
            parameter.data -= torch.where(self.found_inf > 0, 0.0, update)


def test_gradients_of_other_fused_optimizers_are_recorded_at_their_true_magnitude(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer, scaler = _Custom(model.parameters()), DynamicScaler("cpu", 1024.0)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        scaler.scale(model(torch.full((1, 2), 3.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert only_run(tmp_path / "run").spectrum("gradients", "weight", 0).absmax == 3.0
