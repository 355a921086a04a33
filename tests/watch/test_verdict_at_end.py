"""A watch that ends prints the verdict on its run and the next command, unless it is not to."""

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import plimsoll as pl
from plimsoll import display
from plimsoll.report.verdicts import verdict_sentence
from plimsoll.runs import RunWriter, Scalars
from plimsoll.runs.storage import atomic_files
from tests.support.diagnosis.stories import SOUND
from tests.support.patience import HANG_SECONDS

COMMAND = "plimsoll: recorded into run; for details: plimsoll check run\n"


@pytest.fixture(autouse=True)
def loud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PLIMSOLL_QUIET")
    monkeypatch.chdir(tmp_path)


def train(steps: int = 3, **arguments: Any) -> pl.Watch:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = pl.watch(model, optimizer, run="run", every=1, **arguments)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    return watch


def test_close_ends_with_the_verdict_and_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    watch = train()
    assert capsys.readouterr().err == ""
    watch.close()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"plimsoll: Healthy through step 2: no parameter gradients lost to underflow.\n{COMMAND}"
    watch.close()
    assert capsys.readouterr().err == ""


def test_a_block_ends_likewise_by_an_exception_too(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(KeyError), train():
        raise KeyError("x")
    assert capsys.readouterr().err.endswith(COMMAND)


def test_it_can_be_turned_off(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    train(quiet=True).close()
    monkeypatch.setenv("PLIMSOLL_QUIET", "1")
    train(resume=True).close()
    assert capsys.readouterr().err == ""
    train(resume=True, quiet=False).close()
    assert capsys.readouterr().err.endswith(COMMAND)


def test_a_run_that_could_not_be_written_is_not_said_to_be_recorded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> object:
        if ".parquet" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return path.open("wb")

    monkeypatch.setattr(atomic_files, "open_for_writing", full)
    train().close()
    said = "plimsoll: nothing could be written into run: the warnings above have the reason\n"
    assert capsys.readouterr().err.endswith(said)


def test_a_training_without_a_step_has_nothing_to_report(capsys: pytest.CaptureFixture[str]) -> None:
    train(steps=0).close()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("fault", [RuntimeError("no"), MemoryError(), pl.StateError("an old installation")])
def test_a_verdict_that_fails_costs_its_line_alone(
    fault: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(name: str) -> None:
        raise fault

    monkeypatch.setattr(display, "function", fails)
    train().close()
    assert capsys.readouterr().err == COMMAND


def test_a_closed_stderr_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull, "w", encoding="utf-8") as stream:  # noqa: PTH123
        pass
    monkeypatch.setattr("sys.stderr", stream)
    train().close()
    monkeypatch.setattr("sys.stderr", None)
    train(resume=True).close()
    monkeypatch.undo()


def test_a_script_that_never_closes_gets_its_verdict_as_it_ends(tmp_path: Path) -> None:
    code = (
        "import torch, plimsoll as pl\nmodel = torch.nn.Linear(4, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\npl.watch(model, optimizer, run='run', every=1)\n"
        "for _ in range(3):\n    model(torch.ones(8, 4)).square().mean().backward(); optimizer.step()\n"
    )
    # A whole interpreter: `__main__` lives until its end.
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=HANG_SECONDS)
    assert result.returncode == 0 and result.stderr.endswith(COMMAND) and "Healthy" in result.stderr, result.stderr


def test_a_large_run_is_not_judged_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SOUND.write(tmp_path / "sound")
    assert verdict_sentence.verdict_at_end(run) == (
        "healthy",
        "Healthy through step 199: no parameter gradients lost to underflow.",
    )
    monkeypatch.setattr(verdict_sentence, "MOST_BYTES", 1000)
    assert verdict_sentence.verdict_at_end(run) is None


def test_a_run_of_several_ranks_is_not_judged_at_the_end(tmp_path: Path) -> None:
    for rank in range(2):
        with RunWriter(tmp_path / "ranks", rank=rank, world_size=2) as writer:
            writer.write(Scalars(step=0, values={"loss": 1.0}))
    assert verdict_sentence.verdict_at_end(tmp_path / "ranks") is None
