"""The values at which rounding can go wrong: those of a format, the ties between them, and their neighbours."""

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from tests.support.formats.scalar_reference import Spec, decode, floor_log2, two

_SAMPLED_CODES = 120


def positive_numbers(spec: Spec) -> list[Fraction]:
    """The format's positive finite numbers, ascending; of formats wider than 8 bits the ends and a spread between."""
    magnitudes = 2 ** (spec.exponent_bits + spec.mantissa_bits)
    if magnitudes <= 512:
        chosen = range(magnitudes)
    else:
        ends = [*range(20), *range(2**spec.mantissa_bits - 4, 2**spec.mantissa_bits + 4)]
        spread = [magnitudes * i // _SAMPLED_CODES for i in range(_SAMPLED_CODES)]
        chosen = sorted({*ends, *spread, *(c + 1 for c in spread)})
    values = (decode(spec, code) for code in chosen)
    return sorted({Fraction(value) for value in values if 0 < value < np.inf} | {spec.max})


def edges(spec: Spec, carrier: type[np.floating]) -> NDArray[np.floating]:
    """Signed values of `carrier`: every number and tie of the format, one ulp to either side of each, and the specials.

    The tie above the largest number (where overflow begins) and the one below the smallest are among them.
    """
    numbers = positive_numbers(spec)
    spacing = two(floor_log2(spec.max) - spec.mantissa_bits)
    ties = [(low + high) / 2 for low, high in zip([Fraction(0), *numbers], [*numbers, spec.max + spacing], strict=True)]
    beyond = [spec.max + spacing, 2 * spec.max, 1000 * spec.max, numbers[0] / 8, numbers[0] / 2**40]
    wanted = [value for value in (*numbers, *ties, *beyond) if value <= Fraction(float(np.finfo(carrier).max))]
    exact = np.array([float(value) for value in wanted]).astype(carrier)
    info = np.finfo(carrier)
    specials = [0.0, info.tiny, info.smallest_subnormal, info.tiny - info.smallest_subnormal, info.max, np.inf]
    positive = np.concatenate([exact, np.array(specials, carrier)])
    with np.errstate(over="ignore", under="ignore"):
        around = [positive, np.nextafter(positive, carrier(0)), np.nextafter(positive, carrier(np.inf))]
    positive = np.unique(np.concatenate(around))
    return np.concatenate([positive, -positive, np.array([np.nan], carrier)])
