"""What the workers of `test_workers` do."""

import os
import signal
from pathlib import Path

import torch

from plimsoll_lab.running.workers import Task
from tests.support.patience import wait_until


def divided(task: Task) -> float:
    return 1 / 0


def waiting(task: Task) -> None:
    """Fails once the other task runs, or waits for a file of the test, which is not there in time."""
    running, released, ended = (Path(task["folder"]) / name for name in ("running", "released", "ended"))
    if task["fails"]:
        wait_until(running.exists)
        raise ZeroDivisionError
    running.touch()
    try:
        wait_until(released.exists)
    finally:
        ended.touch()


def killed(task: Task) -> None:
    os._exit(1)


def halved(task: Task) -> None:
    """Dies when half of its answer is written."""
    os.write(1, b'{"answer": [1, ')
    os._exit(1)


def interrupted(task: Task) -> int:
    os.kill(os.getpid(), signal.SIGINT)
    return 1


def printed(task: Task) -> int:
    print(task["says"])  # noqa: T201  (what it is about)
    return len(task["says"])


def threads(task: Task) -> int:
    return torch.get_num_threads()
