"""One training of the LSTM language model, with all three techniques of FP16 training or with one of them left out.

Nothing here judges: a training leaves a run, and what became of it is read from there (`experiment`).
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll.emulate import emulate
from plimsoll.errors import ArgumentError
from plimsoll.precision import Loop, MasterWeights, prepare
from plimsoll.scaling import StaticScaler
from plimsoll.watch import Watch, watch
from plimsoll_lab.running.workers import Task
from plimsoll_lab.source_text import SYMBOLS, Batch, held_out_batch, make_batch, standard_library

FEWEST_STEPS = 20
CHUNK = 4  # products that the first tensor cores add before they round to FP16
_EPSILON = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The sizes of the experiment.

    - `pieces`, `length`: of a micro-batch; `accumulate`: how many of them a step would have. One alone is computed, as
      if all were alike, and its loss is divided by their number, as in gradient accumulation. So a step stands for
      pieces * length * accumulate characters: here 2^19, the half million tokens of GPT-3's smaller models.
    - `rate` until `low_from` of the steps, then `low_rate`, as at the end of a schedule.
    - `every`: how often a training is recorded. `held_out`: how many pieces are held out, `tested`: how often.
    """

    steps: int = 240
    low_from: float = 2 / 3
    rate: float = 0.01
    low_rate: float = 2e-5
    pieces: int = 8
    length: int = 16
    accumulate: int = 4096
    width: int = 64
    layers: int = 1
    every: int = 10
    held_out: int = 256

    @property
    def low_at(self) -> int:
        """The first step at the low rate."""
        return int(self.steps * self.low_from)

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers."""
        return asdict(self)


def setup_for(steps: int | None, *, full: bool) -> Setup:
    """The sizes for that many steps."""
    whole = Setup(steps=3000, pieces=16, length=64, accumulate=512, width=256, layers=2) if full else Setup()
    if steps is None:
        return whole
    if steps < FEWEST_STEPS:
        raise ArgumentError(
            f"lab techniques: expected {FEWEST_STEPS} steps or more, so that there is something to learn at either "
            f"rate; got {steps}. Use {whole.steps}."
        )
    return replace(whole, steps=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to train: `name` is its run folder's; what it has of the three techniques."""

    name: str
    title: str
    precision: str = "fp16-master"
    scaled: bool = True
    masters: bool = True
    wide_sums: bool = True


KINDS = (
    Kind(name="unscaled", title="FP16 without loss scaling", scaled=False),
    Kind(name="no-masters", title="FP16 without master weights", masters=False),
    Kind(name="narrow-sums", title="FP16 without FP32 accumulation", wide_sums=False),
    Kind(name="all", title="FP16 with all three techniques"),
    Kind(name="fp32", title="FP32", precision="fp32"),
)


class Language(nn.Module):
    """Characters, an LSTM over them, and of each the scores of the next."""

    def __init__(self, *, width: int, layers: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(SYMBOLS, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.readout = nn.Linear(width, SYMBOLS)

    def forward(self, characters: Tensor) -> Tensor:
        """Scores (pieces, length, symbols) of characters (pieces, length)."""
        return self.readout(self.lstm(self.characters(characters))[0])


def loss_of(model: Language, batch: Batch, device: str) -> Tensor:
    """The mean loss in nats, computed in FP32."""
    scores = model(batch.inputs.to(device)).float()
    return functional.cross_entropy(scores.flatten(0, 1), batch.targets.to(device).flatten())


def train(kind: Kind, setup: Setup, run: Path, *, seed: int, device: str) -> None:
    """Trains from the same weights and batches as every other kind of that seed, and leaves the run."""
    torch.manual_seed(seed)
    model = Language(width=setup.width, layers=setup.layers).to(device)
    # Gradients that are divided by a number make the same steps if epsilon is too.
    optimizer = torch.optim.Adam(model.parameters(), lr=setup.rate, eps=_EPSILON / setup.accumulate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1.0 if step < setup.low_at else setup.low_rate / setup.rate
    )
    scaler = None if kind.scaled else StaticScaler(1.0, device=device)
    with (
        watch(model, optimizer, run=run, every=setup.every, shadow_every=None) as record,
        prepare(model, optimizer, kind.precision, scaler=scaler, schedulers=[schedule], watch=record) as loop,
    ):
        if not kind.masters:
            optimizer.plimsoll_update = "own"  # pyright: ignore[reportAttributeAccessIssue]
        for step in range(setup.steps):
            _step(
                loop,
                model,
                kind,
                setup,
                record,
                make_batch(standard_library(), seed, step, pieces=setup.pieces, length=setup.length),
                device,
            )
            if step + 1 in (setup.low_at, setup.steps):
                record.log(bits=_held_out(loop, model, setup, device))


def _step(loop: Loop, model: Language, kind: Kind, setup: Setup, record: Watch, batch: Batch, device: str) -> None:
    with loop.forward(), _sums(kind):
        loss = loss_of(model, batch, device)
    record.log(train_bits=loss.detach() / math.log(2.0))
    loop.step(loss / setup.accumulate)
    if not kind.masters:
        forget_masters(loop)


def forget_masters(loop: Loop) -> None:
    """Makes the FP16 weights all that there is: what their rounding has cut off of the step is gone."""
    masters = loop.optimizer
    assert isinstance(masters, MasterWeights)
    masters.take_model_weights()


def _sums(kind: Kind) -> "contextlib.AbstractContextManager[object]":
    """Around the forward, beside the level's arithmetic: products that are summed in FP16, or nothing."""
    if kind.wide_sums:
        return contextlib.nullcontext()
    return emulate("fp16", lists=None, accumulate="fp16", chunk=CHUNK)


def _held_out(loop: Loop, model: Language, setup: Setup, device: str) -> Tensor:
    """Bits per character of the text that is held out; its sums are FP32's in every kind."""
    with loop.evaluate():
        batch = held_out_batch(standard_library(), pieces=setup.held_out, length=setup.length)
        return loss_of(model, batch, device) / math.log(2.0)


def trained(task: Task) -> None:
    """Trains what a task says."""
    kind = next(kind for kind in KINDS if kind.name == task["name"])
    train(kind, Setup(**task["setup"]), Path(task["run"]), seed=task["seed"], device=task["device"])


def task_of(kind: Kind, setup: Setup, run: Path, *, seed: int, device: str) -> Task:
    """A training as JSON-able data."""
    return {"name": kind.name, "setup": setup.to_dict(), "run": str(run), "seed": seed, "device": device}


def described(setup: Setup, device: str) -> Mapping[str, object]:
    """What a result says of how it was made."""
    fp16 = "emulated" if device == "cpu" else "the device's own"
    text = standard_library().sha256
    return {**setup.to_dict(), "device": device, "fp16": fp16, "fp16_sums": "emulated", "text_sha256": text}
