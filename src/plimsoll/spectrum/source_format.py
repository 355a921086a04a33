"""Where a spectrum's values come from: which format censored them, and on which grid of numbers they lie.

Two different facts follow from the formats that a tensor passed through, and they merge in opposite directions:

- `Source`, the *narrowest* format: what was too small for it is a zero now. Merging keeps the narrower one.
- `Grid`, the numbers that the values can be: merging keeps the *finest*, which holds the others' numbers too. It
  decides how many values of one binade lie on which side of a threshold.
"""

import functools
import math
from dataclasses import dataclass
from fractions import Fraction

from plimsoll.errors import ArgumentError, FormatError
from plimsoll.formats import Format, get, get_element

# FP32's smallest normal value. What a format that reaches below it loses, FP32 itself does not hold in full.
_CENSOR_ABOVE = Fraction(1, 1 << 126)


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers with `mantissa_bits` bits after the leading one, and none finer than ``2**quantum_exponent``.

    Of two grids one of which is finer in both, the finer holds all numbers of the other.
    """

    mantissa_bits: int
    quantum_exponent: int

    def spacing_exponent(self, binade: int) -> int:
        """The exponent of the distance between neighbours in a binade; above `binade` where it has no numbers."""
        return max(binade - self.mantissa_bits, self.quantum_exponent)

    def holds(self, value: float) -> bool:
        """Whether a finite value is one of the numbers.

        >>> Grid(10, -24).holds(1 + 2**-10), Grid(10, -24).holds(1 + 2**-11)
        (True, False)
        """
        if value == 0:
            return True
        spacing = self.spacing_exponent(math.frexp(value)[1] - 1)
        return math.ldexp(value, -spacing).is_integer()

    def union(self, other: "Grid") -> "Grid":
        """The coarsest grid that holds the numbers of both."""
        return Grid(max(self.mantissa_bits, other.mantissa_bits), min(self.quantum_exponent, other.quantum_exponent))

    def intersection(self, other: "Grid") -> "Grid":
        """The grid of the numbers that both hold."""
        return Grid(min(self.mantissa_bits, other.mantissa_bits), max(self.quantum_exponent, other.quantum_exponent))

    def shifted(self, shift: int) -> "Grid":
        """The grid of the numbers times ``2**shift``."""
        return Grid(self.mantissa_bits, self.quantum_exponent + shift)


@dataclass(frozen=True, slots=True, init=False)
class Source:
    """The narrowest format that values passed through, and the scale they were multiplied by when it held them.

    `format` is an element format's name; a `Format` and a torch dtype are names too. `scale` is positive and finite.
    Gradients of a loss times 1024, computed in FP16 and unscaled since, have ``Source("fp16", 1024.0)``.

    >>> Source("float16", 1024.0)
    Source(format='fp16', scale=1024.0)
    >>> Source("fp16").censors, Source("bf16").censors
    (True, False)
    """

    format: str
    scale: float

    def __init__(self, format: object, scale: float = 1.0) -> None:  # noqa: A002  (the field's name)
        found = get_element(format, "Source")
        if not _is_catalogued(found):
            raise FormatError(
                f"Source: expected a format that plimsoll.formats.get finds by name; got {found!r}. "
                "A source is kept by name: use a catalogued format or an eXmY name."
            )
        factor = float(scale)
        if not (math.isfinite(factor) and factor > 0):
            raise ArgumentError(
                f"Source: expected a positive, finite scale; got scale={scale!r}. "
                "It is what the values were multiplied by when the format held them."
            )
        object.__setattr__(self, "format", found.name)
        object.__setattr__(self, "scale", factor)

    @property
    def censors(self) -> bool:
        """Whether zeros may be values that the format lost: its smallest value, scale undone, is above 2**-126.

        Formats with FP32's exponent range (FP32, TF32, BF16, FP64) do not censor at scale 1: what they lose, FP32
        would not have held at full precision either.
        """
        return _reach(self).smallest > _CENSOR_ABOVE

    @property
    def grid(self) -> Grid | None:
        """The numbers that the format holds, scale undone; None where the scale is no power of two."""
        fraction, exponent = math.frexp(self.scale)
        if fraction != 0.5:
            return None
        fmt = get_element(self.format, "Source")
        return Grid(fmt.mantissa_bits, fmt.quantum_exponent - (exponent - 1))


def narrowest(first: Source | None, second: Source | None) -> Source | None:
    """The narrower of two sources; None says that nothing is known, and gives way to the other.

    The order is total, so that merging is associative and commutative: by the smallest value (scale undone), then the
    largest, the mantissa, the name, the scale.
    """
    if first is None or first == second:
        return second
    if second is None:
        return first
    return min(first, second, key=_reach)


@functools.total_ordering
@dataclass(frozen=True, slots=True)
class _Reach:
    """A source's ends, exactly (a quotient of floats may leave float64's range), ordered with the narrowest first."""

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
