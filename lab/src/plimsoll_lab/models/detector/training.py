"""Results of a training of the small detector, read from its run alone."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from plimsoll.diagnosis import View, diagnose
from plimsoll.precision import Loop, prepare
from plimsoll.runs import Run
from plimsoll.scaling import DynamicScaler, LayerScaler, SpectralScaler, StaticScaler
from plimsoll.spectrum import Spectrum
from plimsoll.watch import watch
from plimsoll_lab.bench import Bench
from plimsoll_lab.models.detector.model import Detector, detection_loss, held_out, mean_average_precision, scenes
from plimsoll_lab.result import Training
from plimsoll_lab.running.workers import carry_out, workers_for
from plimsoll_lab.statistics import Ratio, columns, ratio
from plimsoll_lab.study import check_steps

_MOMENTUM = 0.9
_LOWEST = 0.05  # of the learning rate, at the end
_RETRIES = 16  # halvings
_WATCHED = ("gradients", "activation_gradients")
_FEWEST_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The sizes of the trainings.

    - `batch`: pictures a step. `share`: what their mean loss is multiplied by, as where other devices have the rest of
      a larger batch: 8 pictures of 2,048 have 2^-8 of the mean.
    - `loudness`: of activations, as in `Detector`. `learning_rate`: of SGD, for the mean itself.
    - `seeds`: how many trainings there are of each kind. `every`: how often they are recorded.
    - `held_out`: on how many scenes they are judged.
    """

    steps: int = 200
    warmup: int = 20
    batch: int = 8
    share: float = 2.0**-8
    width: int = 10
    loudness: float = 2.0**10
    learning_rate: float = 0.005
    seeds: int = 3
    every: int = 20
    held_out: int = 96


def sized(setup: Setup, experiment: str, steps: int | None, *, full: bool) -> Setup:
    """Return that setup in full size, or for that many steps.

    Raises `ArgumentError` for too few, in the experiment's name.
    """
    whole = replace(setup, steps=2000, warmup=100, batch=32, width=32, seeds=5, held_out=512) if full else setup
    if steps is None:
        return whole
    check_steps(experiment, steps, _FEWEST_STEPS, whole.steps, ", so that something is learnt and recorded")
    return replace(whole, steps=steps, warmup=min(whole.warmup, steps // 5), every=min(whole.every, steps // 5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to train: `scaler` of `SCALERS` or None; `scale` for the static one."""

    name: str
    title: str
    precision: str = "amp-fp16"
    scaler: str | None = None
    scale: float = 1.0


Makes = Callable[[nn.Module, str, float], Any]

SCALERS: Mapping[str, Makes] = {
    "static": lambda _, on, scale: StaticScaler(scale, device=on),
    "stock": lambda _, on, __: torch.amp.GradScaler(on),
    "dynamic": lambda _, on, __: DynamicScaler(on),
    "spectral": lambda _, on, __: SpectralScaler(on),
    "layer-spectra": lambda model, _, __: LayerScaler(model),
    "layer-zhao": lambda model, _, __: LayerScaler(model, rule="zhao"),
}
_REPEATS = ("dynamic", "spectral", "layer-spectra", "layer-zhao")  # ours: an overflowed batch is repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training of a kind, from one seed, into one folder."""

    kind: Kind
    seed: int
    run: Path


def jobs_of(bench: Bench, kinds: Sequence[Kind], seeds: int) -> list[Job]:
    """Return all trainings; the first seed's folders have their kinds' names."""
    return [
        Job(kind=kind, seed=bench.seed + seed, run=bench.runs / (f"{kind.name}-{seed}" if seed else kind.name))
        for seed in range(seeds)
        for kind in kinds
    ]


def train_all(jobs: Sequence[Job], setup: Setup, bench: Bench) -> None:
    """All of them, as many at once as there are cores."""
    tasks = [
        {
            "name": job.run.name, "kind": asdict(job.kind), "seed": job.seed, "run": str(job.run),
            "setup": asdict(setup), "device": bench.device,
        }
        for job in jobs
    ]  # fmt: skip
    carry_out(
        f"{__name__}:carried_out", tasks, workers=workers_for(bench.device), progress=bench.progress,
        title="trainings of the detector",
    )  # fmt: skip


def carried_out(task: Mapping[str, Any]) -> None:
    """One task of a worker."""
    job = Job(kind=Kind(**task["kind"]), seed=task["seed"], run=Path(task["run"]))
    train(job, Setup(**task["setup"]), task["device"])


def train(job: Job, setup: Setup, device: str) -> None:
    """Train from the weights and scenes of that seed, and leave the run."""
    torch.manual_seed(job.seed)
    model = Detector(width=setup.width, loudness=setup.loudness).to(device)
    # A loss that is a share of the mean makes the same steps at a learning rate that is as much larger.
    optimizer = torch.optim.SGD(model.parameters(), lr=setup.learning_rate / setup.share, momentum=_MOMENTUM)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _part_of_rate(step, setup))
    kind = job.kind
    scaler = None if kind.scaler is None else SCALERS[kind.scaler](model, device, kind.scale)
    repeats = kind.scaler in _REPEATS
    # A shadow step tells what FP16 has made zero from what is zero in FP32 too.
    shadow_every = setup.every if kind.precision == "amp-fp16" else None
    with (
        watch(
            model, optimizer, run=job.run, every=setup.every, collect=_WATCHED, shadow_every=shadow_every,
            scaler=scaler,
        ) as seen,
        prepare(
            model, optimizer, kind.precision, scaler=scaler, schedulers=[schedule], clip_norm=float("inf"),
            max_retries=_RETRIES if repeats else 0, watch=seen,
        ) as loop,
    ):  # fmt: skip
        for step in range(setup.steps):
            loss_of = _loss_of(model, setup, step, job.seed, device, seen.log)
            if repeats:
                loop.step(loss_of)
            else:
                with loop.forward():
                    loss = loss_of()
                loop.step(loss)
        seen.log(**_judged(loop, model, setup, job.seed, device))
    if isinstance(scaler, LayerScaler):
        scaler.close()


def _loss_of(
    model: Detector, setup: Setup, step: int, seed: int, device: str, log: Callable[..., None]
) -> Callable[[], Tensor]:
    """Return the step's share of loss as a repeatable closure; logs the batch's mean."""
    seen = scenes(seed, step, setup.batch).to(device)

    def loss() -> Tensor:
        mean = detection_loss(model(seen.pictures), seen, model.anchors)
        log(train_loss=mean.detach())
        return mean * setup.share

    return loss


def _judged(loop: Loop, model: Detector, setup: Setup, seed: int, device: str) -> dict[str, Tensor | float]:
    """Return held-out loss and mean average precision, in the training's arithmetic."""
    seen = held_out(seed, setup.held_out).to(device)
    with loop.evaluate():
        found = model(seen.pictures)
        loss = detection_loss(found, seen, model.anchors)
    return {"held_out_loss": loss, "held_out_map": mean_average_precision(found, seen, model.anchors)}


def rate_at(step: int, setup: Setup) -> float:
    """The learning rate of that step, for the share of the loss that is computed."""
    return setup.learning_rate / setup.share * _part_of_rate(step, setup)


def _part_of_rate(step: int, setup: Setup) -> float:
    """Up from nothing, then down in a line."""
    return min((step + 1) / max(setup.warmup, 1), max(1 - step / setup.steps, _LOWEST))


COLLECTION = "activation_gradients"
_TOTALS = ("skipped", "repeated", "batches_lost")
_SMOOTHED = 20  # steps that a loss is the mean of
_TENSOR = re.compile(r"((fine|middle|coarse)\.\d+|heads\.\d+):output")
Floats = NDArray[np.float64]


def counted(name: str) -> bool:
    """Return True for the output of a convolution, a ReLU or a pooling.

    Each is counted once, and these are all that FP16 would hold.
    """
    return _TENSOR.fullmatch(name) is not None


def whole_spectrum(run: Run, steps: slice | None = None) -> Spectrum:
    """All gradients of activations of these steps (None: of all), without any scale."""
    found = run.spectra(COLLECTION, steps=steps)
    return sum((spectrum for _, _, name, spectrum in found if counted(name)), Spectrum.empty())


def numbers_of(run: Run) -> dict[str, float]:
    """Return numbers by name: held-out loss and score, lost gradients and batches."""
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
    """Return the part of activation gradients that is zero, and that FP16 zeroed.

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
    known = ~np.isnan(gone)
    if known.any():
        underflowed, there = float(gone[known].sum()), float(cells.nonzero[rows][known].sum())
        found |= {"lost": underflowed / (underflowed + there), "zeros_by_fp16": underflowed / float(zeros)}
    return found


def steps_to(run: Run, loss: float) -> float:
    """Return the steps until the recent mean loss is at most `loss`, or Inf."""
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
    """Return the numbers of one kind over its seeds: means, and totals of batches."""
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
