"""One writer after another on one run, and never two at a time."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plimsoll.errors import ArgumentError, RunError
from plimsoll.runs import Event, Run, RunWriter, Scalars
from plimsoll.runs.storage import lock
from tests.support.runs import making

HOLDER = """
import sys
from plimsoll.runs import RunWriter
writer = RunWriter(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


def sums(path: Path) -> dict[int, float]:
    return {step: s.sum for step, _, _, s in Run(path).spectra()}


def kinds(path: Path) -> list[str]:
    return [event.kind for event in Run(path).events()]


def test_a_second_session_continues(tmp_path: Path) -> None:
    making.written(tmp_path, [1, 2], 1.0, settings={"lr": 1})
    making.written(tmp_path, [3, 4], 2.0, settings={"lr": 2})
    assert sums(tmp_path) == {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0}
    run = Run(tmp_path)
    assert kinds(tmp_path) == ["continued"] and run.events()[0].details == {
        "session": 2,
        "last_step": 2,
        "resume_from": None,
    }
    assert run.settings == {"lr": 2} and [s["session"] for s in run.manifest["sessions"]] == [1, 2]


def test_a_session_that_follows_one_without_a_step_says_so(tmp_path: Path) -> None:
    making.written(tmp_path, [], 1.0)
    making.written(tmp_path, [0, 1], 1.0)
    (continued,) = (event for event in Run(tmp_path).events() if event.kind == "continued")
    assert continued.message == "continued by session 2 before its first step"


@pytest.mark.parametrize("compacted", [True, False])
def test_resume_from_replaces_what_lay_there_and_after(tmp_path: Path, compacted: bool) -> None:
    making.written(tmp_path, range(10), 1.0)
    with RunWriter(tmp_path, resume_from=5) as writer:
        assert Run(tmp_path).steps == [0, 1, 2, 3, 4]  # at once
        making.write_steps(writer, [7, 8], 2.0)
        writer.flush()
        if not compacted:
            making.die(writer)
    assert sums(tmp_path) == {**dict.fromkeys(range(5), 1.0), 7: 2.0, 8: 2.0}
    with RunWriter(tmp_path) as writer:
        making.write_steps(writer, [9], 3.0)
    assert sums(tmp_path) == {**dict.fromkeys(range(5), 1.0), 7: 2.0, 8: 2.0, 9: 3.0}
    assert len(Run(tmp_path).table()) == 8


def test_scalars_and_events_are_replaced_likewise(tmp_path: Path) -> None:
    for value, arguments in ((1.0, {}), (2.0, {"resume_from": 2})):
        with RunWriter(tmp_path, **arguments) as writer:
            for step in (0, 1, 2, 3) if value == 1.0 else (2,):
                writer.write(Scalars(step=step, values={"loss": value}))
                writer.write(Event(step=step, kind="tick", message=f"{value}"))
    assert [c.tolist() for c in Run(tmp_path).scalars("loss")] == [[0, 1, 2], [1.0, 1.0, 2.0]]
    assert [e.message for e in Run(tmp_path).events() if e.kind == "tick"] == ["1.0", "1.0", "2.0"]


def test_a_session_that_begins_earlier_replaces_from_its_first_step(tmp_path: Path) -> None:
    making.written(tmp_path, range(10), 1.0)
    making.written(tmp_path, [6, 7], 2.0)
    assert sums(tmp_path) == {**dict.fromkeys(range(6), 1.0), 6: 2.0, 7: 2.0}
    (event,) = [e for e in Run(tmp_path).events() if e.kind == "replaced"]
    assert event.step == 6 and event.details == {"from_step": 6}
    assert "begins at step 6; what lay there and after, up to 9, is replaced" in event.message


def test_a_session_replaces_nothing_of_its_own(tmp_path: Path) -> None:
    making.written(tmp_path, range(10), 1.0)
    with RunWriter(tmp_path) as writer:
        writer.write(Event(step=8, kind="tick", message="before the first step"))
        writer.flush()
        making.write_steps(writer, [8], 2.0)
        writer.flush()
        making.write_steps(writer, [5, 9], 2.0)
        writer.flush()
        making.die(writer)
    assert sums(tmp_path) == {**dict.fromkeys(range(8), 1.0), 5: 1.0, 8: 2.0, 9: 2.0} | {5: 2.0}
    assert "tick" in kinds(tmp_path)


def test_replaced_three_times_the_last_one_counts(tmp_path: Path) -> None:
    for session in range(1, 5):
        making.written(tmp_path, range(10 - 2 * session, 12), float(session))
    assert sums(tmp_path) == {2: 4.0, 3: 4.0} | dict.fromkeys(range(4, 12), 4.0)
    making.written(tmp_path, [11], 9.0, resume_from=11)
    assert sums(tmp_path)[11] == 9.0 and sums(tmp_path)[10] == 4.0


def test_resuming_from_the_start_leaves_nothing_and_hides_nothing_new(tmp_path: Path) -> None:
    making.written(tmp_path, range(10), 1.0)
    making.written(tmp_path, [0], 2.0, resume_from=0)
    making.written(tmp_path, [1], 3.0)
    assert sums(tmp_path) == {0: 2.0, 1: 3.0}


def test_flush_numbers_never_begin_anew(tmp_path: Path) -> None:
    making.written(tmp_path, range(10), 1.0)
    making.die(RunWriter(tmp_path, resume_from=0))  # nothing is left, and nothing came of it
    assert not list((tmp_path / "spectra").iterdir())
    making.written(tmp_path, [0], 2.0)
    assert sums(tmp_path) == {0: 2.0}


def test_a_session_that_only_speaks_replaces_nothing(tmp_path: Path) -> None:
    making.written(tmp_path, range(4))
    with RunWriter(tmp_path) as writer:
        writer.write(Event(step=0, kind="tick", message=""))
    assert Run(tmp_path).steps == [0, 1, 2, 3]


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(
        RunError, match=r"RunWriter: expected an empty folder or one that holds a run; got .*thesis.tex"
    ):
        RunWriter(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(RunError, match=r"RunWriter: expected a folder to write the run to; got .*File exists"):
        RunWriter(tmp_path / "run")


def test_a_run_of_a_newer_schema_is_neither_read_nor_continued(tmp_path: Path) -> None:
    path = making.written(tmp_path, [1])
    manifest = json.loads((path / "run.json").read_text("utf-8"))
    (path / "run.json").write_text(json.dumps(manifest | {"schema": 2}))
    for opener in (Run, RunWriter):
        with pytest.raises(RunError, match=r"Run: expected a run of schema 1 or older; got schema=2 in .*run\.json"):
            opener(path)
    lock.Lock(path, 0).release()  # the refused writer holds nothing


def test_a_damaged_manifest_costs_its_settings_and_not_the_run(tmp_path: Path) -> None:
    path = making.written(tmp_path, [1, 2], settings={"lr": 1})
    (path / "run.json").write_text('{"schema": 1, "sett')
    with pytest.warns(RuntimeWarning, match=r"run\.json: cannot be read .*the parts are read without it"):
        run = Run(path)
    assert run.tensors == {"weights": ("w",)} and run.steps == [1, 2] and run.settings == {}
    making.written(path, [3])
    with pytest.warns(RuntimeWarning, match=r"run\.json\.damaged: not a file of this run"):
        assert Run(path).steps == [1, 2, 3]
    with pytest.warns(RuntimeWarning):
        assert kinds(path) == ["damaged"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2, "world_size": 2}, r"expected rank to be an integer from 0 to 1; got rank=2\."),
        ({"rank": -1}, r"expected rank to be an integer from 0 to 0; got rank=-1\."),
        ({"flush_seconds": 0}, r"expected flush_seconds to be a number above 0 and"),
        ({"compact_above": 1}, r"expected compact_above to be an integer"),
        ({"queue_bytes": 0}, r"expected queue_bytes to be an integer"),
    ],
)
def test_arguments_are_checked(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        RunWriter(tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


# -- two writers


def test_a_second_writer_of_this_process_is_refused(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as first:
        with pytest.raises(
            ArgumentError, match="expected no other writer on this run and rank; got .*, which this process is writing"
        ):
            RunWriter(tmp_path)
        with RunWriter(tmp_path, rank=1, world_size=2):
            pass  # another rank is another matter
        making.write_steps(first, [1])
    RunWriter(tmp_path).close()


def test_a_second_writer_of_another_process_is_refused_until_it_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"open\n"
        with pytest.raises(ArgumentError, match=rf"which process {process.pid} on .* is writing"):
            RunWriter(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
    RunWriter(tmp_path).close()


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)


def test_without_flock_an_exclusive_file_serves(tmp_path: Path, no_flock: None) -> None:
    first = lock.Lock(tmp_path, 0)
    with pytest.raises(
        ArgumentError, match=r"which this process is writing already\. Close the earlier watch or writer"
    ):
        lock.Lock(tmp_path, 0)
    first.renew()
    first.release()
    lock.Lock(tmp_path, 0).release()
    assert not list(tmp_path.glob("*.held"))


def test_without_flock_a_dead_process_is_no_obstacle(tmp_path: Path, no_flock: None) -> None:
    first = lock.Lock(tmp_path, 0)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    held = tmp_path / ".lock-r00000.held"
    held.write_text(held.read_text("utf-8").replace(str(os.getpid()), str(dead.pid)))
    lock.Lock(tmp_path, 0).release()  # refused for a process that lives, as above
    assert not held.exists()
    first.abandon()


def test_without_flock_a_heartbeat_that_stopped_is_no_obstacle(tmp_path: Path, no_flock: None) -> None:
    first = lock.Lock(tmp_path, 0)
    held = tmp_path / ".lock-r00000.held"
    held.write_text(
        held.read_text("utf-8").replace('"host": "', '"host": "other-')
    )  # whose processes cannot be asked after
    with pytest.raises(ArgumentError, match=r"on other-"):
        lock.Lock(tmp_path, 0)
    os.utime(held, (0, 0))
    first.renew()  # it lives
    with pytest.raises(ArgumentError, match=r"on other-"):
        lock.Lock(tmp_path, 0)
    os.utime(held, (0, 0))
    lock.Lock(tmp_path, 0).release()
    first.abandon()


def test_a_lock_whose_file_was_removed_is_taken_anew_or_lost(tmp_path: Path) -> None:
    first = lock.Lock(tmp_path, 0)
    first.path.unlink()
    first.renew()
    with pytest.raises(ArgumentError, match="expected no other writer"):
        lock.Lock(tmp_path, 0)
    first.path.unlink()
    second = lock.Lock(tmp_path, 0)
    with pytest.raises(ArgumentError, match="expected no other writer"):
        first.renew()
    second.release()
    first.renew()
    first.release()
