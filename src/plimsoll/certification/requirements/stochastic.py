"""Requirements of stochastic rounding, in place of those on rounding to nearest."""

from plimsoll.certification.certificate import Counterexample, Outcome
from plimsoll.certification.registry import requirement
from plimsoll.certification.specifications import STOCHASTIC
from plimsoll.certification.trial import NotTriedError, Subject, Trial

_CASTS = ("cast", "pack")


def _stochastic(subject: Subject) -> bool:
    return subject.rounding == "stochastic"


@requirement(
    "random-neighbours",
    "A value becomes one of its two neighbours, and a value of the format always stays as it is.",
    kinds=_CASTS,
    general=(STOCHASTIC, "section 2"),
    applies=_stochastic,
)
def neighbours(trial: Trial) -> Outcome:
    """Draw each point many times."""
    points = trial.draws.points
    wrong = [p for p in points if p.strange is not None or (p.fraction == 0 and p.ups)]
    example = None
    if wrong:
        point = wrong[0]
        expected = f"{point.lower:g}" if point.fraction == 0 else f"{point.lower:g} or {point.upper:g}"
        got = point.strange if point.strange is not None else point.upper
        example = Counterexample(input=point.x, expected=expected, got=got, note=trial.draws.carrier)
    return Outcome(tried=sum(p.draws for p in points), wrong=len(wrong), counterexample=example)


@requirement(
    "unbiased",
    "A value goes up as often as it lies up the way between its neighbours.",
    kinds=_CASTS,
    general=(STOCHASTIC, "section 2"),
    applies=_stochastic,
)
def unbiased(trial: Trial) -> Outcome:
    """Compare the counts with binomial ones."""
    draws = trial.draws
    if draws.dependent() is not None:
        raise NotTriedError("the draws of one call depend on each other, so their counts are not binomial")
    biased = [point for point in draws.biased() if point.fraction > 0]
    example = None
    if biased:
        point = min(biased, key=lambda p: (p.chance, -p.fraction))
        example = Counterexample(
            input=point.x,
            expected=f"{point.upper:g} in {point.fraction:.4%} of draws",
            got=f"{point.ups:,} of {point.draws:,} draws, {point.ups / point.draws:.4%}",
            note=draws.carrier,
        )
    count = sum(point.draws for point in draws.points)
    detail = f"{len(draws.points)} values; chance moves no share by more than {draws.bound:.2g}"
    return Outcome(tried=count, wrong=len(biased), counterexample=example, detail=detail)


@requirement(
    "independent-draws",
    "Every value of a tensor has noise of its own.",
    kinds=_CASTS,
    general=(STOCHASTIC, "section 2"),
    applies=_stochastic,
)
def independent(trial: Trial) -> Outcome:
    """Count how often values at fixed distances in a tensor agree."""
    lag = trial.draws.dependent()
    x, up = trial.draws.half_way
    if lag is None:
        return Outcome(tried=len(up))
    example = Counterexample(
        input=x, expected="each of two equal values goes up by itself",
        got=f"values {lag} apart agree too often or too rarely", note=trial.draws.carrier,
    )  # fmt: skip
    return Outcome(tried=len(up), wrong=1, counterexample=example)


@requirement(
    "fresh-noise",
    "A second call draws other noise.",
    kinds=_CASTS,
    general=(STOCHASTIC, "section 2"),
    applies=_stochastic,
)
def fresh(trial: Trial) -> Outcome:
    """Call twice with the same values, half-way between two others."""
    if not trial.draws.repeats():
        return Outcome(tried=2)
    example = Counterexample(
        input=trial.draws.half_way[0], expected="other results of 1,024 equal values in a second call",
        got="the same results", note=trial.draws.carrier,
    )  # fmt: skip
    return Outcome(tried=2, wrong=1, counterexample=example)
