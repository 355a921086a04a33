"""The deep encoder: its stream passes FP16's largest value in training, and each claim can fail."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from plimsoll.errors import ArgumentError
from plimsoll.runs import Run
from plimsoll_lab.bench import Bench, Silent
from plimsoll_lab.experiments.t5 import (
    KINDS,
    LENGTH,
    T5,
    VOCABULARY,
    Encoder,
    Setup,
    batch_of,
    claims,
    layers_of,
    measure_with,
    overflowing,
    setup_for,
    task_of,
    trained,
)
from plimsoll_lab.result import Claim, Measured
from tests.support.cases import each

SMALL = Setup(steps=16, width=16, heads=2, layers=6, gain=5300.0, batch=8, held_out=64, settling=16, learning_rate=5e-3)
PLACE = "layers.5.feed_forward:output"
FAULT = {
    "operation": "aten.add", "kind": "inf", "module": "layers.5.feed_forward", "sentence": "add exceeds it.",
    "shape": "8x16x16",
}  # fmt: skip
FORWARD = {
    "fp16": {"finite": 0.5, "agreement": 0.5, "error": math.nan, "accuracy": 0.5},
    "fp16-clamped": {"finite": 1.0, "agreement": 0.999, "error": 0.01, "accuracy": 0.8},
    "bf16": {"finite": 1.0, "agreement": 0.998, "error": 0.01, "accuracy": 0.8},
    "fp32": {"finite": 1.0, "agreement": 1.0, "error": 0.0, "accuracy": 0.8},
}
SOUND = {"held_out_loss": 1.0, "accuracy": 0.8, "overflow_at": math.inf, "told_at": math.inf, "skipped_since": 0.0}
NUMBERS = (
    SOUND | {"overflow_at": 9.0, "told_at": 1.0, "skipped_since": 1.0, "held_out_loss": math.nan},
    SOUND | {"clamped": 1e-3},
    SOUND,
    SOUND,
)


def bench(folder: Path, steps: int | None = None) -> Bench:
    return Bench(runs=folder, seed=0, device="cpu", steps=steps, full=False, progress=Silent())


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return measure_with(bench(tmp_path_factory.mktemp("t5")), SMALL, workers=1)


def by_id(found: tuple[Claim, ...]) -> dict[str, Claim]:
    return {claim.id: claim for claim in found}


def test_the_claims_hold(measured: Measured) -> None:
    failed = {claim.id: claim.measured for claim in measured.claims if not claim.holds}
    assert not failed
    assert len(by_id(measured.claims)) == len(measured.claims) == 13
    assert json.dumps([claim.to_dict() for claim in measured.claims])
    assert json.dumps([training.to_dict() for training in measured.trainings])


def test_what_is_found_and_where(measured: Measured) -> None:
    fp16, clamped, bf16, fp32 = measured.trainings
    assert {f.rule for f in fp16.findings if f.severity == "alarm"} >= {"overflow-ahead", "nonfinite"}
    nonfinite = next(f for f in fp16.findings if f.rule == "nonfinite")
    assert nonfinite.since_step == fp16.numbers["overflow_at"]
    assert not fp16.good and clamped.good and bf16.good and fp32.good
    assert not any(f.severity == "alarm" for f in (*bf16.findings, *fp32.findings))


def test_numbers_are_those_of_the_runs(measured: Measured) -> None:
    fp16, clamped, bf16, _ = (Run(training.run) for training in measured.trainings)
    step = int(measured.trainings[0].numbers["overflow_at"])
    assert math.isnan(fp16.scalars("loss")[1][step]) and math.isfinite(fp16.scalars("loss")[1][step - 1])
    tops = [clamped.spectrum("activations", name, int(clamped.steps[-1])) for name in layers_of(SMALL)]
    assert max(spectrum.absmax for spectrum in tops) == 65504.0 and not any(s.pos_infs for s in tops)
    wide = bf16.spectrum("activations", layers_of(SMALL)[-1], int(bf16.steps[-1]))
    assert wide.absmax > 65504.0


def test_gain_changes_nothing_in_fp32_but_the_size_of_the_stream() -> None:
    tokens, _ = batch_of(0, 0, 8)
    found: list[torch.Tensor] = []
    sizes: list[float] = []
    for gain in (1.0, 2.0**11):
        torch.manual_seed(0)
        model = Encoder(width=16, heads=2, layers=4, gain=gain).double()
        model.layers[-1].register_forward_hook(lambda _m, _i, out: sizes.append(out.detach().abs().max().item()))
        found.append(model(tokens))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)  # the norms' epsilon
    assert sizes[1] == pytest.approx(2.0**11 * sizes[0], rel=1e-4)


def test_batches_follow_from_seed_and_step_and_name_the_frequent_token() -> None:
    tokens, wanted = batch_of(1, 3, 512)
    assert torch.equal(tokens, batch_of(1, 3, 512)[0]) and not torch.equal(tokens, batch_of(2, 3, 512)[0])
    assert tokens.shape == wanted.shape == (512, LENGTH) and int(tokens.max()) < VOCABULARY
    assert ((tokens == wanted).double().mean() - (1 / 3 + 2 / 3 / VOCABULARY)).abs() < 0.03


@each(
    ("who", "change", "breaks"),
    [
        (0, {"overflow_at": math.inf}, {"overflows"}),
        (0, {"overflow_at": 0.0}, {"overflows", "told-before"}),
        (0, {"told_at": 9.0}, {"told-before"}),
        (0, {"told_at": math.inf}, {"told-before"}),
        (0, {"skipped_since": 0.4}, {"stops"}),
        (1, {"clamped": 0.0}, {"clamps-act"}),
        (1, {"clamped": 0.02}, {"clamps-act"}),
        (1, {"held_out_loss": 1.06}, {"clamped-trains"}),
        (2, {"held_out_loss": math.nan}, {"bf16-trains"}),
    ],
)
def test_each_claim_of_trainings_can_fail(who: int, change: dict[str, float], breaks: set[str]) -> None:
    numbers = list(NUMBERS)
    assert all(claim.holds for claim in claims(SMALL, numbers, FAULT, FORWARD, {PLACE: 3}))
    numbers[who] = numbers[who] | change
    found = claims(SMALL, numbers, FAULT, FORWARD, {PLACE: 3})
    assert {claim.id for claim in found if not claim.holds} == breaks


@each(
    ("fault", "forward", "foretold", "breaks"),
    [
        ({}, {}, {PLACE: 1}, {"in-the-sum", "in-deep-layers", "foretold-by-bf16"}),
        ({"operation": "aten.mm"}, {}, {PLACE: 1}, {"in-the-sum", "in-deep-layers"}),
        ({"shape": "8x2x16x16"}, {}, {PLACE: 1}, {"in-the-sum", "in-deep-layers"}),  # the bias of attention's scores
        ({"module": "norm"}, {}, {"norm:output": 1}, {"in-the-sum", "in-deep-layers"}),
        ({"module": "layers.1.attention"}, {}, {"layers.1.attention:output": 1}, {"in-deep-layers"}),
        (FAULT, {}, {"layers.4.attention:output": 1}, {"foretold-by-bf16"}),
        (FAULT, {"fp16": {"finite": 1.0}}, {PLACE: 1}, {"outputs-lost"}),
        (FAULT, {"fp16-clamped": {"agreement": 0.98}}, {PLACE: 1}, {"clamped-outputs-agree"}),
        (FAULT, {"fp16-clamped": {"error": 0.06}}, {PLACE: 1}, {"clamped-outputs-near"}),
        (FAULT, {"fp16-clamped": {"accuracy": 0.78}}, {PLACE: 1}, {"clamped-accuracy"}),
    ],
)
def test_each_claim_of_places_and_outputs_can_fail(
    fault: dict[str, str], forward: dict[str, dict[str, float]], foretold: dict[str, int], breaks: set[str]
) -> None:
    checked = FAULT | fault if fault else {}
    outputs = {name: each | forward.get(name, {}) for name, each in FORWARD.items()}
    found = claims(SMALL, NUMBERS, checked, outputs, foretold)
    assert {claim.id for claim in found if not claim.holds} == breaks


def test_a_quiet_stream_does_not_overflow(tmp_path: Path) -> None:
    quiet = dataclasses.replace(SMALL, gain=1.0, steps=3)
    said: dict[str, Any] = dict(trained(task_of(KINDS[0], quiet, tmp_path / "run", seed=0, device="cpu")))
    assert "fault" not in said and math.isfinite(said["held_out_loss"])
    assert not overflowing(tmp_path / "run", quiet)


def test_settings_for_other_lengths() -> None:
    assert setup_for(50, full=False).steps == 50 and setup_for(None, full=True).layers > Setup().layers
    assert T5.settings(bench(Path("x"), 60))["steps"] == 60
    with pytest.raises(ArgumentError, match=r"lab t5: expected 40 steps or more, .* got 39. Use 80\."):
        T5.settings(bench(Path("x"), 39))
