"""Block formats: single values at a known scale, scales, and whole blocks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plimsoll.certification.certificate import Outcome
from plimsoll.certification.probing.arrays import (
    CallFailedError,
    Mask,
    Result,
    Values,
    compared,
    deviation,
    held,
    same,
    shortest,
)
from plimsoll.certification.probing.conventions import SIDE, Call, CastConvention
from plimsoll.formats import BlockFormat, Format
from plimsoll.formats.codec import Rounding

# -- blocks with adversarial largest magnitudes, classed as requirements need ------------------------------------------

# ordinary: far from a power of two and from where a rule's choice changes. edge: at such a place or one step off it.
# range: where the scale would leave its format, or the largest magnitude is subnormal.
BlockClass = Literal["ordinary", "edge", "range"]
_TINY = 4  # binades of the smallest values of a block
_SPREAD = np.random.default_rng(19).integers(1, 128, (64, 64)) / 128.0  # parts of the largest magnitude, in 7 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks of one dtype, each in a row."""

    carrier: str  # name of the dtype
    x: Values  # the values, which the dtype holds exactly
    classes: NDArray[np.str_]  # the class of each block

    @property
    def absmax(self) -> Values:
        """Largest magnitude of each block."""
        return np.max(np.abs(self.x), axis=1)


def blocks(fmt: BlockFormat, carrier: str) -> Blocks:
    """Return the blocks to try in a dtype."""
    info = torch.finfo(getattr(torch, carrier))
    made = _for_a_mantissa(fmt) if fmt.scale.signed else _for_powers_of_two(fmt, info)
    largest = np.array([value for values in made.values() for value in values])
    classes = np.repeat(list(made), [len(values) for values in made.values()])
    represented = _held(largest, carrier)
    usable = (represented > 0) & np.isfinite(represented) & (np.abs(represented - largest) <= np.spacing(largest))
    return Blocks(carrier=carrier, x=_filled(represented[usable], fmt, carrier), classes=classes[usable])


def _for_powers_of_two(fmt: BlockFormat, info: torch.finfo) -> dict[BlockClass, list[float]]:
    """Largest magnitudes for a scale that is a power of two."""
    ulp = info.eps
    significand = fmt.element.max / 2.0**fmt.element.max_exponent  # above it the largest element is exceeded
    tie = 2 - 2.0 ** -(fmt.element.mantissa_bits + 1)  # from here on "even" rounds up
    edges = {1.0, 1 + ulp, 2 - ulp, significand, significand - ulp, significand + ulp, tie, tie - ulp, tie + ulp}
    ordinary = [1.0 + k / 16 for k in range(1, 16) if all(abs(1 + k / 16 - edge) > 1 / 64 for edge in edges)]
    lowest, highest = int(math.log2(info.smallest_normal)), int(math.log2(info.max))
    inside = [k for k in (*range(-12, 13), *range(lowest + 1, highest - 1, 9)) if _in_range(fmt, k, lowest, highest)]
    ends = [k for k in (lowest, lowest + 1, highest) if not _in_range(fmt, k, lowest, highest)]
    tiny = info.smallest_normal * info.eps
    return {
        "ordinary": [m * 2.0**k for k in inside for m in ordinary],
        "edge": [m * 2.0**k for k in inside for m in sorted(edges) if m < 2],
        "range": [
            *(m * 2.0**k for k in ends for m in (1.0, 1.25, 1.75)),
            *(tiny * part for part in (1.0, 2.0, 3.0, 0.5 / info.eps, 0.75 / info.eps)),
        ],
    }


def _in_range(fmt: BlockFormat, exponent: int, lowest: int, highest: int) -> bool:
    """Return True if each rule's scale is in E8M0's range, with normal elements."""
    scale = exponent - fmt.element.max_exponent
    spread = fmt.element.max_exponent - fmt.element.min_exponent + _TINY + 7
    return scale - 1 >= -126 and exponent - spread > lowest and exponent < highest - 1


def _for_a_mantissa(fmt: BlockFormat) -> dict[BlockClass, list[float]]:
    """Return largest magnitudes for an E4M3 scale, under a tensor scale of 1, if any."""
    scales = fmt.scale.decode(np.arange(1, fmt.scale.max_code + 1))
    ties = (scales[1:] + scales[:-1]) / 2
    quarters = np.concatenate([scales[:-1] + part * (scales[1:] - scales[:-1]) for part in (0.25, 0.75)])
    # An implementation multiplies by reciprocals or divides, so an exact tie is left out: both are allowed to miss it.
    beside = np.concatenate([ties * (1 - 2.0**-6), ties * (1 + 2.0**-6)])
    lowest = fmt.scale.smallest_normal
    return {
        "ordinary": [fmt.element.max * s for s in (*scales[scales >= lowest], *quarters[quarters > lowest])],
        "edge": [fmt.element.max * s for s in beside[beside > lowest]],
        "range": [fmt.element.max * s for s in (*scales[scales < lowest], *beside[beside < lowest])],
    }


def _held(values: Values, carrier: str) -> Values:
    with np.errstate(over="ignore"):
        return torch.from_numpy(values).to(getattr(torch, carrier)).double().numpy()


def _filled(largest: Values, fmt: BlockFormat, carrier: str) -> Values:
    """Return blocks with these largest magnitudes, among smaller values."""
    count, block = len(largest), fmt.block
    parts = np.resize(_SPREAD, (count, block))
    depth = fmt.element.max_exponent - fmt.element.min_exponent
    # Some are so small that they are subnormal at their block's scale: these show which scale it was.
    parts[:, 1::4] *= 2.0 ** -(depth + np.arange(parts[:, 1::4].shape[1]) % _TINY)
    signs = np.where(np.arange(count * block).reshape(count, block) % 3 == 0, -1.0, 1.0)
    x = np.minimum(_held(largest[:, None] * parts, carrier), largest[:, None]) * signs
    place = np.arange(count) * 7 % block
    x[np.arange(count), place] = largest * np.where(np.arange(count) % 2, -1.0, 1.0)
    return x


def ordinary_blocks(fmt: BlockFormat, count: int) -> Values:
    """Return blocks of multiples of 1/8 up to 2, one a row."""
    places = np.arange(count * fmt.block)
    values = (places * 7 % 16 + 1) / 8.0 * np.where(places % 2, -1.0, 1.0)
    return values.reshape(count, fmt.block)


# -- single values in blocks of known scale ----------------------------------------------------------------------------

# So a block format's elements are tried like any other cast. In an MX block the anchor is the largest power of two of
# the element format, at which all four rules give the scale 1. In an NVFP4 block it is the largest element. One more
# row then has the largest scale, which makes the tensor's scale 1.


def element_call(convention: CastConvention, fmt: Format | BlockFormat) -> tuple[Call, float]:
    """Return a call that rounds single values, and the largest magnitude it can try."""
    if not isinstance(fmt, BlockFormat):
        return convention.sized, math.inf
    block, limit = fmt.block, fmt.element.max if fmt.scale.signed else 2.0**fmt.element.max_exponent

    def anchored(x: Tensor) -> Result:
        count = x.numel()
        blocks = -(-count // (block - 1))
        rows = -(-blocks * block // (SIDE * SIDE)) * SIDE + SIDE  # whole multiples, with room for the largest scale
        room = torch.ones(rows * SIDE // block, block - 1, dtype=x.dtype, device=x.device)
        room.view(-1)[:count] = x.reshape(-1)
        # Values of a block format are put into blocks with the scale 1, and their magnitude must not change it.
        anchor = torch.full((room.shape[0], 1), limit, dtype=x.dtype, device=x.device)
        matrix = torch.cat([anchor, room], dim=1).reshape(rows, SIDE)
        if fmt.tensor_scale:
            matrix[-1, -block:] = fmt.element.max * fmt.scale.max
        result = convention.sized(matrix)
        elements = result.values.reshape(-1, block)[:, 1:].reshape(-1)[:count]
        return Result(values=elements.reshape(tuple(x.shape)), dtype=result.dtype)

    return anchored, limit


# -- rules for a block's scale, in exact float64, and the scale behind its results -------------------------------------

_LARGEST = 127  # exponent of the largest E8M0 scale; the smallest has -127


def expected_scales(fmt: BlockFormat, rule: str, absmax: Values) -> Values:
    """Return a rule's scale for blocks of these magnitudes (no 0, Inf, NaN), at a tensor scale of 1."""
    if fmt.scale.signed:
        rounding: Rounding = "up" if rule in ("ceil", "rceil") else "nearest_even"
        return fmt.scale.decode(fmt.scale.encode(absmax / fmt.element.max, rounding, saturate=True))
    exponents = _MX_RULES[rule](absmax, fmt.element)
    return np.ldexp(1.0, np.clip(exponents, -_LARGEST, _LARGEST))


def _exponent(absmax: Values) -> NDArray[np.int64]:
    return np.frexp(absmax)[1].astype(np.int64) - 1


def _floor(absmax: Values, element: Format) -> NDArray[np.int64]:
    return _exponent(absmax) - element.max_exponent


def _ceil(absmax: Values, element: Format) -> NDArray[np.int64]:
    return _exponent(absmax) + (np.frexp(absmax)[0] != 0.5) - element.max_exponent


def _rceil(absmax: Values, element: Format) -> NDArray[np.int64]:
    floor = _floor(absmax, element)
    return floor + (absmax > np.ldexp(element.max, floor))


def _even(absmax: Values, element: Format) -> NDArray[np.int64]:
    half_step = np.ldexp(1.0, _exponent(absmax) - element.mantissa_bits - 1)
    return _exponent(absmax + half_step) - element.max_exponent


# floor: OCP MX 1.0, 6.3. The others are the variants in use: docs/concepts/formats.md.
_MX_RULES: dict[str, Callable[[Values, Format], NDArray[np.int64]]] = {
    "floor": _floor, "ceil": _ceil, "rceil": _rceil, "even": _even,
}  # fmt: skip
RULES = tuple(_MX_RULES)


def rule_words(fmt: BlockFormat, rule: str) -> str:
    """Return the name of a rule; with a mantissa "nearest" or "next above".

    A scale with a mantissa is the nearest one by "floor" and "even", else the next above.

    >>> from plimsoll.formats import NVFP4
    >>> rule_words(NVFP4, "floor")
    'nearest'
    """
    if not fmt.scale.signed:
        return rule
    return {"floor": "nearest", "even": "nearest", "ceil": "next above", "rceil": "next above"}.get(rule, rule)


def explains(
    fmt: BlockFormat, x: Values, y: Values, scale: Values, roundings: tuple[Rounding, ...], *, clamped: bool = True
) -> Mask:
    """Return which blocks have the results that their values give under these scales.

    Rows of `x` and `y` are blocks. `roundings`: the modes of which one, for each value, gives its result. `clamped`:
    whether elements beyond the largest one must become it.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotient = np.where(scale[:, None] > 0, x / scale[:, None], 0.0)
    size = np.abs(quotient)
    limit = 2.0 ** (fmt.element.max_exponent + 1)
    right: Mask = (size > fmt.element.max) & (size < limit) & (not clamped)
    for rounding in roundings:
        elements = fmt.element.decode(fmt.element.encode(quotient, rounding, saturate=True))
        right |= same(y, elements * scale[:, None]) | ((y == 0) & (elements == 0))
    return np.asarray(right.all(axis=1))


def explaining_scales(fmt: BlockFormat, x: Values, y: Values, roundings: tuple[Rounding, ...]) -> Values:
    """Return for each block a scale that explains its results at a tensor scale of 1; NaN without one."""
    scales = np.full(len(x), np.nan)
    # What becomes of elements beyond the largest one is the question of another requirement. So a scale that explains
    # all others will do, if none explains these too.
    for clamped in (True, False):
        for scale in _candidates(fmt, np.max(np.abs(x), axis=1)):
            fits = explains(fmt, x, y, scale, roundings, clamped=clamped)
            scales = np.where(np.isnan(scales) & fits, scale, scales)
    return scales


def _candidates(fmt: BlockFormat, absmax: Values) -> list[Values]:
    """Scales that any rule might give, the most usual first."""
    if not fmt.scale.signed:
        floor = _floor(absmax, fmt.element)
        return [np.ldexp(1.0, np.clip(floor + away, -_LARGEST, _LARGEST)) for away in (0, 1, -1, 2, -2, 3, -3)]
    nearest = fmt.scale.encode(absmax / fmt.element.max, "nearest_even", saturate=True).astype(np.int64)
    return [
        fmt.scale.decode(np.clip(nearest + away, 0, fmt.scale.max_code)) for away in (0, 1, -1, 2, -2, 3, -3, 8, -8)
    ]


# -- observed blocks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBatch:
    """Blocks of one dtype with what the function made of them."""

    tried: Blocks  # the blocks
    y: Values  # values of the results
    scales: Values  # scale of each block, read from the result or found as the one that explains it; NaN if none does
    dtype: str  # name of the results' dtype
    visible: bool  # whether the scales were read from the result


class BlockTrials:
    """Calls of a block format's cast or pack, with the rounding modes to expect."""

    def __init__(
        self, convention: CastConvention, fmt: BlockFormat, carriers: list[str], roundings: tuple[Rounding, ...]
    ) -> None:
        self.convention = convention
        self.fmt = fmt
        # The dtype for single blocks.
        self.carrier = "float32" if "float32" in carriers else carriers[0]
        self.roundings = roundings
        self.batches = [self._observed(blocks(fmt, carrier)) for carrier in carriers]

    def _observed(self, tried: Blocks) -> BlockBatch:
        count = len(tried.x)
        read = self.read(tried.x, tried.carrier)
        y = read.values.reshape(-1, self.fmt.block)[:count]
        if read.scales is None:
            scales = explaining_scales(self.fmt, tried.x, y, self.roundings)
        else:
            scales = read.scales.reshape(-1)[:count]
        return BlockBatch(tried=tried, y=y, scales=scales, dtype=read.dtype, visible=read.scales is not None)

    def read(self, rows: Values, carrier: str) -> Result:
        """Return what the function makes of blocks, given one a row.

        They come in a matrix of `SIDE` columns, filled up with ones. The last block of an NVFP4 matrix makes the
        tensor's scale 1.
        """
        padding = -(len(rows) + 1) * self.fmt.block % (SIDE * SIDE) + self.fmt.block
        flat = np.concatenate([rows.reshape(-1), np.ones(padding)])
        if self.fmt.tensor_scale:
            flat[-1] = self.fmt.element.max * self.fmt.scale.max
        return self.convention.sized(torch.from_numpy(flat).to(getattr(torch, carrier)).reshape(-1, SIDE))

    def rows(self, rows: Values) -> Values:
        """Return the values that the function makes of blocks, in single values' dtype."""
        return self.read(rows, self.carrier).values.reshape(-1, self.fmt.block)[: len(rows)]

    def rule(self) -> str:
        """Return the rule that explains most scales, or "unknown"."""
        shares: dict[str, float] = {}
        for rule in RULES:
            right = [self._right(batch, rule)[batch.tried.classes != "range"] for batch in self.batches]
            shares[rule] = float(np.mean(np.concatenate(right)))
        best = max(shares, key=lambda rule: shares[rule])
        return best if shares[best] > 0.5 else "unknown"

    def _right(self, batch: BlockBatch, rule: str) -> Mask:
        """Return the blocks with a rule's scale, or where no scales are visible, with results that it explains."""
        expected = expected_scales(self.fmt, rule, batch.tried.absmax)
        if batch.visible:
            return batch.scales == expected
        return explains(self.fmt, batch.tried.x, batch.y, expected, self.roundings, clamped=False)

    def compare_scales(self, rule: str, kind: BlockClass) -> Outcome:
        """Return how the scales of a class of blocks compare with those of a rule."""
        outcome = Outcome(tried=0)
        for batch in self.batches:
            where = batch.tried.classes == kind
            tried, wrong = int(np.count_nonzero(where)), np.flatnonzero(where & ~self._right(batch, rule))
            part = Outcome(tried=tried)
            if len(wrong):
                index = int(wrong[shortest(batch.tried.absmax[wrong])])
                part = self._wrong_scale(batch, index, rule, tried, len(wrong))
            outcome += part
        return outcome

    def _wrong_scale(self, batch: BlockBatch, index: int, rule: str, tried: int, wrong: int) -> Outcome:
        largest = float(batch.tried.absmax[index])
        expected = float(expected_scales(self.fmt, rule, batch.tried.absmax[[index]])[0])
        got, of = float(batch.scales[index]), "among smaller values"
        if batch.visible:  # a block of the value alone is shorter, if it shows the fault too
            single = np.zeros((1, self.fmt.block))
            single[0, 0] = largest
            read = self.read(single, batch.tried.carrier)
            scale = float("nan") if read.scales is None else float(read.scales.flat[0])
            if scale != expected:
                got, of = scale, "and zeros"
        shown = got if batch.visible or not np.isnan(got) else "no scale explains the results"
        note = f"{batch.tried.carrier}, the largest of a block {of}; results are scales"
        return deviation(largest, expected, shown, note, tried=tried, wrong=wrong)

    def clamped(self) -> Outcome:
        """Return whether elements beyond the largest at their scale became the largest."""
        outcome = Outcome(tried=0)
        for batch in self.batches:
            x, scales, of = batch.tried.x, batch.scales, batch.tried.carrier
            with np.errstate(invalid="ignore", over="ignore"):
                limit = np.copysign(scales[:, None] * self.fmt.element.max, x)
                beyond = (np.abs(x) > np.abs(limit)) & (batch.tried.classes != "range")[:, None]
            outcome += compared(
                batch.y, limit,
                lambda at, x=x, s=scales, of=of: (float(x[at]), f"{of}, in a block of scale {s[at[0]]:g}"),
                where=beyond, order=x,
            )  # fmt: skip
        return outcome

    def values_in_range(self, rule: str) -> Outcome:
        """Return whether blocks at the scale range's ends have the values of their rule."""
        outcome = Outcome(tried=0)
        for batch in self.batches:
            where = batch.tried.classes == "range"
            x, largest, of = batch.tried.x[where], batch.tried.absmax[where, None], batch.tried.carrier
            scales = expected_scales(self.fmt, rule, largest)
            with np.errstate(divide="ignore", invalid="ignore"):
                quotient = np.where(scales > 0, x / scales, 0.0)
            right, expected = np.zeros(x.shape, np.bool_), np.zeros(x.shape)
            for rounding in self.roundings:
                elements = self.fmt.element.decode(self.fmt.element.encode(quotient, rounding, saturate=True))
                expected = elements * scales if batch.dtype == "codes" else held(elements * scales, batch.dtype)
                right |= batch.y[where] == expected
            outcome += compared(
                batch.y[where], expected,
                lambda at, x=x, m=largest, of=of: (
                    float(x[at]), f"{of}, in a block whose largest magnitude is {m[at[0], 0]:g}"
                ),
                right=right, order=np.broadcast_to(largest, x.shape),
            )  # fmt: skip
        return outcome

    def facts(self) -> dict[str, object]:
        """Return what was inferred, by the names of `Certificate.inferred`."""
        rows = ordinary_blocks(self.fmt, 2)
        rows[0, 1], rows[1, 1] = math.nan, math.inf
        became: dict[str, object] = {}
        for index, name in enumerate(("nan", "infinities")):
            try:
                read = self.read(rows[[index]], self.carrier)
                scale = np.nan if read.scales is None else read.scales.flat[0]
                became[name] = _in_words(read.values.reshape(-1, self.fmt.block)[0], self.fmt.element.max * scale)
            except CallFailedError:
                became[name] = "an error"
        clamped = self.clamped()
        saturate = clamped.wrong == 0 if clamped.tried else "not tried"
        return {"scale_rule": rule_words(self.fmt, self.rule()), **became, "saturate": saturate}


def _in_words(y: Values, largest: float) -> str:
    """Return what the second value of a block became."""
    if np.isnan(y).all():
        return "its whole block becomes nan"
    if math.isnan(y[1]):
        return "nan"
    if math.isinf(y[1]):
        return "inf"
    if abs(y[1]) == largest:
        return "the largest element, at a scale that it makes"
    return "zero" if y[1] == 0 else f"a number, {y[1]:g}"
