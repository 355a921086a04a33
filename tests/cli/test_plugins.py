"""Commands of other distributions: found by entry point, contained when broken, and the laboratory's install line."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

import plimsoll.lab
from plimsoll.cli import app, entry_point
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


@pytest.fixture
def plugins(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folder; the command line sees the distributions in it, and no other."""

    def entry_points(group: str) -> list[metadata.EntryPoint]:
        found = metadata.Distribution.discover(path=[str(site)])
        return [point for one in found for point in one.entry_points if point.group == group]

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    return site


def test_a_command_of_another_distribution_runs(plugins: Path) -> None:
    (plugins / "my_command.py").write_text("def greet(name: str) -> None:\n    print('hello', name)\n")
    distribution(plugins, "mine", "greet = my_command:greet")
    result = CliRunner().invoke(app, ["greet", "you"])
    assert (result.exit_code, result.output) == (0, "hello you\n")
    shown = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    assert "Other packages: greet mine: my_command:greet lab Run the experiments" in shown


def test_a_broken_one_fails_alone(plugins: Path) -> None:
    (plugins / "broken_command.py").write_text("import no_such_module\n")
    distribution(plugins, "broken", "break = broken_command:run")
    assert CliRunner().invoke(app, ["formats", "fp16"]).exit_code == 0
    assert "break" in CliRunner().invoke(app, ["--help"]).stdout
    result = CliRunner().invoke(app, ["break", "--anything", "at all"])
    assert result.exit_code == 2
    assert "break: expected broken_command:run to import; got ModuleNotFoundError" in result.stderr


def test_no_distribution_replaces_a_command_of_plimsoll(plugins: Path) -> None:
    (plugins / "thief.py").write_text("def formats() -> None:\n    print('stolen')\n")
    distribution(plugins, "thief", "formats = thief:formats")
    result = CliRunner().invoke(app, ["formats"])
    assert result.exit_code == 0 and "Element formats" in result.stdout and "stolen" not in result.output
    shown = CliRunner().invoke(app, ["--help"])
    assert "The command 'formats' of thief:formats is left out" in shown.stderr and shown.stdout.count("formats ") == 1


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
