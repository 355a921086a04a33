"""Headroom of a scale for steps that were not recorded.

The largest value of a tensor moves between samples, by an unknown amount. Known is how far it moved from sample to
sample. Let the log2 of largest values have exponential tails, which fall by e in `b` binades. The values themselves
then have tails of a power law, heavier than those of most gradients.

`b` is the mean of the absolute difference of two samples: such a difference is Laplace distributed with scale `b`. With
`n` steps for each recorded one, the largest of the others exceeds the largest recorded one by x binades with
probability (n - 1) / (n - 1 + exp(x / b)), since the difference of two Gumbel variables is logistic. For a risk r that
is x = b ln((n - 1) (1 - r) / r).

For a tensor that moves evenly up or down, b is its movement between samples, and it gets several times that. The mean
of k differences is raised by two of its standard errors, 2 / sqrt(k) of it. A single sample has no known movement: it
gets one binade.
"""

import math

import numpy as np

from plimsoll.diagnosis.tables.cells import Floats, Ints

_RISK = 1e-3  # of a tensor whose steps in between go beyond
_UNKNOWN = 1.0  # binades, from one sample to another


def spare(steps: Ints, largest: Floats, trained: int) -> float:
    """Return the binades to leave above the largest recorded value of a series.

    0 if every step was recorded.

    Args:
        steps: The recorded steps.
        largest: The largest value at each. NaN where nothing was recorded.
        trained: Number of steps of the run. 0: unknown.
    """
    known = np.isfinite(largest) & (largest > 0)
    tops, at = np.log2(largest[known]), steps[known]
    if not len(tops):
        return 0.0
    apart = max(float(np.diff(at).mean()) if len(at) > 1 else 1.0, trained / len(at))
    if apart <= 1:
        return 0.0
    moved = np.abs(np.diff(tops))
    scale = float(moved.mean()) * (1 + 2 / math.sqrt(len(moved))) if len(moved) else _UNKNOWN
    return scale * max(math.log((apart - 1) * (1 - _RISK) / _RISK), 0.0)
