"""What is known of experiments: outcomes come back whole, and every row of the evidence base has what stands for it."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from plimsoll.errors import RunError
from plimsoll_lab import EXPERIMENTS, ROWS, Claim, Outcome, Standing, found_in, perform, recorded, standings
from plimsoll_lab.evidence import rows_of, save
from plimsoll_lab.result import of_rows
from tests.lab.test_frame import TINY

TESTS = Path(__file__).parents[1]
HELD = Outcome(experiment="clip", claims=3, date="2026-11-22", versions={"torch": "2.13.0"}, seconds=1.5)
FAILED = dataclasses.replace(HELD, failed=("it falls: nan binades, expected at least 1",))


def standing(row: str, **outcomes: Outcome) -> Standing:
    return next(each for each in standings(outcomes) if each.row.id == row)


def test_every_row_has_an_experiment_or_tests_that_exist() -> None:
    shown = {row for experiment in EXPERIMENTS.values() for row in rows_of(experiment.source)}
    assert shown <= set(ROWS)
    for row in ROWS.values():
        assert row.id in shown or row.tests, row.id
        assert all((TESTS / test).is_file() for test in row.tests), row
        assert row.says.endswith(".")


def test_the_rows_are_those_of_the_evidence_base() -> None:
    counts = {"T": 10, "U": 7, "A": 4, "N": 6, "X": 8, "E": 3}
    assert list(ROWS) == [f"{letter}{number}" for letter, count in counts.items() for number in range(1, count + 1)]


def test_every_experiment_is_recorded_with_the_claims_it_had() -> None:
    known = recorded()
    assert list(known) == list(EXPERIMENTS)
    for outcome in known.values():
        assert not outcome.error and outcome.claims >= 1 and outcome.date >= "2026-11-22"
        assert len(outcome.failed) <= outcome.claims and {"torch", "plimsoll"} <= set(outcome.versions)


def test_an_outcome_is_that_of_its_result_and_comes_back_from_the_folder(tmp_path: Path) -> None:
    result = perform(TINY, tmp_path / "tiny")
    found = found_in(tmp_path)["tiny"]
    assert found == Outcome.of(result) and found.holds and found.state == "1 claim holds"
    assert found.date == result.date and found.versions["torch"]
    path = tmp_path / "tiny" / "result.json"
    parsed = json.loads(path.read_text("utf-8"))
    parsed["claims"][0]["measured"] = "nan"
    path.write_text(json.dumps(parsed))
    broken = found_in(tmp_path)["tiny"]
    assert not broken.holds and broken.failed == ("the loss is low: nan of loss, expected at most 100",)
    assert broken.state == "1 of 1 claims do not hold"


def test_what_does_not_hold_counts_against_its_own_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = dataclasses.replace(TINY, source="N1, N4, X3")
    result = perform(made, tmp_path / "tiny")
    good, bad = (Claim(id=name, says=name, measured=1.0, at_least=least) for name, least in (("good", 0), ("bad", 2)))
    claims = (*of_rows([good], "N1", "N4"), *of_rows([bad], "N1"), good)
    outcome = Outcome.of(dataclasses.replace(result, measured=dataclasses.replace(result.measured, claims=claims)))
    assert outcome.rows == {"N1": (3, (str(bad),)), "N4": (2, ()), "X3": (1, ())}
    assert outcome.state == "1 of 3 claims do not hold"
    monkeypatch.setattr("plimsoll_lab.registry.EXPERIMENTS", {"tiny": made})
    states = {row: standing(row, tiny=outcome) for row in ("N1", "N4", "X3")}
    assert [each.state for each in states.values()] == ["holds in part", "holds", "holds"]
    assert states["N1"].to_dict()["failed"] == [str(bad)] and states["N4"].to_dict()["failed"] == []
    assert states["N4"].to_dict()["experiments"] == {"tiny": "2 claims hold"}
    save([outcome], tmp_path / "outcomes.json")
    (parsed,) = json.loads((tmp_path / "outcomes.json").read_text("utf-8"))
    assert Outcome.from_dict(parsed) == outcome
    none = dataclasses.replace(outcome, rows={"N1": (3, ())})  # of a row that no claim is of, nothing holds
    assert standing("N4", tiny=none).state == "holds in part" and none.of_row("N4").state == "0 claims hold"
    old = dataclasses.replace(outcome, rows={})  # a record of before claims had rows
    assert standing("N4", tiny=old).state == "holds in part" and old.of_row("N4") is old


def test_outcomes_are_saved_whole(tmp_path: Path) -> None:
    error = Outcome(experiment="bert", error="MissingExtraError: none", device="cuda")
    save([FAILED, error], tmp_path / "outcomes.json")
    parsed = json.loads((tmp_path / "outcomes.json").read_text("utf-8"))
    assert [Outcome.from_dict(each) for each in parsed] == [FAILED, error]
    assert error.state == "not carried out" and not error.holds


@pytest.mark.parametrize("text", ["{}", "[", "[1]", '{"experiment": "x", "claims": 3}'])
def test_a_damaged_result_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "result.json").write_text(text)
    with pytest.raises(RunError, match=r"lab: expected the result of an experiment; got .*x/result.json"):
        found_in(tmp_path)
    with pytest.raises(RunError, match=r"lab: expected a folder of results; got .*nowhere, which does not exist"):
        found_in(tmp_path / "nowhere")


def test_a_row_stands_as_its_experiments_do(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: dataclasses.replace(TINY, name=name, source="T4, X6") for name in ("clip", "demo")}
    monkeypatch.setattr("plimsoll_lab.registry.EXPERIMENTS", made)
    demo = dataclasses.replace(HELD, experiment="demo")
    assert standing("T4", clip=HELD).state == "not carried out"
    assert standing("T4", clip=HELD, demo=demo).state == "holds"
    assert standing("T4", clip=FAILED, demo=demo).state == "holds in part"
    assert standing("T4", clip=HELD, demo=Outcome(experiment="demo", error="x")).state == "not carried out"
    assert standing("T1").state == "tested" and standing("T4").experiments == ("clip", "demo")
    assert standing("T5").state == "not carried out"  # neither tests nor an experiment among these


def test_what_needs_a_gpu_is_told_until_it_was_measured_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plimsoll_lab.registry.EXPERIMENTS", {"clip": dataclasses.replace(TINY, source="X6")})
    assert standing("X6", clip=HELD).unmeasured == ROWS["X6"].gpu != ""
    there = standing("X6", clip=dataclasses.replace(FAILED, device="cuda"))
    assert there.unmeasured == ""
    assert there.to_dict()["failed"] == list(FAILED.failed) and math.isfinite(HELD.seconds)
