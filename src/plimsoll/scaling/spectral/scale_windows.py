"""Usable scale range per gradient, from the rows of a bank, and the report of all ranges.

All in exponents of the scale: exponent k stands for the scale 2**k. A tensor's window runs from the lowest scale at
which less than `TOLERANCE` of its nonzero values is lost for certain, to the highest at which none overflows. What FP16
has lost already it no longer shows: where a tensor has zeros and values right above where they begin, as many are taken
to be lost as lie in the format's lowest binade, and half as many at twice the scale.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plimsoll import row_layout
from plimsoll.formats import Format
from plimsoll.notebook_repr import NotebookRepr

TOLERANCE = 0.01  # as `Spectrum.window`


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleWindow:
    """Exponents of the scales that fit one tensor's gradient, `low` to `high`. No scale fits if low > high."""

    name: str
    low: int
    high: int

    @property
    def excess(self) -> int:
        """By how many binades the gradient spans more than the format holds; 0 where some scale serves."""
        return max(self.low - self.high, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleReport(NotebookRepr):
    """Usable ranges of scales from the latest check of each gradient. Tensors of zeros only are left out."""

    format: str
    scale: float
    tensors: tuple[ScaleWindow, ...]

    @property
    def window(self) -> tuple[int, int] | None:
        """The lowest and the highest exponent of the scales that serve all tensors; None where no scale does."""
        if not self.tensors:
            return None
        low, high = max(t.low for t in self.tensors), min(t.high for t in self.tensors)
        return (low, high) if low <= high else None

    @property
    def too_wide(self) -> tuple[ScaleWindow, ...]:
        """The tensors that no scale serves, widest first."""
        return tuple(sorted((t for t in self.tensors if t.excess), key=lambda t: -t.excess))

    @property
    def finding(self) -> str | None:
        """One sentence where no scale serves all tensors, None where one does."""
        if not self.tensors or self.window is not None:
            return None
        if self.too_wide:
            named = ", ".join(f"{t.name} by {t.excess}" for t in self.too_wide)
            return (
                f"no scale serves: the gradients of {len(self.too_wide)} of {len(self.tensors)} tensors span more "
                f"binades than {self.format} holds: {named}"
            )
        small = max(self.tensors, key=lambda t: t.low)
        large = min(self.tensors, key=lambda t: t.high)
        return (
            f"no single scale serves: in {self.format} the gradient of {small.name} needs at least 2**{small.low}, and "
            f"that of {large.name} at most 2**{large.high}, {small.low - large.high} binades less"
        )

    def __str__(self) -> str:
        found = self.window
        joint = "none" if found is None else f"2**{found[0]} to 2**{found[1]}"
        head = f"{self.format}, scale 2**{math.log2(self.scale):g}, scales that serve all {len(self.tensors)}: {joint}"
        return "\n".join([head, *(f"  {t.name}: 2**{t.low} to 2**{t.high}" for t in self.tensors)])


def scale_report(
    rows: NDArray[np.int64], names: Sequence[str], scale: float, fmt: Format, tolerance: float = TOLERANCE
) -> ScaleReport:
    """The report of gradients that were measured with the scale in them, one row each."""
    histogram = rows[:, row_layout.HISTOGRAM : row_layout.HISTOGRAM + row_layout.BINADES]
    some = np.flatnonzero(histogram.any(axis=1))
    exponent = math.log2(scale)
    low = _lowest(histogram[some], rows[some, row_layout.ZEROS], fmt, tolerance)
    high = _highest(rows[some], fmt)
    windows = (
        ScaleWindow(name=names[index], low=math.ceil(exponent + below), high=math.floor(exponent + above))
        for index, below, above in zip(some.tolist(), low.tolist(), high.tolist(), strict=True)
    )
    return ScaleReport(format=fmt.name, scale=scale, tensors=tuple(windows))


def _highest(rows: NDArray[np.int64], fmt: Format) -> NDArray[np.int64]:
    """The largest shift at which the largest magnitude stays below the format's overflow."""
    extremes = rows[:, row_layout.POSITIVE : row_layout.NEGATIVE + 1].max(axis=1)
    fraction, exponent = np.frexp(fmt.overflow_threshold / extremes.view(np.float64))
    return exponent.astype(np.int64) - 1 - (fraction == 0.5)


def _lowest(histogram: NDArray[np.int64], zeros: NDArray[np.int64], fmt: Format, tolerance: float) -> NDArray[np.int64]:
    """The smallest shift at which less than the tolerance is below half the format's smallest value."""
    allowed = tolerance * histogram.sum(axis=1)
    below = np.cumsum(histogram, axis=1)  # [:, i]: values in the binades up to i
    kept = (below < allowed[:, None]).sum(axis=1)  # the highest threshold's index: all binades under it may be lost
    quantum = fmt.quantum_exponent
    # Half the smallest value begins a binade, and goes to zero itself: of that binade all may be lost, for certainty.
    shift = quantum - (kept + row_layout.LOWEST_BINADE)
    bottom = quantum - row_layout.LOWEST_BINADE
    censored = np.where(below[:, bottom - 1] == 0, np.minimum(zeros, histogram[:, bottom]), 0) if bottom else 0 * zeros
    with np.errstate(divide="ignore"):
        wanted = np.floor(np.log2(censored / allowed)) + 1  # halved so often it is below what is allowed
    return np.where(censored >= allowed, np.maximum(shift, np.where(np.isfinite(wanted), wanted, 0)), shift).astype(
        np.int64
    )
