"""The experiment `audit`: what it leaves, and that its claims are of what it measured."""

import json
import math
from pathlib import Path

import pytest
import torch

from plimsoll import unit
from plimsoll.errors import ArgumentError
from plimsoll_lab import EXPERIMENTS, Bench, Measured
from plimsoll_lab.bench import Silent
from plimsoll_lab.evidence import rows_of
from plimsoll_lab.experiments.audit import (
    FIGURE,
    Setup,
    _Arithmetic,
    added_share,
    claims,
    measure_with,
    operations,
    setup_for,
)
from plimsoll_lab.experiments.unit.model import Plain, Unit
from plimsoll_lab.source_text import SYMBOLS

SMALL = Setup(steps=24, width=64, layers=2, heads=2, length=32, pieces=8, every=6)
COSTED = {"width": 64, "layers": 2, "heads": 2, "length": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit")


@pytest.fixture(scope="module")
def measured(folder: Path) -> Measured:
    runs = folder / "runs"
    runs.mkdir()
    return measure_with(
        Bench(runs=runs, seed=0, device="cpu", steps=None, full=False, progress=Silent()), SMALL, COSTED
    )  # fmt: skip


# What so small a batch and so short a training cannot show: its gradients are not that small, its loss not that low.
TOO_SMALL_FOR = {"before-lost", "trains", "costs-little"}


def test_a_small_one_keeps_the_claims_that_it_can(measured: Measured) -> None:
    assert {claim.id for claim in measured.claims if not claim.holds} <= TOO_SMALL_FOR
    assert len(measured.claims) == 11 and all(math.isfinite(claim.measured) for claim in measured.claims)
    numbers = measured.trainings[0].numbers
    assert numbers["loss_end"] < numbers["loss_begin"]
    assert numbers["farthest_before"] > 10 and numbers["farthest_after"] < 3.5


def test_it_leaves_a_figure_tables_and_rows(measured: Measured, folder: Path) -> None:
    assert "Plotly.newPlot" in (folder / FIGURE).read_text("utf-8")
    tables = (folder / "runs" / "audit" / "tables.txt").read_text("utf-8")
    assert "blocks.0.qkv linear" in tables and max(len(line) for line in tables.splitlines()) <= 120
    data = json.loads((folder / "runs" / "audit" / "audits.json").read_text("utf-8"))
    assert set(data) == {"before", "after", "trained", "compared"}
    assert data["compared"]["only_before"] == data["compared"]["only_after"] == []
    assert (folder / "runs" / "unit-scaled" / "run.json").exists() and FIGURE in measured.said[1]


def test_each_claim_fails_where_its_number_is_bad(measured: Measured) -> None:
    numbers = dict(measured.trainings[0].numbers)
    bad = {
        "before-far": {"gradients_far_before": 0.5}, "before-lost": {"backward_e5m2_lost_before": 0.1},
        "after-near": {"within_after": 0.9}, "after-farthest": {"farthest_after": 5.0},
        "after-e4m3": {"forward_e4m3_lost_after": 0.02}, "after-e5m2": {"backward_e5m2_lost_after": 0.02},
        "after-fp16": {"backward_fp16_lost_after": 0.02}, "drift-cuts-nothing": {"cut_off_in_training": 0.01},
        "drift-loses-little": {"lost_in_training": 0.1}, "trains": {"loss_end": numbers["loss_begin"]},
        "costs-little": {"operations_added": 0.003},
    }  # fmt: skip
    assert list(bad) == [claim.id for claim in claims(numbers)]
    for name, changed in bad.items():
        found = {claim.id: claim.holds for claim in claims({**numbers, **changed})}
        assert not found[name], name


def test_sizes_and_their_limits() -> None:
    assert EXPERIMENTS["audit"].source == "U1, U2, U5"
    assert setup_for(50, full=False).steps == 50 and setup_for(None, full=True).width == 256
    with pytest.raises(ArgumentError, match="lab audit: expected 20 steps or more, .*; got 10. Use 200"):
        setup_for(10, full=False)


def test_operations_are_those_that_are_counted_by_hand() -> None:
    width, layers, tokens = COSTED["width"], COSTED["layers"], COSTED["length"]
    forward = layers * (24 * tokens * width**2 + 4 * tokens**2 * width) + 2 * tokens * width * SYMBOLS
    plain, scaled = operations(Plain, **COSTED), operations(Unit, **COSTED)
    assert plain[0] == scaled[0] == 3 * forward
    assert added_share(**COSTED) == (scaled[1] - plain[1]) / sum(plain) > 0.01
    linear, x = unit.nn.Linear(8, 16, bias=False), torch.randn(4, 8, requires_grad=True)
    with _Arithmetic() as counted:
        linear(x).backward(torch.ones(4, 16))
    assert counted.values == 4 * 16 + 4 * 8 + 16 * 8  # a factor for what it gives, and one for each of two gradients


def test_every_claim_is_of_a_row_and_every_row_has_one(measured: Measured) -> None:
    assert {row for claim in measured.claims for row in claim.rows} == set(rows_of(EXPERIMENTS["audit"].source))
    assert all(claim.rows for claim in measured.claims)
