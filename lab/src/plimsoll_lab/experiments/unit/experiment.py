"""Experiment `unit` (U1, U4, U5, part of U6): a character model in FP16 and FP8 without a loss scale.

The same architecture twice, of torch's modules and of `unit.nn`'s, trained on Python's standard library in several
precisions, at several learning rates, from several seeds. Each precision is compared with FP32 at the same learning
rate, and with all at their best. The two models have learning rates of their own: a unit-scaled weight begins at 1 and
torch's at 0.07, so that one number means different steps.

What FP16 needs to fail is stated, not hidden. In a mean over b tokens a score's gradient is below 1 / b, and FP16
flushes what is below 2^-25. Over the 512 tokens that are computed here FP16 trains as FP32 does. A step of a language
model has half a million of them, in micro-batches whose losses are divided by their number: that is done here too, with
one of 1,024 micro-batches. Unit scaling's loss is not divided: its gradient is at unit scale over any number of tokens.
"""

import contextlib
from collections.abc import Mapping

from plimsoll.text import percent
from plimsoll_lab.bench import Bench
from plimsoll_lab.claim import Claim, claims as claims_of, of_rows
from plimsoll_lab.experiments.unit.analysis import Scores, judged, scores
from plimsoll_lab.experiments.unit.tasks import train_all
from plimsoll_lab.experiments.unit.training import KINDS, Job, Setup, described, setup_for
from plimsoll_lab.result import Measured, Training
from plimsoll_lab.running.workers import one_thread, workers_for
from plimsoll_lab.study import Experiment

_WITHIN = 1.01  # of FP32's bits per character
_TRAILS = 1.05
_SOUND = 0.01  # of gradients lost
Numbers = Mapping[str, Mapping[str, float]]


def measure(bench: Bench) -> Measured:
    """All trainings, and what they show."""
    return measure_with(bench, setup_for(bench.steps, full=bench.full), workers=workers_for(bench.device))


def measure_with(bench: Bench, setup: Setup, workers: int) -> Measured:
    """Likewise, with sizes of one's own."""
    jobs = jobs_of(bench, setup)
    with contextlib.nullcontext() if bench.full else one_thread():
        train_all(jobs, setup, bench.device, workers, bench.progress)
    found = scores(jobs)
    watched = {job.kind.name: job for job in jobs if job.watched}
    trainings = tuple(judged(kind, watched[kind.name], found) for kind in KINDS)
    numbers = {kind.name: training.numbers for kind, training in zip(KINDS, trainings, strict=True)}
    return Measured(trainings=trainings, claims=claims(found, numbers), said=_said(found, trainings))


def jobs_of(bench: Bench, setup: Setup) -> list[Job]:
    """Every training: of each kind, rate and seed. The first seed's at the main rate is watched, and comes first."""
    jobs = [
        Job(
            kind=kind, rate=rate, seed=bench.seed + seed, run=bench.runs / f"{kind.name}-{rate:g}-{bench.seed + seed}",
            watched=seed == 0 and rate == setup.main_rate(kind.family),
        )
        for kind in KINDS
        for rate in setup.rates(kind)
        for seed in range(setup.seeds)
    ]  # fmt: skip
    return sorted(jobs, key=lambda job: not job.watched)


def claims(found: Scores, numbers: Numbers) -> tuple[Claim, ...]:
    """What the experiment says. A bound on a mean over seeds is one that it keeps with 95 %."""
    return (
        *of_rows(_of_fp16(found, numbers), "U6"),
        *_of_quality(found),
        *of_rows(_of_fp16_at_unit_scale(numbers), "U1"),
        *of_rows(_of_headroom(numbers), "U5"),
    )


def _of_fp16(found: Scores, numbers: Numbers) -> tuple[Claim, ...]:
    return claims_of(
        f"""
        fp16-fails | fp16_fails | at least {_TRAILS} of FP32's bits, at least
            | FP16 with no loss scale, at the same learning rate: fails, or trails FP32
        fp16-fails-best | fp16_fails_best | at least {_TRAILS} of FP32's bits, at least
            | FP16 with no loss scale: so it does at its best learning rate
        fp16-underflow | numbers.fp16.lost_after | at least 0.5 of gradients
            | FP16 with no loss scale: most gradients of activations are zero
        fp16-told | numbers.fp16.underflow_alarms | at least 1 alarms
            | FP16 with no loss scale: an alarm tells of the underflow
        """,
        numbers=numbers,
        fp16_fails=found.at_same("fp16", "fp32").low,
        fp16_fails_best=found.at_best("fp16", "fp32").low,
    )


def _of_quality(found: Scores) -> tuple[Claim, ...]:
    """Each beside FP32 of its own model, at that one's rate; and unit-scaled ones beside plain FP32, at their best."""
    same = (
        ("fp16-2048", "fp32", "FP16 with a loss scale of 2,048: as FP32, at the same learning rate"),
        ("unit-fp16", "unit-fp32", "unit-scaled FP16: as unit-scaled FP32, at the same learning rate"),
        ("unit-fp8", "unit-fp32", "unit-scaled FP8: as unit-scaled FP32, at the same learning rate"),
        ("unit-fp8-level", "unit-fp32", "level fp8-unit: as unit-scaled FP32, at the same learning rate"),
        ("unit-fp8-fnuz", "unit-fp32", "unit-scaled FP8 (FNUZ): as unit-scaled FP32, at the same learning rate"),
    )
    best = (
        ("unit-fp32", "unit-scaled FP32: as good as plain FP32, or better"),
        ("unit-fp16", "unit-scaled FP16: as good as plain FP32, or better"),
        ("unit-fp8", "unit-scaled FP8: as good as plain FP32, or better"),
    )
    plain, fp16, *fp8 = (_within(f"{kind}-as-fp32", s, found.at_same(kind, other).high) for kind, other, s in same)
    at_best = [_within(f"{kind}-best", says, found.at_best(kind, "fp32").high) for kind, says in best]
    return (
        *of_rows([plain], "U6"), *of_rows([fp16], "U1", "U6"), *of_rows(fp8, "U1", "U4", "U6"),
        *of_rows(at_best, "U6"),
    )  # fmt: skip


def _within(name: str, says: str, high: float) -> Claim:
    return Claim(name, says, high, at_most=_WITHIN, unit="of FP32's bits, at most")


def _of_fp16_at_unit_scale(numbers: Numbers) -> tuple[Claim, ...]:
    return claims_of(
        f"""
        unit-nothing-lost | numbers['unit-fp16'].lost_after | at most {_SOUND} of gradients
            | unit-scaled FP16: nearly no gradient is lost
        """,
        numbers=numbers,
    )


def _of_headroom(numbers: Numbers) -> tuple[Claim, ...]:
    eight = numbers["unit-fp8"]
    return claims_of(
        """
        fp8-overflow | eight.operands_overflow | at most 0.001 of values, in the worst tensor
            | unit-scaled FP8: nearly no operand of a product overflows, at any time
        fp8-lost | eight.gradients_lost | at most 0.05 of values, in the worst tensor
            | unit-scaled FP8: few gradients of a product lie below E5M2's range, at any time
        drift | eight.drift_median | at most 3.0 binades, the median tensor
            | unit-scaled FP8: scales stay near where they began
        """,
        eight=eight,
    )


def _said(found: Scores, trainings: tuple[Training, ...]) -> tuple[str, ...]:
    by_kind = dict(zip((kind.name for kind in KINDS), trainings, strict=True))
    fp16, eight = by_kind["fp16"].numbers, by_kind["unit-fp8"].numbers
    bits = {kind: found.mean(kind, found.best(kind)) for kind in found.bits}
    quality = (
        f"Bits per character of held-out text, at best: FP32 {bits['fp32']:.3f}; FP16 {bits['fp16']:.3f} with no loss "
        f"scale, {bits['fp16-2048']:.3f} with 2,048; unit-scaled, with none: FP32 {bits['unit-fp32']:.3f}, FP16 "
        f"{bits['unit-fp16']:.3f}, FP8 {bits['unit-fp8']:.3f} (FNUZ {bits['unit-fp8-fnuz']:.3f})."
    )
    lost = (
        f"Plain FP16 lost {percent(fp16['lost_after'], 0)} of the gradients of activations, unit-scaled FP16 "
        f"{percent(by_kind['unit-fp16'].numbers['lost_after'], 2)}."
    )
    drift = (
        f"Unit-scaled FP8: the median tensor's scale has moved by {eight['drift_median']:.1f} binades at the end, the "
        f"furthest by {eight['drift_most']:+.1f}; the largest operand was {eight['operands_room']:.1f} below overflow."
    )
    return quality, lost, drift


def _settings(bench: Bench) -> Mapping[str, object]:
    return described(setup_for(bench.steps, full=bench.full), bench.device)


UNIT = Experiment(
    name="unit",
    claim="A character model trains in FP16 and FP8 with no loss scale if it is unit-scaled, as well as in FP32.",
    source="U1, U4, U5, U6",
    settings=_settings,
    measure=measure,
)
