"""Adam's state in FP16: the adapter's trainings at a small size, and that each claim can fail."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from plimsoll.errors import ArgumentError
from plimsoll.runs import Run
from plimsoll_lab.bench import Bench, Silent
from plimsoll_lab.experiments.adam import BOUND, EXPLODES, KINDS, Adam, Data, Net, Setup, claims, judged
from plimsoll_lab.result import Claim, Measured
from plimsoll_lab.study import Job
from tests.support.cases import each

SMALL = Setup(steps=66, pause=6, opening=48, inputs=8, width=8, batch=16)
# What needs a longer training than this: an end to compare.
TOO_SHORT_FOR = {"guard-trains", "master-trains"}


def bench(folder: Path, steps: int | None = None) -> Bench:
    return Bench(runs=folder, seed=0, device="cpu", steps=steps, full=False, progress=Silent())


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Adam().measure_with(bench(tmp_path_factory.mktemp("adam")), SMALL, workers=1)


def by_id(found: tuple[Claim, ...]) -> dict[str, Claim]:
    return {claim.id: claim for claim in found}


def test_the_claims_hold_that_do_not_need_a_long_training(measured: Measured) -> None:
    failed = {claim.id: claim.measured for claim in measured.claims if not claim.holds}
    assert set(failed) <= TOO_SHORT_FOR, failed
    assert len(by_id(measured.claims)) == len(measured.claims) == 17
    assert json.dumps([each.to_dict() for each in (*measured.claims, *measured.trainings)])
    assert [training.name for training in measured.trainings] == [kind.name for kind in KINDS]


def test_what_is_found_and_when(measured: Measured) -> None:
    fp32, zero, small, large, guarded, master = measured.trainings
    lost = [f for f in small.findings if f.rule == "second-moment-lost"]
    assert lost[0].since_step >= SMALL.pause and lost[0].evidence["epsilon_is_zero"] == "yes"
    assert any("first.weight" in name for name in lost[0].where)
    assert [f.since_step for f in zero.findings if f.rule == "nonfinite"] == [1]
    for training in (fp32, guarded, master):
        assert training.good and not any(f.rule == "second-moment-lost" for f in training.findings)
    assert not zero.good and not small.good and large.good


def test_numbers_are_those_of_the_runs(measured: Measured) -> None:
    small = measured.trainings[2]
    run = Run(small.run)
    steps, updates = run.scalars("largest_update")
    assert updates.max() == small.numbers["largest_update"] > EXPLODES
    assert steps[updates >= EXPLODES][0] == small.numbers["exploded_at"]
    step = SMALL.pause + 3
    first, second = (run.spectrum("optimizer", f"first.weight:{name}", step) for name in ("exp_avg", "exp_avg_sq"))
    assert second.zeros > first.zeros and 0 < small.numbers["moments_zero"] <= 1
    weights = Run(measured.trainings[1].run).spectrum("weights", "first.weight", 1)
    assert weights.nans == weights.count


def test_gradients_are_zero_in_the_pause_and_grow_after_it(measured: Measured) -> None:
    run = Run(measured.trainings[0].run)
    sizes = [run.spectrum("gradients", "first.weight", step).absmax for step in (0, SMALL.pause - 1, 8, 20, 40)]
    assert sizes[:2] == [0.0, 0.0] and 0 < sizes[2] < sizes[3] < sizes[4]


@each(
    ("who", "change", "breaks"),
    [
        (1, {"weights_lost": 0.9}, "epsilon-is-zero"),
        (1, {"nonfinite_found": 0.0}, "epsilon-found"),
        (3, {"moments_zero": 0.01}, "moments-vanish"),
        (0, {"moments_lost_in_fp16": 0.01}, "moments-foretold"),
        (0, {"largest_update": 1.01 * BOUND}, "fp32-bounded"),
        (2, {"largest_update": 0.9 * EXPLODES}, "update-explodes"),
        (2, {"loss_end": 0.0}, "explosion-ends-it"),
        (2, {"found_at": math.inf}, "found-before"),
        (2, {"exploded_at": 7.0}, "found-before"),
        (0, {"rate_spread": 1.0}, "fp32-adapts"),
        (2, {"rate_spread": 1.0}, "epsilon-hides"),
        (3, {"rate_spread": math.nan}, "large-epsilon-hides"),
        (3, {"largest_update": math.inf}, "large-epsilon-holds"),
        (4, {"largest_update": 10.0}, "guard-bounds"),
        (5, {"largest_update": 10.0}, "master-bounds"),
        (5, {"found": 1.0}, "master-nothing-found"),
    ],
)
def test_each_claim_can_fail(measured: Measured, who: int, change: dict[str, float], breaks: str) -> None:
    numbers = [dict(training.numbers) for training in measured.trainings]
    assert by_id(claims(*numbers))[breaks].holds
    numbers[who] |= change
    assert not by_id(claims(*numbers))[breaks].holds


def test_an_end_that_is_no_better_is_told(measured: Measured) -> None:
    numbers = [dict(training.numbers) for training in measured.trainings]
    for factor, holds in ((0.9, True), (1.1, False)):
        numbers[4]["loss_end"] = factor * numbers[4]["loss_pause"]
        numbers[5]["loss_end"] = factor * numbers[0]["loss_end"]
        found = by_id(claims(*numbers))
        assert found["guard-trains"].holds == found["master-trains"].holds == holds


def test_with_state_in_fp32_nothing_explodes(measured: Measured, tmp_path: Path) -> None:
    """The small epsilon's claims fail where its training keeps FP32 state: it is the state that does it."""
    kind = dataclasses.replace(KINDS[2], precision="fp32")
    job = Job(kind=kind, seed=0, run=tmp_path / "run")
    Adam().train(job, SMALL, "cpu")
    numbers = [dict(training.numbers) for training in measured.trainings]
    numbers[2] = dict(judged(job, SMALL).numbers)
    failed = {claim.id for claim in claims(*numbers) if not claim.holds}
    assert failed >= {"update-explodes", "explosion-ends-it", "found-before"}


def test_the_trunk_is_the_best_linear_one_and_the_branch_opens_by_doubling() -> None:
    data = Data(SMALL, seed=3)
    x, y = data.batch(7)
    model = Net(data.fit(), SMALL.width)
    model.factor = SMALL.factor(SMALL.pause - 1)
    assert model.factor == 0.0
    assert torch.equal(model(x), x @ model.trunk)
    # A ReLU network of normal inputs is half linear: a fitted line takes much of its variance away, and not all.
    assert 0.2 < ((model(x) - y).square().mean() / y.var()).item() < 1.0
    doubling = SMALL.opening // 16
    assert SMALL.factor(30 + doubling) == pytest.approx(2 * SMALL.factor(30))
    assert SMALL.factor(SMALL.opened) == SMALL.factor(10_000) == 1.0


def test_settings_for_other_lengths() -> None:
    assert Adam().setup_for(500, full=False).steps == 500 and Adam().setup_for(None, full=True).width > Setup().width
    assert Adam().settings(bench(Path("x"), 200))["steps"] == 200
    with pytest.raises(ArgumentError, match="lab adam: expected 160 steps or more: the branch .* got 159. Use 220"):
        Adam().settings(bench(Path("x"), 159))
