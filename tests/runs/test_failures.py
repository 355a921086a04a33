"""P2: whatever fails while a run is written, training goes on; what was lost is said once, counted, and recorded."""

import errno
import gc
import math
import os
import shlex
import shutil
import subprocess
import sys
import threading
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import plimsoll
from plimsoll.errors import ArgumentError, RunError
from plimsoll.runs import Batch, Event, Run, RunWriter, Scalars
from plimsoll.runs.storage import atomic_files
from tests.support import processes
from tests.support.patience import HANG_SECONDS, wait_until
from tests.support.processes import ROOT
from tests.support.runs import making


class Disk:
    """A disk that can be full."""

    full = False
    error = errno.ENOSPC

    def open(self, path: Path) -> object:
        if self.full:
            raise OSError(self.error, os.strerror(self.error), str(path))
        return path.open("wb")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(atomic_files, "open_for_writing", made.open)
    return made


def sums(path: Path) -> dict[int, float]:
    return {step: s.sum for step, _, _, s in Run(path).spectra()}


def test_a_full_disk_stops_nothing_and_what_waited_is_written_when_it_has_room(tmp_path: Path, disk: Disk) -> None:
    writer = RunWriter(tmp_path)
    making.write_steps(writer, [1])
    assert writer.flush()
    disk.full = True

    def train() -> None:
        for step in (2, 3):
            making.write_steps(writer, [step])
            writer.write(Scalars(step=step, values={"loss": 0.5}))
            assert not writer.flush()

    with pytest.warns(RuntimeWarning, match=r"cannot be written .*No space left.*training continues") as warned:
        train()
    assert len(warned) == 1  # once
    assert Run(tmp_path).steps == [1] and not list(tmp_path.rglob("*.tmp"))
    disk.full = False
    making.write_steps(writer, [4])
    assert writer.flush()
    assert Run(tmp_path).steps == [1, 2, 3, 4] and writer.dropped == {}
    writer.close()
    (event,) = Run(tmp_path).events()
    assert event.kind == "dropped" and "No space left" in event.message and event.details == {"dropped": {}}


def test_on_a_full_disk_memory_stays_bounded_and_the_newest_is_kept(tmp_path: Path, disk: Disk) -> None:
    writer = RunWriter(tmp_path, queue_bytes=50_000)
    disk.full = True

    def train() -> None:
        for step in range(1000):
            making.write_steps(writer, [step])
            if step % 10 == 9:
                assert not writer.flush()

    with pytest.warns(RuntimeWarning, match="cannot be written") as warned:
        train()
    assert writer._worker._buffer._bytes <= 50_000
    assert {str(w.message).split(" exceed")[0] for w in warned if "exceed" in str(w.message)} == {
        "plimsoll: records that cannot be written"
    }
    disk.full = False
    assert writer.flush()
    writer.close()
    run = Run(tmp_path)
    kept = run.steps
    assert kept == list(range(1000 - len(kept), 1000)) and 100 < len(kept) < 1000
    assert dict(writer.dropped) == dict(run.dropped) == {"not written": 1000 - len(kept)}
    assert run.events()[-1].details == {"dropped": {"not written": 1000 - len(kept)}}


def test_what_a_full_disk_never_took_is_counted_when_the_writer_is_closed(tmp_path: Path, disk: Disk) -> None:
    writer = RunWriter(tmp_path)
    disk.full = True
    making.write_steps(writer, [1, 2])
    with pytest.warns(RuntimeWarning, match=r"could? ?not be|cannot be written") as warned:
        writer.close()
    assert "2 records of" in str(warned[1].message) and "not be written before it was closed" in str(warned[1].message)
    assert writer.dropped == {"not written": 2}
    disk.full = False
    RunWriter(tmp_path).close()  # the lock was given back


SMALL_DISK = """
import contextlib, pathlib, subprocess, sys, warnings
from plimsoll.errors import RunError
from plimsoll.runs import Run, RunWriter
from tests.support.runs import making
disk = pathlib.Path(sys.argv[1])
warnings.simplefilter("always")
with RunWriter(disk / "run") as writer:
    making.write_steps(writer, [1])
    assert writer.flush()
    with contextlib.suppress(OSError), (disk / "filler").open("wb") as file:
        while True:
            file.write(b"x" * 1000)
            file.flush()
    making.write_steps(writer, [2])
    assert not writer.flush()
    assert Run(writer.path).steps == [1]
    (disk / "filler").unlink()
    assert writer.flush()
assert Run(writer.path).steps == [1, 2] and writer.dropped == {}
subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
assert Run(writer.path).steps == [1, 2]
try:
    RunWriter(disk / "other")
except RunError as error:
    print(error)
"""


def test_a_real_disk_that_is_full_and_one_that_is_read_only(tmp_path: Path) -> None:
    # In a mount namespace of its own, so that nothing stays mounted whatever happens here.
    namespace = ["unshare", "--mount", "--map-root-user"]
    mounting = f"mount -t tmpfs -o size=400k t {shlex.quote(str(tmp_path))}"
    if shutil.which("unshare") is None or subprocess.run([*namespace, "sh", "-c", mounting], check=False).returncode:
        pytest.skip("a small tmpfs needs the right to mount one")
    script = f"{mounting} && exec {shlex.join([sys.executable, '-c', SMALL_DISK, str(tmp_path)])}"
    done = subprocess.run(
        [*namespace, "sh", "-c", script], check=True, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert "RuntimeWarning: plimsoll" in done.stderr and "No space left on device" in done.stderr
    assert "RunWriter: expected a folder to write the run to" in done.stdout and "Read-only file system" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_removed_folder_is_made_anew_and_said(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", settings={"lr": 1})
    making.write_steps(writer, [1])
    assert writer.flush()
    shutil.rmtree(writer.path)
    making.write_steps(writer, [2])
    assert writer.flush()
    with pytest.raises(ArgumentError, match="expected no other writer"):
        RunWriter(writer.path)  # it is locked again
    writer.close()
    run = Run(writer.path)
    assert run.steps == [2] and run.settings == {"lr": 1} and run.problems == []
    assert [e.kind for e in run.events()] == ["folder lost"]


def test_a_folder_that_cannot_be_made_anew_is_like_a_full_disk(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run")
    shutil.rmtree(writer.path)
    writer.path.touch()  # in the way
    making.write_steps(writer, [1])
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        assert not writer.flush()
    writer.path.unlink()
    assert writer.flush()
    writer.close()
    assert Run(writer.path).steps == [1]


def test_a_folder_that_another_run_took_over_is_left_to_it(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run")
    shutil.rmtree(writer.path)
    with RunWriter(writer.path) as other:
        making.write_steps(other, [7], 7.0)
        making.write_steps(writer, [1], 1.0)
        with pytest.warns(RuntimeWarning, match="expected no other writer"):
            assert not writer.flush()
        making.die(writer)  # before the folder is free again, or it would write there
    assert sums(writer.path) == {7: 7.0}


def test_a_folder_that_becomes_read_only_is_survived(tmp_path: Path, disk: Disk) -> None:
    writer = RunWriter(tmp_path)
    disk.full, disk.error = True, errno.EROFS
    making.write_steps(writer, [1])
    with pytest.warns(RuntimeWarning, match="Read-only file system"):
        assert not writer.flush()
    disk.full = False
    writer.close()
    assert Run(tmp_path).steps == [1]


def test_a_produce_that_raises_costs_its_own_records(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)

    def produce(step: int) -> Iterator[Scalars]:
        yield Scalars(step=step, values={"loss": 1.0})
        if step == 2:
            raise ValueError("the device is gone")

    with pytest.warns(
        RuntimeWarning, match=r"is lost \(produce failed: ValueError\('the device is gone'\)\)"
    ) as warned:
        assert all([*(writer.submit(lambda step=step: produce(step), 100) for step in (1, 2, 3, 2)), writer.flush()])
    assert len(warned) == 1 and writer.dropped == {"produce failed": 2}
    writer.close()
    run = Run(tmp_path)
    assert run.scalars("loss")[0].tolist() == [1, 2, 3] and run.dropped == {"produce failed": 2}
    assert run.events()[0].details == {"dropped": {"produce failed": 2}}


def test_records_that_make_no_sense_cost_themselves(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    good = making.batch(writer, 1, {("weights", "w"): torch.ones(2)})
    one = np.array([0])
    senseless = [
        Batch(step=1, rows=good.rows, index=one + 5, series=one),
        Scalars(step=1, values={"loss": "high"}),
        Scalars(step=2**63, values={"loss": 1.0}),
        Event(step=None, kind="odd", message=""),
        None,
    ]
    with pytest.warns(RuntimeWarning, match="invalid record"):
        assert all([*(writer.write(record) is None for record in senseless), writer.flush()])
    writer.write(good)
    writer.write(Scalars(step=2, values={"loss": 1.0}))
    writer.close()
    run = Run(tmp_path)
    assert run.steps == [1] and run.scalars("loss")[0].tolist() == [2]
    assert writer.dropped == {"invalid record": 5}


DEEP: dict[str, object] = {}
for _ in range(100):
    DEEP = {"deeper": DEEP}


@pytest.mark.filterwarnings("ignore:plimsoll. a record for")
@pytest.mark.parametrize(
    "odd",
    [
        Scalars(step=1, values={"half\ud800": 2.0}),
        Scalars(step=1, values={"é" * 70_000: 2.0}),
        Scalars(step=1, values={"late": 2.0}, time=math.inf),
        Scalars(step=1, values={"late": 2.0}, time=math.nan),
        Event(step=1, kind="k" * 70_000, message="m"),
        Event(step=1, kind="odd", message="no such file: \udcff.py"),
        Event(step=1, kind="odd", message="m", time=math.inf),
        Event(step=1, kind="odd", message="m", details={"text": "x" * (5 << 20)}),
        Event(step=1, kind="odd", message="m", details=DEEP),
    ],
    ids=["half", "long", "inf", "nan", "kind", "message", "time", "large", "deep"],
)
def test_what_readers_would_refuse_costs_no_other_record(odd: Scalars | Event, tmp_path: Path) -> None:
    """One word that is too long, and readers leave out the whole part."""
    with RunWriter(tmp_path / "run") as writer:
        writer.write(Scalars(step=0, values={"loss": 1.0}))
        writer.write(Event(step=0, kind="sound", message="m"))
        writer.write(odd)
        writer.write(Scalars(step=2, values={"loss": 3.0}))
    run = Run(tmp_path / "run")
    assert run.scalar_times("loss")[0].tolist() == [0, 2] and "sound" in [event.kind for event in run.events()]
    assert run.problems == []
    is_kept = math.isfinite(odd.time)
    assert run.dropped == ({} if is_kept else {"invalid record": 1})
    steps = run.scalar_steps if isinstance(odd, Scalars) else [event.step for event in run.events()]
    assert (1 in steps) == is_kept


def test_a_series_whose_name_no_file_can_hold_is_recorded(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        for step in range(2):
            writer.write(making.batch(writer, step, {("weights", "half\ud800"): torch.ones(3)}))
    run = Run(tmp_path / "run")
    assert run.tensors == {"weights": ("half?",)} and run.spectrum("weights", "half?", 1).count == 3
    assert run.problems == []


def test_where_warnings_are_errors_they_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RunWriter(tmp_path) as writer:
        writer.submit(lambda: 1 / 0, 10)
        making.write_steps(writer, [1])
        assert writer.flush()
    assert "plimsoll: a record for" in caplog.text
    assert Run(tmp_path).steps == [1]


def test_a_full_queue_drops_and_counts_and_never_waits(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, queue_bytes=10_000)
    started, go_on = threading.Event(), threading.Event()

    def hang() -> list[Scalars]:
        started.set()
        go_on.wait(HANG_SECONDS)
        return []

    assert writer.submit(hang, 4000)
    assert started.wait(HANG_SECONDS)
    assert writer.submit(lambda: [Scalars(step=0, values={"loss": 1.0})], 4000)
    with pytest.warns(RuntimeWarning, match=r"come faster than they are written; some are dropped\. Sample less often"):
        assert not writer.submit(lambda: [Scalars(step=1, values={"loss": 1.0})], 4000)
    making.write_steps(writer, range(10))
    assert not writer.flush(timeout=0.01)
    assert writer.dropped == {"queue full": 11 - 0}
    go_on.set()
    assert writer.flush()
    writer.close()
    run = Run(tmp_path)
    assert run.scalars("loss")[0].tolist() == [0] and run.dropped == {"queue full": 11}
    assert [e.details for e in run.events()] == [{"dropped": {"queue full": 11}}]


def test_one_record_larger_than_the_queue_still_goes_through(tmp_path: Path) -> None:
    with RunWriter(tmp_path, queue_bytes=10) as writer:
        making.write_steps(writer, [1])
    assert Run(tmp_path).steps == [1]


def test_after_close_records_are_counted_as_lost(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    writer.close()
    writer.close()
    with pytest.warns(RuntimeWarning, match="the writer of .* is closed"):
        writer.write(Event(step=0, kind="late", message=""))
    assert not writer.submit(list, 1) and writer.dropped == {"closed": 2}
    assert writer.flush()


def test_close_gives_up_on_a_produce_that_hangs(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    go_on = threading.Event()
    writer.submit(lambda: go_on.wait(HANG_SECONDS) and [], 1)
    with pytest.warns(RuntimeWarning, match=r"could not be closed within 0.05 s; its last records may be lost"):
        writer.close(timeout=0.05)
    go_on.set()
    writer._worker._thread.join(HANG_SECONDS)


def test_a_writer_is_closed_when_nothing_refers_to_it(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    making.write_steps(writer, [1])
    del writer
    run = Run(tmp_path)
    assert run.closed and run.steps == [1]


def test_what_is_due_is_written_without_being_asked(tmp_path: Path) -> None:
    with RunWriter(tmp_path, flush_seconds=0.05) as writer:
        making.write_steps(writer, [1])
        wait_until(lambda: Run(tmp_path).steps == [1])


def test_a_large_buffer_is_written_before_its_time(tmp_path: Path) -> None:
    with RunWriter(tmp_path, flush_seconds=3600, queue_bytes=20_000) as writer:
        for step in range(200):
            making.write_steps(writer, [step])
            if step % 5 == 4:  # lets the thread keep up, and writes nothing
                done = threading.Event()
                writer.submit(lambda done=done: done.set() or [], 1)
                assert done.wait(HANG_SECONDS)
        assert len(Run(tmp_path).steps) > 100
    assert writer.dropped == {}


def _held() -> int:
    """Bytes that Plimsoll's own code holds, without what the garbage collector is about to free."""
    gc.collect()
    own = tracemalloc.Filter(inclusive=True, filename_pattern=str(Path(plimsoll.__file__).parent / "*"))
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([own]).traces)


def test_memory_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    def write(writer: RunWriter, steps: range) -> None:
        for step in steps:
            writer.write(Batch(step=step, rows=rows, index=index, series=ids))
            writer.write(Scalars(step=step, values={"loss": 1.0}))
            if step % 50 == 49:
                assert writer.flush()
                if (compacting := writer._worker._flusher._compacting) is not None:
                    compacting.join(HANG_SECONDS)  # so that as many parts are left in every run of this test

    with RunWriter(tmp_path, flush_seconds=3600, compact_above=8) as writer:
        ids = np.array([writer.series("weights", f"w{i}", format="fp32") for i in range(20)])
        rows, index = making.rows_of(making.tensors(20)), np.arange(20)
        tracemalloc.start()
        try:
            write(writer, range(500))  # until parts have been compacted
            before = _held()
            write(writer, range(500, 1500))
            grown = _held() - before
        finally:
            tracemalloc.stop()
    assert grown < 10_000  # ten bytes a step; 1,000 steps of 20 rows are 46 MB
    assert len(Run(tmp_path).steps) == 1500


def test_the_manifest_takes_more_entries_but_not_its_own(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.write_manifest(aliases={"a": ["b"]}, odd={Path("x"): float("nan")})
        with pytest.raises(ArgumentError, match=r"RunWriter.write_manifest: expected names .*; got \['schema'\]"):
            writer.write_manifest(schema=3)
        assert writer.flush()
        assert Run(tmp_path).manifest["aliases"] == {"a": ["b"]}
    assert Run(tmp_path).manifest["odd"] == {"x": "nan"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"resume_from": "3"}, r"resume_from to be an integer from 0 to 2\^62; got resume_from='3'\. Give the number"),
        ({"resume_from": 1.5}, r"resume_from to be an integer .*; got resume_from=1.5\."),
        ({"resume_from": -1}, r"got resume_from=-1\."),
        ({"resume_from": True}, r"got resume_from=True\."),
        ({"resume_from": float("nan")}, r"got resume_from=nan\."),
        ({"resume_from": 1 << 63}, r"got resume_from=9223372036854775808\."),
        ({"rank": 1}, r"rank to be an integer from 0 to 0; got rank=1\. Pass rank and world_size as"),
        ({"rank": "0"}, r"got rank='0'"),
        ({"world_size": 2.5}, r"world_size to be an integer of at least 1; got world_size=2.5"),
        (
            {"flush_seconds": float("inf")},
            r"flush_seconds to be a number above 0 .*; got flush_seconds=inf\.",
        ),
        ({"flush_seconds": float("nan")}, r"got flush_seconds=nan"),
        ({"flush_seconds": True}, r"got flush_seconds=True"),
        ({"compact_above": 1}, r"compact_above to be an integer of at least 2; got compact_above=1"),
        ({"queue_bytes": 1e6}, r"queue_bytes to be an integer of at least 1; got queue_bytes=1000000.0"),
        ({"thin": "a"}, r"thin=\(\(age_steps, keep_every\), ...\) .*; got thin='a'\."),
        ({"settings": [1]}, r"settings to be a mapping; got settings=\[1\]"),
        ({"sinks": "wandb"}, r"sinks to be a list; got sinks='wandb'\. Put it in brackets"),
        ({"sinks": [5]}, r"sinks with the methods open, put, flush, close; got 5\. plimsoll.runs.as_sink makes one"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(
    arguments: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=rf"RunWriter: expected .*{said}"):
        RunWriter(tmp_path / "run", **arguments)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["", "a\0b", b"run", None, 5, "\ud800"], ids=ascii)
def test_what_names_no_folder_is_refused(path: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=r"RunWriter: expected the path of a folder.*\. Give for instance"):
        RunWriter(path)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_numbers_of_other_libraries_count_as_integers(tmp_path: Path) -> None:
    for step in (np.int64(3), torch.tensor(3)):
        RunWriter(tmp_path, resume_from=step).close()  # type: ignore[arg-type]
    assert Run(tmp_path).manifest["sessions"][-1]["from_step"] == 3


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES], ids=errno.errorcode.__getitem__)
def test_a_folder_that_cannot_be_written_to_is_said_at_once(error: int, tmp_path: Path, disk: Disk) -> None:
    disk.full, disk.error = True, error
    with pytest.raises(RunError, match=rf"expected a folder to write the run to; got .*{os.strerror(error)}") as raised:
        RunWriter(tmp_path)
    assert str(raised.value).endswith("Give another path, or make room and rights there.")
    disk.full = False
    RunWriter(tmp_path).close()  # the lock was given back


LIMITED = """
import resource, sys, warnings
from plimsoll.runs import Run, RunWriter
from tests.support.runs import making
with warnings.catch_warnings(record=True) as said, RunWriter(sys.argv[1]) as writer:
    warnings.simplefilter("always")
    making.write_steps(writer, [1])
    assert writer.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    making.write_steps(writer, [2])
    assert not writer.flush()
    assert Run(writer.path).steps == [1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert Run(writer.path).steps == [1, 2] and Run(writer.path).closed and writer.dropped == {}
print([str(warning.message) for warning in said])
"""


def test_files_that_the_system_does_not_let_grow(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    ended = processes.python("-c", LIMITED, tmp_path / "run", cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("cannot be written") == 1 and "File too large" in ended.stdout


def test_what_is_recorded_while_another_thread_closes_is_written_or_counted(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    begun, steps = threading.Event(), 0

    def close() -> None:
        begun.wait(HANG_SECONDS)
        writer.close(HANG_SECONDS)

    closing = threading.Thread(target=close)
    closing.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while closing.is_alive():
            writer.write(Scalars(step=steps, values={"loss": 1.0}))
            steps += 1
            begun.set()
    assert len(Run(tmp_path).scalars("loss")[0]) + writer.dropped.get("closed", 0) == steps


@pytest.mark.parametrize("others", [True, False])
def test_parts_of_a_kind_whose_folder_was_removed_are_reported_as_lost(others: bool, tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run")
    writer.write(Scalars(step=0, values={"loss": 1.0}))
    making.write_steps(writer, [0] if others else [])
    assert writer.flush()
    shutil.rmtree(writer.path / "scalars")
    making.write_steps(writer, [1])
    assert writer.flush()
    writer.close()
    run = Run(writer.path, warn=False)
    assert run.steps == [0, 1][not others :] and any("scalars" in problem for problem in run.missing)


def test_a_flush_after_a_close_that_was_too_late_waits_for_the_rest(tmp_path: Path) -> None:
    writer, hold = RunWriter(tmp_path / "run"), threading.Event()
    writer.submit(lambda: hold.wait() and [], 100)
    writer.write(Scalars(step=0, values={"loss": 1.0}))
    with pytest.warns(RuntimeWarning, match="could not be closed"):
        writer.close(timeout=0)
    assert not writer.flush(timeout=0)
    hold.set()
    assert writer.flush(timeout=HANG_SECONDS)
    assert Run(tmp_path / "run").scalars("loss")[1].tolist() == [1.0]


def test_a_writer_whose_end_fails_gives_its_folder_back_and_is_not_closed_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_self: object) -> None:
        raise MemoryError("none left")

    writer = RunWriter(tmp_path / "run")
    making.write_steps(writer, [0])
    with monkeypatch.context() as patch:
        patch.setattr("plimsoll.runs.writing.part_flusher.PartFlusher.compact_all", fails)
        with pytest.warns(RuntimeWarning, match="could not be closed in order: none left"):
            writer.close(timeout=HANG_SECONDS)
    assert not Run(tmp_path / "run").closed
    again = RunWriter(tmp_path / "run")
    making.write_steps(again, [1])
    again.close()
    assert Run(tmp_path / "run").steps == [0, 1]
