"""``plimsoll plan``: a sentence, a table in 80 columns with many layers in one row, reasons, the file, the check."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from plimsoll.cli import app
from plimsoll.diagnosis import plan
from plimsoll.formats import Plan
from tests.support.cases import each
from tests.support.diagnosis.planned import layers, written

SIZES = {f"blocks.{i}.{part}": 2.0**-i for i in range(10) for part in ("qkv", "out", "up", "down")}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *(str(a) for a in arguments)], env={"COLUMNS": "80"})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    steps = [layers(SIZES, step=s) for s in range(2)]
    for name in ("blocks.3.up", "blocks.4.up"):
        steps[1]["activation_gradients", f"{name}:output"] *= 2.0**-40
    return written(tmp_path_factory.mktemp("plan") / "run", steps)


def test_forty_layers_are_told_in_a_few_lines(path: Path, tmp_path: Path) -> None:
    result = run(path, "--target", "fp8", "-o", tmp_path / "plan.toml")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "40 modules: 38 in E4M3/E5M2, 2 in BF16; 8.4 bits a value on average, against 16"
    assert all(len(line) <= 80 for line in lines[:-1]) and len(lines) < 25
    assert any(line.startswith("blocks.{0-9}.qkv,") and " 38 " in line and "at 2^" in line for line in lines)
    assert "blocks.{3-4}.up in bf16:" in lines
    words = " ".join(result.stdout.split())
    assert (
        "activation gradients: no scale works in E5M2 at all steps" in words
        and "(the numbers are those of blocks.3.up)" in words
    )
    assert Plan.load(tmp_path / "plan.toml") == plan(path, "fp8")


def test_options_reach_the_plan(path: Path) -> None:
    data = json.loads(
        run(path, "--target", "fp16", "--one-scale", "--tolerance", 0.02, "--margin", 2, "--fallback", "fp32",
            "--exclude", "blocks.[1-9].*", "--until", 0, "--json").stdout
    )  # fmt: skip
    expected = plan(path, "fp16", layer_scales=False, tolerance=0.02, margin_binades=2, fallback="fp32",
                    exclude=["blocks.[1-9].*"], until=0)  # fmt: skip
    assert data == json.loads(json.dumps(expected.to_dict())) and len(data["modules"]) == 4
    included = json.loads(run(path, "--target", "fp8", "--include", "blocks.0.up", "--json").stdout)
    assert len(included["modules"]) == 40


def test_scales_of_the_loss_and_of_layers_are_told(tmp_path: Path) -> None:
    path = written(tmp_path / "run", [layers({"a": 1.0, "b": 2.0**-44})])
    result = run(path, "--target", "fp16")
    assert "No single loss scale works for all modules in FP16: each module has its own." in result.stdout
    assert "The loss scale starts at 2^" in result.stdout


def test_a_plan_that_holds_exits_with_0_and_one_that_fails_with_1(path: Path, tmp_path: Path) -> None:
    run(path, "--target", "fp8", "-o", tmp_path / "plan.toml")
    result = run(path, "--check", tmp_path / "plan.toml")
    assert result.exit_code == 0 and result.stdout.startswith("The plan holds: 40 modules, none out of range.")
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    other = written(tmp_path / "other", [layers(SIZES, activation=16.0)])
    result = run(other, "--check", tmp_path / "plan.toml")
    assert result.exit_code == 1 and "The plan fails in 38 of 40 modules: blocks.0.qkv" in result.stdout
    assert "overflows" in result.stdout and "and 100 rows more" in result.stdout
    data = json.loads(run(other, "--check", tmp_path / "plan.toml", "--json").stdout)
    assert data["ok"] is False and len(data["rows"]) == 120
    assert run(other, "--check", tmp_path / "plan.toml", "--tolerance", 1).exit_code == 1  # overflow is no loss


def test_hostile_names_reach_no_terminal(tmp_path: Path) -> None:
    path = written(tmp_path / "run", [layers({"\x1b[31mred": 1.0, "[bold]x": 1.0, "y" * 10_000: 1.0})])
    result = run(path, "--target", "nvfp4")
    assert result.exit_code == 0 and "\x1b" not in result.stdout and "[bold]x" in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


@each(
    ("arguments", "message"),
    [
        ([], "plan: expected either --target, to make a plan, or --check, to check one against RUN; got neither"),
        (["--target", "fp8", "--check", "x.toml"], "got both"),
        (["--check", "x.toml"], "plan: expected a plan file; got 'x.toml', which is not there"),
        (["--check", "x.toml", "-o", "y.toml"], "plan: expected --output with --target only; got --check"),
        (
            ["--check", "x.toml", "--margin", "2", "--one-scale"],
            "plan: expected --margin, --one-scale with --target only",
        ),
        (["--target", "fp4"], "plan: expected a target among"),
    ],
)
def test_what_makes_no_sense_exits_with_2(path: Path, arguments: list[str], message: str) -> None:
    result = run(path, *arguments)
    assert result.exit_code == 2 and message in result.stderr
