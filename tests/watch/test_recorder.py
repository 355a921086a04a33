"""The flight recorder: the steps before something breaks are there, and only then."""

import math
import signal
import textwrap
import time
from pathlib import Path

import pytest
import torch

import plimsoll as pl
from plimsoll.runs import Run
from tests.support import processes
from tests.support.watch.recording import batches, mlp, only_run, same, train


def reasons(run: Run) -> list[tuple[str, int]]:
    return [(str(event.details["reason"]), event.step) for event in run.events() if event.kind == "trigger"]


def test_a_loss_has_the_time_at_which_its_step_ended(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begun: list[float] = []
    with pl.watch(model, optimizer, run=tmp_path / "run", every=10):  # whose numbers are written ten steps at a time
        for x in batches(21, 4, 8):
            begun.append(time.time())
            train(model, optimizer, [x])
        begun.append(time.time())
    _, times = only_run(tmp_path / "run").scalar_times("loss")
    assert len(times) == 21
    assert all(first <= end for first, end in zip(begun, times, strict=False))
    assert all(end <= after for end, after in zip(times, begun[2:], strict=False))  # the next step ends a step


def test_collections_of_the_last_steps_are_written_when_the_loss_breaks(tmp_path: Path) -> None:
    model, data = mlp(), batches(16, 4, 8)
    data[15][0, 0] = math.nan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorder = ("loss", "scale", "nonfinite", "gradients")
    with pl.watch(model, optimizer, run=tmp_path / "run", every=10, recorder=recorder, recorder_steps=4) as w:
        for index, x in enumerate(data):
            train(model, optimizer, [x])
            if index == 14:
                kept = model[0].weight.grad.clone()
            if index == 12:
                assert w.recorder_bytes > 0
    run = only_run(tmp_path / "run")
    steps = sorted({step for step, *_ in run.spectra("gradients")})
    assert steps == [0, 10, 12, 13, 14, 15]  # two by schedule, four from the ring
    assert same(run.spectrum("gradients", "0.weight", 14), kept)
    assert run.spectrum("gradients", "0.weight", 15).nans > 0
    assert sorted({step for step, *_ in run.spectra("weights")}) == [0, 10]
    assert reasons(run)[:2] == [("loss", 15), ("nonfinite", 15)]


def test_nothing_is_written_while_nothing_breaks(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=10, recorder=("loss", "gradients")):
        train(model, optimizer, batches(30, 4, 8))
    run = only_run(tmp_path / "run")
    assert sorted({step for step, *_ in run.spectra("gradients")}) == [0, 10, 20]
    assert reasons(run) == []
    with pytest.raises(pl.NotRecordedError, match="nonfinite"):
        run.scalars("nonfinite")


def test_a_spike_and_a_falling_scale(tmp_path: Path) -> None:
    model, data = mlp(), batches(40, 4, 8)
    data[30] *= 100
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pl.watch(model, optimizer, run=tmp_path / "spike", every=10):
        train(model, optimizer, data)
    assert reasons(only_run(tmp_path / "spike")) == [("spike", 30)]
    data = batches(6, 4, 8)
    data[3][0, 0] = math.inf
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with pl.watch(model, optimizer, run=tmp_path / "scale", every=10):
        train(model, optimizer, data, scaler)
    found = reasons(only_run(tmp_path / "scale"))
    assert ("scale", 4) in found and ("nonfinite", 3) in found


def test_one_reason_fires_once_in_a_while(tmp_path: Path) -> None:
    model, data = mlp(), batches(40, 4, 8)
    for x in data[5:]:
        x[0, 0] = math.nan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=10, recorder_steps=10):
        train(model, optimizer, data)
    assert [step for reason, step in reasons(only_run(tmp_path / "run")) if reason == "loss"] == [5, 15, 25, 35]


def test_an_exception_out_of_the_block(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data: list[object] = [*batches(3, 4, 8), "no tensor"]
    watch = pl.watch(model, optimizer, run=tmp_path / "run", every=10)
    with pytest.raises(TypeError, match="must be Tensor"), watch:
        train(model, optimizer, data)
    run = only_run(tmp_path / "run")
    assert reasons(run) == [("exception", 3)]  # whose forward had begun
    assert list(run.scalars("loss")[0]) == [0, 1, 2]


SCRIPT = """
    import os, signal, sys, torch, plimsoll as pl
    from plimsoll.watch.hooks import torch_hooks
    torch_hooks._SIGNAL_SECONDS = 300.0  # it is not time that is tried here
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pl.watch(model, optimizer, run=sys.argv[1], every=10)
    for step in range(1000):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        if step == 25:
            {end}
"""


@pytest.mark.parametrize(
    ("end", "status", "reason"),
    [
        ("raise KeyError('lost')", {1}, "exception"),
        ("os.kill(os.getpid(), signal.SIGTERM)", {-signal.SIGTERM}, "signal"),
        ("os.kill(os.getpid(), signal.SIGINT)", {1, -signal.SIGINT}, "exception"),  # 1 once torch's compiler is loaded
    ],
)
def test_the_end_of_the_process(end: str, status: set[int], reason: str, tmp_path: Path) -> None:
    script = textwrap.dedent(SCRIPT.format(end=end))
    result = processes.python("-c", script, tmp_path / "run")
    assert result.returncode in status, result.stderr
    run = only_run(tmp_path / "run")
    assert [found for found, _ in reasons(run)] == [reason]
    assert list(run.scalars("loss")[0])[:25] == list(range(25))
