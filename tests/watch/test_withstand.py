"""P2: whatever fails, training goes on, nothing hangs, and what was lost is reported."""

import dataclasses
import gc
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import textwrap
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import plimsoll as pl
from plimsoll.report import summary
from plimsoll.runs import Run
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.session import WatchSession, nothing_recorded, watches_muted
from tests.support import processes
from tests.support.patience import HANG_SECONDS
from tests.support.watch.recording import batches, mlp, only_run, train


def test_a_failure_in_a_tap_is_contained_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel today")

    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        train(model, optimizer, batches(1, 4, 8))
        monkeypatch.setattr("plimsoll.kernels.measurer", lambda _: fail)
        monkeypatch.setattr("plimsoll.kernels.measure_each", fail)
        train(model, optimizer, batches(3, 4, 8))
        monkeypatch.undo()
        train(model, optimizer, batches(1, 4, 8))
    run = only_run(tmp_path / "run")
    assert sorted({step for step, *_ in run.spectra("gradients")}) == [0, 4]
    failures = [event.message for event in run.events() if event.kind == "failure"]
    assert failures and all("RuntimeError: no kernel today" in message for message in failures)
    assert caplog.text.count("Taps.see failed and was left out") == 1  # said once, not at every step


def test_a_run_whose_gradients_and_weights_all_failed_is_not_called_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel today")

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr("plimsoll.kernels.measure_each", fail)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        train(model, optimizer, batches(3, 4, 8))
    (found,) = [finding for finding in pl.diagnose(tmp_path / "run") if finding.rule == "records-lost"]
    assert found.severity == "warning" and found.evidence["not_recorded"] == "parameter gradients, weights, updates"
    summed_up = summary(tmp_path / "run")
    assert summed_up.state == "warning"
    assert summed_up.verdict.startswith("Warning: the watch failed to record parameter gradients, weights")
    assert "no kernel today" in summed_up.verdict


def test_a_failure_that_is_over_soon_is_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel today")

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        monkeypatch.setattr("plimsoll.kernels.measure_each", fail)
        train(model, optimizer, batches(1, 4, 8))
        monkeypatch.undo()
        train(model, optimizer, batches(2, 4, 8))
    (found,) = [finding for finding in pl.diagnose(tmp_path / "run") if finding.rule == "records-lost"]
    assert found.severity == "info" and summary(tmp_path / "run").state == "healthy"


def test_a_folder_that_is_removed_under_way(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1) as w:
        train(model, optimizer, batches(2, 4, 8))
        w.flush()
        shutil.rmtree(tmp_path / "run")
        losses = train(model, optimizer, batches(3, 4, 8))
        w.flush()
    assert len(losses) == 3


def test_sinks_that_raise_and_hang_do_not_matter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stop = threading.Event()
    steps: list[int] = []

    def raises(record: object) -> None:
        raise OSError("the tracker is down")

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sinks = [raises, lambda record: stop.wait(), lambda record: steps.append(record.step)]
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1, sinks=sinks) as w:
        train(model, optimizer, batches(4, 4, 8))
        w.flush(1.0)
        stop.set()
    assert len(only_run(tmp_path / "run").steps) == 4
    assert set(steps) == {0, 1, 2, 3}
    assert "the tracker is down" in caplog.text


def test_a_storm_of_nans(tmp_path: Path) -> None:
    model, data = mlp(), batches(60, 4, 8)
    for x in data[5:]:
        x.fill_(math.nan)
    optimizer = torch.optim.Adam(model.parameters())
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        train(model, optimizer, data)
    run = only_run(tmp_path / "run")
    assert len(run.steps) == 60 and run.spectrum("weights", "0.weight", 59).nans == 128
    assert len(run.events()) < 20


def test_a_sample_has_a_bound_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1, max_tensors=10):
        train(model, optimizer, batches(2, 4, 8))
    run = only_run(tmp_path / "run")
    assert [event.kind for event in run.events()].count("capped") == 1
    assert 0 < len(list(run.spectra(steps=slice(0, 1)))) <= 10
    assert "max_tensors=10" in caplog.text


def test_ten_thousand_parameters_and_ten_million_steps(tmp_path: Path) -> None:
    model = nn.ParameterList([nn.Parameter(torch.randn(2)) for _ in range(10_000)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start, watched = 10_000_000, ("weights", "gradients")
    with pl.watch(model, optimizer, run=tmp_path / "run", every=2, start_step=start, collect=watched) as w:
        for _ in range(3):
            optimizer.zero_grad()
            torch.stack(list(model)).sum().backward()
            optimizer.step()
            w.flush()  # two samples of this size are more than the writer lets wait
    run = only_run(tmp_path / "run")
    assert list(run.steps) == [start, start + 2]
    assert len(run.tensors["gradients"]) == 10_000
    assert run.spectrum("gradients", "9999", start + 2).sum == 2.0


def test_memory_does_not_grow_over_a_thousand_steps(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(2, 4)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=10, recorder=("loss", "nonfinite", "gradients")) as w:
        counts = []
        for steps in (200, 800):
            train(model, optimizer, [x] * steps)
            w.flush()
            gc.collect()
            tensors = sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())
            counts.append((len(gc.get_objects()), tensors, w.recorder_bytes))
    (objects, tensors, ring), (objects_later, tensors_later, ring_later) = counts
    assert objects_later - objects < 200  # one forgotten object in four steps would show
    assert tensors_later <= tensors + 8 and ring_later <= ring
    assert len(only_run(tmp_path / "run").steps) == 100


def test_pandas_is_not_imported_by_a_watched_training(tmp_path: Path) -> None:
    (tmp_path / "pandas.py").write_text("from pathlib import Path\nPath(__file__).with_name('imported').touch()\n")
    script = """
        import sys, torch, plimsoll as pl
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.watch(model, optimizer, run=sys.argv[1], every=1) as w:
            for step in range(3):
                optimizer.zero_grad(); model(torch.randn(3, 4)).sum().backward(); optimizer.step()
                w.log(accuracy=0.5)
                w.flush()
    """
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{processes.PYTHONPATH}"}
    assert processes.python("-c", textwrap.dedent(script), tmp_path / "run", env=environment).returncode == 0
    assert not (tmp_path / "imported").exists()  # pyarrow's own conversion imports it: 50 MB that nobody uses
    assert len(only_run(tmp_path / "run").steps) == 3


def test_killed_at_any_moment_the_run_is_readable(tmp_path: Path) -> None:
    script = """
        import os, sys, torch, plimsoll as pl
        print(os.getpid())
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        w = pl.watch(model, optimizer, run=sys.argv[1], every=1)
        for step in range(10**6):
            optimizer.zero_grad(); model(torch.randn(3, 4)).sum().backward(); optimizer.step()
            if step % 50 == 49:
                w.flush()
                print(step, flush=True)
    """
    command = [processes.commands() / "python", "-c", textwrap.dedent(script), tmp_path / "run"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid, *_, flushed = [int(process.stdout.readline()) for _ in range(5)]
    os.kill(pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    run = Run(tmp_path / "run")
    assert set(range(flushed + 1)) <= set(run.steps)
    model = nn.Linear(4, 2)  # and it goes on, whatever lock the killed one has left
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1, resume=True) as w:
        assert w.step_index > flushed


def _train_in_child(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, batches(3, 4, 8))


IN_A_CHILD = """
import os, signal, sys, threading
from pathlib import Path
import torch
from torch import nn
import plimsoll as pl
from plimsoll.watch.hooks import torch_hooks

torch.set_num_threads(2)
torch.ones(1 << 20).mul_(2)  # torch's threads run, and no child has them
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train():
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()

w = pl.watch(model, optimizer, run=sys.argv[1], every=1)
train()
w.flush()
folder = Path(sys.argv[1])
before = {path: path.read_bytes() for path in folder.rglob("*.parquet")}
child = os.fork()
if child == 0:
    signal.alarm(int(sys.argv[2]))  # ends it where it hangs
    backward = torch.autograd.backward
    train()
    w.log(extra=1.0)
    w.request()
    print(w.flush(), w.closed, torch_hooks.listeners(), backward.__module__, [t.name for t in threading.enumerate()])
    sys.exit(0)  # through all exit handlers
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), w.closed)
assert before == {path: path.read_bytes() for path in folder.rglob("*.parquet")}
train()
w.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_nothing_of_a_watch_runs_in_a_forked_child(tmp_path: Path) -> None:
    """Torch's own threads are not there, so that only what is small enough for one thread can be computed."""
    done = processes.python("-W", "ignore", "-c", IN_A_CHILD, tmp_path / "run", round(HANG_SECONDS / 2))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True True [] torch.autograd ['MainThread']", "0 False"]
    run = only_run(tmp_path / "run")
    assert list(run.steps) == list(range(6)) and run.closed and "extra" not in run.scalar_names
    assert not run.dropped


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_process_leaves_the_run_alone(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.spawn._python_exe", os.fsencode(processes.commands() / "python"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torch's own threads do not outlive a fork
    try:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
            train(model, optimizer, batches(2, 4, 8))
            child = multiprocessing.get_context(method).Process(target=_train_in_child, args=(model,))
            child.start()
            child.join(HANG_SECONDS)
            assert child.exitcode == 0
            train(model, optimizer, batches(1, 4, 8))
        assert list(only_run(tmp_path / "run").steps) == [0, 1, 2]
    finally:
        torch.set_num_threads(threads)


def test_an_output_that_cannot_be_looked_at_stops_nothing(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Output:
        value: torch.Tensor
        unset: torch.Tensor = dataclasses.field(init=False)

    class Inner(nn.Linear):
        def forward(self, x: torch.Tensor) -> object:  # type: ignore[override]
            return Output(super().forward(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).value

    model = Outer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the failure is said
        with pl.watch(model, optimizer, run=tmp_path / "run", every=1, quiet=True):
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
    assert Run(tmp_path / "run").tensors["gradients"] == ("inner.weight", "inner.bias")


def test_what_mutes_a_watch_may_overlap_and_nest(tmp_path: Path) -> None:
    model = mlp()
    with pl.watch(model, run=tmp_path / "run", every=1, quiet=True):
        first, second = nothing_recorded(), nothing_recorded()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert WatchSession.repeating  # the second is not over
        second.__exit__(None, None, None)
        assert not WatchSession.repeating
        with watches_muted(), watches_muted():
            pass
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(4, next(model.parameters()).shape[1])).sum().backward()
        optimizer.step()
    assert "activations" in Run(tmp_path / "run").tensors


def test_a_scaler_whose_step_calls_that_of_its_base_steps_once(tmp_path: Path) -> None:
    class Mine(torch.amp.GradScaler):
        def step(self, optimizer: torch.optim.Optimizer, *args: object, **kwargs: object) -> float | None:
            return super().step(optimizer, *args, **kwargs)

    model, scaler = mlp(), Mine("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1, scaler=scaler, quiet=True):
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(4, next(model.parameters()).shape[1])).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    run = Run(tmp_path / "run")
    assert run.steps == [0, 1, 2] and not [event for event in run.events() if event.kind == "skip"]


def test_a_watch_that_closes_within_a_trial_is_not_notified_after_it(tmp_path: Path) -> None:
    model = mlp()
    watch = pl.watch(model, run=tmp_path / "run", quiet=True)
    with torch_hooks.exclusive(torch_hooks.TrainingEvents()):
        watch.close()
    assert torch_hooks.listeners() == [] and torch.autograd.backward.__module__ == "torch.autograd"


def test_a_watch_that_cannot_begin_leaves_no_writer_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = mlp()
    with monkeypatch.context() as patch:
        patch.setattr("plimsoll.watch.handle._forget_compiled", lambda _session: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            pl.watch(model, run=tmp_path / "run", quiet=True)
    pl.watch(model, run=tmp_path / "run", quiet=True).close()
