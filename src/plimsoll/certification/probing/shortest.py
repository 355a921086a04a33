"""The shortest of several counterexamples, the same one every time."""

import numpy as np
from numpy.typing import NDArray

from plimsoll.certification.probing.arrays import Values


def shortest(values: Values, *ties: NDArray[np.generic]) -> int:
    """Return the index of the value that is shortest to write.

    Finite values come first. Of these the ones with the fewest significant bits do, where eight powers of two away
    from 1 count as much as a bit. Then positive ones and the keys in `ties` decide.

    >>> shortest(np.array([1.3, -2.5, 2.5, 1e30]))
    2
    """
    finite = np.where(np.isfinite(values), np.abs(values), 0.0)
    mantissa, exponent = np.frexp(finite)
    whole = np.ldexp(mantissa, 53).astype(np.int64)
    lowest = (whole & -whole).astype(np.float64)
    significant = 53 - np.log2(np.where(lowest > 0, lowest, 2.0**53)).astype(np.int64)
    keys = [~np.isfinite(values), 8 * significant + np.abs(exponent - 1), np.signbit(values), *ties]
    return int(np.lexsort(keys[::-1])[0])
