"""Records of number formats: elements, and blocks of elements that share a scale.

Five fields decide all values of an element: exponent bits, mantissa bits, bias, the use of the top codes (`specials`)
and sign. The others describe hardware and software that support the format. This module imports neither torch nor
numpy, so the command line and readers of old runs can use it without them.
"""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, cast

from plimsoll.errors import ArgumentError, FormatError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from plimsoll.formats.codec import Codes, Rounding

Specials = Literal["ieee", "fn", "fnuz", "none"]
SPECIALS: tuple[Specials, ...] = ("ieee", "fn", "fnuz", "none")

# float64 is the widest carrier: no format may reach outside it.
_MAX_EXPONENT_BITS, _MAX_MANTISSA_BITS = 11, 52
_HIGHEST_BINADE, _LOWEST_NORMAL_BINADE = 1023, -1022
_MOST_ELEMENT_BITS, _MOST_SCALE_BITS = 16, 8  # of blocks: what packed codes have room for


def set_fields(record: Any, state: Sequence[object]) -> None:
    """Restore the fields of a frozen record from its pickle."""
    for index, spec in enumerate(fields(record)):
        # A pickle of version 0.1 lacks the later fields, which keep their defaults.
        object.__setattr__(record, spec.name, state[index] if index < len(state) else spec.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A binary floating-point element format.

    Two formats are equal if their names and the fields that decide their values are.

    Args:
        name: The catalogue's name, in lower case.
        exponent_bits: Width of the exponent, 1 to 11.
        mantissa_bits: Width of the mantissa, 0 to 52.
        bias: Number subtracted from the exponent's code.
        specials: Use of the top of the code range. "ieee" (default): the highest exponent holds Inf (mantissa 0)
            and NaN (the others). "fn": no Inf, and the one code of all ones (per sign) is NaN. "fnuz": no Inf and no
            -0, and the code of -0 is the one NaN. "none": every code is a number.
        signed: Whether codes have a sign. False describes a scale format such as E8M0: no sign, no zero and no
            subnormals. Default: True.
        torch_dtype: Name of the torch dtype whose tensors hold this format's codes. Default: None, there is none.
        gradient_format: Name of the format for gradients where modules compute in this one. Default: None, the same.
        in_report: Whether the single-file report answers what-if questions for it. Default: False.
        cuda_capability: First compute capability whose matrix units multiply it. Default: None, there is none.
        cpu_flags: Instruction sets that compute in it, by Linux's names. Default: none.

    Raises:
        FormatError: The fields contradict each other, or reach outside float64.

    >>> Format(name="e4m3", exponent_bits=4, mantissa_bits=3, bias=7, specials="fn").max
    448.0
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials = "ieee"
    signed: bool = True
    torch_dtype: str | None = field(default=None, compare=False, repr=False)
    gradient_format: str | None = field(default=None, compare=False, repr=False)
    in_report: bool = field(default=False, compare=False, repr=False)
    cuda_capability: tuple[int, int] | None = field(default=None, compare=False, repr=False)
    cpu_flags: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        reason = _why_impossible(self)
        if reason is not None:
            raise FormatError(f"Format: {reason}; got {self!r}")

    @property
    def bits(self) -> int:
        """Width of one code."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def has_inf(self) -> bool:
        """True if a code stands for infinity."""
        return self.specials == "ieee"

    @property
    def has_nan(self) -> bool:
        """True if a code stands for NaN."""
        # An IEEE-like format without mantissa bits has room for Inf only.
        return self.specials in ("fn", "fnuz") or (self.specials == "ieee" and self.mantissa_bits > 0)

    @property
    def has_subnormals(self) -> bool:
        """True if there are values between zero and the smallest normal one."""
        return self.signed and self.mantissa_bits > 0

    @property
    def has_negative_zero(self) -> bool:
        """True if -0 has a code."""
        return self.signed and self.specials != "fnuz"

    @property
    def max_code(self) -> int:
        """Magnitude code (no sign bit) of the largest finite value."""
        top = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        match self.specials:
            case "ieee":
                return top - (1 << self.mantissa_bits)
            case "fn":
                return top - 1
            case _:
                return top

    @property
    def max(self) -> float:
        """Largest finite value."""
        return self.magnitude(self.max_code)

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value."""
        return (0 if not self.signed else 1) - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value."""
        return math.frexp(self.max)[1] - 1

    @property
    def quantum_exponent(self) -> int:
        """Exponent of the spacing of values below the smallest normal one."""
        return self.min_exponent - self.mantissa_bits

    @property
    def smallest_normal(self) -> float:
        """Smallest positive value with full precision."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value. Without subnormals it is `smallest_normal`."""
        return math.ldexp(1.0, self.quantum_exponent) if self.has_subnormals else self.smallest_normal

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger value."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def binades(self) -> int:
        """Number of powers of two that the format reaches, subnormals included."""
        return self.max_exponent - (math.frexp(self.smallest_subnormal)[1] - 1) + 1

    @property
    def overflow_threshold(self) -> float:
        """Midpoint between the largest finite value and the next that would follow.

        Nearest-even rounding overflows above it, and at it if `overflow_at_threshold`.
        """
        ulp = math.ldexp(1.0, self.max_exponent - self.mantissa_bits)
        return self.max + ulp / 2

    @property
    def overflow_at_threshold(self) -> bool:
        """True if a tie at `overflow_threshold` overflows, as with an odd largest code."""
        return self.max_code % 2 == 1

    def magnitude(self, code: int) -> float:
        """Return the value of a finite magnitude code (no sign bit)."""
        fraction = code & ((1 << self.mantissa_bits) - 1)
        field = code >> self.mantissa_bits
        if field == 0 and self.signed:
            return math.ldexp(fraction, self.quantum_exponent)
        return math.ldexp((1 << self.mantissa_bits) + fraction, field - self.bias - self.mantissa_bits)

    def decode(self, codes: "ArrayLike") -> "NDArray[np.float64]":
        """Return the value of each code, exactly: -0, subnormals, Inf and NaN included.

        Args:
            codes: Integers from 0 to ``2**bits - 1``, in any shape.

        Returns:
            A float64 array of the same shape; 0-d for a scalar.

        Raises:
            ArgumentError: Codes are no integers, or outside the format's width.
            FormatError: The format has more than 16 bits.

        >>> from plimsoll.formats import E4M3
        >>> E4M3.decode([0x38, 0x7E, 0x80, 0x7F])
        array([  1., 448.,  -0.,  nan])
        """
        from plimsoll.formats import codec

        return codec.decode(self, codes)

    def encode(
        self,
        values: "ArrayLike",
        rounding: "Rounding" = "nearest_even",
        saturate: bool | None = None,
        generator: "int | np.random.Generator | None" = None,
    ) -> "Codes":
        """Return the code of each value, rounded once.

        Ties of ``nearest_even`` go to the even code. -0 keeps its sign where the format can. Finite values in
        ``toward_zero``, ``up`` and ``down`` stop at the largest value where the mode points back to it. E8M0 has no
        zero: all from 0 to its smallest value become that, and negative values NaN.

        Args:
            values: Python numbers, nested lists, or arrays of floats (those of ml_dtypes too) or integers.
            rounding: One of the six modes of `plimsoll.cast`. Default: "nearest_even".
            saturate: Whether a value whose rounded result exceeds `max`, and +-Inf, become the largest value. Else they
                become Inf, or NaN where there is no Inf. Default: None, the format's own, as in `saturates`.
            generator: Source of the noise for "stochastic". An int is the key itself, modulo 2**64: the noise is then
                that of `plimsoll.cast` with the same int. A numpy Generator draws a key. Default: None draws one from
                the operating system.

        Returns:
            An array of the shape of `values`: uint8 for up to 8 bits, uint16 above.

        Raises:
            ArgumentError: A NaN comes that the format has no code for, or an argument is out of range.
            FormatError: The format has more than 16 bits.

        >>> from plimsoll.formats import E2M1, E4M3
        >>> E4M3.encode([1.0, 1e9, float("nan"), -0.0])
        array([ 56, 126, 127, 128], dtype=uint8)
        >>> E2M1.decode(E2M1.encode([2.5, 3.5, -0.2, 100.0], rounding="nearest_away"))
        array([ 3.,  4., -0.,  6.])
        """
        from plimsoll.formats import codec

        return codec.encode(self, values, rounding, saturate, generator)

    def saturates(self, saturate: bool | None) -> bool:
        """Return whether overflow gives the largest value.

        Args:
            saturate: The user's choice, or None for the format's own: True for formats without Inf.

        Raises:
            ArgumentError: It is none of the three, or False leaves no code to overflow to.
        """
        if saturate is None:
            return not self.has_inf
        if not isinstance(saturate, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(f"saturate: expected True, False or None; got saturate={saturate!r}. Leave it out.")
        if not saturate and not (self.has_inf or self.has_nan):
            raise ArgumentError(
                f"saturate: expected True or None for {self.name}, which has neither Inf nor NaN to overflow to; "
                "got saturate=False. Leave saturate out."
            )
        return saturate


def _why_impossible(fmt: Format) -> str | None:
    e, m = fmt.exponent_bits, fmt.mantissa_bits
    if not all(isinstance(number, numbers.Integral) for number in (e, m, fmt.bias)):
        return "expected integers as exponent_bits, mantissa_bits and bias"
    if fmt.specials not in SPECIALS:
        return f"expected specials to be one of {', '.join(SPECIALS)}"
    if e == 0:
        return (
            "expected at least one exponent bit: without one the values are evenly spaced integers, not floating point"
        )
    if e < 0 or m < 0:
        return "expected field widths of zero or more"
    if e > _MAX_EXPONENT_BITS or m > _MAX_MANTISSA_BITS:
        return f"expected at most {_MAX_EXPONENT_BITS} exponent and {_MAX_MANTISSA_BITS} mantissa bits, float64's own"
    if fmt.specials == "ieee" and e == 1:
        return (
            "expected two exponent bits or more: of the two exponents that one bit gives, Inf and NaN take one and "
            "zero the other"
        )
    if fmt.specials == "fn" and (1 << (e + m)) < 3:
        return "expected room for a number besides zero and NaN"
    if not fmt.signed and (m > 0 or fmt.specials == "fnuz"):
        return "expected a format without sign to be a pure exponent (no mantissa bits, no -0 to reuse)"
    if _highest_binade(fmt) > _HIGHEST_BINADE or fmt.min_exponent < _LOWEST_NORMAL_BINADE:
        return "expected a bias that keeps every value inside float64's range"
    return None


def _highest_binade(fmt: Format) -> int:
    """Return `max_exponent`, computed from integers."""
    # math.ldexp raises for values outside the range of float64.
    field = fmt.max_code >> fmt.mantissa_bits
    if field == 0 and fmt.signed:
        return fmt.max_code.bit_length() - 1 + fmt.quantum_exponent
    return field - fmt.bias


# -- block formats -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """Element codes in blocks of values, each block with one scale.

    The value of an element is ``element * scale``, or ``element * scale * tensor_scale`` if the format also has an FP32
    scale for the whole tensor.

    Args:
        name: The catalogue's name, in lower case.
        element: Format of the elements, of at most 16 bits. It has a sign.
        block: Number of values that share a scale, at least 1.
        scale: Format of the scales, of at most 8 bits.
        tensor_scale: Whether there is an FP32 scale for the tensor, as in NVFP4. Default: False.
        in_report: Whether the single-file report answers what-if questions for it. Default: False.
        cuda_capability: First compute capability whose matrix units multiply it. Default: None, there is none.

    Raises:
        FormatError: The fields contradict each other.

    >>> from plimsoll.formats import NVFP4
    >>> NVFP4.element.name, NVFP4.block, NVFP4.scale.name, NVFP4.bits
    ('e2m1', 16, 'e4m3', 4.5)
    """

    name: str
    element: Format
    block: int
    scale: Format
    tensor_scale: bool = False
    in_report: bool = field(default=False, compare=False, repr=False)
    cuda_capability: tuple[int, int] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        reason = _why_no_blocks(self)
        if reason is not None:
            raise FormatError(f"BlockFormat: {reason}; got {self!r}")

    @property
    def bits(self) -> float:
        """Bits of storage per value, including its share of the block's scale."""
        return self.element.bits + self.scale.bits / self.block


def _why_no_blocks(fmt: BlockFormat) -> str | None:
    if not all(isinstance(part, Format) for part in cast("list[object]", [fmt.element, fmt.scale])):
        return "expected element and scale to be formats, as of plimsoll.formats.get"
    if not isinstance(fmt.block, numbers.Integral) or fmt.block < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        return "expected a block of at least one value"
    if not fmt.element.signed:
        return "expected signed elements"
    if fmt.element.bits > _MOST_ELEMENT_BITS or fmt.scale.bits > _MOST_SCALE_BITS:
        return f"expected elements of at most {_MOST_ELEMENT_BITS} bits and a scale of at most {_MOST_SCALE_BITS}"
    if fmt.tensor_scale and not fmt.scale.signed:
        return "expected a scale with a mantissa (as E4M3) under an FP32 tensor scale, and no pure exponent"
    return None


# Up to Python 3.11.3 a frozen dataclass with slots would replace a method of this name in the class itself.
cast("Any", Format).__setstate__ = set_fields
cast("Any", BlockFormat).__setstate__ = set_fields
