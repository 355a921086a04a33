"""Losses of small gradients that do harm, and those that no training would notice."""

from pathlib import Path

import torch
from torch import Tensor

from plimsoll.diagnosis import Finding, View, diagnose
from plimsoll.report.drawing.heatmap_statistics import underflow
from plimsoll.runs import Run
from tests.support.diagnosis.faults import A, told


def evenly(low: float, high: float, count: int = 512) -> Tensor:
    """Sizes whose powers of two are evenly spread."""
    return torch.linspace(low, high, count).exp2()


def found(path: Path, sizes: Tensor) -> list[Finding]:
    """Findings on a layer whose gradients have these sizes; what is below 2^-35 is lost."""

    def change(g: Tensor, layer: str, step: int) -> Tensor:
        return g.sign() * sizes if layer == A else g

    path = told(change_gradient=change).write(path, until=100)
    return [f for f in diagnose(path, rules=["underflow-*", "scale-low"]) if f.severity != "info"]


def test_values_that_fp32_would_not_add_to_the_others_are_no_loss(tmp_path: Path) -> None:
    assert found(tmp_path / "run", evenly(-41, 3)) == []  # a seventh is lost, all of it 2^-32 of the rest
    drawn = underflow(View(Run(tmp_path / "run")), "gradients")
    assert drawn is not None and 0.1 < drawn.values.max() < 0.2  # a figure shows what was lost nevertheless


def test_the_same_share_of_values_near_the_others_is_one(tmp_path: Path) -> None:
    high, *_ = (f for f in found(tmp_path / "run", evenly(-39, -11)) if f.rule == "underflow-high")
    assert 0.1 < float(high.evidence["worst_lost"]) < 0.2 and high.where[0].startswith(A)


def test_most_of_a_layer_is_never_a_small_loss(tmp_path: Path) -> None:
    assert found(tmp_path / "run", torch.cat([evenly(-37, -33, 412), evenly(-20, 3, 100)]))
