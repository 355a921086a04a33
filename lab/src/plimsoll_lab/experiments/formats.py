"""Experiment `formats` (X1, T2): formats' contents by casts and a second witness.

Nothing is read off the catalogue. A format's fields and limits are found by putting numbers into it with
`plimsoll.cast` and looking at what comes back (`measured_by_cast`). The second witness is torch's and NumPy's own
dtypes, or, for TF32, which neither has, arithmetic on FP32's bits (`independent_check`). A published figure bounds
both: a number that was printed with three digits may be off by half a unit of the third.

Beside the limits, random bit patterns of FP32 are rounded both ways; no value may differ.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plimsoll.rounding import cast
from plimsoll_lab.bench import Bench
from plimsoll_lab.result import Claim, Measured
from plimsoll_lab.study import Experiment

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
        """Bounds by the published figure; Inf is above every number that float64 holds."""
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
        """The question in a few words."""
        words = {
            "bits": "bits", "exponent_bits": "exponent bits", "mantissa_bits": "mantissa bits",
            "max": "largest value", "smallest_normal": "smallest normal value", "smallest": "smallest value above zero",
            "flushed": "largest power of two that becomes zero", "swallowed": "largest power of two that leaves 1 at 1",
        }  # fmt: skip
        return words.get(self.asks, f"{self.value:.7g} becomes")

    @property
    def witness(self) -> str:
        """The other source that was asked."""
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


_Into = Callable[[Tensor], Tensor]
_POWERS = torch.ldexp(torch.ones(2098, dtype=torch.float64), torch.arange(-1074, 1024))  # all that FP64 holds


def by_cast(fact: Fact, device: str) -> float:
    """Return the figure by casting float64 values to the format."""

    def into(values: Tensor) -> Tensor:
        return cast(values.to(device), fact.format).cpu()

    if fact.asks == "rounds":
        return float(into(torch.tensor([fact.value], dtype=torch.float64)))
    return float(_ANSWERS[fact.asks](into))


def _largest(into: _Into) -> Tensor:
    """Return the largest kept power of two with all places of the mantissa set."""
    full = _POWERS * (2 - 2.0 ** -_mantissa(into))
    return full[(into(full) == full) & full.isfinite()].max()


def _smallest(into: _Into) -> Tensor:
    powers = into(_POWERS)
    return powers[powers > 0].min()


def _flushed(into: _Into) -> Tensor:
    """Zero where every power is kept."""
    return torch.where(into(_POWERS) == 0, _POWERS, 0.0).max()


def _swallowed(into: _Into) -> Tensor:
    small = _POWERS[_POWERS <= 0.5]
    return small[into(1 + small) == 1].max()


def _exponent(into: _Into) -> float:
    """Return the exponent's bits, with two codes for subnormals and for Inf and NaN."""
    return math.log2(len(_normal(into)) + 2)


def _mantissa(into: _Into) -> int:
    """The last place of 1: 1 + 2^-k is kept up to it."""
    steps = torch.ldexp(torch.ones(52, dtype=torch.float64), -torch.arange(1, 53))
    return int((into(1 + steps) == 1 + steps).sum())


def _normal(into: _Into) -> Tensor:
    """The powers of two that are kept with the last place set."""
    odd = _POWERS * (1 + 2.0 ** -_mantissa(into))
    # Where float64 itself has no place left for the last one, the product is the power again: subnormal there.
    return _POWERS[(into(odd) == odd) & (odd != _POWERS) & odd.isfinite()]


_ANSWERS: Mapping[str, Callable[[_Into], Tensor | float]] = {
    "max": _largest,
    "smallest": _smallest,
    "smallest_normal": lambda into: _normal(into).min(),
    "flushed": _flushed,
    "swallowed": _swallowed,
    "exponent_bits": _exponent,
    "mantissa_bits": _mantissa,
    "bits": lambda into: 1 + _exponent(into) + _mantissa(into),
}


DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_CUT = 13  # bits of FP32's mantissa that TF32 lacks


def by_witness(fact: Fact, device: str) -> float:
    """The figure, by a dtype of torch or NumPy, or by bits of FP32."""
    match fact.asks:
        case "rounds":
            return float(_rounded(fact.format, np.array([fact.value]), device)[0])
        case "flushed":
            smallest = _smallest_of(fact.format)
            halves = np.array([smallest / 2, smallest])
            return float(halves[_rounded(fact.format, halves, device) == 0].max())
        case "swallowed":
            steps = np.ldexp(1.0, -np.arange(1, 53))
            return float(steps[_rounded(fact.format, 1 + steps, device) == 1].max())
        case "smallest":
            return _smallest_of(fact.format)
        case _:
            return _described(fact.format)[fact.asks]


def disagreements(values: Tensor, name: str) -> int:
    """Return how many FP32 values the two ways round differently; NaN is NaN."""
    ours = cast(values, name)
    theirs = tf32_by_bits(values) if name == "tf32" else values.to(DTYPES[name]).float()
    same = (ours.view(torch.int32) == theirs.view(torch.int32)) | (ours.isnan() & theirs.isnan())
    return int((~same).sum())


def _described(name: str) -> dict[str, float]:
    """Return widths and limits by torch's `finfo`, or for TF32 by FP32's bits."""
    if name == "tf32":
        codes = np.array(
            [0x7F7FFFFF >> _CUT << _CUT, 0x00800000, 0x3F800000, 0x3F800000 + (1 << _CUT)], dtype=np.uint32
        )
        largest, tiny, one, after = codes.view(np.float32).astype(np.float64).tolist()
        eps, bits = after - one, 32 - _CUT
    else:
        info = torch.finfo(DTYPES[name])
        largest, tiny, eps, bits = info.max, info.tiny, info.eps, info.bits
    bias = 1 - math.log2(tiny)  # the smallest normal value has exponent code 1
    return {"bits": float(bits), "max": largest, "smallest_normal": tiny, "mantissa_bits": -math.log2(eps),
            "exponent_bits": 1 + math.log2(bias + 1)}  # fmt: skip


def _smallest_of(name: str) -> float:
    """The value of code 1."""
    if name == "tf32":
        return float(np.array([1 << _CUT], dtype=np.uint32).view(np.float32)[0])
    if name == "bf16":
        return float(torch.tensor([1], dtype=torch.int16).view(torch.bfloat16))
    numpy: dict[str, Any] = {"fp64": np.float64, "fp32": np.float32, "fp16": np.float16}
    return float(np.nextafter(numpy[name](0), numpy[name](1)))


def _rounded(name: str, values: NDArray[np.float64], device: str) -> NDArray[np.float64]:
    if name == "tf32":
        return tf32_by_bits(torch.from_numpy(values).float()).double().numpy()
    return torch.from_numpy(values).to(device).to(DTYPES[name]).double().cpu().numpy()


def tf32_by_bits(values: Tensor) -> Tensor:
    """Return the nearest TF32 value, ties to even, by FP32's bits; NaN stays."""
    bits = values.contiguous().view(torch.int32)
    up = bits + ((1 << (_CUT - 1)) - 1) + ((bits >> _CUT) & 1)  # Inf has no bits that are cut: it stays
    return torch.where(values.isnan(), values, ((up >> _CUT) << _CUT).view(torch.float32))


BLOCKS, FULL_BLOCKS = 4, 256
BLOCK = 2**18  # random bit patterns in a block
ROUNDED = ("tf32", "fp16", "bf16")


def measure(bench: Bench) -> Measured:
    """Every fact, by both ways, and the random patterns."""
    bench.progress.begin("facts", len(FACTS))
    values: list[tuple[float, float]] = []
    for fact in FACTS:
        values.append((by_cast(fact, bench.device), by_witness(fact, bench.device)))
        bench.progress.advance()
    differing = _differing(bench)
    return Measured(trainings=(), claims=claims(values, differing), said=_table(values))


def claims(values: Sequence[tuple[float, float]], differing: Mapping[str, int]) -> tuple[Claim, ...]:
    """Return two claims for each fact, and one for each format on random patterns."""
    found: list[Claim] = []
    for fact, (by_library, witness) in zip(FACTS, values, strict=True):
        low, high = fact.bounds
        for suffix, by, value in (("", "", by_library), ("-witness", f", by {fact.witness}", witness)):
            found.append(Claim(f"{fact.id}{suffix}", f"{fact.says}{by}",
                               value, at_least=low, at_most=high, unit=fact.unit))  # fmt: skip
    for name, count in differing.items():
        says = f"{name}: cast rounds every random FP32 pattern as the second witness does"
        found.append(Claim(f"{name}-rounding", says, float(count), at_most=0, unit="values differ"))
    return tuple(found)


def _differing(bench: Bench) -> dict[str, int]:
    """Return the random FP32 patterns that the two ways round differently.

    They are counted by format.
    """
    blocks = _blocks(bench)
    bench.progress.begin("random patterns", blocks)
    generator = torch.Generator().manual_seed(bench.seed)
    found: dict[str, int] = dict.fromkeys(ROUNDED, 0)
    for _ in range(blocks):
        bits = torch.randint(-(2**31), 2**31, (BLOCK,), dtype=torch.int64, generator=generator).to(torch.int32)
        for name in ROUNDED:
            found[name] += disagreements(bits.to(bench.device).view(torch.float32), name)
        bench.progress.advance()
    return found


def _table(values: Sequence[tuple[float, float]]) -> tuple[str, ...]:
    head = f"{'format':<7}{'what':<45}{'measured':>13}{'published':>13}"
    return (head, *(_row(fact, *both) for fact, both in zip(FACTS, values, strict=True)))


def _row(fact: Fact, cast: float, witness: float) -> str:
    """In 79 signs, so that no terminal wraps it."""
    same = "" if cast == witness else " !"
    return f"{fact.format:<7}{fact.short:<45}{_seven(cast):>13}{fact.published:>13}{same}"


def _seven(value: float) -> str:
    return f"{value:.7g}"


def _blocks(bench: Bench) -> int:
    return bench.steps or (FULL_BLOCKS if bench.full else BLOCKS)


def _settings(bench: Bench) -> Mapping[str, object]:
    return {"facts": len(FACTS), "random_patterns": _blocks(bench) * BLOCK, "device": bench.device}


FORMATS = Experiment(
    name="formats",
    claim="FP64, FP32, TF32, FP16 and BF16 have the fields, limits and rounding that the literature gives them.",
    source="X1, T2",
    settings=_settings,
    measure=measure,
)
