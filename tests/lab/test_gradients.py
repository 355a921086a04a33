"""Experiment `gradients`: its shares and figure from known values, and that its claims are of what its runs hold."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from plimsoll.diagnosis import View
from plimsoll.errors import ArgumentError
from plimsoll.runs import Run
from plimsoll.spectrum import measure
from plimsoll_lab import Bench, Measured
from plimsoll_lab.bench import Silent
from plimsoll_lab.evidence import rows_of
from plimsoll_lab.experiments.gradients import (
    FIGURE,
    GRADIENTS,
    KINDS,
    below,
    between,
    claims,
    histogram,
    measure_with,
    said,
    scale_for,
    setup_for,
    shares,
    small_updates,
)
from plimsoll_lab.models.detector import training as trains
from plimsoll_lab.models.detector.training import (
    Job,
    Kind,
    Setup,
    counted,
    lost,
    numbers_of,
    rate_at,
    sized,
    smoothed,
    steps_to,
    whole_spectrum,
)
from plimsoll_lab.running.workers import one_thread
from tests.support.cases import each

TINY = Setup(steps=20, warmup=4, batch=2, width=4, seeds=2, every=10, held_out=4)
# Nothing is learnt, updates are those of other sizes; and what does not hold at all.
TOO_SHORT_FOR = {"none-trails", "published-band", "small-updates", "zeros"}


def bench(folder: Path) -> Bench:
    (folder / "runs").mkdir(parents=True)
    return Bench(runs=folder / "runs", seed=0, device="cpu", steps=None, full=False, progress=Silent())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gradients") / "out"


@pytest.fixture(scope="module")
def measured(folder: Path) -> Iterator[Measured]:
    with pytest.MonkeyPatch.context() as patch, one_thread():
        patch.setattr(trains, "workers_for", lambda _: 1)
        yield measure_with(bench(folder), TINY)


# -- shares and figure -------------------------------------------------------------------------------------------------


def test_shares_are_what_fp16_does_to_the_values_themselves() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4000, generator=generator) * 2.0 ** torch.randint(-44, -8, (4000,), generator=generator)
    values[::3] = 0.0
    found, nonzero = shares(measure(values)), values[values != 0]
    assert found.zero == pytest.approx((values == 0).float().mean().item())
    for shift, share in zip((0, 3, 15), found.lost, strict=True):
        flushed = (nonzero * 2.0**shift).half() == 0
        assert share == pytest.approx(flushed.float().mean().item(), abs=2e-3)
    sizes = nonzero.abs()
    assert found.band == pytest.approx(((sizes >= 2**-27) & (sizes < 2**-24)).float().mean().item())
    assert found.wide == pytest.approx(((values.abs() >= 2**-32) & (values.abs() < 2**-20)).float().mean().item())
    assert set(found.to_dict()) == {"zero", "band", "wide", "lost_at_1", "lost_at_8", "lost_at_32768"}


def test_updates_are_counted_at_each_step_s_own_rate(measured: Measured) -> None:
    spread = measure(torch.linspace(1.0, 2.0, 1001)[:-1] * 2.0**-24)
    assert below(spread, 2.0**-24) == 0 and below(spread, 1.75 * 2.0**-24) == pytest.approx(750)
    assert below(spread, 2.0**-23) == 1000
    assert [rate_at(step, TINY) * TINY.share / TINY.learning_rate for step in (0, 3, 10)] == pytest.approx(
        [0.25, 0.85, 0.5]
    )
    job = Job(kind=KINDS[0], seed=0, run=measured.trainings[0].run)
    found = [(step, spectrum) for step, _, _, spectrum in Run(job.run).spectra("gradients")]
    assert {step for step, _ in found} == {0, 10}
    expected = sum(below(spectrum, 2.0**-24 / rate_at(step, TINY)) for step, spectrum in found)
    total = sum(spectrum.nonzero for _, spectrum in found)
    assert small_updates([job], TINY) == pytest.approx(expected / total) and 0 < expected < total
    assert small_updates([job], dataclasses.replace(TINY, learning_rate=1e-20)) == 1.0


def test_the_scale_that_brings_a_share_into_the_published_band() -> None:
    spectrum = measure(torch.tensor([2.0**-25] * 50 + [0.0] * 50))
    assert between(spectrum, -25, -24) == 50 and between(spectrum, -24, 0) == 0
    assert scale_for(spectrum, 0.5) == 0 and scale_for(spectrum, 0.04) == 5  # 2^-20 lies outside


def test_the_figure_shows_every_value_once_by_what_keeps_it() -> None:
    pytest.importorskip("plotly")
    values = {"lost even at 32K": -42, "32K brings them back": -40, "8 brings them back": -28,
              "held, not in full precision": -20, "held": -3}  # fmt: skip
    spectrum = measure(torch.tensor([0.0, *(1.25 * 2.0**at for at in values.values())]))
    shown = {trace.name: (list(trace.x), list(trace.y)) for trace in histogram(spectrum, "title").data}
    assert shown == {name: ([at], [pytest.approx(1 / 6)]) for name, at in values.items()}
    for name, at in values.items():
        kept = [1.25 * 2.0 ** (at + shift) >= 2.0**-25 for shift in (0, 3, 15)]
        assert kept == {"lost even at 32K": [False] * 3, "32K brings them back": [False, False, True],
                        "8 brings them back": [False, True, True]}.get(name, [True] * 3)  # fmt: skip


# -- trainings ---------------------------------------------------------------------------------------------------------


def test_the_claims_hold_that_a_training_so_short_can_show(measured: Measured) -> None:
    failed = {claim.id: claim.measured for claim in measured.claims if not claim.holds}
    assert set(failed) <= TOO_SHORT_FOR, failed
    assert len({claim.id for claim in measured.claims}) == len(measured.claims) == 11
    assert [training.name for training in measured.trainings] == [kind.name for kind in KINDS]


def test_trainings_of_one_seed_begin_alike_and_two_seeds_do_not(measured: Measured, folder: Path) -> None:
    first = {kind.name: Run(folder / "runs" / kind.name).scalars("train_loss")[1][0] for kind in KINDS}
    assert first["fp16"] == first["fp16-8"] == first["fp16-32k"] == pytest.approx(first["fp32"], rel=1e-2)
    assert Run(folder / "runs" / "fp32-1").scalars("train_loss")[1][0] != first["fp32"]


def test_what_fp16_made_zero_is_told_from_what_is_zero_in_fp32(measured: Measured) -> None:
    fp32, none, eight, more = (training.numbers for training in measured.trainings)
    assert none["lost"] > eight["lost"] > more["lost"]
    # At the first step the weights are the same: FP32's zeros and those that FP16 made are FP16's.
    runs = [Run(training.run) for training in measured.trainings]
    there, here = (whole_spectrum(run, slice(0, 1)) for run in (runs[0], runs[2]))
    gone = lost(View(runs[2], 0))["zeros_by_fp16"] * here.zeros
    assert here.zeros == pytest.approx(there.zeros + gone, rel=2e-3) and gone > 0.02 * here.zeros
    assert "lost" not in fp32 and "zeros_by_fp16" not in fp32


def test_numbers_are_those_of_the_runs(measured: Measured, folder: Path) -> None:
    for training in measured.trainings:
        own = [numbers_of(Run(folder / "runs" / name)) for name in (training.name, f"{training.name}-1")]
        losses = [
            Run(folder / "runs" / name).scalars("held_out_loss")[1] for name in (training.name, f"{training.name}-1")
        ]
        assert [one["held_out_loss"] for one in own] == [loss[-1] for loss in losses]
        assert training.numbers["held_out_loss"] == pytest.approx(np.mean([one["held_out_loss"] for one in own]))
        assert training.numbers["batches_lost"] == 0
    assert [math.log2(kind.scale) for kind in KINDS[1:]] == [t.numbers["scale_end"] for t in measured.trainings[1:]]
    assert (folder / FIGURE).stat().st_size > 1000


def test_a_tensor_counts_once(measured: Measured) -> None:
    names = [name for name in Run(measured.trainings[0].run).tensors["activation_gradients"] if counted(name)]
    assert len(names) == 18 and "fine:output" not in names and "fine.0:output" in names and "heads.2:output" in names
    assert not any(name.startswith(("model", "norms")) or name.endswith(":input") for name in names)


def test_when_a_loss_is_reached(measured: Measured) -> None:
    run = Run(measured.trainings[0].run)
    steps, smooth = smoothed(run)
    assert len(smooth) == 1 and smooth[0] == pytest.approx(run.scalars("train_loss")[1].mean()) and steps[0] == 19
    assert steps_to(run, smooth[0]) == 20 and steps_to(run, smooth[0] / 2) == math.inf


CHANGES = [
    ("fp32", {"zero": 0.5}, "zeros"),
    ("fp32", {"zero": 0.8}, "zeros"),
    ("fp16", {"lost": 0.4}, "fp16-turns-most-to-zero"),
    ("fp32", {"band": 0.01}, "band-tells"),
    ("fp16-32k", {"lost": 0.02}, "32k-nothing-lost"),
    ("fp16-8", {"foretold_off": 0.06}, "foretold"),
    ("fp32", {"wide": 0.4}, "published-band"),
    ("fp32", {"updates_small": 0.02}, "small-updates"),
    ("fp32", {"updates_small": 0.11}, "small-updates"),
    ("fp16", {"of_fp32_low": 1.04}, "none-trails"),
    ("fp16-8", {"of_fp32_high": 1.06}, "8-trains"),
    ("fp16-8", {"of_fp32_high": math.nan}, "8-trains"),
    ("fp16-8", {"lost": 0.05}, "below-does-not-matter"),
    ("fp16-32k", {"of_fp32_high": math.inf}, "32k-trains"),
]


@each(("who", "change", "breaks"), CHANGES)
def test_each_claim_can_fail(measured: Measured, who: str, change: dict[str, float], breaks: str) -> None:
    numbers = {training.name: dict(training.numbers) for training in measured.trainings}
    numbers["fp32"] |= {"zero": 0.6, "wide": 0.04, "updates_small": 0.05}
    numbers["fp16"] |= {"of_fp32_low": 1.1}
    before = {claim.id: claim.holds for claim in claims(numbers)}
    assert all(before.values()), before
    numbers[who] |= change
    after = {claim.id: claim.holds for claim in claims(numbers)}
    assert [name for name in after if not after[name]] == [breaks]


def test_what_is_said_is_measured(measured: Measured) -> None:
    numbers = {training.name: dict(training.numbers) for training in measured.trainings}
    numbers["fp32"] |= {"zero": 0.123, "wide": 0.321}
    lines = said(numbers, 12)
    assert "12.3 % of the activation gradients" in lines[0] and "32.1 % of all" in lines[3] and "2^12" in lines[3]
    assert said(numbers, None)[3] == "32.1 % of all lie in 2^-32 to 2^-20."


def test_sizes() -> None:
    assert setup_for(None, full=False) == Setup() and setup_for(None, full=True).width > Setup().width
    assert (setup_for(40, full=False).steps, setup_for(40, full=False).warmup, setup_for(40, full=False).every) == (
        40,
        8,
        8,
    )
    assert setup_for(400, full=True).steps == 400 and sized(TINY, "gradients", 30, full=False).every == 6
    with pytest.raises(ArgumentError, match=r"lab gradients: expected 20 steps or more, .* got 19\. Use 200\."):
        setup_for(19, full=False)


def test_a_result_says_how_it_was_made(folder: Path, measured: Measured) -> None:
    chosen = GRADIENTS.settings(Bench(runs=folder, seed=0, device="cpu", steps=60, full=False, progress=Silent()))
    assert chosen["steps"] == 60 and chosen["fp16"] == "emulated" and chosen["share"] == 2.0**-8
    assert Kind(name="x", title="x") != KINDS[0] and Job(kind=KINDS[0], seed=0, run=folder).run == folder


def test_every_claim_is_of_a_row_and_every_row_has_one(measured: Measured) -> None:
    assert {row for claim in measured.claims for row in claim.rows} == set(rows_of(GRADIENTS.source))
    assert all(claim.rows for claim in measured.claims)
