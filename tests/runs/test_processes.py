"""Runs and the ends of processes: kill, exit, fork."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plimsoll.runs import Event, Run, RunWriter, Scalars
from tests.support import processes
from tests.support.patience import HANG_SECONDS
from tests.support.runs import making

WRITER = """
import os, sys, time
import numpy as np
from plimsoll.runs import Batch, Event, RunWriter, Scalars
from tests.support.runs import making
row = making.rows_of(making.tensors(1))
writer = RunWriter(sys.argv[1], flush_seconds=0.02, compact_above=8)
ids = np.array([writer.series("weights", f"w{i}", format="fp32") for i in range(5)])
step = int(sys.argv[2])
print(os.getpid(), flush=True)
while True:
    writer.write(Batch(step=step, rows=row.copy(), index=np.zeros(5, np.int64), series=ids))
    writer.write(Scalars(step=step, values={"loss": float(step)}))
    if step % 50 == 0:
        writer.flush()
        print(step, flush=True)
    step += 1
    time.sleep(0.0002)
"""


def killed(path: Path, first: int, after: float) -> int:
    """Writes in another process from step `first` on, and kills it; the last step that was reported as on disk."""
    with subprocess.Popen(
        [processes.commands() / "python", "-c", WRITER, str(path), str(first)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid, _ = (int(process.stdout.readline()) for _ in range(2))
        time.sleep(after)  # the moment of the kill is what is tried
        os.kill(pid, signal.SIGKILL)
        lines = [line for line in process.stdout.read().splitlines() if line.isdigit()]
        process.wait()  # until the writer has given its lock back, too
    return int(lines[-1]) if lines else first


def test_a_run_survives_kill_at_any_moment(tmp_path: Path) -> None:
    generator, last = random.Random(7), -1
    for _ in range(3):
        flushed = killed(tmp_path, last + 1, generator.uniform(0.0, 0.4))
        run = Run(tmp_path)
        assert not run.problems and not run.closed
        assert run.steps == list(range(run.steps[-1] + 1)) and run.steps[-1] >= flushed > last
        assert run.series("weights", "w3", "count")[0].tolist() == run.steps
        loss = run.scalars("loss")
        assert loss[0].tolist() == loss[1].tolist() and abs(len(loss[0]) - len(run.steps)) <= 200
        last = run.steps[-1]
    RunWriter(tmp_path).close()
    assert Run(tmp_path).steps == list(range(last + 1)) and Run(tmp_path).closed


@pytest.mark.parametrize("ending", ["raise ValueError", "writer = None", "signal"])
def test_a_writer_that_nobody_closes_is_closed_at_exit(tmp_path: Path, ending: str) -> None:
    script = f"""
import os, signal
from plimsoll.runs import Run, RunWriter, Scalars
writer = RunWriter({str(tmp_path)!r}, flush_seconds=3600)
writer.write(Scalars(step=1, values={{"loss": 1.0}}))
if {ending!r} == "signal":
    os.kill(os.getpid(), signal.SIGINT)
{ending if ending != "signal" else ""}
"""
    subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, timeout=HANG_SECONDS)
    run = Run(tmp_path)
    assert run.closed and run.scalars("loss")[1].tolist() == [1.0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_writes_nothing_hangs_nowhere_and_keeps_no_lock(tmp_path: Path) -> None:
    script = f"""
import os, sys, time
from plimsoll.runs import Event, RunWriter, Scalars
writer = RunWriter({str(tmp_path)!r}, flush_seconds=3600)
writer.write(Scalars(step=1, values={{"loss": 1.0}}))
child = os.fork()
if not child:
    writer.write(Scalars(step=2, values={{"loss": 2.0}}))
    assert not writer.submit(list, 10) and dict(writer.dropped)["closed"] == 2
    writer.series("weights", "w", format="fp32")
    writer.flush(); writer.close(); del writer
    sys.stdin.read()
    sys.exit(7)  # with atexit and all
writer.write(Scalars(step=3, values={{"loss": 3.0}}))
writer.close()
writer = RunWriter({str(tmp_path)!r})
writer.write(Scalars(step=4, values={{"loss": 4.0}}))
assert writer.flush()
print(child, flush=True)
os.kill(os.getpid(), 9)
"""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    child = int(process.stdout.readline())
    process.wait(timeout=HANG_SECONDS)
    os.kill(child, 0)  # lives on
    with RunWriter(tmp_path) as writer:  # and stands in nobody's way
        writer.write(Scalars(step=5, values={"loss": 5.0}))
    assert Run(tmp_path).scalars("loss")[0].tolist() == [1, 3, 4, 5]
    process.stdin.close()
    process.stdout.close()


def test_a_fork_while_locks_are_held_leaves_the_child_free(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    with writer._worker._guard, writer._dropped._guard, writer._registry._guard:
        child = os.fork()
        if not child:
            try:
                import threading

                done = threading.Event()

                def use() -> None:
                    writer._dropped.count("closed", 0, "")
                    writer.submit(list, 1)
                    writer.series("weights", "w", format="fp32")
                    done.set()

                import warnings

                warnings.simplefilter("ignore")
                threading.Thread(target=use, daemon=True).start()
                os._exit(0 if done.wait(HANG_SECONDS) else 1)
            finally:
                os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    writer.close()


def test_writing_from_many_threads_and_registering_there(tmp_path: Path) -> None:
    import threading

    with RunWriter(tmp_path) as writer:

        def work(thread: int) -> None:
            for i in range(50):
                making.write_steps(writer, [thread * 50 + i], name=f"w{i % 5}")
                writer.write(Event(step=i, kind="tick", message=f"{thread}"))

        threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    run = Run(tmp_path)
    assert run.steps == list(range(200)) and len(run.events()) == 200
    assert sorted(run.tensors["weights"]) == [f"w{i}" for i in range(5)]
    assert all(s.sum == 1.0 for *_, s in run.spectra())


def test_a_signal_handler_may_write(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        with writer._worker._guard, writer._dropped._guard:
            writer.write(Scalars(step=1, values={"loss": 1.0}))  # as a handler would, in the middle of a write
        assert writer.flush()
    assert Run(tmp_path).scalars("loss")[0].tolist() == [1]
