"""One training of the character model: of torch's modules or of `unit.nn`'s, in one precision, at one learning rate.

Nothing here judges: a training leaves a run, and what became of it is read from there (`analysis`).
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plimsoll.emulate import emulate
from plimsoll.errors import ArgumentError
from plimsoll.precision import Loop, prepare
from plimsoll.scaling import StaticScaler
from plimsoll.unit import optim
from plimsoll.watch import Watch, watch
from plimsoll_lab.experiments.unit.model import Plain, Unit
from plimsoll_lab.running.unwatched_run import Unwatched
from plimsoll_lab.source_text import Batch, held_out_batch, make_batch, standard_library

FEWEST_STEPS = 20
Family = Literal["plain", "unit"]
_BETAS, _EPSILON = (0.9, 0.95), 1e-8
_LOWEST = 0.02  # of the learning rate, at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The sizes of the experiment.

    - `pieces`, `length`: of a micro-batch; `accumulate`: how many of them a step would have. One alone is computed, as
      if all were alike, and its loss is divided by their number, as in gradient accumulation. So a step stands for
      pieces * length * accumulate characters: here 2^19, the half million tokens of GPT-3's smaller models.
    - `plain_rates`, `unit_rates`: the learning rates of either model, ascending; the second is the main one. `seeds`:
      how many trainings there are of each.
    - `every`: how often the watched trainings are recorded. `held_out`: how many pieces are held out.
    """

    steps: int = 300
    warmup: int = 30
    pieces: int = 8
    length: int = 64
    accumulate: int = 1024
    width: int = 64
    layers: int = 2
    heads: int = 4
    plain_rates: tuple[float, ...] = (0.005, 0.01)  # 0.02 is worse: 3.52 bits and not 3.47
    unit_rates: tuple[float, ...] = (0.5, 1.0)
    seeds: int = 3
    every: int = 10
    held_out: int = 256

    def main_rate(self, family: Family) -> float:
        """The learning rate of that model at which all kinds are trained, and watched."""
        rates = self.plain_rates if family == "plain" else self.unit_rates
        return rates[min(1, len(rates) - 1)]

    def rates(self, kind: "Kind") -> tuple[float, ...]:
        """The learning rates of a kind."""
        if not kind.swept:
            return (self.main_rate(kind.family),)
        return self.plain_rates if kind.family == "plain" else self.unit_rates

    def to_dict(self) -> dict[str, object]:
        """As plain data."""
        found: dict[str, object] = asdict(self)
        return found | {"plain_rates": list(self.plain_rates), "unit_rates": list(self.unit_rates)}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> "Setup":
        """What `to_dict` gave."""
        given = dict(told)
        given["plain_rates"], given["unit_rates"] = tuple(told["plain_rates"]), tuple(told["unit_rates"])
        return cls(**given)


def setup_for(steps: int | None, *, full: bool) -> Setup:
    """The sizes for that many steps."""
    whole = Setup()
    if full:
        whole = replace(
            whole,
            plain_rates=(0.005, 0.01, 0.02),
            unit_rates=(0.5, 1.0, 2.0),
            steps=1000,
            warmup=100,
            pieces=32,
            length=128,
            accumulate=128,
            width=128,
            layers=4,
            seeds=5,
        )
    if steps is None:
        return whole
    if steps < FEWEST_STEPS:
        raise ArgumentError(
            f"lab unit: expected {FEWEST_STEPS} steps or more, so that there is something to learn; got {steps}. "
            f"Use {whole.steps}."
        )
    return replace(whole, steps=steps, warmup=min(whole.warmup, steps // 10))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to train: of which modules, in which level's arithmetic, at which loss scale, products in which formats.

    `swept`: at every learning rate; otherwise at the main one alone.
    """

    name: str
    title: str
    family: Family
    precision: str = "amp-fp16"
    scale: float = 1.0
    forward: str | None = None
    backward: str | None = None
    swept: bool = True


KINDS = (
    Kind(name="fp16", title="FP16, no loss scale", family="plain"),
    Kind(name="fp16-2048", title="FP16, loss scale 2,048", family="plain", scale=2048.0, swept=False),
    Kind(name="fp32", title="FP32", family="plain", precision="fp32"),
    Kind(name="unit-fp32", title="unit-scaled, FP32", family="unit", precision="fp32"),
    Kind(name="unit-fp16", title="unit-scaled, FP16", family="unit", swept=False),
    Kind(name="unit-fp8", title="unit-scaled, FP8 (OCP)", family="unit", forward="e4m3", backward="e5m2", swept=False),
    Kind(
        name="unit-fp8-fnuz", title="unit-scaled, FP8 (FNUZ)", family="unit", forward="e4m3fnuz", backward="e5m2fnuz",
        swept=False,
    ),
    Kind(name="unit-fp8-level", title="unit-scaled, level fp8-unit", family="unit", precision="fp8-unit", swept=False),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training; `watched`: with the spectra of all its tensors, and not its losses alone."""

    kind: Kind
    rate: float
    seed: int
    run: Path
    watched: bool = False


def train(job: Job, setup: Setup, device: str) -> None:
    """Trains from the weights and on the batches of that seed, whatever the precision, and leaves the run."""
    torch.manual_seed(job.seed)
    model = make_model(job.kind.family, setup).to(device)
    optimizer = make_optimizer(model, job.rate, setup)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _part_of_rate(step, setup))
    scaler = None if job.kind.precision == "fp8-unit" else StaticScaler(job.kind.scale, device=device)
    level = "fp32" if job.kind.forward else job.kind.precision  # FP8 brings its own arithmetic (`_arithmetic`)
    with (
        _record(job, setup, model, optimizer) as record,
        prepare(
            model, optimizer, level, scaler=scaler, schedulers=[schedule],
            watch=record if isinstance(record, Watch) else None,
        ) as loop,
    ):  # fmt: skip
        for step in range(setup.steps):
            batch = make_batch(standard_library(), job.seed, step, pieces=setup.pieces, length=setup.length)
            with loop.forward(), _arithmetic(job.kind):
                loss = _loss(model, batch, device)
            record.log(train_bits=loss.detach() / math.log(2.0))
            loop.step(loss / setup.accumulate if job.kind.family == "plain" else loss)
        record.log(bits=_held_out(loop, model, job.kind, setup, device))


def make_model(family: Family, setup: Setup) -> Plain | Unit:
    """The model, as it is drawn."""
    made = Plain if family == "plain" else Unit
    return made(width=setup.width, layers=setup.layers, heads=setup.heads, length=setup.length)


def make_optimizer(model: Plain | Unit, rate: float, setup: Setup) -> torch.optim.Optimizer:
    """AdamW without decay. Gradients that are divided by a number make the same steps if epsilon is too."""
    if isinstance(model, Unit):
        return optim.AdamW(model, lr=rate, betas=_BETAS, eps=_EPSILON, weight_decay=0.0)
    return torch.optim.AdamW(
        model.parameters(), lr=rate, betas=_BETAS, eps=_EPSILON / setup.accumulate, weight_decay=0.0
    )


def _loss(model: Plain | Unit, batch: Batch, device: str) -> Tensor:
    return model.loss(model(batch.inputs.to(device)), batch.targets.to(device))


def _held_out(loop: Loop, model: Plain | Unit, kind: Kind, setup: Setup, device: str) -> Tensor:
    """Bits per character of the text that is held out, in the arithmetic that was trained in."""
    batch = held_out_batch(standard_library(), pieces=setup.held_out, length=setup.length)
    with loop.evaluate(), _arithmetic(kind):
        return _loss(model, batch, device) / math.log(2.0)


def _arithmetic(kind: Kind) -> "contextlib.AbstractContextManager[object]":
    """Around the forward, beside the level's: products in FP8 and all else in FP16, or nothing."""
    if kind.forward is None:
        return contextlib.nullcontext()
    return emulate("fp16", forward=kind.forward, backward=kind.backward)


def _part_of_rate(step: int, setup: Setup) -> float:
    """Up from nothing, then down in a line."""
    rest = (setup.steps - step) / (setup.steps - setup.warmup)
    return min((step + 1) / max(setup.warmup, 1), max(rest, _LOWEST))


def _record(job: Job, setup: Setup, model: nn.Module, optimizer: torch.optim.Optimizer) -> Watch | Unwatched:
    if job.watched:
        return watch(model, optimizer, run=job.run, every=setup.every, shadow_every=None)
    return Unwatched(job.run)


def described(setup: Setup, device: str) -> Mapping[str, object]:
    """What a result says of how it was made."""
    fp16 = "emulated" if device == "cpu" else "the device's own"
    return {
        **setup.to_dict(),
        "device": device,
        "fp16": fp16,
        "fp8": "emulated",
        "text_sha256": standard_library().sha256,
    }
