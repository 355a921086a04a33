"""``plimsoll ls``: the runs below a folder, sorted, with their verdicts."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import plimsoll as pl
from plimsoll import runs
from plimsoll.cli import app
from plimsoll.runs import Event, RunWriter, Scalars
from tests.support.cases import each
from tests.support.diagnosis.faults import falling
from tests.support.diagnosis.stories import SOUND, constant, make_story


def run(*arguments: object, columns: int | None = 80) -> Result:
    environment = {"COLUMNS": str(columns) if columns else None}
    return CliRunner().invoke(app, ["ls", *(str(a) for a in arguments)], env=environment)


def write(path: Path, started: str, steps: int, loss: float) -> None:
    with RunWriter(path) as writer:
        for step in range(steps):
            writer.write(Scalars(step=step, values={"loss": loss}))
    restamp(path, started)


def restamp(path: Path, started: str) -> None:
    manifest = path / "run.json"
    lines = manifest.read_text().splitlines()
    manifest.write_text("\n".join(f'"created": "{started}",' if '"created"' in line else line for line in lines))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ls") / "runs"
    SOUND.write(root / "sound")
    make_story(scale=falling(60, 14), gradient_std=constant(2.0**-19)).write(root / "sweep" / "ill")
    write(root / "old", "2001-02-03T04:05:06+00:00", 400, 0.5)
    write(root / "new", "2041-02-03T04:05:06+00:00", 2, float("nan"))
    return root


def names(*arguments: object) -> list[str]:
    return [row["name"] for row in json.loads(run(*arguments, "--json").stdout)]


def test_a_row_has_what_one_asks_for_first(folder: Path) -> None:
    rows = {row["name"]: row for row in json.loads(run(folder, "--json").stdout)}
    assert set(rows) == {"sound", "sweep/ill", "old", "new"}
    ill, old = rows["sweep/ill"], rows["old"]
    assert (ill["state"], ill["severity"], ill["last_step"], ill["precision"]) == ("closed", "alarm", 199, "fp32/fp16")
    assert ill["verdict"].startswith("Problem: the loss scale fell")
    assert ill["size_bytes"] == sum(path.stat().st_size for path in Path(ill["path"]).rglob("*") if path.is_file())
    assert (old["loss"], old["started"]) == (0.5, "2001-02-03T04:05:06+00:00")
    assert rows["new"]["loss"] == "nan"


@each(
    ("order", "first", "last"),
    [
        ("started", "new", "old"), ("name", "new", "sweep/ill"), ("severity", "new", "sound"),
        ("steps", "old", "new"), ("loss", "old", "new"), ("size", None, None), ("state", "new", "sweep/ill"),
    ],
)  # fmt: skip
def test_rows_are_sorted(folder: Path, order: str, first: str | None, last: str | None) -> None:
    listed = json.loads(run(folder, "--sort", order, "--json").stdout)
    if first is None:
        sizes = [row["size_bytes"] for row in listed]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    else:
        assert (listed[0]["name"], listed[-1]["name"]) == (first, last)


def test_the_newest_run_comes_first_unless_told_otherwise(folder: Path) -> None:
    assert names(folder) == names(folder, "--sort", "started")


def test_a_terminal_gets_a_table_and_a_pipe_the_verdicts_too(folder: Path) -> None:
    narrow = run(folder).stdout.splitlines()
    assert all(len(line) <= 80 for line in narrow) and len(narrow) == 5
    assert narrow[0].split()[:3] == ["run", "state", "severity"] and "verdict" not in narrow[0]
    piped = run(folder, columns=None).stdout.splitlines()
    assert len(piped) == 5 and not any(line != line.rstrip() for line in piped)
    assert any("sweep/ill" in line and "Problem: the loss scale fell" in line for line in piped)
    assert re.split(r" {2,}", piped[0])[3] == "last step" and piped[1].split()[3] == "1"  # of two steps


@each("columns", [20, 40, 60, 68, 76, 100, 130])
def test_a_narrow_terminal_keeps_the_names(folder: Path, columns: int) -> None:
    head, *rows = run(folder, columns=columns).stdout.splitlines()
    assert all(len(line) <= columns for line in (head, *rows))
    if columns < 130:  # there verdicts take several lines
        assert {row.split()[0] for row in rows} == {"new", "sound", "old", "sweep/ill"}
    kept = [name for name in ("state", "last step", "loss", "precision", "started", "size") if name in head]
    assert kept == ["state", "last step", "loss", "precision", "started", "size"][: len(kept)] and "severity" in head
    assert (len(kept) == 6) == (columns >= 100)


def test_a_terminal_has_a_line_below_the_headings(folder: Path) -> None:
    environment = {"COLUMNS": "80", "FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm"}
    lines = CliRunner().invoke(app, ["ls", str(folder)], env=environment).stdout.splitlines()
    assert len(lines) == 6 and set(lines[1]) <= {"─", " "}


def test_the_help_has_the_default_folder() -> None:
    assert re.search(r"DIR +The folder that runs are in or below\. Default: runs\.", run("-h").stdout)


def test_fast_judges_no_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plimsoll.report.verdicts.run_summary.summary", lambda *_: pytest.fail("a run is judged"))
    rows = json.loads(run(folder, "--fast", "--json").stdout)
    assert len(rows) == 4 and all(row["severity"] is None and row["verdict"] is None for row in rows)
    assert {row["name"]: row["last_step"] for row in rows}["old"] == 399
    for columns in (100, None):  # no column that would be empty
        head = run(folder, "--fast", columns=columns).stdout.splitlines()[0]
        assert "last step" in head and "severity" not in head and "verdict" not in head


def test_runs_that_are_not_judged_are_not_sorted_by_severity(folder: Path) -> None:
    found = run(folder, "--fast", "--sort", "severity")
    assert found.exit_code == 2 and "expected another column than severity with --fast" in found.stderr


def test_states_say_how_a_run_ended(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "broken") as writer:
        writer.write(Scalars(step=0, values={"loss": 1.0}))
        details = {"reason": "exception"}
        writer.write(Event(step=0, kind="trigger", message="KeyError: 'x'", details=details))
    with RunWriter(tmp_path / "live") as writer:
        writer.write(Scalars(step=0, values={"loss": 1.0}))
        writer.flush()
        live = {row["name"]: row["state"] for row in json.loads(run(tmp_path, "--json").stdout)}
    assert live == {"broken": "exception", "live": "live"}
    for path in (tmp_path / "live").rglob("*"):
        os.utime(path, (0, 0))
    assert {row["name"]: row["state"] for row in json.loads(run(tmp_path, "--json").stdout)}["live"] == "closed"


def test_a_damaged_run_costs_its_own_row(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "sound", "2001-02-03T04:05:06+00:00", 3, 0.5)
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "run.json").write_text('{"plimsoll": "run", "schema": 99}')
    rows = {row["name"]: row for row in json.loads(run(tmp_path, "--json").stdout)}
    assert rows["sound"]["state"] == "closed"
    assert rows["later"]["state"] == "damaged" and "schema" in rows["later"]["verdict"]


@each("created", ["9999-12-31T23:59:59-23:00", "0001-01-01T00:00:00+23:00"])
def test_a_time_beyond_the_calendar_costs_no_row(created: str, tmp_path: Path) -> None:
    write(tmp_path / "sound", "2001-02-03T04:05:06+00:00", 3, 0.5)
    write(tmp_path / "odd", created, 3, 0.5)
    rows = {row["name"]: row["started"] for row in json.loads(run(tmp_path, "--json").stdout)}
    assert rows == {"sound": "2001-02-03T04:05:06+00:00", "odd": None}
    assert run(tmp_path).exit_code == 0


def test_a_folder_without_a_run_exits_with_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        ([], "No such folder: runs. Name the folder that runs are recorded below."),
        (["."], "No Plimsoll run in or below .. plimsoll run SCRIPT records one."),
    ):
        result = run(*arguments)
        assert result.exit_code == 2 and message in result.stderr and result.stdout == ""


def test_the_folder_may_be_a_run_itself(folder: Path) -> None:
    assert names(folder / "sound") == ["sound"]
    assert runs.Run.find(folder / "sound") == [folder / "sound"]


def test_under_autocast_the_precision_is_that_of_the_products(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.LayerNorm(8) for _ in range(4)), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1, quiet=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(4, 8)).float().square().mean()
        loss.backward()
        optimizer.step()
    (row,) = json.loads(run(tmp_path, "--json").stdout)
    assert row["precision"] == "fp32/bf16"
