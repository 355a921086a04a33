"""What a function made of blocks: their values and scales, and the rule that explains the scales."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plimsoll.certification.blocks.inputs import BlockClass, Blocks, blocks, ordinary_blocks
from plimsoll.certification.blocks.scales import RULES, expected_scales, explaining_scales, explains, rule_words
from plimsoll.certification.certificate import Counterexample, Outcome
from plimsoll.certification.probing.arrays import CallFailedError, Values, held
from plimsoll.certification.probing.conventions import SIDE, CastConvention, ReadBlocks
from plimsoll.certification.probing.shortest import shortest
from plimsoll.formats import BlockFormat
from plimsoll.formats.codec import Rounding

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBatch:
    """Blocks of one dtype with what the function made of them.

    Attributes:
        tried: The blocks.
        y: Values of the results.
        scales: Scale of each block, read from the result or found as the one that explains it; NaN if none does.
        dtype: Name of the results' dtype.
        visible: Whether the scales were read from the result.
    """

    tried: Blocks
    y: Values
    scales: Values
    dtype: str
    visible: bool


class BlockTrials:
    """Calls of a block format's cast or pack with blocks.

    Args:
        convention: The function.
        fmt: The block format.
        carriers: Dtypes that the function takes.
        roundings: Modes of which one gives each result.

    Attributes:
        carrier: The dtype for single blocks: float32 if the function takes it.
    """

    def __init__(
        self, convention: CastConvention, fmt: BlockFormat, carriers: list[str], roundings: tuple[Rounding, ...]
    ) -> None:
        self.convention = convention
        self.fmt = fmt
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
            scales = read.scales.reshape(-1)[:count] * read.tensor_scale
        visible = read.scales is not None
        return BlockBatch(tried=tried, y=y, scales=scales, dtype=read.dtype, visible=visible)

    def read(self, rows: Values, carrier: str) -> ReadBlocks:
        """Return what the function makes of blocks, given one a row."""
        return self.convention.blocks(self.matrix(rows, carrier))

    def matrix(self, rows: Values, carrier: str) -> Tensor:
        """Return blocks in a matrix of `SIDE` columns, filled up with ones.

        The last block of an NVFP4 matrix has the magnitude that makes the tensor's scale 1.
        """
        padding = -(len(rows) + 1) * self.fmt.block % (SIDE * SIDE) + self.fmt.block
        flat = np.concatenate([rows.reshape(-1), np.ones(padding)])
        if self.fmt.tensor_scale:
            flat[-1] = self.fmt.element.max * self.fmt.scale.max
        return torch.from_numpy(flat).to(getattr(torch, carrier)).reshape(-1, SIDE)

    def rule(self) -> str:
        """Return the rule that explains most scales, or "unknown"."""
        shares: dict[str, float] = {}
        for rule in RULES:
            right = [self._right(batch, rule)[batch.tried.classes != "range"] for batch in self.batches]
            shares[rule] = float(np.mean(np.concatenate(right)))
        best = max(shares, key=lambda rule: shares[rule])
        return best if shares[best] > 0.5 else "unknown"

    def _right(self, batch: BlockBatch, rule: str) -> Mask:
        """Return which blocks have the scale of a rule, or results that it explains where scales are not visible."""
        expected = expected_scales(self.fmt, rule, batch.tried.absmax)
        if batch.visible:
            return batch.scales == expected
        return explains(self.fmt, batch.tried.x, batch.y, expected, self.roundings, clamped=False)

    def compare_scales(self, rule: str, kind: BlockClass) -> Outcome:
        """Return how the scales of a class of blocks compare with those of a rule."""
        tried, wrong = 0, 0
        for batch in self.batches:
            where = batch.tried.classes == kind
            tried += int(np.count_nonzero(where))
            wrong += int(np.count_nonzero(where & ~self._right(batch, rule)))
        example = self._example(rule, kind) if wrong else None
        return Outcome(tried=tried, wrong=wrong, counterexample=example)

    def _example(self, rule: str, kind: BlockClass) -> Counterexample | None:
        for batch in self.batches:
            found = np.flatnonzero((batch.tried.classes == kind) & ~self._right(batch, rule))
            if not len(found):
                continue
            index = int(found[shortest(batch.tried.absmax[found])])
            largest = float(batch.tried.absmax[index])
            expected = float(expected_scales(self.fmt, rule, batch.tried.absmax[[index]])[0])
            got, of = float(batch.scales[index]), "among smaller values"
            if batch.visible:  # a block of the value alone is shorter, if it shows the fault too
                single = np.zeros((1, self.fmt.block))
                single[0, 0] = largest
                read = self.read(single, batch.tried.carrier)
                scale = float("nan") if read.scales is None else float(read.scales.flat[0]) * read.tensor_scale
                if scale != expected:
                    got, of = scale, "and zeros"
            explained = batch.visible or not np.isnan(got)
            return Counterexample(
                input=largest, expected=expected, got=got if explained else "no scale explains the results",
                note=f"{batch.tried.carrier}, the largest of a block {of}; results are scales",
            )  # fmt: skip
        return None

    def clamped(self) -> Outcome:
        """Return whether elements beyond the largest one, at their block's scale, became the largest one."""
        tried, wrong, example = 0, 0, None
        for batch in self.batches:
            with np.errstate(invalid="ignore", over="ignore"):
                limit = batch.scales[:, None] * self.fmt.element.max
                beyond = (np.abs(batch.tried.x) > limit) & (batch.tried.classes != "range")[:, None]
                largest = np.where(batch.tried.x < 0, -limit, limit)
            bad = beyond & (batch.y != largest)
            tried, wrong = tried + int(np.count_nonzero(beyond)), wrong + int(np.count_nonzero(bad))
            if example is None and bad.any():
                places = np.argwhere(bad)
                row, column = places[shortest(batch.tried.x[bad])]
                example = Counterexample(
                    input=float(batch.tried.x[row, column]), expected=float(largest[row, column]),
                    got=float(batch.y[row, column]),
                    note=f"{batch.tried.carrier}, in a block of scale {batch.scales[row]:g}",
                )  # fmt: skip
        return Outcome(tried=tried, wrong=wrong, counterexample=example)

    def values_in_range(self, rule: str) -> Outcome:
        """Return whether blocks at the ends of the scale's range have the values that their rule gives."""
        tried, wrong, example = 0, 0, None
        for batch in self.batches:
            where = batch.tried.classes == "range"
            x = batch.tried.x[where]
            if not len(x):
                continue
            scales = expected_scales(self.fmt, rule, batch.tried.absmax[where])[:, None]
            with np.errstate(divide="ignore", invalid="ignore"):
                quotient = np.where(scales > 0, x / scales, 0.0)
            right = np.zeros(x.shape, np.bool_)
            expected = np.zeros(x.shape)
            for rounding in self.roundings:
                elements = self.fmt.element.decode(self.fmt.element.encode(quotient, rounding, saturate=True))
                expected = elements * scales if batch.dtype == "codes" else held(elements * scales, batch.dtype)
                right |= batch.y[where] == expected
            tried, wrong = tried + len(x), wrong + int(np.count_nonzero(~right.all(axis=1)))
            if example is None and not right.all():
                bad = np.flatnonzero(~right.all(axis=1))
                row = int(bad[shortest(np.max(np.abs(x[bad]), axis=1))])
                column = int(np.flatnonzero(~right[row])[0])
                example = Counterexample(
                    input=float(x[row, column]), expected=float(expected[row, column]),
                    got=float(batch.y[where][row, column]),
                    note=f"{batch.tried.carrier}, in a block whose largest magnitude is {np.max(np.abs(x[row])):g}",
                )  # fmt: skip
        return Outcome(tried=tried, wrong=wrong, counterexample=example)

    def facts(self) -> dict[str, object]:
        """Return what was inferred, by the names of `Certificate.inferred`."""
        rows = ordinary_blocks(self.fmt, 2)
        rows[0, 1], rows[1, 1] = math.nan, math.inf
        became: dict[str, object] = {}
        for index, name in enumerate(("nan", "infinities")):
            try:
                read = self.read(rows[[index]], self.carrier)
                scale = np.nan if read.scales is None else read.scales.flat[0] * read.tensor_scale
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
