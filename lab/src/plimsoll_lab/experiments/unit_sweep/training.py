"""One training of the sweep: from a configuration to bits per character; and as a task for workers.

What FP16 needs to fail is stated, not hidden, and is what `lab unit` does: the loss that is computed is a micro-batch's
share of a step over 2^19 characters, as in gradient accumulation. One micro-batch alone is computed, as if all were
alike. The sum of their gradients would be so many times its own: SGD's learning rate is multiplied by the number, and
AdamW, which does not see the factor, has its epsilon divided by it. Unit scaling's loss is not divided.
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plimsoll.errors import ArgumentError, PlimsollError
from plimsoll.precision import Loop, prepare
from plimsoll.scaling import StaticScaler
from plimsoll.unit import optim
from plimsoll.watch import watch
from plimsoll_lab.experiments.unit_sweep.grid import RATES, Configuration, Design, Norm, Optimizer, Way
from plimsoll_lab.experiments.unit_sweep.model import PLAIN, UNIT, Characters
from plimsoll_lab.experiments.unit_sweep.sgd import groups
from plimsoll_lab.running.workers import Task
from plimsoll_lab.source_text import Batch, held_out_batch, make_batch, standard_library

FEWEST_STEPS = 20
LOSS_SCALE = 2048.0
TRAINED = f"{__name__}:trained"
_BETAS, _EPSILON, _MOMENTUM = (0.9, 0.95), 1e-8, 0.9
_LOWEST = 0.02  # of the learning rate, at the end
_PROBED = 64  # pieces of the batch that gradients are compared at
_STEP = 2.0  # between neighbours in a row of learning rates
# The middle of each row, by norm; tried by hand on designs of two layers with seed 0. A unit-scaled weight begins at 1
# and torch's far below: one number means different steps. (With SGD it nearly does not, see `sgd`.)
_MIDDLE: Mapping[tuple[bool, Optimizer], Mapping[Norm, float]] = {
    (False, "adamw"): {"pre": 0.025, "post": 0.0125, "no": 0.025},
    (False, "sgd"): {"pre": 0.25, "post": 0.25, "no": 0.125},
    (True, "adamw"): {"pre": 1.0, "post": 0.25, "no": 0.5},
    (True, "sgd"): {"pre": 0.5, "post": 0.5, "no": 0.25},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The sizes of the sweep.

    - `pieces`, `length`: of a micro-batch; `accumulate`: how many of them a step would have.
    - `held_out`: how many pieces are held out. `every`: how often a watched training is recorded.
    """

    steps: int = 100
    warmup: int = 10
    pieces: int = 16
    length: int = 16
    accumulate: int = 2048
    width: int = 32
    held_out: int = 128
    every: int = 10

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def setup_for(steps: int | None, *, full: bool) -> Setup:
    """The sizes for that many steps; the micro-batches of a step have 2^19 characters together."""
    whole = Setup()
    if full:
        whole = replace(whole, steps=1000, warmup=100, pieces=16, length=64, accumulate=512, width=128, held_out=256)
    if steps is None:
        return whole
    if steps < FEWEST_STEPS:
        raise ArgumentError(
            f"lab unit-sweep: expected {FEWEST_STEPS} steps or more, so that there is something to learn; got {steps}. "
            f"Use {whole.steps}."
        )
    return replace(whole, steps=steps, warmup=min(whole.warmup, steps // 10))


def rate_of(configuration: Configuration) -> float:
    """The learning rate: places in a row are a factor of two apart, the middle one has place 2."""
    design, unit = configuration.design, configuration.way.scaling == "unit"
    return _MIDDLE[unit, design.optimizer][design.norm] * _STEP ** (configuration.rate - RATES // 2)


def train(
    configuration: Configuration, setup: Setup, *, seed: int, device: str, run: Path | None = None
) -> dict[str, float]:
    """Trains from the weights and on the batches of that seed; watched into a run where one is named.

    Gives bits per character of held-out text, of the last tenth of the training, and of its first step.
    """
    torch.manual_seed(seed)
    unit = configuration.way.scaling == "unit"
    model = Characters(configuration.design, UNIT if unit else PLAIN, width=setup.width, length=setup.length).to(device)
    optimizer = make_optimizer(model, configuration, setup, seed)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _part_of_rate(step, setup))
    scaler = StaticScaler(LOSS_SCALE if configuration.way.scaling == "static" else 1.0, device=device)
    level = "fp32" if configuration.way.precision == "fp32" else "amp-fp16"
    record = None if run is None else watch(model, optimizer, run=run, every=setup.every, shadow_every=None)
    losses: list[Tensor] = []
    with (
        contextlib.nullcontext() if record is None else record,
        prepare(model, optimizer, level, scaler=scaler, schedulers=[schedule], watch=record) as loop,
    ):
        for step in range(setup.steps):
            batch = make_batch(standard_library(), seed, step, pieces=setup.pieces, length=setup.length)
            with loop.forward():
                loss = _loss(model, batch, device)
            losses.append(loss.detach() / math.log(2.0))
            if record is not None:
                record.log(train_bits=losses[-1])
            loop.step(loss if unit else loss / setup.accumulate)
        bits = _held_out(loop, model, setup, device)
        if record is not None:
            record.log(bits=bits)
    trained = torch.stack(losses)
    tail = trained[-max(setup.steps // 10, 1) :].mean()
    return {"bits": bits.item(), "train_bits": tail.item(), "first_bits": trained[0].item()}


def make_optimizer(
    model: Characters, configuration: Configuration, setup: Setup, seed: int = 0
) -> torch.optim.Optimizer:
    """The optimizer, for gradients that are divided by the number of micro-batches unless they are unit-scaled."""
    rate, unit = rate_of(configuration), configuration.way.scaling == "unit"
    if configuration.design.optimizer == "sgd":
        if unit:
            return torch.optim.SGD(_groups(model, configuration.design, setup, seed, rate), lr=rate, momentum=_MOMENTUM)
        return torch.optim.SGD(model.parameters(), lr=rate * setup.accumulate, momentum=_MOMENTUM)
    if unit:
        return optim.AdamW(model, lr=rate, betas=_BETAS, eps=_EPSILON, weight_decay=0.0)
    return torch.optim.AdamW(
        model.parameters(), lr=rate, betas=_BETAS, eps=_EPSILON / setup.accumulate, weight_decay=0.0
    )


def _groups(model: Characters, design: Design, setup: Setup, seed: int, rate: float) -> list[dict[str, Any]]:
    """See `sgd`; the batch is none that is trained on first."""
    device = model.readout.weight.device
    assert isinstance(device, torch.device)
    twin = Characters(design, PLAIN, width=setup.width, length=setup.length).to(device)
    drawn = make_batch(standard_library(), seed, setup.steps, pieces=_PROBED, length=setup.length)
    return groups(model, twin, Batch(inputs=drawn.inputs.to(device), targets=drawn.targets.to(device)), rate)


def to_task(configuration: Configuration, setup: Setup, *, seed: int, device: str) -> Task:
    """A training as JSON-able data."""
    return {
        "name": configuration.name,
        "configuration": configuration.to_dict(),
        "setup": setup.to_dict(),
        "seed": seed,
        "device": device,
        "text_sha256": standard_library().sha256,
    }


def trained(task: Task) -> dict[str, float]:
    """Trains what a task says, wherever this is; raises `PlimsollError` where the text is another there."""
    here = standard_library().sha256
    if here != task["text_sha256"]:
        raise PlimsollError(
            "lab unit-sweep: expected Python's standard library to be the same text on every machine of the sweep; got "
            f"{here[:12]} here and {task['text_sha256'][:12]} where it began. Install the same Python everywhere."
        )
    told = dict(task["configuration"])
    rate = told.pop("rate")
    way = Way(precision=told.pop("precision"), scaling=told.pop("scaling"))
    configuration = Configuration(design=Design(**told), way=way, rate=rate)
    return train(configuration, Setup(**task["setup"]), seed=task["seed"], device=task["device"])


def _loss(model: Characters, batch: Batch, device: str) -> Tensor:
    return model.loss(model(batch.inputs.to(device)), batch.targets.to(device))


def _held_out(loop: Loop, model: Characters, setup: Setup, device: str) -> Tensor:
    """Bits per character of the text that is held out, in the arithmetic that was trained in."""
    batch = held_out_batch(standard_library(), pieces=setup.held_out, length=setup.length)
    with loop.evaluate():
        return _loss(model, batch, device) / math.log(2.0)


def _part_of_rate(step: int, setup: Setup) -> float:
    """Up from nothing, then down in a line."""
    rest = (setup.steps - step) / (setup.steps - setup.warmup)
    return min((step + 1) / max(setup.warmup, 1), max(rest, _LOWEST))
