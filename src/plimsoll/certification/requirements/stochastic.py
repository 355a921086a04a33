"""Requirements of stochastic rounding, in place of those on rounding to nearest."""

import functools

from plimsoll.certification.certificate import STOCHASTIC, Outcome
from plimsoll.certification.probing.arrays import deviation
from plimsoll.certification.registry import requirement
from plimsoll.certification.trial import NotTriedError, Trial
from plimsoll.text import percent

_row = functools.partial(
    requirement, general=(STOCHASTIC, "section 2"), applies=lambda subject: subject.rounding == "stochastic"
)


@_row(
    "random-neighbours", "A value becomes one of its two neighbours, and a value of the format always stays as it is."
)
def neighbours(trial: Trial) -> Outcome:
    """Draw each point many times."""
    points = trial.draws.points
    tried = sum(p.draws for p in points)
    wrong = [p for p in points if p.strange is not None or (p.fraction == 0 and p.ups)]
    if not wrong:
        return Outcome(tried=tried)
    point = wrong[0]
    expected = f"{point.lower:g}" if point.fraction == 0 else f"{point.lower:g} or {point.upper:g}"
    got = point.strange if point.strange is not None else point.upper
    return deviation(point.x, expected, got, trial.draws.carrier, tried=tried, wrong=len(wrong))


@_row("unbiased", "A value goes up as often as it lies up the way between its neighbours.")
def unbiased(trial: Trial) -> Outcome:
    """Compare the counts with binomial ones."""
    draws = trial.draws
    if draws.dependent() is not None:
        raise NotTriedError("the draws of one call depend on each other, so their counts are not binomial")
    biased = [point for point in draws.biased() if point.fraction > 0]
    tried = sum(point.draws for point in draws.points)
    detail = f"{len(draws.points)} values; chance moves no share by more than {draws.bound:.2g}"
    if not biased:
        return Outcome(tried=tried, detail=detail)
    point = min(biased, key=lambda p: (p.chance, -p.fraction))
    expected = f"{point.upper:g} in {percent(point.fraction, 4)} of draws"
    got = f"{point.ups:,} of {point.draws:,} draws, {percent(point.ups / point.draws, 4)}"
    return deviation(point.x, expected, got, draws.carrier, tried=tried, wrong=len(biased), detail=detail)


@_row("independent-draws", "Every value of a tensor has noise of its own.")
def independent(trial: Trial) -> Outcome:
    """Count how often values at fixed distances in a tensor agree."""
    lag, (x, up) = trial.draws.dependent(), trial.draws.half_way
    if lag is None:
        return Outcome(tried=len(up))
    expected, got = "each of two equal values goes up by itself", f"values {lag} apart agree too often or too rarely"
    return deviation(x, expected, got, trial.draws.carrier, tried=len(up))


@_row("fresh-noise", "A second call draws other noise.")
def fresh(trial: Trial) -> Outcome:
    """Call twice with the same values, half-way between two others."""
    x, up = trial.draws.half_way
    if up.all() or not up.any():
        raise NotTriedError(f"{x:g}, half-way between two values, always goes the same way")
    if not trial.draws.repeats():
        return Outcome(tried=2)
    expected = "other results of 1,024 equal values in a second call"
    return deviation(x, expected, "the same results", trial.draws.carrier, tried=2)
