"""The factor table: it holds, and a wrong formula does not."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from plimsoll.cli import app
from plimsoll.errors import ArgumentError
from plimsoll_lab import EXPERIMENTS, Bench
from plimsoll_lab.bench import Silent
from plimsoll_lab.experiments.unit_factors import Case, Row, cases, claims, measured_rows
from tests.support.cases import each

RUNS = 32


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [row for case in cases() for row in measured_rows(case, RUNS, seed=1)]


def test_every_formula_holds(rows: list[Row]) -> None:
    failed = {str(row): row.of_bound for row in rows if row.of_bound > 1}
    assert not failed
    assert len(rows) == sum(d is not None for case in cases() for d in case.directions) > 60
    ids = [claim.id for claim in claims(rows)]
    assert len(set(ids)) == len(ids) == len({row.case.operation for row in rows}) + 1


@each("case", cases(), ids=lambda case: f"{case.operation} {case.shape}")
def test_a_factor_that_is_a_fifth_off_is_found(case: Case, rows: list[Row]) -> None:
    own = [row for row in rows if row.case.operation == case.operation and row.case.shape == case.shape]
    assert own
    for row in own:
        wrong = dataclasses.replace(
            row, direction=dataclasses.replace(row.direction, factor=1.2 * row.direction.factor)
        )
        assert wrong.of_bound > 1 and "NOT WITHIN" in str(wrong)
        others = [other for other in rows if other is not row]
        found = {claim.id for claim in claims([*others, wrong]) if not claim.holds}
        assert f"factors-{case.operation.replace('_', '-')}" in found


def test_a_measurement_that_is_no_number_is_within_no_bound(rows: list[Row]) -> None:
    broken = dataclasses.replace(rows[1], measured=math.nan)
    name = rows[0].case.operation
    assert name == rows[1].case.operation
    failed = {claim.id for claim in claims([rows[0], broken, *rows[2:]]) if not claim.holds}
    assert failed == {f"factors-{name}"}


def test_wide_bounds_are_told(rows: list[Row]) -> None:
    wide = dataclasses.replace(rows[0], bound=0.5)
    assert not {claim.id: claim for claim in claims([wide, *rows[1:]])}["bounds-narrow"].holds


def test_too_few_runs_are_refused(tmp_path: Path) -> None:
    bench = Bench(runs=tmp_path, seed=0, device="cpu", steps=7, full=False, progress=Silent())
    with pytest.raises(ArgumentError, match="unit-factors: expected 8 runs or more, for a standard error; got steps=7"):
        EXPERIMENTS["unit-factors"].settings(bench)


def test_the_command_prints_the_table(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    finished = CliRunner().invoke(app, ["lab", "unit-factors", "--steps", "64", "--output", str(tmp_path / "out")])
    assert finished.exit_code == 0, finished.output
    assert "All 17 claims hold." in finished.output and "rms m f'(mx)" in finished.output
    assert max(map(len, finished.output.splitlines()[:-1])) <= 79
    assert "training" not in finished.output and (tmp_path / "out" / "result.json").exists()
    assert torch.equal(state, torch.random.get_rng_state())
