"""Runs in FP8, of real trainings: healthy ones are not accused, faults are named with module, role and scale.

What the rules say of a cast is held against the cast itself: tensors are kept, cast by `plimsoll.cast`, and counted.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll import unit
from plimsoll.diagnosis import View, diagnose
from plimsoll.diagnosis.estimates.cast_cells import cast_cells
from plimsoll.diagnosis.rules.casts import UnitDrift
from plimsoll.formats import E4M3, E5M2
from plimsoll.runs import Run
from tests.support.diagnosis.faults import eight
from tests.support.diagnosis.guarded import wait_for_look
from tests.support.diagnosis.stories import constant

CASTS = ["cast-*", "codes-unused", "unit-drift"]


class Net(nn.Module):
    def __init__(self, layers: Any, readout: Any) -> None:
        super().__init__()
        self.up = layers.Linear(16, 64)
        self.act = layers.GELU()
        self.norm = layers.LayerNorm(64)
        self.down = layers.Linear(64, 32)
        self.head = readout(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.norm(self.act(self.up(x)))))


def unit_scaled() -> Net:
    torch.manual_seed(0)
    return Net(unit.nn, unit.nn.LinearReadout)


def plain() -> Net:
    torch.manual_seed(0)
    return Net(nn, nn.Linear)


def trained(
    net: nn.Module,
    precision: str,
    path: Path,
    change: Callable[[int, Tensor], Tensor],
    factor: float = 1.0,
    **more: Any,
) -> Run:
    """Forty-five steps of it, each sampled; `change` makes the inputs of a step, `factor` multiplies the loss."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    loss_of = unit.nn.CrossEntropyLoss() if isinstance(net.up, unit.nn.Linear) else nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(1)
    with pl.prepare(net, optimizer, precision, **more) as loop, pl.watch(net, optimizer, run=path, every=1):
        for step in range(45):
            x = torch.randn(64, 16, generator=generator)
            labels = x[:, :4].argmax(1)
            with loop.forward():
                loss = loss_of(loop.model(change(step, x)).float(), labels) * factor
            loop.step(loss)
    return Run(path)


def same(step: int, x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("history", [0, 4])
@pytest.mark.parametrize(("make", "precision"), [(unit_scaled, "fp8-unit"), (plain, "fp8-tensor")])
def test_a_healthy_run_is_not_accused(make: Any, precision: str, history: int, tmp_path: Path) -> None:
    more = {"policy": pl.Policy().with_fp8(history=history)} if history and precision == "fp8-tensor" else {}
    run = trained(make(), precision, tmp_path / "run", same, **more)
    assert {(c.module, c.role) for c in run.casts()} >= {
        (module, role) for module in ("up", "down") for role in ("weights", "activations", "gradients")
    }
    assert diagnose(run, rules=CASTS) == []
    assert not [f for f in diagnose(run) if f.severity == "alarm"]


def test_inputs_that_are_not_of_unit_scale_saturate(tmp_path: Path) -> None:
    run = trained(unit_scaled(), "fp8-unit", tmp_path / "run", lambda step, x: x * (300.0 if step >= 15 else 1.0))
    finding = diagnose(run, rules=["cast-saturates"])[0]
    assert finding.since_step == 15 and finding.where == ("up:input",) and finding.severity == "alarm"
    reported = finding.evidence
    assert (reported["module"], reported["role"], reported["format"], reported["scale"]) == (
        "up",
        "activations",
        "e4m3",
        1.0,
    )
    assert reported["scale_that_serves"] == 2.0**-3  # absmax is about 1,200: 2^-2 fits, less a binade to spare
    assert finding.actions == ("to_bf16",) and finding.figure == "code_usage"
    drift = diagnose(run, rules=["unit-drift"])[0]
    assert drift.where == ("up:input",) and drift.since_step == 15 and drift.evidence["bound"] == 4


def test_gradients_that_vanish_before_a_constant_cast_are_flushed(tmp_path: Path) -> None:
    run = trained(unit_scaled(), "fp8-unit", tmp_path / "run", same, factor=2.0**-18)
    finding = diagnose(run, rules=["cast-flushes"])[0]
    assert finding.collection == "activation_gradients" and finding.severity == "alarm"
    assert finding.evidence["role"] == "gradients" and finding.evidence["format"] == "e5m2"
    assert 2.0**15 < float(finding.evidence["scale_that_serves"]) < 2.0**40
    # By its own largest value each tensor is cast well, however small.
    other = trained(plain(), "fp8-tensor", tmp_path / "other", same, factor=2.0**-18)
    assert diagnose(other, rules=CASTS) == []


def test_a_loss_scale_saturates_nothing_whose_scale_follows_the_data(tmp_path: Path) -> None:
    scaler = pl.scaling.StaticScaler(2.0**16, device="cpu")
    run = trained(plain(), "fp8-tensor", tmp_path / "run", same, scaler=scaler)
    assert diagnose(run, rules=CASTS) == []


@pytest.mark.parametrize("scale", [1.0, 2.0**-5, 2.0**9, 3.0])
def test_shares_are_those_of_real_casts(scale: float, tmp_path: Path) -> None:
    story = eight(
        casts={"activations": ("e4m3", scale), "gradients": ("e5m2", scale * 2.0**-14)}, samples=2,
        activation_fmt="fp32", gradient_fmt="fp32",
    )  # fmt: skip
    view = View(Run(story.write(tmp_path / "run")))
    normal = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    for collection, x, fmt, used in (
        ("activations", normal[1], E4M3, scale),
        ("activation_gradients", normal[0], E5M2, scale * 2.0**-14),
    ):
        (cells,) = cast_cells(view, collection)
        held = pl.cast(x * used, fmt, saturate=True)
        beyond = (x * used).abs() > fmt.max * (1 + 2.0 ** -(fmt.mantissa_bits + 2))
        few = (held != 0) & (held.abs() < fmt.smallest_normal)
        found = {name: float(getattr(cells, name)[0, 0]) for name in ("saturated", "flushed", "coarse")}
        assert found["saturated"] == pytest.approx(float(beyond.double().mean()), abs=0.02)
        assert found["flushed"] == pytest.approx(float((held == 0).double().mean()), abs=0.02)
        assert found["coarse"] == pytest.approx(float(((held == 0) | few).double().mean()), abs=0.02)
        assert cells.sizes[0, 0] == pytest.approx(float((x * used).square().mean().sqrt().log2()), abs=1e-6)


@pytest.mark.parametrize("std", [2.0**-12, 1.0, 700.0])
def test_the_scale_that_serves_is_that_of_the_spectrum(std: float, tmp_path: Path) -> None:
    story = eight(activation_std=constant(std), activation_fmt="fp32", samples=4)
    run = Run(story.write(tmp_path / "run"))
    (cells,) = cast_cells(View(run), "activations")
    name = cells.cells.names[0]
    whole = sum((run.spectrum("activations", name, step) for step in run.steps), pl.Spectrum.empty())
    assert cells.serving(0, 0, 3, 0.01) == 2.0 ** whole.best_shift("e4m3")
    moving = eight(
        casts={"activations": ("e4m3", lambda step: 2.0 ** (step % 3))}, activation_std=constant(std),
        activation_fmt="fp32", samples=4,
    )  # fmt: skip
    (moved,) = cast_cells(View(Run(moving.write(tmp_path / "moving"))), "activations")
    assert moved.serving(0, 0, 3, 0.01) == cells.serving(0, 0, 3, 0.01)


def test_the_bounds_of_unit_scale_are_the_formats(tmp_path: Path) -> None:
    rule = UnitDrift()
    assert rule.bound(E4M3) == 4 and rule.bound(E5M2) == 12
    normal = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    for fmt in (E4M3, E5M2):
        low, high = normal * 2.0 ** -rule.bound(fmt), normal * 2.0 ** rule.bound(fmt)
        assert float((low.abs() < fmt.smallest_normal).double().mean()) < rule.fewer
        assert float((low.abs() < 2 * fmt.smallest_normal).double().mean()) > rule.fewer  # one binade on
        assert float((high.abs() > fmt.max).double().mean()) < rule.beyond


def test_a_tensor_that_never_was_of_unit_scale_has_not_left_it(tmp_path: Path) -> None:
    story = eight(activation_std=constant(2.0**6))
    assert diagnose(story.write(tmp_path / "run"), rules=["unit-drift"]) == []


def test_whatif_and_plan_ask_about_the_values_before_the_cast(tmp_path: Path) -> None:
    run = trained(unit_scaled(), "fp8-unit", tmp_path / "run", same)
    asked = pl.whatif(run, "e4m3", shift=0, collection="activations")
    view = View(run)
    (cells,) = cast_cells(view, "activations")
    for layer, name in enumerate(cells.cells.names):
        if layer in cells.casts:  # a cast at scale 1 is what shift 0 asks about
            place = asked.names.index(name)
            lost = asked.prediction.lost[2][place] / asked.prediction.nonzero[place]
            assert np.allclose(lost, cells.flushed[layer], equal_nan=True)
    made = pl.plan(run, target="fp8")
    assert made.formats["up"] == made.formats["down"] == "e4m3"


def test_a_guard_may_take_a_module_out_of_fp8(tmp_path: Path) -> None:
    net = unit_scaled()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loss_of, generator = unit.nn.CrossEntropyLoss(), torch.Generator().manual_seed(1)
    loop = pl.prepare(net, optimizer, "fp8-unit")
    with loop, pl.watch(net, optimizer, run=tmp_path / "run", every=1) as w:
        guard = pl.Guard(w, actions=("to_bf16",), loop=loop, every=8, severity="warning", dry_run=False, cpu_share=1.0)
        with guard:
            for _ in range(30):
                x = torch.randn(64, 16, generator=generator)
                with loop.forward():
                    loss = loss_of(net(x * 400.0).float(), x[:, :4].argmax(1))
                loop.step(loss)
                wait_for_look(guard)
        assert "up" in loop.fp8_left and loop.fp8_left["up"] == "the policy has it in bf16"
        assert loop.precision == "fp8-unit" and "down" not in loop.fp8_left
