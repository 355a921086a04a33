"""However a watch ends, nothing of it stays in the model or in torch, and its run is readable with all steps."""

import contextlib
import errno
import linecache
import math
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import plimsoll as pl
from plimsoll.errors import ArgumentError
from plimsoll.precision import clamp_residuals
from plimsoll.runs import Run
from plimsoll.runs.storage import atomic_files, lock
from plimsoll.runs.writing import signal_deferral
from plimsoll.watch import Watch
from plimsoll.watch.hooks import torch_hooks
from tests.support import processes
from tests.support.left_behind import still_wrapped
from tests.support.patience import HANG_SECONDS, wait_until
from tests.support.watch.recording import batches, mlp, only_run, train

SOURCE = str(Path(pl.__file__).parent)
STEPS = 5


def hooks_of(model: nn.Module) -> int:
    registries = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, name)) for module in model.modules() for name in registries)


def watched(path: Path, steps: int = STEPS, **arguments: Any) -> tuple[nn.Module, Watch]:
    """A model that was trained so many steps, and the watch on it."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    watch = pl.watch(model, optimizer, run=path, every=1, **arguments)
    train(model, optimizer, batches(steps, 4, 8))
    return model, watch


def whole(path: Path, steps: int = STEPS) -> Run:
    """The run, which has all steps of everything and was closed."""
    run = only_run(path)
    assert run.closed and run.dropped == {}
    assert list(run.steps) == list(run.scalars("loss")[0]) == list(range(steps))
    for collection, name in (("weights", "0.weight"), ("gradients", "0.weight"), ("activations", "2:output")):
        assert list(run.series(collection, name, "count")[0]) == list(range(steps)), collection
    return run


def interrupted(call: Callable[[], object], at: float) -> int:
    """Calls, and raises KeyboardInterrupt at the `at`-th line of Plimsoll's that runs meanwhile; how many lines ran.

    Left out are lines that begin with "with": Python does not look for signals between a block and its end, where a
    tracer could interrupt. Left out is what sets and restores handlers, while these note all signals.
    """
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        name = frame.f_code.co_filename
        if not name.startswith(SOURCE) or name == signal_deferral.__file__:
            return None
        if event == "line" and not linecache.getline(name, frame.f_lineno).lstrip().startswith("with "):
            lines += 1
            if lines == at:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


def places(lines: int, count: int) -> Iterator[int]:
    """So many of the lines, evenly spread, and never the same residue only."""
    yield from sorted({1 + (i * lines) // count for i in range(count)})


@pytest.mark.parametrize("arguments", [{}, {"shadow_every": 2, "recorder": ("loss", "gradients")}], ids=str)
def test_a_close_that_is_interrupted_anywhere_can_be_taken_up_again(arguments: dict[str, Any], tmp_path: Path) -> None:
    _, watch = watched(tmp_path / "count", **arguments)
    lines = interrupted(watch.close, math.inf)
    assert lines > 50
    for place in places(lines, 20):
        path = tmp_path / str(place)
        model, watch = watched(path, **arguments)
        with contextlib.suppress(KeyboardInterrupt):
            interrupted(watch.close, place)
        watch.close()
        assert watch.closed and hooks_of(model) == 0 and still_wrapped() == [], place
        whole(path)


def test_a_guard_s_hooks_go_too_though_its_close_is_interrupted(tmp_path: Path) -> None:
    def guarded(path: Path) -> tuple[nn.Module, Watch]:
        model, watch = watched(path)
        guard = pl.Guard(watch, ["clamp"], dry_run=False)
        guard._remedies["clamp"]._clamps.append(clamp_residuals(model, ["0", "2"], "fp16"))  # as it does when it acts
        return model, watch

    lines = interrupted(guarded(tmp_path / "count")[1].close, math.inf)
    for place in places(lines // 8, 10):  # the guard goes first
        model, watch = guarded(tmp_path / str(place))
        with contextlib.suppress(KeyboardInterrupt):
            interrupted(watch.close, place)
        watch.close()
        assert hooks_of(model) == 0 and still_wrapped() == [] and torch_hooks.listeners() == [], place
        whole(tmp_path / str(place))


def test_a_watch_that_is_interrupted_while_it_begins_leaves_nothing(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    begun: list[Watch] = []

    def begin(path: Path) -> Callable[[], None]:
        return lambda: begun.append(pl.watch(model, optimizer, run=path, every=1))

    lines = interrupted(begin(tmp_path / "count"), math.inf)
    begun.pop().close()
    for place in places(lines, 20):
        with contextlib.suppress(KeyboardInterrupt):
            interrupted(begin(tmp_path / str(place)), place)
        for watch in begun:  # the last line was still to come
            watch.close()
        begun.clear()
        assert hooks_of(model) == 0 and still_wrapped() == [], place


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError])
def test_a_block_that_is_left_by_an_exception_is_closed(kind: type[BaseException], tmp_path: Path) -> None:
    model, watch = watched(tmp_path / "run")
    with pytest.raises(kind), watch:
        raise kind
    assert hooks_of(model) == 0 and still_wrapped() == []
    assert [e.message for e in whole(tmp_path / "run").events() if e.kind == "trigger"] == [f"{kind.__name__}: "]


def test_an_exception_whose_text_cannot_be_made_is_the_one_that_is_seen(tmp_path: Path) -> None:
    class UntoldError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    model, watch = watched(tmp_path / "run")
    with pytest.raises(UntoldError), watch:
        raise UntoldError
    assert hooks_of(model) == 0
    (event,) = [e for e in whole(tmp_path / "run").events() if e.kind == "trigger"]
    assert event.message == "UntoldError: its text cannot be shown (RuntimeError)"


def test_a_generator_that_is_closed_closes_its_watch(tmp_path: Path) -> None:
    models: list[nn.Module] = []

    def training() -> Iterator[int]:
        model, watch = watched(tmp_path / "run")
        models.append(model)
        with watch:
            yield 1

    steps = training()
    next(steps)
    steps.close()
    assert hooks_of(models[0]) == 0
    assert pl.diagnose(whole(tmp_path / "run")) is not None


def test_closed_inside_a_hook_training_goes_on(tmp_path: Path) -> None:
    model, watch = watched(tmp_path / "run")
    hook = model[0].register_forward_hook(lambda *_: watch.close())  # type: ignore[index]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert len(train(model, optimizer, batches(2, 4, 8))) == 2
    hook.remove()
    assert hooks_of(model) == 0 and still_wrapped() == []
    whole(tmp_path / "run")


def test_closed_by_what_is_called_at_the_close(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, watch = watched(tmp_path / "run")
    calls: list[str] = []

    def fails() -> None:
        calls.append("fails")
        raise OSError("nothing to be done")

    def closes() -> None:
        calls.append("closes")
        watch.close()

    watch.beside.at_close(fails)
    watch.beside.at_close(closes)
    watch.close()
    assert calls == ["closes", "fails"] and hooks_of(model) == 0
    assert "close failed and was left out (OSError: nothing to be done)" in caplog.text
    whole(tmp_path / "run")


def test_closed_by_many_threads_at_once(tmp_path: Path) -> None:
    model, watch = watched(tmp_path / "run")
    start, ended = threading.Barrier(4), []

    def close() -> None:
        start.wait(HANG_SECONDS)
        watch.close()
        ended.append(whole(tmp_path / "run").closed)  # whoever has closed finds it closed

    threads = [threading.Thread(target=close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert ended == [True] * 4 and hooks_of(model) == 0 and still_wrapped() == []


# -- signals


class Handler:
    """A user's own handler of a signal, which counts."""

    def __init__(self) -> None:
        self.closed: list[bool] = []
        self.watch: Watch | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        assert self.watch is not None
        self.closed.append(self.watch.closed and Run(self.watch.path).closed)


@pytest.fixture
def handlers() -> Iterator[None]:
    """The handlers that the test was started with stand again after it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def raised_while_settling(number: int, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a signal come in the middle of the close, once the hooks are gone and nothing was written."""
    shut = type(watch._session).shut

    def raising(session: Any) -> None:
        signal.raise_signal(number)
        shut(session)

    monkeypatch.setattr(type(watch._session), "shut", raising)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_the_script_s_own_handler_is_called_once_the_run_is_written(
    number: signal.Signals, tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = Handler()
    signal.signal(number, handler)
    model, handler.watch = watched(tmp_path / "run")
    raised_while_settling(number, handler.watch, monkeypatch)
    handler.watch.close()
    assert handler.closed == [True] and signal.getsignal(number) is handler
    assert hooks_of(model) == 0 and still_wrapped() == []
    whole(tmp_path / "run")


def test_python_s_own_handler_raises_once_the_run_is_written(
    tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model, watch = watched(tmp_path / "run")
    raised_while_settling(signal.SIGINT, watch, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        watch.close()
    assert hooks_of(model) == 0 and still_wrapped() == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is before
    whole(tmp_path / "run")


def test_a_signal_that_is_ignored_stays_ignored(
    tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
        _, watch = watched(tmp_path / str(number))
        raised_while_settling(number, watch, monkeypatch)
        watch.close()
        assert signal.getsignal(number) is signal.SIG_IGN
        whole(tmp_path / str(number))


def test_parts_that_are_being_merged_when_a_signal_comes_are_waited_for(
    tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the folder would be given back meanwhile."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _, watch = watched(tmp_path / "run")
    worker, waited, closed = watch._session.writer._worker, threading.Event(), list[bool]()
    watch.flush()

    class Merging(threading.Thread):
        def run(self) -> None:
            wait_until(lambda: waited.is_set() or worker._last.done.is_set())
            with pytest.raises(ArgumentError, match="expected no other writer"):
                lock.Lock(tmp_path / "run", 0)
            closed.append(Run(tmp_path / "run").closed)

        def join(self, timeout: float | None = None) -> None:
            waited.set()
            super().join(timeout)

    monkeypatch.setattr("plimsoll.runs.writing.worker._HURRIED_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(signal_deferral, "SECONDS", HANG_SECONDS)
    monkeypatch.setattr(lock, "_READ_SECONDS", 0.0)  # its own writer waits for this thread
    worker._flusher._compacting = Merging()
    worker._flusher._compacting.start()
    raised_while_settling(signal.SIGINT, watch, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        watch.close()
    assert closed == [False]
    whole(tmp_path / "run")


class Disk:
    """A disk that takes no file until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on, self.reached = threading.Event(), threading.Event()
        monkeypatch.setattr(atomic_files, "open_for_writing", self.open)

    def open(self, path: Path) -> object:
        self.reached.set()
        assert self.go_on.wait(HANG_SECONDS)
        return path.open("wb")


def test_a_second_signal_ends_a_close_at_once_and_the_next_close_goes_on(
    tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(signal_deferral._state, "impatient", False)
    monkeypatch.setattr(signal_deferral, "SECONDS", HANG_SECONDS)  # only the second signal ends the waiting
    model, watch = watched(tmp_path / "run")
    watch.flush()
    disk = Disk(monkeypatch)

    def press() -> None:
        main = threading.main_thread().ident
        assert main is not None and disk.reached.wait(HANG_SECONDS)
        wait_until(lambda: signal_deferral._state.active is not None)
        wait_until(lambda: signal.getsignal(signal.SIGINT) is not signal.default_int_handler)
        signal.pthread_kill(main, signal.SIGINT)
        wait_until(signal_deferral.is_hurried)
        signal.pthread_kill(main, signal.SIGINT)

    presses = threading.Thread(target=press)
    presses.start()
    with pytest.raises(KeyboardInterrupt):
        watch.close()
    presses.join(HANG_SECONDS)
    assert hooks_of(model) == 0 and still_wrapped() == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setattr(lock, "_READ_SECONDS", 0.05)  # no reader waits for such a disk
    assert list(only_run(tmp_path / "run").steps) == list(range(STEPS))  # readable as it is
    disk.go_on.set()
    watch.close()
    whole(tmp_path / "run")


def test_a_disk_that_hangs_holds_a_signal_up_for_a_bounded_time(
    tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(signal_deferral, "SECONDS", 0.05)
    model, watch = watched(tmp_path / "run")
    disk = Disk(monkeypatch)
    raised_while_settling(signal.SIGINT, watch, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        watch.close()
    assert hooks_of(model) == 0
    assert "could not be closed within 0.05 s of a signal; its last records may be lost" in caplog.text
    disk.go_on.set()
    watch._session.writer._worker._thread.join(HANG_SECONDS)
    whole(tmp_path / "run")


SCRIPT = """
    import os, signal, sys, threading, torch, plimsoll as pl
    from pathlib import Path
    from plimsoll.runs.storage import atomic_files, lock
    from plimsoll.runs.writing import signal_deferral as deferral
    deferral.SECONDS = 300.0  # it is not time that is tried here
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    w = pl.watch(model, optimizer, run=sys.argv[1], every=1)
    for step in range(301):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    written, into = threading.Event(), atomic_files.open_for_writing
    def slow(path):
        active = deferral._state.active  # on a slow machine the run may be written before it is closed, too
        if active is not None and signal.getsignal(signal.SIGINT) == active.handle and not written.is_set():
            written.set()
            os.kill(os.getpid(), {signal})
            while not deferral.is_hurried():
                threading.Event().wait(0.005)
        return into(path)
    atomic_files.open_for_writing = slow
    {end}
"""


@pytest.mark.parametrize("end", ["w.close()", "pass"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_at_the_end_of_a_training_takes_no_step(name: str, end: str, tmp_path: Path) -> None:
    script = textwrap.dedent(SCRIPT.format(signal=f"signal.{name}", end=end))
    ended = processes.python("-c", script, tmp_path / "run")
    number = getattr(signal, name)
    # After the script's last line Python itself only reports a KeyboardInterrupt.
    assert ended.returncode in ({-number} if name == "SIGTERM" else {1, -number} if end != "pass" else {0, 1, -number})
    assert name == "SIGTERM" or "KeyboardInterrupt" in ended.stderr
    run = only_run(tmp_path / "run")
    assert run.closed and list(run.steps) == list(run.scalars("loss")[0]) == list(range(301))


def test_all_watches_are_closed_though_a_signal_comes_at_the_first(tmp_path: Path) -> None:
    script = SCRIPT.replace(
        "for step", "other = torch.nn.Linear(4, 2)\n    v = pl.watch(other, run=sys.argv[2])\n    for step"
    ).replace("optimizer.step()", "optimizer.step(); other(torch.randn(3, 4)).sum().backward(); v.step()")
    script = textwrap.dedent(script.format(signal="signal.SIGINT", end="pass"))
    ended = processes.python("-c", script, tmp_path / "run", tmp_path / "other")
    assert "KeyboardInterrupt" in ended.stderr
    assert [only_run(tmp_path / name).closed for name in ("run", "other")] == [True, True]
    assert len(only_run(tmp_path / "other").scalars("loss")[0]) == 301


TRAINING = """
import os, signal, sys, torch
from plimsoll.watch.hooks import torch_hooks
torch_hooks._SIGNAL_SECONDS = 300.0  # it is not time that is tried here
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1000):
    optimizer.zero_grad()
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    if step == 25:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_script_that_a_signal_ends_has_what_it_had_done(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    arguments = ("-m", "plimsoll", "run", "--every", "5", "--output", "run", "train.py", name)
    ended = processes.python(*arguments, cwd=tmp_path)
    assert ended.returncode in ({-signal.SIGTERM} if name == "SIGTERM" else {1, -signal.SIGINT, 130}), ended.stderr
    run = only_run(tmp_path / "run")
    reason = "signal" if name == "SIGTERM" else "exception"
    assert [e.details["reason"] for e in run.events() if e.kind == "trigger"] == [reason]
    assert list(run.scalars("loss")[0])[:25] == list(range(25)) and list(run.steps)[:5] == [0, 5, 10, 15, 20]


def test_a_forked_child_that_is_ended_says_nothing_of_its_parent_s_run(tmp_path: Path) -> None:
    script = """
        import os, signal, sys, torch, plimsoll as pl
        model = torch.nn.Linear(4, 2)
        with pl.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), run=sys.argv[1], every=1):
            if (child := os.fork()) == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    ended = processes.python("-c", textwrap.dedent(script), tmp_path / "run")
    assert ended.stdout == f"{-signal.SIGTERM}\n" and "closed" not in ended.stderr, ended.stderr
    assert not [e for e in only_run(tmp_path / "run").events() if e.kind == "trigger"]


def test_a_second_sigterm_in_training_does_not_wait(
    tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: calls.append(number))
    go_on = threading.Event()
    monkeypatch.setattr(torch_hooks, "_SIGNAL_SECONDS", HANG_SECONDS)
    _, watch = watched(tmp_path / "run")

    def flushing(*_: object) -> None:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGTERM)  # while the first waits for this
        assert go_on.wait(HANG_SECONDS)

    monkeypatch.setattr(watch._session.writer, "flush", flushing)
    releasing = threading.Thread(target=lambda: (wait_until(lambda: calls), go_on.set()))
    releasing.start()
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: len(calls) == 2)
    releasing.join(HANG_SECONDS)
    monkeypatch.undo()
    watch.close()
    assert calls == [signal.SIGTERM] * 2
    whole(tmp_path / "run")


@pytest.mark.parametrize("step", ["3", 1.5, -1, True, math.nan, math.inf, 1 << 63, [3]], ids=str)
def test_a_first_step_that_cannot_be_is_refused_and_changes_nothing(step: object, tmp_path: Path) -> None:
    model, watch = watched(tmp_path / "run")
    before = hooks_of(model)
    with pytest.raises(ArgumentError, match=r"watch: expected start_step to be an integer from 0 to 2\^62; got start_"):
        pl.watch(model, run=tmp_path / "run", start_step=step)  # type: ignore[arg-type]
    assert not watch.closed and hooks_of(model) == before
    watch.close()


def test_a_path_that_cannot_be_is_refused(tmp_path: Path) -> None:
    model = mlp()
    for path in (f"{tmp_path}/a\0b", "", b"run", None):
        with pytest.raises(ArgumentError, match="watch: expected the path of a folder"):
            pl.watch(model, run=path)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"watch: expected sinks to be a list; got sinks='wandb'\."):
        pl.watch(model, run=tmp_path / "run", sinks="wandb")
    assert hooks_of(model) == 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS], ids=errno.errorcode.__getitem__)
def test_a_disk_that_takes_no_more_stops_no_training(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> object:
        raise OSError(error, os.strerror(error), str(path))

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = pl.watch(model, optimizer, run=tmp_path / "run", every=1)
    train(model, optimizer, batches(STEPS, 4, 8))
    assert watch.flush()
    monkeypatch.setattr(atomic_files, "open_for_writing", refuse)
    assert len(train(model, optimizer, batches(3, 4, 8))) == 3
    assert not watch.flush()
    watch.close()
    assert hooks_of(model) == 0 and caplog.text.count(f"cannot be written ([Errno {error}]") == 1
    assert list(only_run(tmp_path / "run").steps) == list(range(STEPS))
