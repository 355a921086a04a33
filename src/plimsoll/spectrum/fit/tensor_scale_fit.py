"""Losses in block formats whose scale has a mantissa, as in NVFP4."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plimsoll import row_layout
from plimsoll.formats import FP32, BlockFormat, Format
from plimsoll.spectrum.block_record import BlockRecord
from plimsoll.spectrum.fit.population import Tally
from plimsoll.spectrum.merging import BEYOND, LOWEST, times_power
from plimsoll.spectrum.record import SpectrumRecord

_SLACK = 2.0**-20  # FP32 rounding of t, and rounding of this module's arithmetic
_PLACES = 24  # per averaged variable
_Flags = NDArray[np.bool_]
_Floats = NDArray[np.float64]


def tallies(
    s: SpectrumRecord, record: BlockRecord, fmt: BlockFormat, shift: int, misplaced: int
) -> tuple[Tally, Tally, Tally, float]:
    """Return lost, subnormal and overflowing values of finite blocks, and the SNR."""
    depths, total = record.depths, int(record.depths.sum())
    outcomes = table(fmt)
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
    """Blocks whose scale is subnormal, and so coarse, or zero, or the largest one.

    Attributes:
        unsure: Upper bound of the number of their values.
        dead_blocks: Number of blocks whose scale is zero for certain.
        dead_share: Estimated fraction of blocks whose scale is zero.
    """

    unsure: int
    dead_blocks: int
    dead_share: float


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


_Depths = tuple[_Flags, _Flags, _Floats]  # by depth: certain for all values, possible for some, expected share


# Such formats may have an FP32 scale for the whole tensor. It is t = absmax / (element max * scale max) over the finite
# values, and 1 without such a scale. The scale of a block is its absmax over (element max * t), rounded to the format
# of scales. So a value at depth d becomes `element max * u/v * 2**-d` times the relative rounding of the scale, where u
# and v in [1, 2) are the significands of the value and of the block's absmax. The ends of these ranges give the
# undecided depths. The estimates are averages over the ranges.
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Outcomes of values at each depth in a format.

    Attributes:
        lost: Values that round to zero.
        subnormal: Values that become subnormal.
        overflow: Values that overflow.
        energy: Expected squares.
        noise: Expected squared errors.
        maximum_energy: Expected square of a block's largest value, which is at depth 0 too.
        maximum_noise: Expected squared error of a block's largest value.
    """

    lost: _Depths
    subnormal: _Depths
    overflow: _Depths
    energy: _Floats
    noise: _Floats
    maximum_energy: float
    maximum_noise: float


def top_of_scales(fmt: BlockFormat) -> float:
    """Return the magnitude that overflows at the largest scale of blocks."""
    return fmt.element.overflow_threshold * fmt.scale.max


@functools.lru_cache(maxsize=16)
def table(fmt: BlockFormat) -> Outcomes:
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

    def share(of: Callable[[_Floats], _Flags]) -> _Floats:
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


def _places(scale: Format) -> tuple[_Floats, _Floats, _Floats]:
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


def _round(values: _Floats, fmt: Format) -> _Floats:
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
