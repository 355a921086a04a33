"""Underflow of a CLIP and a detector: that what is counted is underflow, what the early rule says, and the claims."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from plimsoll.diagnosis import View
from plimsoll.errors import ArgumentError
from plimsoll.kernels import measure_into, new_bank
from plimsoll.runs import Batch, Run, RunWriter
from plimsoll_lab import Bench, Claim, Measured
from plimsoll_lab.bench import Silent
from plimsoll_lab.evidence import rows_of
from plimsoll_lab.experiments import underflow as trains
from plimsoll_lab.experiments.clip.model import make_batch
from plimsoll_lab.experiments.underflow import (
    BY_NAME,
    KINDS,
    UNDERFLOW,
    Job,
    Rate,
    Setup,
    came_true,
    captioned,
    claims,
    early_verdict,
    jobs_of,
    measure_with,
    rate,
    setup_for,
    train,
    trained,
)
from plimsoll_lab.models.detector.model import detection_loss
from tests.support.cases import each

SMALL = Setup(
    steps=27, seeds=1, warmup=3, clip_batch=8, clip_width=16, clip_layers=1, detector_batch=2, detector_width=4,
    detector_size=32,
)  # fmt: skip
VALUES = 200  # of each tensor of a made run


def bench(folder: Path, seed: int = 0) -> Bench:
    folder.mkdir(parents=True, exist_ok=True)
    return Bench(runs=folder, seed=seed, device="cpu", steps=None, full=False, progress=Silent())


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return measure_with(bench(tmp_path_factory.mktemp("underflow")), SMALL, workers=1)


def by_id(found: tuple[Claim, ...]) -> dict[str, Claim]:
    return {claim.id: claim for claim in found}


# -- the rate ----------------------------------------------------------------------------------------------------------


def written(
    path: Path, layers: Mapping[str, tuple[int, int]], *, fmt: str = "fp16", shadow: Callable[[int], bool] | None = None
) -> View:
    """Four samples of layers whose gradients have so many zeros by underflow, and so many in any format."""
    names = list(layers)
    with RunWriter(path) as writer:
        for step in range(0, 8, 2):
            numbers = [writer.series("activation_gradients", name, format=fmt) for name in names]
            numbers += [
                writer.series("gradients", f"{name.partition(':')[0]}.weight", format=fmt) for name in names[:3]
            ]
            tensors = [torch.ones(VALUES) for _ in numbers]
            for x, zeros in zip(tensors, layers.values(), strict=False):
                x[: sum(zeros)] = 0.0
            bank = new_bank(len(tensors))
            measure_into(tensors, bank, list(range(len(tensors))), accumulate=False)
            counts = np.full((2, len(numbers)), np.nan)
            if shadow is None or shadow(step):
                counts[:, : len(names)] = np.array(list(layers.values()), dtype=np.float64).T
            extras = {"underflowed": counts[0], "structural": counts[1]}
            places = np.arange(len(numbers))
            batch = Batch(
                step=step, rows=bank.numpy()[: len(numbers)], index=places, series=np.array(numbers), extras=extras
            )
            writer.write(batch)
    return View(Run(path))


LAYERS = {
    "a:output": (11, 0),  # 5.5 % of what would be nonzero
    "b:output": (9, 0),  # 4.5 %
    "c:output": (0, 190),  # zero in any format
    "a:input": (150, 0),  # no gradient of a layer's output
    "d:output": (150, 0),  # a module without parameters
}


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "fp32"])
def test_a_layer_underflows_by_what_the_shadow_has_counted_in_any_format(tmp_path: Path, fmt: str) -> None:
    found = rate(written(tmp_path / "run", LAYERS, fmt=fmt))
    assert found.steps.tolist() == [0, 2, 4, 6]
    assert found.layers.tolist() == pytest.approx([1 / 3] * 4)
    assert found.lost.tolist() == pytest.approx([20 / (20 + 189 + 191 + 10)] * 4)


def test_zeros_of_any_format_do_not_count_among_what_could_be_lost(tmp_path: Path) -> None:
    found = rate(written(tmp_path / "run", {"a:output": (3, 160), "b:output": (0, 199), "c:output": (3, 0)}))
    assert found.layers.tolist() == pytest.approx([1 / 3] * 4)  # 3 of 40, none of 1, 3 of 200


def test_samples_without_a_shadow_are_left_out(tmp_path: Path) -> None:
    found = rate(written(tmp_path / "run", LAYERS, shadow=lambda step: step != 4))
    assert found.steps.tolist() == [0, 2, 6]


def test_a_run_without_gradients_of_activations_has_no_rate(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run"):
        pass
    found = rate(View(Run(tmp_path / "run")))
    assert not len(found.steps) and math.isnan(found.level()) and math.isnan(found.rise())


def test_the_rate_of_a_training_is_that_of_its_layers_shadow_counts(measured: Measured) -> None:
    run = Run(measured.trainings[0].run)
    found = rate(View(run))
    assert found.steps.tolist() == list(range(SMALL.steps))
    layers = [
        "patches.embed", "words", "image", "image.norm_before", "image.norm", "image.project", "text.blocks.0.qkv",
        "text.blocks.0.down",
    ]  # fmt: skip
    assert {f"{name}:output" for name in layers} <= set(run.tensors["activation_gradients"])
    step, many, known = 3, 0, 0
    holders = {name.rpartition(".")[0] for name in run.tensors["gradients"]}
    for name in run.tensors["activation_gradients"]:
        module, _, end = name.partition(":")
        if end == "output" and module in holders:
            steps, underflowed = run.series("activation_gradients", name, "underflowed")
            spectrum = run.spectrum("activation_gradients", name, step)
            lost = underflowed[list(steps).index(step)] * spectrum.count
            known, many = known + 1, many + (lost > 0.05 * (lost + spectrum.count - spectrum.zeros))
    assert known >= 20 and found.layers[step] == pytest.approx(many / known)


def test_a_training_whose_scale_is_low_underflows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Measured
) -> None:
    """So a rate of zero means that nothing was lost: the same steps at another scale have another rate."""

    class Low(torch.amp.GradScaler):
        def __init__(self, device: str) -> None:
            super().__init__(device, init_scale=16.0)

    for place, name in ((0, "clip-fp16"), (2, "detector-fp16")):
        assert rate(View(Run(measured.trainings[place].run))).layers[:4].max() < 0.1
        with monkeypatch.context() as patch:
            patch.setattr(torch.amp, "GradScaler", Low)
            patch.setattr(trains, "detection_loss", lambda *a: detection_loss(*a) * 2.0**-24)
            train(Job(kind=BY_NAME[name], seed=0, run=tmp_path / name), dataclasses.replace(SMALL, steps=4), "cpu")
        assert rate(View(Run(tmp_path / name))).layers.min() > 0.5, name


def test_most_gradients_of_the_detector_are_zero_in_any_format_and_none_is_lost(measured: Measured) -> None:
    detector = measured.trainings[2]
    run = Run(detector.run)
    zeros = [s.zero_fraction for *_, s in run.spectra("activation_gradients", "heads.*:output")]
    assert np.median(zeros) > 0.5 and detector.numbers["rate"] == 0.0


# -- verdicts ----------------------------------------------------------------------------------------------------------


def seen(values: list[float]) -> Rate:
    at = np.arange(len(values), dtype=np.int64)
    return Rate(steps=10 * at, layers=np.array(values), lost=np.zeros(len(values)))


@each(
    ("values", "verdict"),
    [
        ([0.0] * 15, "stay"),
        ([0.0, 0.02] * 3 + [0.0] * 9, "stay"),
        ([0.01 * i for i in range(15)], "change"),
        ([0.003 * i for i in range(15)], "watch"),
        ([0.3] * 15, "change"),
        ([0.4 - 0.02 * i for i in range(15)], "change"),
        ([0.3 - 0.02 * i for i in range(15)], "watch"),  # it falls, to below 5 %
        ([0.08, 0.01, 0.06, 0.02, 0.09, 0.03, 0.05, 0.01, 0.07, 0.02, 0.06], "watch"),
        ([0.01, 0.2, 0.4], "watch"),  # no trend of three samples
    ],
)
def test_the_early_rule(values: list[float], verdict: str) -> None:
    assert early_verdict(seen(values)) == verdict


def test_a_verdict_comes_true_where_the_end_is_as_it_said() -> None:
    ends = (0.0, 0.03, 0.2)
    assert [came_true("stay", end) for end in ends] == [True, False, False]
    assert [came_true("watch", end) for end in ends] == [False, True, False]
    assert [came_true("change", end) for end in ends] == [False, False, True]
    assert not came_true("stay", math.nan) and not came_true("change", math.nan)


def test_parts_of_a_rate_and_its_rise() -> None:
    whole = seen([0.01 * i for i in range(20)])
    assert whole.within(50, 80).steps.tolist() == [50, 60, 70]
    assert whole.within(50, 80).level() == pytest.approx(0.06)
    assert whole.rise() == pytest.approx(0.19)
    assert whole.rise_seen() == 70.0  # of eight samples, as many as a trend needs
    assert seen([0.0] * 12 + [0.1] * 30).rise_seen() > 120 and math.isnan(seen([0.1, 0.0] * 10).rise_seen())
    assert seen([0.1, 0.0] * 10).rise() == 0.0  # it moves, and not that way
    assert math.isnan(seen([0.0] * 7).rise())  # too few to say that it does not rise


# -- trainings and claims ----------------------------------------------------------------------------------------------


def test_trainings_of_a_seed_begin_alike_and_are_another_arithmetic(measured: Measured) -> None:
    for a, b in ((0, 1), (2, 3)):
        losses = [Run(measured.trainings[place].run).scalars("loss")[1] for place in (a, b)]
        assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-2)
        assert losses[0].tolist() != losses[1].tolist()


def test_some_captions_belong_to_other_pictures() -> None:
    wrong = []
    for step in range(20):
        batch, mixed = make_batch(3, step, 16), captioned(3, step, 16, 1 / 8)
        assert mixed.pictures.equal(batch.pictures)
        assert mixed.captions.equal(captioned(3, step, 16, 1 / 8).captions)
        wrong.append((mixed.captions != batch.captions).any(dim=1).sum().item())
        assert captioned(3, step, 16, 0.0).captions.equal(batch.captions)
    assert 20 < sum(wrong) < 60 and len(set(wrong)) > 2  # about 40 of 320


def test_what_comes_of_it(measured: Measured) -> None:
    assert [training.name for training in measured.trainings] == [kind.name for kind in KINDS]
    assert len(by_id(measured.claims)) == len(measured.claims) == 13
    for training in measured.trainings:
        assert ("scale_end" in training.numbers) == training.name.endswith("fp16")
        assert len(training.series) == 22 and all(0 <= value <= 1 for value in training.series)
    assert "of BF16's" in measured.said[1]


def test_numbers_are_of_their_parts_of_the_run(measured: Measured) -> None:
    numbers, run = measured.trainings[0].numbers, Run(measured.trainings[0].run)
    assert numbers["loss_end"] == pytest.approx(run.scalars("loss")[1][-3:].mean())
    found = rate(View(run))
    assert numbers["rate_end"] == pytest.approx(found.layers[-3:].mean())
    assert math.isnan(numbers["rate_early"])  # of three early steps all are of the warm-up


def test_each_seed_and_kind_has_a_run_and_the_first_seeds_come_first(tmp_path: Path) -> None:
    jobs = jobs_of(bench(tmp_path / "runs", seed=7), dataclasses.replace(SMALL, seeds=2))
    assert [job.run.name for job in jobs] == [
        *("clip-fp16", "clip-bf16", "detector-fp16", "detector-bf16"),
        *("clip-fp16-8", "clip-bf16-8", "detector-fp16-8", "detector-bf16-8"),
    ]
    assert [job.seed for job in jobs] == [7] * 4 + [8] * 4


def test_a_worker_trains_what_it_is_told(tmp_path: Path, measured: Measured) -> None:
    job = Job(kind=BY_NAME["detector-bf16"], seed=0, run=tmp_path / "run")
    trained(job.to_task(dataclasses.replace(SMALL, steps=5), "cpu"))
    expected = Run(measured.trainings[3].run).scalars("loss")[1][:5]
    assert Run(job.run).scalars("loss")[1].tolist() == expected.tolist()


def test_sizes_for_other_lengths(tmp_path: Path) -> None:
    assert setup_for(None, full=False) == Setup()
    assert (setup_for(None, full=True).steps, setup_for(None, full=True).early) == (9000, 1000)
    assert (setup_for(180, full=False).warmup, setup_for(180, full=False).early) == (2, 20)
    assert (setup_for(500, full=True).steps, setup_for(500, full=True).clip_width) == (500, Setup().clip_width)
    with pytest.raises(ArgumentError, match=r"lab underflow: expected 180 steps or more, .*; got 100\. Use \d+\."):
        UNDERFLOW.settings(dataclasses.replace(bench(tmp_path / "runs"), steps=100))


TRUE = {
    "clip-fp16": {"rate": 0.15, "rise": 0.3, "rise_early": 0.1, "told_change": 1.0, "told_stay": 0.0},
    "clip-bf16": {},
    "detector-fp16": {},
    "detector-bf16": {},
}
SOUND = {
    "rate": 0.0, "rise": 0.0, "told_change": 0.0, "told_stay": 1.0, "came_true": 1.0, "loss_end": 1.0,
}  # fmt: skip


def two_seeds(who: str = "", change: Mapping[str, float] | None = None) -> dict[str, list[dict[str, float]]]:
    """Numbers for which all claims hold, but for a change in the second seed's."""
    found = {name: [SOUND | special, SOUND | special] for name, special in TRUE.items()}
    if change is not None:
        found[who][1] = {**found[who][1], **change}
    return found


@each(
    ("who", "change", "breaks"),
    [
        ("clip-fp16", {"rate": -0.1}, "clip-fp16-underflows"),
        ("clip-fp16", {"rate": math.nan}, "clip-fp16-underflows"),
        ("clip-fp16", {"rise": 0.005}, "clip-fp16-rises"),
        ("clip-fp16", {"rise": math.nan}, "clip-fp16-rises"),
        ("clip-bf16", {"rate": 0.02}, "clip-bf16-sound"),
        ("clip-bf16", {"rate": math.nan}, "clip-bf16-sound"),
        ("clip-bf16", {"rise": 0.02}, "clip-bf16-flat"),
        ("detector-fp16", {"rate": 0.02}, "detector-fp16-sound"),
        ("detector-fp16", {"rise": 0.02}, "detector-fp16-flat"),
        ("detector-bf16", {"rate": 0.02}, "detector-bf16-sound"),
        ("detector-bf16", {"rise": 0.02}, "detector-bf16-flat"),
        ("clip-fp16", {"told_change": 0.0}, "clip-fp16-told-early"),
        ("clip-fp16", {"rise_early": 0.0}, "clip-fp16-rises-early"),
        ("detector-fp16", {"told_stay": 0.0}, "others-told-early"),
        ("clip-bf16", {"came_true": 0.0}, "verdicts-come-true"),
        ("detector-fp16", {"loss_end": 1.1}, "stay-is-safe"),
        ("detector-fp16", {"loss_end": math.nan}, "stay-is-safe"),
    ],
)
def test_each_claim_can_fail(who: str, change: dict[str, float], breaks: str) -> None:
    assert all(claim.holds for claim in claims(two_seeds()))
    failed = [claim.id for claim in claims(two_seeds(who, change)) if not claim.holds]
    assert failed == [breaks]


def test_every_claim_is_of_a_row_and_every_row_has_one(measured: Measured) -> None:
    assert {row for claim in measured.claims for row in claim.rows} == set(rows_of(UNDERFLOW.source))
    assert all(claim.rows for claim in measured.claims)
