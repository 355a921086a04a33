"""Experiment `bert` (U6): a small BERT in FP16 and FP8 without a loss scale, if it is converted to unit scale.

The model is trained to fill in masked tokens of Python's standard library, and then to answer questions on its source
with a span of it, scored as SQuAD is: both in the same precision. The unit-scaled model is what `unit.convert` makes of
the plain one, loss included; the second training takes over the weights of the first by their names.

What FP16 needs to fail is stated, not hidden: the first training's loss is a micro-batch's share of a step of 65,536
inputs, as in the largest batches that BERT was trained in. The second training's batches are small, as
BERT's are, and FP16 trains in them as FP32 does: what it lacks there is what the first training was to give.

Precisions are compared within one model, seed by seed from the same weights on the same batches, and both models with
each other at rates that were chosen by hand in a few trials of one seed.
"""

import contextlib
from collections.abc import Mapping

from plimsoll_lab.bench import Bench
from plimsoll_lab.claim import Claim, claims as claims_of
from plimsoll_lab.experiments.bert.analysis import Scores, behind, judged, mean, nats_over, scores
from plimsoll_lab.experiments.bert.training import KINDS, PHASES, Job, Setup, described, setup_for, to_task
from plimsoll_lab.result import Measured, Training
from plimsoll_lab.running.workers import carry_out, one_thread, workers_for
from plimsoll_lab.study import Experiment

_TRAINED = "plimsoll_lab.experiments.bert.training:trained"
_POINTS = 3.0  # of F1: what the published differences to FP32 stay within
_WITHIN = 1.02  # of FP32's loss on masked tokens
_TRAILS = 1.05
_SOUND = 0.01  # of gradients lost
Numbers = Mapping[str, Mapping[str, float]]


def measure(bench: Bench) -> Measured:
    """All trainings, and what they show."""
    return measure_with(bench, setup_for(bench.steps, full=bench.full), workers=workers_for(bench.device))


def measure_with(bench: Bench, setup: Setup, workers: int) -> Measured:
    """Likewise, with sizes of one's own."""
    jobs = jobs_of(bench, setup)
    for job in jobs:
        job.folder.mkdir()
    with contextlib.nullcontext() if bench.full else one_thread():
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
    """What the experiment says, with all scores and, by kind, the numbers of the first training."""
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
