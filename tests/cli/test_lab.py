"""`plimsoll lab`: what it lists, what it prints, and its exit codes."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from plimsoll.cli import app
from plimsoll.diagnosis import Finding
from plimsoll.runs import RunWriter, Scalars
from plimsoll_lab import (
    EXPERIMENTS,
    ROWS,
    Bench,
    Claim,
    Experiment,
    Measured,
    Training,
    registry,
    screens,
)

FINDING = Finding(
    rule="scale-collapse", severity="alarm", since_step=1300, until_step=1310, meaning="It fell.", advice="Raise it.",
    where=("blocks.0.up.weight", "blocks.1.up.weight"), collection="gradients", figure="loss_and_scale",
)  # fmt: skip


def experiment(measured: float, title: str = "FP16, stock scaler") -> Experiment:
    def measure(bench: Bench) -> Measured:
        trainings = []
        for name in ("fp16", "bf16"):
            with RunWriter(bench.runs / name) as writer:
                writer.write(Scalars(step=0, values={"loss": 1.0}))
            trainings.append(
                Training(
                    name=name,
                    title=title if name == "fp16" else "BF16",
                    run=bench.runs / name,
                    numbers={"lost_after": 0.72, "loss_end": 0.7},
                    outcome="stalls",
                    good=name == "bf16",
                    series=(3.5, 1.0, math.nan, 0.5),
                    findings=(FINDING,),
                )
            )
            bench.progress.begin(name, 2)
            bench.progress.advance()
        claim = Claim(id="falls", says="the scale falls", measured=measured, at_least=10.0, unit="binades")
        return Measured(trainings=tuple(trainings), claims=(claim,), said=("It fell.", "Use another."))

    return Experiment(name="toy", claim="A toy.", source="T9", settings=lambda b: {"device": b.device}, measure=measure)


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> dict[str, Experiment]:
    """Experiments by name, in place of the real ones."""
    found = {"toy": experiment(10.0), "broken": experiment(9.0), "hostile": experiment(10.0, "[red]\x1b[2J</script>")}
    found = {name: dataclasses.replace(each, name=name) for name, each in found.items()}
    monkeypatch.setattr(registry, "EXPERIMENTS", found)
    monkeypatch.setattr("plimsoll_lab.EXPERIMENTS", found)
    monkeypatch.setenv("COLUMNS", "80")
    return found


def test_the_real_ones_are_listed_with_their_claims() -> None:
    result = CliRunner().invoke(app, ["lab"], env={"COLUMNS": "80"})
    assert result.exit_code == 0 and "clip" in result.stdout and "T3, T4, T7" in result.stdout
    listed = json.loads(CliRunner().invoke(app, ["lab", "--json"]).stdout)
    assert [each["name"] for each in listed] == list(EXPERIMENTS)
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_a_result_fits_one_screen(toys: dict[str, Experiment], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["lab", "toy", "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines if str(tmp_path) not in line)
    assert "All 1 claims hold." in result.stdout
    assert "scale-collapse steps 1,300 to 1,310, parameter" in result.stdout
    assert str(tmp_path / "out" / "report.html") in result.stdout
    assert "FP16, stock scaler  █▃ ▁" in result.stdout and "72 %" in result.stdout
    assert result.stderr.splitlines() == ["fp16: 2 steps", "bf16: 2 steps", "reports: 2 steps"]


def test_a_claim_that_does_not_hold_is_exit_code_1_and_said(toys: dict[str, Experiment], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["lab", "broken", "--output", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "1 of 1 claims do not hold:" in result.stdout
    assert "the scale falls: 9 binades, expected at least 10" in result.stdout


def test_json_is_the_result_alone(toys: dict[str, Experiment], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["lab", "toy", "--output", str(tmp_path / "out"), "--json", "--seed", "4"])
    parsed = json.loads(result.stdout)
    assert parsed == json.loads((tmp_path / "out" / "result.json").read_text("utf-8"))
    assert parsed["holds"] is True and parsed["seed"] == 4 and parsed["settings"] == {"device": "cpu"}
    assert parsed["trainings"][0]["series"] == [3.5, 1.0, "nan", 0.5]


def test_an_unknown_name_and_a_foreign_folder_are_exit_code_2(toys: dict[str, Experiment], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    for arguments, said in (
        (["lab", "tyo"], "Nearest: toy"),
        (["lab", "toy", "--output", str(tmp_path)], "one with other things in it"),
        (["lab", "toy", "--seed", "-1", "--output", str(tmp_path / "out")], "expected a seed"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2 and said in result.stderr and "Traceback" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_titles_are_shown_as_text(toys: dict[str, Experiment], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["lab", "hostile", "--output", str(tmp_path / "out")])
    assert result.exit_code == 0
    assert "[red]" in result.stdout and "\x1b[2J" not in result.stdout


def test_all_are_carried_out_each_in_a_folder_of_its_own(toys: dict[str, Experiment], tmp_path: Path) -> None:
    del toys["hostile"]
    result = CliRunner().invoke(app, ["lab", "--all", "--output", str(tmp_path / "out")])
    assert result.exit_code == 1, result.output
    assert "toy           1 claim holds" in result.stdout
    assert "broken        1 of 1 claims do not hold" in result.stdout
    assert "  the scale falls: 9 binades, expected at least 10" in result.stdout
    assert "1 of 2 experiments hold" in result.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["broken", "outcomes.json", "toy"]
    assert (tmp_path / "out" / "toy" / "report.html").is_file()


def test_one_that_cannot_be_carried_out_does_not_stop_the_others(toys: dict[str, Experiment], tmp_path: Path) -> None:
    del toys["broken"], toys["hostile"]
    (tmp_path / "out" / "toy").mkdir(parents=True)
    (tmp_path / "out" / "toy" / "mine").write_text("precious")
    toys["after"] = dataclasses.replace(experiment(11.0), name="after")
    result = CliRunner().invoke(app, ["lab", "--all", "--output", str(tmp_path / "out"), "--json"])
    assert result.exit_code == 2
    first, second = json.loads(result.stdout)
    assert first["error"].startswith("ArgumentError: lab: expected a new or empty folder") and first["claims"] == 0
    assert (second["experiment"], second["error"], second["failed"]) == ("after", "", [])
    listed = json.loads(CliRunner().invoke(app, ["lab", "--output", str(tmp_path / "out"), "--json"]).stdout)
    assert [each["state"] for each in listed] == ["not carried out", "1 claim holds"]


def test_rows_are_listed_with_what_stands_for_them(toys: dict[str, Experiment], tmp_path: Path) -> None:
    del toys["hostile"]
    CliRunner().invoke(app, ["lab", "--all", "--output", str(tmp_path / "out")])
    text = CliRunner().invoke(app, ["lab", "--list", "--output", str(tmp_path / "out")]).stdout
    assert "does not hold: the scale falls: 9 binades" in " ".join(text.split())
    assert f"Outcomes: those in {tmp_path}" in text
    assert all(len(line) <= 80 for line in text.splitlines() if str(tmp_path) not in line)
    rows = CliRunner().invoke(app, ["lab", "--list", "--json", "--output", str(tmp_path / "out")]).stdout
    states = {row["id"]: row["state"] for row in json.loads(rows)}
    assert list(states) == list(ROWS)
    assert (states["T9"], states["T2"], states["X7"]) == ("holds in part", "tested", "not carried out")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["toy", "--all"], "expected one of NAME, --list and --all; got more than one"),
        (["--list", "--all"], "expected one of NAME, --list and --all"),
        (["--all", "--steps", "5"], "expected --steps with one experiment"),
        (["--list", "--output", "nowhere"], "expected a folder of results; got nowhere"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: list[str], said: str, toys: dict[str, Experiment]) -> None:
    result = CliRunner().invoke(app, ["lab", *arguments])
    assert result.exit_code == 2 and said in result.stderr and "Traceback" not in result.output


def test_the_picture_in_one_line_spans_all_trainings() -> None:
    assert screens._spark((1.0, 8.0), 1.0, 8.0, "abcdefgh") == "ah"
    assert screens._spark((1.0, math.nan, 0.0), 1.0, 8.0, "abcdefgh") == "a  "
    assert screens._spark((1.0, math.inf), 1.0, 8.0, "abcdefgh") == "ah"
    assert screens._spark((2.0, 2.0), 2.0, 2.0, "abcdefgh") == "aa"


def test_a_terminal_gets_bars(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "screen").open("w") as screen:
        terminal = Console(file=screen, force_terminal=True, width=80)
        monkeypatch.setattr(screens, "console", lambda **_: terminal)
        with screens.live_progress() as progress:
            progress.begin("FP16, stock scaler", 3)
            progress.advance()
            assert isinstance(progress, screens.Bars)
            assert progress._progress.tasks[0].completed == 1
    assert "FP16, stock scaler" in (tmp_path / "screen").read_text("utf-8")
