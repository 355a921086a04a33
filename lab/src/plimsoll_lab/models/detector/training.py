"""One training of the small detector, in one precision with one scaler, watched into a run folder.

Nothing here judges: what became of a training is read from its run (`analysis`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.errors import ArgumentError
from plimsoll.precision import Loop, prepare
from plimsoll.scaling import DynamicScaler, LayerScaler, SpectralScaler, StaticScaler
from plimsoll.watch import watch
from plimsoll_lab.bench import Bench
from plimsoll_lab.models.detector.data import held_out, scenes
from plimsoll_lab.models.detector.model import Detector, detection_loss
from plimsoll_lab.models.detector.scores import mean_average_precision
from plimsoll_lab.running.workers import carry_out, workers_for

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

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers."""
        return asdict(self)


def sized(setup: Setup, experiment: str, steps: int | None, *, full: bool) -> Setup:
    """That setup in full size, or for that many steps; raises `ArgumentError` for too few, in the experiment's name."""
    whole = replace(setup, steps=2000, warmup=100, batch=32, width=32, seeds=5, held_out=512) if full else setup
    if steps is None:
        return whole
    if steps < _FEWEST_STEPS:
        raise ArgumentError(
            f"lab {experiment}: expected {_FEWEST_STEPS} steps or more, so that something is learnt and recorded; got "
            f"{steps}. Use {whole.steps}."
        )
    return replace(whole, steps=steps, warmup=min(whole.warmup, steps // 5), every=min(whole.every, steps // 5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to train. `scaler` is a name in `SCALERS`, None for no scaling; `scale` is for the static one."""

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
    """Every training: of each kind and seed. The first seed's folders have their kinds' names."""
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
            "setup": setup.to_dict(), "device": bench.device,
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
    """Trains from the weights and on the scenes of that seed, whatever the precision, and leaves the run."""
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
    """The share of that step's loss, as a closure: it may have to run again. The batch's own mean is logged."""
    seen = scenes(seed, step, setup.batch).to(device)

    def loss() -> Tensor:
        mean = detection_loss(model(seen.pictures), seen, model.anchors)
        log(train_loss=mean.detach())
        return mean * setup.share

    return loss


def _judged(loop: Loop, model: Detector, setup: Setup, seed: int, device: str) -> dict[str, Tensor | float]:
    """The loss and the mean average precision on scenes that are held out, in the arithmetic that was trained in."""
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


def described(setup: Setup, device: str) -> Mapping[str, object]:
    """What a result says of how it was made."""
    return {**setup.to_dict(), "device": device, "fp16": "emulated" if device == "cpu" else "the device's own"}
