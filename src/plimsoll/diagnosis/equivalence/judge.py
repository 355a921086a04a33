"""`parity`: the verdict on two recipes from their recorded losses."""

import importlib
import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plimsoll.checks import integer, number, one_of
from plimsoll.diagnosis.equivalence import noise
from plimsoll.diagnosis.equivalence.curves import Aligned, Curve, aligned, curves_of, diverged
from plimsoll.diagnosis.equivalence.noise import LEAST_RECORDS, Evidence, run_noise as run_noise_of, weights
from plimsoll.diagnosis.equivalence.result import Better, Moment, Parity, Speed, Verdict, speed_of
from plimsoll.errors import ArgumentError
from plimsoll.runs import Run
from plimsoll.spectrum import Interval
from plimsoll.text import number as written

OneRun = Run | str | os.PathLike[str] | Mapping[int, float] | Sequence[float] | np.ndarray[Any, Any]

_READINGS = 60  # of the history
_STRETCHES = 120  # of the steps, whose means figures show
_LATE = 8  # the last eighth of the records must not lie beyond the tolerance
_LOSS = re.compile(r"(^|[^a-z])(loss|perplexity|error)([^a-z]|$)")
_AMOUNT = re.compile(r"\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(%?)\s*")


def parity(
    base: OneRun | Sequence[OneRun],
    candidate: OneRun | Sequence[OneRun],
    *,
    tolerance: float | str,
    scalar: str = "loss",
    confidence: float = 0.95,
    better: Better | None = None,
    run_noise: float | str | None = None,
    until: int | None = None,
) -> Parity:
    """Judge whether one recipe trains as well as another, from recorded losses.

    Runs are paired by step. The verdict may be read at every step of runs that go on, and again after each repeat that
    is added. docs/concepts/parity.md has the statistics and their assumptions.

    Args:
        base: The recipe to go by: a `Run`, a path, a sequence of losses (NaN for a missing one), a mapping from steps
            to losses; or a list of these, one for each repeat.
        candidate: The recipe to judge, likewise. As many repeats as the base has are paired in their order.
        tolerance: Largest difference that does not matter, declared beforehand. A number is in the scalar's unit, a
            text such as "1 %" is a share of the base's level.
        scalar: Name of the recorded scalar.
        confidence: Probability, over all readings together, that the interval holds the true difference.
        better: Whether "lower" or "higher" values are better. Default: lower for a loss, an error or a perplexity. It
            has no default for other scalars.
        run_noise: Standard deviation of the difference between two runs of one recipe, given as the tolerance is.
            Default: measured from repeats, or estimated for one run each. With 0 the verdict is about these very runs.
        until: Last step that counts. Default: all.

    Raises:
        ArgumentError: An argument is out of range, or the runs have no step in common.
        NotRecordedError: A run lacks the scalar.
        RunError: A path has no run.

    >>> wave = np.sin(np.arange(2000.0))
    >>> print(parity(2 + wave, 2.001 + wave, tolerance="1 %"))
    Equivalent: over 2,000 steps the candidate's loss differs by +0.05 %, within the 1 % allowed.
    ...
    >>> parity(2 + wave, 2.05 + wave, tolerance=0.01).verdict
    'worse'
    """
    confidence = number("parity", "confidence", confidence, at_least=0.5, below=1, remedy="Use 0.95, for example.")
    if until is not None:
        until = integer("parity", "until", until, remedy="It is a step; leave it out for all of them.")
    better = _direction(better, str(scalar))
    sign = 1.0 if better == "lower" else -1.0
    sides = (curves_of(base, "base", scalar, until), curves_of(candidate, "candidate", scalar, until))
    fates = tuple(Fate.of(side, sides[0], sign) for side in sides)
    lost = tuple(len(fate.lost) for fate in fates)
    runs = aligned(fates[0].kept, fates[1].kept) if all(fate.kept for fate in fates) else None
    level = _level(sides[0]) if runs is None else float(weights(len(runs.steps)) @ runs.base.mean(axis=0))
    allowed, relative = _tolerance(tolerance, level)
    noise_amount = None if run_noise is None else _amount("run_noise", run_noise, level)[0]
    facts = {"tolerance": allowed, "relative": relative, "level": level, "scalar": scalar, "better": better}
    facts |= {"confidence": confidence, "diverged": lost, "runs": (len(fates[0].kept), len(fates[1].kept))}
    by_divergence = _by_divergence(fates[0], fates[1], confidence)
    if runs is None or by_divergence is not None:
        return _diverged(by_divergence or "undecided", sign, fates, **facts)
    comparison = Comparison(runs=runs, run_noise=noise_amount, confidence=confidence, tolerance=allowed, sign=sign)
    return _compared(comparison, fates, **facts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fate:
    """Curves of one side: kept ones, and diverged ones with the step of divergence."""

    kept: list[Curve]
    lost: list[tuple[Curve, int]]

    @classmethod
    def of(cls, side: Sequence[Curve], base: Sequence[Curve], sign: float) -> "Fate":
        """Return the fate of a side's curves."""
        ends = [(curve, diverged(curve, base, sign)) for curve in side]
        kept = [curve for curve, end in ends if end is None]
        return cls(kept=kept, lost=[(curve, end) for curve, end in ends if end is not None])

    @property
    def total(self) -> int:
        """Number of runs."""
        return len(self.kept) + len(self.lost)

    @property
    def share(self) -> float:
        """Share of the runs that diverged."""
        return len(self.lost) / self.total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """Curves at common steps, and by what they are judged."""

    runs: Aligned
    run_noise: float | None
    confidence: float
    tolerance: float
    sign: float

    def evidence(self, records: int) -> Evidence:
        """Return the evidence of the first records."""
        runs = self.runs.first(records)
        reading = noise.reading(runs.differences, self.confidence)
        return Evidence(reading=reading, noise=run_noise_of(runs, self.run_noise))

    def moment(self, records: int) -> Moment:
        """Return the difference and the verdict after the first records."""
        evidence = self.evidence(records)
        middle, radius = evidence.reading.estimate, evidence.radius()
        low, high = middle - radius, middle + radius
        verdict: Verdict = "undecided"
        if -self.tolerance < low and high < self.tolerance:
            verdict = "undecided" if self.is_late(records) else "equivalent"
        elif low > self.tolerance:
            verdict = "worse" if self.sign > 0 else "better"
        elif high < -self.tolerance:
            verdict = "better" if self.sign > 0 else "worse"
        return Moment(
            step=int(self.runs.steps[records - 1]),
            difference=Interval(low=low, high=high, estimate=middle),
            verdict=verdict,
        )

    def is_late(self, records: int) -> bool:
        """Return whether the last records alone are beyond the tolerance."""
        late = self.runs.differences[records - records // _LATE : records]
        if len(late) < LEAST_RECORDS:
            return False
        late_reading = noise.reading(late, self.confidence)
        return abs(late_reading.estimate) - late_reading.radius() > self.tolerance

    def history(self) -> list[Moment]:
        """Return the moments of some of the steps, the last one included."""
        total = len(self.runs.steps)
        points = np.unique(np.geomspace(min(LEAST_RECORDS, total), total, _READINGS).round().astype(int))
        return [self.moment(records) for records in points.tolist()]


def _compared(comparison: Comparison, fates: Sequence[Fate], **facts: Any) -> Parity:
    """Return the verdict from the difference of the runs that did not diverge."""
    runs, history = comparison.runs, comparison.history()
    evidence, last = comparison.evidence(len(runs.steps)), history[-1]
    notes = [*runs.notes, *_of_divergence(fates)]
    verdict = last.verdict
    if verdict in ("equivalent", "better") and fates[1].share > fates[0].share:
        verdict = "undecided"
        notes.append("Undecided, since more of the candidate's runs diverged than of the base's.")
    elif comparison.is_late(len(runs.steps)) and verdict == "undecided":
        notes.append("The difference grows: over the last eighth of the steps it lies beyond the tolerance.")
    if evidence.noise.source == "estimate":
        notes.append("One run each: the noise between runs is estimated by a rule of thumb. Repeats would measure it.")
    speed = speed_of(runs, last.difference, comparison.sign, fates[0].kept, fates[1].kept)
    more_steps, more_seeds = _remaining(comparison, evidence) if verdict == "undecided" else (None, None)
    return Parity(
        verdict=verdict,
        difference=last.difference,
        noise=evidence.error,
        noise_from=evidence.noise.source,
        more_steps=more_steps,
        more_seeds=more_seeds,
        since_step=_since(history),
        steps=len(runs.steps),
        first_step=int(runs.steps[0]),
        last_step=int(runs.steps[-1]),
        speed=speed,
        history=tuple(history),
        paired=_stretches(runs),
        notes=tuple(notes),
        **facts,
    )


def _stretches(runs: Aligned) -> tuple[tuple[int, float], ...]:
    """Return the last step and the mean difference of each stretch of the steps."""
    ends = np.unique(np.linspace(0, len(runs.steps), _STRETCHES + 1).astype(np.int64))
    means = np.add.reduceat(runs.differences, ends[:-1]) / np.diff(ends)
    return tuple(zip(runs.steps[ends[1:] - 1].tolist(), means.tolist(), strict=True))


def _since(history: Sequence[Moment]) -> int:
    """Return the step from which on all moments have the verdict of the last one."""
    same = [*itertools.takewhile(lambda moment: moment.verdict == history[-1].verdict, reversed(history))]
    return same[-1].step


def _remaining(comparison: Comparison, evidence: Evidence) -> tuple[int | None, int | None]:
    """Return the further steps and runs a side that would decide at this difference."""
    margin = abs(abs(evidence.reading.estimate) - comparison.tolerance)
    steps = comparison.runs.steps
    gap = int(np.median(np.diff(steps))) if len(steps) > 1 else 1
    if len(steps) < LEAST_RECORDS and evidence.noise.source != "repeats":
        return (LEAST_RECORDS - len(steps)) * gap, evidence.runs_until(margin)
    longer = evidence.steps_until(margin)
    more = None if longer is None else math.ceil((longer - 1) * len(steps)) * gap
    return more, evidence.runs_until(margin)


# -- divergence


def _by_divergence(base: Fate, candidate: Fate, confidence: float) -> Verdict | None:
    """Return the verdict that divergence alone gives, or None.

    None: the runs that are left must be compared. All runs of one side and none of the other: that side is worse.
    Otherwise Fisher's exact test.
    """
    if not base.lost and not candidate.lost:
        return None
    if not candidate.kept and not base.lost:
        return "worse"
    if not base.kept and not candidate.lost:
        return "better"
    stats: Any = importlib.import_module("scipy.stats")
    counts = [[len(fate.lost), len(fate.kept)] for fate in (candidate, base)]
    for side, verdict in (("greater", "worse"), ("less", "better")):
        if float(stats.fisher_exact(counts, alternative=side).pvalue) <= (1 - confidence) / 2:
            return "worse" if verdict == "worse" else "better"
    return None


def _diverged(verdict: Verdict, sign: float, fates: Sequence[Fate], **facts: Any) -> Parity:
    """Return a verdict that rests on divergence: the difference is infinite."""
    infinite = {"worse": sign * math.inf, "better": -sign * math.inf}.get(verdict, math.nan)
    step = min(step for fate in fates for _, step in fate.lost)
    return Parity(
        verdict=verdict,
        difference=Interval(low=infinite, high=infinite, estimate=infinite),
        noise=math.nan,
        noise_from=None,
        more_steps=None,
        more_seeds=None,
        since_step=step,
        steps=0,
        first_step=step,
        last_step=step,
        speed=Speed(steps=None, per_step=None, at_equal_quality=None),
        history=(),
        paired=(),
        notes=tuple(_of_divergence(fates)),
        **facts,
    )


def _of_divergence(fates: Sequence[Fate]) -> list[str]:
    """Return a note that names the runs that diverged, and when."""
    lost = [f"{curve.name} from step {step:,} on" for fate in fates for curve, step in fate.lost]
    return [f"Diverged: {', '.join(lost)}."] if lost else []


# -- arguments


def _direction(better: str | None, scalar: str) -> Better:
    if better is not None:
        return "lower" if one_of("parity", "better", better, ("lower", "higher")) == "lower" else "higher"
    if _LOSS.search(scalar.casefold()):
        return "lower"
    raise ArgumentError(
        f"parity: expected better to be 'lower' or 'higher' for the scalar {scalar!r}; got better=None. "
        "Lower is taken to be better for a loss, an error or a perplexity only."
    )


def _tolerance(given: object, level: float) -> tuple[float, bool]:
    amount, relative = _amount("tolerance", given, level)
    if amount > 0:
        return amount, relative
    raise ArgumentError(
        f"parity: expected tolerance to be above 0; got tolerance={given!r}, which is {written(amount)} at a level of "
        f"{written(level)}. Give the largest difference that does not matter, in the scalar's unit."
    )


def _amount(name: str, given: object, level: float) -> tuple[float, bool]:
    """Return an amount in the scalar's unit, and if it was given in per cent."""
    remedy = "Give a number in the scalar's unit, or a share of the base's level such as \"1%\"."
    if not isinstance(given, str):
        return number("parity", name, given, at_least=0, remedy=remedy), False
    match = _AMOUNT.fullmatch(given)
    try:
        value = math.nan if match is None else float(match[1])
    except ValueError:
        value = math.nan
    if match is None or not math.isfinite(value):
        raise ArgumentError(f"parity: expected {name} to be an amount; got {name}={given!r}. {remedy}")
    return (value / 100 * abs(level), True) if match[2] else (value, False)


def _level(base: Sequence[Curve]) -> float:
    """Return the mean of a base that cannot be compared; 1 if it has no number at all."""
    values = np.concatenate([curve.values for curve in base])
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else 1.0
