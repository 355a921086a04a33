"""The command line as a whole: entry points, the version, and what may not happen."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from plimsoll import __version__
from plimsoll.cli import app


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "plimsoll", *arguments], capture_output=True, text=True, check=False)


def test_the_module_is_the_command() -> None:
    result = run("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"plimsoll {__version__}\n", "")


def test_a_wrong_format_leaves_no_traceback() -> None:
    result = run("formats", "fp17")
    assert result.returncode == 2
    assert "Nearest: fp16" in result.stderr and "Traceback" not in result.stderr


def test_an_unknown_command_is_refused_with_the_nearest() -> None:
    result = CliRunner().invoke(app, ["format"])
    assert result.exit_code == 2
    assert "formats" in result.stderr


def test_only_commands_that_exist_are_offered() -> None:
    names = sorted(command.callback.__name__ for command in app.registered_commands)
    assert names == ["check", "diff", "doctor", "formats", "lab", "plan", "report", "run", "serve", "whatif"]


@pytest.mark.parametrize("command", [["formats"], ["formats", "nvfp4"], ["--help"], ["formats", "--json"]])
def test_commands_about_formats_start_without_torch(command: list[str]) -> None:
    code = (
        "import sys; from plimsoll.cli import app; app(sys.argv[1:], standalone_mode=False); "
        "print(*({'torch', 'numba', 'triton', 'pyarrow', 'scipy'} & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == ""
