"""``plimsoll certify``: how a function is named, the sheet, its files, and exit codes."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from plimsoll.cli import app
from tests.support.cases import each

_KERNELS = """
import torch

print("importing the kernels")

def right(x):
    return x.to(torch.float8_e5m2)

def truncates(x):
    return (x.float().view(torch.int32) & -(1 << 16)).view(torch.float32)

def fails(x):
    raise RuntimeError("no kernel for this dtype")

class Backend:
    rounded = staticmethod(lambda x: x.to(torch.float8_e5m2).float())
"""


def certify(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["certify", *map(str, arguments)], env={"COLUMNS": "100"})


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("certify") / "my_kernels.py"
    path.write_text(_KERNELS, "utf-8")
    return path


@pytest.fixture(autouse=True)
def same_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_kernels", raising=False)


def test_a_conforming_function_exits_with_0(kernels: Path) -> None:
    result = certify(f"{kernels}:right", "--format", "e5m2")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("my_kernels.right (cast, e5m2) conforms in all 19 rows that were tried.")
    assert "importing the kernels" not in result.stdout and "importing the kernels" in result.stderr


def test_a_deviating_one_exits_with_1_and_shows_the_smallest_counterexample(kernels: Path) -> None:
    result = certify(f"{kernels}:truncates", "--format", "bf16")
    assert result.exit_code == 1
    shown = " ".join(result.stdout.split())
    assert "deviates in 6 of 19 rows: between, ties, rounded-once, subnormal-inputs, overflow, nan." in shown
    assert "input 1.005859375 (float16 0x3c06), expected 1.0078125, got 1" in shown
    assert certify(f"{kernels}:truncates", "--format", "bf16", "--rounding", "toward_zero").exit_code == 1  # its NaN


def test_what_cannot_be_tried_exits_with_2(kernels: Path) -> None:
    result = certify(f"{kernels}:fails", "--format", "bf16")
    assert result.exit_code == 2 and result.stdout == ""
    assert "RuntimeError: no kernel for this dtype" in result.stderr


@each(
    ("name", "message"),
    [
        ("my_kernels", "expected MODULE:NAME or FILE.py:NAME; got 'my_kernels'"),
        (":right", "expected MODULE:NAME or FILE.py:NAME; got ':right'"),
        ("{}:truncate", "got 'truncate'. Nearest: truncates."),
        ("{}:Backend.round", "got 'Backend.round'. Nearest: rounded."),
        ("no_such_module_at_all:cast", "expected no_such_module_at_all to import; got ModuleNotFoundError"),
        ("no/such/file.py:cast", "FileNotFoundError: there is no file no/such/file.py"),
    ],
)
def test_a_wrong_name_is_refused(kernels: Path, name: str, message: str) -> None:
    result = certify(name.format(kernels), "--format", "e5m2")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_names_with_dots_modules_and_dtypes(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert certify(f"{kernels}:Backend.rounded", "--format", "e5m2").exit_code == 0
    monkeypatch.chdir(kernels.parent)
    assert certify("my_kernels:right", "--format", "e5m2").exit_code == 0  # as `python -m` finds it
    assert certify("torch:float8_e5m2", "--format", "e5m2").exit_code == 0
    assert certify("ml_dtypes:float4_e2m1fn", "--format", "e2m1").exit_code == 0
    assert certify("torch:matmul", "--format", "fp32", "--kind", "matmul").exit_code == 0


def test_json_is_the_certificate(kernels: Path) -> None:
    result = certify(f"{kernels}:right", "--format", "e5m2", "--json", "--seconds", 90)
    data = json.loads(result.stdout)
    assert data["conforms"] is True and data["inferred"]["rounding"] == "nearest_even"


@each("ending", ["json", "md", "html", "txt"])
def test_a_file_has_the_form_of_its_ending(kernels: Path, ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"certificate.{ending}"
    result = certify(f"{kernels}:right", "--format", "e5m2", "-o", file)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        str(file),
        "my_kernels.right (cast, e5m2) conforms in all 19 rows that were tried.",
    ]
    begins = {"json": "{", "md": "**my", "html": "<!doctype html>", "txt": "my_kernels.right"}[ending]
    assert file.read_text("utf-8").startswith(begins)


def test_a_file_of_another_form_is_refused_before_the_work(kernels: Path, tmp_path: Path) -> None:
    result = certify(f"{kernels}:right", "--format", "e5m2", "-o", tmp_path / "certificate.pdf")
    assert result.exit_code == 2 and "expected a file that ends in .json, .md" in result.stderr
    assert certify(f"{kernels}:right", "--format", "e5m2", "--output", "s3://bucket/x.html").exit_code == 2


def test_a_scale_rule_is_held_to(kernels: Path) -> None:
    code = kernels.with_name("blocks.py")
    code.write_text("import plimsoll as pl\ndef up(x):\n    return pl.pack(x, 'mxfp4', scale_rule='rceil')\n", "utf-8")
    arguments = (f"{code}:up", "--format", "mxfp4", "--kind", "pack")
    assert certify(*arguments, "--scale-rule", "rceil").exit_code == 0
    assert certify(*arguments).exit_code == 1
    assert certify(*arguments, "--device", "nonsense").exit_code == 2
