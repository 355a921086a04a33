"""How a run ended: by an exception, a signal, killed, in order, or not yet."""

import contextlib
import json
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import plimsoll as pl
from plimsoll.cli import app
from plimsoll.diagnosis import View, diagnose
from plimsoll.runs import Run
from tests.support import processes

SCRIPT = """
    import os, signal, sys, torch, plimsoll as pl
    from plimsoll.watch.hooks import torch_hooks
    torch_hooks._SIGNAL_SECONDS = 300.0  # it is not time that is tried here
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = pl.watch(model, optimizer, run=sys.argv[1], every=10)
    for step in range(30):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        if step == 25:
            watch.flush()
            {end}
"""


def checked(path: Path) -> tuple[int, str, dict[str, Any]]:
    """Exit code and first line of the check, and its JSON."""
    text = CliRunner().invoke(app, ["check", str(path)], env={"COLUMNS": "80"})
    data = json.loads(CliRunner().invoke(app, ["check", str(path), "--json"]).stdout)
    return text.exit_code, text.stdout.splitlines()[0], data


@pytest.mark.parametrize(
    ("end", "how", "severity", "says"),
    [
        ("raise KeyError('lost')", "exception", "warning", "ended by an exception at step 26: KeyError: 'lost'"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "signal", "info", "ended by a signal at step 26: SIGTERM"),
        ("raise KeyboardInterrupt", "interrupt", "info", "ended by an interrupt at step 26: KeyboardInterrupt"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed", "warning", "stopped without closing after step 25"),
        ("os._exit(3)", "killed", "warning", "stopped without closing after step 25"),
    ],
)
def test_an_early_end_is_said(end: str, how: str, severity: str, says: str, tmp_path: Path) -> None:
    script = textwrap.dedent(SCRIPT.format(end=end))
    done = processes.python("-c", script, tmp_path / "run")
    assert done.returncode not in (0, 2), done.stderr
    code, line, data = checked(tmp_path / "run")
    assert code == 0 and line.endswith(says), line
    step = 25 if how == "killed" else 26  # what a flush settles has ended: the next step breaks
    assert (data["ended"]["by"], data["ended"]["step"]) == (how, step)
    (finding,) = (f for f in diagnose(tmp_path / "run") if f.rule == "run-ended")
    assert (finding.severity, finding.since_step) == (severity, step)
    assert done.returncode != -signal.SIGKILL or finding.evidence["ended_by"] == "killed"


def test_a_long_message_is_said_from_its_beginning_on(tmp_path: Path) -> None:
    says = "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 8.00 GiB"
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with contextlib.suppress(RuntimeError), pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        for _ in range(3):
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
        raise RuntimeError(f"{says}\n{'See the documentation. ' * 20}")
    text = CliRunner().invoke(app, ["check", str(tmp_path / "run")], env={"COLUMNS": "400"}).stdout
    assert all(f"RuntimeError: {says} ..." in line for line in text.splitlines()[:2]), text


@pytest.mark.parametrize("end", ["sys.exit(0)", "break"])
def test_a_run_that_ended_in_order_says_nothing(end: str, tmp_path: Path) -> None:
    script = textwrap.dedent(SCRIPT.format(end=end))
    assert processes.python("-c", script, tmp_path / "run").returncode == 0
    code, line, data = checked(tmp_path / "run")
    assert code == 0 and "Healthy through step 25: " in line and data["ended"] is None


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()


def test_a_run_that_goes_on_or_was_continued_has_not_ended(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(KeyError), pl.watch(model, optimizer, run=tmp_path / "run", every=2):  # noqa: PT012
        train(model, optimizer, 5)
        raise KeyError("lost")
    assert View(Run(tmp_path / "run")).ending is not None
    watch = pl.watch(model, optimizer, run=tmp_path / "run", every=2)
    train(model, optimizer, 5)
    watch.flush()
    assert "ended" in checked(tmp_path / "run")[2] and checked(tmp_path / "run")[2]["ended"] is None
    assert not [f for f in diagnose(tmp_path / "run") if f.rule == "run-ended"]
    watch.close()
    assert "Healthy through step 9: " in checked(tmp_path / "run")[1]


def test_a_block_that_is_left_by_a_successful_exit_has_not_failed(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(SystemExit), pl.watch(model, optimizer, run=tmp_path / "run", every=2):  # noqa: PT012
        train(model, optimizer, 5)
        sys.exit(0)
    assert View(Run(tmp_path / "run")).ending is None
