"""A plan held against runs: its own, a run that has outgrown it, another model's, and one that recorded less."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import plimsoll as pl
from plimsoll.diagnosis import PlanCheck, check_plan, plan
from plimsoll.errors import ArgumentError
from plimsoll.formats import Plan
from tests.support.cases import each
from tests.support.diagnosis.planned import layers, written

SIZES = {"a": 1.0, "b": 2.0**-6}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    steps = [layers(SIZES, step=s) for s in range(3)]
    return written(tmp_path_factory.mktemp("check") / "run", steps)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose last step has activations eight times as large."""
    steps = [layers(SIZES, step=s, activation=8.0 if s == 2 else 1.0) for s in range(3)]
    return written(tmp_path_factory.mktemp("other") / "run", steps)


@each("target", ["fp8", "fp16", "bf16", "mxfp8", "cheapest"])
def test_a_plan_holds_on_the_run_that_it_was_made_of(path: Path, target: str) -> None:
    made = plan(path, target)
    found = check_plan(made, path)
    assert found.ok and found.sentence == "The plan holds: 2 modules, none out of range."
    assert len(found.rows) == 6 and found.unknown == ()
    for row in found.rows:
        assert row.found.high <= row.predicted.high and row.found.low >= row.predicted.low


def test_a_run_that_has_outgrown_it_is_named_with_its_step(path: Path, other: Path) -> None:
    made = plan(path, "fp8")
    found = check_plan(made, other)
    assert not found.ok and [(r.module, r.role) for r in found.rows if not r.ok] == [
        ("a", "activations"), ("b", "activations"),
    ]  # fmt: skip
    shift = made.scales["a"]["activations"]
    assert found.rows[0].why.startswith(
        f"activations overflow E4M3 at 2^{int(shift).bit_length() - 1} (step 2 allows 2^"
    )
    assert found.sentence.startswith("The plan fails in 2 of 2 modules: a, activations overflow E4M3")
    assert check_plan(made, other, until=1).ok
    assert check_plan(plan(other, "fp8"), path, tolerance=0.05).ok


def test_too_much_lost_is_named_too(path: Path) -> None:
    made = plan(path, "fp8")
    low = {**made.scales, "a": {**made.scales["a"], "gradients": 2.0**-16}}
    found = check_plan(replace(made, scales=low), path)
    failing = [row for row in found.rows if not row.ok]
    assert [(r.module, r.role) for r in failing] == [("a", "gradients")]
    assert failing[0].why.startswith("1 % or more of its activation gradients may be lost in E5M2 at 2^-16 (step ")
    real = sum(
        int(((pl.cast(g, "e5m2", scale=2.0**-16) == 0) & (g != 0)).sum()) / g.numel() / 3
        for g in (layers(SIZES, step=s)["activation_gradients", "a:output"] for s in range(3))
    )
    assert failing[0].overflow.high == 0 and failing[0].found.low <= real <= failing[0].found.high


def test_the_tolerance_is_the_plans_unless_another_is_given(path: Path) -> None:
    made = plan(path, "mxfp4", tolerance=1.0)
    assert made.formats == {"a": "mxfp4", "b": "mxfp4"}
    assert check_plan(made, path).ok and not check_plan(made, path, tolerance=0.01).ok
    assert not check_plan(replace(made, tolerance=None), path).ok
    failing = check_plan(made, path, tolerance=0.01).rows[0]
    assert "may be lost in MXFP4 (step" in failing.why and "block records are missing" in failing.why


def test_a_narrow_format_without_a_scale_is_judged_at_the_loss_scale(path: Path) -> None:
    by_hand = Plan(target="x", formats={"a": "fp16", "b": "fp16"}, scale=2.0**20)
    found = check_plan(by_hand, path)
    assert not found.ok and {row.scale for row in found.rows if row.role == "gradients"} == {2.0**20}
    assert check_plan(replace(by_hand, scale=2.0**8), path).ok
    assert {row.scale for row in check_plan(replace(by_hand, scale=None), path).rows} == {1.0, 2.0**16}


def test_names_and_globs_that_the_run_has_not_are_told(path: Path) -> None:
    by_hand = Plan(target="x", formats={"blocks.*": "bf16", "head": "bf16", "?": "bf16"})
    found = check_plan(by_hand, path)
    assert found.unknown == ("blocks.*", "head") and not found.ok and all(row.ok for row in found.rows)
    assert found.sentence == "The plan is not of this model: the run has no blocks.*, head."
    many = Plan(target="x", formats=dict.fromkeys("abcdef", "e4m3"))
    assert check_plan(many, path).sentence.endswith("And the run has no c, d, e and 1 more of its modules.")


def test_what_this_run_did_not_record_fails(path: Path, tmp_path: Path) -> None:
    some = {key: x for key, x in layers(SIZES).items() if key[0] != "activations"}
    found = check_plan(plan(path, "fp8"), written(tmp_path / "run", [some]))
    assert [(r.role, r.found, r.why) for r in found.rows if not r.ok] == [
        ("activations", None, "its activations were not recorded")
    ] * 2


def test_the_answer_is_data_and_a_table(path: Path, other: Path) -> None:
    found: PlanCheck = check_plan(plan(path, "fp8"), other)
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["ok"] is False and len(data["rows"]) == 6 and data["rows"][0]["why"] == found.rows[0].why
    assert data["rows"][0]["found"].keys() == {"low", "high", "estimate"}
    lines = _printed(found, most=4, width=80).splitlines()
    assert all(len(line) <= 80 for line in lines) and "and 2 rows more" in lines[-1]
    assert "overflows" in lines[2] and "ok" in lines[4]
    assert "fails" in _printed(check_plan(plan(path, "mxfp4", tolerance=1.0), path, tolerance=0.01))


def _printed(found: PlanCheck, **arguments: int) -> str:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(found.table(**arguments))
    return captured.get()


def test_wrong_arguments_are_refused(path: Path) -> None:
    with pytest.raises(ArgumentError, match="check_plan: expected a Plan; got str. Write Plan.load"):
        check_plan("plan.toml", path)
    with pytest.raises(ArgumentError, match="check_plan: expected a tolerance above 0 and at most 1; got 2"):
        check_plan(plan(path, "fp8"), path, tolerance=2)
