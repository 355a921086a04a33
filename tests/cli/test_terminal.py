"""What reaches the terminal from names, settings, events, files and errors of others: text, and nothing to obey."""

import json
import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from plimsoll.cli import app, main
from plimsoll.runs import Batch, Event, Run, RunWriter, Scalars
from tests.support import processes
from tests.support.runs import making

FORGED = "FORGED: healthy"
BAD = f"\x1b[2J\x1b]0;title\x07\x9b31m\u202e\u2066\x7f\u2028\r\x08[/red][link=x]\nplimsoll: {FORGED}\n{FORGED}"


def write(path: Path, other: str = "") -> Path:
    """A run whose every text is `BAD`; `other` is what tells two of them apart."""
    settings = {BAD: f"{other}{BAD}", f"{BAD}{other}": {BAD: [BAD]}}
    tensors = [x for x in making.tensors(12) if x.numel()][:4]
    with RunWriter(path, settings=settings, flush_seconds=600) as writer:
        for step in range(8):
            writer.write(Scalars(step=step, values={"loss": 2.0, "scale": 2.0**-step, "nonfinite": 1.0, BAD: 1.0}))
            writer.write(Event(step=step, kind="trigger", message=BAD, details={BAD: BAD, "names": BAD}))
            writer.write(Event(step=step, kind=BAD, message=BAD, details={"module": BAD, "error": BAD}))
            names = [(collection, f"{i}{BAD}") for collection in ("gradients", "weights") for i in range(len(tensors))]
            series = [writer.series(collection, name + ".weight", format="fp16") for collection, name in names]
            rows = making.rows_of([*tensors, *(x * 2.0**-30 if other else x for x in tensors)])
            index, scales = np.arange(len(names)), np.ones(len(names))
            writer.write(Batch(step=step, rows=rows, index=index, series=np.array(series), scales=scales))
        writer.write(Event(step=7, kind="ended", message=BAD, details={"by": BAD, "error": BAD}))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("terminal")
    named = root / BAD.replace("/", "_").replace("\x00", "_")
    write(named)
    write(root / "b", other="other")
    damaged = shutil.copytree(named, root / "damaged")
    for place in ("spectra", "scalars", "events"):
        part = next((damaged / place).iterdir())
        part.write_bytes(b"no parquet")
        part.rename(part.with_name(f"r00000-0000000001-0000000001-g0-s0_0{BAD.replace('/', '_')}.parquet"))
    return root


def checked(output: str) -> None:
    assert all(c.isprintable() or c == "\n" for c in output), sorted({c for c in output if not c.isprintable()})
    forged = [line for line in output.splitlines() if line.strip(" │|").startswith((FORGED, f"plimsoll: {FORGED}"))]
    assert not forged, forged


COMMANDS = (
    ["check", "A"], ["check", "A", "--json"], ["check", "A", "--select", BAD], ["check", "A", "--set", BAD],
    ["whatif", "A", "--format", "fp16"], ["whatif", "A", "--format", "e5m2", "--json"],
    ["whatif", "A", "--format", BAD], ["whatif", "A", "--format", "fp16", "--collection", BAD],
    ["plan", "A", "--target", "fp16"], ["plan", "A", "--target", "fp8", "--json"],
    ["plan", "A", "--target", "fp16", "-o", "OUT.toml"], ["plan", "A", "--check", "OUT.toml"],
    ["plan", "A", "--target", BAD], ["plan", "A", "--target", "fp16", "--include", BAD], ["plan", "A", "--check", BAD],
    ["diff", "A", "B"], ["diff", "A", "B", "--json"], ["diff", "A", "A"], ["diff", "A", BAD],
    ["report", "A", "-o", "OUT.html"], ["report", "A", "-o", "-", "--output-format", "markdown"],
    ["report", "A", "-o", "-", "--json"], ["report", "A", "-o", "OUT.md"], ["report", "A", "-o", BAD],
    ["check", "D"], ["whatif", "D", "--format", "fp16"], ["report", "D", "-o", "-", "--output-format", "markdown"],
    ["check", BAD], ["formats", BAD], ["lab", BAD], ["lab", "--list", "--output", BAD], ["serve", BAD], [BAD],
    ["serve", "B", "--host", BAD], ["run", BAD], ["check", "A", f"--{BAD}"], ["check", "A", BAD], ["doctor", BAD],
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: ascii(" ".join(command))[:40])
def test_no_command_prints_what_a_terminal_would_obey(
    folder: Path, tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hostile = folder / BAD.replace("/", "_")
    out = tmp_path / f"{BAD[:8]}\n{FORGED}"
    places = {"A": str(hostile), "B": str(folder / "b"), "D": str(folder / "damaged")}
    if command[-1] == "OUT.toml" and "--check" in command:
        CliRunner().invoke(app, ["plan", str(hostile), "--target", "fp16", "-o", f"{out}.toml"])
    arguments = [f"{out}{word[3:]}" if word.startswith("OUT") else places.get(word, word) for word in command]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = CliRunner().invoke(app, arguments, env={"COLUMNS": "3000", "TERMINAL_WIDTH": "3000"})
    assert isinstance(found.exception, SystemExit | None), found.exception
    assert found.exit_code in (0, 1, 2)
    checked(found.stdout)
    checked(found.stderr)
    if "json" in command:
        json.loads(found.stdout)


def test_warnings_about_a_run_are_text(folder: Path) -> None:
    with pytest.warns(RuntimeWarning) as caught:
        Run(folder / "damaged").table("gradients")
    for each in caught:
        checked(str(each.message))
        assert "\n" not in str(each.message)


def test_a_defect_keeps_its_traceback_and_obeys_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError(BAD.partition("\n")[0])

    monkeypatch.setattr("plimsoll.cli.commands.formats._print_tables", fails)
    monkeypatch.setattr(sys, "argv", ["plimsoll", "formats"])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 3 and error.startswith("Traceback (most recent call last):\n")
    assert "RuntimeError: \\x1b[2J" in error
    checked(error)


def test_output_that_finds_no_room_is_a_line_and_no_alarm(tmp_path: Path) -> None:
    code = (
        "import errno, sys; from plimsoll.cli import main\n"
        "class Full:\n"
        "    def __getattr__(self, name): return getattr(sys.__stdout__, name)\n"
        "    def write(self, text): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "sys.stdout, sys.argv = Full(), ['plimsoll', 'formats']\n"
        "main()"
    )
    done = processes.python("-c", code, cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert done.stderr.startswith("plimsoll: expected room for the output; got No space left on device.")
