"""Losses of small gradients that do harm, and those that no training would notice."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import Finding, View, diagnose
from plimsoll.report.drawing.heatmap_statistics import underflow
from plimsoll.runs import Run
from tests.support.cases import each
from tests.support.diagnosis.faults import A
from tests.support.diagnosis.stories import make_story


def evenly(low: float, high: float, count: int = 512) -> Tensor:
    """Sizes whose powers of two are evenly spread."""
    return torch.linspace(low, high, count).exp2()


def found(path: Path, sizes: Tensor) -> list[Finding]:
    """Findings on a layer whose gradients have these sizes; what is below 2^-35 is lost."""

    def change(g: Tensor, layer: str, step: int) -> Tensor:
        return g.sign() * sizes if layer == A else g

    path = make_story(change_gradient=change).write(path, until=100)
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


def since_100(loss: float) -> Callable[[int], float]:
    return lambda step: 2.0 if step < 100 else loss


@each(
    ("loss", "severity"),
    [
        (since_100(1e-4), "warning"),
        (since_100(1e-2), "alarm"),
        (lambda step: 2.0 if step < 100 or step == 150 else 1e-4, "alarm"),  # there was something to learn again
    ],
)
def test_a_low_scale_is_no_alarm_once_next_to_nothing_of_the_loss_is_left(
    loss: Callable[[int], float], severity: str, tmp_path: Path
) -> None:
    path = Path(tempfile.mkdtemp(dir=tmp_path)) / "run"
    sizes = make_story(scale=lambda s: 1.0, gradient_std=lambda _, s: 2.0**-14 if s < 100 else 2.0**-22, loss=loss)
    (finding,) = diagnose(sizes.write(path), rules=["scale-low"])
    assert (finding.severity, finding.since_step) == (severity, 100)


# -- gradients of parameters that are zero since those of their module's output were flushed


class Branches(nn.Module):
    """Two branches whose gradients are far apart."""

    def __init__(self, apart: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large, self.small = nn.Linear(16, 10), nn.Linear(16, 10)
        self.apart = apart

    def forward(self, x: Tensor) -> Tensor:
        small = self.small(x.relu()).float() * 2.0 ** (12 - self.apart)
        return torch.cat([self.large(x).float() * 2.0**12, small])


def branches(path: Path, apart: int, first: float, later: float) -> dict[str, Finding]:
    """The findings of emulated FP16 whose loss scale is another from the third step on."""
    model = Branches(apart)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=first, growth_interval=10_000)
    with pl.watch(model, optimizer, run=path, scaler=scaler, every=1, quiet=True):
        for step in range(10):
            x = torch.rand(32, 16)
            optimizer.zero_grad()
            with pl.emulate("fp16"):
                loss = model(x).abs().mean() / 64
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update(later if step >= 1 else first)
    found = [finding for finding in diagnose(path) if finding.severity != "info"]
    return {finding.rule: finding for finding in reversed(found)}  # the first of each, of parameters


def test_gradients_that_a_flushed_output_makes_zero_are_lost(tmp_path: Path) -> None:
    found = branches(tmp_path / "far", 40, first=2.0**20, later=2.0**13)
    assert found.keys() == {"underflow-high", "no-single-scale"}
    assert found["underflow-high"].where == ("small.weight",)
    assert "LayerScaler" in found["underflow-high"].advice and "small needs" in found["underflow-high"].advice
    assert branches(tmp_path / "near", 4, first=16.0, later=8.0) == {}


def test_where_the_scale_has_room_it_is_to_rise(tmp_path: Path) -> None:
    found = branches(tmp_path / "run", 26, first=2.0**6, later=2.0**3)
    assert "no-single-scale" not in found and "dead-layer" not in found
    assert "raise the loss scale to between" in found["underflow-high"].advice.lower()
