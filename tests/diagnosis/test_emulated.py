"""Runs that an emulation computes: their tensors are of FP32, and what they lose another format has lost."""

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import plimsoll as pl
from plimsoll.diagnosis.view import View


def trained(folder: Path, *, divisor: float, steps: int = 12, every: int = 2, **emulated: str) -> pl.Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(64, 16)
    target = data[:, :10].argmax(1)
    with pl.watch(model, optimizer, run=folder, every=every):
        for _ in range(steps):
            optimizer.zero_grad()
            with pl.emulate(**emulated) if emulated else contextlib.nullcontext():
                loss = functional.cross_entropy(model(data), target) / divisor
            loss.backward()
            optimizer.step()
    return pl.Run(folder)


def judged(run: pl.Run) -> list[tuple[str, str]]:
    return [(f.severity, f.rule) for f in pl.diagnose(run) if f.severity != "info"]


E4M3 = {"forward": "e4m3", "backward": "e4m3", "operations": "all"}


def test_gradients_that_are_all_below_the_emulated_format_underflow_and_no_layer_is_dead(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", divisor=64.0, **E4M3)
    assert judged(run) == [("alarm", "underflow-high")]
    (found,) = (f for f in pl.diagnose(run) if f.rule == "underflow-high")
    assert found.evidence["format"] == "e4m3" and found.since_step == 0
    assert set(found.where) == {"0.weight", "2.weight"}


def test_gradients_that_the_emulated_format_flushes_in_part_underflow_too(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", divisor=2.0, **E4M3)
    found = {f.rule: f for f in pl.diagnose(run)}
    assert "dead-layer" not in found
    assert found["underflow-high"].evidence["format"] == "e4m3"


def test_gradients_that_the_emulated_format_holds_are_sound(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", divisor=2.0**-6, forward="e4m3", backward="e5m2", operations="all")
    assert judged(run) == []


def test_gradients_of_activations_that_were_not_looked_at_prove_nothing(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collect = {"gradients": 1, "activation_gradients": 100}
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1, collect=collect):
        for step in range(12):
            optimizer.zero_grad()
            ((step < 2) * model(torch.ones(2, 4)).square().sum() + 1.0).backward()
            optimizer.step()
    view = View(pl.Run(tmp_path / "run"))
    view.__dict__["emulations"] = [(range(2, 100), {"activation_gradients": "e4m3"})]
    assert "underflow-high" not in {f.rule for f in pl.diagnose(view)}


def test_formats_of_products_alone_are_not_those_of_results(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", divisor=1.0, forward="e4m3", backward="e5m2")
    assert {event.kind for event in run.events()} <= {"wiring"}  # the number of classes


def test_the_run_says_from_where_to_where_results_are_rounded(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        for step in range(6):
            fmt = "e5m2" if 2 <= step < 4 else None
            with pl.emulate(forward=fmt, operations="all") if fmt else torch.enable_grad():
                loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    run = pl.Run(tmp_path / "run")
    said = [(event.step, event.details["formats"]) for event in run.events() if event.kind == "emulation"]
    assert said == [(2, {"activations": "e5m2"}), (4, {})]
    cells = View(run).cells("activations")
    assert cells is not None
    known = {(int(cells.steps[at]), cells.formats[fmt]) for at, fmt in zip(cells.at, cells.format, strict=True)}
    assert known == {(step, "e5m2" if 2 <= step < 4 else "fp32") for step in range(6)}


@pytest.mark.parametrize("formats", [None, 7, {"activations": "no such format"}])
def test_damaged_events_of_an_emulation_are_left_out(formats: object, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", divisor=1.0)
    event = pl.runs.Event(step=0, kind="emulation", message="", details={"formats": formats})
    view = View(run)
    view.__dict__["events"] = [event]
    cells = view.cells("activations")
    assert cells is not None and set(cells.formats) == {"fp32"}
