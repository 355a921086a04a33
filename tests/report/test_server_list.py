"""The list of runs and their verdicts: found, followed, cheap, and never slowing a training down."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the live page needs the extra serve: pip install '.[serve]'")

from plimsoll.errors import ArgumentError
from plimsoll.report.drawing import plotly_parts
from plimsoll.report.live import run_index
from plimsoll.report.live.run_index import Listed, RunsList
from plimsoll.report.live.server import launch
from plimsoll.report.live.server.answers import Verdict, Verdicts
from plimsoll.report.verdicts.run_summary import summary
from plimsoll.runs import Run, RunWriter, Scalars
from tests.support.diagnosis.stories import make_story
from tests.support.patience import HANG_SECONDS, wait_until
from tests.support.runs import making

LATER = 1e12  # of a clock that is far ahead: what was written is not being written any more


class Clock:
    """A clock that goes when it is moved."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def a_run(path: Path, step: int = 0) -> Path:
    with RunWriter(path) as writer:
        writer.write(Scalars(step=step, values={"loss": 1.0}))
    return path


def test_runs_are_found_at_any_depth_as_run_find_does(tmp_path: Path) -> None:
    for name in ("a", "b/c", "b/d/e", ".hidden", "with space", "ünï"):
        a_run(tmp_path / name)
    found = RunsList(tmp_path)
    assert {run.path for run in found.runs()} == set(Run.find(tmp_path))
    assert {run.id for run in found.runs()} == {"a", "b/c", "b/d/e", ".hidden", "with space", "ünï"}


def test_a_problem_names_no_folder_above_the_one_that_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = a_run(tmp_path / "a") / "run.json"
    manifest.write_text("{")
    why = f"run.json: cannot be read (Permission denied: '{manifest}')"
    monkeypatch.setattr(run_index.RunFolder, "problems", property(lambda self: [why]))
    assert RunsList(tmp_path).run("a").problem == why.replace(f"{tmp_path}/", "")


def test_a_manifest_that_links_to_itself_costs_no_record(tmp_path: Path) -> None:
    path = a_run(tmp_path / "a")
    (path / "run.json").unlink()
    (path / "run.json").symlink_to(path / "run.json")
    why = "run.json: cannot be read (Too many levels of symbolic links); the parts are read without it"
    assert RunsList(tmp_path).run("a").problem == why == Run(path, warn=False).problems[0]
    run_index.refuse_links_out(path, tmp_path)


def test_a_name_that_is_no_text_has_an_id_that_is(tmp_path: Path) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")
    try:
        a_run(Path(odd))
    except OSError:
        pytest.skip("this file system takes no such names")
    found = RunsList(tmp_path)
    assert [run.id for run in found.runs()] == ["\\xff\\xfe"]
    assert found.run("\\xff\\xfe").path == Path(odd)
    json.dumps(found.runs()[0].id).encode("ascii")


def test_new_changed_and_gone_runs_change_the_version(tmp_path: Path) -> None:
    found, versions = RunsList(tmp_path), []

    def look() -> list[str]:
        names = [run.id for run in found.runs()]
        versions.append(found.version)
        return sorted(names)

    assert look() == []
    writer = RunWriter(tmp_path / "a", flush_seconds=600)
    assert look() == ["a"]
    assert look() == ["a"] and versions[-1] == versions[-2]
    making.write_steps(writer, [7])
    writer.flush()
    assert look() == ["a"] and found.run("a").last_step == 7
    assert not found.run("a").closed
    writer.close()
    assert look() == ["a"] and found.run("a").closed
    shutil.rmtree(tmp_path / "a")
    assert look() == [] and found.run("a") is None
    assert len(set(versions)) == len(versions) - 1


def test_what_did_not_change_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        a_run(tmp_path / name)
    clock, read = Clock(LATER), []
    whole = run_index.listed

    def noted(name: str, path: Path, root: Path, stamp: Any) -> Any:
        if root == tmp_path:  # a server of another test may still look at its own runs
            read.append(name)
        return whole(name, path, root, stamp)

    monkeypatch.setattr(run_index, "listed", noted)
    found = RunsList(tmp_path, clock)
    found.runs()
    assert sorted(read) == ["a", "b", "c"]
    found.runs()
    assert len(read) == 3
    making.written(tmp_path / "b", [1])
    found.runs()
    assert read[3:] == ["b"]


def test_a_change_within_the_tick_of_a_look_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = a_run(tmp_path / "a")
    clock = Clock(max(entry[0] for entry in run_index.stamp_of(path)) / 1e9)
    found = RunsList(tmp_path, clock)
    before = found.run("a")
    text = (path / "run.json").read_text("utf-8")
    stat = (path / "run.json").stat()
    (path / "run.json").write_text(text.replace('"closed": "2', '"closed": "1'))
    os.utime(path / "run.json", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as if in the same tick
    assert found._stamps["a"] is None and before is not None
    looked: list[str] = []
    whole = run_index.listed

    def noted(name: str, path: Path, root: Path, stamp: Any) -> Any:
        if root == tmp_path:  # as above
            looked.append(name)
        return whole(name, path, root, stamp)

    monkeypatch.setattr(run_index, "listed", noted)
    found.run("a")
    assert looked == ["a"]


def test_no_parquet_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    making.written(tmp_path / "a", range(3))

    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("a part was opened")

    monkeypatch.setattr(pq, "ParquetFile", refuse)
    monkeypatch.setattr(pq, "read_table", refuse)
    (run,) = RunsList(tmp_path).runs()
    assert (run.last_step, run.tensors, run.problem) == (2, 1, None)


def test_a_part_in_use_by_nobody_tells_no_step(tmp_path: Path) -> None:
    making.written(tmp_path / "a", range(10))
    with RunWriter(tmp_path / "a", resume_from=4, flush_seconds=600) as writer:
        assert RunsList(tmp_path).runs()[0].last_step == 3
        making.write_steps(writer, [4, 5])
        writer.flush()
        assert RunsList(tmp_path).runs()[0].last_step == 5


def test_live_is_what_was_written_to_lately_and_not_closed(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a", flush_seconds=600)
    run = RunsList(tmp_path).runs()[0]
    assert run.is_live(run.modified + 1) and not run.is_live(run.modified + 3600)
    writer.close()
    run = RunsList(tmp_path).runs()[0]
    assert not run.is_live(run.modified + 1)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"serve: expected a folder that runs are written to; got '.*none'"):
        RunsList(tmp_path / "none")


def test_an_age_that_is_allowed_saves_a_look(tmp_path: Path) -> None:
    clock = Clock(100.0)
    found = RunsList(tmp_path, clock)
    assert found.runs(max_age_seconds=1.0) == []
    a_run(tmp_path / "a")
    clock.now += 0.9
    assert found.runs(max_age_seconds=1.0) == []
    clock.now += 0.2
    assert len(found.runs(max_age_seconds=1.0)) == 1


# -- verdicts


def listed(
    name: str, token: str = "1", *, live: bool = False, modified: float = 0.0, opens: bool = True, pid: int = 1
) -> Listed:
    return Listed(
        id=name, name=name, path=Path(name), token=token, identity=(pid,), closed=not live, modified=modified,
        opens=opens,
    )  # fmt: skip


class Judged:
    """Runs that are listed, a judge that takes as long as it is set to, and the verdicts."""

    def __init__(self, *runs: Listed) -> None:
        self.runs, self.asked, self.clock = list(runs), [], Clock(1000.0)
        self.takes, self.worked = 0.0, Clock()
        self.verdicts = Verdicts(lambda: self.runs, self._judge, self.clock)

    def _judge(self, run: Listed) -> str:
        self.worked.now += self.takes
        self.asked.append(f"{run.id} {run.token}")
        return "Cannot be judged: a test"

    def change(self, name: str, token: str) -> None:
        self.runs = [listed(r.id, token, live=not r.closed, modified=r.modified) if r.id == name else r
                     for r in self.runs]  # fmt: skip


def test_those_written_to_last_are_judged_first_and_each_once() -> None:
    made = Judged(listed("new"), listed("old"), listed("gone", opens=False))
    assert made.verdicts.judge_next() == 0.0 and made.verdicts.judge_next() == 0.0
    assert made.verdicts.judge_next() is None
    assert made.asked == ["new 1", "old 1"]


def test_the_run_whose_page_is_open_comes_first() -> None:
    made = Judged(listed("new"), listed("open"))
    made.verdicts.close()  # no thread: the test does its work
    made.verdicts.looked_at("open")
    made.verdicts.judge_next()
    assert made.asked == ["open 1"]


def test_a_closed_run_that_changed_is_judged_at_once() -> None:
    made = Judged(listed("a"))
    made.verdicts.judge_next()
    made.change("a", "2")
    made.verdicts.judge_next()
    assert made.asked == ["a 1", "a 2"]


def test_a_live_run_is_judged_again_only_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Judged(listed("a", live=True, modified=1000.0))
    # Servers of other tests may still judge, and ask for the time too.
    monkeypatch.setattr("plimsoll.report.live.server.answers.time", SimpleNamespace(perf_counter=made.worked))
    made.takes = 3.0
    assert made.verdicts.judge_next() == pytest.approx(12.0)  # 3 s of work, then four times as long at rest
    made.takes = 0.5
    made.change("a", "2")
    for wait in (1.0, 13.9):
        made.clock.now = 1000.0 + wait
        assert made.verdicts.judge_next() is None
    made.clock.now = 1015.1
    assert made.verdicts.judge_next() == pytest.approx(2.0)
    made.takes = 0.0
    made.change("a", "3")
    made.clock.now += 4.9  # never oftener than every five seconds
    assert made.verdicts.judge_next() is None
    made.clock.now += 0.2
    assert made.verdicts.judge_next() is not None


def test_an_open_page_is_renewed_sooner() -> None:
    made = Judged(listed("a", live=True, modified=1000.0))
    made.verdicts.close()
    made.verdicts.judge_next()
    made.change("a", "2")
    made.clock.now += 2.0
    assert made.verdicts.judge_next() is None
    made.verdicts.looked_at("a")
    assert made.verdicts.judge_next() is not None


def test_no_rest_where_nothing_is_trained() -> None:
    made = Judged(listed("a"), listed("b"))
    assert made.verdicts.judge_next() == 0.0


def test_the_last_verdict_stands_until_the_next() -> None:
    made = Judged(listed("a"))
    assert made.verdicts.of(made.runs[0]) is None
    made.verdicts.judge_next()
    made.change("a", "2")
    known = made.verdicts.of(made.runs[0])
    assert (known.token, known.state, known.sentence) == ("1", "unreadable", "Cannot be judged: a test")


def test_a_run_put_in_the_place_of_another_has_no_verdict_of_that() -> None:
    made = Judged(listed("a"))
    made.verdicts.judge_next()
    other = listed("a", "2", pid=2)
    assert made.verdicts.of(other) is None
    assert made.verdicts.for_page(other).token == "2"


def test_an_older_row_of_the_list_makes_no_verdict_after_that_of_the_page(tmp_path: Path) -> None:
    """Else the page of a run would say that there is news, and there is none."""
    whole = summary(Run(make_story(samples=1).write(tmp_path / "run")))
    older, newer = listed("a", "1"), listed("a", "2")
    pages = list[Verdict]()

    def runs() -> list[
        Listed
    ]:  # the page of the run as it is now asks while the list of a moment ago is looked through
        pages.append(verdicts.for_page(newer))
        return [older]

    verdicts = Verdicts(runs, lambda _: whole)
    verdicts.close()  # no thread: the test does its work
    verdicts.judge_next()
    assert verdicts.of(newer) is pages[0]


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("plimsoll.report.live.server.answers._KEPT", 3)
    monkeypatch.setattr("plimsoll.report.live.server.answers._SUMMARIES", 1)
    whole = summary(Run(make_story(samples=1).write(tmp_path / "run")))
    runs = [listed(name) for name in "abcd"]
    verdicts = Verdicts(lambda: runs, lambda _: whole)
    for _ in runs:
        verdicts.judge_next()
    assert verdicts.of(runs[0]) is None
    kept = [verdicts.of(run) for run in runs[1:]]
    assert [verdict.summary is not None for verdict in kept] == [False, False, True]
    assert {verdict.state for verdict in kept} == {"healthy"}


def test_the_verdict_of_a_run_that_has_gone_goes() -> None:
    made = Judged(listed("a"), listed("b"))
    made.verdicts.judge_next()
    made.verdicts.judge_next()
    (gone,) = [run for run in made.runs if run.id == "a"]
    made.runs = [run for run in made.runs if run.id != "a"]
    made.verdicts.judge_next()
    assert made.verdicts.of(gone) is None


def test_the_thread_works_while_somebody_looks_and_ends() -> None:
    made = Judged(listed("a"))
    made.verdicts.looked_at()
    thread = made.verdicts._thread
    wait_until(lambda: made.asked)
    made.verdicts.close()
    thread.join(HANG_SECONDS)
    assert made.asked == ["a 1"] and not thread.is_alive()
    made.verdicts.looked_at()
    assert made.verdicts._thread is thread  # no other one once it is closed


def test_packages_that_cannot_be_loaded_ahead_are_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise ImportError("Python is shutting down")

    monkeypatch.setattr(plotly_parts, "empty_figure", stopped)
    launch._load_slow_packages()


def test_a_run_of_many_or_huge_settings_has_its_model_in_the_list() -> None:
    many = {f"s{i}": i for i in range(200)}
    settings = run_index.settings_of(
        {"settings": {"huge": 10**400, "scale": 1e20, **many}, "model": "M", "parameters": 3}
    )
    assert settings["model"] == "M" and settings["parameters"] == 3 and len(settings) <= 64
    assert str(settings["huge"]).startswith("1000") and settings["scale"] == 1e20
