"""The trainings of the small CLIP as tasks for workers, and how far all of them have come together."""

import contextlib
import tempfile
import threading
from collections.abc import Generator, Sequence
from pathlib import Path

from plimsoll_lab.bench import Bench, Progress
from plimsoll_lab.experiments.clip.training import Setup, train
from plimsoll_lab.experiments.clip.variants import ALL_KINDS, Kind
from plimsoll_lab.running.workers import Task, carry_out, one_thread

_TRAINED = f"{__name__}:trained"
_LOOK_SECONDS = 0.3


def train_all(kinds: Sequence[Kind], setup: Setup, bench: Bench, workers: int) -> None:
    """Trains all of them, the longest first, so many at a time; what comes of a training is its run."""
    order = sorted(kinds, key=lambda kind: -setup.steps_of(kind))
    with tempfile.TemporaryDirectory() as ticks, _told(kinds, setup, bench.progress, Path(ticks)):
        tasks = [_task(kind, setup, bench, Path(ticks)) for kind in order]
        # A model so small gains nothing from a second thread; and sums have one order on all machines.
        with contextlib.nullcontext() if bench.full else one_thread():
            carry_out(_TRAINED, tasks, workers=workers)


def trained(task: Task) -> None:
    """Trains what a task says, and leaves a byte for each step that is done."""
    with Path(task["ticks"]).open("wb", buffering=0) as ticks:
        train(
            ALL_KINDS[task["name"]], Setup(**task["setup"]), Path(task["run"]), seed=task["seed"],
            device=task["device"], told=lambda: ticks.write(b"."),
        )  # fmt: skip


def _task(kind: Kind, setup: Setup, bench: Bench, ticks: Path) -> Task:
    return {
        "name": kind.name, "setup": setup.to_dict(), "run": str(bench.runs / kind.name), "seed": bench.seed,
        "device": bench.device, "ticks": str(ticks / kind.name),
    }  # fmt: skip


@contextlib.contextmanager
def _told(kinds: Sequence[Kind], setup: Setup, progress: Progress, ticks: Path) -> Generator[None]:
    """Tells of the steps of all trainings while they run, wherever they do."""
    progress.begin(f"{len(kinds)} trainings", sum(setup.steps_of(kind) for kind in kinds))
    over, said = threading.Event(), 0

    def look() -> None:
        nonlocal said
        done = sum(file.stat().st_size for file in ticks.iterdir())
        for _ in range(done - said):
            progress.advance()
        said = done

    def follow() -> None:
        while not over.wait(_LOOK_SECONDS):
            look()

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        over.set()
        follower.join()
        look()
