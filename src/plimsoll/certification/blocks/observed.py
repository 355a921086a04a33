"""Values and scales of a function's blocks, and the rule that explains the scales."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from plimsoll.certification.blocks.inputs import BlockClass, Blocks, blocks, ordinary_blocks
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
from plimsoll.certification.probing.conventions import SIDE, CastConvention
from plimsoll.formats import BlockFormat, Format
from plimsoll.formats.codec import Rounding

# -- rules for a block's scale, in exact float64, and the scale behind its results -------------------------------------

_LARGEST = 127  # exponent of the largest E8M0 scale; the smallest has -127


def expected_scales(fmt: BlockFormat, rule: str, absmax: Values) -> Values:
    """Return a rule's scale for blocks of these magnitudes, at a tensor scale of 1.

    Args:
        fmt: The block format.
        rule: "floor", "ceil", "rceil" or "even".
        absmax: Largest magnitudes, none of them 0, Inf or NaN.
    """
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

    Args:
        fmt: The block format.
        x: Values, one block a row.
        y: Results, likewise.
        scale: Scale of each block.
        roundings: The modes of which one, for each value, gives its result.
        clamped: Whether elements beyond the largest one must become it. Default: True.
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
    """Return for each block a scale that explains its results; NaN without one.

    The tensor scale is 1.
    """
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
        """Return the blocks with a rule's scale, or with results that it explains.

        The results count where scales are not visible.
        """
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
