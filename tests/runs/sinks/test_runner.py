import logging
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plimsoll.errors import ArgumentError
from plimsoll.runs.writing.sink_feed import MAX_FAILURES, SinkRunner
from tests.support.patience import HANG_SECONDS
from tests.support.runs.sinks import Failing, Recorder, record

PATH = Path("runs/one")
# Long enough for any sink that does answer, however busy the machine.
Start = Callable[..., SinkRunner]


def run_through(runner: SinkRunner, *steps: int, flush: bool = False) -> None:
    """Puts these steps and closes."""
    runner.open(PATH, {})
    for step in steps:
        runner.put(record(step))
    if flush:
        runner.flush(HANG_SECONDS)
    runner.close(HANG_SECONDS)


def put_all(runner: SinkRunner, steps: range) -> None:
    for step in steps:
        runner.put(record(step))


@pytest.fixture
def start() -> Iterator[Start]:
    """Opens a runner on a sink, and lets the thread end after the test."""
    started: list[tuple[SinkRunner, Recorder]] = []

    def open_runner(sink: Recorder, **arguments: int) -> SinkRunner:
        runner = SinkRunner(sink, **arguments)
        started.append((runner, sink))
        runner.open(PATH, {"every": 10})
        return runner

    yield open_runner
    for runner, sink in started:
        sink.go_on.set()
        runner.close(HANG_SECONDS)
        assert runner._thread is None or not runner._thread.is_alive()


def test_the_sink_gets_everything_in_order_on_a_thread_of_its_own(start: Start) -> None:
    sink = Recorder()
    runner = start(sink)
    runner.put(record(1))
    runner.put(record(2))
    runner.flush(HANG_SECONDS)
    assert sink.calls == [("open", PATH, {"every": 10}), 1, 2, "flush"]
    runner.put(record(3))
    runner.close(HANG_SECONDS)
    assert sink.calls[4:] == [3, "close"]
    assert sink.threads == {"plimsoll-sink-Recorder"}
    assert (runner.dropped, runner.failed, runner.failure) == (0, 0, None)


def test_a_slow_sink_loses_the_oldest_and_training_never_waits(start: Start) -> None:
    sink = Recorder(waits=True)
    runner = start(sink, queue_steps=3)
    runner.put(record(0))
    assert sink.inside.wait(HANG_SECONDS)
    with pytest.warns(RuntimeWarning, match="Recorder: slower than training.* Training continues.") as caught:
        put_all(runner, range(1, 9))
    assert len(caught) == 1
    assert runner.dropped == 5
    sink.go_on.set()
    runner.close(HANG_SECONDS)
    assert sink.steps == [0, 6, 7, 8]


def test_a_sink_that_raises_is_said_once_and_gets_the_next_records() -> None:
    sink = Failing("put", OSError("no space"), only=range(2, 5))
    runner = SinkRunner(sink)
    with pytest.warns(RuntimeWarning) as caught:
        run_through(runner, *range(7))
    assert sink.steps == [0, 1, 5, 6]
    assert [str(warning.message) for warning in caught] == [
        "Failing: put failed: OSError: no space. Training continues."
    ]
    assert (runner.failed, runner.dropped) == (3, 0)
    assert runner.failure == "Failing: put failed: OSError: no space"


def test_where_warnings_are_errors_the_log_has_it(caplog: pytest.LogCaptureFixture) -> None:
    sink = Failing("put", ValueError("odd"), only=range(1))
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "plimsoll"):
        warnings.simplefilter("error")
        run_through(SinkRunner(sink), 0, 1)
    assert caplog.messages == ["Failing: put failed: ValueError: odd. Training continues."]
    assert sink.steps == [1]


@pytest.mark.filterwarnings("ignore:Failing:RuntimeWarning")
def test_after_ten_failures_in_a_row_it_is_switched_off(start: Start) -> None:
    sink = Failing("put", OSError("gone"))
    runner = start(sink)
    for step in range(MAX_FAILURES + 2):
        runner.put(record(step))
    runner.close(HANG_SECONDS)
    assert (
        runner.failure
        == "Failing: put failed: OSError: gone; after 10 failures in a row it is switched off for this run"
    )
    assert (runner.failed, runner.dropped) == (10, 2)
    assert sink.calls[-1] == "close"


@pytest.mark.filterwarnings("ignore:Failing:RuntimeWarning")
def test_who_waits_for_a_flush_is_let_go_when_it_is_switched_off() -> None:
    runner = SinkRunner(Failing("open", OSError("gone")))
    mark = threading.Event()
    runner._queue.append(mark)
    runner.open(PATH, {})
    assert mark.wait(HANG_SECONDS)
    runner.close(HANG_SECONDS)


@pytest.mark.filterwarnings("ignore:Failing:RuntimeWarning")
def test_a_success_between_failures_keeps_it_on(start: Start) -> None:
    sink = Failing("put", OSError("now and then"), only=range(9))
    runner = start(sink)
    for step in (*range(9), 9, *range(9), 10):
        runner.put(record(step))
    runner.close(HANG_SECONDS)
    assert sink.steps == [9, 10]
    assert runner.failed == 18


def test_a_sink_that_cannot_be_opened_is_switched_off_and_said_once() -> None:
    sink = Failing("open", ConnectionError("no server"))
    runner = SinkRunner(sink)
    with pytest.warns(RuntimeWarning) as caught:
        run_through(runner, 1, flush=True)
    runner.put(record(2))
    message = "Failing: open failed: ConnectionError: no server; it is switched off for this run"
    assert [str(warning.message) for warning in caught] == [f"{message}. Training continues."]
    assert runner.failure == message
    assert runner.dropped == 2
    assert len(sink.calls) == 1


@pytest.mark.parametrize("operation", ["flush", "close"])
def test_flush_and_close_of_the_sink_are_contained(operation: str) -> None:
    runner = SinkRunner(Failing(operation, SystemExit(3)))
    with pytest.warns(RuntimeWarning, match=f"Failing: {operation} failed: SystemExit: 3"):
        run_through(runner, flush=True)
    assert not runner._thread.is_alive()


def test_an_error_that_cannot_be_shown_is_contained() -> None:
    class RudeError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    with pytest.warns(RuntimeWarning, match="put failed: .*RudeError"):
        run_through(SinkRunner(Failing("put", RudeError())), 1)


def test_flush_and_close_come_back_from_a_sink_that_hangs(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    sink = Recorder(waits=True)
    runner = start(sink)
    runner.put(record(1))
    assert sink.inside.wait(HANG_SECONDS)
    runner.put(record(2))
    with pytest.warns(RuntimeWarning, match="Recorder: flush took more than 0.01 s"):
        runner.flush(0.01)
    runner.flush(0.01)  # said once: a second warning would be an error here, and be logged
    runner.close(0.01)
    assert caplog.messages == []
    assert runner.failure == (
        "Recorder: close took more than 0.01 s and is no longer waited for; 1 steps have not reached it"
    )
    runner.put(record(3))
    assert runner.dropped == 1
    sink.go_on.set()
    runner._thread.join(HANG_SECONDS)
    assert sink.calls[1:] == [1, 2, "close"], "what was late is finished in the background, without the flushes"


def test_a_sink_may_call_its_runner(start: Start) -> None:
    runner: SinkRunner

    class Calling(Recorder):
        def put(self, record: object) -> None:
            super().put(record)
            runner.flush(HANG_SECONDS)
            runner.close(HANG_SECONDS)

    sink = Calling()
    runner = start(sink)
    runner.put(record(1))
    runner._thread.join(HANG_SECONDS)
    assert not runner._thread.is_alive()
    assert sink.calls[1:] == [1, "close"]
    assert runner.failure is None


def test_a_signal_handler_may_put_while_the_same_thread_does(start: Start) -> None:
    sink = Recorder()
    runner = start(sink)
    with runner._changed:
        runner.put(record(1))
    runner.close(HANG_SECONDS)
    assert sink.steps == [1]


def test_without_a_thread_to_be_had_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    runner = SinkRunner(Recorder())
    with pytest.warns(RuntimeWarning, match="Recorder: could not start its thread .can't start new thread"):
        runner.open(PATH, {})
    runner.put(record(1))
    runner.flush()
    runner.close()
    assert runner.dropped == 1


def test_opened_twice_or_never_is_harmless(start: Start) -> None:
    sink = Recorder()
    runner = start(sink)
    runner.open(PATH, {})
    runner.close(HANG_SECONDS)
    runner.close(HANG_SECONDS)
    runner.open(PATH, {})
    assert [call[0] if isinstance(call, tuple) else call for call in sink.calls] == ["open", "close"]
    SinkRunner(Recorder()).close()


def test_a_queue_without_room_is_refused() -> None:
    with pytest.raises(ArgumentError, match="SinkRunner: expected queue_steps >= 1; got 0"):
        SinkRunner(Recorder(), queue_steps=0)


# ------------------------------------------------------------------------------------------------- whole processes

_PRELUDE = """
import os, sys, threading
from pathlib import Path
from plimsoll.runs.records import StepRecord
from plimsoll.runs.sinks import as_sink
from plimsoll.runs.writing.sink_feed import SinkRunner
inside = threading.Event()
"""

_HANGS = """
def hang(record):
    inside.set()
    threading.Event().wait()
runner = SinkRunner(as_sink(hang))
runner.open(Path("."), {})
runner.put(StepRecord(step=1))
inside.wait()
"""

# The other thread holds the runner's lock when the process is forked: in the child it is never released.
_FORKS = """
steps = []
runner = SinkRunner(as_sink(lambda record: steps.append(record.step)))
runner.open(Path("."), {})
held, release = threading.Event(), threading.Event()
def hold():
    with runner._changed:
        held.set()
        release.wait()
holder = threading.Thread(target=hold)
holder.start()
held.wait()
child = os.fork()
if child == 0:
    for step in range(1000):
        runner.put(StepRecord(step=step))
    runner.flush()
    runner.close()
    os._exit(0 if runner.dropped == 0 and runner.failure is None else 9)
_, status = os.waitpid(child, 0)
release.set()
holder.join()
runner.put(StepRecord(step=7))
runner.close(60)
sys.exit(os.waitstatus_to_exitcode(status) or (0 if steps == [7] else 8))
"""


@pytest.mark.parametrize("script", [_HANGS, _FORKS], ids=["a hanging sink does not hold up the end", "after a fork"])
def test_in_a_process_of_its_own(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PRELUDE + script], capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
