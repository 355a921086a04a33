"""Spectra from rows, with the scale undone that the stored values carry."""

import contextlib
import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from plimsoll.errors import ArgumentError
from plimsoll.kernels import row_layout
from plimsoll.spectrum import Source, Spectrum


def true_spectrum(row: NDArray[np.int64], fmt: str, scale: float, block: int = 0) -> Spectrum:
    """The spectrum of the true values, where the scale is a power of two; its source tells the scale they had.

    Any other scale moves values between binades, which cannot be undone from counts: then the stored spectrum comes
    back as it is, without a source. So does one whose values lie beyond the range of binades.
    """
    stored = stored_spectrum(row, fmt, block)
    fraction, exponent = math.frexp(scale)
    if fraction == 0.5:
        if exponent == 1:
            return stored
        with contextlib.suppress(ArgumentError):
            return stored.scaled(1 - exponent)
    return replace(stored, source=None, grid=None)


def stored_spectrum(row: NDArray[np.int64], fmt: str, block: int = 0) -> Spectrum:
    """The spectrum of the values as they were measured; `block` is the block length of its record, 0 for none."""
    return Spectrum.from_row(np.ascontiguousarray(row[: row_layout.width(block)]), Source(fmt), block)
