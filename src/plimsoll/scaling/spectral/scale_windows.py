"""Usable scale range per gradient, from the rows of a bank.

Scales are exponents: k stands for 2**k. A tensor's usable range is from the lowest scale at which certainly less than
`TOLERANCE` of its nonzero values underflow, to the highest at which none overflows. Values that underflowed in FP16
before the measurement are zeros there. If a tensor has zeros and values in the format's lowest binade, as many values
are assumed to have underflowed as are in that binade, and half as many at twice the scale.
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
    """Range of exponents of the scales that fit one tensor's gradient.

    No scale fits if `low` is above `high`.
    """

    name: str
    low: int
    high: int

    @property
    def excess(self) -> int:
        """Binades that the gradient spans in excess of the format, 0 if a scale fits."""
        return max(self.low - self.high, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleReport(NotebookRepr):
    """Usable ranges of scales of all gradients that are not zero, at the latest check."""

    format: str
    scale: float
    tensors: tuple[ScaleWindow, ...]

    @property
    def window(self) -> tuple[int, int] | None:
        """Lowest and highest exponent of the scales that fit all tensors, or None."""
        if not self.tensors:
            return None
        low, high = max(t.low for t in self.tensors), min(t.high for t in self.tensors)
        return (low, high) if low <= high else None

    @property
    def too_wide(self) -> tuple[ScaleWindow, ...]:
        """Tensors that no scale fits, widest first."""
        return tuple(sorted((t for t in self.tensors if t.excess), key=lambda t: -t.excess))

    @property
    def finding(self) -> str | None:
        """One sentence if no scale fits all tensors, or None."""
        if not self.tensors or self.window is not None:
            return None
        if self.too_wide:
            named = ", ".join(f"{t.name} by {t.excess}" for t in self.too_wide)
            return (
                f"no scale fits: the gradients of {len(self.too_wide)} of {len(self.tensors)} tensors span more "
                f"binades than {self.format} has: {named}"
            )
        small = max(self.tensors, key=lambda t: t.low)
        large = min(self.tensors, key=lambda t: t.high)
        return (
            f"no single scale fits: in {self.format} the gradient of {small.name} needs at least 2**{small.low}, and "
            f"that of {large.name} at most 2**{large.high}, {small.low - large.high} binades less"
        )

    def __str__(self) -> str:
        window = self.window
        joint = "none" if window is None else f"2**{window[0]} to 2**{window[1]}"
        head = f"{self.format}, scale 2**{math.log2(self.scale):g}, scales that fit all {len(self.tensors)}: {joint}"
        return "\n".join([head, *(f"  {t.name}: 2**{t.low} to 2**{t.high}" for t in self.tensors)])


def scale_report(
    rows: NDArray[np.int64], names: Sequence[str], scale: float, fmt: Format, tolerance: float = TOLERANCE
) -> ScaleReport:
    """Return the report of gradients that were measured with the scale in them."""
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
    """Return the largest shifts without overflow."""
    extremes = rows[:, row_layout.POSITIVE : row_layout.NEGATIVE + 1].max(axis=1)
    fraction, exponent = np.frexp(fmt.overflow_threshold / extremes.view(np.float64))
    return exponent.astype(np.int64) - 1 - (fraction == 0.5)


def _lowest(histogram: NDArray[np.int64], zeros: NDArray[np.int64], fmt: Format, tolerance: float) -> NDArray[np.int64]:
    """Return the smallest shifts at which few enough values underflow."""
    allowed = tolerance * histogram.sum(axis=1)
    below = np.cumsum(histogram, axis=1)  # [:, i]: values in the binades up to i
    binade = (below < allowed[:, None]).sum(axis=1)  # all binades below this one may underflow
    quantum = fmt.quantum_exponent
    # Half the smallest value starts a binade, and rounds to zero itself. So all of that binade may underflow.
    shift = quantum - (binade + row_layout.LOWEST_BINADE)
    bottom = quantum - row_layout.LOWEST_BINADE
    censored = np.where(below[:, bottom - 1] == 0, np.minimum(zeros, histogram[:, bottom]), 0) if bottom else 0 * zeros
    with np.errstate(divide="ignore"):
        halvings = np.floor(np.log2(censored / allowed)) + 1  # until the number is below the allowed one
    halvings = np.where(np.isfinite(halvings), halvings, 0)
    return np.where(censored >= allowed, np.maximum(shift, halvings), shift).astype(np.int64)
