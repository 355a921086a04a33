"""Estimated overflow in blocks with power-of-two scales, from block records.

The floor rule maps the absmax of a block into the top binade of the element format. Values above the largest one there
(from 1.81 times the start of the binade in E4M3) overflow. They are in the binade of their block's absmax, so the
record bounds their number, but not their places in the binade. They are seldom spread evenly: most maxima are near the
tail of the distribution, which falls steeply, and an even spread gave up to seven times too many. The
model has four steps:

1. The share of maxima below the end of each binade is known. With n values in a block, each survives the level x with
   probability S(x) = 1 - share^(1/n). Between the ends of a binade log(-log S) is interpolated in log x, where
   exponential tails are straight, and slightly bent, as normal tails are. The absmax ends the last binade.
2. That gives the share of maxima above the point where values overflow.
3. A block has k values in its top binade, k binomial with the mean that the record has. If they are independent, one
   that follows the law G gives a maximum that follows the mean of G^k, which is solved for G.
4. A block whose top binade holds as many values as an even spread from zero gives it (half of them, if it is full) has
   no such tail. Then its values are spread evenly up to its end.
"""

import numpy as np
from numpy.typing import NDArray

from plimsoll.formats import Format
from plimsoll.spectrum.fit.population import BINADE, overflow_point

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_BEND = 1.15  # between those of normal, Laplace and Student tails
_STEEP, _FLAT = 0.6, 0.9  # of the values of an even spread in the top binade; normal values have up to a half
_HALVINGS = 40
_SURE = 1e-12  # smallest distance of shares from 0 and 1


# No step depends on properties that blocks share, so blocks of very different sizes are no harder than others. The
# median ratio to the truth is within 0.6 to 1.5 for normal, heavy-tailed and sparse values, with 1,000 blocks
# (`test_the_estimate_of_overflow_is_near_the_truth`). The estimate is too low for even spreads that end just above the
# start of a binade, because binades do not show such an end.
def overflowing(
    element: Format,
    *,
    maxima: Ints,
    start: Ints,
    lowest: Ints,
    values: Floats,
    top: Floats,
    absmax: Floats,
    bits: Ints,
) -> Floats:
    """Return the estimated number of overflowing values of each row.

    Args:
        element: Format of the elements.
        maxima: Number of blocks by the binade of their absmax. Those of row i start at ``maxima[start[i]]``.
        start: Start of each row in `maxima`, and the end of the last one.
        lowest: Exponent of each row's first binade in `maxima`.
        values: Number of nonzero values in each row's finite blocks.
        top: Number of these in the binade of their block's absmax.
        absmax: Largest magnitude of each row.
        bits: Mantissa bits of the grid of each row's values, negative without a grid.
    """
    row = np.repeat(np.arange(len(values)), np.diff(start))
    running = np.concatenate([np.zeros(1), np.cumsum(maxima, dtype=np.float64)])
    begin = running[start[:-1]]
    count = running[start[1:]] - begin
    blocks = np.maximum(count, 1.0)
    n, share, below = _in_the_top_binade(values, top, blocks)

    # Shares of maxima at both ends of each binade. A share that no block shows is below one block, and k bounds it too.
    first = (running[:-1] - begin[row]) / blocks[row]
    last = (running[1:] - begin[row]) / blocks[row]
    rare = 0.5 / blocks
    ends = last >= 1
    first = np.where(first == 0, np.minimum(below, rare / 2)[row], first)
    last = np.where(ends, (1 - rare)[row], last)
    fraction, exponent = np.frexp(np.nan_to_num(absmax))
    with np.errstate(all="ignore"):
        reach = np.log2(2 * fraction)[row] + (exponent - 1)[row] - (lowest[row] + np.arange(len(row)) - start[row])
    reach = np.where(ends, np.clip(reach, 0.0, 1.0), 1.0)

    at = np.log2(_points(element, bits))[row]
    with np.errstate(all="ignore"):
        place = np.where(at < reach, at / reach, 1.0)
        low, high = _straight(first, n[row]), _straight(last, n[row])
        under = (-np.expm1(-np.exp(low + (high - low) * place**_BEND))) ** n[row]
        above = np.where(place < 1, np.clip((last - under) / (last - first), 0.0, 1.0), 0.0)
    over = np.bincount(row, np.nan_to_num(above) * maxima, minlength=len(values)) / blocks
    single = (((1 - over) * (1 - below) + below) ** (1 / n) - (1 - share)) / share
    steep = np.clip(1 - single, 0.0, 1.0)

    # Values spread evenly up to the end of the binade, or up to the absmax in the last one.
    span, point = 2.0**reach - 1, _points(element, bits)[row]
    with np.errstate(all="ignore"):
        beyond = np.where(span > 0, np.clip((span + 1 - point) / span, 0.0, 1.0), 0.0)
    even, expected = (
        np.bincount(row, part * maxima, minlength=len(values)) / blocks for part in (beyond, span / (span + 1))
    )
    with np.errstate(all="ignore"):
        flat = np.clip((np.nan_to_num(share / expected) - _STEEP) / (_FLAT - _STEEP), 0.0, 1.0)
    return np.where(count > 0, top * (steep + (even - steep) * flat), 0.0)


def _in_the_top_binade(values: Floats, top: Floats, blocks: Floats) -> tuple[Floats, Floats, Floats]:
    """Return a row's values per block n, their chance p of the top binade, (1 - p)^n."""
    n = np.maximum(values / blocks, 1.0)
    mean = top / blocks
    # A block has at least one value there, so the mean is n p / (1 - (1 - p)^n), which grows with p.
    low, high = np.full_like(n, _SURE), np.full_like(n, 1 - _SURE)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        less = n * middle / -np.expm1(n * np.log1p(-middle)) < mean
        low, high = np.where(less, middle, low), np.where(less, high, middle)
    share = (low + high) / 2
    return n, share, (1 - share) ** n


def _straight(share: Floats, n: Floats) -> Floats:
    """Return log(-log S) of a share of maxima."""
    survives = -np.expm1(np.log(np.clip(share, 1e-300, 1 - _SURE)) / n)
    return np.log(-np.log(np.clip(survives, 1e-300, 1 - _SURE)))


def _points(element: Format, bits: Ints) -> Floats:
    """Return the point of overflow over the start of the top binade, by row."""
    point = 1 + (overflow_point(element) - element.max_exponent * BINADE) / BINADE
    places = np.ldexp(1.0, np.maximum(bits, 0).astype(np.int32))
    number = point * places
    following = np.ceil(number) if element.overflow_at_threshold else np.floor(number) + 1
    # On a grid the point is halfway below the first overflowing number.
    return np.where(bits < 0, point, np.minimum((following - 0.5) / places, 2.0))
