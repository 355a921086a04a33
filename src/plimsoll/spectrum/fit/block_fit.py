"""Losses and noise of a spectrum in a block format, from its block record.

The scale of a block maps its absmax to the top of the element format. So the depth of a value, its distance in binades
from the absmax, decides its place there, whatever its binade. With a power-of-two scale (OCP MX 1.0, section 6.3: the
floor rule) a depth is exactly one binade of the element format. Blocks whose scale would leave its format are
exceptions: they take the end of that format, and the binades of their values decide. With a scale that has a mantissa
(NVFP4) a depth covers two binades and the rounding of the scale (`tensor_scale_fit`).
"""

import numpy as np

from plimsoll import row_layout
from plimsoll.errors import NotRecordedError
from plimsoll.formats import BlockFormat, Format
from plimsoll.spectrum.block_record import BlockRecord
from plimsoll.spectrum.fit import element_fit, tensor_scale_fit
from plimsoll.spectrum.fit.block_overflow import overflowing
from plimsoll.spectrum.fit.population import BINADE, Population, Tally, ordinal, snr_db
from plimsoll.spectrum.merging import BEYOND, LOWEST
from plimsoll.spectrum.record import SpectrumRecord
from plimsoll.spectrum.source_format import Grid


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
    lost, subnormal, overflow, noise_db = tensor_scale_fit.tallies(s, record, fmt, shift, misplaced)
    if fmt.tensor_scale:
        return lost, subnormal, overflow, noise_db
    # Values that overflow at the largest scale are in blocks that have it.
    values, total = element_fit.population(s), int(record.depths.sum())
    point = ordinal(tensor_scale_fit.top_of_scales(fmt)) - shift * BINADE
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
    """Return the values of finite blocks by their binade in the element format.

    Depth d is its top binade minus d.
    """
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
    """Return the estimate of `block_overflow` for one record."""
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
    """Return the grid after a power-of-two scale per block, or None.

    It is known if all values are normal numbers.
    """
    if s.grid is None or not s.absmin >= 2.0 ** max(s.grid.quantum_exponent + s.grid.mantissa_bits, -1074):
        return None
    return Grid(s.grid.mantissa_bits, lowest - s.grid.mantissa_bits)


def _at_least(number: Tally, besides: Tally, poisoned: int, total: int) -> Tally:
    """Return a number by depths with that at the end of the scale's format added."""
    # The number at the scale's end includes poisoned values.
    low = max(number.low, besides.low - poisoned)
    high = min(number.high + besides.high, total)
    return Tally.within(low, high, max(number.estimate, besides.estimate - poisoned))
