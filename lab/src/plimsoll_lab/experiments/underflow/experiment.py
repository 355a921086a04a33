"""Experiment `underflow` (T5, T6): how many layers' gradients underflow, over time, and whether that is seen early.

A small CLIP and a small one-stage detector, each in FP16 with the stock scaler and in BF16, on the same weights and
batches, without hard batches: nothing goes wrong, and the scale stays high. What a layer, its underflow and the rate
are is stated in `analysis`.

Why the CLIP's rate rises is no fault of a scaler. A contrastive loss sharpens: as pictures and captions are told apart,
most pairs become certain, and an entry's gradient is how uncertain it is; so gradients shrink in time. A detector's
loss is of few boxes, always the hardest, and stays. What this needs is stated: gradients that are near FP16's floor to
begin with, by what a large CLIP has and a small one must be given (a mean over 32,768 pairs, and loud activations:
`clip._model`); and captions some of which are wrong, as those from the web are. Where all are right a CLIP so small
learns its made scenes wholly, and there is no end to how far its gradients shrink.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from plimsoll.text import percent
from plimsoll_lab.bench import Bench
from plimsoll_lab.claim import Claim, claims as claims_of, of_rows
from plimsoll_lab.experiments.underflow.analysis import CHANGE, STAY, judged
from plimsoll_lab.experiments.underflow.training import KINDS, TRAINED, Job, Setup, described, setup_for
from plimsoll_lab.result import Measured
from plimsoll_lab.running.workers import carry_out, one_thread, workers_for
from plimsoll_lab.study import Experiment

_MOST = 0.20  # T5: 5 to 20 % of CLIP's layers
_AS_GOOD = 1.05  # times BF16's loss; batches and weights are the same
Found = Mapping[str, Sequence[Mapping[str, float]]]  # by kind, of each seed


def measure(bench: Bench) -> Measured:
    """All trainings, and what they show."""
    return measure_with(bench, setup_for(bench.steps, full=bench.full), workers=workers_for(bench.device))


def measure_with(bench: Bench, setup: Setup, *, workers: int) -> Measured:
    """Likewise, with sizes of one's own."""
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
    """What the experiment says; of several seeds, each claim speaks of the one that speaks most against it."""
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
            | detector, told to stay in FP16: its loss ends where BF16's does
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
