"""The sweep: that the grid is whole, that its models are what they say, trainings are repeatable, and the claims."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from plimsoll.errors import ArgumentError, PlimsollError
from plimsoll_lab import Bench, Claim, Measured, perform, source_text
from plimsoll_lab.bench import Silent
from plimsoll_lab.experiments.unit_sweep import experiment
from plimsoll_lab.experiments.unit_sweep.experiment import Scores, chance, claims, figure, mean, share, table
from plimsoll_lab.experiments.unit_sweep.grid import (
    FP16,
    FP32,
    STATIC,
    UNIT_FP16,
    UNIT_FP32,
    WAYS,
    Configuration,
    Design,
    Way,
    default_grid,
    designs,
    meaningless,
    reference,
    whole_grid,
)
from plimsoll_lab.experiments.unit_sweep.training import (
    PLAIN,
    UNIT,
    Characters,
    Setup,
    forward_factors,
    gradients,
    groups,
    make_optimizer,
    rate_of,
    setup_for,
    to_task,
    train,
    trained,
)
from plimsoll_lab.source_text import HELD_OUT, SYMBOLS, TRAINED, make_batch, standard_library
from tests.support.cases import each
from tests.support.made_text import made_text

# Half a million characters a step take FP16's gradients in a hundred steps; so many more of them do it in twenty-four.
SMALL = Setup(steps=24, warmup=2, pieces=8, length=8, accumulate=2**17, width=16, held_out=16, every=4)
DESIGN = Design(sequence="attention", norm="pre", residual="running-mean", optimizer="adamw", depth=2)
OTHER = dataclasses.replace(DESIGN, sequence="convolution", norm="post", residual="fixed", optimizer="sgd")
SEQUENCES = ("attention", "convolution", "recurrent")
SEEDS = {name: seed for seed, name in enumerate((*TRAINED, *HELD_OUT))}


@pytest.fixture(scope="module", autouse=True)
def same_text_everywhere() -> Iterator[None]:
    """The standard library's text is another in each version of Python, and so are the ends of short trainings.

    Two dozen steps learn hardly more of it than how frequent characters are, which is what the sweep calls nothing.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_text, "_source", lambda name: made_text(2000, seed=SEEDS[name]))
        standard_library.cache_clear()
        yield
    standard_library.cache_clear()


def bench(folder: Path, seed: int = 0) -> Bench:
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    return Bench(runs=folder / "runs", seed=seed, device="cpu", steps=None, full=False, progress=Silent())


def in_all_ways(design: Design) -> list[Configuration]:
    return [Configuration(design=design, way=way, rate=2) for way in WAYS]


def by_id(found: tuple[Claim, ...]) -> dict[str, Claim]:
    return {claim.id: claim for claim in found}


# -- the grid ----------------------------------------------------------------------------------------------------------


def test_the_whole_grid_has_as_many_as_were_published_or_more() -> None:
    grid = whole_grid()
    assert len(grid) == 2760  # published: 2,092
    assert len({each.name for each in grid}) == len(grid) == len(set(grid))
    assert Counter(each.way for each in grid) == {way: 5 * 12 * (8 if way.scaling == "unit" else 10) for way in WAYS}
    values = {axis: {getattr(each.design, axis) for each in grid} for axis in DESIGN.__slots__}
    assert {axis: len(there) for axis, there in values.items()} == {
        "sequence": 3, "norm": 3, "residual": 4, "optimizer": 2, "depth": 2,
    }  # fmt: skip


@each(
    ("design", "way", "why"),
    [
        (DESIGN, Way(precision="fp32", scaling="static"), "FP32 needs no loss scale"),
        (dataclasses.replace(DESIGN, norm="post", residual="none"), FP32, "without a residual"),
        (dataclasses.replace(DESIGN, residual="sum"), UNIT_FP32, "every addition is weighted"),
        (dataclasses.replace(DESIGN, norm="post", residual="fixed"), FP16, "a norm divides the fixed factor out"),
    ],
)
def test_what_means_nothing_is_dropped_and_said(design: Design, way: Way, why: str) -> None:
    assert why in (meaningless(design, way) or "")
    assert not any(each.design == design and each.way == way for each in whole_grid())


def test_a_norm_divides_the_fixed_factor_out() -> None:
    fixed = dataclasses.replace(DESIGN, norm="post", residual="fixed")
    outputs = []
    for design in (fixed, reference(fixed)):
        torch.manual_seed(0)
        outputs.append(Characters(design, PLAIN, width=16, length=8)(torch.arange(8)[None]))
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-4)
    assert reference(fixed).residual == "sum" and reference(DESIGN) == DESIGN


def test_a_default_run_has_each_value_of_each_axis_and_every_pair_it_compares() -> None:
    grid = default_grid()
    assert set(grid) < set(whole_grid()) and 200 <= len(grid) <= 240
    chosen = {each.design for each in grid}
    assert {(each.sequence, each.norm) for each in chosen} == {(each.sequence, each.norm) for each in designs()}
    for axis in DESIGN.__slots__:
        assert {getattr(each, axis) for each in chosen} == {getattr(each, axis) for each in designs()}
    there = {(each.design, each.way) for each in grid}
    assert all((reference(design), FP32) in there for design, way in there if way.scaling == "unit")
    assert experiment.watched_design(grid) == DESIGN


# -- the models --------------------------------------------------------------------------------------------------------


@each("sequence", SEQUENCES)
@each("parts", [PLAIN, UNIT])
def test_no_character_is_seen_before_its_time(sequence: str, parts: object) -> None:
    torch.manual_seed(0)
    design = dataclasses.replace(DESIGN, sequence=sequence)
    made = Characters(design, parts, width=16, length=8)  # type: ignore[arg-type]
    characters = torch.randint(SYMBOLS, (2, 8))
    other = characters.clone()
    other[:, 5] = (other[:, 5] + 1) % SYMBOLS
    before, after = made(characters), made(other)
    assert before.shape == (2, 8, SYMBOLS)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert (before[:, 5] != after[:, 5]).any() and (before[:, 6] != after[:, 6]).any()


@each("sequence", SEQUENCES)
@each("norm", ["pre", "post", "no"])
def test_unit_scaled_gradients_begin_at_unit_scale_and_others_far_below(sequence: str, norm: str) -> None:
    design = dataclasses.replace(DESIGN, sequence=sequence, norm=norm)
    batch = make_batch(standard_library(), 0, 0, pieces=16, length=16)
    found = {}
    for name, parts in (("plain", PLAIN), ("unit", UNIT)):
        torch.manual_seed(0)
        model = Characters(design, parts, width=32, length=16)
        found[name] = [value for key, value in gradients(model, batch).items() if key.startswith("branches")]
    assert all(2**-5 < value < 2**5 for value in found["unit"])
    assert np.median(found["plain"]) < np.median(found["unit"]) / 2**5


def test_residual_schemes_are_what_they_say() -> None:
    x = torch.randn(2, 8, 16)
    outputs = {}
    for residual in ("none", "sum", "fixed", "running-mean"):
        torch.manual_seed(0)
        design = dataclasses.replace(DESIGN, norm="no", residual=residual)
        model = Characters(design, PLAIN, width=16, length=8)
        outputs[residual] = [branch(x) for branch in model.branches]
    for number in range(4):
        f = outputs["none"][number]
        torch.testing.assert_close(outputs["sum"][number], x + f)
        torch.testing.assert_close(outputs["fixed"][number], (x + f) / math.sqrt(2))
        tau = 1 / (number + 2)
        torch.testing.assert_close(outputs["running-mean"][number], math.sqrt(1 - tau) * x + math.sqrt(tau) * f)


def test_unit_scaled_sgd_takes_the_unscaled_models_steps() -> None:
    """The product's weight c w moves at the first step as the unscaled model's: by the same root mean square."""
    torch.manual_seed(0)
    model, twin = (Characters(OTHER, parts, width=16, length=8) for parts in (UNIT, PLAIN))
    batch = make_batch(standard_library(), 0, 0, pieces=16, length=8)
    grouped, there, here = groups(model, twin, batch, 0.5), gradients(twin, batch), gradients(model, batch)
    factors = dict(forward_factors(model))
    assert factors["readout.weight"] == pytest.approx(1 / 16)
    assert factors["branches.0.inner.kernel.weight"] == pytest.approx((16 * 4) ** -0.5)
    for (name, _), group in zip(model.named_parameters(), grouped, strict=True):
        assert group["lr"] * here[name] * factors[name] == pytest.approx(0.5 * there[name])
    assert all(parameter.grad is None for parameter in model.parameters())


# -- the trainings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_divided_loss_makes_the_same_steps(optimizer: str) -> None:
    """So what FP16 loses is what the division has made small, and FP32 is no other training."""
    design = dataclasses.replace(DESIGN, optimizer=optimizer)
    one = Configuration(design=design, way=FP32, rate=2)
    ends = [
        train(one, dataclasses.replace(SMALL, accumulate=accumulate, steps=8), seed=0, device="cpu")["bits"]
        for accumulate in (1, 1024)
    ]
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)


def test_learning_rates_are_a_geometric_row_that_the_optimizers_take() -> None:
    for design in (DESIGN, OTHER):
        for way in (FP32, UNIT_FP32):
            row = [rate_of(Configuration(design=design, way=way, rate=rate)) for rate in range(5)]
            assert [b / a for a, b in itertools.pairwise(row)] == [2.0] * 4
    plain = Characters(OTHER, PLAIN, width=16, length=8)
    made = make_optimizer(plain, Configuration(design=OTHER, way=STATIC, rate=2), SMALL)
    assert isinstance(made, torch.optim.SGD) and made.param_groups[0]["lr"] == 0.25 * SMALL.accumulate
    made = make_optimizer(plain, Configuration(design=DESIGN, way=FP32, rate=2), SMALL)
    assert isinstance(made, torch.optim.AdamW) and made.param_groups[0]["eps"] == 1e-8 / SMALL.accumulate


def test_a_task_trains_what_its_configuration_says() -> None:
    one, setup = Configuration(design=OTHER, way=UNIT_FP16, rate=1), dataclasses.replace(SMALL, steps=4)
    task = to_task(one, setup, seed=5, device="cpu")
    assert trained(task) == train(one, setup, seed=5, device="cpu")
    assert trained(task) != train(dataclasses.replace(one, rate=2), setup, seed=5, device="cpu")
    with pytest.raises(
        PlimsollError, match=r"to be the same text on every machine of the sweep; got \w{12} here and 0"
    ):
        trained({**task, "text_sha256": "0" * 64})


# -- what is measured --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def measured(folder: Path) -> Measured:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plimsoll_lab.experiments.unit_sweep.experiment.workers_for", lambda _: 1)
        return experiment.measure_with(bench(folder), SMALL, in_all_ways(DESIGN))


def test_fp16_loses_its_gradients_and_each_remedy_keeps_them(measured: Measured) -> None:
    found = by_id(measured.claims)
    held = {"fp16-underflow", "fp16-told", "static-repairs-widely", "unit-repairs-widely", "unit-nothing-lost"}
    assert {name for name in held if not found[name].holds} == set()
    assert math.isnan(found["fp16-fails"].measured)  # one design has no bound
    fp16, static, unit, fp32 = measured.trainings
    assert not fp16.good and static.good and fp32.good
    assert static.numbers["lost_after"] < 0.05 and fp16.numbers["lost_after"] > 0.5
    assert {finding.rule for finding in fp16.findings} >= {"underflow-high"}
    assert unit.numbers["rate"] > fp32.numbers["rate"]
    assert fp16.numbers["loss_end"] > 1.05 * fp32.numbers["loss_end"]  # without the cap of the claim, at chance


def test_a_watched_training_is_the_one_of_the_sweep(measured: Measured) -> None:
    for training in measured.trainings:
        assert training.numbers["loss_end"] == training.numbers["swept_bits"]


def test_it_goes_on_where_it_was_ended(measured: Measured, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = folder / "sweep.jsonl"
    whole, grid = ledger.read_bytes(), in_all_ways(DESIGN)
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 1 + len(grid)
    ledger.write_bytes(b"".join(lines[:-2]) + lines[-2][:30])  # killed while it wrote the last line but one
    asked: list[str] = []
    monkeypatch.setattr("plimsoll_lab.experiments.unit_sweep.experiment.workers_for", lambda _: 1)
    tell = experiment.to_task
    monkeypatch.setattr(experiment, "to_task", lambda each, *a, **k: (asked.append(each.name), tell(each, *a, **k))[1])
    again = experiment.swept(bench(folder), SMALL, grid)
    assert asked == [each.name for each in grid[-2:]]
    assert ledger.read_bytes() == whole and set(again) == {each.name for each in grid}
    assert experiment.swept(bench(folder), SMALL, grid) == again and len(asked) == 2


def test_figure_and_table_lie_beside_the_report(measured: Measured, folder: Path) -> None:
    assert "plotly" in (folder / experiment.FIGURE).read_text("utf-8")
    text = " ".join((folder / experiment.TABLE).read_text("utf-8").split())
    assert f"attention pre running-mean adamw 2 {measured.trainings[3].numbers['loss_end']:.3f}" in text
    assert measured.said[0].startswith("5 configurations of 1 designs.")


def test_a_folder_of_another_setup_is_refused_before_anything_is_changed(measured: Measured, folder: Path) -> None:
    del measured
    before = sorted(folder.rglob("*"))
    with pytest.raises(
        ArgumentError, match=r"expected the setup that .*sweep.jsonl was begun with; got .*steps 24 there"
    ):
        perform(experiment.UNIT_SWEEP, folder, steps=30)
    assert sorted(folder.rglob("*")) == before


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="lab unit-sweep: expected 20 steps or more, .*got 5. Use 100."):
        perform(experiment.UNIT_SWEEP, tmp_path / "a", steps=5)
    assert not any(tmp_path.iterdir())


def test_full_and_steps_say_what_is_trained() -> None:
    full, default = setup_for(None, full=True), setup_for(None, full=False)
    assert full.pieces * full.length * full.accumulate == default.pieces * default.length * default.accumulate == 2**19
    assert full.width > default.width and full.steps > default.steps
    assert setup_for(40, full=False) == dataclasses.replace(default, steps=40, warmup=4)
    assert experiment.grid_for(True) == whole_grid() and experiment.grid_for(False) == default_grid()


# -- the judgement -----------------------------------------------------------------------------------------------------


def made(**ratios: float) -> Scores:
    """Four designs whose bits are 2 in FP32, and so many times that in the other ways."""
    ways = dict(zip(("fp16", "static", "unit", "unit16"), (FP16, STATIC, UNIT_FP32, UNIT_FP16), strict=True))
    four = [dataclasses.replace(DESIGN, sequence=each) for each in SEQUENCES] + [OTHER]
    bits = {(reference(each), FP32): {1: 2.5, 2: 2.0} for each in four}
    for name, way in ways.items():
        bits |= {(each, way): {1: math.inf, 2: 2.0 * ratios.get(name, 1.0)} for each in four}
    return Scores(bits=bits, chance=2.6)


NUMBERS = {way: {"lost_after": 0.0, "underflow_alarms": 0.0} for way in WAYS} | {
    FP16: {"lost_after": 0.9, "underflow_alarms": 1.0}
}


def test_claims_hold_where_they_should_and_only_there() -> None:
    good = claims(made(fp16=1.2, unit=0.99, unit16=0.99), NUMBERS)
    assert all(claim.holds for claim in good), [str(claim.id) for claim in good if not claim.holds]
    for ratios, failed in (
        ({"fp16": 1.0}, {"fp16-fails", "fp16-fails-widely"}),
        ({"fp16": 1.2, "static": 1.02}, {"static-repairs", "static-repairs-widely"}),
        ({"fp16": 1.2, "unit16": 1.02}, {"unit-repairs", "unit-repairs-widely", "unit-fp16-as-good"}),
        ({"fp16": 1.2, "unit": 1.02, "unit16": 1.02}, {"unit-as-good", "unit-as-good-widely", "unit-fp16-as-good"}),
    ):
        assert {claim.id for claim in claims(made(**ratios), NUMBERS) if not claim.holds} == failed
    nothing = claims(made(fp16=1.2), {way: {"lost_after": 0.02, "underflow_alarms": 0.0} for way in WAYS})
    assert {claim.id for claim in nothing if not claim.holds} == {"fp16-underflow", "fp16-told", "unit-nothing-lost"}


def test_designs_that_learn_nothing_in_fp32_do_not_count() -> None:
    found = made(fp16=1.2)
    deaf = dataclasses.replace(found, bits={**found.bits, (DESIGN, FP32): {2: 5.5}})
    assert len(found.pairs(FP16, FP32)) == 4 - 1 and DESIGN in {pair.design for pair in found.pairs(FP16, FP32)}
    assert DESIGN not in {pair.design for pair in deaf.pairs(FP16, FP32)}
    assert math.isnan(mean(()).high) and math.isnan(share(()))


def test_one_that_diverges_counts_as_having_learned_nothing() -> None:
    """Otherwise the mean over designs would say nothing where FP16 fails most."""
    for bits in (1e9, math.inf):
        found = made(fp16=1.2, unit=0.99, unit16=0.99)
        found = dataclasses.replace(found, bits={**found.bits, (DESIGN, FP16): {1: bits, 2: bits}})
        assert max(pair.bits for pair in found.pairs(FP16, FP32)) == found.chance
        assert all(claim.holds for claim in claims(found, NUMBERS))
    found = dataclasses.replace(found, bits={**found.bits, (DESIGN, STATIC): {1: 2.0, 2: math.inf}})
    assert {claim.id for claim in claims(found, NUMBERS) if not claim.holds} >= {"static-repairs-widely"}


def test_chance_is_the_entropy_of_single_characters() -> None:
    text = standard_library()
    counts = np.bincount(text.held_out.numpy(), minlength=SYMBOLS)
    own = counts[counts > 0] / counts.sum()
    assert -(own * np.log2(own)).sum() < chance() < -(own * np.log2(own)).sum() + 0.5 < math.log2(SYMBOLS)


def test_the_figure_has_a_mark_for_each_pair_and_the_table_a_line_for_each_design() -> None:
    found = made(fp16=1.2, unit=0.99)
    drawn = figure(found)
    marks = {trace.name: list(trace.y) for trace in drawn.data if trace.mode == "markers"}
    assert marks["FP16, no loss scale"] == pytest.approx([2.4] * 3)  # the fourth has its FP32 in another scheme
    assert marks["unit-scaled FP32"] == pytest.approx([1.98] * 4)
    assert drawn.layout.title.subtitle.text.endswith("; 2 without a pair in FP32 are not drawn")
    far = figure(made(fp16=10.0, unit=0.99))
    marks = {trace.name: trace for trace in far.data if trace.mode == "markers"}
    assert list(marks["FP16, no loss scale"].y) == pytest.approx([found.chance + 0.3] * 3)
    assert all("here 20.000" in text for text in marks["FP16, no loss scale"].text)
    assert "; 3 on the edge lie beyond what chance gives" in far.layout.title.subtitle.text
    lines = [line for line in table(found).splitlines() if "1.980" in line]
    assert len(lines) == 4 and all("2.400" in line for line in lines)
