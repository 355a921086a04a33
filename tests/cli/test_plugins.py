"""Commands of other distributions: found by entry point, contained when broken, and the laboratory's install line."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

import plimsoll.lab
from plimsoll.cli import entry_point
from tests.support import processes


def distribution(folder: Path, name: str, entry: str) -> None:
    """An installed distribution with one command."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{entry_point.GROUP}]\n{entry}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for distributions that the test installs."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def app_with_plugins(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Typer:
    """A command line with one command of its own, and those of the distributions in the folder."""
    found = entry_point.importlib.metadata.Distribution.discover(path=[str(folder)])
    points = [point for one in found for point in one.entry_points if point.group == entry_point.GROUP]
    monkeypatch.setattr(entry_point.importlib.metadata, "entry_points", lambda group: points)
    app = Typer()
    app.command("check")(lambda: None)
    entry_point.add_commands(app, own=["check"])
    return app


def test_a_command_of_another_distribution_runs(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "my_command.py").write_text("def greet(name: str) -> None:\n    print('hello', name)\n")
    distribution(site, "mine", "greet = my_command:greet")
    result = CliRunner().invoke(app_with_plugins(monkeypatch, site), ["greet", "you"])
    assert (result.exit_code, result.output) == (0, "hello you\n")


def test_a_broken_one_fails_alone(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "broken_command.py").write_text("import no_such_module\n")
    distribution(site, "broken", "break = broken_command:run")
    app = app_with_plugins(monkeypatch, site)
    assert CliRunner().invoke(app, ["check"]).exit_code == 0
    result = CliRunner().invoke(app, ["break", "--anything", "at all"])
    assert "break: expected broken_command:run to import; got ModuleNotFoundError" in str(result.exception)


def test_no_distribution_replaces_a_command_of_plimsoll(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "thief.py").write_text("def check() -> None:\n    print('stolen')\n")
    distribution(site, "thief", "check = thief:check")
    result = CliRunner().invoke(app_with_plugins(monkeypatch, site), ["check"])
    assert (result.exit_code, result.output) == (0, "")
    assert "The command 'check' of thief:check is left out" in capsys.readouterr().err


def test_without_the_laboratory_its_command_says_how_to_get_it() -> None:
    script = (
        "import importlib.metadata as m; m.entry_points = lambda **_: []\n"
        "import sys; sys.argv = ['plimsoll', 'lab', 'demo', '--full']\n"
        "from plimsoll.cli import main; main()"
    )
    result = processes.python("-c", script)
    assert result.returncode == 2
    assert "lab: expected the distribution plimsoll-lab" in result.stderr and "pip install -e ./lab" in result.stderr


def test_importing_the_command_line_loads_no_experiment() -> None:
    script = "import sys, plimsoll.cli.entry_point; print([n for n in sys.modules if 'plimsoll_lab.exp' in n])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_the_former_name_of_the_laboratory_works_with_a_warning() -> None:
    import plimsoll_lab

    with pytest.warns(DeprecationWarning, match="plimsoll.lab.perform is plimsoll_lab.perform now"):
        assert plimsoll.lab.perform is plimsoll_lab.perform
