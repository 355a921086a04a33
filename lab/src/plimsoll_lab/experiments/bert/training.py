"""One small BERT through both of its trainings, in one precision: masked tokens first, spans then.

Nothing here judges: a training leaves two runs, of one phase each, and the answers of the tuned model to the questions
that are held out; what became of it is read from there (`analysis`).
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from plimsoll import unit
from plimsoll.emulate import emulate
from plimsoll.errors import ArgumentError
from plimsoll.precision import Loop, prepare
from plimsoll.scaling import StaticScaler
from plimsoll.watch import watch
from plimsoll_lab.experiments.bert.data import LENGTH, asked_batch, batch_of, masked_batch, questions
from plimsoll_lab.experiments.bert.model import MaskedModel, SpanModel
from plimsoll_lab.experiments.bert.scores import best_spans
from plimsoll_lab.experiments.bert.tokenizer import corpus
from plimsoll_lab.running.workers import Task
from plimsoll_lab.source_text import standard_library

FEWEST_STEPS = 20
PHASES = ("masked", "spans")
ANSWERS = "answers.json"
Family = Literal["plain", "unit"]
_BETAS, _EPSILON = (0.9, 0.98), 1e-8
_LOWEST = 0.02  # of the learning rate, at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The sizes of the experiment.

    - `masked_steps`, `span_steps`; `masked_batch`, `span_batch`: the inputs of a micro-batch.
    - `accumulate`: how many micro-batches a step would have. One alone is computed, as if all were alike, and its loss
      is divided by their number, as in gradient accumulation. So a first training's step stands for masked_batch *
      accumulate inputs: here 65,536, as in the largest batches that BERT was trained in (You et al. 2020). The second
      training is of small batches, as BERT's was: nothing is divided there.
    - `plain_rate`; `unit_masked_rate`, `unit_span_rate`: a unit-scaled weight begins at 1 and torch's far below, so
      that one number means different steps. `warmup`: part of the steps.
    """

    masked_steps: int = 60
    span_steps: int = 240
    masked_batch: int = 16
    span_batch: int = 32
    accumulate: int = 4096
    width: int = 64
    layers: int = 2
    heads: int = 4
    plain_rate: float = 0.003
    unit_masked_rate: float = 0.15
    unit_span_rate: float = 0.05
    warmup: float = 0.1
    seeds: int = 2
    every: int = 20

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers."""
        return asdict(self)


def setup_for(steps: int | None, *, full: bool) -> Setup:
    """The sizes for so many steps of the second training, and a quarter as many of the first."""
    whole = Setup()
    if full:
        whole = replace(
            whole, masked_steps=4000, span_steps=3000, masked_batch=128, accumulate=512, width=256, layers=6, heads=8,
            plain_rate=0.001, unit_masked_rate=0.1, unit_span_rate=0.03, seeds=3, every=50,
        )  # fmt: skip
    if steps is None:
        return whole
    if steps < FEWEST_STEPS:
        raise ArgumentError(
            f"lab bert: expected {FEWEST_STEPS} steps or more, so that there is something to learn in either training; "
            f"got {steps}. Use {whole.span_steps}."
        )
    return replace(whole, masked_steps=steps // 4, span_steps=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to train: which model, in which level's arithmetic, with which loss scale, products in which formats.

    `scale`: of the loss; None for the level's own, which is dynamic.
    """

    name: str
    title: str
    family: Family
    precision: str = "amp-fp16"
    scale: float | None = 1.0
    forward: str | None = None
    backward: str | None = None


KINDS = (
    Kind(name="unit-fp8", title="unit-scaled, FP8 (OCP)", family="unit", forward="e4m3", backward="e5m2"),
    Kind(name="unit-fp8-fnuz", title="unit-scaled, FP8 (FNUZ)", family="unit", forward="e4m3fnuz", backward="e5m2fnuz"),
    Kind(name="unit-fp16", title="unit-scaled, FP16", family="unit"),
    Kind(name="unit-fp32", title="unit-scaled, FP32", family="unit", precision="fp32"),
    Kind(name="fp16", title="FP16, no loss scale", family="plain"),
    Kind(name="fp16-scaled", title="FP16, dynamic loss scale", family="plain", scale=None),
    Kind(name="fp32", title="FP32", family="plain", precision="fp32"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training of both phases; its runs are folders of `folder`, named after `PHASES`."""

    kind: Kind
    seed: int
    folder: Path


def train(job: Job, setup: Setup, device: str) -> None:
    """Trains from the weights and on the batches of that seed, whatever the precision."""
    torch.manual_seed(job.seed)
    first = make_model("masked", job, setup).to(device)
    _train_phase("masked", first, job, setup, device)
    torch.manual_seed(job.seed)
    second = make_model("spans", job, setup).to(device)
    second.get_submodule("body").load_state_dict(first.get_submodule("body").state_dict())
    answers = _train_phase("spans", second, job, setup, device)
    (job.folder / ANSWERS).write_text(json.dumps(answers))


def make_model(phase: str, job: Job, setup: Setup) -> nn.Module:
    """The phase's model as it is drawn: of torch's modules, or what `unit.convert` makes of it."""
    made = MaskedModel if phase == "masked" else SpanModel
    sizes = {"width": setup.width, "layers": setup.layers, "heads": setup.heads}
    model = made(vocabulary=len(corpus().vocabulary), **sizes)
    if job.kind.family == "plain":
        return model
    converted = unit.convert(model, inputs_of(phase, job.seed, 0, setup), seed=job.seed)
    assert not converted.coverage
    return converted


def inputs_of(phase: str, seed: int, step: int, setup: Setup) -> tuple[Tensor, ...]:
    """What the phase's model is called with in that step."""
    if phase == "masked":
        masked = masked_batch(seed, step, setup.masked_batch)
        return masked.tokens, torch.ones_like(masked.tokens), masked.places, masked.targets
    asked = asked_batch(seed, step, setup.span_batch)
    return asked.tokens, asked.segments, asked.ends


def make_optimizer(model: nn.Module, phase: str, family: Family, setup: Setup) -> torch.optim.Optimizer:
    """AdamW without decay. Gradients that are divided by a number make the same steps if epsilon is too."""
    if family == "unit":
        rate = setup.unit_masked_rate if phase == "masked" else setup.unit_span_rate
        return unit.optim.AdamW(model, lr=rate, betas=_BETAS, eps=_EPSILON, weight_decay=0.0)
    epsilon = _EPSILON / _divisor(phase, family, setup)
    return torch.optim.AdamW(model.parameters(), lr=setup.plain_rate, betas=_BETAS, eps=epsilon, weight_decay=0.0)


def _divisor(phase: str, family: Family, setup: Setup) -> int:
    """What the loss is divided by. Unit scaling's never is: its gradient is at unit scale whatever the batch is."""
    return setup.accumulate if phase == "masked" and family == "plain" else 1


def _train_phase(phase: str, model: nn.Module, job: Job, setup: Setup, device: str) -> list[list[int]]:
    """Trains one phase into its run; of the second the answers to held-out questions, each a first and a last token."""
    steps = setup.masked_steps if phase == "masked" else setup.span_steps
    optimizer = make_optimizer(model, phase, job.kind.family, setup)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _schedule(steps, setup.warmup))
    scaler = None if job.kind.scale is None else StaticScaler(job.kind.scale, device=device)
    level = "fp32" if job.kind.forward else job.kind.precision  # FP8 brings its own arithmetic (`_arithmetic`)
    divisor = _divisor(phase, job.kind.family, setup)
    with (
        watch(model, optimizer, run=job.folder / phase, every=setup.every, shadow_every=None) as record,
        prepare(model, optimizer, level, scaler=scaler, schedulers=[schedule], watch=record) as loop,
    ):
        for step in range(steps):
            inputs = [x.to(device) for x in inputs_of(phase, job.seed, step, setup)]
            with loop.forward(), _arithmetic(job.kind):
                found = model(*inputs)
            loss = found if phase == "masked" else found[0]
            record.log(nats=loss.detach())
            loop.step(loss / divisor)
        return [] if phase == "masked" else _answers(loop, model, job.kind, device)


def _answers(loop: Loop, model: nn.Module, kind: Kind, device: str) -> list[list[int]]:
    """The answers to all questions that are held out, in the arithmetic that was trained in."""
    asked = batch_of(questions(held_out=True))
    with loop.evaluate(), _arithmetic(kind):
        _, scores = model(asked.tokens.to(device), asked.segments.to(device), asked.ends.to(device))
    first, last = best_spans(scores[:, 0].float().cpu(), scores[:, 1].float().cpu(), asked.segments)
    return cast("list[list[int]]", torch.stack((first, last), dim=1).tolist())


def _arithmetic(kind: Kind) -> "contextlib.AbstractContextManager[object]":
    """Around the forward, beside the level's: products in FP8 and all else in FP16, or nothing."""
    if kind.forward is None:
        return contextlib.nullcontext()
    return emulate("fp16", forward=kind.forward, backward=kind.backward)


def _schedule(steps: int, warmup: float) -> Callable[[int], float]:
    """Up from nothing, then down in a line."""
    rise = max(int(steps * warmup), 1)
    return lambda step: min((step + 1) / rise, max((steps - step) / max(steps - rise, 1), _LOWEST))


def trained(task: Task) -> None:
    """Trains what a task says."""
    train(*from_task(task))


def to_task(job: Job, setup: Setup, device: str) -> Task:
    """A job as JSON-able data."""
    told = {"kind": job.kind.name, "seed": job.seed, "folder": str(job.folder)}
    return {"name": job.folder.name, "job": told, "setup": setup.to_dict(), "device": device}


def from_task(task: Task) -> tuple[Job, Setup, str]:
    """What `to_task` has made."""
    told = task["job"]
    kind = next(kind for kind in KINDS if kind.name == told["kind"])
    return Job(kind=kind, seed=told["seed"], folder=Path(told["folder"])), Setup(**task["setup"]), task["device"]


def described(setup: Setup, device: str) -> Mapping[str, object]:
    """What a result says of how it was made."""
    return {
        **setup.to_dict(),
        "length": LENGTH,
        "device": device,
        "fp16": "emulated" if device == "cpu" else "the device's own",
        "fp8": "emulated",
        "text_sha256": standard_library().sha256,
    }
