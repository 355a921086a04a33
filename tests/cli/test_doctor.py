"""`plimsoll doctor`: what it tells of a machine, whole or broken."""

import dataclasses
import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from plimsoll import kernels
from plimsoll.cli import app
from plimsoll.cli.commands.doctor import Backend, Cache, Device, Extra, _print, cpu_formats, cuda_formats, examine
from plimsoll.cli.script import cost_session
from plimsoll.extras import EXTRAS, install_line
from plimsoll.tensor_collections import NAMES as COLLECTIONS
from plimsoll.text import counted
from plimsoll.watch.cost import EVERYTHING, FLOOR, Cost, CostReport
from tests.support import processes
from tests.support.cases import each

ROOT = Path(__file__).parents[2]


def doctor(*arguments: str, width: int = 80, **environment: str) -> Result:
    return CliRunner(env={"COLUMNS": str(width), **environment}).invoke(app, ["doctor", *arguments])


@each("width", [60, 80, 200])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    result = doctor(width=width)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= width
    assert "…" not in result.stdout


def test_it_tells_versions_devices_backends_cache_and_extras() -> None:
    shown = doctor().stdout
    assert f"torch    {torch.__version__}" in shown
    for heading in ("Versions", "Devices", "Kernel backends", "Cache of compiled kernels", "Optional parts"):
        assert re.search(rf"^{heading}$", shown, re.MULTILINE)
    assert f"{counted(torch.get_num_threads(), 'thread')} on " in shown
    assert "BackendError" not in shown  # the reason is a sentence, without the exception's class
    for name in EXTRAS:
        assert name in shown


def test_a_torch_that_is_newer_than_those_tested_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, is_named in (("2.9.1", False), ("2.13.0+cpu", False), ("2.99.0a0+git", True), ("10.0.0", True)):
        monkeypatch.setattr(torch, "__version__", version)
        assert ("the newest torch that Plimsoll was tested with is" in doctor().stdout) == is_named, version


def test_json_says_the_same() -> None:
    parsed = json.loads(doctor("--json").stdout)
    assert parsed == json.loads(json.dumps(dataclasses.asdict(examine())))
    assert parsed["devices"][0]["name"] == "cpu"
    assert [backend["name"] for backend in parsed["backends"]] == ["torch", "numba", "triton"]


def test_the_backend_it_names_is_the_one_that_runs() -> None:
    for name in ("torch", "numba"):
        if kernels.report()[("torch", "numba").index(name)].available:
            with kernels.use(name):
                machine = examine()
            assert (machine.forced_backend, machine.devices[0].backend) == (name, name)


def test_a_forced_backend_is_told() -> None:
    shown = doctor(PLIMSOLL_BACKEND="torch").stdout
    assert "torch is forced on every device (PLIMSOLL_BACKEND)." in shown
    assert "kernels: torch" in shown


def test_a_wrong_backend_is_told_and_the_rest_with_it() -> None:
    result = doctor(PLIMSOLL_BACKEND="nmba", width=200)
    assert result.exit_code == 0
    assert "PLIMSOLL_BACKEND: expected one of torch, numba, triton; got 'nmba'." in result.stdout
    assert "Optional parts" in result.stdout


@each(
    ("capability", "expected"),
    [
        ((6, 1), ()),
        ((7, 0), ("fp16",)),
        ((8, 6), ("fp16", "bf16", "tf32")),
        ((8, 9), ("fp16", "bf16", "tf32", "e4m3", "e5m2")),
        ((9, 0), ("fp16", "bf16", "tf32", "e4m3", "e5m2")),
        ((10, 0), ("fp16", "bf16", "tf32", "e4m3", "e5m2", "mxfp8", "mxfp6", "mxfp4", "nvfp4")),
        ((12, 0), ("fp16", "bf16", "tf32", "e4m3", "e5m2", "mxfp8", "mxfp6", "mxfp4", "nvfp4")),
    ],
)
def test_formats_in_hardware_follow_the_compute_capability(
    capability: tuple[int, int], expected: tuple[str, ...]
) -> None:
    assert cuda_formats(capability) == expected


@each(
    ("cpuinfo", "expected"),
    [
        ("", ()),
        ("flags\t\t: fpu avx2 f16c", ()),
        ("flags\t\t: fpu avx512_bf16", ("bf16",)),
        ("flags\t\t: amx_bf16 avx512_fp16", ("fp16", "bf16")),
        ("model name\t: avx512_bf16\nFeatures\t: fp asimd asimdhp", ("fp16",)),
    ],
)
def test_formats_of_a_processor_follow_its_flags(cpuinfo: str, expected: tuple[str, ...]) -> None:
    assert cpu_formats(cpuinfo) == expected


def test_extras_are_those_of_pyproject() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    packages = {
        name: tuple(
            each for entry in entries for each in (declared["report"] if entry == "plimsoll[report]" else [entry])
        )
        for name, entries in declared.items()
        if name not in ("all", "bench", "dev")
    }
    assert packages == EXTRAS


def test_a_missing_extra_names_its_install_line() -> None:
    machine = dataclasses.replace(
        examine(),
        extras=(
            Extra(name="report", versions={"plotly": None}, install=install_line("report")),
            Extra(name="sql", versions={"duckdb": "1.2.3"}, install=None),
        ),
    )
    shown = _shown(machine)
    assert re.search(r"– +report +pip install 'plotly>=6.0'", shown)
    assert re.search(r"✓ +sql +duckdb 1\.2\.3", shown)


def test_a_gpu_a_broken_backend_and_a_lost_cache_are_told() -> None:
    gpu = Device(
        name="cuda:0", model="NVIDIA H200", detail="sm_90", memory_bytes=139 * 2**30,
        formats=cuda_formats((9, 0)), backend="triton",
    )  # fmt: skip
    machine = examine()
    machine = dataclasses.replace(
        machine,
        devices=(*machine.devices, gpu),
        backends=(Backend(name="numba", available=False, detail="ImportError: no llvmlite"),),
        kernel_cache=Cache(folder=None, writable=False),
    )
    shown = _shown(machine)
    assert "no GPU" not in shown
    assert re.search(r"cuda:0 +NVIDIA H200 +sm_90, 139\.0 GiB", shown)
    assert re.search(r"computes in fp32, fp16, bf16, tf32, e4m3, e5m2 +kernels: triton", shown)
    assert re.search(r"– +numba +ImportError: no llvmlite", shown)
    assert "set NUMBA_CACHE_DIR to a writable folder" in " ".join(shown.split())


def _shown(machine: object) -> str:
    console = Console(width=100, highlight=False, force_terminal=False)
    with console.capture() as captured:
        _print(machine, console)
    return captured.get()


# -- the cost of watching ----------------------------------------------------------------------------------------------

TRAINING = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters())
try:
    for step in range(int(sys.argv[2])):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
finally:
    print("steps", step + 1, sys.argv[1])
"""


@pytest.mark.parametrize("steps", [1000, 20])
def test_a_script_is_trained_until_its_cost_is_known(tmp_path: Path, steps: int) -> None:
    (tmp_path / "train.py").write_text(TRAINING, encoding="utf-8")
    command = ("doctor", "--cost", "--json", "--rounds", "2", "train.py", "--steps", steps)
    done = processes.python("-m", "plimsoll", *command, cwd=tmp_path)
    first, *rest = done.stdout.splitlines()
    taken = int(first.split()[1])
    assert first.endswith("--steps")
    if steps == 20:
        assert (done.returncode, taken, rest) == (2, 20, [])
        assert "the cost was not measured: the script ended before enough of its steps were measured" in done.stderr
        assert "let it take 54 of them" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    report = json.loads(rest[-1])
    assert taken < 100  # 9 kinds of step, twice a round, and the steps before the watch
    assert (report["model"], report["parameters"], report["rounds"]) == ("Sequential", 90, 2)
    assert [found["name"] for found in report["costs"]] == [FLOOR, *COLLECTIONS, EVERYTHING]
    assert list(tmp_path.iterdir()) == [tmp_path / "train.py"]


@pytest.mark.parametrize("floor", [True, False])
def test_the_cost_of_a_training_is_printed_by_collection(monkeypatch: pytest.MonkeyPatch, floor: bool) -> None:
    found = [Cost(name=FLOOR, extra_seconds=0.002, extra=0.2, spread=0.01, of_floor=1.0)] if floor else []
    everything = Cost(
        name=EVERYTHING, extra_seconds=0.0041, extra=0.41, spread=0.03, of_floor=2.05 if floor else None
    )  # fmt: skip
    report = CostReport(
        model="GPT", parameters=12_345, threads=1, rounds=9, step_seconds=0.01, costs=(*found, everything),
        every={"0.01": 41, "0.05": 9},
    )  # fmt: skip
    monkeypatch.setattr(cost_session, "measure_example", lambda rounds: report)
    shown = doctor("--cost", width=100).stdout
    assert "GPT, 12,345 parameters, 1 thread, 9 rounds" in shown
    assert re.search(r"nothing sampled +10\.00 ms", shown)
    assert bool(re.search(r"one aminmax of each tensor +\+2\.00 ms +\+20\.0 %, spread 1\.0 %\n", shown)) == floor
    assert re.search(
        r"everything +\+4\.10 ms +\+41\.0 %, spread 3\.0 %" + (r", 2\.05 of the aminmax\n" if floor else "\n"), shown
    )
    assert "Other work disturbs" not in shown
    report = dataclasses.replace(report, costs=(dataclasses.replace(everything, spread=0.21),))
    assert "Other work disturbs these times." in doctor("--cost", width=100).stdout
    assert re.search(r"1 % of the time +every=41\n +5 % of the time +every=9\n", shown)


def test_the_options_of_the_cost_are_refused_without_it() -> None:
    for words in ("train.py", "--rounds 3", "-m"):
        result = doctor(*words.split())
        assert result.exit_code == 2
        assert f"doctor: expected --cost with {words}; got none. Put it before, or leave {words} out." in result.stderr
    result = doctor("--cost", "missing.py")
    assert result.exit_code == 2
    assert "doctor: expected a Python script; got 'missing.py'" in result.stderr
