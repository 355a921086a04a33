"""The character model in FP16 and FP8: that both models are one, that trainings are what they say, and the claims."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from plimsoll.errors import ArgumentError, PlimsollError
from plimsoll.runs import Run
from plimsoll_lab import Bench, Claim, Measured
from plimsoll_lab.bench import Silent
from plimsoll_lab.evidence import rows_of
from plimsoll_lab.experiments.unit.experiment import UNIT, Scores, claims, jobs_of, measure_with, scores
from plimsoll_lab.experiments.unit.model import (
    KINDS,
    Job,
    Kind,
    Plain,
    Setup,
    Unit,
    from_task,
    make_model,
    make_optimizer,
    setup_for,
    to_task,
    train,
    train_all,
)
from plimsoll_lab.source_text import SYMBOLS, make_batch, standard_library
from plimsoll_lab.statistics import Ratio, ratio
from tests.support.cases import each

SMALL = Setup(
    steps=40, warmup=4, pieces=8, length=32, accumulate=2048, width=32, heads=2, layers=1, plain_rates=(0.01,),
    unit_rates=(1.0,), seeds=2, every=10, held_out=16,
)  # fmt: skip
# Forty steps and two seeds say nothing of quality: with one degree of freedom a bound is six errors wide.
OF_NUMBERS = {"fp16-underflow", "fp16-told", "unit-nothing-lost", "fp8-overflow", "fp8-lost", "drift"}
BY_NAME = {kind.name: kind for kind in KINDS}


def bench(folder: Path, seed: int = 0) -> Bench:
    folder.mkdir(parents=True, exist_ok=True)
    return Bench(runs=folder, seed=seed, device="cpu", steps=None, full=False, progress=Silent())


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return measure_with(bench(tmp_path_factory.mktemp("unit")), SMALL, workers=1)


def by_id(found: tuple[Claim, ...]) -> dict[str, Claim]:
    return {claim.id: claim for claim in found}


# -- the models --------------------------------------------------------------------------------------------------------


def test_both_models_have_the_same_parameters() -> None:
    plain, scaled = (
        {name: tuple(parameter.shape) for name, parameter in make_model(family, Setup()).named_parameters()}
        for family in ("plain", "unit")
    )
    assert plain == scaled


@pytest.mark.parametrize("model", [Plain, Unit])
def test_no_character_is_seen_before_its_time(model: type[Plain | Unit]) -> None:
    torch.manual_seed(0)
    made = model(width=32, layers=2, heads=2, length=16)
    characters = torch.randint(SYMBOLS, (2, 16))
    other = characters.clone()
    other[:, 9] = (other[:, 9] + 1) % SYMBOLS
    before, after = made(characters), made(other)
    assert before.shape == (2, 16, SYMBOLS)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()


def test_the_unit_scaled_model_begins_at_unit_scale_and_the_other_far_below() -> None:
    scale: dict[str, list[float]] = {}
    for family in ("plain", "unit"):
        torch.manual_seed(0)
        setup = Setup(width=128)
        model, batch = make_model(family, setup), make_batch(standard_library(), 0, 0, pieces=16, length=64)
        model.loss(model(batch.inputs), batch.targets).backward()
        gradients = [
            p.grad for n, p in model.named_parameters() if n.endswith((".up.weight", ".out.weight", ".qkv.weight"))
        ]
        scale[family] = [gradient.square().mean().sqrt().item() for gradient in gradients if gradient is not None]
    assert len(scale["unit"]) == 6 and all(2**-4 < value < 2**4 for value in scale["unit"])
    assert all(value < 2**-7 for value in scale["plain"])


# -- the trainings -----------------------------------------------------------------------------------------------------


def test_a_divided_loss_makes_the_same_steps(tmp_path: Path) -> None:
    """So what FP16 loses is what the division has made small, and FP32 is no other training."""
    ends = []
    for accumulate in (1, 1024):
        job = Job(kind=BY_NAME["fp32"], rate=0.01, seed=0, run=tmp_path / str(accumulate))
        train(job, dataclasses.replace(SMALL, accumulate=accumulate, steps=10), "cpu")
        ends.append(Run(job.run).scalars("train_bits")[1])
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-5)


def test_fp16_trains_where_the_loss_is_not_divided(tmp_path: Path) -> None:
    bits = {}
    for name in ("fp32", "fp16"):
        job = Job(kind=BY_NAME[name], rate=0.01, seed=0, run=tmp_path / name)
        train(job, dataclasses.replace(SMALL, accumulate=1), "cpu")
        bits[name] = Run(job.run).scalars("bits")[1][-1]
    assert bits["fp16"] == pytest.approx(bits["fp32"], rel=0.01)


def test_trainings_of_a_seed_begin_alike_in_every_precision(measured: Measured) -> None:
    first = {
        kind.name: Run(t.run).scalars("train_bits")[1][0] for kind, t in zip(KINDS, measured.trainings, strict=True)
    }
    for kind in KINDS:
        reference = first["fp32" if kind.family == "plain" else "unit-fp32"]
        assert first[kind.name] == pytest.approx(reference, rel=5e-3)
        assert kind.precision == "fp32" or first[kind.name] != reference  # it is another arithmetic


def test_the_optimizers_differ_as_the_models_do() -> None:
    plain = make_optimizer(make_model("plain", SMALL), 0.5, SMALL)
    assert type(plain) is torch.optim.AdamW and plain.param_groups[0]["eps"] == 1e-8 / SMALL.accumulate
    scaled = make_optimizer(make_model("unit", SMALL), 0.5, SMALL)
    factors = {group["kind"]: group["lr_factor"] for group in scaled.param_groups}
    assert factors["weight"] < 1 and factors["readout"] == 1


# -- what became of them -----------------------------------------------------------------------------------------------


def test_the_claims_of_numbers_hold(measured: Measured) -> None:
    failed = {claim.id: claim.measured for claim in measured.claims if not claim.holds}
    assert not failed.keys() & OF_NUMBERS, failed
    assert "FP16" in measured.said[0]


def test_the_numbers_are_those_of_the_runs(measured: Measured) -> None:
    for kind, training in zip(KINDS, measured.trainings, strict=True):
        folder = training.run.parent
        rate = SMALL.rates(kind)[0]
        ends = [Run(folder / f"{kind.name}-{rate:g}-{seed}").scalars("bits")[1][-1] for seed in range(SMALL.seeds)]
        assert training.numbers["loss_end"] == pytest.approx(sum(ends) / len(ends))
        assert training.numbers[f"bits_at_{rate:g}"] == training.numbers["loss_end"]


def test_fp16_is_told_of_and_the_unit_scaled_trainings_are_clean(measured: Measured) -> None:
    alarms = {t.title: {f.rule for f in t.findings if f.severity == "alarm"} for t in measured.trainings}
    assert "underflow-high" in alarms[BY_NAME["fp16"].title]
    assert not any(rules for title, rules in alarms.items() if title.startswith("unit-scaled"))


@each(
    ("kind", "change", "breaks"),
    [
        ("fp16", {"lost_after": 0.4}, "fp16-underflow"),
        ("fp16", {"underflow_alarms": 0.0}, "fp16-told"),
        ("unit-fp16", {"lost_after": 0.02}, "unit-nothing-lost"),
        ("unit-fp8", {"operands_overflow": 0.01}, "fp8-overflow"),
        ("unit-fp8", {"gradients_lost": 0.1}, "fp8-lost"),
        ("unit-fp8", {"drift_median": 4.0}, "drift"),
    ],
)
def test_each_claim_of_numbers_can_fail(measured: Measured, kind: str, change: dict[str, float], breaks: str) -> None:
    numbers = {k.name: dict(t.numbers) for k, t in zip(KINDS, measured.trainings, strict=True)}
    assert by_id(claims(flat(), numbers))[breaks].holds
    numbers[kind] |= change
    assert not by_id(claims(flat(), numbers))[breaks].holds


@each(
    ("kind", "bits", "breaks"),
    [
        ("fp16", [3.0, 3.0, 3.1], "fp16-fails"),
        ("fp16", [3.0, 3.0, 3.1], "fp16-fails-best"),
        ("fp16", [3.0, 9.0, 3.0], "fp16-fails"),  # fails by the mean, but not beyond doubt
        ("fp16-2048", [3.1, 3.1, 3.1], "fp16-2048-as-fp32"),
        ("unit-fp16", [3.1, 3.1, 3.1], "unit-fp16-as-fp32"),
        ("unit-fp8", [3.0, 3.0, 3.2], "unit-fp8-as-fp32"),
        ("unit-fp8", [3.1, 3.1, 3.1], "unit-fp8-best"),
        ("unit-fp8", [3.0, 3.0, math.inf], "unit-fp8-as-fp32"),
        ("unit-fp8-level", [3.1, 3.1, 3.1], "unit-fp8-level-as-fp32"),
        ("unit-fp8-fnuz", [3.1, 3.1, 3.1], "unit-fp8-fnuz-as-fp32"),
        ("unit-fp32", [3.1, 3.1, 3.1], "unit-fp32-best"),
    ],
)
def test_each_claim_of_quality_can_fail(measured: Measured, kind: str, bits: list[float], breaks: str) -> None:
    numbers = {k.name: t.numbers for k, t in zip(KINDS, measured.trainings, strict=True)}
    assert by_id(claims(flat(), numbers))[breaks].holds
    assert not by_id(claims(flat(**{kind: bits}), numbers))[breaks].holds


def flat(**others: list[float]) -> Scores:
    """Results of three seeds, all 3 bits but for FP16's, which are 5."""
    rows = {kind.name: others.get(kind.name, [5.0 if kind.name == "fp16" else 3.0] * 3) for kind in KINDS}
    return Scores(rates=dict.fromkeys(rows, (0.01,)), bits={name: np.array([row]) for name, row in rows.items()})


# -- ratios ------------------------------------------------------------------------------------------------------------


def test_the_bounds_of_a_ratio_are_students() -> None:
    found = ratio(np.exp([0.1, 0.2, 0.3]), np.ones(3))
    wide = 2.919986 * 0.1 / math.sqrt(3)  # the 95 % point of t with 2 degrees of freedom, from a table
    assert found.mean == pytest.approx(math.exp(0.2))
    assert (found.low, found.high) == pytest.approx((math.exp(0.2 - wide), math.exp(0.2 + wide)), rel=1e-5)


def test_the_bounds_cover_as_often_as_they_say() -> None:
    """Of 2,000 draws the true ratio lies below the upper bound in 95 %, within four standard errors of that."""
    random = np.random.default_rng(0)
    covered = sum(ratio(np.exp(random.normal(0.0, 0.1, 3)), np.ones(3)).high >= 1.0 for _ in range(2000))
    assert abs(covered / 2000 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 2000)


def test_a_ratio_of_one_seed_has_no_bounds_and_one_that_diverged_none_but_infinity() -> None:
    one = ratio(np.array([2.0]), np.array([1.0]))
    assert one.mean == 2.0 and math.isnan(one.low) and math.isnan(one.high)
    assert ratio(np.full(2, np.inf), np.ones(2)) == Ratio(mean=math.inf, low=math.inf, high=math.inf)


def test_comparisons_are_at_the_same_rate_and_at_each_ones_best() -> None:
    bits = {"a": np.array([[4.0, 4.0], [2.0, 2.0], [3.0, 3.0]]), "b": np.array([[2.0, 2.0], [4.0, 4.0], [1.0, 1.0]])}
    found = Scores(rates={"a": (0.1, 0.2, 0.4), "b": (0.1, 0.2, 0.8)}, bits=bits)
    assert (found.best("a"), found.best("b")) == (1, 2)
    assert found.at_best("a", "b").mean == pytest.approx(2.0)
    assert found.at_same("a", "b").mean == pytest.approx(2.0)  # at 0.1: b is better at 0.8, which a has not
    assert found.at_same("b", "a").mean == pytest.approx(2.0)  # at 0.2, a's best


# -- jobs and workers --------------------------------------------------------------------------------------------------


def test_every_kind_has_its_rates_and_seeds_and_one_training_that_is_watched(tmp_path: Path) -> None:
    setup = Setup()
    jobs = jobs_of(bench(tmp_path, seed=5), setup)
    assert len({job.run for job in jobs}) == len(jobs)
    for kind in KINDS:
        own = [job for job in jobs if job.kind is kind]
        assert {(job.rate, job.seed) for job in own} == {(r, s) for r in setup.rates(kind) for s in (5, 6, 7)}
        assert [(job.rate, job.seed) for job in own if job.watched] == [(setup.main_rate(kind.family), 5)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_job_comes_through_a_line_whole(kind: Kind, tmp_path: Path) -> None:
    job = Job(kind=kind, rate=0.3, seed=4, run=tmp_path, watched=True)
    setup = dataclasses.replace(setup_for(70, full=True), plain_rates=(0.5,), held_out=3)
    assert from_task(to_task(job, setup, "cuda")) == (job, setup, "cuda")


def test_workers_train_as_this_process_does_and_tell_of_one_that_fails(tmp_path: Path) -> None:
    setup = dataclasses.replace(SMALL, steps=4, warmup=1)
    there = [Job(kind=BY_NAME[n], rate=1.0, seed=1, run=tmp_path / f"there-{n}") for n in ("unit-fp16", "fp16")]
    here = [dataclasses.replace(job, run=tmp_path / job.run.name.replace("there", "here")) for job in there]
    train_all(there, setup, "cpu", 2, Silent())
    train_all(here, setup, "cpu", 1, Silent())
    for mine, other in zip(here, there, strict=True):
        assert Run(mine.run).scalars("bits")[1].tolist() == Run(other.run).scalars("bits")[1].tolist()
    # Alone: a failure ends the workers, whatever the others are at.
    (tmp_path / "taken").write_text("a file")
    fails = dataclasses.replace(there[0], run=tmp_path / "taken")
    with pytest.raises(PlimsollError, match=r"(?s)lab: expected the training taken to end; got .*RunError"):
        train_all([fails], setup, "cpu", 2, Silent())


def test_sizes_for_other_lengths() -> None:
    assert (setup_for(None, full=False), setup_for(None, full=True).seeds) == (Setup(), 5)
    assert setup_for(50, full=False).steps == 50 and setup_for(50, full=False).warmup == 5
    for full in (False, True):
        made = setup_for(None, full=full)
        assert made.pieces * made.length * made.accumulate == 2**19
    with pytest.raises(ArgumentError, match="lab unit: expected 20 steps or more, .* got 19. Use 300."):
        setup_for(19, full=False)


def test_results_are_found_by_kind_rate_and_seed(tmp_path: Path) -> None:
    jobs = jobs_of(bench(tmp_path), dataclasses.replace(SMALL, steps=1, warmup=0, unit_rates=(0.5, 1.0), held_out=2))
    chosen = [job for job in jobs if job.kind.name == "unit-fp32"]
    for job in chosen:
        train(dataclasses.replace(job, watched=False), dataclasses.replace(SMALL, steps=1, warmup=0, held_out=2), "cpu")
    found = scores(chosen)
    assert found.rates == {"unit-fp32": (0.5, 1.0)} and found.bits["unit-fp32"].shape == (2, 2)
    one = Run(tmp_path / "unit-fp32-1-1").scalars("bits")[1][-1]
    assert found.bits["unit-fp32"][1, 1] == one


def test_every_claim_is_of_a_row_and_every_row_has_one(measured: Measured) -> None:
    assert {row for claim in measured.claims for row in claim.rows} == set(rows_of(UNIT.source))
    assert all(claim.rows for claim in measured.claims)
