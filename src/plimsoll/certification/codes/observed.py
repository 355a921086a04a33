"""Results of an unpack for all codes, and for a block format for all codes under all scales."""

import math
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from plimsoll.certification.certificate import Counterexample, Outcome
from plimsoll.certification.codes.convention import CodeTensors, UnpackConvention
from plimsoll.certification.probing.arrays import Values, format_of_dtype, held, same
from plimsoll.certification.probing.conventions import SIDE
from plimsoll.formats import BlockFormat, Format

Mask = NDArray[np.bool_]


class Decoded:
    """Codes with what the function makes of them.

    Args:
        convention: The function.
        fmt: The format.
    """

    def __init__(self, convention: UnpackConvention, fmt: Format | BlockFormat) -> None:
        self.fmt = fmt
        self.element = fmt.element if isinstance(fmt, BlockFormat) else fmt
        self.given = _all_codes(fmt)
        result = convention(self.given)
        self.y = result.values
        self.dtype = result.dtype
        self.exact = self.given.values(fmt)
        self.expected = held(self.exact, self.dtype)

    @cached_property
    def elements(self) -> Values:
        """Values of the element codes."""
        return self.element.decode(self.given.codes)

    @cached_property
    def scales(self) -> Values:
        """The scale of each value; ones for element formats."""
        if not isinstance(self.fmt, BlockFormat) or self.given.scales is None:
            return np.ones(self.elements.shape)
        return np.repeat(self.fmt.scale.decode(self.given.scales), self.fmt.block, axis=-1)

    @property
    def smallest_normal(self) -> float:
        """Smallest normal value of the results' dtype."""
        fmt = format_of_dtype(self.dtype)
        return 0.0 if fmt is None else fmt.smallest_normal

    @cached_property
    def finite(self) -> Mask:
        """Where a finite element has a scale, and the product is in the range of the results' dtype."""
        return np.isfinite(self.elements) & np.isfinite(self.scales) & np.isfinite(self.expected)

    def compare(self, where: Mask) -> Outcome:
        """Return how results compare with the exact products, rounded once to the results' dtype."""
        wrong = np.argwhere(where & ~same(self.y, self.expected))
        tried = int(np.count_nonzero(where))
        if not len(wrong):
            return Outcome(tried=tried)
        row, column = wrong[0]  # codes and scales ascend: the first is the smallest
        code = int(self.given.codes[row, column])
        note = f"code 0x{code:x}"
        if isinstance(self.fmt, BlockFormat) and self.given.scales is not None:
            scale = int(self.given.scales[row, column // self.fmt.block])
            note = f"{note} = {self.elements[row, column]:g}, scale 0x{scale:02x} = {self.scales[row, column]:g}"
        example = Counterexample(
            input=code, expected=float(self.expected[row, column]), got=float(self.y[row, column]), note=note
        )
        return Outcome(tried=tried, wrong=len(wrong), counterexample=example)


def _all_codes(fmt: Format | BlockFormat) -> CodeTensors:
    if not isinstance(fmt, BlockFormat):
        codes = np.arange(max(1 << fmt.bits, SIDE)) % (1 << fmt.bits)
        return CodeTensors(codes=codes.reshape(-1, SIDE), scales=None, tensor_scale=1.0)
    # A scale with a sign is never negative: its sign bit is clear in every code tried.
    scales = np.arange(1 << (fmt.scale.bits - fmt.scale.signed))
    each = math.lcm(1 << fmt.element.bits, fmt.block)  # every code under every scale, in whole blocks
    blocks = each // fmt.block
    codes = np.tile(np.arange(each) % (1 << fmt.element.bits), len(scales))
    tensor_scale = 0.125 if fmt.tensor_scale else 1.0
    return CodeTensors(
        codes=codes.reshape(-1, SIDE), scales=np.repeat(scales, blocks).reshape(-1, SIDE // fmt.block),
        tensor_scale=tensor_scale,
    )  # fmt: skip
