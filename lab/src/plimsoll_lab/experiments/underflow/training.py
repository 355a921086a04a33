"""One training of the experiment on underflow: a small CLIP or a small detector, in FP16 or BF16, with shadow steps.

Nothing here judges: what became of a training is read from its run (`analysis`).
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plimsoll.errors import ArgumentError
from plimsoll.precision import prepare
from plimsoll.watch import watch
from plimsoll_lab.experiments.clip.data import Batch, make_batch
from plimsoll_lab.experiments.clip.model import Clip, contrastive_loss
from plimsoll_lab.models.detector.data import scenes
from plimsoll_lab.models.detector.model import Detector, detection_loss
from plimsoll_lab.running.workers import Task

Network = Literal["clip", "detector"]
FEWEST_STEPS = 180  # of which the early part, 20, has the samples that a trend needs after the warm-up
_SAMPLES = 180  # of a training, about; a ninth of them is early
_OTHERS = 50_000  # batches from this number on are of no training: theirs are the captions that do not belong


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The sizes of the experiment.

    A training is judged early when a ninth of it is done, as the evidence does: at step 1,000 of 9,000.

    `gain` is one binade above that of the experiment `clip`, the most that FP16's activations bear. The learning rate
    is the claim's 1e-4, thirty times as high: the width alone, 32 for 768, would allow 24 times, and layers are few.
    `mismatched`: such a share of the captions belongs to other pictures, as in what is gathered from the web.
    """

    steps: int = 1800
    seeds: int = 1
    warmup: int = 20
    clip_batch: int = 16
    clip_width: int = 32
    clip_layers: int = 2
    clip_heads: int = 2
    gain: float = 2.0**12
    clip_rate: float = 3e-3
    mismatched: float = 1 / 8
    detector_batch: int = 8
    detector_width: int = 8
    detector_size: int = 32
    detector_rate: float = 1e-3

    @property
    def early(self) -> int:
        """How many steps are done when the early verdict is given."""
        return self.steps // 9

    @property
    def every(self) -> int:
        """How many steps lie between two samples, each of which is a shadow step."""
        return max(1, self.steps // _SAMPLES)

    def to_dict(self) -> dict[str, object]:
        """As plain numbers."""
        return asdict(self)


def setup_for(steps: int | None, *, full: bool) -> Setup:
    """The sizes for that many steps of each training; `full` trains for the 9,000 of the evidence, from three seeds.

    In a short training the warm-up is shorter too: most of its early part is behind it.
    """
    whole = Setup(steps=9000, seeds=3) if full else Setup()
    if steps is None:
        return whole
    if steps < FEWEST_STEPS:
        raise ArgumentError(
            f"lab underflow: expected {FEWEST_STEPS} steps or more, so that a ninth of them has a trend; got {steps}. "
            f"Use {Setup().steps}."
        )
    return replace(whole, steps=steps, warmup=min(whole.warmup, steps // 90))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A network in a precision; `name` begins those of its run folders."""

    name: str
    title: str
    network: Network
    precision: Literal["amp-fp16", "amp-bf16"]


KINDS = (
    Kind(name="clip-fp16", title="CLIP, FP16, stock scaler", network="clip", precision="amp-fp16"),
    Kind(name="clip-bf16", title="CLIP, BF16", network="clip", precision="amp-bf16"),
    Kind(name="detector-fp16", title="detector, FP16, stock scaler", network="detector", precision="amp-fp16"),
    Kind(name="detector-bf16", title="detector, BF16", network="detector", precision="amp-bf16"),
)
BY_NAME = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training; of a seed, all precisions begin with the same weights and see the same batches."""

    kind: Kind
    seed: int
    run: Path

    def to_task(self, setup: Setup, device: str) -> Task:
        """As JSON-able data, for a worker."""
        told = {"kind": self.kind.name, "seed": self.seed, "run": str(self.run)}
        return {"name": self.run.name, **told, "setup": setup.to_dict(), "device": device}


TRAINED = f"{__name__}:trained"


def trained(task: Task) -> None:
    """Trains what a task says, and leaves its run."""
    job = Job(kind=BY_NAME[task["kind"]], seed=task["seed"], run=Path(task["run"]))
    train(job, Setup(**task["setup"]), task["device"])


def train(job: Job, setup: Setup, device: str) -> None:
    """Trains, and leaves the run."""
    torch.manual_seed(job.seed)
    model, loss_of, rate = _NETWORKS[job.kind.network](setup, job.seed, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1)
    with _loop(job, setup, model, optimizer, device) as loop:
        for step in range(setup.steps):
            with loop.forward():
                loss = loss_of(step)
            loop.step(loss)


@contextmanager
def _loop(job: Job, setup: Setup, model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> Generator[Any]:
    """The training step, watched. Every sample is a shadow step: in BF16 too zeros that FP32 lacks are counted."""
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / setup.warmup))
    scaler = torch.amp.GradScaler(device) if job.kind.precision == "amp-fp16" else None
    collect = ("gradients", "activation_gradients")
    with (
        watch(
            model, optimizer, run=job.run, every=setup.every, shadow_every=setup.every, collect=collect, scaler=scaler
        ) as seen,
        prepare(model, optimizer, job.kind.precision, scaler=scaler, schedulers=[warmup], watch=seen) as loop,
    ):
        yield loop


_Made = tuple[nn.Module, Callable[[int], Tensor], float]


def _clip(setup: Setup, seed: int, device: str) -> _Made:
    """The small CLIP, the loss of each step's batch, and the learning rate."""
    model = Clip(
        width=setup.clip_width, layers=setup.clip_layers, heads=setup.clip_heads, gain=setup.gain
    ).to(device)  # fmt: skip

    def loss_of(step: int) -> Tensor:
        batch = captioned(seed, step, setup.clip_batch, setup.mismatched)
        return contrastive_loss(model(batch.pictures.to(device), batch.captions.to(device)))

    return model, loss_of, setup.clip_rate


def captioned(seed: int, step: int, size: int, mismatched: float) -> Batch:
    """The batch of that step, in which about such a share of the captions is of other pictures."""
    batch, others = (make_batch(seed, at, size) for at in (step, _OTHERS + step))
    generator = torch.Generator().manual_seed(100_003 * seed + _OTHERS + step)
    wrong = torch.rand(size, 1, generator=generator) < mismatched
    return replace(batch, captions=torch.where(wrong, others.captions, batch.captions))


def _detector(setup: Setup, seed: int, device: str) -> _Made:
    """Likewise of the detector."""
    model = Detector(width=setup.detector_width, size=setup.detector_size).to(device)

    def loss_of(step: int) -> Tensor:
        seen = scenes(seed, step, setup.detector_batch, setup.detector_size).to(device)
        return detection_loss(model(seen.pictures), seen, model.anchors)

    return model, loss_of, setup.detector_rate


_NETWORKS: Mapping[Network, Callable[[Setup, int, str], _Made]] = {"clip": _clip, "detector": _detector}


def described(setup: Setup, device: str) -> Mapping[str, object]:
    """What a result says of how it was made."""
    fp16 = "emulated" if device == "cpu" else "the device's own"
    return {**setup.to_dict(), "early": setup.early, "every": setup.every, "device": device, "fp16": fp16}
