"""Many trainings at once: each worker is a process of one thread, which is given one training after the other.

A worker is an interpreter that runs this module, and reads jobs as lines of JSON. So it imports nothing of the program
that carries the experiment out, which may be a notebook or an unguarded script. What comes of a training is its run.
"""

import contextlib
import json
import subprocess
import sys
import traceback
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO

import torch

from plimsoll.errors import PlimsollError
from plimsoll.lab._experiment import Progress
from plimsoll.lab._unit_quality_train import KINDS, Job, Setup, train

_DONE = "done"
_BEGIN = "from plimsoll.lab._unit_quality_workers import work; work()"
_BY_NAME = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    """A process, and what it reads from and answers to."""

    process: "subprocess.Popen[str]"
    jobs: IO[str]
    answers: IO[str]


def carry_out(jobs: Sequence[Job], setup: Setup, device: str, workers: int, progress: Progress) -> None:
    """Trains all of them, so many at a time; with one worker in this process.

    Raises `PlimsollError` with what a worker said where a training failed, and then ends the others.
    """
    progress.begin("trainings", len(jobs))
    if workers == 1:
        for job in jobs:
            train(job, setup, device)
            progress.advance()
        return
    lines = [to_line(job, setup, device) for job in jobs]
    with _hired(min(workers, len(jobs))) as free, ThreadPoolExecutor(workers) as threads:
        answers = {threads.submit(_handed, free, line): job for line, job in zip(lines, jobs, strict=True)}
        try:
            for answer in as_completed(answers):
                _check(answers[answer], answer.result())
                progress.advance()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def work() -> None:
    """A worker's own program: trains what each line says, and answers with one line."""
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            train(*from_line(line))
            said = _DONE
        except Exception:  # noqa: BLE001  (whatever it is, the process that waits has to know)
            said = traceback.format_exc()
        print(json.dumps(said), file=answers, flush=True)


def to_line(job: Job, setup: Setup, device: str) -> str:
    """A job as one line of JSON."""
    told = {"kind": job.kind.name, "rate": job.rate, "seed": job.seed, "run": str(job.run), "watched": job.watched}
    return json.dumps({"job": told, "setup": setup.to_dict(), "device": device})


def from_line(line: str) -> tuple[Job, Setup, str]:
    """What `to_line` has written."""
    told = json.loads(line)
    job = told["job"] | {"kind": _BY_NAME[told["job"]["kind"]], "run": Path(told["job"]["run"])}
    return Job(**job), Setup.from_dict(told["setup"]), told["device"]


@contextlib.contextmanager
def _hired(count: int) -> "Generator[SimpleQueue[_Worker]]":
    """Workers that wait for jobs; afterwards they are gone, whatever they are at."""
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
            free.put(_Worker(process=process, jobs=process.stdin, answers=process.stdout))
        yield free
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _handed(free: "SimpleQueue[_Worker]", line: str) -> str:
    """What the next worker that is free answers; an empty line where it has died."""
    worker = free.get()
    try:
        worker.jobs.write(line + "\n")
        worker.jobs.flush()
        return worker.answers.readline()
    except (BrokenPipeError, ValueError):  # it has died, or all of them have been ended
        return ""
    finally:
        free.put(worker)


def _check(job: Job, answer: str) -> None:
    said = json.loads(answer) if answer else "the process has ended"
    if said != _DONE:
        raise PlimsollError(
            f"lab unit: expected the training {job.run.name} to end; got this from its process:\n{said}"
            "\nGive it more memory if it was killed; otherwise please report it."
        )
