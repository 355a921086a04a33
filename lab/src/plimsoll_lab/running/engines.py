"""What an experiment's tasks run on: processes of this machine, or a Ray cluster; the same tasks, the same answers."""

from collections.abc import Callable, Sequence
from typing import Any

from plimsoll_lab.experiment import Engine, Progress
from plimsoll_lab.running.ray_engine import carry_out_on_ray
from plimsoll_lab.running.workers import Task, carry_out, workers_for


def carry_out_on(
    engine: Engine,
    function: str,
    tasks: Sequence[Task],
    *,
    device: str,
    progress: Progress | None = None,
    title: str = "trainings",
    done: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """The answer to each task, in the tasks' order, see `carry_out`; `device`: what a task needs.

    Raises `MissingExtraError` where the engine is not installed.
    """
    if engine == "ray":
        return carry_out_on_ray(
            function, tasks, gpus=int(device == "cuda"), progress=progress, title=title, done=done
        )  # fmt: skip
    return carry_out(function, tasks, workers=workers_for(device), progress=progress, title=title, done=done)
