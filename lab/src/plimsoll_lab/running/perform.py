"""`perform`: an experiment from its beginning to its result on disk; `perform_all`."""

import datetime as dt
import json
import os
import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plimsoll.errors import ArgumentError
from plimsoll.report import html
from plimsoll.runs.storage.atomic_files import replacing
from plimsoll.version import __version__
from plimsoll_lab import registry
from plimsoll_lab.bench import Bench, Progress, Silent
from plimsoll_lab.evidence import Outcome, save
from plimsoll_lab.registry import experiment_named
from plimsoll_lab.result import Measured, Result
from plimsoll_lab.results_folder import RESULT, RUNS, clear, made_ready
from plimsoll_lab.study import Experiment, Study

# -- one experiment ----------------------------------------------------------------------------------------------------


def perform(
    experiment: str | Experiment | Study[Any, Any],
    folder: "str | os.PathLike[str]",
    *,
    seed: int = 0,
    device: str = "cpu",
    steps: int | None = None,
    full: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Carry out an experiment: runs, reports and ``result.json`` go to the folder.

    - `folder`: new, empty, or one that the same experiment has made before; its former results there are replaced.
    - `seed`: of everything that is random. `device`: "cpu", where FP16 is emulated, or "cuda".
    - `steps`: how long each training is; None for as long as the experiment needs. `full`: larger models, for longer.
    - `progress`: called with parts and steps.

    torch's random generator, and all of its settings, are afterwards what they were.

    Raises `ArgumentError` for a name, folder or argument that does not fit, before anything is changed.
    """
    chosen = experiment_named(experiment) if isinstance(experiment, str) else experiment
    check(seed, device, steps)
    target = Path(folder)
    bench = Bench(runs=target / RUNS, seed=seed, device=device, steps=steps, full=full, progress=progress or Silent())
    settings = chosen.settings(bench)
    used = str(settings.get("device", device))  # an experiment may compute on the CPU alone
    clear(target, chosen.name)
    began = time.perf_counter()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if device == "cuda" else []):
        torch.manual_seed(seed)
        measured = chosen.measure(bench)
    reports = _reports(measured, target, bench.progress)
    result = Result(
        experiment=chosen.name, claim=chosen.claim, source=chosen.source, seed=seed, settings=settings,
        measured=measured, folder=target, reports=reports, seconds=time.perf_counter() - began,
        date=dt.datetime.now(dt.UTC).date().isoformat(), device=used, versions=_versions(used),
    )  # fmt: skip
    with replacing(target / RESULT) as file:
        file.write(json.dumps(result.to_dict(), indent=2, allow_nan=False).encode())
    return result


def _reports(measured: Measured, folder: Path, progress: Progress) -> dict[str, Path]:
    """A page of each training; the first one's is the report.html."""
    progress.begin("reports", len(measured.trainings))
    found: dict[str, Path] = {}
    for number, training in enumerate(measured.trainings):
        name = "report.html" if number == 0 else f"report-{training.name}.html"
        found[training.name] = html(training.run, folder / name, title=training.title, findings=training.findings)
        progress.advance()
    return found


def _versions(device: str) -> dict[str, str]:
    found = {"plimsoll": __version__, "torch": torch.__version__, "numpy": np.__version__}
    found |= {"python": platform.python_version(), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    return found


def check(seed: int, device: str, steps: int | None) -> None:
    """Raises `ArgumentError` for what no experiment can have."""
    if not 0 <= seed < 2**31:
        raise ArgumentError(f"lab: expected a seed of 0 to 2^31 - 1; got {seed}. Use 0.")
    if device not in ("cpu", "cuda"):
        raise ArgumentError(f"lab: expected device to be cpu or cuda; got {device!r}. Use cpu, which emulates FP16.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("lab: expected a GPU for device=cuda; got none that torch finds. Use cpu.")
    if steps is not None and steps < 1:
        raise ArgumentError(f"lab: expected 1 step or more; got steps={steps}. Leave it out.")


# -- every experiment in turn, also after one that fails ---------------------------------------------------------------

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

    - `done`: called with each outcome.

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
    except Exception as error:  # noqa: BLE001  (whatever it is, it is reported, and the other experiments can go on)
        return Outcome(experiment=experiment.name, error=f"{type(error).__name__}: {error}", device=device)
