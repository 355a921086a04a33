"""Experiment `layerwise`: what single scales could serve, and that its claims are of what its runs hold."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plimsoll.diagnosis import View
from plimsoll.errors import ArgumentError
from plimsoll.runs import Run
from plimsoll_lab import Bench, Measured
from plimsoll_lab.bench import Silent
from plimsoll_lab.experiments.layerwise import (
    KINDS,
    LAYERWISE,
    STATIC,
    Spans,
    best_static,
    claims,
    measure_with,
    said,
    setup_for,
    spans_of,
)
from plimsoll_lab.models.detector import training as trains
from plimsoll_lab.models.detector.training import Job, lost, train
from plimsoll_lab.running.workers import one_thread
from tests.support.cases import each

TINY = replace(setup_for(None, full=False), steps=6, warmup=1, batch=1, width=4, seeds=1, every=3, held_out=2)
BY_NAME = {kind.name: kind for kind in KINDS}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    folder = tmp_path_factory.mktemp("layerwise")
    with pytest.MonkeyPatch.context() as patch, one_thread():
        patch.setattr(trains, "workers_for", lambda _: 1)
        bench = Bench(runs=folder, seed=0, device="cpu", steps=None, full=False, progress=Silent())
        yield measure_with(bench, TINY)


def numbers_of(measured: Measured) -> dict[str, dict[str, float]]:
    return {training.name: dict(training.numbers) for training in measured.trainings}


def held(numbers: dict[str, dict[str, float]]) -> dict[str, bool]:
    return {claim.id: claim.holds for claim in claims(numbers)}


def sound(measured: Measured) -> dict[str, dict[str, float]]:
    """The numbers as they would be where every claim holds."""
    numbers = numbers_of(measured)
    for name, found in numbers.items():
        worst = name == "static-0"
        found |= {"of_best_low": 1.3 if worst else 0.99, "of_best_high": 1.4 if worst else 1.01, "lost": 0.01}
        found |= {"of_fp32": 1.35 if worst else 1.001, "of_fp32_high": 1.4 if worst else 1.01, "batches_lost": 0.0}
    numbers["static-15"]["of_fp32"] = 1.0
    return numbers


def test_every_training_of_a_seed_begins_alike_and_each_scaler_is_its_own(measured: Measured) -> None:
    assert [training.name for training in measured.trainings] == list(BY_NAME)
    first = {training.name: Run(training.run).scalars("train_loss")[1][0] for training in measured.trainings}
    assert all(loss == pytest.approx(first["fp32"], rel=1e-2) for loss in first.values())
    begins = {name: numbers.get("scale_first") for name, numbers in numbers_of(measured).items()}
    static = {kind.name: math.log2(kind.scale) for kind in STATIC}
    assert begins == {
        "fp32": None, "stock": 16, "dynamic": 16, "spectral": 10, "layer-spectra": 16, "layer-zhao": 16, **static,
    }  # fmt: skip
    assert list(static.values()) == [0, 7, 10, 15]


def test_the_scales_do_what_they_are_for(measured: Measured) -> None:
    numbers = numbers_of(measured)
    by_scale = [numbers[kind.name]["lost"] for kind in STATIC]
    assert by_scale == sorted(by_scale, reverse=True) and by_scale[0] > 0.9 and by_scale[-1] < 0.5
    # The last of the samples: by then its scales are where they belong.
    assert numbers["layer-spectra"]["lost"] < numbers["static-10"]["lost"]
    assert all(found["batches_lost"] == 0 for name, found in numbers.items() if name != "stock")


def test_an_overflowed_batch_is_repeated_and_its_gradients_do_not_count(tmp_path: Path) -> None:
    loud = replace(TINY, share=2.0**6, steps=5)  # at 2^16 this overflows
    for name, kept in (("stock", False), ("dynamic", True)):
        with one_thread():
            train(Job(kind=BY_NAME[name], seed=0, run=tmp_path / name), loud, "cpu")
        run = Run(tmp_path / name)
        skipped = sum(event.kind == "skip" for event in run.events())
        repeated = int(np.nansum(run.scalars("retries")[1])) if kept else 0
        assert skipped > 0 and (skipped == repeated) == kept, name
        assert len(run.scalars("train_loss")[0]) == 5 + repeated
        if kept:  # a step that overflowed has NaN and Inf, whose zeros say nothing
            assert 0.3 < lost(View(run))["zero"] < 0.9


def test_a_common_window_is_what_all_windows_share() -> None:
    assert Spans(windows={"a": (-4, 20), "b": (3, 30)}).common == (3, 20)
    assert Spans(windows={"a": (-4, 2), "b": (3, 30)}).common is None
    assert Spans(windows={"a": (-4, 20), "b": None}).common is None and Spans(windows={}).common is None
    numbers = Spans(windows={"a": (-4, 20), "b": (3, 30), "c": None}).to_dict()
    assert numbers == {"tensors": 3, "no_scale_serves": 1, "tops_apart": 10}
    assert Spans(windows={"a": (-4, 20)}).to_dict() == {
        "tensors": 1, "no_scale_serves": 0, "tops_apart": 0, "window_low": -4, "window_high": 20,
    }  # fmt: skip


def test_windows_are_of_the_whole_training_and_hold_what_fp16_then_does(measured: Measured) -> None:
    spans = spans_of(Run(measured.trainings[0].run))
    assert len(spans.windows) == 18 and spans.common is not None
    low, high = spans.common
    assert numbers_of(measured)["fp32"]["window_low"] == low and high - low >= 4
    assert BY_NAME["static-10"].scale < 2.0**low  # as `lost` shows: the scale is below what works
    assert numbers_of(measured)["static-10"]["lost"] > 0.01


CHANGES = [
    ("static-0", {"of_best_low": 1.04}, "static-has-to-be-tried"),
    ("static-15", {"of_fp32_high": 1.03}, "static-as-fp32"),
    *((name, {"of_best_high": 1.03}, f"{name}-as-best")
      for name in ("layer-spectra", "layer-zhao", "stock", "dynamic", "spectral")),
    *((name, {"of_fp32_high": 1.03}, f"{name}-as-fp32")
      for name in ("layer-spectra", "layer-zhao", "stock", "dynamic", "spectral")),
    ("layer-spectra", {"of_best_high": math.inf}, "layer-spectra-as-best"),
    *((name, {"batches_lost": 1.0}, f"{name}-no-batch-lost") for name in ("layer-spectra", "layer-zhao", "spectral")),
    ("layer-spectra", {"lost": 0.02}, "layer-loses-least"),
    ("fp32", {"window_low": math.nan}, "one-scale-could-serve"),
]  # fmt: skip


@each(("who", "change", "breaks"), CHANGES)
def test_each_claim_can_fail(measured: Measured, who: str, change: dict[str, float], breaks: str) -> None:
    numbers = sound(measured)
    assert all(held(numbers).values()), held(numbers)
    numbers[who] |= change
    after = held(numbers)
    assert [name for name in after if not after[name]] == [breaks]


def test_the_best_static_scale_is_that_of_the_lowest_loss(measured: Measured) -> None:
    numbers = sound(measured)
    assert best_static(numbers) == "static-15"
    numbers["static-7"]["of_fp32"] = 0.9
    assert best_static(numbers) == "static-7"


def test_what_is_said_is_measured(measured: Measured) -> None:
    numbers = sound(measured)
    numbers["layer-zhao"] |= {"held_out_loss": 1.234, "of_best_high": 1.5}
    numbers["static-0"]["of_best"] = 1.25
    numbers["fp32"]["of_best_high"] = 1.012
    lines = said(numbers)
    assert len(lines) == 1 + len(KINDS) + 2 and max(len(line) for line in lines[:11]) <= 79
    assert any("published rule" in line and "1.234" in line for line in lines[1:11])
    assert "Not shown to be: LayerScaler, published rule." in lines[-2] and "(2^0) ends 25 % behind" in lines[-2]
    assert "Of FP32 itself it is shown to within 1.2 %." in lines[-2]
    numbers["fp32"].pop("window_low")
    assert said(numbers)[-1].startswith("No single scale fits all 18 tensors")


def test_sizes_and_settings(tmp_path: Path) -> None:
    assert setup_for(None, full=False).share == 2.0**-15
    with pytest.raises(ArgumentError, match=r"lab layerwise: expected 20 steps or more, .* got 5\. Use 150\."):
        setup_for(5, full=False)
    chosen = LAYERWISE.settings(Bench(runs=tmp_path, seed=0, device="cpu", steps=None, full=True, progress=Silent()))
    assert chosen["kinds"] == list(BY_NAME) and chosen["width"] == 32 and chosen["share"] == 2.0**-15
