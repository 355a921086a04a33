"""Frame of all experiments: sizes, seeds, workers, run folders and settings.

An experiment is a subclass of `Study` in `plimsoll_lab.experiments`. It declares its name, its claim, its sizes and its
ways to train, and it implements `train` (one training, in a worker process) and `measure_with` (all trainings, and the
claims from their runs). `plimsoll_lab.registry` lists it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from plimsoll.errors import ArgumentError
from plimsoll_lab.bench import Bench
from plimsoll_lab.result import Measured
from plimsoll_lab.running.workers import Task, carry_out, named, one_thread, workers_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of an experiment: how long it trains. Subclasses add their own numbers."""

    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way to train. `name` is that of its run folder, `title` is for people."""

    name: str
    title: str


def check_steps(experiment: str, steps: int, fewest: int, usual: int, reason: str) -> None:
    """Raise `ArgumentError` if there are fewer steps than the experiment needs.

    Args:
        experiment: Its name.
        steps: The steps that were asked for.
        fewest: The fewest that it needs.
        usual: The number that the error advises.
        reason: End of the sentence "expected so many steps or more", with its comma.
    """
    if steps < fewest:
        raise ArgumentError(f"lab {experiment}: expected {fewest} steps or more{reason}; got {steps}. Use {usual}.")


def settings_of(sizes: Any, device: str, **more: object) -> dict[str, object]:
    """Return sizes (a dataclass), device and `more` as settings for ``result.json``."""
    fp16 = "emulated" if device == "cpu" else "the device's own"
    return {**asdict(sizes), "device": device, "fp16": fp16, **more}


SizesT = TypeVar("SizesT", bound=Sizes)
KindT = TypeVar("KindT", bound=Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Generic[KindT]):
    """One training: its kind, its seed, its run folder, and if it is watched."""

    kind: KindT
    seed: int
    run: Path
    watched: bool = True


class Study(ABC, Generic[SizesT, KindT]):
    """An experiment.

    - `name`: in `plimsoll lab NAME`. `claim`: what it shows, one sentence. `source`: its rows of the evidence base.
    - `sizes`, `full_sizes`: without and with ``--full``.
    - `fewest_steps`: the least that ``--steps`` may be; `steps_reason` continues the error, with fields of the sizes.
    - `kinds`: ways to train, by unique names.
    """

    name: str
    claim: str
    source: str
    sizes: SizesT
    full_sizes: SizesT
    fewest_steps: int = 1
    steps_reason: str = ""
    kinds: tuple[KindT, ...] = ()

    def setup_for(self, steps: int | None, *, full: bool) -> SizesT:
        """Return the sizes for that many steps.

        Raises:
            ArgumentError: `steps` is below `fewest_steps`.
        """
        whole = self.full_sizes if full else self.sizes
        if steps is None:
            return whole
        check_steps(self.name, steps, self.fewest_steps, whole.steps, self.steps_reason.format(**asdict(whole)))
        return self.shortened(whole, steps)

    def shortened(self, whole: SizesT, steps: int) -> SizesT:
        """Return the sizes with other steps. Override it where other sizes depend on it."""
        return replace(whole, steps=steps)

    def settings(self, bench: Bench) -> Mapping[str, object]:
        """Return the settings as plain data, for ``result.json``."""
        setup = self.setup_for(bench.steps, full=bench.full)
        return settings_of(setup, bench.device, **self.described(setup))

    def described(self, setup: SizesT) -> Mapping[str, object]:  # noqa: ARG002  (for subclasses)
        """Return settings beyond the sizes and the device."""
        return {}

    def measure(self, bench: Bench) -> Measured:
        """Run the experiment at the sizes of `bench`."""
        return self.measure_with(bench, self.setup_for(bench.steps, full=bench.full))

    @abstractmethod
    def measure_with(self, bench: Bench, setup: SizesT, workers: int | None = None) -> Measured:
        """Run the experiment at these sizes in `workers` processes; None: one a core."""

    @abstractmethod
    def train(self, job: Job[KindT], setup: SizesT, device: str) -> Any:
        """Run one training and leave its run folder. The return value must survive JSON."""

    def jobs(self, bench: Bench, seeds: int = 1) -> list[Job[KindT]]:
        """Return a training of each kind and seed; the first seed's are named by kind."""
        return [
            Job(
                kind=kind, seed=bench.seed + number, run=bench.runs / (f"{kind.name}-{number}" if number else kind.name)
            )
            for number in range(seeds)
            for kind in self.kinds
        ]

    def train_all(
        self,
        jobs: Sequence[Job[KindT]],
        setup: SizesT,
        bench: Bench,
        *,
        workers: int | None = None,
    ) -> list[Any]:
        """Run all trainings, and return what `train` returned for each, in their order."""
        tasks = [self.task_of(job, setup, bench.device) for job in jobs]
        with one_thread(unless=bench.full):
            return carry_out(
                f"{__name__}:trained",
                tasks,
                workers=workers_for(bench.device) if workers is None else workers,
                progress=bench.progress,
                title="trainings",
            )

    def task_of(self, job: Job[KindT], setup: SizesT, device: str) -> Task:
        """Return a training as JSON-able data, which `trained` runs in a worker process."""
        study = f"{type(self).__module__}:{type(self).__qualname__}"
        return {
            "name": job.run.name,
            "study": study,
            "kind": job.kind.name,
            "seed": job.seed,
            "run": str(job.run),
            "watched": job.watched,
            "setup": asdict(setup),
            "device": device,
        }


def trained(task: Task) -> Any:
    """Run the training of a task of `Study.task_of`."""
    study: Study[Any, Any] = named(task["study"])()
    kind = next(kind for kind in study.kinds if kind.name == task["kind"])
    job = Job(kind=kind, seed=task["seed"], run=Path(task["run"]), watched=task["watched"])
    return study.train(job, type(study.sizes)(**task["setup"]), task["device"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """An experiment as a record of functions, if it trains nothing by a `Study`."""

    name: str
    claim: str
    source: str
    settings: Callable[[Bench], Mapping[str, object]]
    measure: Callable[[Bench], Measured]
