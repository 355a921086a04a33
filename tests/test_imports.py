"""What importing loads, and what it must not."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import plimsoll.spectrum
from tests.support.cases import each
from tests.support.diagnosis.stories import SOUND

_HEAVY = {"torch", "numba", "triton", "pyarrow", "scipy", "typer", "rich", "plotly", "fastapi", "pandas"}


def loaded_by(code: str) -> set[str]:
    """The heavy packages that a fresh interpreter has loaded after `code`."""
    probe = f"import sys\n{code}\nprint('\\n\\0', *sys.modules)"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return _HEAVY & set(result.stdout.rpartition("\n\0")[2].split())


def loaded_by_each(first: str, codes: Sequence[str]) -> list[set[str]]:
    """The same after `first` and each of the codes: one interpreter runs `first` and forks for each of them."""
    probe = f"""
import os, sys
{first}
for code in {[*codes]!r}:
    sys.stdout.flush()
    if os.fork() == 0:
        exec(code)
        print("\\n\\0", *sys.modules, "\\0", flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, code
"""
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return [_HEAVY & set(loaded.split()) for loaded in result.stdout.split("\0")[1::2]]


@each(
    "code",
    [
        "import plimsoll",
        "import plimsoll; plimsoll.formats.get('e4m3').max; plimsoll.FormatError; dir(plimsoll)",
        "from plimsoll.formats import Plan",
        "from plimsoll import Format, BlockFormat",
    ],
)
def test_formats_need_no_heavy_package(code: str) -> None:
    assert loaded_by(code) == set()


def test_the_probe_sees_what_is_loaded() -> None:
    assert "rich" in loaded_by("import rich")


def test_live_training_measuring_and_casting_are_loaded_when_they_are_asked_for() -> None:
    """By one interpreter: what one step loads is there until the last."""
    steps = (
        "import plimsoll, plimsoll.spectrum",
        "plimsoll.diagnose, plimsoll.whatif, plimsoll.plan, plimsoll.diff",
        "plimsoll.spectrum.measure",
        "plimsoll.cast, plimsoll.measure",
    )
    probe = "import sys\n" + "\n".join(f"{step}\nprint(*sys.modules)" for step in steps)
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    first, judging, measuring, last = (set(line.split()) for line in result.stdout.splitlines())
    assert not first & _HEAVY
    assert not judging & {"plimsoll.watch", "plimsoll.precision", "torch._dynamo"}
    assert "torch" in measuring
    assert not last & {"triton", "typer", "rich", "plotly", "fastapi"}


# Importing one of these is what a command, a script or a page does that only reads.
READING = (
    "plimsoll.spectrum", "plimsoll.runs", "plimsoll.runs.reading.run", "plimsoll.diagnosis", "plimsoll.diagnosis.rules",
    "plimsoll.report", "plimsoll.report.verdicts.run_summary", "plimsoll.report.verdicts.verdict_sentence",
    "plimsoll.report.figure_registry", "plimsoll.report.single_file.html_report",
    "plimsoll.report.single_file.markdown_report", "plimsoll.cli", "plimsoll.cli.screens.findings",
)  # fmt: skip


def test_reading_needs_no_torch() -> None:
    """All are imported by one interpreter, so what one of them loads is there until the last."""
    loaded = loaded_by("\n".join(f"import {module}" for module in READING))
    assert not loaded & {"torch", "numba", "triton", "scipy", "plotly", "fastapi", "pandas"}


COMMANDS = (
    ("check RUN", set()), ("check RUN --json", {"rich"}), ("ls RUN", set()), ("ls RUN --json", {"rich"}),
    ("diff RUN RUN", set()), ("report RUN -o report.md", set()), ("report RUN --json", set()),
    ("plan RUN --target bf16", set()), ("check --rules", set()),
)  # fmt: skip


def test_commands_that_read_import_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SOUND.write(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    arguments = [[str(tmp_path / "run") if word == "RUN" else word for word in each.split()] for each, _ in COMMANDS]
    codes = [f"app({words!r}, standalone_mode=False)" for words in arguments]
    for (command, unneeded), loaded in zip(
        COMMANDS, loaded_by_each("import numpy\nfrom plimsoll.cli import app", codes), strict=True
    ):
        too_much = {"torch", "numba", "triton", "scipy", "plotly", "fastapi", "pandas"} | unneeded
        assert not loaded & too_much, command
        assert "pyarrow" in loaded or "--rules" in command, command


def test_a_table_without_rows_needs_no_pandas() -> None:
    code = (
        "from plimsoll.runs.columns.arrow import pa\n"
        "from plimsoll.runs.columns.row_order import ordered\n"
        "from plimsoll.runs.columns.schema import SCHEMAS\n"
        "for kind, schema in SCHEMAS.items():\n"
        "    columns = [pa.chunked_array([], field.type) for field in schema]\n"
        "    assert len(ordered(pa.table(columns, schema=schema), kind)) == 0"
    )
    assert not loaded_by(code) & {"torch", "pandas"}


def test_what_if_and_the_page_need_no_torch(tmp_path: Path) -> None:
    SOUND.write(tmp_path / "run")
    code = (
        "from plimsoll.cli import app\n"
        f"app(['whatif', {str(tmp_path / 'run')!r}, '--format', 'fp16'], standalone_mode=False)\n"
        f"app(['report', {str(tmp_path / 'run')!r}, '-o', {str(tmp_path / 'r.html')!r}], standalone_mode=False)\n"
    )
    assert not loaded_by(code) & {"torch", "numba", "triton", "fastapi", "pandas"}


def test_a_name_that_a_package_has_not_is_an_attribute_error() -> None:
    assert "measure" in dir(plimsoll.spectrum)
    with pytest.raises(AttributeError, match="module 'plimsoll.spectrum' has no attribute 'measures'"):
        getattr(plimsoll.spectrum, "measures")  # noqa: B009  (a name that type checkers know is not there)


def test_names_of_live_training_come_when_asked_for() -> None:
    from plimsoll import diagnosis

    assert {"Guard", "locate", "Limits", "locate_on_trigger"} <= set(dir(diagnosis))
    assert diagnosis.Guard.__name__ == "Guard" and callable(diagnosis.locate)
    with pytest.raises(AttributeError, match="module 'plimsoll.diagnosis' has no attribute 'guards'"):
        getattr(diagnosis, "guards")  # noqa: B009  (a name that type checkers know is not there)


def test_a_default_device_does_not_matter() -> None:
    """As where a model is built on the meta device, or `torch.set_default_device("cuda")` is on."""
    code = """
import torch, plimsoll
from plimsoll import kernels
codes, bank = torch.ones(3).to(torch.float8_e4m3fn), kernels.new_bank(1)
with torch.device("meta"):
    for name in plimsoll.__all__:
        getattr(plimsoll, name)
    kernels.measure_one(codes, bank, 0)
"""
    assert "torch" in loaded_by(code)
