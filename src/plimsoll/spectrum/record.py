"""Fields of a spectrum, which merging, fitting and serialization use."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plimsoll.spectrum.block_record import BlockRecord
from plimsoll.spectrum.source_format import Grid, Source


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SpectrumRecord:
    """Counts, extremes and sums of a tensor's values, documented in `Spectrum`."""

    count: int
    zeros: int
    nans: int
    pos_infs: int
    neg_infs: int
    binades: NDArray[np.int64]
    min: float
    max: float
    absmin: float
    absmax: float
    sum: float
    abssum: float
    sumsq: float
    sumfourth: float
    source: Source | None = None
    blocks: BlockRecord | None = None
    grid: Grid | None = None

    @property
    def finite(self) -> int:
        """Number of finite values, zeros included."""
        return self.count - self.nonfinite

    @property
    def nonzero(self) -> int:
        """Number of finite nonzero values."""
        return self.finite - self.zeros

    @property
    def nonfinite(self) -> int:
        """Number of NaN and infinite values."""
        return self.nans + self.pos_infs + self.neg_infs
