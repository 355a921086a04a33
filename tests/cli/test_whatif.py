"""``plimsoll whatif``: a sentence, a table in 80 columns, or JSON."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from plimsoll.cli import app
from plimsoll.formats import ALIASES, BLOCKS, ELEMENTS
from tests.support.cases import each
from tests.support.diagnosis.stories import SOUND, make_story

# With formats at the limits of eXmY.
FORMATS = (
    *(fmt.name for fmt in (*ELEMENTS, *BLOCKS)),
    *ALIASES,
    "e2m0",
    "e2m52",
    "e10m52",
    "e11m0",
    "e11m2",
    "e12m3",
    "e0m3",
)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["whatif", *(str(a) for a in arguments)], env={"COLUMNS": "80"})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SOUND.write(tmp_path_factory.mktemp("whatif") / "run")


def test_it_says_what_works_and_lists_the_worst_layers(path: Path) -> None:
    result = run(path, "--format", "fp16", "--layers", 2)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("FP16 works without a scale, and with 2^")
    assert any(line.startswith("all ") for line in lines) and "and 10 tensors that lose less" in result.stdout
    assert all(len(line) <= 80 for line in lines)


def test_a_shift_and_a_collection_are_taken(path: Path) -> None:
    data = json.loads(run(path, "--format", "e4m3", "--shift", 3, "--json").stdout)
    assert (data["shift"], data["chosen"], data["collections"]) == (3, False, ["gradients"])
    data = json.loads(run(path, "--format", "e4m3", "--collection", "weights", "--json").stdout)
    assert data["chosen"] and data["collections"] == ["weights"]
    data = json.loads(run(path, "--format", "fp16", "--inference", "--json").stdout)
    assert data["collections"] == ["weights", "activations"] and data["shift"] == 0


@each(
    ("arguments", "message"),
    [
        (["--format", "fp17"], "Nearest: fp16"),
        (["--format", "nvfp4"], "whatif: expected block records of gradients for nvfp4"),
        (["--format", "fp16", "--collection", "cats"], "whatif: expected a collection that the run has; got 'cats'"),
    ],
)
def test_what_cannot_be_answered_exits_with_2(path: Path, arguments: list[str], message: str) -> None:
    result = run(path, *arguments)
    assert result.exit_code == 2 and message in result.stderr


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_story(samples=2).write(tmp_path_factory.mktemp("formats") / "run")


@each("name", FORMATS)
def test_every_command_answers_or_refuses_every_format(short: Path, name: str) -> None:
    commands = (
        ["whatif", str(short), "--format", name],
        ["whatif", str(short), "--format", name, "--inference", "--json"],
        ["whatif", str(short), "--format", name, "--shift", "-2200"],
        ["plan", str(short), "--target", name],
        ["plan", str(short), "--target", "fp16", "--fallback", name],
        ["diff", str(short), str(short), "--format", name],
        ["formats", name],
    )
    for command in commands:
        found = CliRunner().invoke(app, command)
        assert found.exit_code in (0, 2) and isinstance(found.exception, SystemExit | None), (command, found.exception)
        assert found.stderr.count("\n") == (found.exit_code == 2)
    assert found.exit_code == (2 if name in ("e12m3", "e0m3") else 0)  # the last one, whatever the run
