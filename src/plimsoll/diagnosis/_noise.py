"""Signal to rounding noise of every row in a format: `snr_db` of `plimsoll.spectrum._population`, on columns."""

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis._cells import Floats, Ints
from plimsoll.diagnosis._tallies import Populations
from plimsoll.formats import Format
from plimsoll.spectrum._population import BINADE, overflow_point


def noise_and_signal(values: Populations, fmt: Format, shift: int) -> tuple[Floats, Floats]:
    """The expected sum of squared errors of each row, and its sum of squares; both of the true values.

    A value that the format holds errs by its spacing's even distribution, a lost one by itself, an overflowing one by
    its distance to the format's largest value (it is taken to saturate). Values of one binade are spread evenly over
    it, or over the numbers of the row's grid.
    """
    cells = values.cells
    row = np.repeat(np.arange(len(cells)), cells.length)
    binade = cells.lowest[row] + np.arange(len(row)) - cells.start[:-1][row]
    counts = cells.flat.astype(np.float64)
    lift = np.round(np.log2(cells.scale)).astype(np.int64)  # a stored binade is the true one plus this
    moved = shift - lift[row]
    bits, quantum, on_grid = values.grids
    bits, quantum, on_grid = bits[row], quantum[row], on_grid[row]

    unit = (cells.lowest + cells.length - 1)[row]  # sums are in units of 4**unit, so that none leaves float64's range
    energies = counts * _mean_squares(binade, bits, quantum, on_grid, unit)
    rounding = _rounding(binade, bits, quantum, on_grid, fmt, moved, unit)
    lost = binade < fmt.quantum_exponent - 1 - moved
    spilled = _spilled(values, fmt, shift, row, binade, counts)

    def of_rows(weights: Floats) -> Floats:
        return np.asarray(np.bincount(row, weights=weights, minlength=len(cells)), dtype=np.float64)

    in_units = np.ldexp(1.0, _power(-2 * (cells.lowest + cells.length - 1)))
    evenly = of_rows(energies)
    signal = np.where(cells.column("sumsq") > 1e-290, cells.column("sumsq") * in_units, evenly)
    noise = np.minimum(of_rows(np.where(lost, energies, 0.0)), signal)
    noise += of_rows(np.where(lost, 0.0, (counts - spilled) * rounding))
    with np.errstate(all="ignore"):
        surplus = np.where(evenly > 0, np.minimum(signal / evenly, 1.0), 1.0)
    noise += surplus * of_rows(spilled * _saturation(values, fmt, shift, row, binade, unit))
    undone = np.where(cells.nonzero > 0, 1 / in_units / cells.scale**2, 0.0)
    return noise * undone, signal * undone


def _spilled(values: Populations, fmt: Format, shift: int, row: Ints, binade: Ints, counts: Floats) -> Floats:
    """How many values of each binade overflow: all above the top's, and of the top's what is left of the estimate."""
    over = values.overflow(fmt, shift).estimate
    top = (values.points(overflow_point(fmt), shift) // BINADE)[row]
    above = np.where(binade > top, counts, 0.0)
    left = np.maximum(over - np.bincount(row, weights=above, minlength=len(over)), 0.0)
    return np.where(binade == top, left[row], above)


def _mean_squares(binade: Ints, bits: Ints, quantum: Ints, on_grid: NDArray[np.bool_], unit: Ints) -> Floats:
    squares = np.ldexp(1.0, _power(2 * (binade - unit)))
    places = np.ldexp(1.0, _power(np.maximum(binade - np.maximum(binade - bits, quantum), 0)))
    on_it = 1 + (places - 1) / places + (places - 1) * (2 * places - 1) / (6 * places * places)
    return squares * np.where(on_grid, on_it, 7 / 3)


def _rounding(
    binade: Ints, bits: Ints, quantum: Ints, on_grid: NDArray[np.bool_], fmt: Format, moved: Ints, unit: Ints
) -> Floats:
    spacing = np.maximum(binade - fmt.mantissa_bits, fmt.quantum_exponent - moved)
    spacing = np.minimum(spacing, binade + 1)
    even = np.ldexp(1.0, _power(2 * (spacing - unit))) / 12
    fine = np.maximum(binade - bits, quantum)
    fine_square = np.ldexp(1.0, _power(2 * (np.minimum(fine, spacing) - unit)))
    places = np.ldexp(1.0, _power(np.maximum(spacing - 1 - fine, 0)))
    upward = fine_square * (places + 1) * (2 * places + 1) / 6
    on_it = np.where(fine >= spacing, 0.0, np.where(spacing > binade, upward, even + fine_square / 6))
    return np.where(on_grid, on_it, even)


def _saturation(values: Populations, fmt: Format, shift: int, row: Ints, binade: Ints, unit: Ints) -> Floats:
    """The mean square distance of each binade's overflowing values to the largest value, in units of ``4**unit``."""
    cells = values.cells
    point = values.points(overflow_point(fmt), shift)[row]
    low = np.maximum(binade * BINADE, point)
    high = np.maximum(np.minimum((binade + 1) * BINADE, values.last[row]), low)
    with np.errstate(all="ignore"):
        largest = np.ldexp(fmt.max * cells.scale[row], _power(-shift - unit))

    def distance(position: Ints) -> Floats:
        exponent, rest = position // BINADE, position % BINADE
        return np.ldexp(1 + rest / BINADE, _power(exponent - unit)) - largest

    near, far = distance(low), distance(high)
    return np.where(high > point, (near * near + near * far + far * far) / 3, 0.0)


def _power(exponent: Ints) -> NDArray[np.int32]:
    return np.clip(exponent, -1074, 1023).astype(np.int32)
