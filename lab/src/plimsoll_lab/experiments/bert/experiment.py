"""Experiment `bert` (U6): a small BERT in FP16 and FP8 without a loss scale.

It is converted to unit scale. The model is trained to fill in masked tokens of Python's standard library, and then to
answer questions on its source with a span of it, scored as SQuAD is: both in the same precision. The unit-scaled model
is what `unit.convert` makes of the plain one, loss included; the second training takes over the weights of the first by
their names.

What FP16 needs to fail is stated, not hidden: the first training's loss is a micro-batch's share of a step of 65,536
inputs, as in the largest batches that BERT was trained in. The second training's batches are small, as
BERT's are, and FP16 trains in them as FP32 does: what it lacks there is what the first training was to give.

Precisions are compared within one model, seed by seed from the same weights on the same batches, and both models with
each other at rates that were chosen by hand in a few trials of one seed.
"""

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from plimsoll import unit
from plimsoll.diagnosis import View, diagnose
from plimsoll.emulate import emulate
from plimsoll.precision import Loop, prepare
from plimsoll.runs import Run
from plimsoll.scaling import StaticScaler
from plimsoll.watch import watch
from plimsoll_lab.bench import Bench
from plimsoll_lab.experiments.bert.data import (
    LENGTH,
    Question,
    asked_batch,
    batch_of,
    best_spans,
    corpus,
    exact,
    f1,
    masked_batch,
    questions,
)
from plimsoll_lab.result import Claim, Measured, Training, claims as claims_of
from plimsoll_lab.running.workers import Task, carry_out, one_thread, workers_for
from plimsoll_lab.source_text import standard_library
from plimsoll_lab.statistics import columns, lost
from plimsoll_lab.study import Experiment, check_steps, settings_of


class Block(nn.Module):
    """Attention and two layers, each beside a residual and in front of a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape, (batch, length, width)."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v)
        x = self.norm1(x + self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return self.norm2(x + self.down(functional.gelu(self.up(x))))


class Body(nn.Module):
    """The layers that both trainings share."""

    def __init__(self, *, vocabulary: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.words, self.segments = nn.Embedding(vocabulary, width), nn.Embedding(2, width)
        self.register_buffer("places", waves(LENGTH, width))
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        """The states (batch, length, width) of tokens (batch, length)."""
        return self.blocks(self.norm(self.words(tokens) + self.places + self.segments(segments)))


class MaskedModel(nn.Module):
    """BERT for the first training: layer, norm and readout at predicted places."""

    def __init__(self, *, vocabulary: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.body = Body(vocabulary=vocabulary, width=width, layers=layers, heads=heads)
        self.transform, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.readout = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, segments: Tensor, places: Tensor, targets: Tensor) -> Tensor:
        """The mean loss, in nats."""
        states = self.body(tokens, segments).flatten(0, 1)[places]
        scores = self.readout(self.norm(functional.gelu(self.transform(states))))
        return functional.cross_entropy(scores, targets)


class SpanModel(nn.Module):
    """BERT for tuning: two scores a token, of the answer's first and last one."""

    def __init__(self, *, vocabulary: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.body = Body(vocabulary=vocabulary, width=width, layers=layers, heads=heads)
        self.ends = nn.Linear(width, 2)

    def forward(self, tokens: Tensor, segments: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of both ends (batch, 2), and the scores (batch, 2, length)."""
        scores = self.ends(self.body(tokens, segments)).transpose(1, 2)
        return functional.cross_entropy(scores.flatten(0, 1), ends.flatten()), scores


def waves(length: int, width: int) -> Tensor:
    """Return the first transformer's sines and cosines, with a mean square of 1.

    Vaswani et al. 2017.
    """
    rates = 10_000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * rates
    return math.sqrt(2.0) * torch.cat((angles.sin(), angles.cos()), dim=1)


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


def setup_for(steps: int | None, *, full: bool) -> Setup:
    """Return sizes for so many steps of the second training, a quarter of the first."""
    whole = Setup()
    if full:
        whole = replace(
            whole, masked_steps=4000, span_steps=3000, masked_batch=128, accumulate=512, width=256, layers=6, heads=8,
            plain_rate=0.001, unit_masked_rate=0.1, unit_span_rate=0.03, seeds=3, every=50,
        )  # fmt: skip
    if steps is None:
        return whole
    check_steps(
        "bert", steps, FEWEST_STEPS, whole.span_steps, ", so that there is something to learn in either training"
    )
    return replace(whole, masked_steps=steps // 4, span_steps=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to train: model, level, loss scale, formats of products.

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
    """One training of both phases; its runs in `folder` are named after `PHASES`."""

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
    """Return the phase's model as drawn: torch's modules, or converted ones."""
    made = MaskedModel if phase == "masked" else SpanModel
    sizes = {"width": setup.width, "layers": setup.layers, "heads": setup.heads}
    model = made(vocabulary=len(corpus().vocabulary), **sizes)
    if job.kind.family == "plain":
        return model
    converted = unit.convert(model, inputs_of(phase, job.seed, 0, setup), seed=job.seed)
    assert not converted.coverage
    return converted


def inputs_of(phase: str, seed: int, step: int, setup: Setup) -> tuple[Tensor, ...]:
    """Return the inputs of the phase's model in that step."""
    if phase == "masked":
        masked = masked_batch(seed, step, setup.masked_batch)
        return masked.tokens, torch.ones_like(masked.tokens), masked.places, masked.targets
    asked = asked_batch(seed, step, setup.span_batch)
    return asked.tokens, asked.segments, asked.ends


def make_optimizer(model: nn.Module, phase: str, family: Family, setup: Setup) -> torch.optim.Optimizer:
    """Return AdamW without decay, with epsilon divided as the gradients are."""
    if family == "unit":
        rate = setup.unit_masked_rate if phase == "masked" else setup.unit_span_rate
        return unit.optim.AdamW(model, lr=rate, betas=_BETAS, eps=_EPSILON, weight_decay=0.0)
    epsilon = _EPSILON / _divisor(phase, family, setup)
    return torch.optim.AdamW(model.parameters(), lr=setup.plain_rate, betas=_BETAS, eps=epsilon, weight_decay=0.0)


def _divisor(phase: str, family: Family, setup: Setup) -> int:
    """Return the number that the loss is divided by.

    It is 1 for unit scaling: its gradient is at unit scale whatever the batch is.
    """
    return setup.accumulate if phase == "masked" and family == "plain" else 1


def _train_phase(phase: str, model: nn.Module, job: Job, setup: Setup, device: str) -> list[list[int]]:
    """Train a phase into its run; return the answers of the second phase."""
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
    """Return the answers to all held-out questions, in the training's arithmetic."""
    asked = batch_of(questions(held_out=True))
    with loop.evaluate(), _arithmetic(kind):
        _, scores = model(asked.tokens.to(device), asked.segments.to(device), asked.ends.to(device))
    first, last = best_spans(scores[:, 0].float().cpu(), scores[:, 1].float().cpu(), asked.segments)
    return cast("list[list[int]]", torch.stack((first, last), dim=1).tolist())


def _arithmetic(kind: Kind) -> "contextlib.AbstractContextManager[object]":
    """Return a context of the forward: FP8 products and FP16 around, or nothing."""
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
    fields = {"kind": job.kind.name, "seed": job.seed, "folder": str(job.folder)}
    return {"name": job.folder.name, "job": fields, "setup": asdict(setup), "device": device}


def from_task(task: Task) -> tuple[Job, Setup, str]:
    """Return the arguments that `to_task` was given."""
    job = task["job"]
    kind = next(kind for kind in KINDS if kind.name == job["kind"])
    return Job(kind=kind, seed=job["seed"], folder=Path(job["folder"])), Setup(**task["setup"]), task["device"]


def described(setup: Setup, device: str) -> Mapping[str, object]:
    """Return a result's settings."""
    return settings_of(setup, device, length=LENGTH, fp8="emulated", text_sha256=standard_library().sha256)


_LAST = 0.1  # of the first training's steps, whose mean loss is what it ends at
GOOD = 3.0  # points of F1 behind FP32, below which a training has come to what it should
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A training's exact match and F1 in per cent, and its masked loss in nats."""

    exact: float
    f1: float
    nats: float


Scores = Mapping[str, Sequence[Score]]


def scores(jobs: Sequence[Job]) -> dict[str, list[Score]]:
    """The scores of all trainings, by kind, in the seeds' order."""
    asked = questions(held_out=True)
    found: dict[str, list[Score]] = {}
    for job in sorted(jobs, key=lambda job: job.seed):
        found.setdefault(job.kind.name, []).append(_score(job, asked))
    return found


def _score(job: Job, asked: Sequence[Question]) -> Score:
    given: list[tuple[int, int]] = json.loads((job.folder / ANSWERS).read_text())
    points = scored(asked, given)
    _, nats = Run(job.folder / PHASES[0]).scalars("nats")
    tail = float(nats[-max(int(len(nats) * _LAST), 1) :].mean())
    return Score(exact=points[0], f1=points[1], nats=tail if math.isfinite(tail) else math.inf)


def scored(asked: Sequence[Question], given: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return exact match and F1, in per cent, of answers as first and last tokens."""
    pairs = [
        (question.tokens[first : last + 1], question.tokens[question.first : question.last + 1])
        for question, (first, last) in zip(asked, given, strict=True)
    ]
    right, near = (100.0 * sum(score(*pair) for pair in pairs) / len(pairs) for score in (exact, f1))
    return right, near


def mean(found: Scores, kind: str, what: str) -> float:
    """The mean of exact, f1 or nats over the seeds."""
    return float(np.mean([getattr(score, what) for score in found[kind]]))


def behind(found: Scores, kind: str, other: str) -> float:
    """Return how many points of F1 a kind is behind another, in the seeds' mean."""
    return mean(found, other, "f1") - mean(found, kind, "f1")


def nats_over(found: Scores, kind: str, other: str) -> float:
    """The last loss of the first training over another's, in the mean over seeds."""
    return mean(found, kind, "nats") / mean(found, other, "nats")


def judged(kind: Kind, job: Job, phase: str, found: Scores) -> Training:
    """Judge one phase of one kind, with the run of the first seed."""
    run = Run(job.folder / phase)
    view = View(run)
    findings = tuple(diagnose(view))
    short = behind(found, kind.name, "fp32")
    numbers = {what: mean(found, kind.name, what) for what in ("exact", "f1", "nats")} | {"behind_fp32": short}
    numbers |= {name: value for name, value in lost(view).items() if name == "lost_after"}
    numbers["alarms"] = float(sum(finding.severity == "alarm" for finding in findings))
    ratio = nats_over(found, kind.name, "fp32")
    good = ratio < 1.02 if phase == PHASES[0] else short < GOOD
    steps, nats = run.scalars("nats")
    return Training(
        name=f"{job.folder.name}-{phase}", title=f"{kind.title}: {_TITLES[phase]}", run=run.path, numbers=numbers,
        outcome="as FP32" if good else "trails", good=good, findings=findings, series_of="loss",
        series=columns(steps, nats),
    )  # fmt: skip


_TITLES = {"masked": "masked", "spans": "answers"}


_TRAINED = "plimsoll_lab.experiments.bert.experiment:trained"
_POINTS = 3.0  # of F1: what the published differences to FP32 stay within
_WITHIN = 1.02  # of FP32's loss on masked tokens
_TRAILS = 1.05
_SOUND = 0.01  # of gradients lost
Numbers = Mapping[str, Mapping[str, float]]


def measure(bench: Bench) -> Measured:
    """All trainings, and what they show."""
    return measure_with(bench, setup_for(bench.steps, full=bench.full), workers=workers_for(bench.device))


def measure_with(bench: Bench, setup: Setup, workers: int) -> Measured:
    """Do the same with your own sizes."""
    jobs = jobs_of(bench, setup)
    for job in jobs:
        job.folder.mkdir()
    with one_thread(unless=bench.full):
        tasks = [to_task(job, setup, bench.device) for job in jobs]
        carry_out(_TRAINED, tasks, workers=workers, progress=bench.progress)
    found = scores(jobs)
    first = {job.kind.name: job for job in jobs if job.seed == bench.seed}
    trainings = [judged(kind, first[kind.name], phase, found) for phase in PHASES for kind in KINDS]
    numbers = {training.name: training.numbers for training in trainings}
    own = {kind.name: numbers[f"{first[kind.name].folder.name}-{PHASES[0]}"] for kind in KINDS}
    return Measured(trainings=_ordered(trainings), claims=claims(found, own), said=_said(found))


def jobs_of(bench: Bench, setup: Setup) -> list[Job]:
    """Every training: of each kind and seed."""
    return [
        Job(kind=kind, seed=bench.seed + seed, folder=bench.runs / f"{kind.name}-{bench.seed + seed}")
        for seed in range(setup.seeds)
        for kind in KINDS
    ]


def _ordered(trainings: list[Training]) -> tuple[Training, ...]:
    """FP16's failure first: its report is the one that is opened."""
    return tuple(sorted(trainings, key=lambda training: training.good))


def claims(found: Scores, numbers: Numbers) -> tuple[Claim, ...]:
    """Return the experiment's claims, from all scores and each kind's first training."""
    return (*_of_plain(found, numbers), *_of_masked(found), *_of_answers(found), *_of_gradients(numbers))


def _of_plain(found: Scores, numbers: Numbers) -> tuple[Claim, ...]:
    return claims_of(
        f"""
        fp32-answers | fp32_answers | at least 40.0 points of F1
            | FP32: learns to answer; F1 is far above that of any one answer to all
        fp16-fails | fp16_fails | at least {_TRAILS} of FP32's loss
            | FP16 with no loss scale, masked tokens: trails FP32
        fp16-underflow | numbers.fp16.lost_after | at least 0.5 of gradients
            | FP16 with no loss scale, masked tokens: most gradients are zero
        scaled-masked | scaled_masked | at most {_WITHIN} of FP32's loss
            | FP16 with a dynamic loss scale, masked tokens: as FP32
        scaled-answers | scaled_answers | at most {_POINTS} points of F1 behind
            | FP16 with a dynamic loss scale: answers as FP32 does
        """,
        numbers=numbers,
        fp32_answers=mean(found, "fp32", "f1"),
        fp16_fails=nats_over(found, "fp16", "fp32"),
        scaled_masked=nats_over(found, "fp16-scaled", "fp32"),
        scaled_answers=behind(found, "fp16-scaled", "fp32"),
    )


_UNIT = (("unit-fp16", "FP16"), ("unit-fp8", "FP8 (OCP)"), ("unit-fp8-fnuz", "FP8 (FNUZ)"))


def _of_masked(found: Scores) -> tuple[Claim, ...]:
    return tuple(
        Claim(f"{kind}-masked", f"unit-scaled {title}, masked tokens: as unit-scaled FP32, with no loss scale",
              nats_over(found, kind, "unit-fp32"), at_most=_WITHIN, unit="of unit-scaled FP32's loss")
        for kind, title in _UNIT
    )  # fmt: skip


def _of_answers(found: Scores) -> tuple[Claim, ...]:
    same = (
        Claim(f"{kind}-answers", f"unit-scaled {title}: answers as unit-scaled FP32 does, with no loss scale",
              behind(found, kind, "unit-fp32"), at_most=_POINTS, unit="points of F1 behind")
        for kind, title in _UNIT
    )  # fmt: skip
    plain = (
        Claim(f"{kind}-plain", f"unit-scaled {title}: answers as plain FP32 does",
              behind(found, kind, "fp32"), at_most=_POINTS, unit="points of F1 behind")
        for kind, title in (("unit-fp32", "FP32"), ("unit-fp16", "FP16"), ("unit-fp8", "FP8 (OCP)"))
    )  # fmt: skip
    return (*same, *plain)


def _of_gradients(numbers: Numbers) -> tuple[Claim, ...]:
    return claims_of(
        f"""
        unit-nothing-lost | numbers['unit-fp16'].lost_after | at most {_SOUND} of gradients
            | unit-scaled FP16, masked tokens: nearly no gradient is lost
        """,
        numbers=numbers,
    )


def _said(found: Scores) -> tuple[str, ...]:
    answers = "; ".join(
        f"{kind.title} {mean(found, kind.name, 'exact'):.1f} / {mean(found, kind.name, 'f1'):.1f}"
        for kind in reversed(KINDS)
    )
    masked = "; ".join(f"{kind.title} {mean(found, kind.name, 'nats'):.3f}" for kind in reversed(KINDS))
    return (f"Exact match and F1 of held-out questions: {answers}.", f"Loss on masked tokens, in nats: {masked}.")


def _settings(bench: Bench) -> Mapping[str, object]:
    return described(setup_for(bench.steps, full=bench.full), bench.device)


BERT = Experiment(
    name="bert",
    claim="A BERT converted to unit scale reaches its FP32 quality in FP16 and FP8 with no loss scale.",
    source="U6",
    settings=_settings,
    measure=measure,
)
