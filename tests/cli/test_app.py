"""The command line as a whole: entry points, the version, and what may not happen."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from plimsoll import __version__
from plimsoll.cli import app, commands
from plimsoll.cli.entry_point import COMMANDS, Command
from plimsoll.cli.messages import in_command_words
from plimsoll.errors import ArgumentError
from tests.support.cases import each
from tests.support.patience import HANG_SECONDS


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


@each(
    ("words", "message"),
    [
        (["-q"], "expected a command; got none. plimsoll -h lists them."),
        (["--nope"], "expected an option of plimsoll; got --nope. plimsoll -h lists the options."),
        (["checks"], "expected a command; got 'checks'. Did you mean check? plimsoll -h lists them."),
        (["help", "nope"], "expected a command; got 'nope'. plimsoll -h lists them."),
        (["check", "--fail"], "check: expected an option of plimsoll check; got --fail. Did you mean --fail-on or"),
        (
            ["check", "a", "--fail-on", "x"],
            "check: expected --fail-on to be warning, alarm or never; got 'x'. plimsoll",
        ),
        (["check", "a", "--until=x"], "check: expected --until to be a whole number; got 'x'. plimsoll check -h"),
        (["check", "a", "--until"], "check: expected --until STEP; got no value. plimsoll check -h lists the options."),
        (["check", "a", "--json=3"], "check: expected --json alone; got a value for it. Leave the value out."),
        (["plan", "a", "--tolerance", "\x1b[31m"], r"plan: expected --tolerance to be a number; got '\x1b[31m'. "),
        (["run", "-o"], "run: expected -o DIR; got no value. plimsoll run -h"),
        (["run", "--every", "0", "a.py"], "run: expected --every to be at least 1; got '0'. plimsoll run -h lists"),
        (["run"], "run: expected SCRIPT; got none. Write plimsoll run SCRIPT [ARGS...]."),
        (["whatif", "a"], "whatif: expected --format FORMAT; got none. Write plimsoll whatif RUN --format FORMAT."),
        (["diff", "a", "b", "c", "d"], "diff: expected plimsoll diff RUN_A RUN_B; got c d as well. Leave it out. "),
    ],
)
def test_usage_errors_have_the_form_of_all_errors(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, words, prog_name="plimsoll")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"plimsoll: {message}") and result.stderr.count("\n") == 1


@each("command", ["check", "ls", "diff", "receipt", "report", "whatif"])
def test_a_path_that_no_system_has_is_one_line(command: str) -> None:
    name = "x" * 5000
    more = {"diff": [name], "report": ["-o", f"{name}.html"], "whatif": ["--format", "fp16"]}.get(command, [])
    result = CliRunner().invoke(app, [command, name, *more], prog_name="plimsoll")
    assert (result.exit_code, result.stdout) == (2, ""), result.exception
    assert result.stderr.startswith("plimsoll: ") and result.stderr.count("\n") == 1
    assert "File name too long" in result.stderr or "No such" in result.stderr


GROUP = typer.main.get_command(app)


def test_only_commands_that_exist_are_offered() -> None:
    folder = Path(commands.__file__).parent
    modules = {path.stem for path in folder.rglob("*.py")} - {"__init__"}
    assert {command.name for command in COMMANDS} == modules
    assert list(GROUP.commands) == [*(command.name for command in COMMANDS), "lab"]


@each("command", COMMANDS, ids=lambda command: command.name)
def test_the_registry_has_the_first_line_of_the_docstring(command: Command) -> None:
    function = GROUP.commands[command.name].callback
    assert function is not None and (function.__doc__ or "").splitlines()[0] == command.summary
    assert command.summary.endswith(".") and len(command.summary) <= 60


@each("name", [command.name for command in COMMANDS] + ["lab"])
def test_every_command_speaks_one_grammar(name: str) -> None:
    options = {option: p for p in GROUP.commands[name].params for option in p.opts if p.param_type_name == "option"}
    assert options["--json"].is_flag and options["--quiet"].is_flag and "-q" in options
    assert ("-o" in options) == ("--output" in options)
    form = options.get("--format")
    assert form is None or form.metavar == "FORMAT"  # a number format, wherever it stands


@each("name", [command.name for command in COMMANDS] + ["lab"])
def test_help_shows_flags_as_flags(name: str) -> None:
    result = CliRunner().invoke(app, [name, "-h"])
    assert result.exit_code == 0 and result.stdout.startswith("Usage: plimsoll")
    assert "<" not in result.stdout and "Print JSON instead of text." in result.stdout
    for parameter in GROUP.commands[name].params:
        if parameter.param_type_name == "option" and parameter.multiple:
            words = " ".join(result.stdout.split("Options:")[1].split())
            assert re.search(rf"{parameter.opts[-1]} \S+ ((?! --).)*Repeatable\.", words), parameter.opts


def test_help_lists_all_commands_and_needs_none_of_them() -> None:
    code = (
        "import sys; from plimsoll.cli import app; app(['--help'], standalone_mode=False); "
        "print(*(name for name in sys.modules if name.startswith('plimsoll.cli.commands.')), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == ""
    assert all(f"  {command.name} " in result.stdout and command.summary in result.stdout for command in COMMANDS)
    assert CliRunner().invoke(app, ["help"]).stdout == CliRunner().invoke(app, ["-h"]).stdout
    assert CliRunner().invoke(app, ["help", "check"]).stdout == CliRunner().invoke(app, ["check", "--help"]).stdout


def test_the_version_has_a_short_form() -> None:
    assert CliRunner().invoke(app, ["-V"]).stdout == f"plimsoll {__version__}\n"


def test_quiet_leaves_json_errors_and_the_exit_code() -> None:
    assert CliRunner().invoke(app, ["formats", "-q"]).output == CliRunner().invoke(app, ["-q", "formats"]).output == ""
    assert json.loads(CliRunner().invoke(app, ["-q", "formats", "fp16", "--json"]).stdout)["bits"] == 16
    refused = CliRunner().invoke(app, ["formats", "fp17", "-q"])
    assert refused.exit_code == 2 and "Nearest: fp16" in refused.stderr
    assert CliRunner().invoke(app, ["formats", "fp16"]).stdout  # of one command only


@each("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_the_shell(shell: str) -> None:
    # As `--show-completion` prints it, without the search for the shell that started this process.
    shown = CliRunner().invoke(app, [], prog_name="plimsoll", env={"_PLIMSOLL_COMPLETE": f"source_{shell}"})
    assert shown.exit_code == 0 and "_PLIMSOLL_COMPLETE" in shown.stdout and "plimsoll" in shown.stdout


def completed(*words: str) -> list[str]:
    environment = {
        "_PLIMSOLL_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": f"{len(words) - 1}",
    }
    command = [sys.executable, "-c", "import sys; sys.argv[0] = 'plimsoll'; from plimsoll.cli import main; main()"]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **environment}, timeout=HANG_SECONDS
    )
    return result.stdout.split()


@each(
    ("words", "found"),
    [
        (("plimsoll", "wh"), ["whatif"]),
        (("plimsoll", "check", "--fail"), ["--fail-on"]),
        (("plimsoll", "check", "--fail-on", "w"), ["warning"]),
        (("plimsoll", "check", "--select", "scale-c"), ["scale-collapse"]),
        (("plimsoll", "whatif", "runs", "--format", "e4m"), ["e4m3", "e4m3fnuz"]),
        (("plimsoll", "formats", "mxfp8"), ["mxfp8_e4m3", "mxfp8_e5m2"]),
        (("plimsoll", "whatif", "runs", "--collection", "act"), ["activations", "activation_gradients"]),
        (("plimsoll", "plan", "runs", "--target", "nv"), ["nvfp4", "nvfp4_single"]),
    ],
)
def test_words_are_completed(words: tuple[str, ...], found: list[str]) -> None:
    assert sorted(completed(*words)) == sorted(found)


@each("command", [["formats"], ["formats", "nvfp4"], ["--help"], ["formats", "--json"]])
def test_commands_about_formats_start_without_torch(command: list[str]) -> None:
    code = (
        "import sys; from plimsoll.cli import app; app(sys.argv[1:], standalone_mode=False); "
        "print(*({'torch', 'numba', 'triton', 'pyarrow', 'scipy'} & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == ""


def words_for(command: str, monkeypatch: pytest.MonkeyPatch, message: str) -> list[str]:
    """The least words that run a command, which then fails in the API."""

    def fail(**_: object) -> None:
        raise ArgumentError(message)

    found = GROUP.commands[command]
    monkeypatch.setattr(found, "callback", fail)
    words = [command]
    for parameter in found.params:
        if parameter.required:
            words += [parameter.opts[0]] if parameter.param_type_name == "option" else []
            words += ["fp16" if parameter.name == "fmt" else "a"]
    return words


@each("command", [*(command.name for command in COMMANDS), "lab"])
def test_errors_of_the_api_are_in_the_words_of_the_command(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_for(command, monkeypatch, "Plan.load: expected a TOML file;\n got bad.toml. Name another.")
    with pytest.raises(SystemExit) as ended:
        GROUP.main(words, prog_name="plimsoll")
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", f"plimsoll: {command}: expected a TOML file; got bad.toml. Name another.\n")


@each(
    ("message", "shown"),
    [
        (
            "plan: expected margin_binades to be an integer; got margin_binades=-4. margin_binades is it.",
            "plan: expected --margin to be an integer; got --margin -4. margin_binades is it.",
        ),
        ("f: expected a; got include='x' with budget=None.", "plan: expected a; got --include 'x' with none."),
        ("f: expected none; got layer_scales=True, one_scale=True.",
         "plan: expected none; got layer_scales=True, --one-scale."),
        ("f: expected a run; got run=3. Name one.", "plan: expected a run; got 3. Name one."),
        ("PLIMSOLL_BACKEND: expected numba; got 'x'.", "PLIMSOLL_BACKEND: expected numba; got 'x'."),
        ("/a/b.csv: expected cells; got 1.", "/a/b.csv: expected cells; got 1."),
        ("No Plimsoll run in a: expected b.", "No Plimsoll run in a: expected b."),
    ],
)  # fmt: skip
def test_arguments_of_the_api_are_shown_as_options(message: str, shown: str) -> None:
    assert in_command_words(message, "plan", GROUP.commands["plan"].params) == shown


def test_a_file_that_an_error_begins_with_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = "l.csv: expected cells; got 1."
    assert in_command_words(message, "parity") == "parity: expected cells; got 1."
    Path("l.csv").touch()
    assert in_command_words(message, "parity") == message
