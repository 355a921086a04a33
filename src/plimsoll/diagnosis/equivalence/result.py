"""`Parity`: the verdict on two recipes, as a sentence, a table of facts, or data."""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from plimsoll.diagnosis.equivalence.curves import Aligned, Curve
from plimsoll.diagnosis.equivalence.noise import NoiseFrom, weights
from plimsoll.diagnosis.finding import shown
from plimsoll.diagnosis.tables.cells import Floats
from plimsoll.results import NotebookRepr, fields_of
from plimsoll.spectrum import Interval
from plimsoll.text import counted, number, percent

if TYPE_CHECKING:
    from rich.table import Table

# -- speed at equal quality: the candidate's steps and time for the base's loss ----------------------------------------

_BLOCKS = 64  # means that a curve is smoothed to
_SLOWEST = 16.0  # times as many steps: beyond it the curve of the base is no measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Speed of the candidate over that of the base.

    Attributes:
        steps: Steps of the candidate for the loss that the base has after one step. None where the curve of the base is
            too flat or too short for the difference to be a number of steps.
        per_step: How many times as fast a step is. None where seconds were not recorded on both sides.
        at_equal_quality: How many times as fast the same loss is reached. None where either is unknown.
    """

    steps: Interval | None
    per_step: float | None
    at_equal_quality: Interval | None


def speed_of(
    runs: Aligned, difference: Interval, sign: float, base: Sequence[Curve], candidate: Sequence[Curve]
) -> Speed:
    """Return the speed, with the ends of the difference as its ends; `sign`: -1 where higher values are better."""
    curves = (_smooth(sign * runs.base.mean(axis=0)), _smooth(sign * runs.candidate.mean(axis=0)))
    ends = [_steps_needed(*curves, sign * value) for value in (difference.low, difference.estimate, difference.high)]
    needed = [value for value in ends if value is not None]
    steps = Interval(low=min(needed), high=max(needed), estimate=needed[1]) if len(needed) == len(ends) else None
    seconds = [_seconds_per_step(side) for side in (base, candidate)]
    per_step = seconds[0] / seconds[1] if seconds[0] and seconds[1] else None
    together = None
    if steps is not None and per_step is not None:
        together = Interval(low=per_step / steps.high, high=per_step / steps.low, estimate=per_step / steps.estimate)
    return Speed(steps=steps, per_step=per_step, at_equal_quality=together)


def _smooth(curve: Floats) -> Floats:
    """Return means of blocks, none worse than one before; empty for a short curve."""
    if len(curve) < 2 * _BLOCKS:
        return np.empty(0)
    starts = np.linspace(0, len(curve), _BLOCKS + 1).astype(np.int64)
    return np.minimum.accumulate(np.add.reduceat(curve, starts[:-1]) / np.diff(starts))


def _steps_needed(base: Floats, candidate: Floats, worse: float) -> float | None:
    """Return the steps for one of the base's, with the candidate's mean so much worse."""
    slower = base if worse >= 0 else candidate  # the curve that is slowed down gives the other one
    if not len(slower) or not math.isfinite(worse):
        return None
    place, share = np.arange(_BLOCKS) + 0.5, weights(_BLOCKS)

    # The side that needs more steps is taken for the other one, slowed down: by the factor at which its mean differs by
    # as much.
    def missing(factor: float) -> float:
        return float(share @ (np.interp(place / factor, place, slower) - slower)) - abs(worse)

    if missing(_SLOWEST) < 0:
        return None
    optimize: Any = importlib.import_module("scipy.optimize")
    factor = float(optimize.brentq(missing, 1.0, _SLOWEST))
    return factor if worse >= 0 else 1 / factor


def _seconds_per_step(side: Sequence[Curve]) -> float | None:
    """Return the median time of a step, over a side's runs; None if not recorded."""
    medians: list[float] = []
    for curve in side:
        if len(curve.seconds) > 1:
            rates = np.diff(curve.seconds) / np.diff(curve.steps)
            medians += [float(np.median(rates[np.isfinite(rates)]))] if np.isfinite(rates).any() else []
    rate = float(np.median(medians)) if medians else 0.0
    return rate if rate > 0 else None


# -- the verdict -------------------------------------------------------------------------------------------------------

Verdict = Literal["equivalent", "worse", "better", "undecided"]
Better = Literal["lower", "higher"]

_SOURCES: dict[NoiseFrom, str] = {
    "repeats": "measured from repeats",
    "estimate": "between runs estimated, since there is one each",
    "given": "between runs as given",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The difference as it was known at one step."""

    step: int
    difference: Interval
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity(NotebookRepr):
    """Comparison of a candidate's training with that of the base.

    Attributes:
        verdict: "equivalent": the whole interval lies within the tolerance. "worse", "better": it lies beyond it.
            "undecided": neither.
        difference: Candidate less base, in the scalar's unit: a mean over the common steps, of which later ones count
            more. Infinite for a candidate that diverged.
        tolerance: Largest difference that does not matter, in the scalar's unit.
        noise: What chance alone moves the difference by: one standard deviation.
        noise_from: Where the noise between runs comes from: "repeats", "estimate" (one run each) or "given".
        more_steps: Further steps that would decide, at the present difference. None where it is decided, or where
            steps alone cannot.
        more_seeds: Further runs a side that would decide. None where it is decided, or where 100 would not.
        since_step: First step from which on the verdict was the same at every reading.
        steps: Number of common steps that were compared. `first_step`, `last_step`: the first and the last of them.
        runs: Number of runs that were compared, of the base and of the candidate.
        diverged: Number of runs that diverged, likewise.
        level: The base's mean, weighted as the difference.
        scalar: Name of the scalar. `better`: whether lower or higher values are better. `confidence`: probability that
            no reading of the interval leaves the true difference out.
        relative: Whether the tolerance was given in per cent of the level.
        speed: Speed at equal quality.
        history: The difference at earlier steps, the last one included.
        paired: Last steps and mean paired differences of up to 120 stretches of steps, for figures.
        notes: Sentences on what was left out, assumed or striking.
    """

    verdict: Verdict
    difference: Interval
    tolerance: float
    relative: bool
    noise: float
    noise_from: NoiseFrom | None
    more_steps: int | None
    more_seeds: int | None
    since_step: int
    steps: int
    first_step: int
    last_step: int
    runs: tuple[int, int]
    diverged: tuple[int, int]
    level: float
    scalar: str
    better: Better
    confidence: float
    speed: Speed
    history: tuple[Moment, ...]
    paired: tuple[tuple[int, float], ...]
    notes: tuple[str, ...]

    @property
    def is_no_worse(self) -> bool:
        """True if the candidate is surely no worse than the tolerance allows."""
        worst = self.difference.high if self.better == "lower" else -self.difference.low
        return worst < self.tolerance

    @property
    def sentence(self) -> str:
        """The verdict, the difference and what is allowed, in one sentence."""
        name = shown(self.scalar)
        if not self.steps:
            lost = {
                "worse": f"the candidate diverged in {self._of(1)}",
                "better": f"the base diverged in {self._of(0)}",
            }
            both = f"the base diverged in {self._of(0)} and the candidate in {self._of(1)}"
            return f"{self.verdict.capitalize()}: {lost.get(self.verdict, both)}."
        over = f"over {counted(self.steps, 'step')} the candidate's {name} differs by {self._interval()}"
        allowed = self._written(self.tolerance).removeprefix("+")
        ends = {
            "equivalent": f"within the {allowed} allowed",
            "worse": f"more than the {allowed} allowed",
            "better": f"more than {allowed} for the better",
            "undecided": f"where {allowed} is allowed",
        }
        return f"{self.verdict.capitalize()}: {over}, {ends[self.verdict]}."

    @property
    def remaining(self) -> str:
        """The steps or runs that would decide; empty for a decided comparison."""
        if self.verdict != "undecided" or not self.steps:
            return ""
        ways = [counted(many, noun) for many, noun in ((self.more_steps, "more step"), (self.more_seeds, "more run"))
                if many is not None]  # fmt: skip
        ways = [f"{way} on each side" if "run" in way else way for way in ways]
        known = "It is no worse than that; whether it is better is open. " if self.is_no_worse else ""
        if not ways:
            return f"{known}At the present difference neither steps nor 100 more runs on each side would decide."
        return f"{known}At the present difference about {' or '.join(ways)} would decide."

    def to_dict(self) -> dict[str, object]:
        """Return it as JSON-able data; NaN and infinities are names ("nan", "inf")."""
        return {
            "verdict": self.verdict,
            "sentence": self.sentence,
            **fields_of(self),
            "runs": {"base": self.runs[0], "candidate": self.runs[1]},
            "diverged": {"base": self.diverged[0], "candidate": self.diverged[1]},
            "history": [{"step": m.step, **fields_of(m.difference), "verdict": m.verdict} for m in self.history],
            "paired": [{"step": step, "difference": value} for step, value in self.paired],
        }

    def facts(self) -> list[tuple[str, str]]:
        """Return names and values of what the verdict rests on, as all surfaces list them."""
        sides = " with ".join(counted(many, "run") for many in self.runs)
        rows = [
            ("Difference", self._interval()),
            ("Tolerance", self._written(self.tolerance).removeprefix("+")),
            ("Confidence", f"{percent(self.confidence)}, over all readings together"),
        ]
        if self.noise_from is not None:
            span = f"{counted(self.steps, 'step')} from {self.first_step:,} to {self.last_step:,}"
            noise = f"{self._written(self.noise).removeprefix('+')}, {_SOURCES[self.noise_from]}"
            rows += [("Noise", noise), ("Compared", f"{sides}, {span}")]
        if self.verdict != "undecided":
            rows.append(("Since step", f"{self.since_step:,}"))
        if any(self.diverged):
            rows.append(("Diverged", f"{self._of(0)} of the base, {self._of(1)} of the candidate"))
        if self.speed.steps is not None:
            rows.append(("Steps for the same loss", f"{_times(self.speed.steps)} those of the base"))
        if self.speed.per_step is not None:
            rows.append(("Speed of a step", f"{self.speed.per_step:.3g} times the base's"))
        if self.speed.at_equal_quality is not None:
            rows.append(("Speed at equal quality", f"{_times(self.speed.at_equal_quality)} the base's"))
        return rows

    def table(self, width: int | None = None) -> "Table":
        """Return a table for the terminal: what the verdict rests on."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, show_edge=False, show_header=False, pad_edge=False, width=width)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold", ratio=1)
        for name, value in self.facts():
            table.add_row(name, value)
        return table

    def __str__(self) -> str:
        """The sentence, what would decide, and the notes."""
        return "\n".join(line for line in (self.sentence, self.remaining, *self.notes) if line)

    def _of(self, side: int) -> str:
        total = self.runs[side] + self.diverged[side]
        return f"{self.diverged[side]:,} of {counted(total, 'run')}"

    def _interval(self) -> str:
        low, high, middle = self.difference.low, self.difference.high, self._written(float(self.difference))
        if not self.steps:
            return "infinite" if math.isinf(high) else "unknown"
        if math.isinf(high):
            return f"{middle} (too few steps for an interval)"
        ends = f"{self._written(low)} to {self._written(high)}"
        return middle if self._written(low) == self._written(high) else f"{middle} ({ends})"

    def _written(self, value: float) -> str:
        """Return a difference with its sign, in per cent where the tolerance is."""
        if self.relative and self.level:
            share = 100 * value / abs(self.level)
            return f"{share:+,.0f} %" if abs(share) >= 99.5 else f"{share:+.2g} %"
        text = number(value)
        return text if text.startswith("-") else f"+{text}"


def _times(interval: Interval) -> str:
    return f"{interval.estimate:.3g} ({interval.low:.3g} to {interval.high:.3g}) times"
