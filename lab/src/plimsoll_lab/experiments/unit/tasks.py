"""The trainings of the character model as tasks for workers."""

from collections.abc import Sequence
from pathlib import Path

from plimsoll_lab.bench import Progress
from plimsoll_lab.experiments.unit.training import KINDS, Job, Setup, train
from plimsoll_lab.running.workers import Task, carry_out

_TRAINED = f"{__name__}:trained"
_BY_NAME = {kind.name: kind for kind in KINDS}


def train_all(jobs: Sequence[Job], setup: Setup, device: str, workers: int, progress: Progress) -> None:
    """Trains all of them, so many at a time; what comes of a training is its run."""
    carry_out(_TRAINED, [to_task(job, setup, device) for job in jobs], workers=workers, progress=progress)


def trained(task: Task) -> None:
    """Trains what a task says."""
    train(*from_task(task))


def to_task(job: Job, setup: Setup, device: str) -> Task:
    """A job as JSON-able data."""
    told = {"kind": job.kind.name, "rate": job.rate, "seed": job.seed, "run": str(job.run), "watched": job.watched}
    return {"name": job.run.name, "job": told, "setup": setup.to_dict(), "device": device}


def from_task(task: Task) -> tuple[Job, Setup, str]:
    """What `to_task` has made."""
    job = task["job"] | {"kind": _BY_NAME[task["job"]["kind"]], "run": Path(task["job"]["run"])}
    return Job(**job), Setup.from_dict(task["setup"]), task["device"]
