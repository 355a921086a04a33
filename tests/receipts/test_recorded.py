"""Receipts of recorded runs: the formats at the borders of modules, and what a run cannot say."""

from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn

import plimsoll as pl
from plimsoll.formats import Plan
from plimsoll.receipts import receipt_of_run
from plimsoll.runs import Run, RunWriter, Scalars
from tests.support.cases import each


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two layers in BF16 by autocast, FP32 weights, and a moment in BF16."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pl.watch(model, optimizer, run=folder, every=1):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                y = model(torch.randn(8, 16))
            y.float().square().mean().backward()
            optimizer.step()
            for state in optimizer.state.values():
                state["momentum_buffer"] = state["momentum_buffer"].bfloat16()
                state["step"] = torch.tensor(1.0)
    return Run(folder)


def test_what_a_run_has_and_what_it_lacks(run: Run):
    found = receipt_of_run(run)
    assert found.verdict == "Nothing declared."
    assert {row.kind for row in found.rows} == {"module"}
    forward = {row.module: row.formats for row in found.rows if row.phase == "forward"}
    assert forward["0"] == "fp32 -> bf16" and forward["2"] == "bf16 -> bf16"
    assert {(t.role, t.format) for t in found.tensors} >= {("weights", "fp32"), ("optimizer", "bf16")}
    assert {t.name.partition(":")[2] for t in found.tensors if t.role == "optimizer"} == {"momentum_buffer"}
    assert "no single operations, accumulators, collectives or compiled kernels" in found.notes[0].replace("\n", " ")
    # No gradient of the model's input was recorded, and no size of any tensor.
    assert next(row.formats for row in found.rows if row.phase == "backward" and row.module == "0") == "bf16"
    assert "unknown" in str(found) and " 0 B" not in str(found)
    assert found.settings["torch"] == metadata.version("torch")


@each(
    "declared, kinds",
    [
        ("amp-bf16", {"optimizer-state"}),
        ("amp-fp16", {"optimizer-state", "loss-scale"}),
        ("bf16-master", {"optimizer-state", "weights"}),
        (
            Plan(target="fp8", formats={"2": "e4m3"}, scales={"2": {"gradients": 4.0}}),
            {"optimizer-state", "fp8-missing"},
        ),
    ],
    ids=str,
)
def test_deviations_that_a_run_can_show(declared: object, kinds: set[str], run: Run):
    assert {deviation.kind for deviation in receipt_of_run(run, declared).deviations} == kinds


def test_a_run_that_was_trained_at_another_level(tmp_path: Path):
    with RunWriter(tmp_path / "run") as writer:
        writer.write_manifest(precision="fp32")
        writer.write(Scalars(step=0, values={"loss": 1.0}))
    found = receipt_of_run(Run(tmp_path / "run"), "amp-bf16")
    assert [(d.kind, d.expected, d.actual) for d in found.deviations] == [("level", "amp-bf16", "fp32")]
    assert any(note.startswith("Weights were not recorded") for note in found.notes)


def test_fp8_layers_of_a_run(tmp_path: Path):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    pl.fp8.convert(model, "tensor", include=["0"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        model(torch.randn(16, 16)).square().mean().backward()
        optimizer.step()
    plan = Plan(target="fp8", formats={"0": "e4m3"}, scales={"0": {"gradients": 4.0}})
    found = receipt_of_run(Run(tmp_path / "run"), plan)
    assert {(row.module, row.output) for row in found.rows if row.kind == "cast"} == {("0", "e4m3"), ("0", "e5m2")}
    assert found.deviations == ()
