"""What became of a training of the small detector, read from its run and from nothing else."""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis import View, diagnose
from plimsoll.runs import Run
from plimsoll.spectrum import Spectrum
from plimsoll_lab.models.detector.training import Job
from plimsoll_lab.result import Training
from plimsoll_lab.statistics import Ratio, columns, ratio

COLLECTION = "activation_gradients"
_TOTALS = ("skipped", "repeated", "batches_lost")
_SMOOTHED = 20  # steps that a loss is the mean of
_TENSOR = re.compile(r"((fine|middle|coarse)\.\d+|heads\.\d+):output")
Floats = NDArray[np.float64]


def counted(name: str) -> bool:
    """Whether a tensor is what a convolution, a ReLU or a pooling gives: each once, and all that FP16 would hold."""
    return _TENSOR.fullmatch(name) is not None


def whole_spectrum(run: Run, steps: slice | None = None) -> Spectrum:
    """All gradients of activations of these steps (None: of all), without any scale."""
    found = run.spectra(COLLECTION, steps=steps)
    return sum((spectrum for _, _, name, spectrum in found if counted(name)), Spectrum.empty())


def numbers_of(run: Run) -> dict[str, float]:
    """By name: the loss and the score on held-out scenes, the gradients lost, the batches lost."""
    view = View(run)
    repeated = float(np.nansum(view.scalar("retries")[1]))
    skipped = float(sum(event.kind == "skip" for event in view.events))
    found = {
        "held_out_loss": _finite(view.scalar("held_out_loss")[1][-1]),
        "held_out_map": float(view.scalar("held_out_map")[1][-1]),
        "skipped": skipped, "repeated": repeated, "batches_lost": skipped - repeated,
    }  # fmt: skip
    scale = view.scalar("scale")[1]
    if len(scale):
        found |= {"scale_first": float(np.log2(scale[0])), "scale_end": float(np.log2(scale[-1]))}
    return found | lost(view)


def lost(view: View) -> dict[str, float]:
    """Of the gradients of activations: the part that is zero; of those that are not in FP32, what FP16 made zero.

    Zeros by FP16 are those that shadow steps counted. Steps with a gradient that is not finite do not count.
    """
    cells = view.cells(COLLECTION)
    if cells is None:
        return {}
    chosen = np.array([counted(name) for name in cells.names])[cells.layer]
    broken = np.nan_to_num(cells.nonfinite).sum(axis=0)[cells.at] > 0
    rows = np.flatnonzero(chosen & ~broken)
    count, zeros = (float(cells.column(name)[rows].sum()) for name in ("count", "zeros"))
    found = {"zero": zeros / count if count else math.nan}
    gone = cells.column("underflowed")[rows]
    told = ~np.isnan(gone)
    if told.any():
        underflowed, there = float(gone[told].sum()), float(cells.nonzero[rows][told].sum())
        found |= {"lost": underflowed / (underflowed + there), "zeros_by_fp16": underflowed / float(zeros)}
    return found


def steps_to(run: Run, loss: float) -> float:
    """After how many steps the mean training loss of the last few is at most that; Inf if it never is."""
    steps, smooth = smoothed(run)
    there = np.flatnonzero(smooth <= loss)
    return float(steps[there[0]] + 1) if len(there) else math.inf


def smoothed(run: Run) -> tuple[NDArray[np.int64], Floats]:
    """The training loss as means over so many steps, and the last step of each."""
    steps, loss = run.scalars("train_loss")
    width = min(_SMOOTHED, len(loss))
    total = np.cumsum(np.concatenate([[0.0], loss]))
    return steps[width - 1 :], (total[width:] - total[:-width]) / width


def ratio_of(these: Sequence[Job], those: Sequence[Job]) -> Ratio:
    """The held-out loss of one kind in units of another's, seed by seed."""
    return ratio(*(np.array([_held_out(job) for job in jobs]) for jobs in (these, those)))


def over_seeds(jobs: Sequence[Job], reference: Sequence[Job]) -> dict[str, float]:
    """The numbers of one kind over its seeds: means, and totals of batches; and its held-out loss by another's."""
    each = [numbers_of(Run(job.run)) for job in jobs]
    found = {name: float(np.mean([one[name] for one in each])) for name in each[0] if name not in _TOTALS}
    found |= {name: float(sum(one[name] for one in each)) for name in _TOTALS}
    against = ratio_of(jobs, reference)
    return found | {"of_fp32": against.mean, "of_fp32_low": against.low, "of_fp32_high": against.high}


def judged(job: Job, numbers: Mapping[str, float], verdict: str, *, good: bool) -> Training:
    """A training with its findings, for the report."""
    run = Run(job.run)
    steps, loss = run.scalars("train_loss")
    return Training(
        name=job.run.name, title=job.kind.title, run=job.run, numbers=numbers, outcome=verdict, good=good,
        series=columns(steps, loss), series_of="loss", findings=tuple(diagnose(run)),
    )  # fmt: skip


def _held_out(job: Job) -> float:
    return _finite(Run(job.run).scalars("held_out_loss")[1][-1])


def _finite(value: float) -> float:
    return float(value) if math.isfinite(value) else math.inf
