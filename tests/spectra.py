"""Whether two spectra are of the same values: counts and extremes exactly, sums but for the order of adding."""

import numpy as np

from plimsoll.spectrum import Spectrum

_EXACT = ("count", "zeros", "nans", "pos_infs", "neg_infs", "min", "max", "absmin", "absmax")
_HALF_ULP = 2.0**-53


def same(a: Spectrum, b: Spectrum) -> bool:
    """Sums of n numbers in any two orders differ by at most 2 n half units of the last place of the sum of magnitudes.

    Kernels, layouts and processors add in different orders. A square's own rounding adds one.
    """
    bound = 2 * (a.count + 1) * _HALF_ULP
    return (
        all(repr(getattr(a, name)) == repr(getattr(b, name)) for name in _EXACT)
        and np.array_equal(a.binades, b.binades)
        and _near(a.sum, b.sum, bound * a.abssum)
        and _near(a.abssum, b.abssum, bound * a.abssum)
        and _near(a.sumsq, b.sumsq, bound * a.sumsq)
        and a.blocks == b.blocks
    )


def _near(a: float, b: float, bound: float) -> bool:
    return a == b or abs(a - b) <= bound
