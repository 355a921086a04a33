"""Sums and whole numbers that a format of 16 bits rounds, as rules read them from the numbers of modules."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis.tables.cells import Cells, Floats, module_ends


# Numbers that are added one by one are lost once they are less than half a unit in the last place of the sum. That unit
# doubles at each power of two, so there the sums stop: the least and the largest of them are powers of two at each
# sample. Sums of equal lengths may be too, and are exact.
def stalled_sums(cells: Cells, *, values: float, off: float) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """Yield outputs of modules, and the samples at which they are sums that have stopped at powers of two.

    They have so many values or more. `off`: the share of the exact sum by which they may be off.
    """
    digits = _digits(cells)
    with np.errstate(all="ignore"):
        count, added = cells.total_of("count"), cells.total_of("abssum")
        lowest, highest = -cells.highest(-cells.columns["absmin"]), cells.highest(cells.columns["absmax"])
        powers = (np.frexp(lowest)[0] == 0.5) & (np.frexp(highest)[0] == 0.5)
    for _, into, out in module_ends(cells):
        with np.errstate(all="ignore"):
            many = count[into] >= 2.0 ** digits[out] * count[out]
            large = lowest[out] >= added[into] / count[into] * 2.0 ** digits[out]
            kept = added[out] / added[into]
        inexact = (np.abs(kept - 1) > 2.0 ** -(digits[out] + 2)) & (np.abs(kept - 1) < off)
        yield out, powers[out] & many & large & inexact & (digits[out] > 0) & (count[out] >= values)


# The sum and the sum of squares of whole numbers are whole. A tensor of the same number of values and nearly the same
# sums, in 16 bits, is what they were cast to.
def rounded_whole_numbers(
    cells: Cells, *, values: float, samples: int
) -> Iterator[tuple[int, NDArray[np.bool_]]]:  # fmt: skip
    """Yield tensors in 16 bits, and the samples at which they are whole numbers of another one, rounded.

    They have so many values or more, and the other one has whole numbers at so many samples or more.
    """
    digits, top = _digits(cells), cells.highest(cells.columns["absmax"])
    sums = [cells.total_of(name) for name in ("sum", "abssum", "sumsq")]
    with np.errstate(all="ignore"):
        whole = (digits == 0) & (cells.total_of("count") >= values) & (top == np.rint(top))
        for each in sums:
            whole &= each == np.rint(each)
    for source in np.flatnonzero(np.count_nonzero(whole, axis=1) >= samples).tolist():
        for place in np.flatnonzero((digits > 0).any(axis=1)).tolist():
            with np.errstate(all="ignore"):
                lost = 2.0 ** -digits[place]
                same = (cells.total_of("count")[place] == cells.total_of("count")[source]) & (
                    top[source] * lost >= 4.0  # every second number and more is lost there
                )
                for each in sums:
                    same &= np.abs(each[place] - each[source]) <= lost * np.abs(each[source])
                rounded = sums[2][place] != sums[2][source]
            yield place, whole[source] & same & rounded


def spacing(cells: Cells) -> Floats:
    """Return how far neighbours of each cell's largest value lie apart in its format of 16 bits."""
    with np.errstate(all="ignore"):
        return np.exp2(np.floor(np.log2(cells.highest(cells.columns["absmax"]))) - _digits(cells))


def _digits(cells: Cells) -> Floats:
    """Return the mantissa bits of each cell's format. 0: wider than 16 bits, or not recorded."""
    bits = cells.by_format(lambda fmt: fmt.mantissa_bits if fmt.bits <= 16 else 0)
    return np.nan_to_num(cells.highest(bits.astype(np.float64)))
