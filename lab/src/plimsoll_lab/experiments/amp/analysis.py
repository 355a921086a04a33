"""What became of the trainings of the benchmark, read from their runs and from nothing else.

Losses are compared as ratios to FP32's, seed by seed, of their means over the last quarter of the steps.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis import View, diagnose
from plimsoll.runs import Run
from plimsoll_lab.result import Training
from plimsoll_lab.statistics import Ratio, columns, ratio

_AGREES = 1.05  # times FP32's loss
_PARTS = 4  # a loss begins with the first of them, and ends with the last
Floats = NDArray[np.float64]


def losses(run: Path) -> Floats:
    """The loss of each step."""
    return Run(run).scalars("train_loss")[1]


def fell_to(loss: Floats) -> float:
    """The part of the loss that is left at the end: the mean of the last quarter, of that of the first."""
    part = max(1, len(loss) // _PARTS)
    return float(loss[-part:].mean() / loss[:part].mean())


def ends(runs: Sequence[Path]) -> Floats:
    """The mean loss over the last quarter of each training; Inf for one that ended in no number."""
    found = [loss[-max(1, len(loss) // _PARTS) :].mean() for loss in map(losses, runs)]
    return np.nan_to_num(np.array(found), nan=np.inf)


def against(these: Sequence[Path], fp32: Sequence[Path]) -> Ratio:
    """The losses at the end as a ratio to FP32's, with Student's bounds over the seeds."""
    return ratio(ends(these), ends(fp32))


def furthest(found: Ratio) -> float:
    """How far from 1 the ratio can be, either way, with 95 % each."""
    return max(found.high - 1.0, 1.0 - found.low)


def judged(name: str, title: str, run: Path, found: Ratio, numbers: Mapping[str, float]) -> Training:
    """What became of a level of a network, with the run that was watched."""
    loss = losses(run)
    good = found.mean < _AGREES
    return Training(
        name=name, title=title, run=run, findings=tuple(diagnose(View(Run(run)))), good=good,
        numbers={"of_fp32": found.mean, "of_fp32_low": found.low, "of_fp32_high": found.high,
                 "fell_to": fell_to(loss), **numbers},
        outcome="agrees with FP32" if good else "leaves FP32", series=columns(np.arange(len(loss)), loss),
        series_of="loss",
    )  # fmt: skip
