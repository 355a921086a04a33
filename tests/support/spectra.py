"""Whether two spectra are of the same values: counts and extremes exactly, sums but for the order of adding."""

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from plimsoll import row_layout
from plimsoll.spectrum import Spectrum

_EXACT = ("count", "zeros", "nans", "pos_infs", "neg_infs", "min", "max", "absmin", "absmax")
# Each sum with the sum of magnitudes that bounds it.
_SUMS = {"sum": "abssum", "abssum": "abssum", "sumsq": "sumsq", "sumfourth": "sumfourth"}
_HALF_ULP = 2.0**-53


def same(a: Spectrum, b: Spectrum) -> bool:
    """Sums of n numbers in any two orders differ by at most 2 n half units of the last place of the sum of magnitudes.

    Kernels, layouts and processors add in different orders. A square's own rounding adds one, a fourth power's three.
    """
    return (
        all(repr(getattr(a, name)) == repr(getattr(b, name)) for name in _EXACT)
        and np.array_equal(a.binades, b.binades)
        and all(_near(getattr(a, n), getattr(b, n), getattr(a, m), a.count) for n, m in _SUMS.items())
        and a.blocks == b.blocks
    )


def assert_same_rows(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    """Rows of a bank: every word is the same, but sums within `tolerance` of the sum of magnitudes."""
    found, expected = found.reshape(-1, found.shape[-1]).clone(), expected.reshape(-1, expected.shape[-1]).clone()
    got, want = (rows.view(torch.float64)[:, row_layout.SUMS] for rows in (found, expected))
    near = (got - want).abs() <= tolerance * want[:, [1, 1, 2, 3]]
    assert bool((near | (got == want) | (got.isnan() & want.isnan())).all()), (got, want)
    found[:, row_layout.SUMS] = expected[:, row_layout.SUMS] = 0
    assert torch.equal(found, expected), (found != expected).nonzero()[:8].tolist()


def same_tables(a: pa.Table, b: pa.Table) -> bool:
    """The same of two tables of spectra; a NaN equals nothing."""
    rows, others = a.to_pylist(), b.to_pylist()
    return a.drop_columns([*_SUMS]).equals(b.drop_columns([*_SUMS])) and all(
        _near(row[name], other[name], row[of], row["count"])
        for row, other in zip(rows, others, strict=True)
        for name, of in _SUMS.items()
    )


def _near(a: float, b: float, magnitudes: float, count: int) -> bool:
    return a == b or abs(a - b) <= 2 * (count + 3) * _HALF_ULP * magnitudes
