"""How layer scales are chosen from what the gradients held: two rules, each a plain function of host numbers.

Both go through the units in the order in which the backward comes to them, from the loss to the input. Exponents here
are whole ones: a gradient is carried as its true value times ``2**exponent``, the loss scale included.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from plimsoll.formats import Format
from plimsoll.spectrum import Spectrum

# Zhao, Liang, Wen, Chu, Ding, Zhou, Anandkumar, "Adaptive Loss Scaling for Mixed Precision Training", arXiv 1910.12385,
# and the authors' code: the share that may underflow, and the bounds of one layer's factor and of all factors together.
UNDERFLOW_SHARE = 1e-3
LAYER_BOUND = 16
TOTAL_BOUND = 1024

# |x| of a normal distribution with deviation 1 is below it with that probability.
_QUANTILE = NormalDist().inv_cdf((1 + UNDERFLOW_SHARE) / 2)

# Whole exponents stay within these, so that every ratio of two is a float32 number.
LOWEST, HIGHEST = -24, 100


def top_of(spectra: Iterable[Spectrum]) -> int | None:
    """The binade of the largest finite value; None without nonzero ones."""
    largest = max((s.absmax for s in spectra if s.nonzero), default=0.0)
    return math.frexp(largest)[1] - 1 if largest else None


def by_spectra(
    tops: Sequence[int | None], start: int, present: Sequence[int], *, fmt: Format, margin: int, slack: int
) -> list[int]:
    """The highest exponents that leave `margin` binades above each unit's largest value, of binade ``tops[i]``.

    Up to `slack` binades lower will do, for less work: first the neighbour's exponent, as between equal ones nothing is
    done; then the present one. A unit of which nothing is known (all was flushed, say) takes its neighbour's, from
    which the next step sees further.
    """
    chosen: list[int] = []
    neighbour = start
    for top, now in zip(tops, present, strict=True):
        if top is not None:
            target = clamped(fmt.max_exponent - margin - top)
            will_do = (e for e in (neighbour, now) if target - slack <= e <= target)
            neighbour = next(will_do, target)
        chosen.append(neighbour)
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """What the published rule reads of one unit: its true output gradient, its weight, and its products' number."""

    gradient: Spectrum | None
    weight: Spectrum | None  # None where the unit has no matrix
    fan: int = 1  # products added up in each value of the input's gradient


def by_moments(units: Sequence[Moments], start: int, *, fmt: Format) -> list[int]:
    """The published rule: each unit multiplies what comes to it by a power of two from 1 to 16, 1,024 in all.

    Gradient and weight are taken for independent, their product's sum over `fan` for normal with half of its terms zero
    (ReLU). The factor is the least that leaves a share of 0.001 of that distribution below the format's smallest value,
    and not so large that `fan` times the largest product would exceed its largest.
    """
    chosen: list[int] = []
    present = start
    for unit in units:
        room = TOTAL_BOUND / 2.0 ** (present - start)
        alpha = min(_alpha(unit, 2.0**present, fmt), room, LAYER_BOUND)
        # Below 1 only to avoid an overflow; the published code floors the logarithm there too.
        present = clamped(present + math.floor(math.log2(alpha)))
        chosen.append(present)
    return chosen


def _alpha(unit: Moments, carried: float, fmt: Format) -> float:
    gradient, weight = unit.gradient, unit.weight
    if gradient is None or weight is None or not gradient.nonzero or not weight.nonzero:
        return 1.0
    variance = (gradient.std**2 + gradient.mean**2) * (weight.std**2 + weight.mean**2)
    deviation = math.sqrt(0.5 * unit.fan * variance) * carried
    largest = gradient.absmax * weight.absmax * unit.fan * carried
    rescues = fmt.smallest_subnormal / (_QUANTILE * deviation) if deviation else 1.0
    return min(max(rescues, 1.0), fmt.max / largest)


def clamped(exponent: int) -> int:
    """The nearest exponent that a unit may have."""
    return min(max(exponent, LOWEST), HIGHEST)
