"""Single values in blocks whose scale is known: a largest value in front makes it 1 by every rule.

So a block format's elements are tried like any other cast. In an MX block the anchor is the largest power of two of the
element format, at which all four rules give the scale 1. In an NVFP4 block it is the largest element. One more row then
has the largest scale, which makes the tensor's scale 1.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from plimsoll.certification.probing.arrays import Result
from plimsoll.certification.probing.conventions import SIDE, Call, CastConvention
from plimsoll.formats import BlockFormat, Format


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchoredCall:
    """A call that rounds each value of a tensor as an element of a block with scale 1."""

    call: Call  # a call of the function under test
    fmt: BlockFormat  # the block format

    @property
    def limit(self) -> float:
        """Largest magnitude that does not change a block's scale."""
        return self.fmt.element.max if self.fmt.scale.signed else 2.0**self.fmt.element.max_exponent

    def __call__(self, x: Tensor) -> Result:
        """Return the values in the shape of `x`."""
        block = self.fmt.block
        flat = x.reshape(-1)
        blocks = -(-flat.numel() // (block - 1))
        rows = -(-blocks * block // (SIDE * SIDE)) * SIDE + SIDE  # whole multiples, with room for the largest scale
        room = torch.ones(rows * SIDE // block, block - 1, dtype=x.dtype)
        room.view(-1)[: flat.numel()] = flat
        anchor = torch.full((room.shape[0], 1), self.limit, dtype=x.dtype)
        matrix = torch.cat([anchor, room], dim=1).reshape(rows, SIDE)
        if self.fmt.tensor_scale:
            matrix[-1, -block:] = self.fmt.element.max * self.fmt.scale.max
        result = self.call(matrix)
        elements = result.values.reshape(-1, block)[:, 1:].reshape(-1)[: flat.numel()]
        return Result(values=elements.reshape(tuple(x.shape)), dtype=result.dtype)


def element_call(convention: CastConvention, fmt: Format | BlockFormat) -> tuple[Call, float]:
    """Return a call that rounds each value by itself, and the largest magnitude that it can try.

    Args:
        convention: The function under test.
        fmt: Its format. Values of a block format are put into blocks with the scale 1.
    """
    if not isinstance(fmt, BlockFormat):
        return convention.sized, math.inf
    anchored = AnchoredCall(call=convention.sized, fmt=fmt)
    return anchored, anchored.limit
