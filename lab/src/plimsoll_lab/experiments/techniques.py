"""Experiment `techniques` (N1, N4): an LSTM in FP16 without each of three.

Each technique is left out in turn. The level is `fp16-master`: FP16 weights and tensors, products summed in FP32, a
dynamic loss scale, FP32 masters. Left out are, one at a time, the loss scale (it stays at 1), the masters (each step's
weights are rounded to FP16, and the next begins there), and the wide sums (every product of the forward and the
backward is summed in FP16, four at a time, as the first tensor cores can). All see the same batches as FP32, from the
same weights.

What a small model needs for this is stated, not hidden. Without a loss scale FP16 fails if a step is large: a micro-
batch's loss is its share of a mean over 2^19 characters (`training`). Without masters it is the small updates
that fail: so the last third is at a learning rate as at the end of a schedule, and what it gains is what is compared.
The error of narrow sums grows with their length, and this model's are short: the error is measured for longer ones too.
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from plimsoll.diagnosis import View, diagnose
from plimsoll.emulate import emulate
from plimsoll.precision import Loop, MasterWeights, prepare
from plimsoll.runs import Run
from plimsoll.scaling import StaticScaler
from plimsoll.text import percent
from plimsoll.watch import Watch, watch
from plimsoll_lab.bench import Bench
from plimsoll_lab.result import Claim, Measured, Training, claims as claims_of, of_rows
from plimsoll_lab.running.workers import Task, carry_out, one_thread, workers_for
from plimsoll_lab.source_text import SYMBOLS, Batch, held_out_batch, make_batch, standard_library
from plimsoll_lab.statistics import columns, largest, lost
from plimsoll_lab.study import Experiment, check_steps, settings_of

_LENGTH, _WIDTH, _COLUMNS = 16, 64, 16


def error_of_sums(length: int, seed: int) -> float:
    """Return the relative root mean square error of FP16 sums of that length."""
    states, gradients = _operands(length, seed)
    exact = gradients.T.double() @ states.double()
    with emulate("fp16", lists=None, accumulate="fp16", chunk=CHUNK):
        summed = gradients.T @ states
    return float((summed.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def _operands(length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return FP16 states (length, width) and score gradients (length, symbols).

    Gradients are at a sound loss scale.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Language(width=_WIDTH, layers=1)
        batch = held_out_batch(standard_library(), pieces=length // _LENGTH, length=_LENGTH)
        states = model.lstm(model.characters(batch.inputs))[0].flatten(0, 1)
        targets = batch.targets.flatten()
        gradients = model.readout(states).softmax(dim=1)
        gradients -= torch.nn.functional.one_hot(targets, SYMBOLS)
        frequent = torch.bincount(targets, minlength=SYMBOLS).topk(_COLUMNS).indices
    return states.half(), gradients[:, frequent].half()


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


def setup_for(steps: int | None, *, full: bool) -> Setup:
    """The sizes for that many steps."""
    whole = Setup(steps=3000, pieces=16, length=64, accumulate=512, width=256, layers=2) if full else Setup()
    if steps is None:
        return whole
    check_steps("techniques", steps, FEWEST_STEPS, whole.steps, ", so that there is something to learn at either rate")
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
    """Train from the weights and batches of the seed, and leave the run."""
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
    """Make FP16 weights the only ones: what rounding cut off a step is gone."""
    masters = loop.optimizer
    assert isinstance(masters, MasterWeights)
    masters.take_model_weights()


def _sums(kind: Kind) -> "contextlib.AbstractContextManager[object]":
    """Return a context of the forward with products summed in FP16, or nothing."""
    if kind.wide_sums:
        return contextlib.nullcontext()
    return emulate("fp16", lists=None, accumulate="fp16", chunk=CHUNK)


def _held_out(loop: Loop, model: Language, setup: Setup, device: str) -> Tensor:
    """Return bits per character of held-out text, with FP32's sums in every kind."""
    with loop.evaluate():
        batch = held_out_batch(standard_library(), pieces=setup.held_out, length=setup.length)
        return loss_of(model, batch, device) / math.log(2.0)


def trained(task: Task) -> None:
    """Trains what a task says."""
    kind = next(kind for kind in KINDS if kind.name == task["name"])
    train(kind, Setup(**task["setup"]), Path(task["run"]), seed=task["seed"], device=task["device"])


def task_of(kind: Kind, setup: Setup, run: Path, *, seed: int, device: str) -> Task:
    """A training as JSON-able data."""
    return {"name": kind.name, "setup": asdict(setup), "run": str(run), "seed": seed, "device": device}


def described(setup: Setup, device: str) -> Mapping[str, object]:
    """Return a result's settings."""
    return settings_of(setup, device, fp16_sums="emulated", text_sha256=standard_library().sha256)


_TRAINED = "plimsoll_lab.experiments.techniques:trained"
_ON_THE_CURVE = 1.01  # of FP32's bits
_LEAVES = 1.05
_STALLS = 0.5  # of FP32's gain at the low rate
_SOUND = "on FP32's curve"
_SHORT, _LONG = 128, 8192  # products in a sum: a step's here, and a large model's
Numbers = Mapping[str, Mapping[str, float]]
Floats = NDArray[np.float64]


def measure(bench: Bench) -> Measured:
    """All trainings, and what they show."""
    return measure_with(bench, setup_for(bench.steps, full=bench.full), workers=workers_for(bench.device))


def measure_with(bench: Bench, setup: Setup, workers: int) -> Measured:
    """Do the same with your own sizes."""
    # The slowest comes first, so that no worker is left alone with it at the end.
    ordered = sorted(KINDS, key=lambda kind: kind.wide_sums)
    tasks = [task_of(kind, setup, bench.runs / kind.name, seed=bench.seed, device=bench.device) for kind in ordered]
    with one_thread(unless=bench.full):
        carry_out(_TRAINED, tasks, workers=workers, progress=bench.progress)
        sums = {length: error_of_sums(length, bench.seed) for length in (_SHORT, _LONG)}
    reference = Run(bench.runs / "fp32")
    trainings = tuple(judged(kind, setup, Run(bench.runs / kind.name), reference) for kind in KINDS)
    numbers = {training.name: training.numbers for training in trainings}
    return Measured(trainings=trainings, claims=claims(setup, numbers, sums), said=_said(numbers, sums))


def judged(kind: Kind, setup: Setup, run: Run, reference: Run) -> Training:
    """The training's numbers beside FP32's, its findings, and what became of it."""
    view = View(run)
    findings = tuple(diagnose(view))
    steps, curve = run.scalars("train_bits")
    numbers = beside(curve, reference.scalars("train_bits")[1])
    numbers["before_low"], numbers["end"] = (float(bits) for bits in run.scalars("bits")[1])
    numbers["gained"] = numbers["before_low"] - numbers["end"]
    numbers["of_fp32"] = numbers["end"] / float(reference.scalars("bits")[1][-1])
    numbers["unmoved"] = unmoved(run, setup.low_at)
    alarms = [finding for finding in findings if finding.severity == "alarm" and finding.rule == "updates-swallowed"]
    numbers["swallowed_since"] = float(min((finding.since_step for finding in alarms), default=math.nan))
    numbers |= {name: value for name, value in lost(view).items() if name == "lost_after"}
    verdict = _verdict(numbers, reference)
    return Training(
        name=kind.name, title=kind.title, run=run.path, numbers=numbers, outcome=verdict, good=verdict == _SOUND,
        findings=findings, series=columns(steps, curve), series_of="bits per character",
    )  # fmt: skip


def _verdict(numbers: Mapping[str, float], reference: Run) -> str:
    if not numbers["of_fp32"] < _ON_THE_CURVE:
        return "leaves FP32's curve"
    before, end = (float(bits) for bits in reference.scalars("bits")[1])
    return _SOUND if numbers["gained"] >= _STALLS * (before - end) else "stalls at the low rate"


def beside(curve: Floats, reference: Floats) -> dict[str, float]:
    """Compare a curve with FP32's, batch by batch.

    The ratios are those of its first and its last eighth, and the furthest one.
    """
    eighths = np.array_split(curve / reference, min(8, len(curve)))
    ratios = [float(part.mean()) for part in eighths]
    return {"ratio_first": ratios[0], "ratio_last": ratios[-1], "furthest": largest(abs(each - 1) for each in ratios)}


def unmoved(run: Run, since: int) -> float:
    """Return the part of the weights with a gradient that did not move."""
    shares: list[float] = []
    weights: list[float] = []
    for name in run.tensors["updates"]:
        steps, part = run.series("updates", name, "unmoved")  # without the steps that pushed nothing
        counted, pushed = run.series("updates", name, "pushed")
        shares.extend(part[steps >= since])
        weights.extend(pushed[(counted >= since) & (pushed > 0)])
    return float(np.average(shares, weights=weights)) if shares else math.nan


def claims(setup: Setup, numbers: Numbers, sums: Mapping[int, float]) -> tuple[Claim, ...]:
    """Return the experiment's claims.

    They are of the numbers of the five trainings, and of the error of sums by their length.
    """
    return (
        *of_rows(_of_curves(numbers), "N1", "N4"),
        *of_rows((*_of_updates(setup, numbers), *_of_sums(numbers, sums)), "N1"),
    )


def _of_curves(numbers: Numbers) -> tuple[Claim, ...]:
    everything, unscaled = numbers["all"], numbers["unscaled"]
    gap_first, gap_last = abs(unscaled["ratio_first"] - 1.0), unscaled["ratio_last"] - 1.0
    return claims_of(
        f"""
        all-on-the-curve | everything.of_fp32
            | at least {2 - _ON_THE_CURVE} and at most {_ON_THE_CURVE} of FP32's bits
            | FP16 with all three techniques: ends on FP32's curve
        all-along-the-curve | everything.furthest | at most {_ON_THE_CURVE - 1} of FP32's bits apart, at most
            | FP16 with all three techniques: and lies along it, in each eighth
        unscaled-leaves | unscaled.of_fp32 | at least {_LEAVES} of FP32's bits
            | without loss scaling: leaves FP32's curve
        unscaled-further | unscaled_further | at least 1.5 times the gap in the first eighth
            | without loss scaling: gets further from it as training goes on
        unscaled-lost | unscaled.lost_after | at least 0.5 of gradients
            | without loss scaling: most gradients of activations are zero in FP16
        """,
        everything=everything,
        unscaled=unscaled,
        unscaled_further=gap_last / gap_first if gap_first else math.inf * gap_last,
    )


def _of_updates(setup: Setup, numbers: Numbers) -> tuple[Claim, ...]:
    wide, everything, without = numbers["fp32"], numbers["all"], numbers["no-masters"]
    return claims_of(
        f"""
        masters-gain | everything.gained / wide.gained | at least 0.8 and at most 1.2 of FP32's gain
            | at a low rate, with master weights: gains what FP32 gains
        no-masters-stalls | without.gained / wide.gained | at most {_STALLS} of FP32's gain
            | at a low rate, without master weights: gains less than half of it
        no-masters-swallowed | without.unmoved | at least 0.5 of weights with a gradient
            | without master weights: most updates are swallowed
        no-masters-told | no_masters_told | at least 0 and at most {4 * setup.every} steps after
            | without master weights: an alarm tells of it as soon as the rate is low
        """,
        everything=everything,
        wide=wide,
        without=without,
        no_masters_told=without["swallowed_since"] - setup.low_at,
    )


def _of_sums(numbers: Numbers, sums: Mapping[int, float]) -> tuple[Claim, ...]:
    return claims_of(
        f"""
        narrow-sums-err | narrow_sums_err | at least 16.0 roundings to FP16
            | sums of {_LONG:,} products in FP16: off by many roundings of one
        narrow-sums-grow | narrow_sums_grow | at least 4.0 times that of {_SHORT} products
            | without FP32 accumulation: the error grows with the length of the sums
        narrow-sums-leave | numbers['narrow-sums'].of_fp32 | at least {_LEAVES} of FP32's bits
            | without FP32 accumulation: leaves FP32's curve
        """,
        numbers=numbers,
        narrow_sums_err=sums[_LONG] / 2.0**-12,
        narrow_sums_grow=sums[_LONG] / sums[_SHORT],
    )


def _said(numbers: Numbers, sums: Mapping[int, float]) -> tuple[str, ...]:
    bits = {name: row["end"] for name, row in numbers.items()}
    gain = {name: row["gained"] for name, row in numbers.items()}
    curves = (
        f"Bits per character of held-out text: FP32 {bits['fp32']:.3f}; FP16 with all three {bits['all']:.3f}, without "
        f"loss scaling {bits['unscaled']:.3f}, without masters {bits['no-masters']:.3f}, without FP32 accumulation "
        f"{bits['narrow-sums']:.3f}."
    )
    updates = (
        f"At the low rate FP32 gains {gain['fp32']:.4f} bits, FP16 with masters {gain['all']:.4f}, without "
        f"{gain['no-masters']:.4f}: {percent(numbers['no-masters']['unmoved'], 0)} of its updates are swallowed."
    )
    summed = (
        f"Summed in FP16, {_SHORT} products of a weight's gradient are off by {percent(sums[_SHORT], 2)}, {_LONG:,} by "
        f"{percent(sums[_LONG], 2)}; rounding the sum once is off by at most 0.05 %."
    )
    return curves, updates, summed


def _settings(bench: Bench) -> Mapping[str, object]:
    return described(setup_for(bench.steps, full=bench.full), bench.device)


TECHNIQUES = Experiment(
    name="techniques",
    claim="An LSTM lies on FP32's curve in FP16 with all three techniques, and falls short of it without one of them.",
    source="N1, N4",
    settings=_settings,
    measure=measure,
)
