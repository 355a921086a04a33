"""The live page of a folder of runs in a store: found by listings, which are few, and as good as on this machine."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

pytest.importorskip("fastapi", reason="the live page needs the extra serve: pip install '.[serve]'")

from plimsoll.errors import ArgumentError, NotRecordedError, RunError
from plimsoll.report.live.live_runs import LiveView
from plimsoll.report.live.run_index import RunsList
from plimsoll.report.live.server.answers import Api
from plimsoll.report.live.server.app import app
from plimsoll.runs import Run, RunWriter, Scalars
from plimsoll.runs.storage import location as _location
from plimsoll.runs.storage.location import Stored

URI = "memory://bucket/runs"


class Clock:
    """A clock that goes when it is moved."""

    def __init__(self, now: float = 1e12) -> None:  # far ahead: what was written is not being written any more
        self.now = now

    def __call__(self) -> float:
        return self.now


class Asked:
    """What a store is asked for; it can stop answering."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.listed: list[str] = []
        self.read: list[str] = []
        self.deaf = False
        tree, read = Stored.tree, Stored.read

        def listing(place: Stored) -> dict[str, tuple[int, int]]:
            self.listed.append(str(place))
            if self.deaf:
                raise RunError("Run: expected storage that answers; got none.")
            return tree(place)

        def reading(place: Stored, name: str) -> bytes:
            self.read.append(f"{place}/{name}")
            return read(place, name)

        monkeypatch.setattr(Stored, "tree", listing)
        monkeypatch.setattr(Stored, "read", reading)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


@pytest.fixture
def store() -> Iterator[Any]:
    """An object store in memory, empty."""
    memory = fsspec.filesystem("memory")
    yield memory
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


def put(store: Any, folder: Path, at: str) -> None:
    """Copies a run, as `aws s3 sync` does."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            store.pipe_file(f"/bucket/runs/{at}/{path.relative_to(folder).as_posix()}".replace("/./", "/"),
                            path.read_bytes())  # fmt: skip


def a_run(path: Path, *steps: int) -> Path:
    with RunWriter(path) as writer:
        for step in steps or (0,):
            writer.write(Scalars(step=step, values={"loss": 1.0}))
    return path


@pytest.fixture
def stored(runs_folder: Path, store: Any) -> str:
    """The address of what `runs_folder` has, in a store."""
    put(store, runs_folder, ".")
    return URI


def test_the_rows_are_those_of_a_folder_here(runs_folder: Path, stored: str) -> None:
    def rows(folder: str | Path) -> list[Any]:
        found = RunsList(folder).runs()
        return sorted((replace(run, path=Path(), token="", modified=0.0) for run in found), key=lambda run: run.id)

    there = rows(stored)
    assert there == rows(runs_folder) and len(there) == 5
    assert [run.id for run in there if not run.opens or run.problem] == ["broken"]
    assert all(run.modified > 1e9 and run.token for run in RunsList(stored).runs())


def test_the_folder_itself_may_be_a_run(tmp_path: Path, store: Any) -> None:
    put(store, a_run(tmp_path / "a", 3), "a")
    (run,) = RunsList(f"{URI}/a").runs()
    assert (run.id, run.name, run.last_step) == (".", "a", 3)


def test_a_run_within_a_run_is_listed_too(tmp_path: Path, store: Any) -> None:
    # So lies a script's second model, where the first was taken for the only one.
    put(store, a_run(tmp_path / "a"), "a")
    put(store, a_run(tmp_path / "b"), "a/b")
    assert sorted(run.id for run in RunsList(URI).runs()) == ["a", "a/b"]


def test_a_file_uri_is_a_folder_here(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    found = RunsList(tmp_path.as_uri())
    assert [run.id for run in found.runs()] == ["a"] and found.source.poll_seconds == 1.0
    assert found.folder == tmp_path.resolve()


def test_new_changed_and_gone_runs_are_seen_at_the_next_listing(tmp_path: Path, store: Any, asked: Asked) -> None:
    put(store, a_run(tmp_path / "a", 1), "a")
    clock = Clock()
    found, seen = RunsList(URI, clock), []

    def look() -> list[tuple[str, int]]:
        rows = sorted((run.id, run.last_step) for run in found.runs(0.5))
        seen.append(found.version)
        return rows

    assert look() == [("a", 1)]
    put(store, a_run(tmp_path / "a", 2), "a")
    put(store, a_run(tmp_path / "b", 5), "b")
    clock.now += 9.9
    assert look() == [("a", 1)] and seen[-1] == seen[-2]
    clock.now += 0.2
    assert look() == [("a", 2), ("b", 5)]
    store.rm("/bucket/runs/a", recursive=True)
    clock.now += 10.1
    assert look() == [("b", 5)] and found.run("a") is None
    assert seen == [1, 1, 3, 4]
    assert asked.listed == [URI, ".", ".", "."]  # one listing each time, of all runs


def test_what_did_not_change_is_not_read_again(tmp_path: Path, store: Any, asked: Asked) -> None:
    for name in "abc":
        put(store, a_run(tmp_path / name), name)
    clock = Clock()
    found = RunsList(URI, clock)
    found.runs()
    assert sorted(asked.read) == ["a/run.json", "b/run.json", "c/run.json"]
    put(store, a_run(tmp_path / "b", 7), "b")
    clock.now += 11
    found.runs()
    assert asked.read[3:] == ["b/run.json"]


def test_a_run_that_is_asked_for_is_listed_alone_every_five_seconds(tmp_path: Path, store: Any, asked: Asked) -> None:
    put(store, a_run(tmp_path / "a", 1), "a")
    put(store, a_run(tmp_path / "b", 1), "b")
    clock = Clock()
    found = RunsList(URI, clock)
    found.runs()
    put(store, a_run(tmp_path / "a", 2), "a")
    clock.now += 4.9
    before = found.run("a")
    assert before is not None and before.last_step == 1 and asked.listed == [URI, "."]
    clock.now += 0.2
    after = found.run("a")
    assert after is not None and after.last_step == 2 and asked.listed == [URI, ".", "a"]
    assert after.token != before.token and found.version == 3
    store.rm("/bucket/runs/a", recursive=True)
    clock.now += 5.1
    assert found.run("a") is None


def test_a_change_within_the_tick_of_a_look_is_not_missed(tmp_path: Path, store: Any, asked: Asked) -> None:
    put(store, a_run(tmp_path / "a"), "a")
    newest = max(time for _, time in Stored("/bucket/runs/a", _memory(), "a").tree().values()) / 1e9
    clock = Clock(newest + 1.0)  # stores tell seconds
    found = RunsList(URI, clock)
    found.runs()
    asked.read.clear()
    clock.now += 11
    found.runs()
    assert asked.read == ["a/run.json"]
    clock.now += 11
    found.runs()
    assert asked.read == ["a/run.json"]


def _memory() -> Any:
    from pyarrow import fs

    return fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))


def test_storage_that_stops_answering_keeps_what_was_found(tmp_path: Path, store: Any, asked: Asked) -> None:
    put(store, a_run(tmp_path / "a", 1), "a")
    clock = Clock()
    answers = Api(URI, clock=clock)
    answers.verdicts.close()
    found = answers.live.list
    (before,) = found.runs()
    parsed = answers.look("a")
    asked.deaf = True
    clock.now += 11
    for _ in range(2):  # until the next listing it is not asked again
        with pytest.raises(RunError, match="expected storage that answers"):
            answers.runs()
    assert len(asked.listed) == 3
    assert found.known() == [before] and found.run("a") == before
    assert answers.look("a") == parsed and answers.look("")["version"] == found.version
    assert answers.look("none") is None
    asked.deaf = False
    clock.now += 11
    put(store, a_run(tmp_path / "a", 2), "a")
    assert [run.last_step for run in found.runs()] == [2]
    assert answers.look("none")["token"] == ""


def test_one_run_that_is_not_reached_is_trouble_too(tmp_path: Path, store: Any, asked: Asked) -> None:
    put(store, a_run(tmp_path / "a", 1), "a")
    clock = Clock()
    found = RunsList(URI, clock)
    (before,) = found.runs()
    asked.deaf = True
    clock.now += 6
    assert found.run("a") == before and found.run("a") == before and asked.listed == [URI, ".", "a"]
    with pytest.raises(RunError, match="expected storage that answers"):
        found.runs()


def test_where_a_store_tells_no_times_they_are_when_a_change_was_seen(
    tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_location, "_TIMES", ())
    writer = RunWriter(tmp_path / "a", flush_seconds=600)
    writer.write(Scalars(step=1, values={"loss": 1.0}))
    assert writer.flush()
    put(store, tmp_path / "a", "a")
    clock = Clock(2e9)
    found = RunsList(URI, clock)
    (run,) = found.runs()
    assert run.modified == run.created and not run.is_live(clock())
    clock.now += 11
    assert found.runs() == [run]
    writer.write(Scalars(step=2, values={"loss": 1.0}))
    assert writer.flush()
    put(store, tmp_path / "a", "a")
    clock.now += 11
    (run,) = found.runs()
    assert (run.modified, run.last_step) == (clock(), 2) and run.is_live(clock())
    writer.close()


def test_a_folder_where_nothing_is_is_refused(store: Any) -> None:
    with pytest.raises(
        ArgumentError, match=r"serve: expected a folder that runs were copied to; got memory://bucket/ru"
    ):
        RunsList(URI)


QUESTIONS = [
    lambda answers: answers.run("low"),
    lambda answers: answers.run("sweep/seed 1"),
    lambda answers: answers.run("broken"),
    lambda answers: answers.figure("low", "loss_and_scale", {}),
    lambda answers: answers.whatif("low", {"format": "fp16"}),
    lambda answers: answers.compare("low", "healthy"),
    lambda answers: answers.compare_figure("low", "healthy", "loss_and_scale", {}),
]


def test_answers_are_those_of_a_folder_here(runs_folder: Path, stored: str) -> None:
    here, there = Api(runs_folder), Api(stored)
    for answers in (here, there):
        answers.verdicts.looked_at("low")
        answers.verdicts.close()  # no thread: the questions find their verdicts
    for question in QUESTIONS:
        parsed = [json.loads(question(answers)) for answers in (here, there)]
        for each in parsed:
            each.pop("token", None)
        assert parsed[0] == parsed[1]
        assert str(runs_folder) not in json.dumps(parsed[0])  # where it lies is nobody's business
    with pytest.raises(NotRecordedError, match="expected the id of a run in the served folder"):
        there.run("../runs/low")


def test_a_copy_of_a_view_reads_where_the_view_does(stored: str) -> None:
    view = LiveView(Run(f"{stored}/healthy"))
    assert view.copied().run.steps == view.run.steps


def test_a_store_is_looked_at_less_often(stored: str, tmp_path: Path) -> None:
    pages = [app(stored), app(tmp_path), app(stored, poll_seconds=3.0)]
    assert [page.streams._poll_seconds for page in pages] == [10.0, 1.0, 3.0]
    for page in pages:
        page.close()
