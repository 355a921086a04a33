"""What the specifications say, one value at a time, in exact rational arithmetic. It shares nothing with the library.

IEEE 754-2019; OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats 1.0 (section 5 for the formats,
section 6.3 for quantising a block); Noune et al., arXiv:2206.02915, for the FNUZ pair; arXiv:2509.25149 for NVFP4.
Results are floats, each of which is exact.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

import numpy as np

Mode = Literal["nearest_even", "nearest_away", "toward_zero", "up", "down", "stochastic"]
Rule = Literal["floor", "ceil", "rceil", "even"]
MODES: tuple[Mode, ...] = ("nearest_even", "nearest_away", "toward_zero", "up", "down")


@dataclass(frozen=True)
class Spec:
    """A format as its specification's table states it; `top` says what the highest codes of each sign are."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    top: Literal["inf and nan", "one nan", "numbers, nan at -0", "numbers"] = "inf and nan"
    signed: bool = True

    @property
    def bits(self) -> int:
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @cached_property
    def max(self) -> Fraction:
        """The largest number, from the words of the tables: S.11..1.xx, less what is spent on Inf and NaN."""
        exponent, mantissa = 2**self.exponent_bits - 1, 2**self.mantissa_bits - 1
        if self.top == "inf and nan":
            exponent -= 1
        elif self.top == "one nan" and self.mantissa_bits > 0:
            mantissa -= 1
        elif self.top == "one nan":
            exponent -= 1
        if self.signed and exponent == 0:
            return Fraction(mantissa, 2**self.mantissa_bits) * two(1 - self.bias)
        return (1 + Fraction(mantissa, 2**self.mantissa_bits)) * two(exponent - self.bias)

    @cached_property
    def lowest_exponent(self) -> int:
        """Of normal numbers: exponent field 1 with a sign; field 0 in E8M0, which has no zero to keep it for."""
        return 1 - self.bias if self.signed else -self.bias

    @property
    def has_nan(self) -> bool:
        return self.top in ("one nan", "numbers, nan at -0") or (self.top == "inf and nan" and self.mantissa_bits > 0)


CATALOGUE: dict[str, Spec] = {
    "fp64": Spec(11, 52, 1023),
    "fp32": Spec(8, 23, 127),
    "tf32": Spec(8, 10, 127),
    "fp16": Spec(5, 10, 15),
    "bf16": Spec(8, 7, 127),
    "e5m2": Spec(5, 2, 15),
    "e4m3": Spec(4, 3, 7, "one nan"),
    "e5m2fnuz": Spec(5, 2, 16, "numbers, nan at -0"),
    "e4m3fnuz": Spec(4, 3, 8, "numbers, nan at -0"),
    "e3m2": Spec(3, 2, 3, "numbers"),
    "e2m3": Spec(2, 3, 1, "numbers"),
    "e2m1": Spec(2, 1, 1, "numbers"),
    "e8m0": Spec(8, 0, 127, "one nan", signed=False),
}


def ieee(exponent_bits: int, mantissa_bits: int) -> Spec:
    """Any other eXmY: as IEEE 754 makes its formats."""
    return Spec(exponent_bits, mantissa_bits, 2 ** (exponent_bits - 1) - 1)


def two(exponent: int) -> Fraction:
    """A power of two."""
    return Fraction(2**exponent) if exponent >= 0 else Fraction(1, 2**-exponent)


def decode(spec: Spec, code: int) -> float:
    """The value of one code, read bit by bit from its binary digits."""
    digits = f"{code:0{spec.bits}b}"
    sign = digits[0] == "1" if spec.signed else False
    rest = digits[1:] if spec.signed else digits
    exponent, mantissa = rest[: spec.exponent_bits], rest[spec.exponent_bits :]
    if spec.top == "numbers, nan at -0" and sign and "1" not in rest:
        return math.nan
    if spec.top == "one nan" and "0" not in rest:
        return math.nan
    if spec.top == "inf and nan" and "0" not in exponent:
        return math.nan if "1" in mantissa else -math.inf if sign else math.inf
    fraction = Fraction(int(mantissa or "0", 2), 2**spec.mantissa_bits)
    if spec.signed and "1" not in exponent:
        value = fraction * two(1 - spec.bias)
    else:
        value = (1 + fraction) * two(int(exponent, 2) - spec.bias)
    return -float(value) if sign else float(value)


def codes(spec: Spec) -> Iterator[tuple[int, float]]:
    """Every code with its value."""
    for code in range(2**spec.bits):
        yield code, decode(spec, code)


def floor_log2(value: Fraction) -> int:
    """The exponent of a positive value."""
    return _floor_log2(value.numerator, value.denominator)


def _floor_log2(top: int, bottom: int) -> int:
    guess = top.bit_length() - bottom.bit_length()
    return guess if bottom << max(guess, 0) <= top << max(-guess, 0) else guess - 1


def round_value(spec: Spec, value: float, mode: Mode, saturate: bool, word: int = 0) -> float:
    """One float in the format. `word` is the 32-bit noise of stochastic rounding."""
    if math.isnan(value):
        return math.nan
    if not spec.signed and value < 0:
        return math.nan
    negative = math.copysign(1.0, value) < 0
    if math.isinf(value):
        return _signed(spec, _overflow(spec, saturate), negative)
    magnitude = _round_ratio(spec, *abs(value).as_integer_ratio(), negative, mode, saturate, word)
    return _signed(spec, magnitude, negative)


def round_all(spec: Spec, values: np.ndarray, saturate: bool) -> np.ndarray:
    """Each value to nearest even, which is the same for both signs.

    Rounding keeps the order, so all that lies between two magnitudes of one result has that result too.
    """
    numbers = ~np.isnan(values)
    magnitudes, places = np.unique(np.abs(values[numbers]), return_inverse=True)
    held, rounded = np.empty_like(magnitudes), np.zeros(len(magnitudes), bool)

    def known(at: int) -> float:
        if not rounded[at]:
            held[at], rounded[at] = round_value(spec, float(magnitudes[at]), "nearest_even", saturate), True
        return float(held[at])

    waiting = [(0, len(magnitudes) - 1)]
    while waiting:
        low, high = waiting.pop()
        below, above = known(low), known(high)
        if below == above or (math.isnan(below) and math.isnan(above)):
            held[low:high] = below
        elif high - low > 1:
            waiting += [(low, (low + high) // 2), ((low + high) // 2, high)]
    found = np.full(values.shape, math.nan)
    found[numbers] = held[places]
    if not spec.signed:
        return np.where(values < 0, math.nan, found)
    return np.where(np.signbit(values) & (found != 0 if spec.top == "numbers, nan at -0" else True), -found, found)


def round_fraction(spec: Spec, magnitude: Fraction, negative: bool, mode: Mode, saturate: bool, word: int = 0) -> float:
    """The magnitude of a finite value in the format; `negative` tells ``up`` and ``down`` where to go."""
    return _round_ratio(spec, magnitude.numerator, magnitude.denominator, negative, mode, saturate, word)


def _round_ratio(spec: Spec, top: int, bottom: int, negative: bool, mode: Mode, saturate: bool, word: int = 0) -> float:
    """The magnitude ``top / bottom``; in integers, not fractions, since most of the tests' time goes by here."""
    if not spec.signed and Fraction(top, bottom) <= two(spec.lowest_exponent):
        return float(two(spec.lowest_exponent))
    if top == 0:
        return 0.0
    exponent = max(_floor_log2(top, bottom), spec.lowest_exponent)
    spacing = exponent - spec.mantissa_bits  # its exponent
    left, right = (0, spacing) if spacing > 0 else (-spacing, 0)
    under = bottom << right
    below, rest = divmod(top << left, under)
    if rest:
        below += _goes_away(spec, below, exponent, rest, under, negative, mode, word)
    limit = spec.max
    if (below << right) * limit.denominator <= limit.numerator << left:
        return math.ldexp(below, spacing)
    if mode == "toward_zero" or mode == ("down", "up")[negative]:
        return float(spec.max)
    return _overflow(spec, saturate)


def _goes_away(
    spec: Spec, below: int, exponent: int, rest: int, spacing: int, negative: bool, mode: Mode, word: int
) -> bool:
    """Whether the number above is taken, for a value the part ``rest / spacing`` of the way to it."""
    if mode == "toward_zero":
        return False
    if mode == "up":
        return not negative
    if mode == "down":
        return negative
    if mode == "stochastic":
        return word < (rest << 32) // spacing
    if 2 * rest != spacing:
        return 2 * rest > spacing
    return mode == "nearest_away" or _is_odd(spec, below, exponent)


def _is_odd(spec: Spec, significand: int, exponent: int) -> bool:
    """Whether the code's last bit is one: the last mantissa bit, or without mantissa the exponent field's."""
    if spec.mantissa_bits:
        return significand % 2 == 1
    return significand > 0 and (exponent + spec.bias) % 2 == 1


def _overflow(spec: Spec, saturate: bool) -> float:
    if saturate:
        return float(spec.max)
    return math.inf if spec.top == "inf and nan" else math.nan


def _signed(spec: Spec, magnitude: float, negative: bool) -> float:
    if magnitude == 0 and spec.top == "numbers, nan at -0":
        return 0.0
    return -magnitude if negative and spec.signed else magnitude


@dataclass(frozen=True)
class Block:
    """One quantised block: its scale (NaN for a poisoned block), elements, and what these stand for."""

    scale: float
    elements: list[float]
    values: list[float]


def mx_scale_exponent(absmax: Fraction, element: Spec, rule: Rule) -> int:
    """The exponent of the shared scale: OCP MX 1.0 section 6.3 step 1 (floor), and the three variants in use."""
    largest = floor_log2(element.max)
    exponent = floor_log2(absmax)
    if rule == "floor":
        shared = exponent - largest
    elif rule == "ceil":
        shared = (exponent if absmax == two(exponent) else exponent + 1) - largest
    elif rule == "rceil":
        shared = next(e for e in range(exponent - largest - 1, exponent + 2) if absmax <= element.max * two(e))
    else:  # the maximum is first rounded to the element's mantissa, ties up
        rounded = absmax + two(exponent - element.mantissa_bits - 1)
        shared = floor_log2(rounded) - largest
    return min(max(shared, -127), 127)


def quantize_mx(values: Sequence[float], element: Spec, rule: Rule, mode: Mode = "nearest_even") -> Block:
    """One block of an MX format (E8M0 scale); a NaN or Inf poisons it, an all-zero block has the smallest scale."""
    if not all(map(math.isfinite, values)):
        return Block(math.nan, [math.nan] * len(values), [math.nan] * len(values))
    absmax = max(abs(Fraction(value)) for value in values)
    scale = two(mx_scale_exponent(absmax, element, rule) if absmax else -127)
    return _quantize(values, element, scale, mode)


def tensor_scale(values: Sequence[float]) -> float:
    """NVFP4's FP32 scale: the finite values' largest magnitude over 448 * 6."""
    absmax = max((abs(Fraction(value)) for value in values if math.isfinite(value)), default=Fraction(0))
    if not absmax:
        return 1.0
    rounded = round_fraction(CATALOGUE["fp32"], absmax / 2688, False, "nearest_even", saturate=True)
    return rounded or float(two(-149))


def quantize_nvfp4(values: Sequence[float], scale: float, rule: Rule, mode: Mode = "nearest_even") -> Block:
    """One block of 16 under the tensor's `scale`."""
    if not all(map(math.isfinite, values)):
        return Block(math.nan, [math.nan] * len(values), [math.nan] * len(values))
    absmax = max(abs(Fraction(value)) for value in values)
    scale_mode: Mode = "up" if rule in ("ceil", "rceil") else "nearest_even"
    held = round_fraction(CATALOGUE["e4m3"], absmax / (6 * Fraction(scale)), False, scale_mode, saturate=True)
    if held == 0:
        zeros = [math.copysign(0.0, value) for value in values]
        return Block(0.0, zeros, zeros)
    block = _quantize(values, CATALOGUE["e2m1"], Fraction(held) * Fraction(scale), mode)
    return Block(held, block.elements, block.values)


def _quantize(values: Sequence[float], element: Spec, scale: Fraction, mode: Mode) -> Block:
    top, bottom = scale.as_integer_ratio()
    ratios = [abs(value).as_integer_ratio() for value in values]
    elements = [
        _signed(element, _round_ratio(element, over * bottom, under * top, v < 0, mode, saturate=True), _negative(v))
        for v, (over, under) in zip(values, ratios, strict=True)
    ]
    ratios = [abs(e).as_integer_ratio() for e in elements]
    held = [math.copysign(over * top / (under * bottom), e) for e, (over, under) in zip(elements, ratios, strict=True)]
    return Block(float(scale), elements, held)


def _negative(value: float) -> bool:
    return math.copysign(1.0, value) < 0
