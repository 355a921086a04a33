"""Losses and noise of a spectrum in a block format, from its block record.

The scale of a block maps its absmax to the top of the element format. So the depth of a value, its distance in binades
from the absmax, decides its place there, whatever its binade. With a power-of-two scale (OCP MX 1.0, section 6.3: the
floor rule) a depth is exactly one binade of the element format. Blocks whose scale would leave its format are
exceptions: they take the end of that format, and the binades of their values decide. With a scale that has a mantissa
(NVFP4) a depth covers two binades and the rounding of the scale.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plimsoll import row_layout
from plimsoll.errors import NotRecordedError
from plimsoll.formats import FP32, BlockFormat, Format
from plimsoll.spectrum.fit import element_fit
from plimsoll.spectrum.fit.population import BINADE, Population, Tally, ordinal, overflow_point, snr_db
from plimsoll.spectrum.record import BEYOND, LOWEST, BlockRecord, SpectrumRecord, times_power
from plimsoll.spectrum.source_format import Grid

# -- overflow under power-of-two scales --------------------------------------------------------------------------------

# The floor rule maps the absmax of a block into the top binade of the element format. Values above the largest one
# there (from 1.81 times the start of the binade in E4M3) overflow. They are in the binade of their block's absmax, so
# the record bounds their number, but not their places in the binade. They are seldom spread evenly: most maxima are
# near the tail of the distribution, which falls steeply, and an even spread gave up to seven times too many. The model
# has four steps:
#
# 1. The share of maxima below the end of each binade is known. With n values in a block, each survives the level x with
#    probability S(x) = 1 - share^(1/n). Between the ends of a binade log(-log S) is interpolated in log x, where
#    exponential tails are straight, and slightly bent, as normal tails are. The absmax ends the last binade.
# 2. That gives the share of maxima above the point where values overflow.
# 3. A block has k values in its top binade, k binomial with the mean that the record has. If they are independent, one
#    that follows the law G gives a maximum that follows the mean of G^k, which is solved for G.
# 4. A block whose top binade holds as many values as an even spread from zero gives it (half of them, if it is full)
#    has no such tail. Then its values are spread evenly up to its end.

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

    `maxima` has the number of blocks by the binade of their absmax. Those of row i start at ``maxima[start[i]]``, with
    the binade of exponent ``lowest[i]``; `start` has the end of the last row too. Of the nonzero `values` in each row's
    finite blocks, `top` are in the binade of their block's absmax. `bits` are the mantissa bits of the grid of each
    row's values, negative without a grid.
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


# -- scales with a mantissa --------------------------------------------------------------------------------------------

_SLACK = 2.0**-20  # FP32 rounding of t, and rounding of this module's arithmetic
_PLACES = 24  # per averaged variable
_Flags = NDArray[np.bool_]


def mantissa_tallies(
    s: SpectrumRecord, record: BlockRecord, fmt: BlockFormat, shift: int, misplaced: int
) -> tuple[Tally, Tally, Tally, float]:
    """Return lost, subnormal and overflowing values of finite blocks, and the SNR."""
    depths, total = record.depths, int(record.depths.sum())
    outcomes = outcomes_of(fmt)
    lost, subnormal, overflow = (
        Tally.within(int(depths[certain].sum()), int(depths[possible].sum()), float(depths @ share))
        for certain, possible, share in (outcomes.lost, outcomes.subnormal, outcomes.overflow)
    )
    small = _small_scales(s, record, fmt, shift)
    loose = min(small.unsure + misplaced, total)
    lost, subnormal, overflow = (x.widened(total, fewer=loose, more=loose) for x in (lost, subnormal, overflow))
    # Each block whose scale is zero loses all its values, and has one at least.
    lost = Tally.within(
        lost.low + small.dead_blocks, lost.high, lost.estimate * (1 - small.dead_share) + total * small.dead_share
    )
    return lost, subnormal, overflow, _snr_db(record, outcomes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SmallScales:
    """Blocks whose scale is subnormal, and so coarse, or zero, or the largest one."""

    unsure: int  # upper bound of the number of their values
    dead_blocks: int  # number of blocks whose scale is zero for certain
    dead_share: float  # estimated fraction of blocks whose scale is zero


def _small_scales(s: SpectrumRecord, record: BlockRecord, fmt: BlockFormat, shift: int) -> _SmallScales:
    total = int(record.depths.sum())
    tensor_scale = times_power(s.absmax, shift) / (fmt.element.max * fmt.scale.max)
    if fmt.tensor_scale and not FP32.smallest_normal * (1 + _SLACK) <= tensor_scale <= FP32.max * (1 - _SLACK):
        return _SmallScales(unsure=total, dead_blocks=0, dead_share=0.0)
    starts = np.ldexp(1.0, np.arange(row_layout.BINADES) + row_layout.LOWEST_BINADE)
    reach = s.absmax if fmt.tensor_scale else times_power(fmt.element.max * fmt.scale.max, -shift)
    coarse = starts < reach * (fmt.scale.smallest_normal / fmt.scale.max) * (1 + _SLACK)
    if not fmt.tensor_scale:
        coarse |= 2 * starts > reach * (1 - _SLACK)  # the largest scale is too small for these blocks
    coarse[0] |= s.absmin < LOWEST
    coarse[-1] |= s.absmax >= BEYOND
    zero = reach * (fmt.scale.smallest_subnormal / 2 / fmt.scale.max)
    dead = (2 * starts < zero * (1 - _SLACK)) & np.array([True] * (row_layout.BINADES - 1) + [s.absmax < BEYOND])
    share = np.clip(zero / starts - 1, 0.0, 1.0)  # of a binade's maxima, evenly spread
    return _SmallScales(
        unsure=min(int(record.maxima[coarse].sum()) * record.block, total),
        dead_blocks=int(record.maxima[dead].sum()),
        dead_share=float(record.maxima @ share) / max(int(record.maxima.sum()), 1),
    )


_Depths = tuple[_Flags, _Flags, Floats]  # by depth: certain for all values, possible for some, expected share


# Such formats may have an FP32 scale for the whole tensor. It is t = absmax / (element max * scale max) over the finite
# values, and 1 without such a scale. The scale of a block is its absmax over (element max * t), rounded to the format
# of scales. So a value at depth d becomes `element max * u/v * 2**-d` times the relative rounding of the scale, where u
# and v in [1, 2) are the significands of the value and of the block's absmax. The ends of these ranges give the
# undecided depths. The estimates are averages over the ranges.
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Outcomes of values at each depth in a format."""

    lost: _Depths  # values that round to zero
    subnormal: _Depths  # values that become subnormal
    overflow: _Depths  # values that overflow
    energy: Floats  # expected squares
    noise: Floats  # expected squared errors
    maximum_energy: float  # expected square of a block's largest value, which is at depth 0 too
    maximum_noise: float  # expected squared error of a block's largest value


def top_of_scales(fmt: BlockFormat) -> float:
    """Return the magnitude that overflows at the largest scale of blocks."""
    return fmt.element.overflow_threshold * fmt.scale.max


@functools.lru_cache(maxsize=16)
def outcomes_of(fmt: BlockFormat) -> Outcomes:
    """Return the outcomes of values by depth in a format."""
    element = fmt.element
    down = np.ldexp(1.0, -np.arange(row_layout.BINADES))
    rounding = 2.0 ** -(fmt.scale.mantissa_bits + 1)
    rounding /= 1 + rounding  # relative to the unrounded scale: largest at the first tie of a binade
    lowest = element.max * down / 2 / (1 + rounding) * (1 - _SLACK)
    highest = element.max * np.minimum(2 * down, 1) / (1 - rounding) * (1 + _SLACK)
    lost_at = element.smallest_subnormal / 2
    normal_at = element.smallest_normal - math.ldexp(1.0, element.quantum_exponent - 1)
    over_at = element.overflow_threshold

    inner, top, maxima = _places(fmt.scale)
    landed = [element.max * top, *(element.max * factor * inner for factor in down[1:])]

    def share(of: Callable[[Floats], _Flags]) -> Floats:
        return np.array([float(of(values).mean()) for values in landed])

    errors = [_round(values, element) - values for values in landed]
    largest = element.max * maxima
    return Outcomes(
        lost=(highest < lost_at, lowest < lost_at, share(lambda y: y <= lost_at)),
        subnormal=(
            (lowest > lost_at) & (highest < normal_at),
            (lowest < normal_at) & (highest > lost_at),
            share(lambda y: (y > lost_at) & (y < normal_at)),
        ),
        overflow=(lowest > over_at, highest >= over_at, share(lambda y: y >= over_at)),
        energy=np.array([float((values * values).mean()) for values in landed]),
        noise=np.array([float((error * error).mean()) for error in errors]),
        maximum_energy=float((largest * largest).mean()),
        maximum_noise=float(((_round(largest, element) - largest) ** 2).mean()),
    )


def _places(scale: Format) -> tuple[Floats, Floats, Floats]:
    """Return places of values over ``element max * 2**-depth``.

    They are those below depth 0, at depth 0, and of the blocks' largest values. The significands u, v and that of the
    scale before rounding are spread evenly in [1, 2). At depth 0, u <= v.
    """
    even = 1 + (np.arange(_PLACES) + 0.5) / _PLACES
    steps = math.ldexp(1.0, scale.mantissa_bits)
    rounding = even / (np.rint(even * steps) / steps)
    ratio = even[:, None] / even
    below = np.tril(np.ones_like(ratio)).T > 0  # u <= v
    return (
        np.outer(ratio, rounding).ravel(),
        np.outer(ratio[below], rounding).ravel(),
        rounding,
    )


def _round(values: Floats, fmt: Format) -> Floats:
    exponents = np.frexp(values)[1] - 1
    spacing = np.ldexp(1.0, np.maximum(exponents, fmt.min_exponent) - fmt.mantissa_bits)
    return np.minimum(np.rint(values / spacing) * spacing, fmt.max)


def _snr_db(record: BlockRecord, outcomes: Outcomes) -> float:
    counts = record.depths.astype(np.float64)
    maxima = float(record.maxima.sum())
    counts[0] -= maxima  # each finite nonzero block's largest value
    energy = float(counts @ outcomes.energy) + maxima * outcomes.maximum_energy
    noise = float(counts @ outcomes.noise) + maxima * outcomes.maximum_noise
    return 10 * math.log10(energy / noise) if noise > 0 else math.inf


# -- fit ---------------------------------------------------------------------------------------------------------------


def fit_blocks(s: SpectrumRecord, fmt: BlockFormat, shift: int) -> element_fit.Fit:
    """Return the fit of a block format, with the scale rule "floor" (`Spectrum.fit`)."""
    if not s.nonzero:
        return element_fit.nothing_to_lose(s, fmt.name, shift)
    record = _record(s, fmt)
    misplaced = _misplaced(s, record)
    if fmt.scale.signed:
        tallies = _with_mantissa(s, record, fmt, shift, misplaced)
    else:
        tallies = _power_of_two(s, record, fmt, shift, misplaced)
    lost, subnormal, overflow, noise_db = tallies
    poisoned = record.poisoned
    overflow = Tally(low=overflow.low + poisoned, high=overflow.high + poisoned, estimate=overflow.estimate + poisoned)
    return element_fit.Fit(
        format=fmt.name,
        shift=shift,
        lost=element_fit.lost_interval(s, lost),
        subnormal=element_fit.interval(subnormal, s.nonzero),
        overflow=element_fit.interval(overflow, s.nonzero),
        snr_db=noise_db,
    )


def _record(s: SpectrumRecord, fmt: BlockFormat) -> BlockRecord:
    if s.blocks is not None and s.blocks.block == fmt.block:
        return s.blocks
    got = "one without a block record" if s.blocks is None else f"one measured with block={s.blocks.block}"
    raise NotRecordedError(
        f"Spectrum.fit: expected a spectrum measured with block={fmt.block} for {fmt.name}; got {got}. "
        f"Measure with measure(x, block={fmt.block}), and add only spectra of that block length."
    )


def _misplaced(s: SpectrumRecord, record: BlockRecord) -> int:
    """Return the number of values that may be deeper than recorded.

    These are float64 values in the end binades, and values below a maximum there.
    """
    low = int(s.binades[0]) if s.absmin < LOWEST else 0
    high = int(record.maxima[-1]) * record.block if s.absmax >= BEYOND else 0
    return low + high


def _with_mantissa(
    s: SpectrumRecord, record: BlockRecord, fmt: BlockFormat, shift: int, misplaced: int
) -> tuple[Tally, Tally, Tally, float]:
    lost, subnormal, overflow, noise_db = mantissa_tallies(s, record, fmt, shift, misplaced)
    if fmt.tensor_scale:
        return lost, subnormal, overflow, noise_db
    # Values that overflow at the largest scale are in blocks that have it.
    values, total = element_fit.population(s), int(record.depths.sum())
    point = ordinal(top_of_scales(fmt)) - shift * BINADE
    below = values.below(point, inclusive=not fmt.element.overflow_at_threshold)
    at_highest = below.out_of(values.total)
    if at_highest.high:
        overflow = _at_least(overflow, at_highest, record.poisoned, total)
        noise_db = min(noise_db, snr_db(values, fmt.element, shift - fmt.scale.max_exponent))
    return lost, subnormal, overflow, noise_db


def _power_of_two(
    s: SpectrumRecord, record: BlockRecord, fmt: BlockFormat, shift: int, misplaced: int
) -> tuple[Tally, Tally, Tally, float]:
    element, scale = fmt.element, fmt.scale
    landed = _landed(s, record, fmt)
    lost, subnormal, overflow = element_fit.tallies(landed, element, 0)
    overflow = Tally.within(overflow.low, overflow.high, _overflowing(s, record, element, landed))
    noise_db = snr_db(landed, element, 0)
    total = landed.total

    # Blocks whose scale takes an end of its format, and the tallies of all values at that scale. No block has a scale
    # beyond the ends, so these also bound loss and overflow from below.
    scales = np.arange(row_layout.BINADES) + row_layout.LOWEST_BINADE + shift - element.max_exponent
    too_small, too_large = scales < scale.min_exponent, scales > scale.max_exponent
    too_small[0] |= s.absmin < LOWEST
    too_large[-1] |= s.absmax >= BEYOND
    small = min(int(record.maxima[too_small].sum()) * record.block, total)
    large = min(int(record.maxima[too_large].sum()) * record.block, total)
    values = element_fit.population(s)
    if small:
        at_lowest, _, _ = element_fit.tallies(values, element, shift - scale.min_exponent)
        lost = _at_least(lost, at_lowest, record.poisoned, total)
        noise_db = min(noise_db, snr_db(values, element, shift - scale.min_exponent))
    if large:
        _, _, at_highest = element_fit.tallies(values, element, shift - scale.max_exponent)
        overflow = _at_least(overflow, at_highest, record.poisoned, total)
        noise_db = min(noise_db, snr_db(values, element, shift - scale.max_exponent))

    lost = lost.widened(total, fewer=large, more=misplaced)
    overflow = overflow.widened(total, fewer=small + misplaced)
    moved = small + large + misplaced
    subnormal = subnormal.widened(total, fewer=moved, more=moved)
    subnormal = Tally.within(subnormal.low, subnormal.high, min(subnormal.estimate, total - lost.estimate))
    return lost, subnormal, overflow, noise_db


def _landed(s: SpectrumRecord, record: BlockRecord, fmt: BlockFormat) -> Population:
    """Return the values of finite blocks by depth below the element's top binade."""
    top = fmt.element.max_exponent
    lowest = top - (row_layout.BINADES - 1)
    counts = record.depths[::-1]
    occupied = np.flatnonzero(counts)
    ends = (int(occupied[0]), int(occupied[-1])) if len(occupied) else (0, 0)
    return Population(
        counts=counts,
        lowest=lowest,
        first=(lowest + ends[0]) * BINADE,
        last=(lowest + ends[1] + 1) * BINADE - 1,
        attained=False,
        grid=_relative_grid(s, lowest),
        total=int(counts.sum()),
        sumsq=None,
    )


def _overflowing(s: SpectrumRecord, record: BlockRecord, element: Format, landed: Population) -> float:
    """Return the estimate of `overflowing` for one record."""
    estimates = overflowing(
        element,
        maxima=record.maxima,
        start=np.array([0, len(record.maxima)]),
        lowest=np.array([row_layout.LOWEST_BINADE]),
        values=np.array([float(landed.total)]),
        top=np.array([float(record.depths[0])]),
        absmax=np.array([s.absmax]),
        bits=np.array([-1 if landed.grid is None else landed.grid.mantissa_bits]),
    )
    return float(estimates[0])


def _relative_grid(s: SpectrumRecord, lowest: int) -> Grid | None:
    """Return the grid after a power-of-two scale per block, if all values are normal."""
    if s.grid is None or not s.absmin >= 2.0 ** max(s.grid.quantum_exponent + s.grid.mantissa_bits, -1074):
        return None
    return Grid(s.grid.mantissa_bits, lowest - s.grid.mantissa_bits)


def _at_least(number: Tally, besides: Tally, poisoned: int, total: int) -> Tally:
    """Return a number by depths with that at the end of the scale's format added."""
    # The number at the scale's end includes poisoned values.
    low = max(number.low, besides.low - poisoned)
    high = min(number.high + besides.high, total)
    return Tally.within(low, high, max(number.estimate, besides.estimate - poisoned))
