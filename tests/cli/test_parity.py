"""``plimsoll parity``: a sentence, a table, a file or JSON, and an exit code that a script can act on."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import plimsoll as pl
from plimsoll.cli import app
from plimsoll.cli.options import with_repeated_names
from plimsoll.runs import RunWriter, Scalars
from tests.support.cases import each

STEPS = 600


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["parity", *map(str, arguments)], env={"COLUMNS": "100"})


def write(folder: Path, seed: int, added: float = 0.0) -> Path:
    """A run: those of one seed share their batches."""
    curve = 2 + np.exp(-np.arange(STEPS) / 60) + np.random.default_rng(seed).normal(0, 0.1, STEPS)
    values = curve + np.random.default_rng([seed, int(1000 * added)]).normal(0, 0.01, STEPS) + added
    with RunWriter(folder) as writer:
        for step, value in enumerate(values.tolist()):
            writer.write(Scalars(step=step, values={"loss": value, "accuracy": 1 - value / 10}))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("parity")
    for seed in range(3):
        write(root / f"base-{seed}", seed)
        write(root / f"same-{seed}", seed, 0.001)
        write(root / f"worse-{seed}", seed, 0.2)
    return root


@each(
    "candidate,tolerance,code,verdict",
    [("same-0", "2%", 0, "Equivalent"), ("worse-0", "2%", 1, "Worse"), ("worse-0", "0.2", 2, "Undecided")],
)
def test_the_exit_code_is_the_answer(candidate: str, tolerance: str, code: int, verdict: str, runs: Path) -> None:
    result = run(runs / "base-0", "--against", runs / candidate, "--tolerance", tolerance)
    assert result.exit_code == code, result.output
    assert result.stdout.startswith(f"{verdict}: over 600 steps the candidate's loss differs by ")
    assert "One run each" in result.stdout and all(len(line) <= 100 for line in result.stdout.splitlines())


def test_what_is_known_to_be_no_worse_passes(runs: Path) -> None:
    """It may be better or equivalent, which a gate need not know."""
    result = run(runs / "worse-0", "--against", runs / "base-0", "--tolerance", "0.2")
    assert result.exit_code == 0 and "It is no worse than that; whether it is better is open." in result.stdout


def test_several_runs_are_listed_or_matched(runs: Path) -> None:
    listed = [runs / f"{side}-{seed}" for side in ("base", "same") for seed in range(3)]
    result = run(*listed[:3], "--tolerance", "5%", "--against", *listed[3:], "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["runs"] == {"base": 3, "candidate": 3} and data["noise_from"] == "repeats"
    matched = run(runs / "base-*", "--against", runs / "same-*", "--tolerance", "5%", "--json")
    assert json.loads(matched.stdout) == data
    assert data == pl.parity(listed[:3], listed[3:], tolerance="5%").to_dict()


def test_other_scalars_and_options_are_taken(runs: Path) -> None:
    options = ("--scalar", "accuracy", "--better", "higher", "--tolerance", "0.01", "--until", "400")
    result = run(runs / "base-0", "--against", runs / "worse-0", *options, "--confidence", "0.9", "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == 1 and data["verdict"] == "worse"
    assert (data["scalar"], data["better"], data["confidence"], data["last_step"]) == ("accuracy", "higher", 0.9, 400)
    given = run(runs / "base-0", "--against", runs / "same-0", "--tolerance", "2%", "--run-noise", "5%", "--json")
    assert given.exit_code == 2 and json.loads(given.stdout)["noise_from"] == "given"


def test_runs_of_other_trackers_are_taken(runs: Path, tmp_path: Path) -> None:
    steps, losses = pl.Run(runs / "same-0").scalars("loss")
    rows = "".join(f"{step},{loss}\n" for step, loss in zip(steps.tolist(), losses.tolist(), strict=True))
    (tmp_path / "fp8.csv").write_text(f"step,loss\n{rows}")
    result = run(runs / "base-0", "--against", tmp_path / "*.csv", "--tolerance", "2%")
    assert result.exit_code == 0, result.output
    (tmp_path / "broken.csv").write_text("loss\n1\n")
    result = run(runs / "base-0", "--against", tmp_path / "broken.csv", "--tolerance", "2%")
    assert result.exit_code == 2 and "expected a column of steps" in result.stderr


@each("ending", ["html", "md", "json", "txt"])
def test_a_file_is_written_too(ending: str, runs: Path, tmp_path: Path) -> None:
    file = tmp_path / f"answer.{ending}"
    result = run(runs / "base-0", "--against", runs / "same-0", "--tolerance", "2%", "-o", file)
    assert result.exit_code == 0 and f"written to {file}" in result.stdout
    assert "within the 2 % allowed" in file.read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "nowhere", "--tolerance", "1%"], "No Plimsoll run in"),
        (["--against", "none-*", "--tolerance", "1%"], "No folder matches"),
        (["--against", "base-0", "--tolerance", "little"], "expected --tolerance to be an amount"),
        (["--against", "base-0", "--tolerance", "0"], "expected --tolerance to be above 0"),
        (["--against", "base-0", "--tolerance", "1%", "--scalar", "lost"], "expected --better to be"),
        (["--against", "base-0", "--tolerance", "1%", "--scalar", "my_loss"], "'my_loss'"),
        (["--against", "base-0", "--tolerance", "1%", "-o", "x.pdf"], "expected a file that ends in .html"),
        (["--against", "base-0", "--tolerance", "1%", "-o", "none/x.md"], "in a folder that exists"),
        (["--tolerance", "1%"], "--against"),
        (["--against", "base-0"], "--tolerance"),
    ],
)
def test_what_cannot_be_judged_exits_with_2(
    arguments: list[str], message: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    result = run("base-0", *arguments)
    assert result.exit_code == 2 and message in result.stderr


class Parameter:
    def __init__(self, metavar: str, *opts: str) -> None:
        self.metavar, self.opts = metavar, opts


@each(
    "given,expected",
    [
        ("a b --many c d", "a b --many c --many d"),
        ("a --many c --one x --many d e", "a --many c --one x --many d --many e"),
        ("a --many=c d", "a --many=c d"),
        ("--many c d -- a --many", "--many c --many d -- a --many"),
        ("a --many -", "a --many -"),
        ("a --many", "a --many"),
        ("a -q b", "a -q b"),
        ("", ""),
    ],
)
def test_an_option_with_three_dots_takes_words_up_to_the_next(given: str, expected: str) -> None:
    parameters = [Parameter("MANY...", "--many"), Parameter("ONE", "--one"), Parameter("BASE")]
    assert with_repeated_names(given.split(), parameters) == expected.split()
