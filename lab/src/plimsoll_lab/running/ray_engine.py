"""Tasks on a Ray cluster: the one that is there, or one of this machine for the time that it takes.

A task goes to Ray as the name of its function and JSON-able data, as to the local workers, so that machines of the
cluster need nothing but the same Plimsoll. Each has one CPU, one thread, and a GPU if it needs one. Ray repeats the
task of a machine that is lost; an error in a task ends them all.
"""

import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

from plimsoll.errors import BackendError, MissingExtraError, PlimsollError
from plimsoll_lab.experiment import Progress, Silent
from plimsoll_lab.running.workers import Task, named, one_thread, workers_for

_RETRIES = 3  # of a task whose machine is lost
# Read by Ray when it starts: no report of use to its makers, and GPUs hidden from tasks that ask for none.
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def carry_out_on_ray(
    function: str,
    tasks: Sequence[Task],
    *,
    gpus: int = 0,
    progress: Progress | None = None,
    title: str = "trainings",
    done: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """The answer to each task, in the tasks' order; `gpus`: how many each task needs. Otherwise see `carry_out`.

    Raises `MissingExtraError` without Ray, `BackendError` where `RAY_ADDRESS` names a cluster that does not answer or
    that has no such GPU, and `PlimsollError` with what a task said that failed.
    """
    ray = imported_ray()
    told = progress or Silent()
    answers: list[Any] = [None] * len(tasks)
    if not tasks:
        return answers
    with _cluster(ray):
        _check_resources(ray, gpus)
        told.begin(f"{title} on Ray, {ray.cluster_resources().get('CPU', 0):.0f} CPUs", len(tasks))
        remote = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=_RETRIES)(does)
        waiting = {remote.remote(function, json.dumps(task)): number for number, task in enumerate(tasks)}
        try:
            while waiting:
                (first,), _ = ray.wait(list(waiting), num_returns=1)
                number = waiting.pop(first)
                answers[number] = _answer(ray, tasks[number], first)
                if done is not None:
                    done(number, answers[number])
                told.advance()
        finally:
            for left in waiting:
                ray.cancel(left, force=True)
    return answers


def does(function: str, task: str) -> Any:
    """What a machine of the cluster does with one task."""
    with one_thread():
        return named(function)(json.loads(task))


def imported_ray() -> Any:
    """The module ray; raises `MissingExtraError` with what to install."""
    try:
        import ray  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]
    except ImportError as error:
        raise MissingExtraError(
            "lab, engine ray: expected the package ray; got none. Install it: pip install 'ray>=2.9'"
        ) from error
    return ray


@contextlib.contextmanager
def _cluster(ray: Any) -> Generator[None]:
    """Connected: by the caller, whose connection stays; to a cluster that runs; or to one of this machine's own."""
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    handler = signal.getsignal(signal.SIGTERM)  # Ray has one of its own, and leaves it
    with _environment():
        try:
            ray.init(address="auto", **quiet)
        except ConnectionError as error:
            if "RAY_ADDRESS" in os.environ:
                raise BackendError(
                    f"lab, engine ray: expected the cluster of RAY_ADDRESS to answer; got none at "
                    f"{os.environ['RAY_ADDRESS']}. Start it, or unset RAY_ADDRESS for a local one."
                ) from error
            ray.init(address="local", num_cpus=workers_for("cpu"), include_dashboard=False, **quiet)
    try:
        yield
    finally:
        ray.shutdown()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _environment() -> Generator[None]:
    """Ray's settings for as long as it starts; those that the user has made stay."""
    added = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _check_resources(ray: Any, gpus: int) -> None:
    """A task that no machine can take would wait for ever."""
    if ray.cluster_resources().get("GPU", 0) < gpus:
        raise BackendError(
            "lab, engine ray: expected a cluster with a GPU for device=cuda; got none that Ray knows of. Use cpu, or "
            "start Ray with --num-gpus on the machines that have one."
        )


def _answer(ray: Any, task: Task, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        raise PlimsollError(
            f"lab: expected the training {task.get('name', dict(task))} to end; got this from Ray:\n{error}\n"
            "Start again with the same folder: what is done is kept."
        ) from error
