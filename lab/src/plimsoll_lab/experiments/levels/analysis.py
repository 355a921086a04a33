"""What became of the trainings of the small network, read from their runs and from nothing else.

Accuracies are compared as differences, seed by seed: trainings of one seed begin alike, see the same pictures, and are
tested on the same ones. A bound of such a difference is Student's, one-sided at 95 %.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy import stats  # pyright: ignore[reportMissingTypeStubs]

from plimsoll.diagnosis import View, diagnose
from plimsoll.runs import Run
from plimsoll_lab.experiments.levels.training import Kind
from plimsoll_lab.result import Training
from plimsoll_lab.statistics import columns, lost

_CONFIDENCE = 0.95
_FAILS = 0.05  # of the pictures, by which a training that fails is behind


def accuracies(runs: Sequence[Path]) -> tuple[float, ...]:
    """The accuracy that each training ended with."""
    return tuple(float(Run(run).scalars("accuracy")[1][-1]) for run in runs)


def behind(these: Sequence[float], those: Sequence[float]) -> float:
    """By how much the first are behind the second at most, with 95 %; NaN of a single pair, which shows no spread.

    >>> round(behind([0.90, 0.91, 0.92], [0.91, 0.92, 0.93]), 6)
    0.01
    """
    differences = np.subtract(those, these)
    if len(differences) < 2:
        return math.nan
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    return float(differences.mean()) + float(stats.t.ppf(_CONFIDENCE, len(differences) - 1)) * error


def judged(kind: Kind, run: Path, fp32: float) -> Training:
    """What became of a watched training; `fp32`: the accuracy of that seed in FP32."""
    view = View(Run(run))
    findings = tuple(diagnose(view))
    (accuracy,) = accuracies([run])
    numbers = {"accuracy": accuracy, "behind_fp32": fp32 - accuracy, **lost(view), **_scale(view), **formats(view.run)}
    steps, loss = view.run.scalars("train_loss")
    good = accuracy > fp32 - _FAILS
    return Training(
        name=kind.name, title=kind.title, run=run, numbers=numbers, good=good, findings=findings,
        outcome="trains" if good else "falls behind", series=columns(steps, loss), series_of="loss",
    )  # fmt: skip


def formats(run: Run) -> dict[str, float]:
    """How many outputs of convolutions, weights and norms' parameters the run recorded in 16 bits, and in FP32."""
    step = run.steps[-1]
    found: dict[str, float] = {}
    for name in run.tensors["activations"]:
        if name.startswith("convolutions") and name.endswith("output"):
            _count(found, f"convolutions_{_format(run, 'activations', name, step)}")
    for name in run.tensors["weights"]:
        what = "norms" if name.startswith("norms") else "weights"
        _count(found, f"{what}_{_format(run, 'weights', name, step)}")
    return found


def _format(run: Run, collection: str, name: str, step: int) -> str:
    source = run.spectrum(collection, name, step).source
    return "unknown" if source is None else source.format


def _count(found: dict[str, float], key: str) -> None:
    found[key] = found.get(key, 0.0) + 1.0


def _scale(view: View) -> Mapping[str, float]:
    """The loss scale as exponents, first and last."""
    _, scale = view.scalar("scale")
    return {"scale_begin": math.log2(scale[0]), "scale_end": math.log2(scale[-1])} if len(scale) else {}
