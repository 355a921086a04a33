"""One training of the small network with batch norm: at one level, with one loss scale, by one set of operation lists.

Nothing here judges: a training leaves a run, and what became of it is read from there (`analysis`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.emulate import CUDA
from plimsoll.errors import ArgumentError
from plimsoll.precision import Loop, Policy, prepare
from plimsoll.scaling import StaticScaler
from plimsoll.watch import Watch, watch
from plimsoll_lab.experiments.levels.model import SmallNet, loss_of, make_pictures
from plimsoll_lab.running.unwatched_run import Unwatched
from plimsoll_lab.running.workers import Task

FEWEST_STEPS = 20
_HELD_OUT_AT = 1_000_000  # a step that no training comes to: its pictures are held out
_CHUNK = 256  # pictures of an evaluation at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The sizes of the experiment.

    - `devices`: the training is one device's share of a step over so many: its loss is divided by their number, and the
      learning rate multiplied, so that in FP32 nothing changes. Gradients are as small as they are in large batches.
    - `learning_rate`: of SGD with momentum, at its highest. `seeds`: trainings of each level; of a loss scale, or of
      other lists, there is one. `held_out`: pictures that accuracy is measured on.
    - `every`: how often the watched trainings are recorded.
    """

    steps: int = 160
    warmup: int = 20
    batch: int = 32
    width: int = 8
    devices: int = 2048
    learning_rate: float = 0.1
    seeds: int = 5
    held_out: int = 512
    every: int = 20


def setup_for(steps: int | None, *, full: bool) -> Setup:
    """The sizes for that many steps."""
    whole = Setup(steps=1000, warmup=100, batch=64, width=32, devices=1024, seeds=5, held_out=8192) if full else Setup()
    if steps is None:
        return whole
    if steps < FEWEST_STEPS:
        raise ArgumentError(
            f"lab levels: expected {FEWEST_STEPS} steps or more, so that there is something to learn; got {steps}. "
            f"Use {whole.steps}."
        )
    return replace(whole, steps=steps, warmup=min(whole.warmup, steps // 5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to train: `scale` is a constant loss scale, None for the level's own; `policy` changes the lists.

    `watched`: the first seed's training leaves the spectra of its tensors, and not its losses alone.
    """

    name: str
    title: str
    level: str
    scale: float | None = None
    policy: Policy | None = None
    watched: bool = False


# X5: another accelerator, whose convolutions are to run in FP32 and whose ReLU is to be asked for in FP32 too.
CHANGED = Policy(operations=CUDA.with_high("conv2d", "relu"))
OF_LEVELS = (
    Kind(name="fp32", title="O0: FP32", level="fp32", watched=True),
    Kind(name="amp-fp16", title="O1: amp-fp16, dynamic scale", level="amp-fp16", watched=True),
    Kind(name="amp-bf16", title="O1 in BF16: amp-bf16", level="amp-bf16"),
    Kind(name="fp16-master", title="O2: fp16-master, dynamic scale", level="fp16-master", watched=True),
    Kind(name="fp16-pure", title="O3: fp16-pure, dynamic scale", level="fp16-pure", watched=True),
    Kind(name="bf16-master", title="bf16-master", level="bf16-master"),
    Kind(name="bf16-stochastic", title="bf16-stochastic", level="bf16-stochastic"),
    Kind(name="bf16-kahan", title="bf16-kahan", level="bf16-kahan"),
)
LISTS = Kind(name="changed-lists", title="O1, lists changed", level="amp-fp16", policy=CHANGED, watched=True)
SCALES = tuple(
    Kind(
        name=f"scale-{scale}", title="O1, no loss scale" if scale == 1 else f"O1, loss scale {scale:,}",
        level="amp-fp16", scale=float(scale), watched=True,
    )
    for scale in (1, 8, 128, 1024, 2**15)
)  # fmt: skip
KINDS = (*OF_LEVELS, LISTS, *SCALES)
_BY_NAME = {kind.name: kind for kind in KINDS}


def trained(task: Task) -> None:
    """Trains what a task of `to_task` says: from the weights and on the pictures of its seed, whatever the level."""
    kind, setup, device = _BY_NAME[task["kind"]], Setup(**task["setup"]), task["device"]
    torch.manual_seed(task["seed"])
    model = SmallNet(setup.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=setup.learning_rate * setup.devices, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _part_of_rate(step, setup))
    scaler = None if kind.scale is None else StaticScaler(kind.scale, device=device)
    with (
        _record(kind, task, setup, model, optimizer) as record,
        prepare(
            model, optimizer, kind.level, scaler=scaler, schedulers=[schedule], policy=kind.policy,
            watch=record if isinstance(record, Watch) else None,
        ) as loop,
    ):  # fmt: skip
        for step in range(setup.steps):
            batch = make_pictures(task["seed"], step, setup.batch, device)
            with loop.forward():
                loss = loss_of(model(batch.pixels), batch.classes)
            record.log(train_loss=loss.detach())
            loop.step(loss / setup.devices)
        record.log(accuracy=_accuracy(loop, task["seed"], setup, device))


def _accuracy(loop: Loop, seed: int, setup: Setup, device: str) -> Tensor:
    """The part of the pictures held out that the model classifies right, in the level's own arithmetic."""
    pictures = make_pictures(seed, _HELD_OUT_AT, setup.held_out, device)
    right = torch.zeros((), device=device)
    with loop.evaluate() as model:
        for start in range(0, setup.held_out, _CHUNK):
            part = slice(start, start + _CHUNK)
            right += (model(pictures.pixels[part]).argmax(dim=1) == pictures.classes[part]).sum()
    return right / setup.held_out


def _part_of_rate(step: int, setup: Setup) -> float:
    """Up from nothing, then down in a line."""
    return min((step + 1) / setup.warmup, (setup.steps - step) / (setup.steps - setup.warmup))


def _record(
    kind: Kind, task: Task, setup: Setup, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Watch | Unwatched:
    run = Path(task["run"])
    if not task["watched"]:
        return Unwatched(run)
    shadow = setup.every if kind.level == "amp-fp16" else None  # tells values that FP16 has lost from true zeros
    return watch(model, optimizer, run=run, every=setup.every, shadow_every=shadow)


def to_task(kind: Kind, seed: int, run: Path, setup: Setup, device: str, *, watched: bool) -> Task:
    """A training as JSON-able data."""
    return {
        "name": run.name, "kind": kind.name, "seed": seed, "run": str(run), "watched": watched,
        "setup": asdict(setup), "device": device,
    }  # fmt: skip


def described(setup: Setup, device: str) -> Mapping[str, object]:
    """What a result says of how it was made."""
    told: dict[str, Any] = asdict(setup)
    return {**told, "device": device, "fp16": "emulated" if device == "cpu" else "the device's own"}
