"""Evidence on stochastic rounding: shares of upward draws, with a computed bound."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy import stats  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor

from plimsoll.certification.probing.arrays import CallFailedError, Values
from plimsoll.certification.probing.caller import Caller
from plimsoll.certification.probing.conventions import CARRIERS, SIDE, Call
from plimsoll.formats import Format, get_element

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
    """Return whether equal values of a tensor are rounded differently.

    Tries the finest dtype that the function takes.
    """
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
