"""``plimsoll check``: what it prints, in 80 columns, and its exit code."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from plimsoll.cli import app
from plimsoll.diagnosis import RULES
from plimsoll.runs import RunWriter
from tests.diagnosis.faults import falling
from tests.diagnosis.stories import SOUND, constant, told
from tests.runs import making


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "80"})


@pytest.fixture(scope="module")
def ill(tmp_path_factory: pytest.TempPathFactory) -> Path:
    story = told(scale=falling(60, 14), gradient_std=constant(2.0**-19))
    return story.write(tmp_path_factory.mktemp("check") / "run")


def test_a_healthy_run_exits_with_0(tmp_path: Path) -> None:
    result = run("check", SOUND.write(tmp_path / "run"))
    assert result.exit_code == 0
    assert "healthy, up to step 199" in result.output.replace("\n", " ")


def test_an_alarm_exits_with_1_and_says_where_since_when_and_what_to_do(ill: Path) -> None:
    result = run("check", ill)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert "alarm   scale-collapse  steps 60 to 199" in lines
    assert "        blocks.{0-5}.attn.weight, blocks.{0-5}.mlp.weight" in [line.rstrip() for line in lines]
    assert "-> Raise the loss scale" in result.stdout
    assert all(len(line) <= 80 for line in lines[1:])  # the first is the folder's path, unbroken


def test_json_has_everything(ill: Path) -> None:
    result = run("check", ill, "--format", "json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert data["verdict"] == "alarm" and data["last_step"] == 199
    first = data["findings"][0]
    assert set(first) == {
        "rule", "severity", "since_step", "until_step", "collection", "where", "spots", "evidence", "meaning", "advice",
        "actions", "figure",
    }  # fmt: skip


def test_rules_are_chosen_and_thresholds_set(ill: Path) -> None:
    assert run("check", ill, "--select", "loss-*").exit_code == 0
    assert run("check", ill, "--select", "scale-collapse").exit_code == 1
    quiet = run("check", ill, "--select", "scale-collapse", "--set", "scale-collapse.binades=99",
                "--set", "scale-collapse.floor=0")  # fmt: skip
    assert quiet.exit_code == 0
    assert run("check", ill, "--until", 50).exit_code == 0


def test_the_rules_are_listed_with_their_thresholds_and_sources() -> None:
    listed = run("check", "--rules", "--set", "underflow-high.values=0.125")
    assert listed.exit_code == 0
    assert all(rule.id in listed.stdout for rule in RULES)
    assert "0.125" in listed.stdout and all(len(line) <= 80 for line in listed.stdout.splitlines())
    data = json.loads(run("check", "--rules", "--format", "json").stdout)
    assert [each["rule"] for each in data] == [rule.id for rule in RULES]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check"], "check: expected a run's folder; got none"),
        (["check", "."], "Run: expected a folder that a RunWriter wrote"),
        (["check", ".", "--set", "underflow-high.values"], "check: expected --set RULE.THRESHOLD=VALUE with a number"),
        (["check", ".", "--set", "underflow-high.values=much"], "check: expected --set RULE.THRESHOLD=VALUE"),
        (["check", "--rules", "--set", "no.thing=1"], "diagnose: expected a threshold written as rule.threshold"),
    ],
)
def test_what_cannot_be_done_exits_with_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.stderr and "Traceback" not in result.stderr


def test_a_run_of_a_newer_schema_exits_with_2(tmp_path: Path) -> None:
    path = making.written(tmp_path / "run", [0])
    manifest = path / "run.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text("utf-8")), "schema": 99}))
    result = run("check", path)
    assert result.exit_code == 2 and "schema" in result.stderr


def test_an_empty_run_is_healthy(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run"):
        pass
    result = run("check", tmp_path / "run")
    assert result.exit_code == 0 and "nothing recorded" in result.output.replace("\n", " ")
