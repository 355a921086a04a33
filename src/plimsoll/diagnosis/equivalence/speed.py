"""Speed at equal quality: the candidate's steps and time for the base's loss."""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plimsoll.diagnosis.equivalence.confidence_sequence import weights
from plimsoll.diagnosis.equivalence.curves import Aligned, Curve
from plimsoll.diagnosis.tables.cells import Floats
from plimsoll.spectrum import Interval

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
    """Return the speed, with the ends of the difference as its ends.

    Args:
        runs: The curves at common steps.
        difference: Candidate less base.
        sign: 1 where lower values are better, -1 where higher ones are.
        base: The base's curves as recorded.
        candidate: The candidate's.
    """
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
