"""The three techniques left out in turn: that each training lacks what it says and nothing else, and the claims."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from plimsoll import emulate, prepare, watch
from plimsoll.errors import ArgumentError
from plimsoll.runs import Run
from plimsoll_lab import Bench, Measured
from plimsoll_lab.bench import Silent
from plimsoll_lab.evidence import rows_of
from plimsoll_lab.experiments.techniques import (
    KINDS,
    TECHNIQUES,
    Language,
    Setup,
    _operands,
    beside,
    claims,
    error_of_sums,
    forget_masters,
    loss_of,
    measure_with,
    setup_for,
    task_of,
    unmoved,
)
from plimsoll_lab.source_text import make_batch, standard_library
from tests.support.cases import each

SMALL = Setup(steps=24, pieces=4, length=4, accumulate=2**17, width=16, every=4, held_out=8)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("techniques")
    made = Bench(runs=folder, seed=0, device="cpu", steps=None, full=False, progress=Silent())
    return measure_with(made, SMALL, workers=1)


# -- the trainings -----------------------------------------------------------------------------------------------------


def test_all_kinds_begin_alike_and_compute_otherwise(measured: Measured) -> None:
    first = {one.name: Run(one.run).scalars("train_bits")[1][0] for one in measured.trainings}
    assert list(first) == [kind.name for kind in KINDS]
    for name, bits in first.items():
        assert bits == pytest.approx(first["fp32"], rel=2e-3)
        assert name == "fp32" or bits != first["fp32"]
    assert first["all"] == first["unscaled"] == first["no-masters"] != first["narrow-sums"]


def test_each_training_lacks_what_it_says(measured: Measured) -> None:
    numbers = {one.name: one.numbers for one in measured.trainings}
    assert numbers["unscaled"]["lost_after"] > 0.3 > 10 * numbers["all"]["lost_after"]
    assert numbers["no-masters"]["unmoved"] > 0.5
    assert numbers["fp32"]["unmoved"] < 0.1
    curves = {one.name: Run(one.run).scalars("train_bits")[1] for one in measured.trainings}
    assert (curves["no-masters"][2:] != curves["all"][2:]).any()
    scales = {one.name: Run(one.run).scalars("scale")[1] for one in measured.trainings if one.name != "fp32"}
    assert (scales["unscaled"] == 1.0).all() and (scales["all"] > 1.0).all()


def test_a_step_that_moves_no_weight_counts_for_nothing(tmp_path: Path) -> None:
    """Such as where FP16 lost all of a gradient: of nothing there is no share that did not move."""
    layer = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with watch(layer, optimizer, run=tmp_path / "run", every=1, collect=("updates",)):
        for factor in (1.0, 0.0, 1.0):
            optimizer.zero_grad()
            (factor * layer(torch.ones(1, 4))).sum().backward()
            optimizer.step()
    assert unmoved(Run(tmp_path / "run"), since=0) == 0.0


def test_numbers_are_those_of_the_runs(measured: Measured) -> None:
    for one in measured.trainings:
        steps, bits = Run(one.run).scalars("bits")
        assert steps.tolist() == [SMALL.low_at - 1, SMALL.steps - 1]
        assert one.numbers["gained"] == pytest.approx(bits[0] - bits[1])
    assert "FP32" in measured.said[0]


def test_what_masters_keep_is_forgotten() -> None:
    torch.manual_seed(0)
    model = Language(width=8, layers=1)
    batch = make_batch(standard_library(), 0, 0, pieces=2, length=4)
    with prepare(model, torch.optim.Adam(model.parameters(), lr=1e-6), "fp16-master") as loop:
        with loop.forward():
            loss = loss_of(model, batch, "cpu")
        loop.step(loss)
        weight = model.lstm.weight_hh_l0
        assert (loop.optimizer.master_of(weight) != weight.float()).any()
        forget_masters(loop)
        assert torch.equal(loop.optimizer.master_of(weight), weight.float())


@pytest.mark.parametrize("accumulate", ["fp32", "fp16"])
def test_the_products_of_the_lstm_are_emulated(accumulate: str) -> None:
    model = Language(width=8, layers=1).half()
    characters = make_batch(standard_library(), 0, 0, pieces=2, length=5).inputs
    with emulate("fp16", lists=None, accumulate=accumulate) as parsed:
        model(characters)
    assert parsed.operations.emulated["linear"] == 1 + 5 + 1  # of all inputs, of each state, of the readout


# -- sums in FP16 ------------------------------------------------------------------------------------------------------


def test_the_error_of_sums_is_that_of_a_scalar_loop() -> None:
    states, gradients = (one.double().numpy() for one in _operands(32, 0))
    exact = gradients.T @ states
    summed = np.zeros_like(exact)
    for row, column in np.ndindex(exact.shape):
        total = np.float16(0)
        for start in range(0, 32, 4):
            total = np.float16(
                float(total) + float(gradients[start : start + 4, row] @ states[start : start + 4, column])
            )
        summed[row, column] = total
    error = np.sqrt(np.square(summed - exact).mean() / np.square(exact).mean())
    assert error_of_sums(32, 0) == pytest.approx(error, rel=1e-6)


def test_longer_sums_are_further_off() -> None:
    assert error_of_sums(2048, 0) > 2 * error_of_sums(128, 0)


# -- the claims --------------------------------------------------------------------------------------------------------

SOUND = {
    "fp32": {"gained": 0.01},
    "all": {"of_fp32": 1.0, "gained": 0.0095, "furthest": 0.002},
    "unscaled": {"of_fp32": 1.2, "ratio_first": 1.05, "ratio_last": 1.2, "lost_after": 0.9},
    "no-masters": {"gained": 0.001, "unmoved": 0.9, "swallowed_since": float(SMALL.low_at)},
    "narrow-sums": {"of_fp32": 1.1},
}
SUMS = {128: 0.001, 8192: 0.01}


def test_claims_hold_where_all_is_as_published() -> None:
    found = claims(SMALL, SOUND, SUMS)
    assert len({claim.id for claim in found}) == len(found) == 12
    assert [claim.id for claim in found if not claim.holds] == []


@each(
    ("kind", "change", "breaks"),
    [
        ("all", {"of_fp32": 1.02}, "all-on-the-curve"),
        ("all", {"of_fp32": 0.98}, "all-on-the-curve"),
        ("all", {"furthest": 0.02}, "all-along-the-curve"),
        ("all", {"furthest": math.nan}, "all-along-the-curve"),
        ("unscaled", {"of_fp32": 1.04}, "unscaled-leaves"),
        ("unscaled", {"ratio_last": 1.06}, "unscaled-further"),
        ("unscaled", {"lost_after": 0.4}, "unscaled-lost"),
        ("all", {"gained": 0.005}, "masters-gain"),
        ("no-masters", {"gained": 0.006}, "no-masters-stalls"),
        ("no-masters", {"unmoved": 0.4}, "no-masters-swallowed"),
        ("no-masters", {"swallowed_since": math.nan}, "no-masters-told"),
        ("no-masters", {"swallowed_since": 0.0}, "no-masters-told"),
        ("narrow-sums", {"of_fp32": 1.0}, "narrow-sums-leave"),
    ],
)
def test_each_claim_can_fail(kind: str, change: dict[str, float], breaks: str) -> None:
    numbers = SOUND | {kind: SOUND[kind] | change}
    assert {claim.id for claim in claims(SMALL, numbers, SUMS) if not claim.holds} == {breaks}


def test_the_claims_of_sums_can_fail() -> None:
    failed = {claim.id for claim in claims(SMALL, SOUND, {128: 0.001, 8192: 0.0011}) if not claim.holds}
    assert failed == {"narrow-sums-err", "narrow-sums-grow"}


def test_curves_are_compared_batch_by_batch() -> None:
    reference = np.linspace(4.0, 2.0, 16)
    factor = np.concatenate((np.full(2, 1.5), np.ones(12), np.full(2, 3.0)))
    expected = {"ratio_first": 1.5, "ratio_last": 3.0, "furthest": 2.0}
    assert beside(reference * factor, reference) == pytest.approx(expected)
    factor[5] = 0.0  # in the middle, and below
    assert beside(reference * factor[::-1], reference)["furthest"] == pytest.approx(2.0)
    assert beside(reference * np.where(factor == 0.0, 0.0, 1.0), reference)["furthest"] == pytest.approx(0.5)


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_sizes_for_other_lengths() -> None:
    assert setup_for(None, full=False) == Setup() and setup_for(30, full=False).low_at == 20
    for full in (False, True):
        made = setup_for(None, full=full)
        assert made.pieces * made.length * made.accumulate == 2**19
    with pytest.raises(ArgumentError, match="lab techniques: expected 20 steps or more, .* got 19. Use 240."):
        setup_for(19, full=False)


def test_a_task_is_json_and_whole(tmp_path: Path) -> None:
    setup = dataclasses.replace(setup_for(70, full=True), low_rate=0.5)
    parsed = json.loads(json.dumps(task_of(KINDS[1], setup, tmp_path, seed=3, device="cuda")))
    assert Setup(**parsed["setup"]) == setup
    assert (parsed["name"], parsed["run"], parsed["seed"], parsed["device"]) == ("no-masters", str(tmp_path), 3, "cuda")


def test_every_claim_is_of_a_row_and_every_row_has_one(measured: Measured) -> None:
    assert {row for claim in measured.claims for row in claim.rows} == set(rows_of(TECHNIQUES.source))
    assert all(claim.rows for claim in measured.claims)
