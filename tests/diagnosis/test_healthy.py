"""Twenty sound trainings of different kinds, watched for real: none may raise an alarm; faults put into real ones."""

from pathlib import Path

import pytest
import torch
from torch import nn

from plimsoll.diagnosis import diagnose
from tests.support.diagnosis.trainings import MODELS, train

KINDS = [(name, precision, 0) for name in MODELS for precision in ("fp32", "bf16", "fp16")]
KINDS += [("mlp", "fp16", 1), ("gpt", "fp16", 1), ("vit", "fp16", 2), ("cnn", "fp16", 3), ("gpt", "fp32", 4)]


@pytest.mark.parametrize(("name", "precision", "seed"), KINDS)
def test_a_sound_training_is_no_alarm(name: str, precision: str, seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    found = diagnose(train(tmp_path / "run", name, precision))
    assert [str(f) for f in found if f.severity == "alarm"] == []


def test_there_are_twenty() -> None:
    assert len(KINDS) == 20


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_a_scale_far_too_low_is_named_in_a_real_training(name: str, tmp_path: Path) -> None:
    findings = diagnose(train(tmp_path / "run", name, "fp16", scale=2.0**-16))
    alarms = {f.rule: f.since_step for f in findings if f.severity == "alarm"}
    assert alarms["underflow-high"] <= 4 and alarms["scale-low"] <= 4


def test_a_layer_that_dies_in_a_real_training_is_named(tmp_path: Path) -> None:
    def kill(model: nn.Module, step: int) -> None:
        if step == 10:
            model[0].bias.data.fill_(-1e3)

    dead = [f for f in diagnose(train(tmp_path / "run", "mlp", "fp32", around=kill)) if f.rule == "dead-layer"]
    assert {f.where[0] for f in dead} == {"1:output", "0.weight"} and {f.since_step for f in dead} == {10}


def test_an_operation_that_makes_infinities_in_a_real_training_is_named(tmp_path: Path) -> None:
    def break_it(model: nn.Module, step: int) -> None:
        if step == 12:
            model[2].weight.data[0] = 1e6  # FP16 overflows in this layer's output

    findings = diagnose(train(tmp_path / "run", "mlp", "fp16", around=break_it))
    first = next(f for f in findings if f.rule == "nonfinite" and f.severity == "alarm")
    assert first.evidence["first_seen_in"] == "activations 2:output" and first.since_step == 12
