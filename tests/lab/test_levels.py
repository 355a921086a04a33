"""The small network at O0 to O3: its pictures, its lists, and that its claims are of what happened in its runs."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from plimsoll.errors import ArgumentError
from plimsoll.precision import Policy
from plimsoll.runs import Run
from plimsoll_lab import Bench, Claim, Measured
from plimsoll_lab.bench import Silent
from plimsoll_lab.evidence import rows_of
from plimsoll_lab.experiments.clip.model import SHAPES, VOCABULARY, make_batch
from plimsoll_lab.experiments.levels import (
    CHANGED,
    CLASSES,
    KINDS,
    LEVELS,
    OF_LEVELS,
    SCALES,
    Setup,
    SmallNet,
    accuracies,
    astray,
    behind,
    claims,
    classes_of,
    loss_of,
    make_pictures,
    measure_with,
    operations_at,
    setup_for,
    to_task,
    trained,
)
from tests.support.cases import each

TINY = Setup(steps=4, warmup=1, batch=8, width=4, seeds=2, held_out=16, every=2)
# What so few steps cannot show: there is nothing learnt that could be lost.
TOO_SHORT_FOR = {"no-scale-trails", "each-scale-saves", *(f"{kind.name}-as-fp32" for kind in OF_LEVELS)}


def bench(folder: Path, seed: int = 0, steps: int | None = None) -> Bench:
    return Bench(runs=folder, seed=seed, device="cpu", steps=steps, full=False, progress=Silent())


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return measure_with(bench(tmp_path_factory.mktemp("levels")), TINY, workers=1)


def by_id(found: tuple[Claim, ...]) -> dict[str, Claim]:
    return {claim.id: claim for claim in found}


# -- pictures and model ------------------------------------------------------------------------------------------------


def test_a_picture_s_class_is_its_pair_of_shapes_whichever_comes_first() -> None:
    captions = make_batch(3, 0, 256).captions
    words = [[VOCABULARY[token] for token in row] for row in captions.tolist()]
    pairs = [tuple(sorted(word for word in row if word in SHAPES)) for row in words]
    classes = classes_of(captions).tolist()
    assert len(set(zip(pairs, classes, strict=True))) == len(set(pairs)) == len(set(classes)) == CLASSES
    swapped = [("circle", "square"), ("square", "circle")]
    rows = [
        [VOCABULARY.index(word) for word in ("a", "red", one, "left", "of", "a", "blue", two)] for one, two in swapped
    ]
    assert len(set(classes_of(torch.tensor(rows)).tolist())) == 1


def test_pictures_follow_from_seed_and_step_and_the_loss_is_in_fp32() -> None:
    one, same, other = make_pictures(1, 2, 4), make_pictures(1, 2, 4), make_pictures(1, 3, 4)
    assert one.pixels.equal(same.pixels) and one.classes.equal(same.classes) and not one.pixels.equal(other.pixels)
    scores = SmallNet(4)(one.pixels)
    assert scores.shape == (4, CLASSES)
    assert loss_of(scores.half(), one.classes).dtype is torch.float32


# -- operations and lists ----------------------------------------------------------------------------------------------


def test_operations_run_in_the_dtype_of_their_list_and_a_changed_list_is_obeyed() -> None:
    half, full = frozenset({torch.float16}), frozenset({torch.float32})
    ran, changed = operations_at("amp-fp16"), operations_at("amp-fp16", CHANGED)
    assert ran["convolution"] == ran["relu"] == ran["addmm"] == half and ran["_log_softmax"] == full
    assert changed["convolution"] == changed["relu"] == full and changed["addmm"] == half
    assert ran["native_batch_norm"] == half
    assert operations_at("amp-bf16")["convolution"] == {torch.bfloat16}
    assert set(operations_at("fp32").values()) == {full}
    assert astray(ran, Policy().operations) == astray(changed, CHANGED.operations) == 0
    assert astray(ran, CHANGED.operations) == 2 and astray(changed, Policy().operations) == 1


# -- trainings and what became of them ---------------------------------------------------------------------------------


def test_the_runs_tell_formats_scales_and_accuracies(measured: Measured) -> None:
    failed = {claim.id: claim.measured for claim in measured.claims if not claim.holds}
    assert not failed.keys() - TOO_SHORT_FOR, failed
    numbers = {training.name: training.numbers for training in measured.trainings}
    assert list(numbers) == [kind.name for kind in KINDS if kind.watched]
    assert numbers["amp-fp16"]["convolutions_fp16"] == 3 and numbers["fp32"]["convolutions_fp32"] == 3
    assert numbers["fp16-master"] | {"norms_fp32": 6, "weights_fp16": 5} == numbers["fp16-master"]
    assert numbers["fp16-pure"]["norms_fp16"] == 6
    assert numbers["scale-1"]["scale_begin"] == 0 and numbers["scale-1024"]["scale_end"] == 10
    assert numbers["amp-fp16"]["scale_begin"] == 16
    assert numbers["scale-1"]["lost_after"] > 10 * numbers["scale-32768"]["lost_after"]
    for training in measured.trainings:
        assert training.numbers["accuracy"] == Run(training.run).scalars("accuracy")[1][-1]
    folders = {path.name for path in measured.trainings[0].run.parent.iterdir()}
    assert folders == {kind.name for kind in KINDS} | {f"{kind.name}-seed-1" for kind in OF_LEVELS}


def test_every_training_of_a_seed_begins_alike_and_the_division_of_the_loss_changes_nothing_in_fp32(
    measured: Measured, tmp_path: Path
) -> None:
    first = {t.name: Run(t.run).scalars("train_loss")[1][0] for t in measured.trainings}
    assert max(first.values()) - min(first.values()) < 0.01 * first["fp32"]
    setup = dataclasses.replace(TINY, devices=1)
    trained(to_task(OF_LEVELS[0], 0, tmp_path / "whole", setup, "cpu", watched=False))
    whole = Run(tmp_path / "whole").scalars("train_loss")[1]
    divided = Run(measured.trainings[0].run).scalars("train_loss")[1]
    assert whole.tolist() == pytest.approx(divided.tolist(), rel=1e-6)
    assert accuracies([tmp_path / "whole"]) == accuracies([measured.trainings[0].run])


Numbers = dict[str, dict[str, float]]


def sound() -> tuple[dict[str, list[float]], Numbers]:
    """Accuracies and numbers with which every claim holds."""
    found = {kind.name: [0.98, 0.99, 0.98] for kind in OF_LEVELS}
    usual = {"accuracy": 0.98, "behind_fp32": 0.0, "lost_after": 0.001}
    numbers = {kind.name: dict(usual) for kind in KINDS}
    for place, kind in enumerate(SCALES):
        numbers[kind.name]["lost_after"] = (0.9, 0.6, 0.2, 0.03, 0.001)[place]
    numbers["scale-1"]["accuracy"] = 0.2
    numbers["amp-fp16"] |= {"convolutions_fp16": 3.0, "weights_fp32": 5.0}
    numbers["fp16-master"] |= {"norms_fp32": 6.0, "weights_fp16": 5.0}
    numbers["changed-lists"]["convolutions_fp32"] = 3.0
    return found, numbers


@each(
    ("kind", "change", "breaks"),
    [
        ("amp-fp16", {"convolutions_fp16": 2.0}, "o1-convolutions"),
        ("fp16-master", {"norms_fp32": 5.0}, "o2-norms"),
        ("fp16-master", {"weights_fp16": 4.0}, "o2-weights"),
        ("changed-lists", {"convolutions_fp32": 0.0}, "lists-changed"),
        ("changed-lists", {"behind_fp32": 0.1}, "lists-train"),
        ("scale-1", {"lost_after": 0.4}, "no-scale-loses"),
        ("scale-1", {"accuracy": 0.97}, "no-scale-trails"),
        ("scale-8", {"lost_after": 0.95}, "each-scale-saves"),
        ("scale-32768", {"lost_after": 0.06}, "high-scale-saves"),
        ("amp-fp16", {"lost_after": 0.06}, "dynamic-saves"),
        ("scale-32768", {"accuracy": 0.9}, "static-as-dynamic"),
    ],
)
def test_each_claim_of_numbers_can_fail(kind: str, change: Mapping[str, float], breaks: str) -> None:
    found, numbers = sound()
    ran = {"O1": operations_at("amp-fp16"), "changed": operations_at("amp-fp16", CHANGED)}
    assert all(claim.holds for claim in claims(found, numbers, ran))
    numbers[kind] |= change
    assert not by_id(claims(found, numbers, ran))[breaks].holds


def test_claims_of_accuracy_and_of_operations_can_fail() -> None:
    found, numbers = sound()
    ran = {"O1": operations_at("amp-fp16"), "changed": operations_at("amp-fp16", CHANGED)}
    for name in ("amp-fp16", "fp16-master", "bf16-kahan"):
        worse = found | {name: [0.95, 0.96, 0.95]}
        assert not by_id(claims(worse, numbers, ran))[f"{name}-as-fp32"].holds
    swapped = {"O1": ran["changed"], "changed": ran["O1"]}
    checked = by_id(claims(found, numbers, swapped))
    assert not checked["o1-by-the-lists"].holds and not checked["lists-obeyed"].holds


def test_the_bound_of_a_difference_is_students() -> None:
    wide = 2.919986 * 0.01 / 3**0.5  # the 95 % point of t with 2 degrees of freedom, from a table
    assert behind([0.9, 0.9, 0.9], [0.91, 0.92, 0.93]) == pytest.approx(0.02 + wide, rel=1e-5)
    assert not behind([0.9], [0.9]) <= 1.0  # NaN: a single pair shows no spread


def test_sizes_for_other_lengths_and_a_task_that_holds_them(tmp_path: Path) -> None:
    assert setup_for(None, full=False) == Setup() and setup_for(None, full=True).steps > Setup().steps
    assert setup_for(40, full=False).warmup == 8
    with pytest.raises(ArgumentError, match=r"lab levels: expected 20 steps or more, .* got 19. Use 160."):
        LEVELS.settings(bench(tmp_path, steps=19))
    assert LEVELS.settings(bench(tmp_path))["fp16"] == "emulated"
    assert Setup(**to_task(KINDS[0], 1, tmp_path, TINY, "cpu", watched=True)["setup"]) == TINY


def test_every_claim_is_of_a_row_and_every_row_has_one(measured: Measured) -> None:
    assert {row for claim in measured.claims for row in claim.rows} == set(rows_of(LEVELS.source))
    assert all(claim.rows for claim in measured.claims)
