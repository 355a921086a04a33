"""Inference of a cast: rounding, overflow, subnormals, zeros, Inf and NaN."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy import stats  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor

from plimsoll.certification.certificate import allowed_saturation
from plimsoll.certification.elements.observed import BETWEEN, Observed
from plimsoll.certification.probing.arrays import CallFailedError, Mask, Values, same
from plimsoll.certification.probing.caller import Caller
from plimsoll.certification.probing.conventions import CARRIERS, SIDE, Call
from plimsoll.formats import Format, get_element
from plimsoll.formats.codec import Rounding

# -- stochastic rounding: shares of upward draws, with a computed bound ------------------------------------------------

# A count of draws is binomial if the rounding is unbiased and the draws are independent. Each point is tested two-
# sided, and the probability of a false alarm in a whole certificate is at most `FALSE_ALARM` (Bonferroni).
FALSE_ALARM = 1e-9
_CARRIERS = {name: get_element(name, "certify") for name in reversed(CARRIERS)}  # the finest first
_DRAWS, _MANY_DRAWS = 1 << 16, 1 << 18  # the latter where a result is rare
_REPEATS = 1 << 10
_LAGS = (1, 2, 32, SIDE, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Draws of one value."""

    x: float  # the value
    fraction: float  # how far it lies from its lower neighbour in magnitude to the upper one
    lower: float  # the lower neighbour in magnitude, with the sign of `x`
    upper: float  # the upper neighbour, likewise
    draws: int  # number of draws
    ups: int  # how many went to the upper neighbour
    strange: float | None  # a result that is neither, or None

    @property
    def chance(self) -> float:
        """Probability of a count as far from the expected one, if rounding is unbiased."""
        below, above = (
            stats.binom.cdf(self.ups, self.draws, self.fraction),
            stats.binom.sf(self.ups - 1, self.draws, self.fraction),
        )
        return min(1.0, 2 * min(float(below), float(above)))


def varies(call: Call, fmt: Format) -> bool:
    """Return whether equal values of a tensor, of the finest dtype, are rounded differently."""
    for carrier in _CARRIERS:
        values = [point[0] for point in _wanted(fmt, carrier) if 0 < point[1] < 1 and point[3] == _DRAWS]
        try:
            y = call(_filled(np.repeat(values, SIDE), carrier)).values.reshape(-1)
        except CallFailedError:
            continue
        rows = y[: len(values) * SIDE].reshape(len(values), SIDE)
        return bool(np.any(rows != rows[:, :1]) and not np.isnan(rows).any())
    return False


class Draws:
    """Draws of all points by a call that returns a format's values, made on demand."""

    def __init__(self, caller: Caller, call: Call, fmt: Format, carriers: list[str]) -> None:
        self._caller = caller
        self._call = call
        self._fmt = fmt
        self.carrier = next(name for name in _CARRIERS if name in carriers)

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """The points, exact values first."""
        return tuple(self._point(*wanted) for wanted in _wanted(self._fmt, self.carrier))

    def _point(self, x: float, fraction: float, neighbours: tuple[float, float], draws: int) -> Point:
        affordable = max(SIDE, self._caller.affordable(draws, 0.1))
        y = self._call(_filled(np.full(affordable, x), self.carrier)).values.reshape(-1)[:affordable]
        lower, upper = neighbours
        strange = y[(y != lower) & (y != upper)]
        return Point(
            x=x, fraction=fraction, lower=lower, upper=upper, draws=affordable, ups=int(np.count_nonzero(y == upper)),
            strange=float(strange[0]) if len(strange) else None,
        )  # fmt: skip

    @property
    def bound(self) -> float:
        """Largest difference of share and fraction by chance (Hoeffding's inequality)."""
        fewest = min(point.draws for point in self.points)
        return math.sqrt(math.log(2 * len(self.points) / FALSE_ALARM) / (2 * fewest))

    def biased(self) -> list[Point]:
        """Return the points whose counts chance does not explain."""
        return [point for point in self.points if point.chance < FALSE_ALARM / len(self.points)]

    def finest(self) -> str:
        """Return in words the smallest fraction tried that goes up as often as it should."""
        biased = self.biased()
        fine = [p.fraction for p in self.points if p not in biased and p.ups and 0 < p.fraction <= 0.5]
        return f"from 2^{round(math.log2(min(fine)))} of a spacing on" if fine else "biased at every fraction"

    @cached_property
    def half_way(self) -> tuple[float, Values]:
        """A value half-way between two others, and which of many draws of it went up."""
        x, _, (_, upper), _ = next(wanted for wanted in _wanted(self._fmt, self.carrier) if wanted[1] == 0.5)
        y = self._call(_filled(np.full(_DRAWS, x), self.carrier)).values.reshape(-1)[:_DRAWS]
        return x, (y == upper).astype(np.float64)

    def dependent(self) -> int | None:
        """Return the distance at which draws agree too often or too rarely, or None."""
        _, up = self.half_way
        share = float(np.mean(up))
        expected = share**2 + (1 - share) ** 2
        excess: dict[int, float] = {}
        for lag in _LAGS:
            pairs = up[: len(up) // (2 * lag) * 2 * lag].reshape(-1, 2, lag)
            allowed = math.sqrt(math.log(2 * len(_LAGS) / FALSE_ALARM) / (2 * pairs[:, 0].size))
            agree = np.count_nonzero(pairs[:, 0] == pairs[:, 1]) / pairs[:, 0].size
            excess[lag] = abs(agree - expected) / allowed
        worst = max(excess, key=lambda lag: excess[lag])
        return worst if excess[worst] > 1 else None

    def repeats(self) -> bool:
        """Return whether two calls draw the same noise."""
        x, _ = self.half_way
        tensor = _filled(np.full(_REPEATS, x), self.carrier)
        first, second = (self._call(tensor.clone()).values for _ in range(2))
        return bool(np.array_equal(first, second))


def _wanted(fmt: Format, carrier: str) -> list[tuple[float, float, tuple[float, float], int]]:
    """Return the values to draw: value, fraction, neighbours, draws. Exact ones first."""
    step = math.ldexp(1.0, -fmt.mantissa_bits)
    spare = _CARRIERS[carrier].mantissa_bits - fmt.mantissa_bits  # bits of the carrier below the format's last one
    third = round((1 << min(spare, 12)) / 3) / (1 << min(spare, 12)) if spare > 0 else 0.5
    common = [f for f in (0.5, 0.25, 0.75, third, 0.125, 0.875) if _fits(f, spare)]
    rare = [f for f in (2.0**-6, 1 - 2.0**-6, 2.0**-9, 1 - 2.0**-9, 2.0**-12, 2.0**-15) if _fits(f, spare)]
    lowest = fmt.smallest_subnormal
    signs = (1.0, -1.0) if fmt.signed else (1.0,)
    points = [(1.0, 0.0, (1.0, 1.0 + step), _MANY_DRAWS)]
    for sign in signs:
        ends = (sign, sign * (1.0 + step))
        points += [(sign * (1.0 + f * step), f, ends, _DRAWS) for f in common]
        points += [(sign * (1.0 + f * step), f, ends, _MANY_DRAWS) for f in rare]
    if fmt.has_subnormals and _CARRIERS[carrier].smallest_subnormal * 8 <= lowest:
        points += [(s * lowest * (1 + f), f, (s * lowest, s * 2 * lowest), _DRAWS) for s in signs for f in (0.5, 0.25)]
    return points


def _fits(fraction: float, bits: int) -> bool:
    return math.ldexp(fraction, bits).is_integer()


def _filled(values: Values, carrier: str) -> Tensor:
    """Return values in rows of `SIDE` columns, filled up with ones."""
    padded = np.ones(-(-len(values) // SIDE) * SIDE)
    padded[: len(values)] = values
    return torch.from_numpy(padded).to(getattr(torch, carrier)).reshape(-1, SIDE)


# -- other properties --------------------------------------------------------------------------------------------------

MODES: tuple[Rounding, ...] = ("nearest_even", "nearest_away", "toward_zero", "up", "down")
# Rules that no specification asks for and that implementations have all the same. Each says which values between two
# neighbours go to the larger magnitude.
_OTHER_RULES: dict[str, Callable[[Observed], Mask]] = {
    "nearest_odd": lambda o: (o.fraction > 0.5) | ((o.fraction == 0.5) & o.lower_is_even),
    "nearest_zero": lambda o: o.fraction > 0.5,
    "nearest_up": lambda o: (o.fraction > 0.5) | ((o.fraction == 0.5) & ~o.negative),
    "nearest_down": lambda o: (o.fraction > 0.5) | ((o.fraction == 0.5) & o.negative),
    "to_odd": lambda o: (o.fraction > 0) & o.lower_is_even,
    "away_from_zero": lambda o: o.fraction > 0,
}
IN_WORDS: dict[Rounding, str] = {
    "nearest_even": "to the nearest, ties to even",
    "nearest_away": "to the nearest, ties away from zero",
    "toward_zero": "toward zero",
    "up": "up",
    "down": "down",
    "stochastic": "to either neighbour at random",
}
_KNOWN = 0.9  # share of inexact inputs that a rule must explain to be named although others deviate


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The rounding of a cast."""

    name: str  # name of the rule, of `IN_WORDS`
    through: str | None = None  # name of a format that inputs are rounded to first, or None


def rounding_rule(observed: Observed) -> Rule:
    """Return the rule that explains most results of inputs between two normal values."""
    where = observed.normal & ~observed.exact & ~observed.failed
    best, explained = Rule(name="unknown"), _KNOWN
    for rule, predicted in _predictions(observed) if where.any() else ():
        share = float(np.mean(same(observed.y, predicted)[where]))
        if share > explained:
            best, explained = rule, share
        if share == 1.0:
            break
    return best


def _predictions(observed: Observed) -> Iterator[tuple[Rule, Values]]:
    """Yield each known rule with its results; only normal values matter."""
    fmt = observed.fmt
    saturate = allowed_saturation(fmt)[0]
    for mode in MODES:
        yield Rule(name=mode), observed.expected(mode, saturate)
    for name, goes_up in _OTHER_RULES.items():
        magnitude = np.where(goes_up(observed), observed.upper, observed.lower)
        yield Rule(name=name), observed.as_returned(np.where(observed.negative, -magnitude, magnitude))
    for name, between in BETWEEN.items():
        if between.mantissa_bits > fmt.mantissa_bits and between.bits > fmt.bits:
            first = between.decode(between.encode(np.where(observed.nan, 0.0, observed.x)))
            twice = fmt.decode(fmt.encode(first if fmt.signed else np.abs(first), "nearest_even", saturate))
            yield Rule(name="nearest_even", through=name), observed.as_returned(twice)


def facts(observed: Observed, rule: Rule) -> dict[str, object]:
    """Return what was inferred, by the names of `Certificate.inferred`."""
    result: dict[str, object] = {"rounding": rule.name, "rounded_through": rule.through}
    finite = observed.beyond("stochastic" if rule.name == "stochastic" else "nearest_even") & ~observed.beside_tie
    result["saturate"] = saturates(observed, finite)
    result["infinities"] = became(observed, observed.inf)
    if rule.name == "toward_zero":  # finite values stop at the largest one, whatever the overflow rule
        result["saturate"] = saturates(observed, observed.inf)
    result["nan"] = became(observed, observed.nan)
    if observed.fmt.signed:
        result["negative_zero"] = _negative_zero(observed)
    if observed.fmt.has_subnormals:
        result["subnormals"] = _flushed(observed, observed.subnormal)
        if (observed.tiny_input & (observed.lower > 0)).any():
            result["subnormal_inputs"] = _flushed(observed, observed.tiny_input)
    result["takes"] = ", ".join(batch.carrier for batch in observed.batches)
    returned = dict.fromkeys(batch.dtype for batch in observed.batches)
    own = all(batch.dtype == batch.carrier for batch in observed.batches)
    result["returns"] = "the input's dtype" if own else ", ".join(returned)
    return result


def saturates(observed: Observed, where: Mask) -> bool | str:
    """Return True for overflow to the largest value, False to Inf or NaN, or words."""
    kind = became(observed, where)
    if kind == "largest value":
        return True
    return False if kind == ("inf" if observed.fmt.has_inf else "nan") else kind


def became(observed: Observed, where: Mask) -> str:
    """Return in words what a mask's inputs became, by sign or bits if these differ."""
    where = where & (True if observed.fmt.signed else ~observed.negative)
    kinds = _kinds(observed)
    positive, negative = (set(kinds[where & side].tolist()) for side in (~observed.negative, observed.negative))
    if not positive | negative:
        return "not tried"
    if len(positive | negative) == 1:
        return (positive | negative).pop()
    if len(positive) == 1 and len(negative) == 1:
        return f"{positive.pop()} if positive, {negative.pop()} if negative"
    return f"{', '.join(sorted(positive | negative))}, by the value"


def _kinds(observed: Observed) -> np.ndarray[tuple[int], np.dtype[np.str_]]:
    """Return for each result what it is, in words."""
    y, fmt = observed.y, observed.fmt
    largest = observed.as_returned(np.full(y.shape, fmt.max))
    conditions = [observed.failed, np.isnan(y), np.isinf(y), np.abs(y) == largest, y == 0]
    return np.select(conditions, ["an error", "nan", "inf", "largest value", "zero"], "another value")


def _negative_zero(observed: Observed) -> str:
    where = observed.negative & observed.finite & (observed.magnitude == 0) & ~observed.failed
    if not where.any():
        return "not tried"
    return "kept" if bool(np.all(np.signbit(observed.y[where]))) else "becomes +0"


def _flushed(observed: Observed, where: Mask) -> str:
    """Return "kept", or which inputs became zero that no rounding takes to zero."""
    # What rounds up to the smallest normal value is one, also where subnormal results are flushed.
    becomes_normal = (observed.fraction > 0) & (observed.upper >= observed.fmt.smallest_normal)
    where = where & (observed.lower > 0) & ~becomes_normal & ~observed.failed
    zero = observed.y == 0
    sides = {"positive": where & ~observed.negative, "negative": where & observed.negative}
    flushed = [sign for sign, side in sides.items() if side.any() and bool(np.all(zero[side]))]
    if not where.any():
        return "not tried"
    if not flushed:
        return "flushed to zero in part" if bool(np.any(zero[where])) else "kept"
    return f"flushed to zero if {flushed[0]}" if len(flushed) == 1 else "flushed to zero"
