"""``plimsoll report``: which form is written where, and what cannot be."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from plimsoll.cli import app
from plimsoll.report import markdown, summary
from plimsoll.runs import RunWriter, Scalars
from tests.support.report import hostile_run as hostile


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *(str(a) for a in arguments)], env={"COLUMNS": "80"})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "exp1"
    with RunWriter(folder) as writer:
        for step in range(100):
            writer.write(Scalars(step=step, values={"loss": 1.0, "scale": 1024.0 if step < 50 else 1.0}))
    return folder


def test_a_page_is_written_and_the_verdict_told(path: Path, tmp_path: Path) -> None:
    result = run(path, "-o", tmp_path / "page.html", "--title", "My run", "--until", 40)
    assert result.exit_code == 0
    first, second = result.stdout.splitlines()
    assert first.startswith("Healthy through step 40") and second.endswith("MB, needs no network.")
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "<title>My run" in text and first in text


def test_html_goes_to_report_html(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(path).exit_code == 0
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


def test_markdown_and_json_go_to_standard_output(path: Path) -> None:
    for arguments in (["--output-format", "markdown"], ["--output-format", "markdown", "-o", "-"]):
        result = run(path, *arguments)
        assert (result.exit_code, result.stdout) == (0, markdown(path))
    data = json.loads(run(path, "--json", "--until", 60).stdout)
    assert data == json.loads(json.dumps(summary(path, until=60).to_dict())) and data["state"] == "alarm"


def test_the_files_name_says_the_form(path: Path, tmp_path: Path) -> None:
    assert run(path, "-o", tmp_path / "a.md").stdout == f"{tmp_path / 'a.md'}\n"
    assert (tmp_path / "a.md").read_text("utf-8") == markdown(path)
    assert run(path, "--output", tmp_path / "a.json").exit_code == 0
    assert json.loads((tmp_path / "a.json").read_text("utf-8"))["name"] == "exp1"


def test_json_is_printed_beside_a_file_of_any_form(path: Path, tmp_path: Path) -> None:
    printed = run(path, "--json").stdout
    for name, begins in (("page.html", "<!doctype html>"), ("b.md", "#"), ("c.json", "{")):
        result = run(path, "-o", tmp_path / name, "--json")
        assert (result.exit_code, result.stdout, result.stderr) == (0, printed, "")
        assert (tmp_path / name).read_text("utf-8").startswith(begins), name
    assert (tmp_path / "b.md").read_text("utf-8") == markdown(path)
    assert f"{(tmp_path / 'c.json').read_text('utf-8')}\n" == printed
    assert run(path, "-o", "-", "--json").stdout == printed
    both = run(path, "--json", "--output-format", "markdown")
    assert both.exit_code == 2 and "expected either --json or --output-format markdown; got both" in both.stderr
    assert run(path, "--json", "--output-format", "json").stdout == printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "-"], "report: expected a file for a page of HTML; got standard output"),
        (["-o", "{tmp}"], "report: expected the path of a file; got"),
        (["-o", "{tmp}", "--json"], "report: expected the path of a file; got"),
        (["-o", "{tmp}/no/page.html"], "report: expected a path in a folder that exists"),
        (["-o", "{tmp}/no/page.md"], "report: expected a file that can be written"),
        (["--title", "x", "--json"], "report: expected --title for html only; got json with title"),
    ],
)
def test_what_cannot_be_written_exits_with_2(path: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run(path, *(a.replace("{tmp}", str(tmp_path)) for a in arguments))
    assert result.exit_code == 2 and message in result.stderr and result.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x.pdf", "x.PDF", "x.txt", "x.svg", "page.v2", "x.html.gz"])
def test_an_ending_that_no_form_has_is_refused_before_the_work(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("plimsoll.cli.commands.report.open_runs", lambda path: pytest.fail(f"{path} is read"))
    result = run(path, "-o", tmp_path / name)
    assert result.exit_code == 2 and result.stdout == "" and list(tmp_path.iterdir()) == []
    assert "expected a file that ends in .html, .htm, .md, .markdown, .json; got" in result.stderr
    result = run(path, "-o", tmp_path / name, "--output-format", "html")
    assert result.exit_code == 2 and "expected a file that ends in .html" in result.stderr


def test_a_named_form_goes_into_a_file_of_any_text(path: Path, tmp_path: Path) -> None:
    assert run(path, "-o", tmp_path / "x.txt", "--output-format", "markdown").exit_code == 0
    assert (tmp_path / "x.txt").read_text() == markdown(path)
    assert run(path, "-o", tmp_path / "PAGE.HTM").exit_code == 0


def test_a_folder_that_holds_no_run_exits_with_2(tmp_path: Path) -> None:
    for form in ("html", "markdown", "json"):
        result = run(tmp_path, "--format", form, "-o", tmp_path / "page")
        assert result.exit_code == 2 and "No Plimsoll run in" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_missing_extra_exits_with_2(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    result = run(path, "-o", tmp_path / "page.html")
    assert result.exit_code == 2 and "pip install 'plotly>=6.0'\n" in result.stderr
    assert run(path, "-o", tmp_path / "page.md").exit_code == 0


def test_hostile_names_stand_in_no_terminal(tmp_path: Path) -> None:
    result = run(hostile.write(tmp_path / "run", steps=5), "--output-format", "markdown")
    assert result.exit_code == 0 and "\x1b" not in result.stdout and "\u202e" not in result.stdout
