"""How much room a scale leaves for steps that were not recorded.

Between two samples the largest value of a tensor moves, and no sample says how far. What is known is how far it moved
from sample to sample. Let the log2 of largest values have exponential tails, which fall by e in `b` binades (the values
themselves have tails of a power law then, heavier than those of most gradients). Then

- `b` is the mean of |difference| of two samples: such a difference is Laplace distributed with scale `b`;
- with `n` steps for each that was recorded, the largest of the others exceeds the largest of the recorded by x
  binades with probability (n - 1) / (n - 1 + exp(x / b)): the difference of two Gumbel variables is logistic. For a
  risk r that is x = b ln((n - 1) (1 - r) / r).

Of a tensor that moves evenly up or down, b is what it moves between samples: it gets several times that. The mean of
k differences is raised by two of its standard errors, 2 / sqrt(k) of it. Of a single sample no movement is known: a
binade is taken.
"""

import math

import numpy as np

from plimsoll.diagnosis.tables.cells import Floats, Ints

_RISK = 1e-3  # of a tensor whose steps in between go beyond
_UNKNOWN = 1.0  # binades, from one sample to another


def spare(steps: Ints, largest: Floats, trained: int) -> float:
    """How many binades to leave above the largest recorded value of a series; 0 where every step was recorded.

    `largest`: at each of the steps, in order, NaN where nothing was recorded. `trained`: how many steps the run had; 0
    where that is not known.
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
