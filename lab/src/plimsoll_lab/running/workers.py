"""Many trainings at once: workers of one thread, with one task after another.

A task is JSON-able data, and what does it a function by its name ("module:function"), whose answer is JSON-able too. A
worker is an interpreter that runs this module, and reads tasks as lines of JSON. So it imports nothing of the program
that carries the experiment out, which may be a notebook or an unguarded script.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from queue import SimpleQueue
from typing import IO, Any, cast

import torch

from plimsoll.errors import PlimsollError
from plimsoll_lab.bench import Progress, Silent

Task = Mapping[str, Any]
# Ctrl-C on a terminal reaches all processes of it: a worker leaves it to the program, which ends its workers then.
_BEGIN = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from plimsoll_lab.running.workers import work; work()"
)
_MOST_WORKERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    """A process, and what it reads from and answers to."""

    process: "subprocess.Popen[str]"
    tasks: IO[str]
    answers: IO[str]


def workers_for(device: str) -> int:
    """As many as there are cores for this process; a GPU is one training's at a time."""
    if device == "cuda":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_WORKERS)


def carry_out(
    function: str,
    tasks: Sequence[Task],
    *,
    workers: int,
    progress: Progress | None = None,
    title: str = "trainings",
    done: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """Return the tasks' answers in order; `workers` run at a time, one in-process.

    - `function`: "module:function", which is called with one task.
    - `done`: called with each answer when it is there, with the task's number, in this thread.

    Raises `PlimsollError` with what a worker said where a task failed, and then ends the others.
    """
    bar = progress or Silent()
    bar.begin(title, len(tasks))
    answers: list[Any] = [None] * len(tasks)
    pairs = _here(function, tasks) if workers == 1 else _elsewhere(function, tasks, workers)
    with contextlib.closing(pairs):
        for number, answer in pairs:
            answers[number] = answer
            if done is not None:
                done(number, answer)
            bar.advance()
    return answers


@contextlib.contextmanager
def one_thread(*, unless: bool = False) -> Generator[None]:
    """Compute with one of torch's threads inside, and as many as before after it; `unless`: with as many inside."""
    # Small models are slower on several threads, and their sums are only reproducible with one.
    before = torch.get_num_threads()
    torch.set_num_threads(before if unless else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def named(function: str) -> Callable[..., Any]:
    """The function of that name, "module:function"."""
    module, _, name = function.partition(":")
    return cast("Callable[..., Any]", getattr(importlib.import_module(module), name))


def work() -> None:
    """A worker's own program: does what each line says, and answers with one line."""
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        try:
            said = {"answer": named(request["function"])(request["task"])}
        except Exception:  # noqa: BLE001  (whatever it is, the process that waits has to know)
            said = {"failed": traceback.format_exc()}
        print(json.dumps(said), file=answers, flush=True)


def _here(function: str, tasks: Sequence[Task]) -> Generator[tuple[int, Any]]:
    does = named(function)
    for number, task in enumerate(tasks):
        yield number, does(task)


def _elsewhere(function: str, tasks: Sequence[Task], workers: int) -> Generator[tuple[int, Any]]:
    """Each task's number and answer, as they come."""
    lines = [json.dumps({"function": function, "task": task}) for task in tasks]
    if not lines:
        return
    # Threads are waited for last: those that a task still runs in end with its process.
    with ThreadPoolExecutor(workers) as threads, _hired(min(workers, len(lines))) as free:
        waiting = {threads.submit(_handed, free, line): number for number, line in enumerate(lines)}
        try:
            unread: list[int] = []
            for answer in as_completed(waiting):
                number, line = waiting[answer], answer.result()
                if line is None:
                    unread.append(number)
                else:
                    yield number, _answered(tasks[number], line)
            for number in unread:  # of workers that have died before any task
                _answered(tasks[number], "")
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _hired(count: int) -> "Generator[SimpleQueue[_Worker]]":
    """Workers that wait for tasks; afterwards they are gone, whatever they are at."""
    free: SimpleQueue[_Worker] = SimpleQueue()
    processes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(count):
            process = subprocess.Popen(
                [sys.executable, "-c", _BEGIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            processes.append(process)
            assert process.stdin is not None
            assert process.stdout is not None
            free.put(_Worker(process=process, tasks=process.stdin, answers=process.stdout))
        yield free
    finally:
        for process in processes:
            process.kill()
            process.communicate()


# A worker that has died of one task is handed the next one before the first is known to have failed. Which of the two
# futures comes first is by chance, and only the first task is to blame.
def _handed(free: "SimpleQueue[_Worker]", line: str) -> str | None:
    """Return the next free worker's answer; less than a line if it dies of the task, None if it had died before."""
    worker = free.get()
    try:
        worker.tasks.write(line + "\n")
        worker.tasks.flush()
        return worker.answers.readline()
    except (BrokenPipeError, ValueError):  # it has died, or all of them have been ended
        return None
    finally:
        free.put(worker)


def _answered(task: Task, line: str) -> Any:
    said = json.loads(line) if line.endswith("\n") else {"failed": "the process has ended"}
    if "failed" not in said:
        return said["answer"]
    raise PlimsollError(
        f"lab: expected the training {task.get('name', dict(task))} to end; got this from its process:\n"
        f"{said['failed']}\nGive it more memory if it was killed; otherwise please report it."
    )
