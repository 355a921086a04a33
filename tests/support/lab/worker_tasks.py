"""What the workers of `test_workers` do."""

import os
import signal

import torch

from plimsoll_lab.running.workers import Task


def divided(task: Task) -> float:
    return 1 / 0


def killed(task: Task) -> None:
    os._exit(1)


def interrupted(task: Task) -> int:
    os.kill(os.getpid(), signal.SIGINT)
    return 1


def printed(task: Task) -> int:
    print(task["says"])  # noqa: T201  (what it is about)
    return len(task["says"])


def threads(task: Task) -> int:
    return torch.get_num_threads()
