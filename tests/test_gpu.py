"""The GPU run: its order, its budgets, what it writes, and what it says without a GPU."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests import gpu
from tests.gpu import Part


def part(name: str, code: str, seconds: float = 600.0) -> Part:
    return Part(name=name, command=[sys.executable, "-c", code], seconds=seconds)


def test_a_part_that_fails_or_hangs_leaves_the_others_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "LEAST_SECONDS", 0.0)
    parts = [
        part("first", "import os; print('made in', os.environ['BENCHMARK_PARTS'])"),
        part("fails", "raise SystemExit(3)"),
        part("hangs", "import threading; threading.Event().wait()", seconds=0.5),
        part("last", "print('done')"),
    ]
    found = gpu.run_parts(parts, tmp_path, 3600.0)
    assert [(each.name, each.state) for each in found] == [
        ("first", "passed"), ("fails", "failed"), ("hangs", "out of time"), ("last", "passed"),
    ]  # fmt: skip
    assert (tmp_path / "first.log").read_text("utf-8") == f"made in {tmp_path}\n"
    summary = json.loads((tmp_path / "summary.json").read_text("utf-8"))
    assert [each["name"] for each in summary["parts"]] == ["first", "fails", "hangs", "last"]
    assert {"gpu", "torch", "triton", "plimsoll"} <= summary["machine"].keys()


def test_what_does_not_fit_is_not_begun_and_each_end_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, budgets, written = [0.0], [], []

    def run_one(part: Part, folder: Path, seconds: float) -> str:
        written.append(json.loads((folder / "summary.json").read_text("utf-8"))["parts"] if now[0] else [])
        budgets.append((part.name, seconds))
        now[0] += seconds
        return "passed"

    monkeypatch.setattr(gpu, "run_one", run_one)
    parts = [part("a", "", 100.0), part("b", "", 100.0), part("c", "", 100.0)]
    found = gpu.run_parts(parts, tmp_path, 150.0, clock=lambda: now[0])
    assert budgets == [("a", 100.0), ("b", 50.0)] and [len(parts) for parts in written] == [0, 1]
    assert [each.state for each in found] == ["passed", "passed", "not begun"]


def test_the_parts_are_there_and_fit_their_command() -> None:
    assert gpu.PARTS[0].name == "tests"
    for each in gpu.PARTS[1:]:
        script = gpu.ROOT / each.command[1]
        text = script.read_text("utf-8")
        assert all(f'"{option}"' in text for option in each.command if option.startswith("--"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--out", str(tmp_path / "out")]) == 2
    assert "expected a CUDA device" in capsys.readouterr().out and not (tmp_path / "out").exists()
