"""Single values in blocks of known scale: a largest value in front makes it 1.

So a block format's elements are tried like any other cast. In an MX block the anchor is the largest power of two of the
element format, at which all four rules give the scale 1. In an NVFP4 block it is the largest element. One more row then
has the largest scale, which makes the tensor's scale 1.
"""

import math

import torch
from torch import Tensor

from plimsoll.certification.probing.arrays import Result
from plimsoll.certification.probing.conventions import SIDE, Call, CastConvention
from plimsoll.formats import BlockFormat, Format


def element_call(convention: CastConvention, fmt: Format | BlockFormat) -> tuple[Call, float]:
    """Return a call that rounds single values, and the largest magnitude it can try."""
    if not isinstance(fmt, BlockFormat):
        return convention.sized, math.inf
    block, limit = fmt.block, fmt.element.max if fmt.scale.signed else 2.0**fmt.element.max_exponent

    def anchored(x: Tensor) -> Result:
        count = x.numel()
        blocks = -(-count // (block - 1))
        rows = -(-blocks * block // (SIDE * SIDE)) * SIDE + SIDE  # whole multiples, with room for the largest scale
        room = torch.ones(rows * SIDE // block, block - 1, dtype=x.dtype)
        room.view(-1)[:count] = x.reshape(-1)
        # Values of a block format are put into blocks with the scale 1, and their magnitude must not change it.
        anchor = torch.full((room.shape[0], 1), limit, dtype=x.dtype)
        matrix = torch.cat([anchor, room], dim=1).reshape(rows, SIDE)
        if fmt.tensor_scale:
            matrix[-1, -block:] = fmt.element.max * fmt.scale.max
        result = convention.sized(matrix)
        elements = result.values.reshape(-1, block)[:, 1:].reshape(-1)[:count]
        return Result(values=elements.reshape(tuple(x.shape)), dtype=result.dtype)

    return anchored, limit
