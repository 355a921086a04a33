"""Spellings of the version before: they work for one release, and a line on stderr has the new one."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from plimsoll.cli import app, old_spellings
from tests.support.cases import each
from tests.support.diagnosis.stories import SOUND

GROUP = typer.main.get_command(app)
_ENDS = "The old spelling works in this release and not in the next one."


def rewritten(command: str, arguments: Sequence[str]) -> list[str]:
    interspersed = command != "run"
    return old_spellings.rewritten(command, arguments, GROUP.commands[command].params, interspersed)


@each(
    ("command", "old", "new"),
    [
        ("check", ["r", "--format", "json"], ["r", "--json"]),
        ("check", ["--format=json", "r"], ["--json", "r"]),
        ("check", ["r", "--format", "text"], ["r"]),
        ("diff", ["a", "b", "--computed-in", "e4m3", "--format", "json"], ["a", "b", "--format", "e4m3", "--json"]),
        ("lab", ["demo", "--out", "d", "--format", "json"], ["demo", "--output", "d", "--json"]),
        ("plan", ["r", "--out=p.toml", "--output", "json"], ["r", "--output", "p.toml", "--json"]),
        ("report", ["r", "--format", "markdown"], ["r", "--output-format", "markdown"]),
        ("report", ["r", "--format", "json"], ["r", "--json"]),
        ("whatif", ["r", "--format", "json", "--output", "json"], ["r", "--format", "json", "--json"]),
        ("run", ["--out", "d", "t.py", "--out", "x"], ["--output", "d", "t.py", "--out", "x"]),
        (
            "run",
            ["--every", "3", "-m", "--out", "d", "t", "--out"],
            ["--every", "3", "-m", "--output", "d", "t", "--out"],
        ),
    ],
)
def test_an_old_spelling_becomes_the_new_one(
    command: str, old: list[str], new: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert rewritten(command, old) == new
    assert _ENDS in capsys.readouterr().err


@each(
    ("command", "arguments"),
    [
        ("check", ["r", "--json"]),
        ("check", ["r", "--format", "yaml"]),
        ("check", ["r", "--format"]),
        ("check", ["--", "--format", "json"]),
        ("check", ["r", "--select", "--format"]),
        ("diff", ["a", "b", "--format", "e4m3"]),
        ("plan", ["r", "-o", "json"]),
        ("plan", ["r", "--output", "plan.toml"]),
        ("run", ["-q", "t.py", "--out", "x"]),
        ("run", ["-o", "d", "t.py", "--format", "json"]),
        ("run", ["--", "t.py", "--out", "x"]),
        ("formats", ["--out", "x"]),
    ],
)
def test_others_stay(command: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert rewritten(command, arguments) == arguments
    assert capsys.readouterr().err == ""


def test_the_command_answers_and_warns_on_stderr(tmp_path: Path) -> None:
    path = str(SOUND.write(tmp_path / "run"))
    old = CliRunner().invoke(app, ["check", path, "--format", "json"])
    new = CliRunner().invoke(app, ["check", path, "--json"])
    assert (old.exit_code, old.stdout) == (new.exit_code, new.stdout) and json.loads(old.stdout)["state"] == "healthy"
    assert old.stderr == f"plimsoll: check: --format json is now --json. {_ENDS}\n" and new.stderr == ""
