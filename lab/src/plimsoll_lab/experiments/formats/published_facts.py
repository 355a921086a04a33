"""The figures of the literature on formats, as data: what is asked, of which format, and what was published."""

import math
import sys
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

Question = Literal[
    "bits", "exponent_bits", "mantissa_bits", "max", "smallest_normal", "smallest", "rounds", "flushed", "swallowed"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One figure.

    - `asks`: what is measured: the widths of the fields; the largest value, the smallest normal and the smallest one
      above zero; what `value` becomes ("rounds"); the largest power of two that becomes zero ("flushed"); the largest
      one that added to 1 leaves it 1 ("swallowed").
    - `published`: the figure as printed. A decimal one bounds what is measured by half a unit of its last digit; one
      that is a power of two or an integer is exact.
    """

    id: str
    format: str
    asks: Question
    says: str
    published: str
    value: float = 0.0
    unit: str = ""

    @property
    def bounds(self) -> tuple[float, float | None]:
        """What the published figure allows; Inf is above every number that float64 holds."""
        if self.published == "inf":
            return sys.float_info.max, None
        if self.published.startswith("2^"):
            exact = 2.0 ** int(self.published[2:])
            return exact, exact
        number = Decimal(self.published)
        exponent = int(number.as_tuple().exponent)
        half = Decimal((0, (5,), exponent - 1)) if exponent or "." in self.published else Decimal(0)
        high = float(number + half)
        return float(number - half), None if math.isinf(high) else high

    @property
    def short(self) -> str:
        """What is asked, in a few words."""
        words = {
            "bits": "bits", "exponent_bits": "exponent bits", "mantissa_bits": "mantissa bits",
            "max": "largest value", "smallest_normal": "smallest normal value", "smallest": "smallest value above zero",
            "flushed": "largest power of two that becomes zero", "swallowed": "largest power of two that leaves 1 at 1",
        }  # fmt: skip
        return words.get(self.asks, f"{self.value:.7g} becomes")

    @property
    def witness(self) -> str:
        """Who else was asked."""
        return "arithmetic on FP32's bits" if self.format == "tf32" else "torch and NumPy"


def _fields(name: str, bits: int, exponent: int, mantissa: int) -> tuple[Fact, ...]:
    widths: tuple[tuple[Question, int, str], ...] = (
        ("bits", bits, "bits"), ("exponent_bits", exponent, "exponent bits"),
        ("mantissa_bits", mantissa, "mantissa bits"),
    )  # fmt: skip
    return tuple(
        Fact(id=f"{name}-{asks.replace('_', '-')}", format=name, asks=asks, says=f"{name} has {count} {what}",
             published=str(count), unit="bits")
        for asks, count, what in widths
    )  # fmt: skip


def _limits(name: str, largest: str, normal: str, smallest: str) -> tuple[Fact, ...]:
    asked: tuple[tuple[Question, str, str], ...] = (
        ("max", largest, "largest value"), ("smallest_normal", normal, "smallest normal value"),
        ("smallest", smallest, "smallest value above zero"),
    )  # fmt: skip
    return tuple(
        Fact(id=f"{name}-{asks.replace('_', '-')}", format=name, asks=asks, says=f"{name}'s {what} is {figure}",
             published=figure)
        for asks, figure, what in asked
    )  # fmt: skip


def _rounds(name: str, of: str, value: float, published: str, says: str) -> Fact:
    return Fact(id=f"{name}-{of}", format=name, asks="rounds", value=value, published=published, says=f"{name}: {says}")


FACTS: tuple[Fact, ...] = (
    # X1 and T2: fields and limits.
    *_fields("fp64", 64, 11, 52), *_limits("fp64", "1.798e308", "2.225e-308", "2^-1074"),
    *_fields("fp32", 32, 8, 23), *_limits("fp32", "3.403e38", "1.175e-38", "2^-149"),
    *_fields("tf32", 19, 8, 10), *_limits("tf32", "3.401e38", "1.175e-38", "2^-136"),
    *_fields("fp16", 16, 5, 10), *_limits("fp16", "65504", "6.104e-5", "5.96e-8"),
    *_fields("bf16", 16, 8, 7), *_limits("bf16", "3.39e38", "1.175e-38", "2^-133"),
    # X1: rounding.
    _rounds("fp16", "rounding-example", 6.666666e-5, "6.6638e-5", "6.666666e-5 becomes 6.6638e-5"),
    # T8: Adam's epsilon.
    _rounds("fp16", "adam-epsilon", 1e-8, "0", "Adam's epsilon of 1e-8 is zero"),
    _rounds("fp16", "adam-epsilon-raised", 1e-7, "1.192e-7", "an epsilon of 1e-7 is 1.19e-7"),
    # N3, A3: what is lost at the lower end, and what a factor of 8 brings back.
    Fact(id="fp16-flushed", format="fp16", asks="flushed", published="2^-25",
         says="fp16: half of 2^-24, and all below it, becomes zero"),
    _rounds("fp16", "times-8", 8 * 2.0**-27, "2^-24", "2^-27 times 8 is kept"),
    _rounds("fp16", "below-times-8", 8 * 2.0**-28, "0", "2^-28 times 8 is not"),
    # N3: an update beside its weight.
    Fact(id="fp16-swallowed", format="fp16", asks="swallowed", published="2^-11",
         says="fp16: a weight of 1 swallows an update of 2^-11"),
    Fact(id="bf16-swallowed", format="bf16", asks="swallowed", published="2^-8",
         says="bf16: a weight of 1 swallows an update of 2^-8"),
    Fact(id="fp32-swallowed", format="fp32", asks="swallowed", published="2^-24",
         says="fp32: a weight of 1 swallows an update of 2^-24"),
    # T3, X4: loss scales are no numbers of FP16; scaled losses are FP32's.
    _rounds("fp16", "stock-scale", 2.0**16, "inf", "the stock scaler's first scale, 2^16, is Inf"),
    _rounds("fp16", "high-scale", 2.0**24, "inf", "a first scale of 2^24 is Inf"),
    _rounds("bf16", "high-scale", 2.0**24, "2^24", "2^24 is kept"),
)  # fmt: skip
