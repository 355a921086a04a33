"""Tasks for workers: every answer at its place, failures reported with what was said, and nobody left behind."""

import concurrent.futures
import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plimsoll.errors import PlimsollError
from plimsoll_lab.running import workers as product
from plimsoll_lab.running.workers import Task, carry_out, named, workers_for

# Workers are other interpreters: what they do is named, and is in the package or in the standard library.
DIVIDED, HALVED, INTERRUPTED, KILLED, PRINTED, THREADS, WAITING = (
    f"tests.support.lab.worker_tasks:{name}"
    for name in ("divided", "halved", "interrupted", "killed", "printed", "threads", "waiting")
)


@pytest.fixture
def interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product's own workers, and none that are forked."""
    monkeypatch.setattr(product, "subprocess", subprocess)


class CountedProgress:
    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.advanced = 0

    def begin(self, title: str, steps: int) -> None:
        self.begun.append((title, steps))

    def advance(self) -> None:
        self.advanced += 1


@pytest.mark.parametrize("workers", [1, 2])
def test_answers_are_in_the_tasks_order_and_each_is_told_once(workers: int) -> None:
    tasks: list[Task] = [{"a": [number]} for number in range(7)]
    reported, came = CountedProgress(), dict[int, Any]()
    answers = carry_out("json:dumps", tasks, workers=workers, progress=reported, title="dumps", done=came.__setitem__)
    assert answers == [f'{{"a": [{number}]}}' for number in range(7)]
    assert came == dict(enumerate(answers))
    assert reported.begun == [("dumps", 7)] and reported.advanced == 7


def test_ctrl_c_is_left_to_the_program_that_ends_its_workers() -> None:
    assert carry_out(INTERRUPTED, [{}], workers=2) == [1]


def test_no_tasks_need_no_worker() -> None:
    assert carry_out("json:dumps", [], workers=2) == []


def test_a_task_that_raises_is_told_with_its_traceback() -> None:
    with pytest.raises(PlimsollError, match=r"expected the training third to end(?s:.)*ZeroDivisionError"):
        carry_out(DIVIDED, [{"name": "third"}], workers=2)


def test_a_task_that_raises_ends_the_others(tmp_path: Path) -> None:
    tasks = [{"folder": str(tmp_path), "fails": fails} for fails in (True, False)]
    with pytest.raises(PlimsollError, match="ZeroDivisionError"):
        carry_out(WAITING, tasks, workers=2)
    (tmp_path / "released").touch()
    assert not (tmp_path / "ended").exists()


def test_a_worker_that_dies_is_told() -> None:
    with pytest.raises(PlimsollError, match="expected the training last to end(?s:.)*the process has ended"):
        carry_out(KILLED, [{"name": "last"}], workers=2)


def test_a_task_that_was_handed_to_a_dead_worker_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the futures that have ended comes first."""

    def last_first(waiting: dict[Any, int]) -> list[Any]:
        concurrent.futures.wait(waiting)
        return sorted(waiting, key=waiting.__getitem__, reverse=True)

    monkeypatch.setattr(product, "as_completed", last_first)
    with pytest.raises(PlimsollError, match="expected the training (first|second) to end(?s:.)*the process has ended"):
        carry_out(KILLED, [{"name": name} for name in ("first", "second", "third")], workers=2)


@pytest.mark.usefixtures("interpreters")
def test_workers_that_die_before_any_task_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "_BEGIN", "raise SystemExit")
    hired = product._hired

    @contextlib.contextmanager
    def dead(count: int) -> Iterator[Any]:
        with hired(count) as free:
            workers = [free.get() for _ in range(count)]
            for worker in workers:
                worker.process.wait()
                free.put(worker)
            yield free

    monkeypatch.setattr(product, "_hired", dead)
    with pytest.raises(PlimsollError, match="expected the training only to end(?s:.)*the process has ended"):
        carry_out(KILLED, [{"name": "only"}], workers=2)


@pytest.mark.usefixtures("interpreters")
def test_a_worker_that_dies_within_its_answer_is_told() -> None:
    with pytest.raises(PlimsollError, match="expected the training half to end(?s:.)*the process has ended"):
        carry_out(HALVED, [{"name": "half"}], workers=2)


@pytest.mark.usefixtures("interpreters")
def test_a_worker_prints_elsewhere_than_its_answers(capfd: pytest.CaptureFixture[str]) -> None:
    assert carry_out(PRINTED, [{"says": "hello"}, {"says": "you"}], workers=2) == [5, 3]
    assert "hello" in capfd.readouterr().err


@pytest.mark.usefixtures("interpreters")
def test_a_worker_has_one_thread() -> None:
    assert carry_out(THREADS, [{}], workers=2) == [1]


def test_workers_are_as_many_as_cores_and_one_for_a_gpu() -> None:
    assert workers_for("cuda") == 1
    assert 1 <= workers_for("cpu") <= (os.cpu_count() or 1)
    assert named("json:dumps")([1]) == "[1]"  # type: ignore[arg-type]
