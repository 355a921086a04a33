"""`perform_all`: every experiment in turn, also after one that fails."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from plimsoll_lab import registry
from plimsoll_lab.bench import Progress
from plimsoll_lab.evidence.outcomes import Outcome, save
from plimsoll_lab.results_folder import made_ready
from plimsoll_lab.running.run_experiment import check, perform
from plimsoll_lab.study import Experiment, Study

OUTCOMES = "outcomes.json"


def perform_all(
    folder: "str | os.PathLike[str]",
    experiments: Iterable[Experiment | Study[Any, Any]] | None = None,
    *,
    seed: int = 0,
    device: str = "cpu",
    full: bool = False,
    progress: Progress | None = None,
    done: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Carry out all experiments, or those given, each into a folder of its name.

    After each, all outcomes so far go to the folder's ``outcomes.json``. One that raises (what it needs is not
    installed, its folder holds other things) has that as its outcome's `error`, and the next is begun.

    - `done`: is told of each outcome.

    Raises, before anything is begun, `ArgumentError` for a seed or a device that none can have, and `RunError` for a
    folder that cannot be written.
    """
    check(seed, device, None)
    target = Path(folder)
    made_ready(target)
    outcomes: list[Outcome] = []
    for experiment in registry.EXPERIMENTS.values() if experiments is None else experiments:
        outcome = _outcome(experiment, target / experiment.name, seed=seed, device=device, full=full, progress=progress)
        outcomes.append(outcome)
        save(outcomes, target / OUTCOMES)
        if done is not None:
            done(outcome)
    return outcomes


def _outcome(
    experiment: Experiment | Study[Any, Any],
    folder: Path,
    *,
    seed: int,
    device: str,
    full: bool,
    progress: Progress | None,
) -> Outcome:
    try:
        return Outcome.of(perform(experiment, folder, seed=seed, device=device, full=full, progress=progress))
    except Exception as error:  # noqa: BLE001  (whatever it is, it is told, and the other experiments can go on)
        return Outcome(experiment=experiment.name, error=f"{type(error).__name__}: {error}", device=device)
