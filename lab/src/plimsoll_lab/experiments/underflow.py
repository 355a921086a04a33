"""Experiment `underflow` (T5, T6): layers that underflow over time, seen early.

A small CLIP and a small one-stage detector, each in FP16 with the stock scaler and in BF16, on the same weights and
batches, without hard batches: nothing goes wrong, and the scale stays high. What a layer, its underflow and the rate
are is stated in `analysis`.

Why the CLIP's rate rises is no fault of a scaler. A contrastive loss sharpens: as pictures and captions are matched,
most pairs become certain, and an entry's gradient is how uncertain it is; so gradients shrink in time. A detector's
loss is of few boxes, always the hardest, and stays. What this needs is stated: gradients that are near FP16's floor to
begin with, by what a large CLIP has and a small one must be given (a mean over 32,768 pairs, and loud activations:
`clip._model`); and captions some of which are wrong, as those from the web are. Where all are right a CLIP so small
learns its made scenes wholly, and there is no end to how far its gradients shrink.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from plimsoll.diagnosis import View, diagnose
from plimsoll.diagnosis.estimates.format_losses import share
from plimsoll.diagnosis.rules.underflow import UnderflowHigh, UnderflowRising
from plimsoll.diagnosis.tables.cells import Floats, Ints
from plimsoll.diagnosis.tables.trend import looks, trend
from plimsoll.precision import prepare
from plimsoll.runs import Run
from plimsoll.text import percent
from plimsoll.watch import watch
from plimsoll_lab.bench import Bench
from plimsoll_lab.experiments.clip.model import Batch, Clip, contrastive_loss, make_batch
from plimsoll_lab.models.detector.model import Detector, detection_loss, scenes
from plimsoll_lab.result import Claim, Measured, Training, claims as claims_of, of_rows
from plimsoll_lab.running.workers import Task, carry_out, one_thread, workers_for
from plimsoll_lab.statistics import columns
from plimsoll_lab.study import Experiment, check_steps, settings_of

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
        """Number of steps after which the early verdict is given."""
        return self.steps // 9

    @property
    def every(self) -> int:
        """Number of steps between two samples, each of which is a shadow step."""
        return max(1, self.steps // _SAMPLES)


def setup_for(steps: int | None, *, full: bool) -> Setup:
    """Return sizes for so many steps; `full`: the evidence's 9,000, three seeds.

    In a short training the warm-up is shorter too: most of its early part is behind it.
    """
    whole = Setup(steps=9000, seeds=3) if full else Setup()
    if steps is None:
        return whole
    check_steps("underflow", steps, FEWEST_STEPS, Setup().steps, ", so that a ninth of them has a trend")
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
    """One training; precisions of a seed share weights and batches."""

    kind: Kind
    seed: int
    run: Path

    def to_task(self, setup: Setup, device: str) -> Task:
        """As JSON-able data, for a worker."""
        fields = {"kind": self.kind.name, "seed": self.seed, "run": str(self.run)}
        return {"name": self.run.name, **fields, "setup": asdict(setup), "device": device}


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
    """Watch a training step; shadow samples count zeros that FP32 lacks in BF16 too."""
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
    """Return the step's batch, with a share of captions of other pictures."""
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
    """Return a result's settings."""
    return settings_of(setup, device, early=setup.early, every=setup.every)


LOST = UnderflowHigh().values
STAY, CHANGE, SURE = UnderflowRising().watch, UnderflowRising().change, UnderflowRising().confidence
PARTS = 9  # of a training: the first is early, the last its end

Verdict = Literal["stay", "watch", "change"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rate:
    """Share of layers that underflow by step, and the part of gradients that is lost."""

    steps: Ints
    layers: Floats
    lost: Floats

    def within(self, begin: int, end: int) -> "Rate":
        """From one step up to another."""
        there = (self.steps >= begin) & (self.steps < end)
        return Rate(steps=self.steps[there], layers=self.layers[there], lost=self.lost[there])

    def rise(self) -> float:
        """Return the rise of the layers' share; 0 if not sure, NaN of too few."""
        found = trend(self.steps, self.layers)
        if found is None:
            return math.nan
        return found.end - found.start if found.confidence >= SURE else 0.0

    def rise_seen(self) -> float:
        """Return the first step at which a rise of over 1 % of layers is sure, or NaN."""
        for samples in looks(len(self.steps)):
            if self.within(0, int(self.steps[samples - 1]) + 1).rise() > STAY:
                return float(self.steps[samples - 1])
        return math.nan

    def level(self) -> float:
        """The mean share of layers."""
        return float(self.layers.mean()) if len(self.layers) else math.nan


def rate(view: View) -> Rate:
    """The rate of a run, at its shadow steps."""
    cells = view.cells("activation_gradients")
    if cells is None:
        return Rate(steps=np.empty(0, dtype=np.int64), layers=np.empty(0), lost=np.empty(0))
    holders = {name.rpartition(".")[0] for name in view.run.tensors.get("gradients", ())}
    places = [i for i, name in enumerate(cells.names) if name.removesuffix(":output") in holders]
    underflowed = cells.total_of("underflowed")[places]
    nonzero = cells.total(cells.nonzero)[places]
    known = ~np.isnan(underflowed)
    there = known.any(axis=0)
    many = np.count_nonzero(known & (share(underflowed, nonzero) > LOST), axis=0)
    layers = many[there] / np.count_nonzero(known, axis=0)[there]
    lost = share(np.nansum(underflowed, axis=0), np.nansum(np.where(known, nonzero, 0.0), axis=0))
    return Rate(steps=cells.steps[there], layers=layers, lost=lost[there])


def early_verdict(seen: Rate) -> Verdict:
    """Return the early rule's verdict on the rate so far."""
    found = trend(seen.steps, seen.layers)
    if found is None:
        return "watch"
    level = found.end if found.confidence >= SURE else seen.level()
    if level > CHANGE:
        return "change"
    return "stay" if level < STAY else "watch"


def judged(job: Job, setup: Setup) -> Training:
    """The training's numbers, findings, and whether the early verdict came true."""
    view = View(Run(job.run))
    found = rate(view)
    numbers = measured(view, setup, found)
    verdict = early_verdict(found.within(setup.warmup, setup.early))
    return Training(
        name=job.kind.name, title=job.kind.title, run=view.run.path, numbers=numbers,
        outcome=f"{verdict}; {percent(numbers['rate_end'], 1)} of layers at the end", good=numbers["rate_end"] < STAY,
        series=columns(found.steps, found.layers), series_of="share of layers that underflow",
        findings=tuple(diagnose(view)),
    )  # fmt: skip


def measured(view: View, setup: Setup, found: Rate) -> dict[str, float]:
    """Return numbers by name: rates early, last and overall, losses, scale, verdict."""
    early, last = setup.early, setup.steps - setup.steps // PARTS
    verdict = early_verdict(found.within(setup.warmup, early))
    end = found.within(last, setup.steps)
    steps, loss = view.scalar("loss")
    return {
        "rate_early": found.within(setup.warmup, early).level(),
        "rate": found.level(),
        "rate_end": end.level(),
        "rise": found.rise(),
        "rise_early": found.within(setup.warmup, early).rise(),
        "rise_seen": found.within(setup.warmup, setup.steps).rise_seen(),
        "lost_end": float(end.lost.mean()) if len(end.lost) else math.nan,
        "parameters_lost": _lost_of_parameters(view),
        "loss_end": float(loss[steps >= last].mean()),
        **{f"told_{each}": float(verdict == each) for each in VERDICTS},
        "came_true": float(came_true(verdict, end.level())),
        "rules_early": float(_told_by_rules(View(view.run, until=early))),
        "rules": float(_told_by_rules(view)),
        **_scale(view),
    }


def came_true(verdict: Verdict, at_end: float) -> bool:
    """Return True if the rate at the end is as the early verdict said.

    Sound for "stay", and not sound for "change".
    """
    return {"stay": at_end < STAY, "watch": STAY <= at_end <= CHANGE, "change": at_end > CHANGE}[verdict]


def _lost_of_parameters(view: View) -> float:
    """Of the parameters' own gradients, the part that underflowed in all samples."""
    cells = view.cells("gradients")
    if cells is None:
        return math.nan
    underflowed, nonzero = np.nansum(cells.total_of("underflowed")), np.nansum(cells.total(cells.nonzero))
    return float(underflowed / max(underflowed + nonzero, 1.0))


def _told_by_rules(view: View) -> int:
    """Return the number of findings of the rules on underflow."""
    return len(diagnose(view, rules=["underflow-*"]))


def _scale(view: View) -> dict[str, float]:
    """Return the scale's exponents, first and last, and lost batches; none in BF16."""
    _, scale = view.scalar("scale")
    if not len(scale):
        return {}
    skipped = sum(event.kind == "skip" for event in view.events)
    return {"scale_begin": math.log2(scale[0]), "scale_end": math.log2(scale[-1]), "skipped": float(skipped)}


_MOST = 0.20  # T5: 5 to 20 % of CLIP's layers
_AS_GOOD = 1.05  # times BF16's loss; batches and weights are the same
Found = Mapping[str, Sequence[Mapping[str, float]]]  # by kind, of each seed


def measure(bench: Bench) -> Measured:
    """All trainings, and what they show."""
    return measure_with(bench, setup_for(bench.steps, full=bench.full), workers=workers_for(bench.device))


def measure_with(bench: Bench, setup: Setup, *, workers: int) -> Measured:
    """Do the same with your own sizes."""
    jobs = jobs_of(bench, setup)
    tasks = [job.to_task(setup, bench.device) for job in jobs]
    with one_thread():
        carry_out(TRAINED, tasks, workers=workers, progress=bench.progress)
    trainings = [judged(job, setup) for job in jobs]
    found = {kind.name: [training.numbers for training in trainings if training.name == kind.name] for kind in KINDS}
    first = tuple(training for job, training in zip(jobs, trainings, strict=True) if job.seed == bench.seed)
    return Measured(trainings=first, claims=claims(found), said=_said(found))


def jobs_of(bench: Bench, setup: Setup) -> list[Job]:
    """Every training: of each kind and seed, those of the first seed first."""
    seeds = range(bench.seed, bench.seed + setup.seeds)
    return [
        Job(kind=kind, seed=seed, run=bench.runs / (kind.name if seed == bench.seed else f"{kind.name}-{seed}"))
        for seed in seeds
        for kind in KINDS
    ]


def claims(found: Found) -> tuple[Claim, ...]:
    """Return the experiment's claims.

    Of several seeds, each claim speaks of the one that speaks most against it.
    """
    sound = [(kind.name, kind.title) for kind in KINDS if kind.name != "clip-fp16"]
    return (
        *of_rows((*_of_clip(found["clip-fp16"]), *_of_others(found, sound)), "T5"),
        *of_rows(_of_verdicts(found, [name for name, _ in sound]), "T6"),
    )


def _of_clip(seeds: Sequence[Mapping[str, float]]) -> tuple[Claim, ...]:
    return claims_of(
        f"""
        clip-fp16-underflows | clip_fp16_underflows | at least {CHANGE} and at most {_MOST} of layers
            | CLIP, FP16: so many layers underflow, over all steps and seeds
        clip-fp16-rises | clip_fp16_rises | at least {STAY} of layers, from beginning to end
            | CLIP, FP16: their share rises
        """,
        clip_fp16_underflows=sum(numbers["rate"] for numbers in seeds) / len(seeds),
        clip_fp16_rises=_least(seeds, "rise"),
    )


def _of_others(found: Found, kinds: Sequence[tuple[str, str]]) -> tuple[Claim, ...]:
    return tuple(
        claim
        for name, title in kinds
        for claim in (
            Claim(f"{name}-sound", f"{title}: nearly no layer underflows",
                  _most(found[name], "rate"), at_most=STAY, unit="of layers"),
            Claim(f"{name}-flat", f"{title}: and their share does not rise",
                  _most(found[name], "rise"), at_most=STAY, unit="of layers, from beginning to end"),
        )
    )  # fmt: skip


def _of_verdicts(found: Found, sound: Sequence[str]) -> tuple[Claim, ...]:
    everything = [numbers for seeds in found.values() for numbers in seeds]
    stayed = [numbers for name in sound for numbers in found[name]]
    pairs = zip(found["detector-fp16"], found["detector-bf16"], strict=True)
    return claims_of(
        f"""
        clip-fp16-told-early | clip_fp16_told_early | at least 1.0 of trainings
            | CLIP, FP16: the early verdict is to change to BF16
        clip-fp16-rises-early | clip_fp16_rises_early | at least {STAY} of layers, in the early part
            | CLIP, FP16: and it is sure by then that their share rises
        others-told-early | others_told_early | at least 1.0 of trainings | the others: the early verdict is to stay
        verdicts-come-true | verdicts_come_true | at least 1.0 of trainings
            | the rate at the end is what the early verdict said
        stay-is-safe | stay_is_safe | at most {_AS_GOOD} of BF16's loss
            | detector, forced to stay in FP16: its loss ends where BF16's does
        """,
        clip_fp16_told_early=_share(found["clip-fp16"], "told_change"),
        clip_fp16_rises_early=_least(found["clip-fp16"], "rise_early"),
        others_told_early=_share(stayed, "told_stay"),
        verdicts_come_true=_share(everything, "came_true"),
        stay_is_safe=float(np.max([fp16["loss_end"] / bf16["loss_end"] for fp16, bf16 in pairs])),
    )


def _least(seeds: Sequence[Mapping[str, float]], name: str) -> float:
    """The smallest of the seeds' numbers; NaN if any is."""
    return float(np.min([numbers[name] for numbers in seeds]))


def _most(seeds: Sequence[Mapping[str, float]], name: str) -> float:
    return float(np.max([numbers[name] for numbers in seeds]))


def _share(trainings: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(numbers[name] for numbers in trainings) / len(trainings)


def _said(found: Found) -> tuple[str, ...]:
    """The rates in words, and what the lost gradients did to the loss."""
    clip, bf16 = found["clip-fp16"], found["clip-bf16"]
    rates = "; ".join(
        f"{kind.title}: {percent(_share(found[kind.name], 'rate_early'), 1)} early, "
        f"{percent(_share(found[kind.name], 'rate_end'), 1)} at the end"
        for kind in KINDS
    )
    ratios = [fp16["loss_end"] / other["loss_end"] for fp16, other in zip(clip, bf16, strict=True)]
    lost = (
        f"CLIP in FP16 had lost {percent(_share(clip, 'lost_end'), 1)} of its layers' gradients at the end, and "
        f"{percent(_share(clip, 'parameters_lost'), 2)} of its parameters'; its loss was "
        f"{', '.join(f'{ratio:.3f}' for ratio in ratios)} of BF16's."
    )
    return f"Layers that underflow: {rates}.", lost


def _settings(bench: Bench) -> Mapping[str, object]:
    return described(setup_for(bench.steps, full=bench.full), bench.device)


UNDERFLOW = Experiment(
    name="underflow",
    claim="In FP16 more and more of a CLIP's layers underflow, and an early look tells; those of a detector do not.",
    source="T5, T6",
    settings=_settings,
    measure=measure,
)
