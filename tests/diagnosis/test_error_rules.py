"""Rules of errors and growth on trainings with shadow steps: sound ones stay silent, planted faults do not."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import Finding, View, diagnose
from plimsoll.diagnosis.rules import errors, overflow
from plimsoll.report import FIGURES, heatmap
from plimsoll.report.figure_declaration import DECLARED
from plimsoll.runs import Run
from tests.support.cases import each
from tests.support.diagnosis.faults import INNOCENT, flips, outliers, since
from tests.support.diagnosis.stories import LAYERS, Story, constant, make_story, of_layer
from tests.support.diagnosis.trainings import GPT, MODELS, mlp, text

RULES = {
    rule.id for rule in (
        errors.ErrorAboveSignal, errors.BiasedRounding, errors.ClusteredBlock, errors.DecisionFlips,
        overflow.AttentionLogits, overflow.KurtosisGrowth,
    )
}  # fmt: skip

BF16 = torch.bfloat16
SOUND = [name for name, story in INNOCENT.items() if story.error or story.score or story.last_bin or "flip" in name]


def mine(path: Path) -> list[Finding]:
    return [finding for finding in diagnose(path) if finding.rule in RULES]


def trained(
    path: Path, model: nn.Module, batch: object, precision: torch.dtype | None, *, steps: int = 24, **more: object
) -> Path:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with pl.watch(model, optimizer, run=path, every=2, shadow_every=2, **more):
        for _ in range(steps):
            x, y = batch()  # type: ignore[operator]
            with torch.autocast("cpu", dtype=precision) if precision else nullcontext():
                loss = nn.functional.cross_entropy(model(x).float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return path


@each("name, precision", [("mlp", None), ("mlp", BF16), ("gpt", BF16), ("cnn", BF16)])
def test_sound_trainings_with_shadow_steps_are_silent(name: str, precision: torch.dtype | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name]
    found = mine(trained(tmp_path / f"{name}{precision}", model(), batch, precision, block=32))
    assert [str(finding) for finding in found if finding.severity != "info"] == []


@each("name", SOUND)
def test_innocent_runs_are_silent(name: str, tmp_path: Path) -> None:
    assert [str(finding) for finding in mine(INNOCENT[name].write(tmp_path / name))] == []


@each("rounding", ["toward_zero", "nearest_even"])
def test_a_planted_rounding_toward_zero_is_named(rounding: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    found = mine(emulated(tmp_path / rounding, GPT(), text, forward="bf16", backward="bf16", rounding=rounding))
    biased = {finding.evidence["direction"] for finding in found if finding.rule == "biased-rounding"}
    assert biased == ({"toward zero"} if rounding == "toward_zero" else set())


def emulated(path: Path, model: nn.Module, batch: object, **casts: object) -> Path:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with pl.watch(model, optimizer, run=path, every=2, shadow_every=2):
        for _ in range(24):
            x, y = batch()  # type: ignore[operator]
            with pl.emulate(**casts):  # type: ignore[arg-type]
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def test_gradients_in_two_bits_are_mostly_error(tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = emulated(tmp_path / "run", mlp(), MODELS["mlp"][1], forward="fp32", backward="e2m0")
    (finding, *_) = [each for each in mine(run) if each.rule == "error-above-signal"]
    assert finding.severity == "warning" and finding.evidence["snr_db"] < 4.77


def test_a_repetition_that_took_another_course_is_a_note(tmp_path: Path) -> None:
    """A generator of the model's own is not set back: its masks are others in the shadow step, and no error."""

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (torch.rand(x.shape, generator=generator) > 0.5)

    generator = torch.Generator()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), Masked(), nn.ReLU(), nn.Linear(64, 64), Masked(), nn.Linear(64, 10))
    found = mine(trained(tmp_path / "run", model, MODELS["mlp"][1], torch.bfloat16))
    assert "info" in {finding.severity for finding in found if finding.rule == "error-above-signal"}
    assert [str(finding) for finding in found if finding.severity != "info"] == []


CLUSTERED = make_story(last_bin=of_layer(LAYERS[4], constant(0.9), constant(0.02)))


def test_weights_in_one_bin_are_a_note(tmp_path: Path) -> None:
    (finding,) = mine(CLUSTERED.write(tmp_path / "run"))
    assert (finding.rule, finding.severity, finding.where) == ("clustered-block", "info", (f"{LAYERS[4]}.weight",))


SETTLED = {
    "attention-logits": make_story(score=lambda name, step: 8.0 * 2.0 ** min(step / 20, 5)),
    "kurtosis-growth": make_story(
        activation_fmt="bf16",
        change_activation=outliers(LAYERS[4], lambda step: 2.0 ** min(step / 16, 6)),
    ),
    "error-above-signal": make_story(error=lambda name, step: (0.0, 0.1 * 2.0 ** min(step / 45, 2.2))),
}


@each("rule", SETTLED)
def test_what_has_settled_is_a_note(rule: str, tmp_path: Path) -> None:
    story: Story = SETTLED[rule]
    early = [f for f in diagnose(story.write(tmp_path / f"{rule}-early", until=100)) if f.rule == rule]
    assert {finding.severity for finding in early} == {"warning"}, early
    late = [f for f in diagnose(told_longer(story).write(tmp_path / f"{rule}-late")) if f.rule == rule]
    assert {finding.severity for finding in late} == {"info"}, late


def told_longer(story: Story) -> Story:
    return replace(story, samples=100)


def test_flips_need_several_looks_in_a_row(tmp_path: Path) -> None:
    def share(step: int) -> float:
        return 0.3 if step % 20 else 0.0  # three looks of four

    run = make_story(decisions=lambda step: {"flips:router": share(step)}).write(tmp_path / "run")
    assert mine(run) == []
    steady = make_story(decisions=lambda step: {"flips:router": 0.3 if step >= 160 else 0.0}).write(tmp_path / "steady")
    (finding,) = mine(steady)
    assert finding.since_step == 160 and finding.where == ("router",)


def test_a_single_look_above_the_signal_is_no_finding(tmp_path: Path) -> None:
    once = make_story(error=lambda name, step: (0.0, 2.0 if step in (50, 55) else 0.01)).write(tmp_path / "run")
    assert mine(once) == []
    later = since(150, constant(2.0), constant(0.01))
    assert mine(make_story(error=lambda name, step: (0.0, later(name, step))).write(tmp_path / "later"))


def test_pictures_of_errors(tmp_path: Path) -> None:
    found = make_story(
        error=lambda name, step: (-0.03, 0.04), last_bin=constant(0.25), decisions=lambda step: flips(0.2)
    )
    run, plain = found.write(tmp_path / "run", until=40), make_story().write(tmp_path / "plain", until=40)
    z = {
        name: heatmap(run, name, collection).data[0]
        for name, collection in (("error", "gradients"), ("bias", "gradients"), ("last_bin", "weights"))
    }
    assert np.asarray(z["error"].z) == pytest.approx(np.log2(0.05), abs=0.1)  # sqrt(0.03^2 + 0.04^2)
    assert np.asarray(z["bias"].customdata) == pytest.approx(36, abs=15)  # per cent of the square, of 512 values
    assert np.asarray(z["last_bin"].customdata) == pytest.approx(25)
    assert np.asarray(heatmap(run, "kurtosis", "weights").data[0].z) == pytest.approx(np.log2(3), abs=0.7)
    assert np.asarray(FIGURES["flips_heatmap"](run).data[0].customdata) == pytest.approx(20)
    for empty in (FIGURES["flips_heatmap"](plain), heatmap(plain, "error", "gradients")):
        assert empty.layout.meta["empty"]
    offered = [
        {case.arguments["statistic"] for case in DECLARED["heatmap"].cases(View(Run(at)))} for at in (run, plain)
    ]
    assert "error" in offered[0] and "error" not in offered[1]
