"""``plimsoll diff``: a sentence and a table in 80 columns, or JSON; the exit code."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from plimsoll.cli import app
from plimsoll.runs import RunWriter, Scalars
from plimsoll.runs.storage import location
from tests.support.diagnosis.stories import SOUND, constant, of_layer
from tests.support.runs import making


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["diff", *(str(a) for a in arguments)], env={"COLUMNS": "80"})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("diff")
    louder = of_layer("blocks.2.mlp", constant(1.5), constant(1.0))
    return {
        "sound": SOUND.write(base / "sound"),
        "same": SOUND.write(base / "same"),
        "louder": replace(SOUND, activation_std=louder).write(base / "louder"),
    }


def test_runs_that_are_alike_exit_with_0(runs: dict[str, Path]) -> None:
    result = run(runs["sound"], runs["same"])
    assert result.exit_code == 0 and "They do not diverge: 85 series are alike at 200 steps." in result.stdout


def test_runs_that_part_exit_with_1_and_say_where(runs: dict[str, Path]) -> None:
    result = run(runs["sound"], runs["louder"])
    assert result.exit_code == 1
    assert "first in activations of blocks.2.mlp:output" in " ".join(result.stdout.split())
    assert "At step 0, in the order of computation" in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines() if not line.startswith(("a  ", "b  ")))


def test_a_series_of_one_run_alone_is_named_by_its_collections_label(tmp_path: Path) -> None:
    for name, collections in (("a", ("weights", "gradients")), ("b", ("weights",))):
        with RunWriter(tmp_path / name) as writer:
            writer.write(making.batch(writer, 1, {(collection, "w"): torch.ones(4) for collection in collections}))
    stdout = run(tmp_path / "a", tmp_path / "b").stdout
    assert "only in A: parameter gradients w" in stdout


def test_json_is_for_other_programs(runs: dict[str, Path]) -> None:
    result = run(runs["sound"], runs["louder"], "--json", "--until", 20)
    data = json.loads(result.stdout)
    assert result.exit_code == 1 and data["first"]["name"] == "blocks.2.mlp:output"
    wide = run(runs["sound"], runs["louder"], "--json", "--format", "e2m1")
    assert wide.exit_code == 0 and json.loads(wide.stdout)["first"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--format", "fp17"], "Nearest: fp16"), (["--tolerance", "7"], "expected --tolerance from 0 to 1")],
)
def test_what_cannot_be_answered_exits_with_2(runs: dict[str, Path], arguments: list[str], message: str) -> None:
    result = run(runs["sound"], runs["same"], *arguments)
    assert result.exit_code == 2 and message in result.stderr


def test_a_folder_without_a_run_exits_with_2(runs: dict[str, Path], tmp_path: Path) -> None:
    result = run(runs["sound"], tmp_path)
    assert result.exit_code == 2 and str(tmp_path) in result.stderr


def test_of_a_scripts_models_the_one_that_parts_first_is_named(tmp_path: Path) -> None:
    for place, begins in (("one", {"D": 9, "G": 9}), ("other", {"D": 4, "G": 2})):
        for model, begin in begins.items():
            with RunWriter(tmp_path / place / model) as writer:
                for step in range(6):
                    writer.write(Scalars(step=step, values={"loss": 2.0 if step >= begin else 1.0}))
        location.write_script(tmp_path / place, ["D", "G"])
    result = run(tmp_path / "one", tmp_path / "other", "--json")
    notes = {each["model"]: each["notes"] for each in json.loads(result.stdout)["runs"]}
    assert notes == {"D": ["G is the script's first model to diverge, at step 2: start there."], "G": []}
