"""Experiment `unit-sweep` (U6): many small character models, with and without unit scaling, in FP32 and FP16.

Every design (sequence layer, norm, residual scheme, optimizer, depth: `grid`) is trained at several learning
rates in five ways: FP32 and FP16 with nothing, FP16 with a static loss scale of 2,048, and unit-scaled in both. Each
way is compared with FP32, each at its best learning rate. By default a fixed part of the grid is trained; `full` trains
all of it, larger and for longer. Either goes on where it was ended: results stand in the folder's ``sweep.jsonl``.

What FP16 needs to fail is stated in `training`. Four trainings of one design are repeated with a watch, to see what
becomes of their gradients.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from plimsoll.diagnosis import View, diagnose
from plimsoll.runs import Run
from plimsoll.version import __version__
from plimsoll_lab.bench import Bench
from plimsoll_lab.experiments.unit_sweep.analysis import Scores, mean, scores, unlearned
from plimsoll_lab.experiments.unit_sweep.claims import TRAILS, claims
from plimsoll_lab.experiments.unit_sweep.figure import TITLES, figure, table
from plimsoll_lab.experiments.unit_sweep.grid import (
    FP16,
    FP32,
    STATIC,
    UNIT_FP16,
    UNIT_FP32,
    WAYS,
    Configuration,
    Design,
    Way,
    default_grid,
    whole_grid,
)
from plimsoll_lab.experiments.unit_sweep.ledger import LEDGER, Ledger, results
from plimsoll_lab.experiments.unit_sweep.training import TRAINED, Setup, rate_of, setup_for, to_task, train
from plimsoll_lab.result import Measured, Training
from plimsoll_lab.running.workers import carry_out, one_thread, workers_for
from plimsoll_lab.source_text import standard_library
from plimsoll_lab.statistics import columns, lost
from plimsoll_lab.study import Experiment

FIGURE, TABLE = "report-sweep.html", "sweep.txt"
WATCHED = (FP16, STATIC, UNIT_FP16, FP32)
_DESIGN = Design(sequence="attention", norm="pre", residual="running-mean", optimizer="adamw", depth=2)


def measure(bench: Bench) -> Measured:
    """All trainings that the folder has no result of yet, and what all of them show."""
    return measure_with(bench, setup_for(bench.steps, full=bench.full), grid_for(bench.full))


def measure_with(bench: Bench, setup: Setup, grid: Sequence[Configuration]) -> Measured:
    """Likewise, with sizes and a grid of one's own."""
    with contextlib.nullcontext() if bench.full else one_thread():
        found = scores(grid, swept(bench, setup, grid))
        trainings = tuple(_watched(bench, setup, grid, found))
    numbers = {way: training.numbers for way, training in zip(WATCHED, trainings, strict=True)}
    _leave(bench.runs.parent, found)
    return Measured(trainings=trainings, claims=claims(found, numbers), said=_said(found, len(grid)))


def grid_for(full: bool) -> tuple[Configuration, ...]:
    """The whole grid, or the fixed part of it that a default run trains."""
    return whole_grid() if full else default_grid()


def swept(bench: Bench, setup: Setup, grid: Sequence[Configuration]) -> Mapping[str, Mapping[str, float]]:
    """The result of each configuration: those of the ledger, and the others trained and written there one by one."""
    names = {configuration.name for configuration in grid}
    with Ledger(ledger_of(bench), identity(bench, setup), names) as ledger:
        left = [configuration for configuration in grid if configuration.name not in ledger.found]
        carry_out(
            TRAINED, [to_task(each, setup, seed=bench.seed, device=bench.device) for each in left],
            workers=workers_for(bench.device), progress=bench.progress,
            done=lambda number, answer: ledger.add(left[number].name, answer),
        )  # fmt: skip
        return ledger.found


def ledger_of(bench: Bench) -> Path:
    """The file of results; beside the folder of runs, so that it stays when an experiment begins again."""
    return bench.runs.parent / LEDGER


def identity(bench: Bench, setup: Setup) -> Mapping[str, object]:
    """What all results of one ledger have in common; results of another are not comparable, and are refused."""
    return {
        **setup.to_dict(),
        "seed": bench.seed,
        "device": bench.device,
        "text_sha256": standard_library().sha256,
        "plimsoll": __version__,
        "torch": torch.__version__,
    }


def _watched(bench: Bench, setup: Setup, grid: Sequence[Configuration], found: Scores) -> Iterator[Training]:
    """One design again, each way at the learning rate that is best in FP32, with the spectra of all its tensors."""
    bench.progress.begin("watched trainings", len(WATCHED))
    design = watched_design(grid)
    for way in WATCHED:
        other = UNIT_FP32 if way.scaling == "unit" else FP32
        configuration = Configuration(design=design, way=way, rate=found.best_rate(design, other))
        run = bench.runs / str(way)
        train(configuration, setup, seed=bench.seed, device=bench.device, run=run)
        yield _judged(configuration, run, found)
        bench.progress.advance()


def watched_design(grid: Sequence[Configuration]) -> Design:
    """The design whose trainings are watched: a transformer where there is one, else the grid's first in all ways."""
    ways: dict[Design, set[Way]] = {}
    for each in grid:
        ways.setdefault(each.design, set()).add(each.way)
    whole = [design for design, there in ways.items() if there == set(WAYS)]
    return _DESIGN if _DESIGN in whole else whole[0]


def _judged(configuration: Configuration, folder: Path, found: Scores) -> Training:
    run = Run(folder)
    findings = tuple(diagnose(run))
    alarms = [finding for finding in findings if finding.severity == "alarm"]
    bits = float(run.scalars("bits")[1][-1])
    ratio = bits / found.best(configuration.design, FP32)
    numbers = {"loss_end": bits, "of_fp32": ratio, "rate": rate_of(configuration)}
    numbers["swept_bits"] = found.bits[configuration.design, configuration.way][configuration.rate]
    numbers["underflow_alarms"] = float(sum(finding.rule.startswith("underflow") for finding in alarms))
    numbers |= lost(View(run))
    steps, loss = run.scalars("train_bits")
    return Training(
        name=folder.name, title=TITLES[configuration.way], run=folder, numbers=numbers, findings=findings,
        outcome="trains" if ratio < TRAILS else "fails", good=ratio < TRAILS, series=columns(steps, loss),
        series_of="loss",
    )  # fmt: skip


def _leave(folder: Path, found: Scores) -> None:
    """The figure and the table, beside the report."""
    figure(found).write_html(folder / FIGURE)
    (folder / TABLE).write_text(table(found), "utf-8")


def _said(found: Scores, count: int) -> tuple[str, ...]:
    ways = (FP16, STATIC, UNIT_FP32, UNIT_FP16)
    ratios = ", ".join(f"{TITLES[way]} {mean(found.pairs(way, FP32)).mean:.3f}" for way in ways)
    designs = {design for design, _ in found.bits}
    none = unlearned(found)
    blind = f" {len(none)} of them learn nothing even in FP32 and are not counted." if none else ""
    return (
        f"{count:,} configurations of {len(designs)} designs.{blind}",
        f"Bits per character at the best learning rate, of plain FP32's, in the mean over designs: {ratios}.",
        f"The figure is {FIGURE}, the table {TABLE}, every result a line of {LEDGER}.",
    )


def _settings(bench: Bench) -> Mapping[str, object]:
    """Refuses a folder whose results are of another setup, before anything in it is changed."""
    setup, grid = setup_for(bench.steps, full=bench.full), grid_for(bench.full)
    told = identity(bench, setup)
    results(ledger_of(bench), told, {configuration.name for configuration in grid})
    fp16 = "emulated" if bench.device == "cpu" else "the device's own"
    return {**told, "fp16": fp16, "configurations": len(grid)}


UNIT_SWEEP = Experiment(
    name="unit-sweep",
    claim="Many designs of small character models fail in FP16; a loss scale of 2,048 or unit scaling repairs them.",
    source="U6",
    settings=_settings,
    measure=measure,
)
