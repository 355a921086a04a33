"""Experiment `unit` (U1, U4, U5, part of U6): a character model without scale.

It trains in FP16 and FP8 without a loss scale. The same architecture twice, of torch's modules and of `unit.nn`'s,
trained on Python's standard library in several precisions, at several learning rates, from several seeds. Each
precision is compared with FP32 at the same learning rate, and with all at their best. The two models have learning
rates of their own: a unit-scaled weight begins at 1 and torch's at 0.07, so that one number means different steps.

What FP16 needs to fail is stated, not hidden. In a mean over b tokens a score's gradient is below 1 / b, and FP16
flushes what is below 2^-25. Over the 512 tokens that are computed here FP16 trains as FP32 does. A step of a language
model has half a million of them, in micro-batches whose losses are divided by their number: that is done here too, with
one of 1,024 micro-batches. Unit scaling's loss is not divided: its gradient is at unit scale over any number of tokens.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plimsoll.diagnosis import Finding, View, diagnose
from plimsoll.formats import get_element
from plimsoll.runs import Run
from plimsoll.spectrum import Spectrum
from plimsoll.text import percent
from plimsoll_lab.bench import Bench
from plimsoll_lab.experiments.unit.model import KINDS, Job, Kind, Setup, described, setup_for, train_all
from plimsoll_lab.result import Claim, Measured, Training, claims as claims_of, of_rows
from plimsoll_lab.running.workers import one_thread, workers_for
from plimsoll_lab.statistics import Floats, Ratio, columns, lost, ratio
from plimsoll_lab.study import Experiment

REFERENCE = "fp32"  # the kind that all are held against
_FAILS = 1.05  # times FP32's bits, from which on a training has not come to what it should


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Held-out bits per character by kind, learning rate (ascending) and seed.

    Inf is for no number.
    """

    rates: Mapping[str, tuple[float, ...]]
    bits: Mapping[str, Floats]

    def best(self, kind: str) -> int:
        """Return the place of the best learning rate over seeds; the lowest if none is."""
        return int(np.argmin(self.bits[kind].mean(axis=1)))

    def _at(self, kind: str, rate: float) -> Floats:
        return self.bits[kind][self.rates[kind].index(rate)]

    def mean(self, kind: str, rate: int) -> float:
        """The mean over seeds."""
        return float(self.bits[kind][rate].mean())

    def at_same(self, kind: str, other: str) -> "Ratio":
        """Return the ratio to another kind, both at that one's best common rate."""
        shared = [(float(self.bits[other][place].mean()), rate) for place, rate in enumerate(self.rates[other])]
        _, rate = min(each for each in shared if each[1] in self.rates[kind])
        return ratio(self._at(kind, rate), self._at(other, rate))

    def at_best(self, kind: str, other: str) -> "Ratio":
        """The ratio to another kind, each at its own best learning rate."""
        return ratio(self.bits[kind][self.best(kind)], self.bits[other][self.best(other)])


def scores(jobs: Sequence[Job]) -> Scores:
    """The results of all trainings."""
    rates: dict[str, tuple[float, ...]] = {}
    bits: dict[str, Floats] = {}
    for kind in dict.fromkeys(job.kind.name for job in jobs):
        found = {(job.rate, job.seed): _bits(job) for job in jobs if job.kind.name == kind}
        rates[kind] = tuple(sorted({rate for rate, _ in found}))
        seeds = sorted({seed for _, seed in found})
        bits[kind] = np.array([[found[rate, seed] for seed in seeds] for rate in rates[kind]])
    return Scores(rates=rates, bits=bits)


def judged(kind: Kind, job: Job, found: Scores) -> Training:
    """Judge one kind, with the run that was watched."""
    run = Run(job.run)
    view = View(run)
    findings = tuple(diagnose(view))
    against = found.at_best(kind.name, REFERENCE)
    best = found.best(kind.name)
    numbers = {"loss_end": found.mean(kind.name, best), "best_rate": found.rates[kind.name][best]}
    numbers |= {f"bits_at_{rate:g}": found.mean(kind.name, place) for place, rate in enumerate(found.rates[kind.name])}
    numbers |= {"of_fp32": against.mean, "of_fp32_low": against.low, "of_fp32_high": against.high}
    numbers |= lost(view) | drift(run) | _counted(findings)
    if kind.family == "unit":
        numbers |= headroom(run)
    good = against.mean < _FAILS
    steps, loss = run.scalars("train_bits")
    return Training(
        name=job.run.name, title=kind.title, run=job.run, numbers=numbers, good=good, findings=findings,
        outcome="trains" if good else "fails", series=columns(steps, loss), series_of="loss",
    )  # fmt: skip


def _counted(findings: Sequence[Finding]) -> dict[str, float]:
    alarms = [finding for finding in findings if finding.severity == "alarm"]
    of_underflow = [finding for finding in alarms if finding.rule.startswith("underflow")]
    return {"alarms": float(len(alarms)), "underflow_alarms": float(len(of_underflow))}


def _bits(job: Job) -> float:
    """Of held-out text, by the trained model; Inf where that gives no number."""
    value = float(Run(job.run).scalars("bits")[1][-1])
    return value if math.isfinite(value) else math.inf


COLLECTIONS = ("weights", "activations", "activation_gradients")
PRODUCTS = ("qkv", "out", "up", "down", "readout")  # the linear modules of a block, and the last
_OPERANDS = {"weights": ".weight", "activations": ":input", "activation_gradients": ":output"}
FORMATS = {"weights": "e4m3", "activations": "e4m3", "activation_gradients": "e5m2"}


def drift(run: Run) -> dict[str, float]:
    """Return the tensors' drifts in binades: the last median, and the furthest.

    The furthest is that from 0 at any sample, the median that of absolute drifts. Both also by collection
    ("weights_drift_median", ...), with the median scale of the first sample as a logarithm.
    """
    moved = {collection: dict(_moves(run, collection)) for collection in COLLECTIONS}
    found: dict[str, float] = {}
    for collection, tensors in moved.items():
        if tensors:
            found[f"{collection}_begin"] = float(np.median([begin for begin, _ in tensors.values()]))
            found |= _summed(f"{collection}_drift", [binades for _, binades in tensors.values()])
    return found | _summed("drift", [binades for tensors in moved.values() for _, binades in tensors.values()])


def _summed(name: str, moved: Sequence[Floats]) -> dict[str, float]:
    if not moved:
        return {}
    furthest = [float(binades[np.argmax(np.abs(binades))]) for binades in moved]
    ends = [abs(float(binades[-1])) for binades in moved]
    return {f"{name}_median": float(np.median(ends)), f"{name}_most": max(furthest, key=abs)}


def _moves(run: Run, collection: str) -> Iterator[tuple[str, tuple[float, Floats]]]:
    """Of each tensor the logarithm of its first scale, and its drift at each sample."""
    for name in run.tensors.get(collection, ()):
        rms = run.series(collection, name, "rms")[1]
        # What is zero at some sample (a gradient that is lost) has no scale to drift.
        if len(rms) and (rms > 0).all():
            yield name, (math.log2(float(rms[0])), np.log2(rms / rms[0]))


def headroom(run: Run) -> dict[str, float]:
    """Return the worst fit of linear layers' operands to E4M3 and E5M2.

    The worst is that of any tensor and sample. `operands_overflow` and, of the gradients among them, `gradients_lost`:
    shares of the nonzero values, where one that is not finite has overflowed; `operands_room`: binades between the
    largest value and the largest of its format. All are NaN of a run that has recorded no such operand.
    """
    overflow, flushed, room = [math.nan], [math.nan], [math.nan]
    for collection, name in FORMATS.items():
        fmt = get_element(name, "lab unit")
        for spectrum in _operands(run, collection):
            fit, broken = spectrum.fit(fmt), spectrum.nonfinite / spectrum.count
            overflow.append(max(fit.overflow.estimate, broken) if spectrum.nonzero else broken)
            room.append(-math.inf if broken else math.log2(fmt.max / spectrum.absmax))
            if collection == "activation_gradients" and spectrum.nonzero:
                flushed.append(fit.lost.estimate)
    worst = {"operands_overflow": np.fmax.reduce(overflow), "gradients_lost": np.fmax.reduce(flushed)}
    return {name: float(value) for name, value in (worst | {"operands_room": np.fmin.reduce(room)}).items()}


def _operands(run: Run, collection: str) -> Iterator[Spectrum]:
    endings = tuple(f"{product}{_OPERANDS[collection]}" for product in PRODUCTS)
    for name in run.tensors.get(collection, ()):
        if name.endswith(endings):
            found = (spectrum for *_, spectrum in run.spectra(collection, name))
            yield from (spectrum for spectrum in found if spectrum.nonzero or spectrum.nonfinite)


_WITHIN = 1.01  # of FP32's bits per character
_TRAILS = 1.05
_SOUND = 0.01  # of gradients lost
Numbers = Mapping[str, Mapping[str, float]]


def measure(bench: Bench) -> Measured:
    """All trainings, and what they show."""
    return measure_with(bench, setup_for(bench.steps, full=bench.full), workers=workers_for(bench.device))


def measure_with(bench: Bench, setup: Setup, workers: int) -> Measured:
    """Do the same with your own sizes."""
    jobs = jobs_of(bench, setup)
    with one_thread(unless=bench.full):
        train_all(jobs, setup, bench.device, workers, bench.progress)
    found = scores(jobs)
    watched = {job.kind.name: job for job in jobs if job.watched}
    trainings = tuple(judged(kind, watched[kind.name], found) for kind in KINDS)
    numbers = {kind.name: training.numbers for kind, training in zip(KINDS, trainings, strict=True)}
    return Measured(trainings=trainings, claims=claims(found, numbers), said=_said(found, trainings))


def jobs_of(bench: Bench, setup: Setup) -> list[Job]:
    """Return all trainings of each kind, rate and seed, with the watched ones first."""
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
    """Return the experiment's claims.

    A bound on a mean over seeds is one that it keeps with 95 %.
    """
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
    """Return the claims on quality: each kind against FP32, unit-scaled against plain."""
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
