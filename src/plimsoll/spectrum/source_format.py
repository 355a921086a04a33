"""Origin of a spectrum's values: the format that censored them, and their grid.

Two properties follow from the formats that a tensor passed through, and they merge in opposite directions. `Source` is
the *narrowest* format: values that were too small for it are zeros now, and merging keeps the narrower one. `Grid` is
the set of possible values: merging keeps the *finest*, which contains the others. It decides the number of values of
one binade on each side of a threshold.
"""

import functools
import math
from dataclasses import dataclass
from fractions import Fraction

from plimsoll.errors import ArgumentError, FormatError
from plimsoll.formats import Format, get, get_element

# FP32's smallest normal value. FP32 itself does not represent smaller values with full precision.
_CENSOR_ABOVE = Fraction(1, 1 << 126)


@dataclass(frozen=True, slots=True)
class Grid:
    """Set of numbers with a number of mantissa bits and a smallest spacing.

    A grid that is finer in both contains all numbers of the other.

    Attributes:
        mantissa_bits: Number of bits after the leading one.
        quantum_exponent: Exponent of the smallest spacing.
    """

    mantissa_bits: int
    quantum_exponent: int

    def spacing_exponent(self, binade: int) -> int:
        """Return the exponent of the spacing in a binade, above it if it is empty."""
        return max(binade - self.mantissa_bits, self.quantum_exponent)

    def holds(self, value: float) -> bool:
        """Return whether a finite value is one of the numbers.

        >>> Grid(10, -24).holds(1 + 2**-10), Grid(10, -24).holds(1 + 2**-11)
        (True, False)
        """
        if value == 0:
            return True
        exponent = math.frexp(value)[1]
        spacing = self.spacing_exponent(exponent - 1)
        return spacing < exponent and (spacing <= exponent - 53 or math.ldexp(value, -spacing).is_integer())

    def union(self, other: "Grid") -> "Grid":
        """Return the coarsest grid with the numbers of both."""
        return Grid(max(self.mantissa_bits, other.mantissa_bits), min(self.quantum_exponent, other.quantum_exponent))

    def intersection(self, other: "Grid") -> "Grid":
        """Return the grid of the numbers that are in both."""
        return Grid(min(self.mantissa_bits, other.mantissa_bits), max(self.quantum_exponent, other.quantum_exponent))

    def shifted(self, shift: int) -> "Grid":
        """Return the grid of the numbers times ``2**shift``."""
        return Grid(self.mantissa_bits, self.quantum_exponent + shift)


@dataclass(frozen=True, slots=True, init=False)
class Source:
    """Narrowest format that values passed through, and their scale in it.

    Gradients of a loss times 1024, computed in FP16 and unscaled since, have ``Source("fp16", 1024.0)``.

    Args:
        format: Name of an element format, a `Format` or a torch dtype.
        scale: Factor of the values while they were in the format, positive and finite. Default: 1.0.

    Raises:
        ArgumentError: The scale is out of range.
        FormatError: The format has no name that `plimsoll.formats.get` knows.

    >>> Source("float16", 1024.0)
    Source(format='fp16', scale=1024.0)
    >>> Source("fp16").censors, Source("bf16").censors
    (True, False)
    """

    format: str
    scale: float

    def __init__(self, format: object, scale: float = 1.0) -> None:  # noqa: A002  (the field's name)
        fmt = get_element(format, "Source")
        if not _is_catalogued(fmt):
            raise FormatError(
                f"Source: expected a format that plimsoll.formats.get finds by name; got {fmt!r}. "
                "A source is saved by name: use a catalogued format or an eXmY name."
            )
        try:
            factor = float(scale)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor of several values
            factor = math.nan
        if not (math.isfinite(factor) and factor > 0):
            raise ArgumentError(
                f"Source: expected a positive, finite scale; got scale={scale!r}. "
                "It is the factor of the values while they were in the format."
            )
        object.__setattr__(self, "format", fmt.name)
        object.__setattr__(self, "scale", factor)

    @property
    def censors(self) -> bool:
        """True if zeros may be values that underflowed in the format.

        Its smallest value over the scale is then above 2**-126. Formats with FP32's exponent range (FP32, TF32, BF16,
        FP64) do not censor at scale 1: FP32 does not represent the values that they lose with full precision either.
        """
        return _reach(self).smallest > _CENSOR_ABOVE

    @property
    def grid(self) -> Grid | None:
        """Numbers of the format over the scale, None if that is no power of two."""
        fraction, exponent = math.frexp(self.scale)
        if fraction != 0.5:
            return None
        fmt = get_element(self.format, "Source")
        return Grid(fmt.mantissa_bits, fmt.quantum_exponent - (exponent - 1))


def narrowest(first: Source | None, second: Source | None) -> Source | None:
    """Return the narrower of two sources, or the known one."""
    if first is None or first == second:
        return second
    if second is None:
        return first
    # The order is total, so that merging is associative and commutative: by the smallest value over the scale, then the
    # largest, the mantissa, the name, the scale.
    return min(first, second, key=_reach)


@functools.total_ordering
@dataclass(frozen=True, slots=True)
class _Reach:
    """Exact ends of a source over its scale, ordered with the narrowest first."""

    # Fractions, since a quotient of floats may leave the range of float64.
    smallest: Fraction
    largest: Fraction
    rest: tuple[int, str, float]

    def __lt__(self, other: "_Reach") -> bool:
        return (-self.smallest, self.largest, self.rest) < (-other.smallest, other.largest, other.rest)


@functools.lru_cache(maxsize=4096)
def _reach(source: Source) -> _Reach:
    fmt, scale = get_element(source.format, "Source"), Fraction(source.scale)
    return _Reach(
        Fraction(fmt.smallest_subnormal) / scale,
        Fraction(fmt.max) / scale,
        (fmt.mantissa_bits, source.format, source.scale),
    )


def _is_catalogued(fmt: Format) -> bool:
    try:
        return get(fmt.name) == fmt
    except FormatError:
        return False
